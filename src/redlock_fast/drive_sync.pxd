# See drive_sync.pyx for the contract.

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.pump cimport Pump

cdef class Driver:
    cdef object __weakref__
    cdef readonly Fleet fleet
    cdef readonly Pump pump
    cdef long long _limit_ns    # of close()
    cdef object _gate           # a lock that is held until close(): who sleeps waits for it

    cpdef drive(self, object plan)
    cpdef hand_over(self, object locks)
    cpdef seize(self, object guard)
    cdef int _leave(self) except -1
    cdef bint _nap(self, double seconds) except -1
