# C types of asyncio.py, for speed only.

from redlock_fast.drive_aio cimport Driver, Round
from redlock_fast.holds cimport BaseClient, BaseLock
from redlock_fast.plan cimport Hold, deleted, deletion, granted

cdef class Lock(BaseLock):
    pass

cdef class Redlock(BaseClient):
    cdef readonly Driver _driver

    cpdef Round _attempt(self, object resource, object ttl)
    cpdef object _granted(self, Round attempt)
    cpdef Round _deletion(self, Hold lock)
    cpdef object _deleted(self, Hold lock, Round attempt)
