# See drive_sync.pyx for the contract.

from libc.stdint cimport int64_t

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.op cimport Op
from redlock_fast._core.pump cimport Pump

cdef class Driver:
    cdef object __weakref__
    cdef readonly Fleet fleet
    cdef readonly Pump pump
    cdef long long _limit_ns    # of close()
    cdef object _gate           # a lock that is held until close(): who sleeps waits for it

    cpdef drive(self, object plan)
    cpdef int64_t attempt(self, Op op) except -1
    cpdef leave(self, Op op)
    cpdef hand_over(self, object locks)
    cpdef seize(self, object guard)
    cdef int _leave(self) except -1
    cdef bint _nap(self, double seconds) except -1
