# Drives a fleet for threads. See pump.pyx for the contract.

from libc.stdint cimport int64_t, uint64_t

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.io cimport Chan, Mover, Waiter
from redlock_fast._core.link cimport Link
from redlock_fast._core.op cimport Op

cdef class Pump:
    cdef object __weakref__
    cdef readonly Fleet fleet
    cdef readonly Mover mover
    cdef readonly bint closed       # refuses rounds
    cdef public bint leaving        # close() is over; the last caller tears down
    cdef bint torn                  # has no connections any more, for good
    cdef int n
    cdef unsigned long parser       # the thread that parses, while mover.parsing
    cdef int64_t active_ns          # when the sockets were last looked at
    cdef int64_t back_ns            # nobody did for long, until then; 0: that was seen to
    cdef public bint paying         # a thread of the driver's looks after debts
    cdef list dials                 # sockets between their making and the mover
    cdef bint gathering             # a thread waits for others' commands, to encrypt them together
    cdef bint sealing               # a thread is inside OpenSSL, maybe without the GIL,
    cdef unsigned long sealer       # this one;
    cdef bint unsealed              # others had something to say meanwhile,
    cdef bint owing                 # which was put into records, and is to be sent
    cdef readonly int64_t looks
    cdef public int64_t tick_ns     # a thread that waits wakes so often for signals

    cpdef int64_t run(self, Op op) except -1
    cpdef bint settle(self) except -1
    cdef int _check(self) except -1
    cdef bint _within(self) noexcept
    cdef int _idle(self, int64_t timeout_ns) except -1
    cdef int64_t _freshen(self, int64_t now) except -1
    cdef int _look(self, int64_t now) except -1
    cdef int _settle_rivals(self, int64_t now) except -1
    cdef object _parse(self, uint64_t todo, int64_t now)
    cdef object _unseal(self, uint64_t todo, int64_t now)
    cdef object _seal(self)
    cdef int _events(self, Link link, Chan* c, int64_t now) except -1
    cdef int _opened(self, Link link, Chan* c, int64_t now) except -1
    cdef int _dial(self, int64_t now) except -1
    cdef int _dial_one(self, Link link, int slot, int64_t now) except -1
    cdef int _bury_down(self) except -1
    cdef int _post(self) except -1
    cdef int _wake_decided(self) except -1
    cdef bint _concerned(self, Waiter* w) noexcept
    cdef void _aim(self, Waiter* w, Op op, bint first) noexcept
