# C types of asyncio.py, for speed only.

from redlock_fast.drive_aio cimport Driver
from redlock_fast.holds cimport BaseClient

cdef class Redlock(BaseClient):
    cdef readonly Driver _driver
