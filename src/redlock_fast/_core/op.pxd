# One round. See op.pyx for the contract.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from redlock_fast._core.wire cimport Buf, Reply

cdef enum:
    MAX_MASTERS = 32
    FEW = 8         # masters of whom a round knows without another piece of memory

cdef enum Kind:
    ACQUIRE = 1     # SET NX PX
    EXTEND = 2      # compare and PEXPIRE
    RELEASE = 3     # compare and DEL; also every clean-up
    OWNED = 4       # does the key hold our token?
    LOCKED = 5      # does the key hold anything?

cdef enum Vote:
    FAIL = 0        # no usable answer
    YES = 1         # granted, ours
    NO = 2          # taken, foreign, missing

cdef enum ScriptNumber:
    NO_SCRIPT = 0
    RELEASE_SCRIPT = 1
    EXTEND_SCRIPT = 2
    LOOK_SCRIPT = 3

cdef enum Outcome:
    NOTHING = 0     # no answer so far
    GRANTED = 1
    TAKEN = 2
    OURS = 3
    FOREIGN = 4
    MISSING = 5
    UNASKED = 6
    TROUBLE = 7     # see Op.troubles

cdef struct Part:       # what one master has to do with a round
    int64_t end         # the link's count of replies when all of them are answered
    int64_t heard_ns    # when the last answer came, 0: never
    int queued          # items whose command was queued
    int owed            # commands queued and not answered
    Outcome outcome

cdef class Op:
    cdef readonly int kind          # a Kind
    cdef readonly int n             # masters
    cdef readonly int k             # items: one key and token each
    cdef readonly int64_t ttl_ms    # of SET and PEXPIRE, else -1
    cdef bytes key                  # of a single item, which has no lists
    cdef bytes token
    cdef list many_keys
    cdef list many_tokens
    cdef int script                 # a ScriptNumber; NO_SCRIPT for ACQUIRE
    cdef public int64_t asked_ns    # since when it waited for its turn to start; 0: it did not
    cdef public int64_t start_ns    # read before the first byte was queued
    cdef public int64_t limit_ns    # when who has not answered is late
    cdef public bint ended          # every item has its verdict; later votes change nothing
    cdef bint late                  # ended by its limit
    # per master, as bits
    cdef readonly uint32_t asked    # may hold our key, so is asked at all
    cdef public uint32_t hoping     # not ready yet; gets its commands should it become so
    cdef public uint32_t closed     # given up on: later votes from there do not count
    # per master
    cdef Part* parts
    cdef Part few_parts[FEW]
    cdef dict troubles              # index -> (outcome word, cause) where outcome is TROUBLE
    # per item
    cdef uint8_t* yes               # four arrays of k in one block: yes, no, failed, word
    cdef uint8_t* no
    cdef uint8_t* failed
    cdef uint8_t* word              # rules' verdict
    cdef uint8_t small[4]           # the block of a single item
    cdef uint32_t* nils             # bits of the masters that said "taken"
    cdef uint32_t small_nil
    cdef int undecided
    cdef int forks                  # the fleet's, when the round started
    cdef bint nudged                # something changed that its waiter should know
    cdef public int64_t lasts_ms    # a release: its keys expire by themselves after this; 0: ?
    cdef int64_t lapse_ns           # a debt that is older than this is void: the key has expired
    # An event loop's: who waits (borrowed: the driver keeps it, and it takes itself back when it
    # goes), and where to append that one when the round ends, until it has.
    cdef void* waiter
    cdef list inbox

    cdef int _begin(self, int kind, int n, int64_t ttl_ms, uint32_t asked) except -1
    cdef int _hold_many(self, list keys, list tokens) except -1
    cpdef bytes key_of(self, int item)
    cpdef bytes token_of(self, int item)
    cdef int put(self, Buf* b, int item, bint full) except -1
    cdef Vote judge(self, Reply reply, int64_t value)
    cdef void say(self, int master, Reply reply, int64_t value) noexcept
    cdef void vote(self, int master, int item, Vote vote, int64_t now) noexcept
    cdef void fail(self, int master, int first, int count) noexcept
    cdef int explain(self, int master, str outcome, str cause) except -1
    cdef void expire(self) noexcept
    cdef void close(self, int master) noexcept
    cpdef int verdict(self, int item=*) except -1
    cpdef uint32_t reached(self, int item=*) noexcept
    cpdef uint32_t refused(self, int item=*) except? 0xFFFFFFFF

cpdef Op new_op(int kind, int n, list keys, list tokens, int64_t ttl_ms, uint32_t asked)
cpdef Op single_op(int kind, int n, bytes key, bytes token, int64_t ttl_ms, uint32_t asked)
