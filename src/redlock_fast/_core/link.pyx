"""The conversation with one master: its connection's state, the FIFO of owed replies, its debts.

Given commands to queue, bytes that came and what happened to the connection, a `Link` fills `out`
with bytes to send, in order, and tells the ops whose replies these are. Who drives it (a pump)
moves the bytes, opens and closes the connection, and tells the time; it is told by `state` what is
wanted: DOWN means that the connection, if there still is one, must be closed.

Every command is a ticket in the FIFO until its reply was booked, so a reply can only be taken for
the answer to its own command, whoever has stopped waiting for it. A connection that breaks fails
its tickets; what must reach the master all the same (compare-and-delete) becomes a debt, and goes
out first on the next connection.

Never: system calls, clocks, Python code of the user. All under the GIL.
"""

from collections import deque

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport free, realloc

from redlock_fast._core.op cimport ACQUIRE, FAIL, NO_SCRIPT, RELEASE, Op, Vote
from redlock_fast._core.seal cimport Seal
from redlock_fast._core.wire cimport (
    ERROR,
    INTEGER,
    ODD,
    OK,
    Buf,
    Replies,
    Reply,
    buf_free,
    buf_put,
    error_kind,
    odd_start,
    odd_text,
    put_command,
)
from redlock_fast.resolve cimport Answer

from redlock_fast import rules

from libc.string cimport memchr, memmove

cdef extern from "string.h":
    void* memrchr(const void* s, int c, size_t n) noexcept nogil

cdef enum:
    MAX_PART = 64 * 1024        # bytes of an unfinished line
    MAX_LEFTOVERS = 8           # broken connections still to be killed on the server
    MAX_DEBTS = 65536           # entries kept for a master that stays away
    PAID_AT_ONCE = 256          # debts queued as one ticket
    LEAST_PLACE_MS = 10         # ... that one of several addresses has to answer a connect
    MAX_AGAIN = 3               # a command is sent again after NOSCRIPT at most so often
    LEAST_MASKED = 16           # shorter "tokens" are no secrets, and would garble texts

# Steps of the greeting. SELECT only for a db other than 0; a refused AUTH or SELECT fails the
# master. CLIENT ID is the proof of life: any answer of a server that works proves it, an error
# too. INFO comes last, and alone, as its answer is the only one that is not a line. Where they are
# allowed, the id and the server's run id tell connections and servers apart. KILL is no greeting,
# but goes out before all else on a ready connection whose predecessor left SETs unanswered.
cdef enum:
    AUTH = 1
    SELECT = 2
    SETNAME = 3
    CLIENT_ID = 4
    INFO = 5
    KILL = 6

# The server works, but not now; nobody has to act, and what was asked may be asked again.
_PASSING = frozenset(("LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN", "CLUSTERDOWN"))
# The connection is of no use any more: another one may lead elsewhere, or start with AUTH.
_PARTING = frozenset(("READONLY", "NOAUTH", "MAXCLIENTS", "DENIED"))
# Answers of a cluster's nodes.
_CLUSTER = frozenset(("MOVED", "ASK", "CROSSSLOT"))
# Nobody was there, as far as can be seen.
_AWAY = frozenset(("refused", "closed", "timeout", "unresolved"))
# An answer that was waited for so long is too old for the next connection.
cdef int64_t STALE_NS = 60_000_000_000
# Somebody has to act.
_CONFIG = frozenset(("NOAUTH", "WRONGPASS", "DENIED", "NOPERM"))


cdef str _masked(str text, bytes secret):
    return text.replace(secret.decode("utf-8", "replace"), "***") if secret else text


