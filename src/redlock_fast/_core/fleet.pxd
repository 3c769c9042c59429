# N links, and who of them is asked. See fleet.pyx for the contract.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from redlock_fast._core.link cimport Link
from redlock_fast._core.op cimport MAX_MASTERS, Op
from redlock_fast._core.wire cimport Buf, Replies

cdef enum:
    CHUNK = 256                 # commands that leave a batch at once
    CHUNK_BYTES = 256 * 1024    # or so many bytes, whichever comes first
    WINDOW = 1024               # commands of one batch that a master may owe

cdef class Fleet:
    cdef readonly int n
    cdef readonly list links
    cdef readonly list rivals       # per master: a second connection beside a suspect one, or None
    cdef readonly bint sealed       # some master is reached over TLS
    cdef readonly int slots         # n; or 2 n while there is a rival, whose slot is n + its index
    cdef void* at[2 * MAX_MASTERS]  # by slot, borrowed from `links` and `rivals`; NULL: no rival
    cdef object jitter
    cdef public object ask          # (options) -> resolve.Answer
    cdef readonly list news         # (address, word, cause), for the log; the driver empties it
    cdef readonly int64_t patience_ns
    cdef readonly int64_t connect_ns
    cdef readonly int forks         # how often this process was forked since the fleet was made
    cdef int64_t now_ns    # the last time that was told
    cdef Replies replies
    cdef Buf scratch
    cdef dict hoping                # rounds that still wait for a master to become ready
    cdef uint32_t hoped             # bits of the masters that any of them waits for, or more
    cdef uint64_t counts[8]

    cpdef int start(self, Op op, int64_t now) except -1
    cpdef int refill(self, Op op, int64_t now) except -1
    cpdef int refuse(self, Op op, str cause, int64_t now) except -1
    cpdef int serve(self, int64_t now) except -1
    cpdef int finish(self, Op op) except -1
    cpdef int expire(self, Op op, int64_t now) except -1
    cdef bint calm(self, int64_t now) noexcept
    cdef bint overdue(self, int64_t now) noexcept
    cpdef int judge(self, int64_t now) except -1
    cpdef int excuse(self, int64_t since, int64_t now) except -1
    cpdef uint64_t due(self, int64_t now) except? 0xFFFFFFFFFFFFFFFF
    cdef object place_to_dial(self, Link link, int64_t now)
    cpdef bint rival_won(self, int i) noexcept
    cpdef bint rival_lost(self, int i) noexcept
    cpdef int drop_rival(self, int i) except -1
    cpdef int promote(self, int i, int64_t now) except -1
    cdef int _kin(self, Link link, int64_t now) except -1
    cpdef int64_t next_ns(self) noexcept
    cpdef int broke(self, Link link, str outcome, str cause, int64_t now) except -1
    cdef bint owes(self) noexcept
    cdef int after_fork(self) except -1
    cdef int _encode(self, Op op, int first) except -1
    cdef int _forget(self, Op op) except -1
    cdef int _round_off(self, Op op) except -1
    cdef int _part_with(self, Op op, uint32_t away, int64_t now) except -1
    cdef int _give_up(self, Op op, Link link) except -1
    cdef int after_break(self, Link link) except -1
    cdef int _place(self) except -1
    cpdef int count(self, int what) except -1


cdef inline Link link_at(Fleet fleet, int slot):
    """The link of a slot: a master's, or its rival (None: there is none)."""
    return <Link> fleet.at[slot] if fleet.at[slot] != NULL else None
