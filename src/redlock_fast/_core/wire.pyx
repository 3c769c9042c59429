"""Bytes to and from the masters: commands are appended to buffers, whole lines become replies.

Given resources, tokens and times, writes RESP commands into a `Buf`. Given whole lines that a
master sent, says reply by reply what each is. Driven by `link`, under the GIL.

hiredis parses, but gives equal Python values for different replies (`+OK` and `$2 OK`, `:1` and a
boolean), so the first byte of each line is looked at before anything is fed: the type comes before
the value. RESP2 only. Every reply a lock client expects is a single line, so a bulk string, an
array or a push is a breach of protocol here, and nothing larger than a line is ever buffered.

Never: system calls, clocks, knowledge of what a command was for.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcmp, memcpy

import hiredis

cdef enum:
    # A line longer than this closes the link (DESIGN, rule 11); Redis' own errors are far shorter.
    MAX_LINE = 64 * 1024

_MORE = object()    # what gets() returns when it wants more bytes; False would also be a value


@cython.linetrace(False)
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


@cython.linetrace(False)
cdef int buf_put(Buf* b, const char* p, size_t n) noexcept nogil:
    if buf_reserve(b, n) != 0:
        return -1
    memcpy(b.p + b.n, p, n)
    b.n += n
    return 0


@cython.linetrace(False)
cdef void buf_free(Buf* b) noexcept nogil:
    free(b.p)
    b.p = NULL
    b.n = 0
    b.cap = 0


# -- commands ----------------------------------------------------------------------------------

@cython.linetrace(False)
cdef inline char* _lay(char* to, const char* p, size_t n) noexcept nogil:
    memcpy(to, p, n)
    return to + n


@cython.linetrace(False)
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


@cython.linetrace(False)
cdef inline char* _lay_bulk(char* to, const char* p, size_t n) noexcept nogil:
    to[0] = c'$'
    to = _lay_number(to + 1, n)
    to = _lay(to, b"\r\n", 2)
    to = _lay(to, p, n)
    return _lay(to, b"\r\n", 2)


@cython.linetrace(False)
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
    if "running script" in text:
        for word in text.split():
            if word.lstrip("-") in _KINDS:
                return word.lstrip("-")
    if "invalid password" in text or "no password is set" in text:
        return "WRONGPASS"
    return "ERR"


cdef enum:
    HEADER = 16     # room for "*4294967295\r\n"


@cython.final
cdef class Replies:
    """Turns whole lines of any number of links into replies.

    `begin()` starts a look. `add(p, n)` is given bytes of one link that end with a line feed, and
    returns how many replies they hold, or -2 when a first byte or a length breaks the protocol
    (`text` says how, and none of them counts). `parse()` has hiredis parse all that was added: as
    one array, so that it costs two calls whatever the number of replies. Then `next()` hands them
    out in order; after an ODD one `skip()` passes over the rest of that link's.
    """

    def __cinit__(self):
        self.text = ""
        self._renew()

    def __dealloc__(self):
        buf_free(&self._chunk)
        buf_free(&self._starts)

    cdef int _renew(self) except -1:
        # After an error hiredis keeps answering with it: a reader is never resumed, but replaced.
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._feed = self._reader.feed
        self._gets = self._reader.gets
        return 0

    cdef int begin(self) except -1:
        self._chunk.n = HEADER
        self._starts.n = 0
        self._at = HEADER
        self._count = 0
        self._taken = 0
        self._values = None
        if buf_reserve(&self._chunk, 0) != 0:
            raise MemoryError("no memory for replies")
        return 0

    cdef int add(self, const char* p, size_t n) except -1:
        cdef const char* end = p + n
        cdef const char* at = p
        cdef const char* nl
        cdef int lines = 0
        cdef size_t before = self._starts.n
        while at < end:
            nl = <const char*> memchr(at, c'\n', end - at)
            if nl == NULL or nl - at >= MAX_LINE:
                self._starts.n = before
                self.text = "a line longer than 64 KiB"
                return -2
            if odd_start(at, nl - at):
                self._starts.n = before
                self.text = odd_text(at, nl - at)
                return -2
            if buf_put(&self._starts, at, 1) != 0:
                raise MemoryError("no memory for replies")
            lines += 1
            at = nl + 1
        if buf_put(&self._chunk, p, n) != 0:
            raise MemoryError("no memory for replies")
        self._count += lines
        return lines

    cdef int parse(self) except -1:
        cdef char* head
        cdef char digits[24]
        cdef size_t width
        cdef object values
        if self._count == 0:
            return 0
        width = _lay_number(digits, self._count) - digits
        head = self._chunk.p + HEADER - width - 3
        head[0] = c'*'
        _lay(head + 1, digits, width)
        _lay(head + 1 + width, b"\r\n", 2)
        try:
            self._feed(PyBytes_FromStringAndSize(head, self._chunk.p + self._chunk.n - head))
            values = self._gets()
            # As many replies as lines: each took one, and nothing is left over.
            if type(values) is list and len(<list> values) == self._count:
                self._values = values
                return 0
        except hiredis.ProtocolError:
            pass
        # Somebody's line is malformed: next() finds out whose, one line at a time.
        self._renew()
        return 0

    cdef object _one(self, const char* p, size_t n):
        """Parse a single line; _MORE when it is not one reply."""
        cdef object value
        try:
            self._feed(PyBytes_FromStringAndSize(p, n))
            value = self._gets()
            if value is not _MORE and not self._reader.has_data():
                return value
            self.text = "a line feed inside a reply"
        except hiredis.ProtocolError as exc:
            self.text = f"malformed reply: {exc}"
        self._renew()
        return _MORE

    cdef Reply next(self) except *:
        cdef const char* at
        cdef const char* nl
        cdef object value
        cdef char start = self._starts.p[self._taken]
        if self._values is not None:
            value = self._values[self._taken]
        else:
            at = self._chunk.p + self._at
            nl = <const char*> memchr(at, c'\n', self._chunk.n - self._at)
            self._at += nl + 1 - at
            value = self._one(at, nl + 1 - at)
            if value is _MORE:
                self._taken += 1
                return ODD
        self._taken += 1
        if start == c':':
            if type(value) is int:
                self.integer = value
                return INTEGER
        elif start == c'+':
            if type(value) is bytes:
                if PyBytes_GET_SIZE(value) == 2 and memcmp(PyBytes_AS_STRING(value), b"OK", 2) == 0:
                    return OK
                self.text = "unexpected status reply"
                return STATUS
        elif start == c'$':
            if value is None:
                return NIL
        elif isinstance(value, hiredis.ReplyError):
            # Not str(value), which lets signal handlers run: what one raises here would cost every
            # connection that this look has bytes of.
            text = value.args[0]
            self.text = _printable(text if type(text) is str else str(value))
            return ERROR
        self.text = "malformed reply"
        return ODD

    cdef int skip(self, int count) except -1:
        """Pass over `count` replies."""
        cdef const char* at
        cdef const char* nl
        self._taken += count
        while count > 0:
            at = self._chunk.p + self._at
            nl = <const char*> memchr(at, c'\n', self._chunk.n - self._at)
            self._at += nl + 1 - at
            count -= 1
        return 0


cdef str _printable(str text):
    """Text of a server, fit for messages and logs: one line, no control characters, bounded.

    Without the arguments that it repeats of a command it does not know.
    """
    text = text.partition(", with args beginning with")[0]
    if len(text) > 200:
        text = text[:200] + "..."
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])


cdef bint odd_start(const char* p, size_t n) noexcept:
    """Can a line that starts so be none of the replies a lock client expects?

    `n` is what is there of the line, its end not included.
    """
    if n == 0:
        return True
    if p[0] == c'$':
        return n > 1 and p[1] != c'-'
    return p[0] != c'+' and p[0] != c':' and p[0] != c'-'


cdef str odd_text(const char* p, size_t n):
    """What to say of such a line."""
    cdef bytes head = p[:40] if n > 40 else p[:<Py_ssize_t> n]
    if head[:1] == b"\x15":
        return "the answer is a TLS record: the port speaks TLS"
    if head[:1] == b"$":
        return "a bulk string where a lock client expects none"
    if head.startswith((b"HTTP/", b"<")):
        return "the answer is HTTP: not a Redis port"
    if head and head[:1] in (b"*", b">", b"%", b"~", b"|", b"_", b"#", b",", b"(", b"="):
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
