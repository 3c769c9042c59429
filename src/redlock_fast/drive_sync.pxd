# C types of drive_sync.py, for speed only.

cimport cython

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.io cimport Pump

cdef class Driver:
    cdef public Fleet fleet
    cdef public Pump pump
    cdef object _closed
    cdef object _janitor

    @cython.locals(pump=Pump)
    cpdef drive(self, object plan)
