"""The pump: moves bytes between links and sockets, and waits. The only code that runs without the
GIL, and the only one below the facades that makes system calls or reads the clock.

Given a round (`run`), sends what it queued, and returns the time at which its verdict was known.
One connection per master, shared by all threads:

* Sending is a group commit: callers put bytes into `pend` under the mutex; who finds nobody
  sending sends until nothing is left.
* One thread at a time has the reading role. Without the GIL it polls, reads, and counts lines; it
  wakes the threads whose rounds have enough of them, and hands the role on when its own has.
* A thread that was woken takes the GIL, as it must anyway, and parses what has arrived, for
  everyone. So a round costs one hand-over of the GIL.

A count of lines is a hint when to look and decides nothing; links do, when they are fed.

Laws: the mutex is never held while taking the GIL, nor across a call that blocks; with both held,
nothing of Python is allocated or freed. Reader and flusher use a `Chan` outside the mutex, so a
dead one is freed, and its descriptor closed, only when neither can have it any more. Signal
handlers run between waits, when this thread holds neither the mutex nor a role.
"""

import os
import socket
import weakref

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from libc.errno cimport EAGAIN, EINPROGRESS, EINTR, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memchr, memset
from posix.time cimport timespec
from posix.unistd cimport close, read, write

from redlock_fast._core.fleet cimport CHUNK, Fleet
from redlock_fast._core.link cimport DOWN, READY, Link
from redlock_fast._core.op cimport MAX_MASTERS, Op
from redlock_fast._core.wire cimport Replies, buf_free, buf_put

from redlock_fast.errors import ClosedError

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef extern from "<semaphore.h>" nogil:
    int sem_init(sem_t*, int, unsigned int)
    int sem_destroy(sem_t*)
    int sem_post(sem_t*)
    int sem_wait(sem_t*)
    int sem_clockwait(sem_t*, int, const timespec*)

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int POLLIN, POLLOUT
    int ppoll(pollfd*, unsigned long, const timespec*, const void*)

cdef extern from "<sys/socket.h>" nogil:
    int SOL_SOCKET, SO_ERROR, SO_LINGER, MSG_DONTWAIT, MSG_NOSIGNAL
    struct linger:
        int l_onoff
        int l_linger
    int getsockopt(int, int, int, void*, unsigned int*)
    int setsockopt(int, int, int, const void*, unsigned int)
    ssize_t send(int, const void*, size_t, int)
    ssize_t recv(int, void*, size_t, int)

cdef extern from "<sys/eventfd.h>" nogil:
    int EFD_NONBLOCK, EFD_CLOEXEC
    int eventfd(unsigned int, int)

cdef extern from "<sys/random.h>" nogil:
    ssize_t getrandom(void*, size_t, unsigned int)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<time.h>" nogil:
    int CLOCK_MONOTONIC
    int CLOCK_BOOTTIME
    int clock_gettime(int, timespec*)

cdef enum:
    RX_SIZE = 64 * 1024         # bytes that one recv may bring
    MAX_INB = 1024 * 1024       # bytes read and not parsed; past it the reader leaves the rest
    MAX_TAIL = 64 * 1024        # bytes without a line feed that the link has to see
    END_OF_FILE = -1            # in Chan.err

# Why a wait ended.
cdef enum:
    WOKEN = 0       # enough has arrived
    TIMEOUT = 1
    INTERRUPTED = 2
    ALERT = 3       # an event, a timer, or a full buffer: the GIL has to look

cdef int64_t NEVER = 0x7FFFFFFFFFFFFFFF
# A thread that waits wakes so often for signals that another thread's poll may have swallowed.
cdef int64_t TICK_NS = 100_000_000
# A connection that was idle so long is looked at before anything is sent (DESIGN, rule 11).
cdef int64_t IDLE_NS = 5_000_000
# How long a follower waits for the reader to finish a sweep before it judges.
cdef int64_t SWEEP_NS = 5_000_000


