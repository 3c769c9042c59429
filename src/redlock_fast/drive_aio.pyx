"""Drives plans under an event loop: rounds, sleeps, connections; has no task and no thread.

Given a plan, `drive` runs it in the task that awaits it. All tasks of a client share one `Driver`,
which is bound to the loop it is first used on. Nothing here waits but `await`: sockets are never
blocking, a reader is registered once per connection, a writer while connecting and after the socket
took no more. What was queued in one turn of the loop leaves in one flush at its end. A task waits
for a round as for a future (`Round`); one timer serves all deadlines.

* The tasks whose rounds have ended are woken together, by a callback of ours that no task runs in;
  what they ask next leaves at the end of it.
* Drained before judged: the timer reads the sockets before it takes a silence for a failure.
* A task may be cancelled wherever it waits: its plan is closed, so its clean-ups are queued, and
  the flush is scheduled. Replies that are still to come keep their places.
* Rounds under way are bounded; who comes later waits for its turn, before its round's time begins.
* No callback does more per reply, or per turn, than what came in asks for.

A driver whose loop was closed, or that finds itself in a forked child, starts afresh: descriptors
are closed without touching the loop or its selector.
"""

import os
import sys
import weakref
from asyncio import Future, Task, get_running_loop
from collections import deque
from functools import partial
from heapq import heapify, heappop, heappush

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memmove
from posix.unistd cimport close

from redlock_fast._core.fleet cimport Fleet, link_at
from redlock_fast._core.io cimport clock_ns, open_socket
from redlock_fast._core.link cimport DOWN, Link, speaks, wire_out
from redlock_fast._core.op cimport ACQUIRE, RELEASE, Op
from redlock_fast._core.wire cimport Buf, Replies, buf_free, buf_put

from redlock_fast import plan as plans
from redlock_fast.errors import ClosedError
from redlock_fast.resolve import ask

cdef extern from "Python.h":
    ctypedef enum PySendResult:
        PYGEN_RETURN
        PYGEN_ERROR
        PYGEN_NEXT
    PySendResult PyIter_Send(object generator, object value, PyObject** result) except PYGEN_ERROR
    unsigned long PyThread_get_thread_ident() noexcept
    int PyContext_Enter(object context) except -1
    int PyContext_Exit(object context) except -1
    bint PyCFunction_CheckExact(object)
    PyObject* PyCFunction_GET_SELF(object)
    Py_ssize_t Py_REFCNT(PyObject*)

cdef extern from "<sys/socket.h>" nogil:
    int SOL_SOCKET, SO_ERROR, SO_LINGER, MSG_DONTWAIT, MSG_NOSIGNAL
    struct linger:
        int l_onoff
        int l_linger
    int getsockopt(int, int, int, void*, unsigned int*)
    int setsockopt(int, int, int, const void*, unsigned int)
    ssize_t send(int, const void*, size_t, int)
    ssize_t recv(int, void*, size_t, int)

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int POLLOUT
    int poll(pollfd*, unsigned long, int)

cdef enum:
    RX_SIZE = 64 * 1024         # bytes that one recv may bring
    MAX_READS = 16              # recvs of one socket in a row
    MAX_INSIDE = 1024           # acquiring rounds under way; others may be twice as many
    MAX_ROUSED = 256            # tasks that are woken in a row
# Futures that are kept for rounds to come. From 3.14 on a future remembers who waits for it, so
# that each round there has one of its own.
cdef Py_ssize_t MAX_SPARE = 1024 if sys.version_info < (3, 14) else 0
cdef int64_t NEVER = 0x7FFFFFFFFFFFFFFF
cdef int64_t MS = 1_000_000
# A connection that was idle so long is looked at before anything is sent (DESIGN, rule 11).
cdef int64_t IDLE_NS = 5 * MS
# While deletions are not answered, connections are looked after so often, then less and less.
cdef int64_t TICK_NS = 20 * MS
cdef int64_t TICK_MOST_NS = 200 * MS
# However many answers keep coming, closing takes no longer.
cdef int64_t CLOSE_NS = 5_000 * MS
# A timer is set no further ahead; it looks again then.
cdef int64_t TIMER_MOST_NS = 3_600_000 * MS

cdef object _drivers = weakref.WeakSet()


def _after_fork_in_child():
    for driver in list(_drivers):
        (<Driver> driver).after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


@cython.final
cdef class Chan:
    """One connection: its descriptor, and what waits to be sent."""

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)
        buf_free(&self.pend)


