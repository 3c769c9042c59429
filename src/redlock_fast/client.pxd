# C types of client.py, for speed only.

from redlock_fast.drive_sync cimport Driver
from redlock_fast.holds cimport BaseClient

cdef class Redlock(BaseClient):
    cdef readonly Driver _driver

    cpdef _try(self, object resource, object ttl, object wait)
