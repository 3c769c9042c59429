# C types of arguments.py, for speed only.

cpdef bytes resource_key(object resource)
cpdef long long ttl_ms(object value, double drift_factor) except -1