@cython.freelist(1024)
@cython.no_gc_clear     # or the end could not tell the op
@cython.final
cdef class Round:
    """One round, for the one coroutine that awaits it; begins when it is awaited.

    It is the iterator that `await` drives, and yields once: a future, for the task to wait for.
    """

    def __dealloc__(self):
        if self.op is not None and self.op.waiter == <void*> self:
            self.op.waiter = NULL
            self.op.inbox = None

    def __await__(self):
        return self

    def __next__(self):
        cdef bint counted
        if self.stage == FRESH:
            try:
                self.driver._launch(self)
            except BaseException:
                self._leave()
                raise
            return self.future
        if self.stage != ENDED:
            self._leave()
            raise RuntimeError("await wasn't used with future")
        counted = self.counted and self.life == self.driver.life
        self.counted = False
        self.now_ns = self.driver._end(self.op) if counted else clock_ns()
        if self.driver.closed:
            self.failure = ClosedError("the client was closed while the call waited")
        elif self.life != self.driver.life:
            self.failure = RuntimeError("this process was forked in the middle of the call")
        if self.failure is not None:
            self._leave()
            raise self.failure
        raise StopIteration

    def throw(self, kind, value=None, traceback=None):
        """An exception comes in where it is awaited: nobody waits for the round any more."""
        self._leave()
        if value is None:
            value = kind() if isinstance(kind, type) else kind
        raise value if traceback is None else value.with_traceback(traceback)

    def close(self):
        """The coroutine is thrown away."""
        self._leave()

    cdef int _leave(self) except -1:
        cdef bint begun = self.stage != FRESH
        cdef bint counted = self.counted and self.life == self.driver.life
        self.counted = False
        if self.stage < ENDED:
            self.stage = LEFT
        self.future = None
        if begun:
            self.driver._abandon(self.op, counted)
            if self.alone:
                if self.op.kind == ACQUIRE:
                    self.driver.fleet.clean_up(self.op)
                self.driver.settle()
        return 0

    cdef int _end(self) except -1:
        """It is over: have who waits go on here and now. Not to be done while a task runs.

        A future that is resolved has the loop call who waits in its next turn, each by a callback
        of its own. So we take the callback out of the future, and call it. A future that nobody
        but its task knows is not even resolved, and waits for another round: the task is told of
        one that was resolved long ago, and asks us, not the future, what has come of the round.
        """
        cdef Driver driver = self.driver
        cdef object future = self.future
        cdef list rows = future._callbacks
        cdef object wake, context
        cdef bint unknown
        if not rows or len(rows) > 1 or self.life != driver.life:
            return self._end_later()
        wake, context = <tuple> rows[0]
        if not wakes_task(wake):
            return self._end_later()
        future.remove_done_callback(wake)
        self.stage = ENDED
        self.future = None
        # Two refer to it: this function, and the task.
        unknown = MAX_SPARE > 0 and Py_REFCNT(<PyObject*> future) == 2
        if not unknown:
            future.set_result(None)
        PyContext_Enter(context)
        try:
            wake(driver.resolved if unknown else future)
        finally:
            PyContext_Exit(context)
        # Only now has the task let go of it.
        if unknown and driver.spares < MAX_SPARE and self.life == driver.life:
            driver.spare[driver.spares] = future
            driver.spares += 1
        return 0

    cdef int _end_later(self) except -1:
        """It is over: have who waits go on in the next turn of the loop."""
        self.stage = ENDED
        if not self.future.done():      # nor cancelled
            self.future.set_result(None)
        self.future = None
        return 0


cdef bint waits(object what) except -1:
    """Does anybody still wait for this round, or this future?"""
    if type(what) is Round:
        return (<Round> what).stage < ENDED
    return not what.done()


cdef bint wakes_task(object callback) noexcept:
    """Is it how a task of asyncio's own (the one in C) waits for a future?"""
    cdef PyObject* task
    if not PyCFunction_CheckExact(callback):
        return False
    task = PyCFunction_GET_SELF(callback)
    return task != NULL and type(<object> task) is Task