cdef int64_t clock_ns() noexcept nogil:
    """Nanoseconds of a monotonic clock that runs through a suspend."""
    cdef timespec ts
    clock_gettime(CLOCK_BOOTTIME, &ts)
    return <int64_t> ts.tv_sec * 1_000_000_000 + ts.tv_nsec


def now_ns():
    """The clock of all deadlines, in whole nanoseconds (`CLOCK_BOOTTIME`)."""
    return clock_ns()


def draw_tokens(int count):
    """`count` fresh tokens: 20 bytes from the operating system each, as 40 hex digits (bytes).

    Nothing is drawn ahead, so nothing can be shared with a forked child. `getrandom(2)` with the
    GIL kept: a pair costs one call, and `os.urandom` would hand the GIL over.
    """
    cdef list tokens = []
    cdef unsigned char raw[240]
    cdef char text[40]
    cdef const char* digits = b"0123456789abcdef"
    cdef int i, j, take
    while count > 0:
        take = min(count, 12)       # up to 256 bytes the call is never interrupted or short
        if getrandom(raw, take * 20, 0) != take * 20:
            raise OSError(errno, "getrandom failed")
        for i in range(take):
            for j in range(20):
                text[2 * j] = digits[raw[20 * i + j] >> 4]
                text[2 * j + 1] = digits[raw[20 * i + j] & 15]
            tokens.append(text[:40])
        count -= take
    return tokens


# -- the waiting primitive: a semaphore remembers a post that comes before the wait --------------

cdef inline int _park(sem_t* sem, int64_t until) noexcept nogil:
    """0: posted. Else errno: ETIMEDOUT at `until` on our clock, or EINTR."""
    cdef timespec ts
    cdef int64_t at
    cdef int64_t left = until - clock_ns()
    if left < 0:
        left = 0
    clock_gettime(CLOCK_MONOTONIC, &ts)
    at = <int64_t> ts.tv_sec * 1_000_000_000 + ts.tv_nsec + left
    ts.tv_sec = at // 1_000_000_000
    ts.tv_nsec = at % 1_000_000_000
    if sem_clockwait(sem, CLOCK_MONOTONIC, &ts) == 0:
        return 0
    return errno


# -- connections ---------------------------------------------------------------------------------

cdef Chan* _new_chan(int fd, int64_t lines) noexcept:
    cdef Chan* c = <Chan*> calloc(1, sizeof(Chan))
    if c == NULL:
        return NULL
    c.rx = <char*> malloc(RX_SIZE)
    if c.rx == NULL:
        free(c)
        return NULL
    c.fd = fd
    c.lines = lines
    return c


cdef void _free_chan(Chan* c) noexcept nogil:
    if c.fd >= 0:
        close(c.fd)
    buf_free(&c.pend)
    buf_free(&c.fly)
    buf_free(&c.inb)
    buf_free(&c.taken)
    free(c.rx)
    free(c)


cdef void _swallow(Chan* c, int64_t now) noexcept nogil:
    """Keep what the reader got, and count its lines."""
    cdef const char* at = c.rx
    cdef const char* end = c.rx + c.got
    cdef const char* nl
    if buf_put(&c.inb, c.rx, c.got) != 0:
        c.err = END_OF_FILE
        c.event = True
        return
    while True:
        nl = <const char*> memchr(at, c'\n', end - at)
        if nl == NULL:
            break
        c.lines += 1
        c.heard_ns = now
        c.tail = 0
        at = nl + 1
        if c.phase != SERVING:
            c.event = True
    c.tail += end - at
    if c.tail > MAX_TAIL:
        c.event = True


# -- the pump ------------------------------------------------------------------------------------

cdef object _pumps = weakref.WeakSet()


