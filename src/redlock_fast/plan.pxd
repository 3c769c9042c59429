# C types of plan.py, for speed only; what the plans do stands there.

cimport cython
from libc.stdint cimport int64_t, uint32_t

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.op cimport Op, new_op, single_op
from redlock_fast.rules cimport drift_ns, ns_of

cdef class Settings:
    cdef public int64_t retries
    cdef public int64_t retry_delay_ns
    cdef public double drift_factor
    cdef public object draw
    cdef public object jitter
    cdef public type lock_type
    cdef public int64_t warned_ns

    @cython.locals(ttl_ns=int64_t)
    cpdef int64_t lasting_ns(self, int64_t ttl_ms) except -1

cdef class Hold:
    cdef object __weakref__
    cdef public bytes key
    cdef public bytes secret
    cdef public int64_t ttl_ms
    cdef public uint32_t reached
    cdef public int64_t deadline_ns
    cdef public int64_t validity_ns
    cdef public int state
    cdef public str reason
    cdef public Op origin
    cdef public int item
    cdef public object resource
    cdef public object owner
    cdef public object process
    cdef public object guard

    cpdef claim(self, object resource, object owner, object process)
    cpdef uint32_t voters(self) except? 0xFFFFFFFF
    cpdef lose(self, str reason)


@cython.locals(hold=Hold)
cdef Hold _grant(
    Settings settings, Op op, int item, uint32_t reached, int64_t ttl_ms, int64_t deadline_ns,
    int64_t now_ns
)
cdef object _released(Fleet fleet, Hold hold, int word)
cpdef Op attempt(Fleet fleet, Settings settings, bytes key, int64_t ttl_ms)


@cython.locals(deadline=int64_t)
cpdef Hold granted(Fleet fleet, Settings settings, Op op, int64_t now)


@cython.locals(op=Op)
cpdef Op deletion(Fleet fleet, Hold hold)
cpdef object deleted(Fleet fleet, Hold hold, Op op)