@cython.final
cdef class Driver:
    """Runs the plans of one client.

    Args:
        fleet: the client's masters; nobody else may drive it.
    """

    def __cinit__(self, Fleet fleet not None):
        self.fleet = fleet
        self.n = fleet.n
        self.rx = <char*> malloc(RX_SIZE)
        if self.rx == NULL:
            raise MemoryError("no memory for a client")
        self.chans = [None] * (2 * self.n)
        self.dials = []
        self.flush_callback = self._flush
        self.wake_callback = self._on_wake
        self.read_callback = self._on_readable
        self.write_callback = self._on_writable
        self.timer_callback = self._on_timer
        self.answer_callback = self._on_answer
        fleet.ask = partial(ask, wake=weakref.ref(self))
        self._forget()
        _drivers.add(self)

    def __dealloc__(self):
        free(self.rx)

    # -- plans -------------------------------------------------------------------------------------

    async def drive(self, plan):
        """Run a plan to its end; its result is ours, and so is what it raises.

        Raises:
            ClosedError: the client is closed, or was closed meanwhile.
            RuntimeError: called from another loop than the client's, which is still open.
        """
        cdef bint ended = False
        cdef Round what
        cdef object step, future, answer = None
        self.enter()
        try:
            while True:
                ended = True        # unless it says otherwise: also when it raises
                step = self._advance(plan, answer)
                ended = self.over
                if ended:
                    return step
                if type(step) is Op:
                    what = self._round(<Op> step, False)
                    await what
                    answer = what.now_ns
                elif step is None:
                    answer = clock_ns()
                else:
                    self.settle()
                    future = self._sleeper(clock_ns() + <int64_t> step)
                    try:
                        await future
                    except BaseException:
                        self.stale += 1
                        raise
                    if self.closed:
                        raise ClosedError("the client was closed while the call waited")
                    answer = clock_ns()
        finally:
            if not ended:
                plan.close()        # lets the plan clean up what it has sent
            self.settle()

    cpdef Round attempt(self, Op op):
        """A round without a plan, to be awaited; `now_ns` is when it ended.

        If the wait is cut short, what an acquire has sent is cleaned up. Raises what `drive` does.
        """
        return self._round(op, True)

    cdef Round _round(self, Op op, bint alone):
        cdef Round what = Round.__new__(Round)
        what.driver = self
        what.op = op
        what.alone = alone
        return what

    cdef object _advance(self, object plan, object answer):
        """One step of a plan; `over` says whether it was the last one, and this is the result."""
        cdef PyObject* given
        cdef object step
        sent = PyIter_Send(plan, answer, &given)
        step = <object> given
        Py_DECREF(step)
        self.over = sent == PYGEN_RETURN
        return step

    def send_off(self, plan):
        """Let the first round of a release go out, with nobody who waits for it."""
        cdef object step = self._advance(plan, None)
        if not self.over:
            if not self.closed:
                self.fleet.clean_up(step)
            plan.close()
        self.settle()

    # -- the loop ----------------------------------------------------------------------------------

    cpdef int enter(self) except -1:
        """Bind to the running loop, or see that it is the one.

        Raises:
            ClosedError, RuntimeError: see `drive`.
        """
        cdef object loop
        # (Asking costs a system call before Python 3.12.)
        if not self.rousing or self.rouser != PyThread_get_thread_ident():
            loop = get_running_loop()
            if loop is not self.loop:
                self._bind(loop)
        if self.closed:
            raise ClosedError("the client is closed")
        return 0

    cdef int _bind(self, object loop) except -1:
        if self.loop is not None:
            if not self.loop.is_closed():
                raise RuntimeError(
                    "the client is in use by another event loop; make one client for each loop"
                )
            self._start_anew()
        self.call_soon = loop.call_soon
        self.call_later = loop.call_later
        self.resolved = Future(loop=loop)
        self.resolved.set_result(None)
        self.loop = loop
        return 0

    cdef int _forget(self) except -1:
        """Nobody waits, no loop calls: as new."""
        self.life += 1
        self.loop = self.call_soon = self.call_later = self.resolved = self.timer = None
        self.timer_ns = NEVER
        self.tick_ns = NEVER
        self.scheduled = self.rousing = self.waking = False
        self.grace_ns = self.active_ns = 0
        self.inside = 0
        self.stale = 0
        self.inbox = []
        self.spare = [None] * MAX_SPARE
        self.spares = 0
        self.rounds = []
        self.passed = 0
        self.heap = []
        self.parts = []
        self.watchers = []
        self.tries = deque()
        self.others = deque()
        return 0

    cdef int _start_anew(self) except -1:
        """The loop was closed: its futures will never be awaited again. Debts stay."""
        cdef int64_t now = clock_ns()
        cdef list left = self.rounds[self.passed:]
        cdef int heard = len(self.fleet.news)
        cdef Link link
        cdef Round what
        cdef bint told
        cdef int i
        left += [sleeper for _, _, sleeper in self.heap if type(sleeper) is Round]
        for what in left:
            what.op.waiter = NULL
            what.op.inbox = None
        self._forget()
        for i in range(2 * self.n):
            self._shut(i, True)
        for i in range(self.n):
            if self.fleet.rivals[i] is not None:
                self.fleet.drop_rival(i)
            link = <Link> self.fleet.links[i]
            if link.state != DOWN:
                told = link.told
                self.fleet.broke(link, "closed", "its event loop was closed", now)
                link.retry_ns = now
                link.told = told
        del self.fleet.news[heard:]     # no trouble of a master's
        for what in left:
            if what.op.kind == ACQUIRE:
                self.fleet.clean_up(what.op)    # its task may be thrown away much later
        return 0

    def after_fork(self):
        """In a forked child: start as new, and leave the parent's connections and loop alone."""
        cdef int i
        self._forget()
        for i in range(2 * self.n):
            self._shut(i, False)
        for sock in self.dials:
            sock.close()
        self.dials.clear()
        self.fleet.after_fork()

    # -- a round -----------------------------------------------------------------------------------

    cdef int _launch(self, Round what) except -1:
        """Begin a round, or let it wait for its turn."""
        cdef Op op = what.op
        self.enter()
        what.life = self.life
        if self.spares:
            self.spares -= 1
            what.future = self.spare[self.spares]
            self.spare[self.spares] = None
        else:
            what.future = Future(loop=self.loop)
        what.future._asyncio_future_blocking = True     # so tells who awaits a future its task
        if op.kind == ACQUIRE:
            if self.inside < MAX_INSIDE and not self.tries:
                return self._begin(what)
            self.tries.append(what)
        else:
            if self.inside < 2 * MAX_INSIDE and not self.others:
                return self._begin(what)
            self.others.append(what)
        what.stage = QUEUED
        op.asked_ns = clock_ns()
        return 0

    cdef int _admit(self) except -1:
        """Rounds have ended: let others begin."""
        while self.others and self.inside < 2 * MAX_INSIDE:
            self._admit_one(<Round> self.others.popleft())
        while self.tries and self.inside < MAX_INSIDE:
            self._admit_one(<Round> self.tries.popleft())
        return 0

    cdef int _admit_one(self, Round what) except -1:
        """It is its turn, unless nobody waits for it any more."""
        if what.stage != QUEUED or what.future.done():
            return 0
        try:
            self._begin(what)
        except BaseException as exc:    # its own trouble, not that of who made room for it
            what.failure = exc
            what._end_later()
        return 0

    cdef int _begin(self, Round what) except -1:
        """Queue a round; its end is seen by `_rouse`.

        That is never before the next turn, even if there was nobody to ask: a task that tries again
        and again must not keep the loop to itself.
        """
        cdef int64_t now = clock_ns()
        cdef Op op = what.op
        # (Not for each of the rounds that leave together.)
        if not self.scheduled and (now - self.active_ns >= IDLE_NS or self.fleet.overdue(now)):
            now = self._freshen(now)
        op.inbox = self.inbox
        op.waiter = <void*> what
        what.stage = ASKED
        what.counted = True
        self.inside += 1
        self.fleet.start(op, now)
        self._schedule(now)
        # The round, and by it the task that waits, is kept alive from here.
        if op.ended:
            self._ended(what)
        elif op.k == 1:
            self.rounds.append(what)
        else:
            self.serial += 1
            heappush(self.heap, (op.limit_ns, self.serial, what))
            self.parts.append(op)
        if op.limit_ns < self.timer_ns:
            self._arm(op.limit_ns, now)
        return 0

    cdef int _pass_one(self) except -1:
        """The first of `rounds` needs no deadline any more."""
        self.rounds[self.passed] = None
        self.passed += 1
        if self.passed >= 256 and 2 * self.passed >= len(self.rounds):
            del self.rounds[:self.passed]
            self.passed = 0
        return 0

    cdef int64_t _end(self, Op op) except -1:
        """A round has ended, or the client was closed, and its task goes on. Returns the time."""
        cdef Op first
        self.inside -= 1
        op.waiter = NULL
        op.inbox = None
        if op.hoping or op.k > 1:
            self.fleet.finish(op)
        while self.passed < len(self.rounds):
            first = (<Round> self.rounds[self.passed]).op
            if not first.ended and first.waiter != NULL:
                break
            self._pass_one()
        if self.tries or self.others:
            self._admit()
        self.active_ns = clock_ns()
        return self.active_ns

    cdef int _abandon(self, Op op, bint counted) except -1:
        """Nobody waits for this round any more; what it has sent stands. A release goes out."""
        if counted:
            self.inside -= 1
        op.waiter = NULL
        op.inbox = None
        if op.start_ns == 0:
            if op.kind == RELEASE:
                self.fleet.clean_up(op)
        elif op.hoping or op.k > 1:
            self.fleet.finish(op)
        if counted and (self.tries or self.others) and not self.loop.is_closed():
            self._admit()
        return 0

    cdef object _sleeper(self, int64_t until):
        """A future that is resolved at that time."""
        cdef object future = Future(loop=self.loop)
        self.serial += 1
        if self.stale > 64 and self.stale > len(self.heap) // 2:
            self.heap = [row for row in self.heap if waits(row[2])]
            heapify(self.heap)
            self.stale = 0
        heappush(self.heap, (until, self.serial, future))
        if until < self.timer_ns:
            self._arm(until, clock_ns())
        return future

    cpdef int settle(self) except -1:
        """A plan is over, wherever it ended: see that what it has queued goes out."""
        cdef Link link
        cdef int i
        for i in range(self.n):
            link = <Link> self.fleet.links[i]
            if speaks(link) or link.debts:
                break
        else:
            if not self.fleet.news:
                return 0
        if self.loop is None or self.scheduled:
            return 0
        try:
            if get_running_loop() is self.loop:
                return self._schedule(clock_ns())
        except RuntimeError:
            pass        # a coroutine that is thrown away, after its loop or in another thread
        try:
            self.loop.call_soon_threadsafe(self.flush_callback)
        except RuntimeError:
            pass        # the loop is closed; debts wait for the next one
        return 0

    # -- sending -----------------------------------------------------------------------------------

    cdef int _schedule(self, int64_t now) except -1:
        """Have everything sent at the end of this turn, or of our own callback."""
        if not self.scheduled:
            if not self.rousing:
                self.call_soon(self.flush_callback)
            self.scheduled = True
            self.queued_ns = now
        return 0

    def _flush(self):
        """Send what was queued since the last turn."""
        cdef int64_t now, at
        cdef object raised = None
        cdef Link link
        cdef Chan c
        cdef int i
        if self.loop is None:
            return
        self.scheduled = False
        now = clock_ns()
        if now - self.queued_ns > self.fleet.patience_ns // 2:
            # The loop was kept busy: no master could hear of these rounds so far.
            self.grace_ns = now + self.fleet.patience_ns
        if self.parts:
            self._refill(now)
        for i in range(self.fleet.slots):
            link = link_at(self.fleet, i)
            c = <Chan> self.chans[i]
            if c is not None and link is not None and not c.opening and speaks(link):
                try:
                    self._send(c, link, now)
                except BaseException as exc:
                    raised = exc        # a signal handler's, of which the others know nothing
        if self.inbox:
            self._rouse_soon()
        if self.fleet.news:
            plans.tell(self.fleet)
        if self.tick_ns == NEVER and self.fleet.owes():
            self.tick_pause_ns = TICK_NS
            self.tick_ns = now + TICK_NS
        # Hopes and debts may be new.
        at = min(self.fleet.next_ns(), self.tick_ns)
        if at < self.timer_ns:
            self._arm(at, now)
        if raised is not None:
            raise raised

    def _refill(self, int64_t now):
        """The next chunks of batches that have more to send."""
        cdef list rest = []
        cdef Op op
        cdef int i
        for op in self.parts:
            if op.ended or op.waiter == NULL:
                continue
            self.fleet.refill(op, now)
            for i in range(self.n):
                if op.asked & ~op.closed & (<uint32_t> 1 << i) and op.parts[i].queued < op.k:
                    rest.append(op)
                    break
        self.parts = rest

    cdef int _send(self, Chan c, Link link, int64_t now) except -1:
        """Send what a link has to say; what the socket does not take waits in `pend`."""
        cdef Buf* out
        cdef size_t at = 0
        cdef ssize_t sent
        cdef int err = 0
        if link.seal is not None:
            try:
                link.encrypt(now)
            finally:
                if link.state == DOWN:
                    self._shut(c.slot, True)
                    self.fleet.after_break(link)
            if link.state == DOWN:
                return 0
        out = wire_out(link)
        if link.booked >= c.mark:
            link.quiet_ns = now     # all that it owes leaves only now
        c.mark = link.promised
        if c.pend.n == 0:
            while at < out.n:
                sent = send(c.fd, out.p + at, out.n - at, MSG_DONTWAIT | MSG_NOSIGNAL)
                self.sends += 1
                if sent >= 0:
                    at += sent
                elif errno != EINTR:
                    err = errno
                    break
        elif c.sent > c.pend.n // 2:
            memmove(c.pend.p, c.pend.p + c.sent, c.pend.n - c.sent)
            c.pend.n -= c.sent
            c.sent = 0
        if err and err != EAGAIN:
            return self._failed(c, link, os.strerror(err), now)
        if at < out.n:
            if buf_put(&c.pend, out.p + at, out.n - at) != 0:
                return self._failed(c, link, "no memory for bytes to send", now)
            if not c.writing:
                self.loop.add_writer(c.fd, self.write_callback, c)
                c.writing = True
        out.n = 0
        link.unsent = c.pend.n - c.sent
        link.stuck = c.writing
        return 0

    def _on_writable(self, Chan c not None):
        """The connect has come to its end, or the socket takes bytes again."""
        cdef Link link
        cdef ssize_t sent
        if c.fd < 0:
            return
        if c.opening:
            self._opened(c)
            self._looked(clock_ns())
            self._rouse()
            return
        link = link_at(self.fleet, c.slot)
        while c.sent < c.pend.n:
            sent = send(c.fd, c.pend.p + c.sent, c.pend.n - c.sent, MSG_DONTWAIT | MSG_NOSIGNAL)
            self.sends += 1
            if sent >= 0:
                c.sent += sent
            elif errno == EAGAIN:
                link.unsent = c.pend.n - c.sent
                return
            elif errno != EINTR:
                self._failed(c, link, os.strerror(errno), clock_ns())
                self._looked(clock_ns())
                self._rouse()
                return
        self.loop.remove_writer(c.fd)
        c.writing = False
        c.pend.n = 0
        c.sent = 0
        link.unsent = 0
        link.stuck = False
        self._schedule(clock_ns())

    # -- reading -----------------------------------------------------------------------------------

    def _on_readable(self, Chan c not None):
        """Bytes have come, or the end."""
        if c.fd < 0:
            return
        try:
            self._read(c)
        finally:
            self._looked(clock_ns())
            self._rouse()

    cdef int _read(self, Chan c) except -1:
        """Read what is there, and tell the link."""
        cdef Replies replies = self.fleet.replies
        cdef Link link = link_at(self.fleet, c.slot)
        cdef int64_t now
        cdef ssize_t got
        cdef int reads = 0
        cdef bint well = False
        if link is None:
            return self._shut(c.slot, True)
        try:
            while True:
                got = recv(c.fd, self.rx, RX_SIZE, MSG_DONTWAIT)
                if got <= 0:
                    break
                now = clock_ns()
                if link.seal is not None:
                    link.unseal(self.rx[:got], now)
                replies.begin()
                if link.seal is None:
                    link.feed(self.rx, got, now)
                elif link.seal.plain.n:
                    link.feed(link.seal.plain.p, link.seal.plain.n, now)
                    link.seal.plain.n = 0
                replies.parse()
                if link.lines:
                    link.book_lines(now)
                if link.seal is not None:
                    link.seal_broke(now)
                reads += 1
                if link.state == DOWN or got < RX_SIZE or reads == MAX_READS:
                    break
            well = True
        finally:
            if not well:
                # No memory, say: the bytes are gone, and with them the order of the replies.
                link.lines = 0
                if link.state != DOWN:
                    link.broke("PROTO", "cannot parse replies", clock_ns())
                self._shut(c.slot, True)
                self.fleet.after_break(link)
        if got == 0:
            link.broke("closed", "connection closed by the server", clock_ns())
        elif got < 0 and errno != EAGAIN and errno != EINTR:
            link.broke("closed", os.strerror(errno), clock_ns())
        if link.state == DOWN:
            self._shut(c.slot, True)
            self.fleet.after_break(link)
        return 0

    cdef int _looked(self, int64_t now) except -1:
        """Something has happened: debts, hopes, second connections. `_rouse` is to follow."""
        cdef int64_t at
        cdef Link link
        cdef int i
        self.fleet.now_ns = now
        if self.fleet.slots > self.n:
            self._settle_rivals(now)
        self.fleet.serve(now)
        at = self.fleet.next_ns()
        if at <= now:
            self._dial(now)
            at = self.fleet.next_ns()
        if at < self.timer_ns:
            self._arm(at, now)
        if not self.scheduled:
            if self.parts or self.fleet.news:
                self._schedule(now)
            else:
                for i in range(self.fleet.slots):
                    link = link_at(self.fleet, i)
                    if link is not None and speaks(link):
                        self._schedule(now)
                        break
        if self.watchers:
            for future in self.watchers:
                if not future.done():
                    future.set_result(None)
            self.watchers.clear()
        return 0

    def _on_wake(self):
        """Rounds have ended, but not in a callback of ours."""
        self.waking = False
        self._rouse()

    cdef int _rouse_soon(self) except -1:
        if not self.waking and self.loop is not None:
            self.call_soon(self.wake_callback)
            self.waking = True
        return 0

    cdef int _rouse(self) except -1:
        """Wake the tasks whose rounds have ended, and send what they ask next.

        The last thing that a callback of ours does, never done while a task runs. Bounded: others
        have a turn in between.
        """
        cdef list ended
        cdef Round what
        cdef Py_ssize_t i = 0
        if not self.inbox:
            return 0
        ended = self.inbox[:MAX_ROUSED]
        del self.inbox[:len(ended)]
        self.rousing = True
        self.rouser = PyThread_get_thread_ident()
        try:
            while i < len(ended):
                what = <Round> ended[i]
                i += 1
                what.op.waiter = NULL
                if what.stage == ASKED:
                    what._end()
        finally:
            # (A task may have ended all this with KeyboardInterrupt or SystemExit.)
            self.rousing = False
            self.inbox[:0] = ended[i:]
            if self.inbox:
                self._rouse_soon()
            if self.scheduled:
                self._flush()
        return 0

    cdef int64_t _freshen(self, int64_t now) except -1:
        """Drain the sockets; then judge, and dial. Returns the time."""
        cdef Chan c
        cdef pollfd p
        cdef int i
        self.active_ns = now
        for i in range(2 * self.n):
            c = <Chan> self.chans[i]
            if c is None:
                continue
            if not c.opening:
                self._read(c)
                continue
            p.fd = c.fd
            p.events = POLLOUT
            p.revents = 0
            if poll(&p, 1, 0) > 0:
                self._opened(c)
        now = clock_ns()
        self.fleet.judge(now)
        self._bury_down()
        self._dial(now)
        self._looked(now)
        if self.inbox:
            self._rouse_soon()      # a task may be running
        return clock_ns()

    # -- connections -------------------------------------------------------------------------------

    cdef int _settle_rivals(self, int64_t now) except -1:
        """Whichever of two connections to a master answered first carries on."""
        cdef Chan c
        cdef int i
        for i in range(self.n):
            if self.fleet.rival_won(i):
                self._shut(i, True)
                self.fleet.promote(i, now)
                c = <Chan> self.chans[self.n + i]
                self.chans[self.n + i] = None
                self.chans[i] = c
                if c is not None:
                    c.slot = i
                    c.mark = (<Link> self.fleet.links[i]).booked
            elif self.fleet.rival_lost(i):
                self._shut(self.n + i, True)
                self.fleet.drop_rival(i)
        return 0

    cdef int _dial(self, int64_t now) except -1:
        """Open connections to the masters that are due."""
        cdef uint64_t due = self.fleet.due(now)
        cdef Link link
        cdef int i
        if not due:
            return 0
        for i in range(self.fleet.slots):
            if due >> i & 1:
                link = link_at(self.fleet, i)
                if link is not None and (link.state == DOWN or link.moves()):
                    self._dial_one(link, i, now)
                    while link.moves():
                        self._dial_one(link, i, now)    # the next address
        return 0

    cdef int _dial_one(self, Link link, int slot, int64_t now) except -1:
        cdef object place, sock = None
        cdef bint opened
        cdef Chan c
        place = self.fleet.place_to_dial(link, now)
        if place is None:
            return 0
        try:
            c = Chan.__new__(Chan)
            c.fd = -1
            c.slot = slot
            sock, opened, link.local = open_socket(place, self.dials)
            c.fd = sock.detach()
            self.dials.remove(sock)
            c.opening = True
            self.chans[slot] = c
            if opened:
                self._opened(c)
            else:
                self.loop.add_writer(c.fd, self.write_callback, c)
                c.writing = True
        except BaseException as exc:
            if sock is not None:
                sock.close()
            if sock in self.dials:
                self.dials.remove(sock)
            text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            self.fleet.broke(link, "refused", text, now)
            self._shut(slot, True)
            if not isinstance(exc, (OSError, MemoryError)):
                raise
        return 0

    def wake(self):
        """An answer has come for a dial; called in a thread of the look-up's."""
        cdef object loop = self.loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self.answer_callback)
        except RuntimeError:
            pass        # the loop is closed, and nobody waits there

    def _on_answer(self):
        if self.loop is not None:
            self._looked(clock_ns())
            self._rouse()

    cdef int _opened(self, Chan c) except -1:
        """The connect has come to its end: greet, or give up."""
        cdef Link link = link_at(self.fleet, c.slot)
        cdef int64_t now = clock_ns()
        cdef int err = 0
        cdef unsigned int size = sizeof(err)
        c.opening = False
        if c.writing:
            self.loop.remove_writer(c.fd)
            c.writing = False
        if getsockopt(c.fd, SOL_SOCKET, SO_ERROR, &err, &size) != 0:
            err = errno
        if err:
            self.fleet.broke(link, "refused", os.strerror(err), now)
            return self._shut(c.slot, True)
        self.loop.add_reader(c.fd, self.read_callback, c)
        c.reading = True
        c.mark = link.booked
        link.connected(now)
        return self._schedule(now)

    cdef int _failed(self, Chan c, Link link, str cause, int64_t now) except -1:
        """The socket takes nothing any more. What has arrived counts all the same."""
        self._read(c)
        if c.fd >= 0:
            self.fleet.broke(link, "closed", cause, now)
            self._shut(c.slot, True)
        return 0

    cdef int _shut(self, int slot, bint abort) except -1:
        """Close a connection. `abort`: discard what is in flight (RST), so that a late SET has less
        of a chance.
        """
        cdef Chan c = <Chan> self.chans[slot]
        cdef linger hard
        cdef int fd
        if c is None:
            return 0
        self.chans[slot] = None
        fd = c.fd
        c.fd = -1
        if abort:
            hard.l_onoff = 1
            hard.l_linger = 0
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard))
        try:
            if self.loop is not None and not self.loop.is_closed():
                if c.reading:
                    self.loop.remove_reader(fd)
                if c.writing:
                    self.loop.remove_writer(fd)
        finally:
            close(fd)
        return 0

    cdef int _bury_down(self) except -1:
        """Close what the fleet has given up."""
        cdef Link link
        cdef int i
        for i in range(2 * self.n):
            if self.chans[i] is not None:
                link = link_at(self.fleet, i) if i < self.fleet.slots else None
                if link is None or link.state == DOWN:
                    self._shut(i, True)
        return 0

    # -- time --------------------------------------------------------------------------------------

    def _on_timer(self):
        """A deadline has come: of rounds, of sleepers, of the fleet; or debts are to be seen to."""
        self.timer = None
        self.timer_ns = NEVER
        if self.loop is None:
            return
        try:
            self._keep_time()
        finally:        # whatever a signal handler raises, there is a next time
            self._rearm(clock_ns())
            self._rouse()

    cdef int _keep_time(self) except -1:
        cdef int64_t now = clock_ns()
        cdef Op op
        cdef object what
        cdef bint fresh = False
        if self.scheduled and now - self.queued_ns > self.fleet.patience_ns // 2:
            self._flush()       # the loop was kept busy, and some run timers first
        if self.fleet.overdue(now) or self.fleet.next_ns() <= now:
            now = self._freshen(now)
            fresh = True
        while self.passed < len(self.rounds):
            what = self.rounds[self.passed]
            op = (<Round> what).op
            if not op.ended and op.waiter != NULL:
                if max(op.limit_ns, self.grace_ns) > now:
                    break
                if not fresh:
                    # Drained before anyone is judged; then look again.
                    now = self._freshen(now)
                    fresh = True
                    continue
                self._expire(what, now)
            self._pass_one()
        while self.heap and self.heap[0][0] <= now:
            what = heappop(self.heap)[2]
            if type(what) is not Round:
                if not what.done():
                    what.set_result(None)
                continue
            op = (<Round> what).op
            if not fresh:
                now = self._freshen(now)
                fresh = True
            if op.ended or op.waiter == NULL:
                continue
            if max(op.limit_ns, self.grace_ns) > now:
                # A batch's time runs from its last reply.
                self.serial += 1
                heappush(self.heap, (max(op.limit_ns, self.grace_ns), self.serial, what))
                continue
            self._expire(what, now)
        if self.tick_ns <= now:
            if not self.fleet.owes():
                self.tick_ns = NEVER
            else:
                # A master that hangs for long is not worth fifty looks a second.
                if self.fleet.answers != self.tick_answers:
                    self.tick_answers = self.fleet.answers
                    self.tick_pause_ns = TICK_NS
                else:
                    self.tick_pause_ns = min(2 * self.tick_pause_ns, TICK_MOST_NS)
                self.tick_ns = now + self.tick_pause_ns
        self._bury_down()
        self._looked(now)
        return 0

    cdef int _expire(self, Round what, int64_t now) except -1:
        """A round's time is up."""
        self.fleet.expire(what.op, now)
        return self._ended(what)

    cdef int _ended(self, Round what) except -1:
        """A round is over, and it was not a vote that told so."""
        if what.op.inbox is not None:
            what.op.inbox = None
            self.inbox.append(what)
        return 0

    cdef int _arm(self, int64_t at, int64_t now) except -1:
        """Let the timer fire at `at` at the latest; rounded up to what loops can tell apart."""
        cdef int64_t left = min(max(at - now, 0), TIMER_MOST_NS)
        if at >= self.timer_ns:
            return 0
        if self.timer is not None:
            self.timer.cancel()
        self.timer_ns = at
        self.timer = self.call_later((left + MS - 1) // MS / 1000.0, self.timer_callback)
        return 0

    cdef int _rearm(self, int64_t now) except -1:
        """Set the timer for the next deadline, if there is any."""
        cdef int64_t at = min(self.fleet.next_ns(), self.tick_ns)
        cdef Op op
        if self.passed < len(self.rounds):
            op = (<Round> self.rounds[self.passed]).op
            at = min(at, max(op.limit_ns, self.grace_ns))
        if self.heap:
            at = min(at, <int64_t> self.heap[0][0])
        if at < self.timer_ns:
            self._arm(at, now)
        return 0

    # -- connecting, closing -----------------------------------------------------------------------

    async def _news(self, int64_t until):
        """Wait until something has happened on any connection, or until then."""
        cdef object future = self._sleeper(until)
        self.watchers.append(future)
        self.stale += 1
        await future

    async def connect(self, int64_t limit_ns):
        """Open the connections; returns when each is ready or has failed, or after `limit_ns`."""
        cdef int64_t now = clock_ns()
        cdef int64_t until = now + limit_ns
        self.enter()
        now = self._freshen(now)
        while self.fleet.connecting and now < until:
            await self._news(until)
            if self.closed:
                raise ClosedError("the client was closed while the call waited")
            now = clock_ns()

    async def close(self, int64_t limit_ns):
        """End waiting tasks with ClosedError, settle what is owed, disconnect.

        Clean-ups are waited for until no master has answered anything for `limit_ns`: cutting a
        connection while answers are on their way would make a server drop what it has not read.
        """
        cdef int64_t now, until, end
        cdef object loop, answers
        if self.closed:
            return
        loop = get_running_loop()
        if self.loop is not None and loop is not self.loop:
            self._bind(loop)
        self.closed = True
        if self.loop is None:
            return
        try:
            self._wake_all()
            now = clock_ns()
            end = now + max(limit_ns, CLOSE_NS)
            until = now + limit_ns
            answers = self.fleet.answers
            while now < min(until, end) and (self.inside or self.fleet.unsettled):
                self._freshen(now)
                await self._news(min(min(until, end), now + 5 * MS))
                now = clock_ns()
                if self.fleet.answers != answers:
                    answers = self.fleet.answers
                    until = now + limit_ns
        finally:
            self._tear_down()

    def _wake_all(self):
        """Let every waiting task see that the client was closed."""
        cdef Round what
        cdef list rounds = list(self.tries) + list(self.others)
        self.tries.clear()
        self.others.clear()
        rounds += self.rounds[self.passed:] + self.inbox
        for _, _, sleeper in self.heap:
            if type(sleeper) is Round:
                rounds.append(sleeper)
            elif not sleeper.done():
                sleeper.set_result(None)
        for what in rounds:
            if what.stage < ENDED:
                what.op.waiter = NULL
                what.op.inbox = None
                what._end_later()

    def _tear_down(self):
        """Close the connections, in good order: what was sent is delivered."""
        cdef int i
        if self.timer is not None:
            self.timer.cancel()
        for i in range(2 * self.n):
            self._shut(i, False)
        self._forget()

    def abandon(self):
        """The client is thrown away, in whatever thread. Returns whether it was still connected."""
        cdef bint open = self.loop is not None and any(self.chans)
        if self.closed:
            return False
        self.closed = True
        if not open:
            return False
        try:
            self.loop.call_soon_threadsafe(self._tear_down)
        except RuntimeError:
            self._start_anew()      # its loop is closed: nobody could have closed the client
            return False
        return True
