# C types of rules.py, for the compiled core; the rules themselves stand there.

cimport cython

cpdef int quorum(int n) noexcept
cpdef long long ns_of(long long ms) noexcept


@cython.locals(q=int)
cpdef int acquire_verdict(int yes, int no, int still_open, int n) noexcept


@cython.locals(q=int)
cpdef int holder_verdict(int yes, int no, int still_open, int n) noexcept


@cython.locals(share=double, whole=cython.longlong)
cpdef long long drift_ns(long long ttl_ns, double factor) noexcept
