# C types of holds.py, for speed only.

from libc.stdint cimport int64_t

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.op cimport Op
from redlock_fast.arguments cimport resource_key, ttl_ms
from redlock_fast.plan cimport Hold, Settings, attempt

cimport cython

cpdef let_others_run(Py_ssize_t i)

cdef class BaseLock(Hold):
    pass

cdef class BaseClient:
    cdef object __weakref__
    cdef dict __dict__
    cdef readonly Fleet _fleet
    cdef readonly Settings _settings
    cdef int64_t _patience_ns
    cdef int64_t _connect_ns

    cpdef Op _first_try(self, object resource, object ttl)

    @cython.locals(hold=Hold)
    cpdef _claimed(self, object lock, object resource)

    @cython.locals(hold=Hold)
    cpdef _check(self, object lock)

    @cython.locals(hold=Hold)
    cpdef bint _releasable(self, object lock) except *
