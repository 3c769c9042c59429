# C types of client.py, for speed only.

from libc.stdint cimport int64_t

from redlock_fast._core.op cimport Op
from redlock_fast.drive_sync cimport Driver
from redlock_fast.holds cimport BaseClient, BaseLock
from redlock_fast.plan cimport Hold, deleted, deletion, granted

cimport cython

cdef class Lock(BaseLock):
    pass

cdef class Redlock(BaseClient):
    cdef readonly Driver _driver

    @cython.locals(op=Op, now=int64_t)
    cpdef tuple _try(self, object resource, object ttl, object wait)