@cython.final
cdef class Link:
    """One master of a fleet.

    Args:
        index: place in the configuration.
        options: `options.MasterOptions`.
        replies: the fleet's parser; only ever holds whole lines of one link at a time.
        patience_ns: after so long without a complete reply a master that owes one is suspect.
        jitter: draws from [0, 1), for the back-off.
        news: list to which (address, word, cause) is appended on trouble and recovery, or None.
    """

    def __cinit__(self, int index, options, Replies replies, int64_t patience_ns, jitter,
                  list news):
        self.index = index
        self.options = options
        self.replies = replies
        self.patience_ns = patience_ns
        self.jitter = jitter
        self.news = news
        self.debts = deque(maxlen=MAX_DEBTS)
        self._no_text_sent()
        self.errors = {}
        self.run_id = ""
        self.local = ""
        self.leftovers = deque(maxlen=MAX_LEFTOVERS)
        self.outcome = "connecting"
        self.cause = ""
        self.took_ns = -1

    def __dealloc__(self):
        while self.head != self.tail:
            self._drop_head()
        free(self.ring)
        buf_free(&self.out)
        buf_free(&self.part)

    cdef void _no_text_sent(self) noexcept:
        cdef int i
        for i in range(4):
            self.text_sent[i] = -1

    cdef void _drop_head(self):
        cdef PyObject* op = self.ring[self.head & self.mask].op
        self.head += 1
        if op != NULL:
            Py_DECREF(<object> op)

    cdef bint may_redial(self, int64_t now):
        """Is it worth to dial in the middle of the back-off?

        Not when somebody has to act, or when the server was there and refused to work.
        """
        return (
            self.state == DOWN
            and now - self.failed_ns >= <int64_t> rules.BACKOFF_FIRST_NS
            and self.outcome in _AWAY
        )

    cdef bint hopeless(self):
        """Does it take nothing until somebody acts, however often it is dialled and answers?"""
        return self.failures > 0 and self.outcome == "CONFIG"

    # -- commands ------------------------------------------------------------------------------

    cdef bint takes(self, Op op, int64_t now) noexcept:
        """May this op's commands be queued now?

        Clean-ups go wherever their SET may have gone, however slow the master is: behind it.
        """
        if self.state != READY:
            return False
        if op.kind == RELEASE:
            return op.k == 1 or self.promised - self.booked < MAX_OWED
        if self.suspect:
            return False
        if op.kind != ACQUIRE:
            return True
        return (
            now >= self.retry_ns
            and self.promised - self.booked < MAX_OWED
            and self.unsent < MAX_UNSENT
        )

    cdef int push(self, PyObject* op, int item, int k, int again) except -1:
        cdef uint32_t size = 64, i
        cdef uint32_t old
        cdef Ticket* ring
        cdef Ticket* t
        if self.ring == NULL or self.tail - self.head > self.mask:
            old = 0 if self.ring == NULL else self.mask + 1
            if old:
                size = old * 2
            ring = <Ticket*> realloc(self.ring, size * sizeof(Ticket))
            if ring == NULL:
                raise MemoryError("no memory for a ticket")
            self.ring = ring
            self.mask = size - 1
            if old:
                # Every live ticket moves to its place under the wider mask; walking down from the
                # tail, none is overwritten before it was moved.
                for i in range(old):
                    ring[(self.tail - 1 - i) & self.mask] = ring[(self.tail - 1 - i) & (old - 1)]
        t = &self.ring[self.tail & self.mask]
        t.op = op
        t.item = item
        t.k = k
        t.done = 0
        t.again = again
        if op != NULL:
            Py_INCREF(<object> op)
        self.tail += 1
        return 0

    cdef int queue(self, Op op, int item, int count, Buf* commands, int64_t now) except -1:
        """Queue the commands of `count` items from `item`, whose bytes are in `commands`."""
        cdef Buf own = Buf(NULL, 0, 0)
        cdef int j
        if op.script != NO_SCRIPT and self.text_sent[op.script] < 0:
            # The first use of a script on a connection brings its text along: asking by hash first
            # could let later commands overtake what has to be asked again after NOSCRIPT.
            self.text_sent[op.script] = self.promised
            try:
                for j in range(item, item + count):
                    op.put(&own, j, j == item)
                self._append(op, item, count, &own)
            finally:
                buf_free(&own)
        else:
            self._append(op, item, count, commands)
        if op.kind == RELEASE:
            self.unpaid += count
        if self.promised == self.booked:
            self.quiet_ns = now
        self.promised += count
        # (A debt is paid in pieces, of an op that counts as queued as a whole.)
        op.parts[self.index].queued = max(op.parts[self.index].queued, item + count)
        op.parts[self.index].owed += count
        op.parts[self.index].end = self.promised
        return 0

    cdef int _append(self, Op op, int item, int count, Buf* commands) except -1:
        self.push(<PyObject*> op, item, count, 0)
        if buf_put(&self.out, commands.p, commands.n) != 0:
            self.tail -= 1
            Py_DECREF(op)
            raise MemoryError("no memory for a command")
        return 0

    cdef int owe(self, Op op, int item, int count) except -1:
        """These compare-and-deletes have to reach the master, some time."""
        self.debts.append((op, item, count))
        self.indebted = True
        return 0

    cdef int pay(self, int64_t now) except -1:
        """Queue debts, oldest first, a chunk at a time, as many as may be owed at once."""
        cdef Buf b = Buf(NULL, 0, 0)
        cdef Op op
        cdef int item, count, most, j
        try:
            while self.indebted and self.promised - self.booked < 2 * MAX_OWED - PAID_AT_ONCE:
                op, item, count = self.debts.popleft()
                self.indebted = len(self.debts) > 0
                if op.lapse_ns < now:
                    continue
                most = min(count, PAID_AT_ONCE)
                if most < count:
                    self.debts.appendleft((op, item + most, count - most))
                    self.indebted = True
                b.n = 0
                for j in range(item, item + most):
                    op.put(&b, j, False)
                self.queue(op, item, most, &b, now)
        finally:
            buf_free(&b)
        return 0

    # -- the connection ------------------------------------------------------------------------

    cdef int dialing(self, int64_t now, int64_t limit) except -1:
        """A connection is being opened; it has until `limit` to be READY.

        Another place of the same dial shares the limit.
        """
        self.state = DIALING
        if self.between:
            self.between = False
            return 0
        self.dial_limit_ns = self.place_limit_ns = limit
        self.places = None
        if self.answer is not None and self.answer.done and now - self.asked_ns > STALE_NS:
            self.answer = None
        self.served = False
        self.client_id = None
        self.run_id = ""
        self.local = ""
        self._no_text_sent()
        self.reconnects += 1
        return 0

    cdef bint asks(self) except -1:
        """Must somebody be asked for the way, or for credentials, before this dial goes on?

        Not when that was done, and is only to be waited for.
        """
        if self.places is not None or self.answer is not None:
            return False
        if self.options.host is None and self.options.credential_provider is None:
            self._found(self.options.places)
            return False
        return True

    cdef int asked(self, Answer answer, int64_t now) except -1:
        """Somebody was asked, and will fill in this answer."""
        self.answer = answer
        self.asked_ns = now
        return 0

    cdef int _found(self, tuple places) except -1:
        """These are the places to try: first the one that worked last time."""
        self.places = list(places)
        self.place_count = len(self.places)
        if self.bad in self.places:
            self.places.remove(self.bad)
            self.places.append(self.bad)
        if self.good in self.places:
            self.places.remove(self.good)
            self.places.insert(0, self.good)
        return 0

    cdef object next_place(self, int64_t now):
        """The place to connect to now, as (family, sockaddr).

        None: it is not known yet, or the answer was that there is none, which broke the link.
        """
        cdef Answer answer = self.answer
        cdef int64_t left, share
        if self.places is None:
            if not answer.done:
                return None
            self.answer = None
            if answer.outcome:
                self.broke(answer.outcome, answer.cause, now)
                return None
            self.username = answer.username
            self.password = answer.password
            self._found(answer.places)
        self.place = self.places.pop(0)
        self.place_limit_ns = self.dial_limit_ns
        if self.places:
            # The first ones do not have long: one that is reached at all answers about as fast as
            # a command. Each time all have failed they have longer.
            left = (self.dial_limit_ns - now) // (len(self.places) + 1)
            share = min(self.patience_ns, self.dial_limit_ns - now)
            for _ in range(self.failures):
                if share // self.place_count > left:
                    break
                share *= 2
            share = max(share // self.place_count, LEAST_PLACE_MS * 1_000_000)
            self.place_limit_ns = now + min(left, share)
        return self.place

    cdef bint moves(self) noexcept:
        """Is the dial to go on now: an answer has come, or the next place is to be tried?"""
        if self.state == DIALING:
            return self.answer is not None and self.answer.done
        return self.state == DOWN and self.between

    cdef int64_t limit(self) noexcept:
        """DIALING, GREETING: when what goes on now has to be over."""
        return self.place_limit_ns if self.state == DIALING else self.dial_limit_ns

    cdef str waits_for(self):
        """What took too long."""
        if self.state == DIALING:
            if self.answer is None:
                return "connect"
            return "look-up" if self.options.credential_provider is None else "credential provider"
        return "handshake" if self.seal is None or self.seal.open else "TLS handshake"

    cdef int connected(self, int64_t now) except -1:
        """The connection is open: begin with TLS, or greet."""
        self.state = GREETING
        self.quiet_ns = now
        if self.options.tls is None:
            return self.hello(now)
        self.seal = Seal(self.options.tls)
        return 0

    cdef int hello(self, int64_t now) except -1:
        """Say who we are."""
        cdef object user = self.username
        cdef bytes password = self._secret()
        if self.options.credential_provider is None:
            user = self.options.username
        if user:
            self._ask(AUTH, (b"AUTH", user.encode(), password))
        elif password:
            self._ask(AUTH, (b"AUTH", password))
        else:
            self.greet(now)
        return 0

    cdef bytes _secret(self):
        """The password of this connection, b"" for none."""
        cdef object secret = self.options.password
        if self.options.credential_provider is not None:
            secret = self.password
        return b"" if secret is None else secret.reveal()

    cdef int greet(self, int64_t now) except -1:
        """What follows AUTH; nothing goes out before that was answered."""
        if self.options.db:
            self._ask(SELECT, (b"SELECT", b"%d" % self.options.db))
        if self.options.client_name:
            self._ask(SETNAME, (b"CLIENT", b"SETNAME", self.options.client_name.encode()))
        self._ask(CLIENT_ID, (b"CLIENT", b"ID"))
        return 0

    cdef int _ask(self, int step, tuple words) except -1:
        put_command(&self.out, words)
        self.push(NULL, step, 1, 0)
        self.promised += 1
        return 0

    cdef int greeted(self, int step, Reply reply, int64_t now) except -1:
        """One step was answered. Returns 0 when that broke the link."""
        cdef str kind, text
        if reply == ERROR:
            text = self.replies.text
            kind = error_kind(text)
            # Some servers repeat what they were sent.
            text = _masked(text, self._secret())
            if kind in _PASSING or kind == "MAXCLIENTS":
                self.broke(kind, text, now)
                return 0
            if step == AUTH or step == SELECT or (kind in _CONFIG and kind != "NOPERM"):
                self.broke("CONFIG", text, now)
                return 0
        elif step == CLIENT_ID or step == KILL:
            if reply != INTEGER:
                self.broke("PROTO", "unexpected answer to CLIENT", now)
                return 0
            if step == CLIENT_ID:
                self.client_id = self.replies.integer
        elif step == INFO:
            self.broke("PROTO", "unexpected answer to INFO", now)
            return 0
        elif reply != OK:
            self.broke("PROTO", "unexpected answer to the greeting", now)
            return 0
        if step == AUTH:
            self.greet(now)
        elif step == CLIENT_ID:
            self._ask(INFO, (b"INFO", b"server"))
        elif step == INFO:
            self._ready(now)
        elif step == KILL:
            self.leftovers.popleft()
        return 1

    cdef bint _expects_info(self) noexcept:
        return self.head != self.tail and self.ring[self.head & self.mask].op == NULL \
            and self.ring[self.head & self.mask].item == INFO

    cdef int _feed_info(self, const char* p, size_t n, int64_t now) except -1:
        """Bytes of the answer to INFO: the one bulk string that is expected, bounded too."""
        cdef const char* nl
        cdef bytes text
        cdef size_t size, head
        if buf_put(&self.part, p, n) != 0:
            raise MemoryError("no memory for a reply")
        p = self.part.p
        n = self.part.n
        nl = <const char*> memchr(p, c'\n', n)
        if nl == NULL and n < 16:
            return 0
        text = b"" if nl == NULL else p[1:nl - p]
        head = 0 if nl == NULL else nl + 1 - p
        size = MAX_PART + 1
        if text.endswith(b"\r") and text[:-1].isdigit() and len(text) < 8:
            size = int(text)
        if size > MAX_PART:
            self.broke("PROTO", "an answer to INFO that is malformed or too long", now)
            return 0
        if n < head + size + 2:
            return 0
        if p[head + size] != c'\r' or p[head + size + 1] != c'\n':
            self.broke("PROTO", "an answer to INFO that is malformed or too long", now)
            return 0
        if n > head + size + 2:
            self.broke("PROTO", "a reply that nobody asked for", now)
            return 0
        text = p[head:head + size]
        for line in text.split(b"\r\n"):
            if line.startswith(b"run_id:"):
                self.run_id = line[7:].decode("ascii", "replace")
        self.part.n = 0
        self.head += 1
        self.booked += 1
        self.answers += 1
        self.quiet_ns = now
        return self._ready(now)

    cdef int _ready(self, int64_t now) except -1:
        """The greeting is over. What a broken connection has left comes before all else."""
        self.state = READY
        self.retry_ns = now
        self.fresh = True
        self.good = self.place
        self.password = None        # the next connection asks for its own
        if self.leftovers:
            # Another server has nothing of it; and who does not say which it is, is not asked.
            same = [row for row in self.leftovers if row[2] and row[2] == self.run_id]
            self.leftovers = deque(same, maxlen=MAX_LEFTOVERS)
            for client_id, address, _ in same:
                # A SET that the server has not read yet must not be read after its deletion.
                self._ask(KILL, (
                    b"CLIENT", b"KILL", b"ID", b"%d" % client_id, b"ADDR", address.encode(),
                ))
        self.pay(now)
        return 0

    cdef int succeed(self, Link old, int64_t now) except -1:
        """Take over from a connection to the same master that broke; this one is ready."""
        self.news = old.news
        self.debts.extendleft(reversed(old.debts))
        old.debts.clear()
        old.indebted = False
        self.indebted = len(self.debts) > 0
        self.leftovers = old.leftovers
        self.promised = self.booked = old.promised
        self.answers += old.answers
        self.reconnects += old.reconnects
        for kind, times in old.errors.items():
            self.errors[kind] = self.errors.get(kind, 0) + times
        self.told = old.told
        self._well()
        return self._ready(now)

    # -- TLS -----------------------------------------------------------------------------------
    # Here the GIL is given up: whoever drives lets one thread in at a time, and the link may be
    # another's, or on another connection, when it is back.

    cdef int encrypt(self, int64_t now) except -1:
        """Put what is queued into records. Raises what signal handlers do."""
        cdef Seal seal = self.seal
        cdef bytes data
        try:
            if seal.due:
                seal.shake()
            while self.seal is seal and seal.open and self.out.n:
                data = self.out.p[:self.out.n]
                self.out.n = 0
                seal.write(data)
        except BaseException:
            if self.seal is seal:
                self.broke("closed", "interrupted in the middle of TLS", now)
            raise
        return self.seal_broke(now)

    cdef int unseal(self, bytes records, int64_t now) except -1:
        """Take out of records what the server said, to be fed. Raises as `encrypt` does."""
        cdef Seal seal = self.seal
        cdef bint was_open = seal.open
        try:
            seal.read(records)
        except BaseException:
            if self.seal is seal:
                self.broke("closed", "interrupted in the middle of TLS", now)
            raise
        if self.seal is seal and not was_open:
            self.quiet_ns = now
            if seal.open:
                self.hello(now)
        return 0

    cdef int seal_broke(self, int64_t now) except -1:
        """What came before the end was dealt with; now the end."""
        cdef object trouble
        if self.seal is not None and self.seal.trouble is not None and self.state != DOWN:
            trouble = self.seal.trouble
            self.broke(trouble[0], trouble[1], now)
        return 0

    # -- replies -------------------------------------------------------------------------------

    cdef int feed(self, const char* p, size_t n, int64_t now) except -1:
        """Bytes that came, cut anywhere: whole lines go to the parser, to be booked after."""
        cdef const char* nl
        cdef size_t whole
        cdef bint joined = self.part.n > 0
        self.lines = 0
        if self.state < GREETING:
            return 0
        if self.state == GREETING and n and self._expects_info():
            if (self.part.p[0] if joined else p[0]) == c'$':
                return self._feed_info(p, n, now)
        if joined:
            if buf_put(&self.part, p, n) != 0:
                raise MemoryError("no memory for a reply")
            p = self.part.p
            n = self.part.n
        nl = <const char*> memrchr(p, c'\n', n)
        whole = 0 if nl == NULL else nl + 1 - p
        if n - whole > MAX_PART:
            self.broke("PROTO", "a line longer than 64 KiB", now)
            return 0
        if whole == 0 and n > 0 and self.promised == self.booked:
            self.broke("PROTO", "a reply that nobody asked for", now)
            return 0
        if whole < n and odd_start(p + whole, n - whole):
            # Not worth waiting for the end of this line; a TLS alert, say, has none.
            self.broke("PROTO", odd_text(p + whole, n - whole), now)
            return 0
        if whole:
            self.lines = self.replies.add(p, whole)
            if self.lines < 0:
                self.lines = 0
                self.broke("PROTO", self.replies.text, now)
                return 0
        if joined:
            # What is left, if anything, is the tail of the buffer itself.
            memmove(self.part.p, p + whole, n - whole)
            self.part.n = n - whole
        elif whole < n and buf_put(&self.part, p + whole, n - whole) != 0:
            raise MemoryError("no memory for a reply")
        return 0

    cdef int book_lines(self, int64_t now) except -1:
        """The parser ran: book the replies; `now` is when they were read."""
        cdef int left = self.lines
        self.lines = 0
        if left > self.promised - self.booked:
            # Whatever shifted the order, none of these can be trusted to be an answer.
            self.replies.skip(left)
            if self.state != DOWN:
                self.broke("PROTO", "a reply that nobody asked for", now)
            return 0
        while left:
            left -= 1
            if not self.book(self.replies.next(), now):
                self.replies.skip(left)
                return 0
        self.quiet_ns = now
        self.suspect = False
        if self.part.n and self.promised == self.booked:
            self.broke("PROTO", "a reply that nobody asked for", now)
        return 0

    cdef int book(self, Reply reply, int64_t now) except -1:
        """Take one reply for the answer to the oldest command. Returns 0 when it broke the link."""
        cdef Ticket* t
        cdef Op op
        cdef int item, again, i = self.index
        cdef int64_t place = self.booked
        cdef Vote vote = FAIL
        if self.head == self.tail:
            return 0        # another thread gave the link up while hiredis had lost the GIL
        if reply == ODD:
            self.broke("PROTO", self.replies.text, now)
            return 0
        t = &self.ring[self.head & self.mask]
        self.booked += 1
        self.answers += 1
        if t.op == NULL:
            item = t.item
            self.head += 1
            return self.greeted(item, reply, now)
        op = <Op> t.op
        item = t.item + t.done
        again = t.again
        if reply != ERROR:
            vote = op.judge(reply, self.replies.integer)
            if vote == FAIL:
                # The ticket stays: it fails with the others.
                self.booked -= 1
                self.broke("PROTO", "an answer of the wrong type", now)
                return 0
        t.done += 1
        op.parts[i].owed -= 1
        if op.kind == RELEASE:
            self.unpaid -= 1
        if t.done == t.k:
            self._drop_head()
        self.took_ns = now - op.start_ns
        if op.k > 1 and not op.ended and now + self.patience_ns > op.limit_ns:
            # A batch's time runs from its last complete reply.
            op.limit_ns = now + self.patience_ns
        if reply == ERROR:
            return self.refused(op, item, again, place, now)
        self.served = True
        if self.failures:
            self.failures = 0
            self._well()
        if not op.closed >> i & 1:
            op.say(i, reply, self.replies.integer)
            op.vote(i, item, vote, now)
        return 1

    cdef int refused(self, Op op, int item, int again, int64_t place, int64_t now) except -1:
        """The server answered a command with an error. Returns 0 when that broke the link."""
        cdef str text = self.replies.text
        cdef str kind = error_kind(text)
        cdef Buf b = Buf(NULL, 0, 0)
        cdef bint full
        if kind == "NOSCRIPT" and op.script != NO_SCRIPT and again < MAX_AGAIN:
            # The text goes out once; what was under way meanwhile is asked again by hash behind it.
            full = self.text_sent[op.script] <= place
            if full:
                self.text_sent[op.script] = self.promised
            try:
                op.put(&b, item, full)
                if buf_put(&self.out, b.p, b.n) != 0:
                    raise MemoryError("no memory for a command")
            finally:
                buf_free(&b)
            self.push(<PyObject*> op, item, 1, again + 1)
            self.promised += 1
            op.parts[self.index].owed += 1
            op.parts[self.index].end = self.promised
            op.nudged = True
            if op.kind == RELEASE:
                self.unpaid += 1
            return 1
        self.errors[kind] = self.errors.get(kind, 0) + 1
        if len(op.token_of(item)) >= LEAST_MASKED:
            text = _masked(text, op.token_of(item))
        if kind in _CLUSTER:
            kind = "CONFIG"
            text = f"the server is in cluster mode, which is not for independent masters: {text}"
        self.outcome = kind
        self.cause = text
        op.explain(self.index, kind, text)
        if op.kind == RELEASE and kind in _PASSING:
            self.owe(op, item, 1)
        elif not op.closed >> self.index & 1:
            op.vote(self.index, item, FAIL, now)
        if kind in _PARTING:
            self.broke("CONFIG" if kind in _CONFIG else kind, text, now)
            return 0
        # (A key that this user may not touch says nothing of the others.)
        if op.kind == ACQUIRE and kind != "NOPERM" or kind in _PASSING:
            self.failures += 1
            self.retry_ns = now + <int64_t> rules.backoff_ns(self.failures, self.jitter())
            self.trouble(kind, text)
        return 1

    cdef int broke(self, str outcome, str cause, int64_t now) except -1:
        """The connection is of no use any more: fail what is owed, keep the debts.

        If only this place cannot be connected to, and there are others to try, nothing has failed
        yet.
        """
        cdef Ticket* t
        cdef Op op
        cdef list held = []
        cdef object left = None
        cdef int i = self.index
        cdef int first, count
        # An idle connection that a server or a firewall closed is opened again at once, also one
        # that was only greeted; if the next one does not serve either, waits come, and grow.
        cdef bint idle = self.state == READY and outcome == "closed" and self.head == self.tail
        cdef bint was_well = self.served or (idle and not self.idled)
        if (
            self.state == DIALING and self.places and now < self.dial_limit_ns
            and (outcome == "refused" or outcome == "timeout")
        ):
            self.state = DOWN
            self.between = True
            self.retry_ns = now
            return 0
        self.between = False
        self.seal = None
        self.password = None
        if self.state == GREETING:
            self.bad = self.place
            if self.good == self.bad:
                self.good = None
        self.idled = idle and not self.served
        self.state = DOWN
        self.suspect = False
        self.out.n = 0
        self.part.n = 0
        self.unpaid = 0
        self.unsent = 0
        self.stuck = False
        self.failed_ns = now
        self.outcome = outcome
        self.cause = cause
        self.errors[outcome] = self.errors.get(outcome, 0) + 1
        self.failures = 0 if was_well else self.failures + 1
        self.retry_ns = now + <int64_t> rules.backoff_ns(self.failures, self.jitter())
        self.served = False
        while self.head != self.tail:
            t = &self.ring[self.head & self.mask]
            if t.op != NULL:
                op = <Op> t.op
                if op.kind != RELEASE and self.client_id is not None and self.local:
                    left = (self.client_id, self.local, self.run_id)
                first = t.item + t.done
                count = t.k - t.done
                op.parts[i].owed -= count
                if op.kind == RELEASE:
                    self.owe(op, first, count)
                if not op.closed >> i & 1:
                    op.explain(i, outcome, cause)
                    op.fail(i, first, count)
                    held.append(op)
            self._drop_head()
        for op in held:
            if op.closed >> i & 1:
                continue
            first = op.parts[i].queued
            if first < op.k:
                # The rest of a batch is not sent any more.
                op.fail(i, first, op.k - first)
                if op.kind == RELEASE:
                    self.owe(op, first, op.k - first)
                    op.parts[i].queued = op.k
            op.close(i)
            op.nudged = True
        if left is not None:
            self.leftovers.append(left)
        self.booked = self.promised
        self.trouble(outcome, cause)
        return 0

    cdef int trouble(self, str outcome, str cause) except -1:
        if not self.told and self.failures and self.news is not None:
            self.told = True
            self.news.append((self.options.address, outcome, cause))
        return 0

    cdef int _well(self) except -1:
        if self.told and self.news is not None:
            self.told = False
            self.news.append((self.options.address, "well", ""))
        return 0

    cdef int after_fork(self) except -1:
        """In a forked child: none of this is ours; start as new."""
        while self.head != self.tail:
            self._drop_head()
        self.booked = self.promised
        self.state = DOWN
        self.seal = None
        self.answer = None
        self.password = None
        self.between = False
        self.suspect = False
        self.served = False
        self.failures = 0
        self.retry_ns = 0
        self.unsent = 0
        self.stuck = False
        self.unpaid = 0
        self.out.n = 0
        self.part.n = 0
        self.debts.clear()
        self.indebted = False
        self.leftovers.clear()
        return 0

    # -- what others read ----------------------------------------------------------------------

    @property
    def address(self):
        """`host:port` or `unix:/path`."""
        return self.options.address

    @property
    def owed(self):
        """Replies the master owes."""
        return self.promised - self.booked

    def stats(self):
        """One master's part of `Redlock.stats()`."""
        words = ("down", "connecting", "greeting", "ready")
        state = "suspect" if self.suspect else words[self.state]
        return {
            "address": self.options.address,
            "state": state,
            "owed": self.promised - self.booked,
            "debts": sum([row[2] for row in self.debts]),
            "reconnects": max(self.reconnects - 1, 0),
            "replies": self.answers,
            "errors": dict(self.errors),
            "cause": f"{self.outcome}: {self.cause}" if self.cause else "",
            "ms": None if self.took_ns < 0 else self.took_ns / 1e6,
        }
