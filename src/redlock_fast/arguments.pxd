# C types of arguments.py, for speed only.

cimport cython

from redlock_fast.rules cimport drift_ns, ns_of


@cython.locals(text=str)
cpdef bytes resource_key(object resource)


@cython.locals(ms=cython.longlong, ns=cython.longlong)
cpdef long long ttl_ms(object value, double drift_factor) except -1
