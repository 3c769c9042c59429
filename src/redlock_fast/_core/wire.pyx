"""Bytes to and from the masters: commands are appended to buffers, whole lines become replies.

Given resources, tokens and times, writes RESP commands into a `Buf`. Given whole lines that a
master sent, says reply by reply what each is. Driven by `link`, under the GIL.

hiredis parses, but gives equal Python values for different replies (`+OK` and `$2 OK`, `:1` and a
boolean), so the first byte of each line is looked at before anything is fed: the type comes before
the value. RESP2 only. Every reply a lock client expects is a single line, so a bulk string, an
array or a push is a breach of protocol here, and nothing larger than a line is ever buffered.

Never: system calls, clocks, knowledge of what a command was for.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcpy

import hiredis

# A line longer than this closes the link (DESIGN, rule 11); Redis' own errors are far shorter.
MAX_LINE = 64 * 1024

_MORE = object()    # what gets() returns when it wants more bytes; False would also be a value


cdef int buf_reserve(Buf* b, size_t more) noexcept nogil:
    """Make room for `more` bytes; -1 when there is no memory (the buffer is as before)."""
    cdef size_t cap = b.cap
    cdef char* p
    if b.n + more <= cap:
        return 0
    cap = 512 if cap == 0 else cap * 2
    while cap < b.n + more:
        cap *= 2
    p = <char*> realloc(b.p, cap)
    if p == NULL:
        return -1
    b.p = p
    b.cap = cap
    return 0


cdef int buf_put(Buf* b, const char* p, size_t n) noexcept nogil:
    if buf_reserve(b, n) != 0:
        return -1
    memcpy(b.p + b.n, p, n)
    b.n += n
    return 0


cdef void buf_free(Buf* b) noexcept nogil:
    free(b.p)
    b.p = NULL
    b.n = 0
    b.cap = 0


# -- commands ----------------------------------------------------------------------------------

cdef inline char* _lay(char* to, const char* p, size_t n) noexcept nogil:
    memcpy(to, p, n)
    return to + n


cdef inline char* _lay_number(char* to, int64_t value) noexcept nogil:
    """Decimal digits of a value >= 0."""
    cdef char digits[24]
    cdef int i = 24
    while True:
        i -= 1
        digits[i] = <char> (c'0' + value % 10)
        value //= 10
        if value == 0:
            break
    return _lay(to, digits + i, 24 - i)


cdef inline char* _lay_bulk(char* to, const char* p, size_t n) noexcept nogil:
    to[0] = c'$'
    to = _lay_number(to + 1, n)
    to = _lay(to, b"\r\n", 2)
    to = _lay(to, p, n)
    return _lay(to, b"\r\n", 2)


cdef inline char* _lay_number_bulk(char* to, int64_t value) noexcept nogil:
    cdef char digits[24]
    cdef size_t n = _lay_number(digits, value) - digits
    return _lay_bulk(to, digits, n)


cdef int put_set(Buf* b, bytes key, bytes token, int64_t ttl_ms) except -1:
    """Append `SET key token NX PX ttl`."""
    cdef size_t nk = PyBytes_GET_SIZE(key)
    cdef size_t nt = PyBytes_GET_SIZE(token)
    cdef char* to
    if buf_reserve(b, nk + nt + 160) != 0:
        raise MemoryError("no memory for a command")
    to = b.p + b.n
    to = _lay(to, b"*6\r\n$3\r\nSET\r\n", 13)
    to = _lay_bulk(to, PyBytes_AS_STRING(key), nk)
    to = _lay_bulk(to, PyBytes_AS_STRING(token), nt)
    to = _lay(to, b"$2\r\nNX\r\n$2\r\nPX\r\n", 16)
    to = _lay_number_bulk(to, ttl_ms)
    b.n = to - b.p
    return 0


cdef int put_script(
    Buf* b, bytes text, bytes sha, bint full, bytes key, bytes token, int64_t arg_ms
) except -1:
    """Append `EVALSHA sha 1 key token [arg]`, or the `EVAL` of the text when `full`.

    `arg_ms` < 0 leaves the last argument out.
    """
    cdef size_t nk = PyBytes_GET_SIZE(key)
    cdef size_t nt = PyBytes_GET_SIZE(token)
    cdef bytes body = text if full else sha
    cdef size_t nb = PyBytes_GET_SIZE(body)
    cdef char* to
    if buf_reserve(b, nk + nt + nb + 192) != 0:
        raise MemoryError("no memory for a command")
    to = b.p + b.n
    to = _lay(to, b"*6\r\n" if arg_ms >= 0 else b"*5\r\n", 4)
    to = _lay(to, b"$4\r\nEVAL\r\n", 10) if full else _lay(to, b"$7\r\nEVALSHA\r\n", 13)
    to = _lay_bulk(to, PyBytes_AS_STRING(body), nb)
    to = _lay(to, b"$1\r\n1\r\n", 7)
    to = _lay_bulk(to, PyBytes_AS_STRING(key), nk)
    to = _lay_bulk(to, PyBytes_AS_STRING(token), nt)
    if arg_ms >= 0:
        to = _lay_number_bulk(to, arg_ms)
    b.n = to - b.p
    return 0


cdef int put_command(Buf* b, tuple words) except -1:
    """Append any command of a few words (bytes); for the handshake, not for the hot path."""
    cdef bytes word
    cdef size_t room = 32
    cdef char* to
    for word in words:
        room += PyBytes_GET_SIZE(word) + 32
    if buf_reserve(b, room) != 0:
        raise MemoryError("no memory for a command")
    to = b.p + b.n
    to[0] = c'*'
    to = _lay_number(to + 1, len(words))
    to = _lay(to, b"\r\n", 2)
    for word in words:
        to = _lay_bulk(to, PyBytes_AS_STRING(word), PyBytes_GET_SIZE(word))
    b.n = to - b.p
    return 0


# -- replies -----------------------------------------------------------------------------------

# Errors whose first word is their kind. Whatever else a server says is "ERR".
_KINDS = frozenset((
    "NOSCRIPT", "NOAUTH", "WRONGPASS", "NOPERM", "READONLY", "LOADING", "BUSY", "OOM", "MISCONF",
    "MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS", "DENIED",
    "WRONGTYPE", "EXECABORT", "UNKILLABLE", "NOMASTERLINK", "BUSYKEY",
))


cpdef str error_kind(str text):
    """The kind of a server's error: its first word when that is a known one.

    Some servers wrap a script's error (`ERR Error running script ... @user_script: 1: READONLY`)
    and old ones refuse a password with a plain `ERR invalid password`; both are told by their text.
    """
    cdef str first = text.partition(" ")[0]
    if first in _KINDS:
        return first
    if "max number of clients" in text:
        return "MAXCLIENTS"
    if "invalid password" in text or "no password is set" in text:
        return "WRONGPASS"
    return "ERR"


cdef class Replies:
    """Turns whole lines into replies, one chunk at a time.

    `begin(p, n)` is given bytes that end with a line feed (and must stay where they are until the
    chunk is done) and returns how many replies they hold, or -2 when a first byte or a length
    breaks the protocol; `text` then says how. Then `next()` is called that many times. After an
    ODD reply the rest of the chunk is void.
    """

    def __cinit__(self):
        self._cur = NULL
        self._end = NULL
        self.text = ""
        self._renew()

    cdef void _renew(self):
        # After an error hiredis keeps answering with it: a reader is never resumed, but replaced.
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._feed = self._reader.feed
        self._gets = self._reader.gets

    cdef int begin(self, const char* p, size_t n) except -1:
        cdef const char* end = p + n
        cdef const char* at = p
        cdef const char* nl
        cdef int lines = 0
        self._cur = p
        self._end = end
        while at < end:
            nl = <const char*> memchr(at, c'\n', end - at)
            if nl == NULL or nl - at >= MAX_LINE:
                self.text = "a line longer than 64 KiB"
                return -2
            if at[0] == c'$':
                if at[1] != c'-':
                    self.text = "a bulk string where a lock client expects none"
                    return -2
            elif at[0] != c'+' and at[0] != c':' and at[0] != c'-':
                self.text = _odd_start(at, nl - at)
                return -2
            lines += 1
            at = nl + 1
        self._feed(PyBytes_FromStringAndSize(p, n))
        return lines

    cdef Reply next(self) except *:
        cdef const char* at = self._cur
        cdef const char* nl = <const char*> memchr(at, c'\n', self._end - at)
        cdef object value
        self._cur = nl + 1
        try:
            value = self._gets()
        except hiredis.ProtocolError as exc:
            self.text = f"malformed reply: {exc}"
            self._renew()
            return ODD
        if value is _MORE:
            self.text = "a line feed inside a reply"
            self._renew()
            return ODD
        if at[0] == c':':
            if type(value) is not int:
                self.text = "malformed integer"
                self._renew()
                return ODD
            self.integer = value
            return INTEGER
        if at[0] == c'+':
            if value == b"OK":
                return OK
            self.text = "unexpected status reply"
            return STATUS
        if at[0] == c'$':
            if value is None:
                return NIL
            self.text = "malformed nil"
            self._renew()
            return ODD
        if isinstance(value, hiredis.ReplyError):
            self.text = _printable(str(value))
            return ERROR
        self.text = "malformed error"
        self._renew()
        return ODD


cdef str _printable(str text):
    """Text of a server, fit for messages and logs: one line, no control characters, bounded."""
    if len(text) > 200:
        text = text[:200] + "..."
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])


cdef str _odd_start(const char* p, size_t n):
    cdef bytes head = p[:min(n, 40)]
    if head[0] == 0x15:
        return "the answer is a TLS record: the port speaks TLS"
    if head.startswith((b"HTTP/", b"<")):
        return "the answer is HTTP: not a Redis port"
    if head[:1] in (b"*", b">", b"%", b"~", b"|", b"_", b"#", b",", b"(", b"="):
        return f"an unexpected type of reply, {chr(head[0])!r}"
    return f"not a Redis reply: {head!r}"


# -- for tests ---------------------------------------------------------------------------------

def build_set(bytes key not None, bytes token not None, int64_t ttl_ms):
    """The bytes of one `SET ... NX PX`."""
    cdef Buf b = Buf(NULL, 0, 0)
    try:
        put_set(&b, key, token, ttl_ms)
        return b.p[:b.n]
    finally:
        buf_free(&b)


def build_script(script, bint full, bytes key not None, bytes token not None, int64_t arg_ms=-1):
    """The bytes of one `EVALSHA` (or `EVAL`, when `full`) of a `scripts.Script`."""
    cdef Buf b = Buf(NULL, 0, 0)
    try:
        put_script(&b, script.text, script.sha, full, key, token, arg_ms)
        return b.p[:b.n]
    finally:
        buf_free(&b)
