# Bytes <-> replies. See wire.pyx for the contract.

from libc.stdint cimport int64_t


cdef struct Buf:
    char* p         # owned; NULL while cap is 0
    size_t n        # bytes in use
    size_t cap      # bytes allocated


cdef int buf_reserve(Buf* b, size_t more) noexcept nogil
cdef int buf_put(Buf* b, const char* p, size_t n) noexcept nogil
cdef void buf_free(Buf* b) noexcept nogil

cdef int put_set(Buf* b, bytes key, bytes token, int64_t ttl_ms) except -1
cdef int put_script(
    Buf* b, bytes text, bytes sha, bint full, bytes key, bytes token, int64_t arg_ms
) except -1
cdef int put_command(Buf* b, tuple words) except -1

cpdef str error_kind(str text)
cdef bint odd_start(const char* p, size_t n) noexcept
cdef str odd_text(const char* p, size_t n)


# What one reply is, type before value. ODD: none of what a lock client may be told.
cdef enum Reply:
    ODD = 0
    OK = 1          # +OK
    STATUS = 2      # + with another text
    NIL = 3         # $-1
    INTEGER = 4     # : with a value
    ERROR = 5       # - with a text


cdef class Replies:
    cdef object _reader
    cdef object _feed
    cdef object _gets
    cdef Buf _chunk             # room for the header of an array, then whole lines of all runs
    cdef size_t _at             # in _chunk: the next reply's line, while they go one at a time
    cdef Buf _starts            # the first byte of each line
    cdef int _count             # lines in _chunk
    cdef int _taken             # of them, handed out
    cdef list _values           # what hiredis made of them; None: one at a time
    cdef readonly int64_t integer   # value of the last INTEGER
    cdef readonly str text          # text of the last ERROR or ODD
    cdef int begin(self) except -1
    cdef int add(self, const char* p, size_t n) except -1
    cdef int parse(self) except -1
    cdef Reply next(self) except *
    cdef int skip(self, int count) except -1
    cdef object _one(self, const char* p, size_t n)
    cdef int _renew(self) except -1
