"""The pump: runs rounds for any number of threads over a fleet and its sockets.

Given a round (`run`), sends what it queued, and returns the time at which its verdict was known.
Under the GIL all the way, but for one stretch of `Mover.wait` per round: a thread that was woken
takes the GIL, as it must anyway, and parses what has arrived, for everyone.

Between the fleet, which makes no system call, and the mover, which knows no command, it also does
what is rare: opens connections, tells the fleet the time, closes what the fleet gave up.

Signal handlers run between waits, when this thread holds neither the mutex nor a role; and, as
`ssl` has it, inside the encryption, which may then take as long as they like. So nobody waits for
another thread's encryption without a limit: commands are left to it, and a look is put off.
"""

import contextlib
import os
import weakref
from functools import partial

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t
from posix.time cimport timespec

from redlock_fast._core.fleet cimport CHUNK, Fleet, link_at
from redlock_fast._core.io cimport (
    END_OF_FILE,
    LEAST_REPLY,
    MAX_CHANS,
    OPENING,
    SERVING,
    TALKING,
    Chan,
    Mover,
    Waiter,
    clock_ns,
    open_socket,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from redlock_fast._core.link cimport DIALING, DOWN, READY, Link, speaks, wire_out
from redlock_fast._core.op cimport Op
from redlock_fast._core.wire cimport Buf, Replies, buf_put

from redlock_fast.errors import ClosedError
from redlock_fast.resolve import ask

cdef extern from "<sys/socket.h>" nogil:
    int SOL_SOCKET, SO_ERROR
    int getsockopt(int, int, int, void*, unsigned int*)

cdef extern from "<time.h>" nogil:
    int nanosleep(const timespec*, timespec*)

cdef int64_t NEVER = 0x7FFFFFFFFFFFFFFF
# A thread that waits wakes so often for signals that another thread's poll may have swallowed.
cdef int64_t TICK_NS = 100_000_000
# A connection that was idle so long is looked at before anything is sent (DESIGN, rule 11).
cdef int64_t IDLE_NS = 5_000_000
# So long a thread sleeps: for others' commands, before it encrypts them all;
# or until another thread gets done.
cdef long NAP_NS = 10_000
# How long a follower waits for the reader to finish a sweep before it judges.
cdef int64_t SWEEP_NS = 5_000_000
# How long a thread that wants to look waits for another that parses or is inside OpenSSL.
cdef int64_t TURN_NS = 10_000_000

# Weak references to all pumps. Not a WeakSet, which is Python code: a signal handler that raises
# in the middle of it would leave a child with its parent's connections.
cdef set _pumps = set()


def _after_fork_in_child():
    for ref in list(_pumps):
        pump = ref()
        if pump is not None:
            (<Pump> pump).after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


@cython.final
cdef class Pump:
    """Drives a fleet for any number of threads.

    Args:
        fleet: the masters; nobody else may drive it.
    """

    def __cinit__(self, Fleet fleet not None):
        self.fleet = fleet
        self.n = fleet.n
        self.mover = Mover(fleet.n)
        self.tick_ns = TICK_NS
        self.dials = []
        fleet.ask = partial(ask, wake=weakref.ref(self))
        _pumps.add(weakref.ref(self, _pumps.discard))

    # -- a round -----------------------------------------------------------------------------------

    cpdef int64_t run(self, Op op) except -1:
        """Run one round to its end.

        Returns:
            The time of the verdict, in ns: read after the last byte was read and the GIL was held
            again.

        Raises:
            ClosedError: the client is closed, or was closed meanwhile.
            RuntimeError: called from a finalizer in the middle of this thread's own parse.
            RuntimeError: this is a child that a signal handler forked in the middle of the round.
            BaseException: whatever a signal handler raised. The round is open then; its owner must
                have it cleaned up.
        """
        cdef Waiter* w = NULL
        cdef Fleet fleet = self.fleet
        cdef int64_t now, until
        cdef bint first = True, drained = False
        cdef int forks = fleet.forks
        self._check()
        try:
            self.mover.open_kick()
        except OSError as exc:
            # No descriptor to wait with: nobody can be asked.
            fleet.refuse(op, exc.strerror, clock_ns())
            return op.start_ns
        self.mover.inside += 1
        try:
            now = self._freshen(clock_ns())
            fleet.start(op, now)
            self._post()
            if op.ended:
                return clock_ns()
            w = self.mover.new_waiter(<void*> op)
            while True:
                until = min(op.limit_ns, now + self.tick_ns)
                if drained:
                    until = now + SWEEP_NS
                self._aim(w, op, first)
                w.sweep = drained
                with nogil:
                    self.mover.wait(w, until)
                first = False
                w.poked = True      # as good as: it looks now
                if self.closed:
                    raise ClosedError("the client was closed while the call waited")
                now = clock_ns()
                self._look(now)
                # As late as can be, and always: a signal that came while bytes were sent did not
                # interrupt the poll, and what its handler raises has to come out here, where the
                # round can be cleaned up, not after a lock was returned to nobody.
                PyErr_CheckSignals()
                if fleet.forks != forks:
                    raise RuntimeError("this process was forked in the middle of the call")
                if op.ended:
                    break
                if op.k > 1:
                    fleet.refill(op, now)
                    self._post()
                    if op.ended:
                        break
                if now < op.limit_ns:
                    drained = False
                elif drained:
                    fleet.expire(op, now)
                    break
                else:
                    # Late; but first let everything be read that has arrived: a caller that was
                    # stalled must not take it for the master's silence.
                    drained = True
            return clock_ns()
        finally:
            if w != NULL:
                self.mover.end_waiter(w)
            if fleet.forks == forks:
                self.mover.inside -= 1
                if op.hoping or op.k > 1:
                    fleet.finish(op)

    cdef int _check(self) except -1:
        if self.closed:
            raise ClosedError("the client is closed")
        if self._within():
            raise RuntimeError(
                "cannot use the client from within its own parsing of replies, or its encryption"
            )
        return 0

    cdef bint _within(self) noexcept:
        """Is this a signal handler, or a finalizer, in the middle of this thread's own work?"""
        cdef unsigned long me
        if not self.mover.parsing and not self.sealing:
            return False
        me = PyThread_get_thread_ident()
        return self.mover.parsing and self.parser == me or self.sealing and self.sealer == me

    cpdef bint settle(self) except -1:
        """Send what the links have to say, without waiting for answers (clean-ups).

        Returns whether the driver has something to see to: news, or debts.
        """
        cdef Link link
        cdef bint something = len(self.fleet.news) > 0
        cdef int i
        for i in range(self.n):
            link = <Link> self.fleet.at[i]
            if speaks(link):
                self._post()
                self.mover.push()
                break
        return something or (not self.paying and self.fleet.owes())

    cdef int64_t _freshen(self, int64_t now) except -1:
        """Before a round: look at idle connections, judge, dial. Returns the time."""
        cdef Waiter* w
        if now - self.active_ns < IDLE_NS and (self.fleet.calm(now) or not self.fleet.overdue(now)):
            return now
        if now - self.active_ns >= self.fleet.patience_ns:
            self.back_ns = now
        self.active_ns = now
        # Drained before anyone is judged. (While another thread reads, it drains.)
        w = self.mover.new_waiter(NULL)
        w.sweep = True
        try:
            with nogil:
                self.mover.wait(w, now + SWEEP_NS)
        finally:
            self.mover.end_waiter(w)
        now = clock_ns()
        if self._look(now):
            self.fleet.judge(now)
            self._bury_down()
            self._dial(now)
            self._post()
        return clock_ns()

    cdef int _look(self, int64_t now) except -1:
        """Parse what has arrived, for everyone; deal with events and timers.

        Returns 0 when it could not: another thread parses, or encrypts, and stays at it. The next
        look sees what has arrived all the same.
        """
        cdef timespec pause = timespec(0, NAP_NS)
        cdef uint64_t todo
        cdef object raised = None
        while self.mover.parsing or self.sealing:
            if clock_ns() - now > TURN_NS:
                return 0
            with nogil:
                nanosleep(&pause, NULL)
        self.mover.parsing = True
        self.parser = PyThread_get_thread_ident()
        self.looks += 1
        try:
            todo = self.mover.collect()
            if todo:
                raised = self._parse(todo, now)
        finally:
            self.mover.parsed()
        self.active_ns = self.fleet.now_ns = now
        if self.back_ns:
            self.fleet.excuse(self.back_ns, now)
            self.back_ns = 0
        if self.mover.timer_ns == NEVER and not self.mover.behind and self.fleet.calm(now):
            self._wake_decided()
            if raised is not None:
                raise raised
            return 1
        if self.fleet.slots > self.n:
            self._settle_rivals(now)
        if self.fleet.next_ns() <= now:
            self.fleet.judge(now)
            self._bury_down()
            self._dial(now)
        self.fleet.serve(now)
        try:
            self._post()
        finally:
            self._wake_decided()
        if raised is not None:
            raise raised
        return 1

    cdef int _settle_rivals(self, int64_t now) except -1:
        """Whichever of two connections to a master answered first carries on."""
        cdef int i
        for i in range(self.n):
            if self.fleet.rival_won(i):
                self.mover.bury(i, True)
                self.fleet.promote(i, now)
                self.mover.move_chan(self.n + i, i, (<Link> self.fleet.links[i]).booked)
            elif self.fleet.rival_lost(i):
                self.mover.bury(self.n + i, True)
                self.fleet.drop_rival(i)
        return 0

    cdef object _parse(self, uint64_t todo, int64_t now):
        """Deal with what these chans have brought: bytes, ends, opened connections.

        Returns what a signal handler raised meanwhile, or None.
        """
        cdef Replies replies = self.fleet.replies
        cdef Link link
        cdef Chan* c
        cdef Chan* had[MAX_CHANS]       # when another takes its slot meanwhile, it is not looked at
        cdef uint64_t left = todo
        cdef object raised = None
        cdef int i, slots = self.mover.slots
        for i in range(slots):
            had[i] = self.mover.chans[i]
        try:
            if self.fleet.sealed:
                raised = self._unseal(todo, now)
            replies.begin()
            for i in range(slots):
                c = self.mover.chans[i]
                if not todo >> i & 1 or c == NULL or c != had[i]:
                    continue
                link = link_at(self.fleet, i)
                if link is None:
                    self.mover.bury(i, True)    # a rival that was dropped
                    continue
                if c.phase == OPENING:
                    if c.event:
                        self._opened(link, c, now)
                elif link.seal is not None:
                    if link.seal.plain.n:
                        link.feed(link.seal.plain.p, link.seal.plain.n, c.heard_ns or now)
                        link.seal.plain.n = 0
                elif c.taken.n:
                    link.feed(c.taken.p, c.taken.n, c.heard_ns if c.heard_ns else now)
                c.taken.n = 0
            replies.parse()
            for i in range(slots):
                c = self.mover.chans[i]
                if not todo >> i & 1 or c == NULL or c != had[i]:
                    left &= ~(<uint64_t> 1 << i)
                    continue
                link = link_at(self.fleet, i)
                if link is None:
                    self.mover.bury(i, True)
                    continue
                if link.lines:
                    link.book_lines(c.heard_ns if c.heard_ns else now)
                if link.seal is not None:
                    link.seal_broke(now)
                if c.event or c.phase != SERVING or c.sealed:
                    self._events(link, c, now)
                if link.state == DOWN:
                    self.mover.bury(i, True)
                    self.fleet.after_break(link)
                left &= ~(<uint64_t> 1 << i)
        finally:
            # No memory, say: the bytes are gone, and with them the order of the replies.
            for i in range(slots):
                if left >> i & 1 and self.mover.chans[i] != NULL and self.mover.chans[i] == had[i]:
                    link = link_at(self.fleet, i)
                    if link is None:
                        continue
                    link.lines = 0
                    self.fleet.broke(link, "PROTO", "cannot parse replies", now)
                    self.mover.bury(i, True)
        return raised

    cdef object _unseal(self, uint64_t todo, int64_t now):
        """Take what has arrived out of its records. Returns what a signal handler raised."""
        cdef Link link
        cdef Chan* c
        cdef object raised = None
        cdef int i
        self.sealing = True
        self.sealer = PyThread_get_thread_ident()
        try:
            for i in range(self.mover.slots):
                c = self.mover.chans[i]
                if not todo >> i & 1 or c == NULL or c.taken.n == 0:
                    continue
                link = link_at(self.fleet, i)
                if link is None or link.seal is None:
                    continue
                try:
                    link.unseal(c.taken.p[:c.taken.n], now)
                except BaseException as exc:
                    raised = exc
        finally:
            self.sealing = False
        return raised

    cdef object _seal(self):
        """Put what the links have to say into records. Returns what a signal handler raised.

        A group commit: whoever finds somebody at it leaves that one what is there.
        """
        cdef Link link
        cdef object raised = None
        cdef timespec pause = timespec(0, NAP_NS)
        cdef int i
        if self.sealing or self.gathering:
            self.unsealed = True
            return None
        if self.mover.inside > 1:
            # Each time OpenSSL is called another thread may take the GIL, which costs more than
            # what is done: let the others queue first, and do it once for all.
            self.gathering = True
            with nogil:
                nanosleep(&pause, NULL)
            self.gathering = False
            if self.sealing:
                self.unsealed = True
                return None
        self.sealing = True
        self.sealer = PyThread_get_thread_ident()
        try:
            while True:
                self.owing = self.owing or self.unsealed
                self.unsealed = False
                for i in range(self.fleet.slots):
                    link = link_at(self.fleet, i)
                    if link is None or link.seal is None or not (link.out.n or link.seal.due):
                        continue
                    try:
                        link.encrypt(self.fleet.now_ns)
                    except BaseException as exc:
                        raised = exc
                    if link.state == DOWN and link_at(self.fleet, i) is link:
                        self.mover.bury(i, True)
                        self.fleet.after_break(link)
                        self._wake_decided()
                if not self.unsealed:
                    break
        finally:
            self.sealing = False
        return raised

    @cython.linetrace(False)      # holds the mutex; a trace function may hand over the GIL
    cdef int _events(self, Link link, Chan* c, int64_t now) except -1:
        """A chan had an event, or its link is still greeting."""
        cdef int err
        pthread_mutex_lock(&self.mover.mu)
        if c.event and self.mover.polling:
            self.mover.kick()   # whoever reads now has left it out of its set
        c.event = False
        err = c.err
        if link.state == READY:
            if c.sealed:
                c.extra = link.seal.extra
                # The rest of an unfinished reply may be short.
                c.rest = min(link.part.n, LEAST_REPLY - 1)
                if c.rest and c.inb.n:
                    c.ahead += 1        # it may be there already
                    c.rest = LEAST_REPLY - 1
            if c.phase != SERVING or c.sealed:
                # Not every line of the greeting, nor all that a record can hold, was a reply.
                c.lines = link.booked + c.ahead
            c.phase = SERVING
        pthread_mutex_unlock(&self.mover.mu)
        if link.state != DOWN and err:
            if err == END_OF_FILE:
                link.broke("closed", "connection closed by the server", now)
            else:
                link.broke("closed", os.strerror(err), now)
        return 0

    @cython.linetrace(False)      # holds the mutex; a trace function may hand over the GIL
    cdef int _opened(self, Link link, Chan* c, int64_t now) except -1:
        """The connect has come to an end."""
        cdef int err = 0
        cdef unsigned int size = sizeof(err)
        if getsockopt(c.fd, SOL_SOCKET, SO_ERROR, &err, &size) != 0:
            err = errno
        if err:
            link.broke("refused", os.strerror(err), now)
            return 0
        link.connected(now)
        pthread_mutex_lock(&self.mover.mu)
        c.phase = TALKING
        pthread_mutex_unlock(&self.mover.mu)
        return 0

    cdef int _dial(self, int64_t now) except -1:
        """Open connections to the masters that are due."""
        cdef uint64_t due = self.fleet.due(now)
        cdef Link link
        cdef int i
        if not due:
            return 0
        for i in range(self.fleet.slots):
            # A connect gives the GIL up, so another thread may have been here meanwhile.
            if due >> i & 1:
                link = link_at(self.fleet, i)
                if link is not None and (link.state == DOWN or link.moves()):
                    self._dial_one(link, i, now)
                    while link.moves() and link_at(self.fleet, i) is link:
                        self._dial_one(link, i, now)    # the next address
        return 0

    cdef int _dial_one(self, Link link, int slot, int64_t now) except -1:
        cdef object place, sock = None
        cdef str local
        cdef bint opened
        place = self.fleet.place_to_dial(link, now)
        if place is None:
            return 0
        try:
            sock, opened, local = open_socket(place, self.dials)
            # These calls give the GIL up: another thread may have dropped this link meanwhile, or
            # torn all down. From here to the end nothing does.
            if (
                self.torn
                or link_at(self.fleet, slot) is not link
                or link.state != DIALING
                or self.mover.chans[slot] != NULL
            ):
                sock.close()    # given up meanwhile
                return 0
            link.local = local
            self.mover.open_chan(
                slot, sock.fileno(), link.promised, link.options.tls is not None, opened
            )
            sock.detach()
        except BaseException as exc:
            if sock is not None:
                sock.close()
            text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            self.fleet.broke(link, "refused", text, now)
            if not isinstance(exc, (OSError, MemoryError)):
                raise
        finally:
            if sock in self.dials:
                self.dials.remove(sock)
        return 0

    cdef int _bury_down(self) except -1:
        """Close what the fleet has given up."""
        cdef Link link
        cdef int i
        for i in range(self.mover.slots):
            if self.mover.chans[i] != NULL:
                link = link_at(self.fleet, i)
                if link is None or link.state == DOWN:
                    self.mover.bury(i, True)
        return 0

    @cython.linetrace(False)      # holds the mutex; a trace function may hand over the GIL
    cdef int _post(self) except -1:
        """Take the links' bytes over, in their order."""
        cdef Link link
        cdef Chan* c
        cdef int i
        cdef Buf* out
        cdef object raised = self._seal() if self.fleet.sealed else None
        cdef int64_t timer = self.fleet.next_ns()
        cdef int slots = self.fleet.slots
        pthread_mutex_lock(&self.mover.mu)
        self.mover.slots = slots if slots > self.mover.slots else self.mover.slots
        for i in range(slots):
            link = link_at(self.fleet, i)
            c = self.mover.chans[i]
            if c == NULL or link is None:
                continue
            out = wire_out(link)
            if out.n:
                if c.pend.n == 0:
                    c.pend, out[0] = out[0], c.pend
                elif buf_put(&c.pend, out.p, out.n) != 0:
                    c.err = END_OF_FILE
                    c.event = True
                    self.mover.alert = True
                out.n = 0
                self.mover.pending = True
            link.unsent = c.pend.n + c.fly.n - c.sent
            link.stuck = c.stuck
        if timer < self.mover.timer_ns and self.mover.polling:
            self.mover.kick()
        self.mover.timer_ns = timer
        pthread_mutex_unlock(&self.mover.mu)
        if self.owing:
            # Of these bytes some are another thread's, which waits for answers already.
            self.owing = False
            self.mover.push()
        if raised is not None:
            raise raised
        return 0

    @cython.linetrace(False)      # holds the mutex; a trace function may hand over the GIL
    cdef int _wake_decided(self) except -1:
        """Wake the threads whose rounds were decided, or changed, by this thread's look.

        Also the one that reads, and those that are just about to wait: what they wait for may not
        be what they were told before.
        """
        cdef Waiter* w = self.mover.newest
        cdef Waiter* woken = NULL
        while w != NULL and not self._concerned(w):
            w = w.older
        if w == NULL:
            return 0
        pthread_mutex_lock(&self.mover.mu)
        while w != NULL:
            if self._concerned(w):
                w.poked = True
                if w.linked:
                    self.mover.unlink(w)
                    w.next = woken
                    woken = w
                elif w == self.mover.reader:
                    self.mover.kick()
            w = w.older
        pthread_mutex_unlock(&self.mover.mu)
        self.mover.wake(woken)
        return 0

    cdef bint _concerned(self, Waiter* w) noexcept:
        return w.op != NULL and not w.poked and ((<Op> w.op).ended or (<Op> w.op).nudged)

    cdef void _aim(self, Waiter* w, Op op, bint first) noexcept:
        """When is it worth to look? A quorum of answers first, then any further one."""
        cdef Link link
        cdef int i, marks = 0
        cdef int64_t mark
        cdef bint part = False
        w.poked = False
        op.nudged = False
        for i in range(self.n):
            mark = -1
            if not (op.closed | op.hoping) >> i & 1 and op.asked >> i & 1:
                if op.parts[i].queued >= op.k:
                    if op.parts[i].owed:
                        mark = op.parts[i].end
                else:
                    # A batch that has more to send, as answers come in.
                    link = <Link> self.fleet.at[i]
                    part = True
                    mark = link.booked + 1
                    if op.parts[i].owed:
                        mark = min(op.parts[i].end, link.booked + CHUNK)
            w.mark[i] = mark
            if mark >= 0:
                marks += 1
        if first and not part:
            w.want = max(1, min(self.n // 2 + 1, marks))
        else:
            w.want = 1

    # -- without a round, and the end --------------------------------------------------------------

    def idle(self, int64_t timeout_ns):
        """Without a round: move bytes, deal with what comes in, for `timeout_ns` at most."""
        self._check()
        with contextlib.suppress(OSError):
            self.mover.open_kick()
        self._idle(timeout_ns)

    def last_call(self, int64_t timeout_ns):
        """The same for a client that is being closed."""
        self._idle(timeout_ns)

    cdef int _idle(self, int64_t timeout_ns) except -1:
        cdef int64_t now = clock_ns()
        cdef Waiter* w
        if self.mover.kick_fd < 0:
            return 0
        w = self.mover.new_waiter(NULL)
        w.sweep = timeout_ns <= 0
        w.mark[0] = NEVER
        try:
            self.fleet.judge(now)
            self._bury_down()
            self._dial(now)
            self._post()
            with nogil:
                self.mover.wait(w, now + max(timeout_ns, SWEEP_NS if w.sweep else 0))
        finally:
            self.mover.end_waiter(w)
        PyErr_CheckSignals()
        if not self._within():      # closed by a signal handler that came in the middle
            self._look(clock_ns())
        self.mover.push()
        return 0

    def shut(self):
        """Refuse new rounds, and end the waiting ones with ClosedError."""
        self.closed = True
        self.mover.poke_all()

    def tear_down(self):
        """Close the connections, in good order: what was sent is delivered."""
        cdef int i
        self.torn = True
        for i in range(self.mover.slots):
            self.mover.bury(i, False)
        self.mover.shut_kick()

    def wake(self):
        """An answer has come for a dial: let whoever reads look, or the next one who does."""
        pthread_mutex_lock(&self.mover.mu)
        self.mover.alert = True
        if self.mover.polling:
            self.mover.kick()
        pthread_mutex_unlock(&self.mover.mu)

    @property
    def sends(self):
        """System calls that sent something."""
        return self.mover.sends

    @property
    def callers(self):
        """Threads inside `run`."""
        return self.mover.inside

    def after_fork(self):
        """In a forked child: start as new, and leave the parent's connections alone."""
        self.mover.forget()
        for sock in self.dials:
            sock.close()
        self.dials.clear()
        self.active_ns = 0
        self.paying = False
        self.gathering = self.sealing = self.unsealed = self.owing = False
        self.fleet.after_fork()
