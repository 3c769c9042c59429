# The conversation with one master. See link.pyx for the contract.

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from redlock_fast._core.op cimport Op
from redlock_fast._core.seal cimport Seal
from redlock_fast._core.wire cimport Buf, Replies, Reply
from redlock_fast.resolve cimport Answer

cdef enum State:
    DOWN = 0        # no connection; one may be dialled from retry_ns on
    DIALING = 1     # looking up, connecting
    GREETING = 2    # connected; TLS, AUTH, SELECT and the proof of life are under way
    READY = 3       # takes commands

cdef enum:
    MAX_OWED = 4096             # replies; past it no SET goes there (DESIGN, rule 6)
    MAX_UNSENT = 1024 * 1024    # bytes; likewise

cdef struct Ticket:
    PyObject* op    # owned; NULL for a step of the greeting
    int item        # first item, or the step
    int k           # commands
    int done        # replies booked
    int again       # how often it was sent again after NOSCRIPT

cdef class Link:
    cdef readonly int index
    cdef readonly object options        # options.MasterOptions
    cdef readonly int state             # a State
    cdef readonly bint suspect          # owes, and has been silent for `patience_ns`
    cdef Buf out                        # bytes to send, in order; whoever drives takes them away
    cdef readonly Seal seal             # of this connection; None without TLS
    cdef Buf part                       # an unfinished line
    cdef int lines                      # whole lines given to `replies`, to be booked
    cdef Replies replies
    cdef Ticket* ring                   # FIFO of what is owed, from head to tail
    cdef uint32_t mask
    cdef uint64_t head
    cdef uint64_t tail
    cdef int64_t promised               # replies ever asked for
    cdef int64_t booked                 # replies ever dealt with; promised - booked are owed
    cdef public size_t unsent           # bytes taken away and not sent; told by whoever drives
    cdef public bint stuck              # ... because the socket takes no more
    cdef readonly int64_t patience_ns   # master_timeout
    cdef int64_t quiet_ns               # since when it owes without a complete reply
    cdef readonly int64_t retry_ns      # no dialling (DOWN) and no SET (READY) before
    cdef bint idled                     # the last connection was greeted, and ended unused
    cdef readonly int64_t dial_limit_ns     # DIALING, GREETING: when to give up
    # where to connect to
    cdef readonly Answer answer         # asked for, and not used up; or None
    cdef int64_t asked_ns
    cdef list places                    # of this dial, not tried yet
    cdef int place_count                # how many there were
    cdef object place                   # (family, sockaddr) of this connection
    cdef object good                    # ... that led to a READY one, last
    cdef object bad                     # ... that was connected to, and led to none
    cdef readonly bint between          # DOWN, and the next place is to be tried at once
    cdef int64_t place_limit_ns         # DIALING: when this place's time is over
    # who to be
    cdef str username
    cdef object password                # options.Secret, or None
    cdef int failures                   # in a row
    cdef int64_t failed_ns              # when the connection last failed
    cdef bint fresh                     # has become ready, and the fleet has not looked at it yet
    cdef bint served                    # gave a usable reply on this connection
    cdef bint akin                      # news about its kinship was told
    cdef bint told                      # its trouble was put into the news
    cdef readonly str outcome           # of the last failure
    cdef readonly str cause
    cdef int64_t unpaid                 # deletions sent and not answered
    cdef readonly object debts          # deque of (op, first item, count)
    cdef bint indebted                  # there are some
    cdef int64_t text_sent[4]           # by script: `promised` when its text went out; -1: not yet
    cdef object jitter                  # () -> [0, 1)
    cdef list news                      # shared with the fleet
    cdef readonly object client_id      # of this connection, where the master tells
    cdef readonly str run_id            # of the server, where it tells; "" else
    cdef public str local               # our address on this connection, as the server sees it
    # deque of (client id, address, run id): what broke with a SET unanswered, and is to be killed
    cdef readonly object leftovers
    # for stats()
    cdef readonly int64_t answers
    cdef readonly int64_t reconnects
    cdef readonly dict errors
    cdef readonly int64_t took_ns       # the last reply's time since its round began; -1: none

    cdef bint may_redial(self, int64_t now)
    cdef bint hopeless(self)
    cdef bint takes(self, Op op, int64_t now) noexcept
    cdef int queue(self, Op op, int item, int count, Buf* commands, int64_t now) except -1
    cdef int push(self, PyObject* op, int item, int k, int again) except -1
    cdef int _append(self, Op op, int item, int count, Buf* commands) except -1
    cdef int owe(self, Op op, int item, int count) except -1
    cdef int pay(self, int64_t now) except -1
    cdef int dialing(self, int64_t now, int64_t limit) except -1
    cdef bint asks(self) except -1
    cdef int asked(self, Answer answer, int64_t now) except -1
    cdef object next_place(self, int64_t now)
    cdef bint moves(self) noexcept
    cdef int64_t limit(self) noexcept
    cdef str waits_for(self)
    cdef int encrypt(self, int64_t now) except -1
    cdef int unseal(self, bytes records, int64_t now) except -1
    cdef int seal_broke(self, int64_t now) except -1
    cdef int hello(self, int64_t now) except -1
    cdef bytes _secret(self)
    cdef int _found(self, tuple places) except -1
    cdef int connected(self, int64_t now) except -1
    cdef int greet(self, int64_t now) except -1
    cdef int feed(self, const char* p, size_t n, int64_t now) except -1
    cdef int book_lines(self, int64_t now) except -1
    cdef int book(self, Reply reply, int64_t now) except -1
    cdef bint _expects_info(self) noexcept
    cdef int _feed_info(self, const char* p, size_t n, int64_t now) except -1
    cdef int _ready(self, int64_t now) except -1
    cdef int succeed(self, Link old, int64_t now) except -1
    cdef int greeted(self, int step, Reply reply, int64_t now) except -1
    cdef int refused(self, Op op, int item, int again, int64_t place, int64_t now) except -1
    cdef int broke(self, str outcome, str cause, int64_t now) except -1
    cdef int trouble(self, str outcome, str cause) except -1
    cdef int after_fork(self) except -1
    cdef int _well(self) except -1
    cdef int _ask(self, int step, tuple words) except -1
    cdef void _no_text_sent(self) noexcept
    cdef void _drop_head(self)


cdef inline bint speaks(Link link) noexcept:
    """Is there anything to be sent?"""
    return link.out.n > 0 or link.seal is not None and (link.seal.out.n > 0 or link.seal.due)


cdef inline Buf* wire_out(Link link) noexcept:
    """What goes to the socket: with TLS, what `encrypt` has made of `out`."""
    return &link.out if link.seal is None else &link.seal.out
