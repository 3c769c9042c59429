"""TLS of one connection: the link's bytes on one side, records on the other.

Given `tls.TlsOptions`, shakes hands, puts commands into records (`write`, to `out`) and takes
replies out of them (`read`, to `plain`), with Python's `ssl` over `MemoryBIO`. Driven by the link.

Never: system calls, clocks. But OpenSSL runs with the GIL given up, on an object that only one
thread may use at a time: whoever drives the link sees to that. And `ssl` runs signal handlers in
between: when something is raised that is no `SSLError`, nobody knows what was done, and the
connection has to be given up.
"""

import ssl

from redlock_fast._core.wire cimport buf_free, buf_put

cdef enum:
    MOST = 4096             # bytes taken out at a time


cdef class Seal:
    """TLS of one connection.

    Args:
        options: `tls.TlsOptions`.
    """

    def __cinit__(self, options):
        self.options = options
        self.due = True

    def __dealloc__(self):
        buf_free(&self.out)
        buf_free(&self.plain)

    cdef int shake(self) except -1:
        """Begin the handshake, or go on with it; `open` says whether that was the end of it."""
        self.due = False
        if self.tls is None:
            self.incoming = ssl.MemoryBIO()
            self.outgoing = ssl.MemoryBIO()
            self.tls = self.options.context.wrap_bio(
                self.incoming, self.outgoing, server_hostname=self.options.server_hostname
            )
        try:
            self.tls.do_handshake()
            self.open = True
            self._measure()
        except ssl.SSLWantReadError:
            pass
        finally:
            self._drain()       # an alert, too, says why
        return 0

    cdef int _measure(self) except -1:
        cdef str name = self.tls.cipher()[0]
        if self.tls.version() == "TLSv1.3":
            self.extra = 9 if "CCM_8" in name else 17   # the authentication tag, the type
        else:
            self.extra = 24 if "GCM" in name else 16    # the nonce, too
        return 0

    cdef int write(self, bytes data) except -1:
        """Put bytes into records."""
        # With a MemoryBIO, which takes everything, this is all or nothing.
        self.tls.write(data)
        return self._drain()

    cdef int read(self, bytes records) except -1:
        """Bytes came, cut anywhere: take out what is whole, also if then an error is raised."""
        cdef bytes data
        cdef Py_ssize_t size = 0
        if records:
            self.incoming.write(records)
        if not self.open:
            self.shake()
        try:
            # To ask once more for nothing would cost an exception.
            while self.open and (self.incoming.pending or size == MOST):
                data = self.tls.read(MOST)
                size = len(data)
                if size == 0:
                    raise ssl.SSLZeroReturnError("closed")
                if buf_put(&self.plain, data, size) != 0:
                    raise MemoryError("no memory for replies")
        except ssl.SSLWantReadError:
            pass
        return self._drain()

    cdef int _drain(self) except -1:
        cdef bytes records
        if self.outgoing.pending:
            records = self.outgoing.read()
            if buf_put(&self.out, records, len(records)) != 0:
                raise MemoryError("no memory for a command")
        return 0


cdef tuple seal_trouble(object error):
    """What an `SSLError` means for the link: (outcome, cause)."""
    cdef str reason
    if isinstance(error, ssl.SSLCertVerificationError):
        return "CONFIG", f"the server's certificate was refused: {error.verify_message}"
    if isinstance(error, ssl.SSLZeroReturnError):
        return "closed", "connection closed by the server"
    reason = (error.reason or "").replace("_", " ").lower()
    if "alert" in reason:
        # The server does not like what it was shown, such as no certificate.
        return "CONFIG", f"the server ended TLS: {reason}"
    if reason == "wrong version number":
        return "PROTO", "TLS failed: the answer is no TLS record; does the port speak TLS?"
    return "PROTO", f"TLS failed: {reason or error.strerror or 'no reason given'}"
