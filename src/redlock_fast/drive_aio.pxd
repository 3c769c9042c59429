# See drive_aio.pyx for the contract.

from libc.stdint cimport int64_t

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.link cimport Link
from redlock_fast._core.op cimport Op
from redlock_fast._core.wire cimport Buf

cdef class Chan:
    cdef int fd             # -1: closed
    cdef int slot
    cdef bint opening       # the connect has not come to its end
    cdef bint reading       # registered with the loop
    cdef bint writing       # likewise: while opening, and while the socket takes no more
    cdef Buf pend           # bytes that the socket did not take,
    cdef size_t sent        # from here on
    cdef int64_t mark       # the link's count of commands that have left

cdef enum Stage:
    FRESH = 0       # not awaited yet
    QUEUED = 1      # waits for its turn
    ASKED = 2       # under way
    ENDED = 3       # over
    LEFT = 4        # not over, but nobody waits any more

cdef class Round:
    cdef Driver driver
    cdef readonly Op op
    cdef readonly int64_t now_ns    # when its end was seen
    cdef int stage                  # a Stage
    cdef int life                   # the driver's
    cdef bint counted               # among the rounds under way
    cdef bint alone                 # no plan cleans up after it
    cdef object future              # that its task waits for
    cdef object failure             # why it could not begin, or could not go on

    cdef int _leave(self) except -1
    cdef int _end(self) except -1
    cdef int _end_later(self) except -1

cdef bint waits(object what) except -1
cdef bint wakes_task(object callback) noexcept

cdef class Driver:
    cdef object __weakref__
    cdef readonly Fleet fleet
    cdef readonly object loop       # None: not bound yet
    cdef readonly bint closed       # refuses rounds
    cdef readonly int inside        # rounds under way
    cdef readonly int64_t sends     # system calls that sent something
    cdef int n
    cdef int life                   # how often it was begun anew
    cdef bint over                  # the plan that was stepped last has ended
    cdef list chans                 # per slot: a Chan, or None
    cdef list dials                 # sockets between their making and their chan
    cdef char* rx
    # of the loop
    cdef object call_soon
    cdef object call_later
    cdef object resolved            # a future of its that is
    cdef object wake_callback
    cdef object flush_callback
    cdef object read_callback
    cdef object write_callback
    cdef object timer_callback
    cdef object answer_callback
    cdef object timer               # its handle
    cdef int64_t timer_ns           # when it fires
    cdef bint scheduled             # a flush is
    cdef bint rousing               # ... and comes at the end of this callback,
    cdef unsigned long rouser       # which runs in this thread
    cdef bint waking                # a call of `_on_wake` is under way
    cdef int64_t queued_ns          # when it was scheduled
    cdef int64_t grace_ns           # no round is judged before
    cdef int64_t active_ns          # when the sockets were last looked at
    cdef int64_t tick_ns            # when to look after debts
    cdef int64_t tick_pause_ns
    cdef int64_t tick_answers
    # who waits
    cdef list inbox                 # rounds that have ended, whose waiters are to be woken
    cdef list spare                 # futures for rounds to come,
    cdef Py_ssize_t spares          # so many
    cdef list rounds                # of one lock, by their limits,
    cdef Py_ssize_t passed          # from here on
    cdef list heap                  # (time, serial, batch or future of a sleeper)
    cdef int64_t serial
    cdef int stale                  # entries of the heap that nobody waits for
    cdef list parts                 # batches that have more to send
    cdef list watchers              # futures of who waits for any news
    cdef object tries               # deque of rounds: who waits for its turn to acquire,
    cdef object others              # and to do anything else

    cpdef Round attempt(self, Op op)
    cpdef int enter(self) except -1
    cdef int _bind(self, object loop) except -1
    cdef int _start_anew(self) except -1
    cdef int _forget(self) except -1
    cdef object _advance(self, object plan, object answer)
    cdef Round _round(self, Op op, bint alone)
    cdef int _launch(self, Round what) except -1
    cdef int _begin(self, Round what) except -1
    cdef int _pass_one(self) except -1
    cdef int64_t _end(self, Op op) except -1
    cdef int _abandon(self, Op op, bint counted) except -1
    cdef int _admit(self) except -1
    cdef int _admit_one(self, Round what) except -1
    cdef object _sleeper(self, int64_t until)
    cpdef int settle(self) except -1
    cdef int _schedule(self, int64_t now) except -1
    cdef int _send(self, Chan c, Link link, int64_t now) except -1
    cdef int _read(self, Chan c) except -1
    cdef int _looked(self, int64_t now) except -1
    cdef int _rouse(self) except -1
    cdef int _rouse_soon(self) except -1
    cdef int64_t _freshen(self, int64_t now) except -1
    cdef int _settle_rivals(self, int64_t now) except -1
    cdef int _dial(self, int64_t now) except -1
    cdef int _dial_one(self, Link link, int slot, int64_t now) except -1
    cdef int _opened(self, Chan c) except -1
    cdef int _failed(self, Chan c, Link link, str cause, int64_t now) except -1
    cdef int _shut(self, int slot, bint abort) except -1
    cdef int _bury_down(self) except -1
    cdef int _keep_time(self) except -1
    cdef int _expire(self, Round what, int64_t now) except -1
    cdef int _ended(self, Round what) except -1
    cdef int _arm(self, int64_t at, int64_t now) except -1
    cdef int _rearm(self, int64_t now) except -1
