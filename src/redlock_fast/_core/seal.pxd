# TLS of one connection. See seal.pyx for the contract.

from redlock_fast._core.wire cimport Buf

cdef class Seal:
    cdef readonly bint open     # the handshake is over
    cdef readonly int extra     # bytes of a record that are no data; fewer is safe
    cdef Buf out                # records to send; whoever drives the link takes them away
    cdef Buf plain              # what records held, and nobody has taken yet
    cdef bint due               # the handshake is to be begun
    cdef object trouble         # (outcome, cause): what ended it, behind `plain`; or None
    cdef object options         # tls.TlsOptions
    cdef object tls             # ssl.SSLObject; None: the handshake has not begun
    cdef object incoming        # ssl.MemoryBIO: records read
    cdef object outgoing        # ... and written

    cdef int shake(self) except -1
    cdef int write(self, bytes data) except -1
    cdef int read(self, bytes records) except -1
    cdef int _drain(self) except -1
    cdef int _failed(self, object error) except -1
    cdef int _measure(self) except -1
