# See drive_sync.pyx for the contract.

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.pump cimport Pump

cdef class Driver:
    cdef object __weakref__
    cdef readonly Fleet fleet
    cdef readonly Pump pump
    cdef object _closed         # threading.Event: set by close(), wakes who sleeps

    cpdef drive(self, object plan)
