# C types of resolve.py.

cdef class Answer:
    cdef public bint done
    cdef public tuple places
    cdef public str username
    cdef public object password
    cdef public str outcome
    cdef public str cause