def _after_fork_in_child():
    for pump in list(_pumps):
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
        self.kick_fd = -1
        pthread_mutex_init(&self.mu, NULL)
        self.timer_ns = NEVER
        _pumps.add(self)

    def __dealloc__(self):
        cdef int i
        cdef Waiter* w
        for i in range(MAX_MASTERS):
            if self.chans[i] != NULL:
                _free_chan(self.chans[i])
        self._reap()
        while self.spare != NULL:
            w = self.spare
            self.spare = w.next
            sem_destroy(&w.sem)
            free(w)
        if self.kick_fd >= 0:
            close(self.kick_fd)
        pthread_mutex_destroy(&self.mu)

    # -- a round, under the GIL ------------------------------------------------------------------

    cpdef int64_t run(self, Op op) except -1:
        """Run one round to its end.

        Returns:
            The time of the verdict, in ns: read after the last byte was read and the GIL was held
            again.

        Raises:
            ClosedError: the client is closed, or was closed meanwhile.
            RuntimeError: called from a finalizer in the middle of this thread's own parse.
            BaseException: whatever a signal handler raised. The round is open then; its owner must
                have it cleaned up.
        """
        cdef Waiter* w = NULL
        cdef Fleet fleet = self.fleet
        cdef int64_t now, until
        cdef int rc
        cdef bint first = True, drained = False
        self._check()
        self.inside += 1
        try:
            now = self._freshen(clock_ns())
            fleet.start(op, now)
            self._post()
            if op.ended:
                return clock_ns()
            w = self._new_waiter(op)
            while True:
                until = min(op.limit_ns, now + TICK_NS)
                if drained:
                    until = now + SWEEP_NS
                self._aim(w, op, first)
                w.sweep = drained
                with nogil:
                    rc = self._wait(w, until)
                first = False
                if rc == INTERRUPTED or rc == TIMEOUT:
                    PyErr_CheckSignals()
                if self.closed:
                    raise ClosedError("the client was closed while the call waited")
                now = clock_ns()
                self._look(now)
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
            self.inside -= 1
            if w != NULL:
                self._end_waiter(w)
            if op.hoping or op.k > 1:
                fleet.finish(op)
            self.active_ns = clock_ns()

    def _check(self):
        if self.closed:
            raise ClosedError("the client is closed")
        if self.parsing and self.parser == <unsigned long> PyThread_get_thread_ident():
            raise RuntimeError("cannot use the client from within its own parsing of replies")
        if self.kick_fd < 0:
            self.kick_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
            if self.kick_fd < 0:
                raise OSError(errno, os.strerror(errno))

    cpdef bint settle(self) except -1:
        """Send what the links have to say, without waiting for answers (clean-ups).

        Returns whether the driver has something to see to: news, or debts.
        """
        cdef Link link
        cdef bint something = len(self.fleet.news) > 0
        cdef int i
        for i in range(self.n):
            link = <Link> self.fleet.links[i]
            if link.out.n:
                self._post()
                self._push()
                break
        return something or self.fleet.owes()

    cdef void _push(self) noexcept:
        with nogil:
            pthread_mutex_lock(&self.mu)
            self._flush()
            pthread_mutex_unlock(&self.mu)

    cdef int64_t _freshen(self, int64_t now) except -1:
        """Before a round: look at idle connections, judge, dial. Returns the time."""
        cdef Waiter* w
        if now - self.active_ns < IDLE_NS and not self.fleet.overdue(now):
            return now
        self.active_ns = now
        # Drained before anyone is judged. (While another thread reads, it drains.)
        w = self._new_waiter(None)
        w.sweep = True
        try:
            with nogil:
                self._wait(w, now + SWEEP_NS)
        finally:
            self._end_waiter(w)
        now = clock_ns()
        self._look(now)
        self.fleet.judge(now)
        self._bury_down()
        self._dial(now)
        self._post()
        return clock_ns()

    cdef int _look(self, int64_t now) except -1:
        """Parse what has arrived, for everyone; deal with events and timers."""
        cdef Chan* c
        cdef int i
        cdef uint32_t todo = 0
        while self.parsing:
            # Another thread lost the GIL inside hiredis: very rare.
            if self.parser == <unsigned long> PyThread_get_thread_ident():
                raise RuntimeError("cannot use the client from within its own parsing of replies")
            with nogil:
                sched_yield()
        self.parsing = True
        self.parser = PyThread_get_thread_ident()
        self.looks += 1
        try:
            pthread_mutex_lock(&self.mu)
            self.alert = False
            for i in range(self.n):
                c = self.chans[i]
                if c != NULL and (c.event or c.inb.n):
                    todo |= <uint32_t> 1 << i
                    c.taken, c.inb = c.inb, c.taken
            pthread_mutex_unlock(&self.mu)
            if todo:
                self._parse(todo, now)
        finally:
            self.parsing = False
            if self.graves != NULL:
                pthread_mutex_lock(&self.mu)
                c = self.graves
                while c != NULL:
                    c.parsed = False
                    c = c.next
                self._reap()
                pthread_mutex_unlock(&self.mu)
        self.fleet.now_ns = now
        if self.fleet.next_ns() <= now:
            self.fleet.judge(now)
            self._bury_down()
            self._dial(now)
        self.fleet.serve(now)
        self._post()
        self._wake_decided()
        return 0

    cdef int _parse(self, uint32_t todo, int64_t now) except -1:
        """Deal with what these chans have brought: bytes, ends, opened connections."""
        cdef Replies replies = self.fleet.replies
        cdef Link link
        cdef Chan* c
        cdef int i, err
        replies.begin()
        for i in range(self.n):
            c = self.chans[i]
            if not todo >> i & 1 or c == NULL:
                continue
            link = <Link> self.fleet.links[i]
            if c.phase == OPENING:
                if c.event:
                    self._opened(link, c, now)
            elif c.taken.n:
                link.feed(c.taken.p, c.taken.n, c.heard_ns if c.heard_ns else now)
            c.taken.n = 0
        try:
            replies.parse()
        except BaseException:
            # The bytes are gone, and with them the order of the replies.
            for i in range(self.n):
                link = <Link> self.fleet.links[i]
                if todo >> i & 1 and link.lines:
                    link.lines = 0
                    link.broke("PROTO", "cannot parse replies", now)
            self._bury_down()
            raise
        for i in range(self.n):
            c = self.chans[i]
            if not todo >> i & 1 or c == NULL:
                continue
            link = <Link> self.fleet.links[i]
            if link.lines:
                link.book_lines(c.heard_ns if c.heard_ns else now)
            if c.event or c.phase != SERVING:
                pthread_mutex_lock(&self.mu)
                c.event = False
                err = c.err
                if link.state == READY:
                    c.phase = SERVING
                pthread_mutex_unlock(&self.mu)
                if link.state != DOWN and err:
                    if err == END_OF_FILE:
                        link.broke("closed", "connection closed by the server", now)
                    else:
                        link.broke("closed", os.strerror(err), now)
            if link.state == DOWN:
                self._bury(i, True)
                self.fleet.after_break(link)
        return 0

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
        pthread_mutex_lock(&self.mu)
        c.phase = TALKING
        pthread_mutex_unlock(&self.mu)
        return 0

    cdef int _dial(self, int64_t now) except -1:
        """Open connections to the masters that are due."""
        cdef uint32_t due = self.fleet.due(now)
        cdef int i
        if not due:
            return 0
        for i in range(self.n):
            if due >> i & 1:
                self._dial_one(<Link> self.fleet.links[i], now)
        if self.polling:
            self._kick()        # the reader has to take them into its set
        return 0

    cdef int _dial_one(self, Link link, int64_t now) except -1:
        cdef Chan* c = NULL
        cdef object options = link.options
        cdef int err = 0
        link.dialing(now, now + self.fleet.connect_ns)
        try:
            with socket.socket(
                options.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            ) as sock:
                if options.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                err = sock.connect_ex(options.sockaddr)
                if err and err != EINPROGRESS:
                    raise OSError(err, os.strerror(err))
                c = _new_chan(sock.fileno(), link.promised)
                if c == NULL:
                    raise MemoryError("no memory for a connection")
                sock.detach()
        except (OSError, MemoryError) as exc:
            text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            self.fleet.broke(link, "refused", text, now)
            return 0
        c.event = err == 0
        pthread_mutex_lock(&self.mu)
        self.chans[link.index] = c
        if c.event:
            self.alert = True
        pthread_mutex_unlock(&self.mu)
        return 0

    def _bury_down(self):
        """Close what the fleet has given up."""
        cdef int i
        for i in range(self.n):
            if self.chans[i] != NULL and (<Link> self.fleet.links[i]).state == DOWN:
                self._bury(i, True)

    cdef void _bury(self, int i, bint abort) noexcept:
        """Take a connection out of use; it is closed when nobody can have its descriptor any more.

        `abort`: discard what is in flight (RST), so that a late SET has less of a chance.
        """
        cdef Chan* c = self.chans[i]
        cdef linger hard
        if c == NULL:
            return
        if abort:
            hard.l_onoff = 1
            hard.l_linger = 0
            setsockopt(c.fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard))
        pthread_mutex_lock(&self.mu)
        self.chans[i] = NULL
        c.polled = self.polling
        c.flown = self.flushing
        c.parsed = self.parsing
        c.next = self.graves
        self.graves = c
        self._reap()
        pthread_mutex_unlock(&self.mu)

    cdef int _post(self) except -1:
        """Take the links' bytes over, in their order."""
        cdef Link link
        cdef Chan* c
        cdef int i
        cdef int64_t timer = self.fleet.next_ns()
        pthread_mutex_lock(&self.mu)
        for i in range(self.n):
            link = <Link> self.fleet.links[i]
            c = self.chans[i]
            if c == NULL:
                continue
            if link.out.n:
                if c.pend.n == 0:
                    c.pend, link.out = link.out, c.pend
                elif buf_put(&c.pend, link.out.p, link.out.n) != 0:
                    c.err = END_OF_FILE
                    c.event = True
                    self.alert = True
                link.out.n = 0
                self.pending = True
            link.unsent = c.pend.n + c.fly.n - c.sent
        if timer < self.timer_ns and self.polling:
            self._kick()
        self.timer_ns = timer
        pthread_mutex_unlock(&self.mu)
        return 0

    cdef int _wake_decided(self) except -1:
        """Wake the threads whose rounds were decided, or changed, by this thread's look."""
        cdef Waiter* w
        cdef Waiter* after
        cdef Waiter* woken = NULL
        if self.first == NULL:
            return 0
        pthread_mutex_lock(&self.mu)
        w = self.first
        while w != NULL:
            after = w.next
            if w.op != NULL and ((<Op> w.op).ended or (<Op> w.op).nudged):
                w.poked = True
                self._unlink(w)
                w.next = woken
                woken = w
            w = after
        pthread_mutex_unlock(&self.mu)
        while woken != NULL:
            w = woken
            woken = w.next
            sem_post(&w.sem)
        return 0

    cdef Waiter* _new_waiter(self, Op op) except NULL:
        cdef Waiter* w = self.spare
        cdef int i
        if w != NULL:
            self.spare = w.next
        else:
            w = <Waiter*> calloc(1, sizeof(Waiter))
            if w == NULL:
                raise MemoryError("no memory for a waiting thread")
            sem_init(&w.sem, 0, 0)
        w.op = NULL if op is None else <void*> op
        w.want = 1
        w.linked = False
        w.promoted = False
        w.poked = False
        w.sweep = False
        w.next = NULL
        w.prev = NULL
        for i in range(self.n):
            w.mark[i] = -1
        return w

    cdef void _end_waiter(self, Waiter* w) noexcept:
        w.op = NULL
        w.next = self.spare
        self.spare = w

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
                if op.queued[i] >= op.k:
                    if op.owed[i]:
                        mark = op.end[i]
                else:
                    # A batch that has more to send, as answers come in.
                    link = <Link> self.fleet.links[i]
                    part = True
                    mark = link.booked + 1
                    if op.owed[i]:
                        mark = min(op.end[i], link.booked + CHUNK)
            w.mark[i] = mark
            if mark >= 0:
                marks += 1
        if first and not part:
            w.want = max(1, min(self.n // 2 + 1, marks))
        else:
            w.want = 1

    # -- waiting, without the GIL ----------------------------------------------------------------
    # Every method from here on is entered and left with the mutex held, but for _wait.

    cdef int _wait(self, Waiter* w, int64_t until) noexcept nogil:
        """Send, then wait until enough has arrived for `w`, or `until`, or the GIL has to look."""
        cdef bint lead = False
        cdef int rc = WOKEN
        cdef int err
        pthread_mutex_lock(&self.mu)
        self._flush()
        while not self._satisfied(w):
            if self.alert:
                self.alert = False
                rc = ALERT
                break
            if lead or not self.leading:
                lead = True
                self.leading = True
                rc = self._read_once(w, until)
                if rc != WOKEN:
                    break
                continue
            # Deciding to follow and being linked happen under one hold of the mutex, so no wake-up
            # can be lost; and the semaphore remembers one that comes before the wait.
            self._link(w)
            if w.sweep:
                self._kick()
            pthread_mutex_unlock(&self.mu)
            err = _park(&w.sem, until)
            pthread_mutex_lock(&self.mu)
            if err != 0:
                if w.linked:
                    self._unlink(w)
                    rc = INTERRUPTED if err == EINTR else TIMEOUT
                    break
                # Somebody unlinked us in between, so the post is certain: take it, the semaphore
                # must be back at zero.
                pthread_mutex_unlock(&self.mu)
                while sem_wait(&w.sem) != 0:
                    pass
                pthread_mutex_lock(&self.mu)
            if w.promoted:
                w.promoted = False
                lead = True
        if lead:
            self._step_down()
        if rc != WOKEN and self._satisfied(w):
            rc = WOKEN
        pthread_mutex_unlock(&self.mu)
        return rc

    cdef bint _satisfied(self, Waiter* w) noexcept nogil:
        cdef int i
        cdef int have = 0
        if w.poked:
            return True
        for i in range(self.n):
            if w.mark[i] >= 0 and (self.chans[i] == NULL or self.chans[i].lines >= w.mark[i]):
                have += 1
        return have >= w.want

    cdef int _read_once(self, Waiter* w, int64_t until) noexcept nogil:
        """Poll all connections once and read what is there. The caller has the reading role."""
        cdef pollfd fds[MAX_MASTERS + 1]
        cdef Chan* live[MAX_MASTERS]
        cdef Chan* c
        cdef Waiter* follower
        cdef Waiter* after
        cdef Waiter* woken = NULL
        cdef timespec ts
        cdef int64_t left, now
        cdef uint64_t word
        cdef int i, ready, err, count = 0
        cdef bint full = False, again = False
        for i in range(self.n):
            c = self.chans[i]
            if c == NULL or c.event:
                continue
            fds[count].events = 0
            if c.phase == OPENING or c.stuck:
                fds[count].events |= POLLOUT
            if c.inb.n < MAX_INB:
                fds[count].events |= POLLIN
            else:
                full = True
            fds[count].fd = c.fd
            fds[count].revents = 0
            live[count] = c
            count += 1
        if full:
            return ALERT
        fds[count].fd = self.kick_fd
        fds[count].events = POLLIN
        fds[count].revents = 0
        left = min(until, self.timer_ns) - clock_ns()
        if left < 0 or w.sweep:
            left = 0
        self.polling = True
        pthread_mutex_unlock(&self.mu)
        ts.tv_sec = left // 1_000_000_000
        ts.tv_nsec = left % 1_000_000_000
        ready = ppoll(fds, count + 1, &ts, NULL)
        err = errno if ready < 0 else 0
        if ready > 0:
            for i in range(count):
                c = live[i]
                c.got = 0
                c.got_err = 0
                if fds[i].revents & ~POLLOUT and c.phase != OPENING:
                    c.got = recv(c.fd, c.rx, RX_SIZE, MSG_DONTWAIT)
                    if c.got < 0:
                        c.got_err = errno
                    elif c.got == 0:
                        c.got_err = END_OF_FILE
            if fds[count].revents:
                read(self.kick_fd, &word, 8)
        now = clock_ns()
        pthread_mutex_lock(&self.mu)
        self.polling = False
        if ready > 0:
            for i in range(count):
                if fds[i].revents == 0:
                    continue
                c = live[i]
                if c.phase == OPENING:
                    c.event = True
                elif c.got > 0:
                    _swallow(c, now)
                elif c.got_err and c.got_err != EAGAIN \
                        and c.got_err != EINTR:
                    c.err = c.got_err
                    c.event = True
                if fds[i].revents & POLLOUT and c.stuck:
                    c.stuck = False
                    again = True
                if c.event and not c.polled:
                    self.alert = True
            follower = self.first
            while follower != NULL:
                after = follower.next
                if follower.sweep or self._satisfied(follower):
                    follower.poked = True
                    self._unlink(follower)
                    follower.next = woken
                    woken = follower
                follower = after
        # `polled` marks the dead whose descriptor was in this sweep's set: it no longer is.
        if self.graves != NULL:
            c = self.graves
            while c != NULL:
                c.polled = False
                c = c.next
            self._reap()
        if woken != NULL:
            pthread_mutex_unlock(&self.mu)
            while woken != NULL:
                follower = woken
                woken = follower.next       # after the post it is its owner's again
                sem_post(&follower.sem)
            pthread_mutex_lock(&self.mu)
        if again:
            self.pending = True
            self._flush()
        if err == EINTR:
            return INTERRUPTED
        if w.sweep:
            w.poked = True
            return WOKEN
        if ready == 0:
            if now >= until:
                return TIMEOUT
            if now >= self.timer_ns:
                self.timer_ns = NEVER       # taken: no other thread has to wake for it
                return ALERT
        return WOKEN

    cdef void _flush(self) noexcept nogil:
        """Group commit: send for everyone, unless somebody does already."""
        cdef Chan* live[MAX_MASTERS]
        cdef int errs[MAX_MASTERS]
        cdef Chan* c
        cdef ssize_t sent
        cdef int i, count
        if self.flushing or not self.pending:
            return
        self.flushing = True
        while self.pending:
            if self.inside > 1:
                # Others are about to queue: one system call can take theirs along.
                pthread_mutex_unlock(&self.mu)
                sched_yield()
                pthread_mutex_lock(&self.mu)
            self.pending = False
            count = 0
            for i in range(self.n):
                c = self.chans[i]
                if c == NULL or c.stuck or c.err or c.phase == OPENING:
                    continue
                if c.sent == c.fly.n:
                    c.fly.n = 0
                    c.sent = 0
                    c.fly, c.pend = c.pend, c.fly
                if c.fly.n:
                    live[count] = c
                    count += 1
            pthread_mutex_unlock(&self.mu)
            for i in range(count):
                c = live[i]
                errs[i] = 0
                while c.sent < c.fly.n:
                    sent = send(c.fd, c.fly.p + c.sent, c.fly.n - c.sent,
                                MSG_DONTWAIT | MSG_NOSIGNAL)
                    self.sends += 1
                    if sent >= 0:
                        c.sent += sent
                    elif errno != EINTR:
                        errs[i] = errno
                        break
            pthread_mutex_lock(&self.mu)
            for i in range(count):
                c = live[i]
                if errs[i] == EAGAIN:
                    c.stuck = True
                    if self.polling:
                        self._kick()
                elif errs[i]:
                    c.err = errs[i]
                    c.event = True
                    self.alert = True
                    if self.polling:
                        self._kick()
                elif c.pend.n:
                    self.pending = True
        self.flushing = False
        if self.graves != NULL:
            c = self.graves
            while c != NULL:
                c.flown = False
                c = c.next
            self._reap()

    cdef void _step_down(self) noexcept nogil:
        """Hand the reading role on, if anybody waits."""
        cdef Waiter* heir = self.first
        if heir == NULL:
            self.leading = False
            return
        self._unlink(heir)
        heir.promoted = True
        sem_post(&heir.sem)

    cdef void _reap(self) noexcept nogil:
        """Close and free the dead that no reader, flusher or parser can have any more."""
        cdef Chan** at = &self.graves
        cdef Chan* c
        while at[0] != NULL:
            c = at[0]
            if c.polled or c.flown or c.parsed:
                at = &c.next
            else:
                at[0] = c.next
                _free_chan(c)

    cdef void _kick(self) noexcept nogil:
        cdef uint64_t one = 1
        write(self.kick_fd, &one, 8)

    cdef void _link(self, Waiter* w) noexcept nogil:
        w.linked = True
        w.next = NULL
        w.prev = self.last
        if self.last == NULL:
            self.first = w
        else:
            self.last.next = w
        self.last = w

    cdef void _unlink(self, Waiter* w) noexcept nogil:
        w.linked = False
        if w.prev == NULL:
            self.first = w.next
        else:
            w.prev.next = w.next
        if w.next == NULL:
            self.last = w.prev
        else:
            w.next.prev = w.prev

    # -- the ends --------------------------------------------------------------------------------

    def idle(self, int64_t timeout_ns):
        """Without a round: move bytes, deal with what comes in, for `timeout_ns` at most."""
        self._check()
        self._idle(timeout_ns)

    def last_call(self, int64_t timeout_ns):
        """The same for a client that is being closed."""
        self._idle(timeout_ns)

    cdef int _idle(self, int64_t timeout_ns) except -1:
        cdef int64_t now = clock_ns()
        cdef Waiter* w
        if self.kick_fd < 0:
            return 0
        w = self._new_waiter(None)
        w.sweep = timeout_ns <= 0
        w.mark[0] = NEVER
        try:
            self.fleet.judge(now)
            self._bury_down()
            self._dial(now)
            self._post()
            with nogil:
                self._wait(w, now + max(timeout_ns, SWEEP_NS if w.sweep else 0))
        finally:
            self._end_waiter(w)
        PyErr_CheckSignals()
        self._look(clock_ns())
        self._push()
        return 0

    def shut(self):
        """Refuse new rounds, and end the waiting ones with ClosedError."""
        cdef Waiter* w
        self.closed = True
        while True:
            pthread_mutex_lock(&self.mu)
            w = self.first
            if w != NULL:
                w.poked = True
                self._unlink(w)
            if self.polling:
                self.alert = True
                self._kick()
            pthread_mutex_unlock(&self.mu)
            if w == NULL:
                break
            sem_post(&w.sem)

    def tear_down(self):
        """Close the connections, in good order: what was sent is delivered."""
        cdef int i
        for i in range(self.n):
            self._bury(i, False)

    @property
    def callers(self):
        """Threads inside `run`."""
        return self.inside

    def after_fork(self):
        """In a forked child: forget everything that is the parent's; close, never shut down.

        Another thread of the parent may have been in the middle of anything without the GIL, so
        nothing of what the mutex guards is looked at, or freed: a few buffers are lost per fork.
        """
        cdef int i
        memset(&self.mu, 0, sizeof(self.mu))
        pthread_mutex_init(&self.mu, NULL)
        for i in range(self.n):
            if self.chans[i] != NULL:
                close(self.chans[i].fd)
                self.chans[i] = NULL
        self.graves = NULL
        if self.kick_fd >= 0:
            close(self.kick_fd)
            self.kick_fd = -1
        self.pending = self.flushing = self.leading = self.polling = self.alert = False
        self.timer_ns = NEVER
        self.first = self.last = self.spare = NULL
        self.inside = 0
        self.parsing = False
        self.active_ns = 0
        self.fleet.after_fork()
