"""Drives plans for threads: rounds through the shared pump, sleeps, and the janitor.

Given a plan, runs it to its end in the calling thread. All threads of a client share one `Driver`
and its pump. While deletions are not answered, and a second after, a daemon thread (the janitor)
looks after the connections, as no other call may come along.
"""

import logging
import sys
from _thread import allocate_lock, start_new_thread

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int64_t

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.io cimport clock_ns
from redlock_fast._core.op cimport ACQUIRE, Op
from redlock_fast._core.pump cimport Pump

from redlock_fast import plan as plans
from redlock_fast.errors import ClosedError

cdef extern from "Python.h":
    ctypedef enum PySendResult:
        PYGEN_RETURN
        PYGEN_ERROR
        PYGEN_NEXT
    # A generator's result without the exception that `send` would wrap it in.
    PySendResult PyIter_Send(object generator, object value, PyObject** result) except PYGEN_ERROR

log = logging.getLogger("redlock_fast")

# A sleeping thread wakes so often for signals that were delivered to another thread.
cdef double _TICK_S = 0.1
# The janitor looks so often; debts are paid at once when a connection is there.
cdef double _JANITOR_S = 0.02
# It stays so long after the last debt, or every single release would start a thread.
cdef double _LINGER_S = 1.0

cdef str _FORKED = "this process was forked in the middle of the call"

# However many answers keep coming, closing takes no longer.
cdef long long _CLOSE_NS = 5_000_000_000


