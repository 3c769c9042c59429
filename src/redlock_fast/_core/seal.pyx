"""TLS of one connection: the link's bytes on one side, records on the other.

Given `tls.TlsOptions`, shakes hands, puts commands into records (`write`, to `out`) and takes
replies out of them (`read`, to `plain`), with Python's `ssl` over `MemoryBIO`. Driven by the link,
which is told of an end by `trouble`.

Never: system calls, clocks. But OpenSSL runs with the GIL given up, on an object that only one
thread may use at a time: whoever drives the link sees to that. And `ssl` runs signal handlers in
between: when anything is raised here, nobody knows what was done, and the connection has to be
given up.

OpenSSL has locks of the whole process, which a child inherits as they are: a fork waits until no
thread of ours is inside, and whoever wants to go in meanwhile waits for the fork.
"""

import os

from cpython.pythread cimport PyThread_get_thread_ident
from posix.time cimport timespec

from redlock_fast._core.wire cimport buf_free, buf_put

cdef extern from "<time.h>" nogil:
    int nanosleep(const timespec*, timespec*)

cdef enum:
    MOST = 4096             # bytes taken out at a time
    # A fork, and who wants to go in meanwhile, wait in naps, about a second at most: somebody
    # else's signal handler or hook may take as long as it likes.
    NAP_NS = 50_000
    MOST_NAPS = 10_000
    MOST_INSIDE = 256       # threads that a fork waits for

# The threads inside OpenSSL. A C array, as this is done for each record.
cdef unsigned long[MOST_INSIDE] _inside
cdef int _inside_count = 0
cdef int _forkers = 0           # threads that are about to fork
cdef unsigned long _forker = 0  # the last one of them, unless it has forked already


cdef unsigned long _enter() noexcept:
    """This thread goes in; who it is, for `_leave`."""
    global _inside_count
    cdef timespec pause = timespec(0, NAP_NS)
    cdef unsigned long me = PyThread_get_thread_ident()
    cdef int naps = 0
    while _forkers and _forker != me and naps < MOST_NAPS:
        naps += 1
        with nogil:
            nanosleep(&pause, NULL)
    if _inside_count < MOST_INSIDE:
        _inside[_inside_count] = me
        _inside_count += 1
    return me


cdef void _leave(unsigned long me) noexcept:
    global _inside_count
    cdef int i
    for i in range(_inside_count - 1, -1, -1):
        if _inside[i] == me:
            _inside_count -= 1
            _inside[i] = _inside[_inside_count]
            return
    # A signal handler has forked in there, and this is the child; or there were too many.


cdef bint _others_inside(unsigned long me) noexcept:
    cdef int i
    for i in range(_inside_count):
        if _inside[i] != me:
            return True
    return False


def _before_fork():
    global _forker, _forkers
    cdef timespec pause = timespec(0, NAP_NS)
    cdef unsigned long me = PyThread_get_thread_ident()
    cdef int naps = 0
    _forker = me
    _forkers += 1
    # (Where this is a signal handler, this thread itself may be inside.)
    while _others_inside(me) and naps < MOST_NAPS:
        naps += 1
        with nogil:
            nanosleep(&pause, NULL)


def _after_fork_in_parent():
    global _forker, _forkers
    # (Imported in the middle of a fork, this is told of its end and not of its beginning.)
    _forkers = max(_forkers - 1, 0)
    if _forker == PyThread_get_thread_ident():
        _forker = 0


def _after_fork_in_child():
    global _forkers, _inside_count
    _forkers = 0
    _inside_count = 0


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)

cdef object ssl = None      # the module; nobody pays for its import who needs no TLS


cdef class Seal:
    """TLS of one connection.

    Args:
        options: `tls.TlsOptions`.
    """

    def __cinit__(self, options):
        global ssl
        if ssl is None:
            import ssl
        self.options = options
        self.due = True

    def __dealloc__(self):
        buf_free(&self.out)
        buf_free(&self.plain)

    cdef int shake(self) except -1:
        """Begin the handshake, or go on with it; `open` says whether that was the end of it."""
        cdef unsigned long me
        self.due = False
        if self.tls is None:
            self.incoming = ssl.MemoryBIO()
            self.outgoing = ssl.MemoryBIO()
            self.tls = self.options.context.wrap_bio(
                self.incoming, self.outgoing, server_hostname=self.options.server_hostname
            )
        me = _enter()
        try:
            self.tls.do_handshake()
            self.open = True
            self._measure()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._failed(error)
        finally:
            _leave(me)
        return self._drain()

    cdef int _measure(self) except -1:
        cdef str name = self.tls.cipher()[0]
        if self.tls.version() == "TLSv1.3":
            self.extra = 9 if "CCM_8" in name else 17   # the authentication tag, the type
        else:
            self.extra = 24 if "GCM" in name else 16    # the nonce, too
        return 0

    cdef int write(self, bytes data) except -1:
        """Put bytes into records."""
        cdef unsigned long me = _enter()
        try:
            # With a MemoryBIO, which takes everything, this is all or nothing.
            self.tls.write(data)
        except ssl.SSLError as error:
            self._failed(error)
        finally:
            _leave(me)
        return self._drain()

    cdef int read(self, bytes records) except -1:
        """Bytes came, cut anywhere: take out what is whole."""
        cdef bytes data
        cdef Py_ssize_t size = 0
        cdef unsigned long me
        if records:
            self.incoming.write(records)
        if not self.open:
            self.shake()
        me = _enter()
        try:
            # To ask once more for nothing would cost an exception.
            while self.open and (self.incoming.pending or size == MOST):
                data = self.tls.read(MOST)
                size = len(data)
                if size == 0:
                    self.trouble = ("closed", "connection closed by the server")
                    break
                if buf_put(&self.plain, data, size) != 0:
                    raise MemoryError("no memory for replies")
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._failed(error)
        finally:
            _leave(me)
        return self._drain()

    cdef int _drain(self) except -1:
        cdef bytes records
        if self.outgoing.pending:
            records = self.outgoing.read()
            if buf_put(&self.out, records, len(records)) != 0:
                raise MemoryError("no memory for a command")
        return 0

    cdef int _failed(self, object error) except -1:
        """Say it in the link's words."""
        cdef str reason = (error.reason or "").replace("_", " ").lower()
        if isinstance(error, ssl.SSLCertVerificationError):
            cause = f"the server's certificate was refused: {error.verify_message}"
            self.trouble = ("CONFIG", cause)
        elif "alert" in reason:
            # The server does not like what it was shown, such as no certificate.
            self.trouble = ("CONFIG", f"the server ended TLS: {reason}")
        elif reason == "wrong version number":
            cause = "TLS failed: the answer is no TLS record; does the port speak TLS?"
            self.trouble = ("PROTO", cause)
        else:
            cause = f"TLS failed: {reason or error.strerror or 'no reason given'}"
            self.trouble = ("PROTO", cause)
        return 0
