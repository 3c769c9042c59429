"""One round: one command to every master for one or many items, and the counting of votes.

Given keys and tokens, an `Op` writes the commands of its items, is told each master's vote on each
item, and knows item by item the verdict of `rules`. It ends when every item has one. `link` and
`fleet` tell it the votes; `plan` makes it and reads it; the pump waits for it.

Never: system calls, clocks (times are told), knowledge of connections. All under the GIL.
"""

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from redlock_fast import scripts
from redlock_fast._core.wire cimport INTEGER, NIL, OK, put_script, put_set
from redlock_fast.rules cimport acquire_verdict, holder_verdict

# By the number of `ScriptNumber`.
cdef tuple _SCRIPTS = (None, scripts.RELEASE, scripts.EXTEND, scripts.LOOK)

# Outcome words by the number of `Outcome`.
_WORDS = (None, "granted", "taken", "ours", "foreign", "missing", "unasked")


# (Nothing that it refers to refers to it, so the garbage collector need not look at each.)
@cython.no_gc
@cython.freelist(1024)  # so many acquiring rounds of tasks may be under way
@cython.final
cdef class Op:
    """One round over `n` masters.

    Args:
        kind: ACQUIRE, EXTEND, RELEASE, OWNED or LOCKED.
        n: how many masters are configured.
        keys: resource of each item, as bytes.
        tokens: token of each item, as bytes.
        ttl_ms: expiry that ACQUIRE and EXTEND set, in ms; -1 for the others.
        asked: bits of the masters that may hold the keys. The others are not asked: a master that
            was never sent the lock's SET cannot hold its token, so they count as "missing".
    """

    def __init__(self, int kind, int n, list keys, list tokens, int64_t ttl_ms=-1,
                 uint32_t asked=0xFFFFFFFF):
        if self.kind:
            raise TypeError("a round is begun once")
        self._hold_many(keys, tokens)
        self._begin(kind, n, ttl_ms, asked)

    cdef int _hold_many(self, list keys, list tokens) except -1:
        """The items, unless there is but one, as for most rounds."""
        if len(keys) != len(tokens):
            raise ValueError("a token for each key")
        self.k = len(keys)
        if self.k == 1:
            self.key = keys[0]
            self.token = tokens[0]
        else:
            self.many_keys = keys
            self.many_tokens = tokens
        return 0

    cdef int _begin(self, int kind, int n, int64_t ttl_ms, uint32_t asked) except -1:
        """The rest; `k` is set."""
        cdef int i, j
        self.kind = kind
        self.n = n
        self.ttl_ms = ttl_ms
        self.asked = asked & <uint32_t> ((<uint64_t> 1 << n) - 1)
        self.undecided = self.k
        self.parts = self.few_parts
        self.yes = self.small
        self.nils = &self.small_nil
        if n > FEW:
            self.parts = <Part*> calloc(n, sizeof(Part))
        if self.k > 1:
            self.yes = <uint8_t*> calloc(self.k, 4)
            self.nils = <uint32_t*> calloc(self.k, sizeof(uint32_t))
        if self.parts == NULL or self.yes == NULL or self.nils == NULL:
            raise MemoryError("no memory for a round")
        self.no = self.yes + self.k
        self.failed = self.yes + 2 * self.k
        self.word = self.yes + 3 * self.k
        if kind == RELEASE:
            self.script = RELEASE_SCRIPT
        elif kind == EXTEND:
            self.script = EXTEND_SCRIPT
        elif kind != ACQUIRE:
            self.script = LOOK_SCRIPT
        for i in range(n):
            if not self.asked >> i & 1:
                self.parts[i].outcome = UNASKED
                for j in range(self.k):
                    self.vote(i, j, NO, 0)
        return 0

    def __dealloc__(self):
        if self.parts != self.few_parts:
            free(self.parts)
        if self.yes != self.small:
            free(self.yes)
        if self.nils != &self.small_nil:
            free(self.nils)

    @property
    def keys(self):
        """Resource of each item."""
        return [self.key] if self.many_keys is None else self.many_keys

    @property
    def tokens(self):
        """Token of each item."""
        return [self.token] if self.many_tokens is None else self.many_tokens

    cpdef bytes key_of(self, int item):
        """Resource of one item."""
        return self.key if self.many_keys is None else <bytes> self.many_keys[item]

    cpdef bytes token_of(self, int item):
        """Token of one item."""
        return self.token if self.many_tokens is None else <bytes> self.many_tokens[item]

    cdef int put(self, Buf* b, int item, bint full) except -1:
        """Append the command of one item; `full`: with the script's text instead of its hash."""
        if self.kind == ACQUIRE:
            return put_set(b, self.key_of(item), self.token_of(item), self.ttl_ms)
        script = <tuple> _SCRIPTS[self.script]
        return put_script(
            b, <bytes> script[0], <bytes> script[1], full,
            self.key_of(item), self.token_of(item), self.ttl_ms,
        )

    cdef Vote judge(self, Reply reply, int64_t value):
        """The vote that a reply is; FAIL for a reply that this command cannot have.

        (Errors are not votes; the link deals with them.)
        """
        if self.kind == ACQUIRE:
            if reply == OK:
                return YES
            return NO if reply == NIL else FAIL
        if reply != INTEGER or value < -1 or value > 1:
            return FAIL
        if value == 1 or (value == 0 and self.kind == LOCKED):
            return YES
        return NO

    cdef void say(self, int master, Reply reply, int64_t value) noexcept:
        """Note the outcome word of a usable reply; of many items, the trouble of one is told."""
        if self.k > 1 and self.parts[master].outcome == TROUBLE:
            return
        if self.kind == ACQUIRE:
            self.parts[master].outcome = GRANTED if reply == OK else TAKEN
        elif value == 1:
            self.parts[master].outcome = OURS
        else:
            self.parts[master].outcome = FOREIGN if value == 0 else MISSING

    cdef void vote(self, int master, int item, Vote vote, int64_t now) noexcept:
        """Count one master's vote on one item."""
        cdef int still_open, word
        if vote == YES:
            self.yes[item] += 1
        elif vote == NO:
            self.no[item] += 1
            self.nils[item] |= <uint32_t> 1 << master
        else:
            self.failed[item] += 1
        if now:
            self.parts[master].heard_ns = now
        if self.word[item] != 0:
            return
        still_open = self.n - self.yes[item] - self.no[item] - self.failed[item]
        if self.kind == ACQUIRE:
            word = acquire_verdict(self.yes[item], self.no[item], still_open, self.n)
        else:
            word = holder_verdict(self.yes[item], self.no[item], still_open, self.n)
        if word != 0:
            self.word[item] = word
            self.undecided -= 1
            if self.undecided == 0:
                self.ended = True
                if self.inbox is not None and self.waiter != NULL:
                    self.inbox.append(<object> self.waiter)
                    self.inbox = None

    cdef void fail(self, int master, int first, int count) noexcept:
        """No usable answer from this master on `count` items from `first`."""
        cdef int item
        for item in range(first, first + count):
            self.vote(master, item, FAIL, 0)

    cdef int explain(self, int master, str outcome, str cause) except -1:
        """Note why a master gave no usable answer."""
        self.parts[master].outcome = TROUBLE
        if self.troubles is None:
            self.troubles = {}
        self.troubles[master] = (outcome, cause)
        return 0

    cdef void close(self, int master) noexcept:
        """Nothing that comes from this master later counts in this round."""
        self.closed |= <uint32_t> 1 << master
        self.hoping &= ~(<uint32_t> 1 << master)

    cdef void expire(self) noexcept:
        """Time is up: who has not answered does not count."""
        cdef int item, word
        for item in range(self.k):
            if self.word[item] == 0:
                if self.kind == ACQUIRE:
                    word = acquire_verdict(self.yes[item], self.no[item], 0, self.n)
                else:
                    word = holder_verdict(self.yes[item], self.no[item], 0, self.n)
                self.word[item] = word
        self.undecided = 0
        self.late = True
        self.ended = True

    # -- what plan reads ---------------------------------------------------------------------

    cpdef int verdict(self, int item=0) except -1:
        """The verdict on one item, in the numbers of `rules`."""
        if not 0 <= item < self.k:
            raise IndexError(item)
        return self.word[item]

    def verdicts(self):
        """The verdicts of all items, as bytes."""
        return (<char*> self.word)[:self.k]

    cpdef uint32_t reached(self, int item=0) noexcept:
        """Bits of the masters to which this item's command was queued."""
        cdef uint32_t bits = 0
        cdef int i
        for i in range(self.n):
            if self.parts[i].queued > item:
                bits |= <uint32_t> 1 << i
        return bits

    cpdef uint32_t refused(self, int item=0) except? 0xFFFFFFFF:
        """Bits of the masters that answered "taken" (or "not ours") on this item, so far."""
        if not 0 <= item < self.k:
            raise IndexError(item)
        return self.nils[item]

    def votes(self, int item=0):
        """(yes, no, failed) counted so far on one item."""
        if not 0 <= item < self.k:
            raise IndexError(item)
        return self.yes[item], self.no[item], self.failed[item]

    def outcomes(self):
        """Per master: (outcome word or None, cause, ms after the start or None)."""
        cdef list rows = []
        cdef int i
        for i in range(self.n):
            ms = None
            if self.parts[i].heard_ns:
                ms = (self.parts[i].heard_ns - self.start_ns) / 1e6
            if self.parts[i].outcome == TROUBLE:
                word, cause = self.troubles[i]
            else:
                word, cause = _WORDS[self.parts[i].outcome], ""
            rows.append((word, cause, ms))
        return rows

    def __reduce__(self):
        raise TypeError("a round cannot be pickled or copied")


cpdef Op new_op(int kind, int n, list keys, list tokens, int64_t ttl_ms, uint32_t asked):
    """An `Op`, for compiled callers: its arguments stay C values."""
    cdef Op op = Op.__new__(Op)
    op._hold_many(keys, tokens)
    op._begin(kind, n, ttl_ms, asked)
    return op


cpdef Op single_op(int kind, int n, bytes key, bytes token, int64_t ttl_ms, uint32_t asked):
    """An `Op` of one item."""
    cdef Op op = Op.__new__(Op)
    op.k = 1
    op.key = key
    op.token = token
    op._begin(kind, n, ttl_ms, asked)
    return op