@cython.final
cdef class Driver:
    """Runs the plans of one client.

    Args:
        fleet: the client's masters.
    """

    def __init__(self, Fleet fleet not None):
        self.fleet = fleet
        self.pump = Pump(fleet)
        # Nothing here is a `threading.Event`: that is Python code, in the middle of which a signal
        # handler may use the client, and would wait for itself, or another thread may fork.
        self._gate = allocate_lock()
        self._gate.acquire()

    cpdef drive(self, object plan):
        """Run a plan to its end; its result is ours, and so is what it raises.

        Raises:
            ClosedError: the client is closed, or was closed meanwhile.
            RuntimeError: the process was forked meanwhile, by a signal handler, and this is the
                child: it owns nothing of what the parent is about to get.
        """
        cdef PyObject* given
        cdef object step, answer = None
        cdef bint ended = False
        cdef int forks = self.fleet.forks
        try:
            while True:
                ended = True        # unless it says otherwise: also when it raises
                sent = PyIter_Send(plan, answer, &given)
                step = <object> given
                Py_DECREF(step)
                if sent == PYGEN_RETURN:
                    break
                ended = False
                if type(step) is Op:
                    answer = self.pump.run(<Op> step)
                elif step is None:
                    answer = clock_ns()
                else:
                    answer = self._sleep(step)
                if self.fleet.forks != forks:
                    raise RuntimeError(_FORKED)
        except BaseException:
            if not ended:
                plan.close()        # lets the plan clean up what it has sent
            self._leave()
            raise
        try:
            self._leave()
            if self.fleet.forks != forks:
                raise RuntimeError(_FORKED)
        except BaseException:
            plans.disown(self.fleet, step)
            self.pump.settle()
            raise
        return step

    cpdef int64_t attempt(self, Op op) except -1:
        """Run a round without a plan; returns when it ended. Raises what `drive` does.

        If it is cut short, what an acquire has sent is cleaned up. Else the caller judges it, and
        then calls `leave`: not before, as a client that was closed meanwhile disconnects there.
        """
        cdef int64_t now
        cdef int forks = self.fleet.forks
        try:
            now = self.pump.run(op)
            if self.fleet.forks != forks:
                raise RuntimeError(_FORKED)
        except BaseException:
            if op.kind == ACQUIRE:
                self.fleet.clean_up(op)
            self._leave()
            raise
        return now

    cpdef leave(self, Op op):
        """A round that `attempt` has run was judged: send what that left to be sent.

        If that does not go well, nobody gets the lock that it granted. Raises what `drive` does.
        """
        try:
            self._leave()
            if self.fleet.forks != op.forks:
                raise RuntimeError(_FORKED)
        except BaseException:
            if op.kind == ACQUIRE:
                self.fleet.clean_up(op)
            self.pump.settle()
            raise

    cpdef hand_over(self, object locks):
        """These are about to be returned to the caller: a lock, or a list of them.

        What a signal handler raises now still finds somebody who can clean up; between here and
        the caller's assignment it does not.
        """
        try:
            PyErr_CheckSignals()
        except BaseException:
            plans.disown(self.fleet, locks)
            self.pump.settle()
            raise

    cdef int _leave(self) except -1:
        """A plan has ended: send what it left to be sent."""
        if self.pump.settle():
            self._settle()
        if self.pump.leaving and not self.pump.callers:
            # The client was closed meanwhile, and close() could not wait for this call.
            try:
                self._settle_all()
            finally:
                self.pump.tear_down()
        return 0

    cdef bint _nap(self, double seconds) except -1:
        """Sleep, for at most one tick. True: the client was closed."""
        if not self._gate.acquire(True, min(seconds, _TICK_S)):
            PyErr_CheckSignals()
            return False
        self._gate.release()
        return True

    def _sleep(self, pause_ns):
        """Sleep, interruptible by signals and by `close`. Returns the time."""
        self.pump.settle()
        until = clock_ns() + pause_ns
        left = pause_ns / 1e9
        while True:
            if self._nap(left):
                raise ClosedError("the client was closed while the call waited")
            now = clock_ns()
            if now >= until:
                return now
            left = (until - now) / 1e9

    cpdef seize(self, object guard):
        """Acquire a guard (an RLock) that another thread of this client's may have.

        Raises:
            ClosedError: the client was closed meanwhile.
            RuntimeError: this very thread has it: a signal handler wants to do what it has
                interrupted.
        """
        if guard._is_owned():
            raise RuntimeError("cannot extend a lock from within an extension of it")
        while not guard.acquire(True, _TICK_S):
            PyErr_CheckSignals()
            if self.pump.closed:
                raise ClosedError("the client was closed while the call waited")

    def _settle(self):
        """There is news for the log, or debts that nobody may be there to pay."""
        plans.tell(self.fleet)
        if self.fleet.indebted and not self.pump.paying and not self.pump.closed:
            # (A thread that is started while the interpreter ends never runs.)
            if sys.is_finalizing():
                return
            self.pump.paying = True
            try:
                # Not a `threading.Thread`, whose start waits in Python code: see `_gate`.
                start_new_thread(self._pay, ())
            except RuntimeError as exc:     # no more threads
                self.pump.paying = False
                log.warning("clean-ups wait for the next call: %s", exc)

    def _pay(self):
        """The janitor: looks after the connections while deletions are not answered."""
        pause = _JANITOR_S
        quiet = 0.0
        looks = answers = -1
        try:
            while not self._nap(pause):
                if not self.fleet.indebted:
                    quiet += pause
                    if quiet >= _LINGER_S:
                        break
                elif self.pump.looks != looks:
                    quiet = 0.0         # callers are at work, and look as they go
                else:
                    quiet = 0.0
                    self.pump.idle(0)
                # A master that hangs for long is not worth fifty looks a second.
                pause = _JANITOR_S if self.fleet.answers != answers else min(2 * pause, _TICK_S)
                answers = self.fleet.answers
                looks = self.pump.looks
        except ClosedError:
            pass
        except Exception:
            log.exception("the janitor failed; clean-ups wait for the next call")
        finally:
            self.pump.paying = False

    def connect(self, limit_ns):
        """Open the connections; returns when each is ready or has failed, or after `limit_ns`."""
        until = clock_ns() + limit_ns
        self.pump.idle(0)
        while self.fleet.connecting and clock_ns() < until:
            self.pump.idle(min(until - clock_ns(), 10_000_000))
        if self.pump.settle():
            self._settle()

    def close(self, limit_ns):
        """End waiting callers with ClosedError, settle what is owed, disconnect.

        Clean-ups are waited for until no master has answered anything for `limit_ns`: cutting a
        connection while answers are on their way would make a server drop what it has not read.
        """
        if self.pump.closed:
            return
        self._limit_ns = limit_ns
        self.pump.shut()
        try:
            self._gate.release()
            self._settle_all()
        finally:        # whatever a signal handler raises
            # A caller that a signal handler closes under has not been able to clean up yet: it
            # does so on its way out.
            self.pump.leaving = True
            if not self.pump.callers:
                self.pump.tear_down()

    def _settle_all(self):
        """Wait for callers to leave, and for what masters owe."""
        now = clock_ns()
        end = now + max(self._limit_ns, _CLOSE_NS)
        until = now + self._limit_ns
        answers = self.fleet.answers
        callers = self.pump.callers
        while now < min(until, end) and (callers or self.fleet.unsettled):
            if callers:
                # Each is on its way out, and leaves a clean-up behind; one that was just about to
                # wait has not heard of it.
                self.pump.shut()
            self.pump.last_call(min(until - now, 5_000_000))
            now = clock_ns()
            if self.fleet.answers != answers or self.pump.callers != callers:
                answers = self.fleet.answers
                callers = self.pump.callers
                until = now + self._limit_ns
