# Moving bytes and waiting, without the GIL. See io.pyx for the contract.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from redlock_fast._core.fleet cimport Fleet
from redlock_fast._core.link cimport Link
from redlock_fast._core.op cimport MAX_MASTERS, Op
from redlock_fast._core.wire cimport Buf

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass

cdef extern from "<semaphore.h>" nogil:
    ctypedef struct sem_t:
        pass

cdef enum Phase:
    OPENING = 0     # the event is POLLOUT
    TALKING = 1     # the event is any whole line: the greeting needs the GIL
    SERVING = 2     # lines are counted, and wake who waits for them

# One connection. Everything is guarded by the pump's mutex, but for `fly` and `sent`, which belong
# to whoever flushes, and `rx`, `got` and `got_err`, which belong to whoever reads.
cdef struct Chan:
    int fd
    Phase phase
    bint stuck          # the socket took no more; the reader polls for POLLOUT
    bint event          # the GIL has to look at it; not polled until it did
    int err             # errno of a failed call, or END_OF_FILE
    Buf pend            # bytes to send, behind `fly`
    Buf fly             # bytes being sent,
    size_t sent         # from here on
    Buf inb             # bytes read and not taken yet
    Buf taken           # bytes being parsed; belongs to the parser
    size_t tail         # bytes since the last line feed
    int64_t lines       # line feeds read, in the link's own count of replies
    int64_t heard_ns    # when the last one was read
    char* rx            # RX_SIZE bytes
    ssize_t got
    int got_err
    bint polled         # dead, and a reader still has it in its set
    bint flown          # dead, and a flusher still has it in its list
    bint parsed         # dead, and a thread may be parsing what it brought
    Chan* next          # in the graveyard

# One waiting thread. Guarded by the mutex while `linked`; its owner's otherwise.
cdef struct Waiter:
    sem_t sem
    void* op            # borrowed: the round it waits for
    int want            # masters that must have reached their mark
    int64_t mark[MAX_MASTERS]   # lines of a master; -1: nothing is awaited there
    bint linked
    bint promoted       # the reading role is yours
    bint poked          # look, whatever has arrived
    bint sweep          # look after the next sweep
    Waiter* prev
    Waiter* next

cdef int64_t clock_ns() noexcept nogil

cdef class Pump:
    cdef object __weakref__
    cdef readonly Fleet fleet
    cdef readonly bint closed
    cdef int n
    cdef pthread_mutex_t mu
    cdef Chan* chans[MAX_MASTERS]
    cdef Chan* graves
    cdef int kick_fd            # an eventfd: wakes the reader out of its poll
    cdef bint pending           # some chan has bytes to send
    cdef bint flushing          # somebody sends
    cdef bint leading           # somebody has the reading role
    cdef bint polling           # ... and is inside its system calls
    cdef bint alert             # some chan has an event that nobody took
    cdef int64_t timer_ns       # when the GIL has to look even if nothing comes in
    cdef Waiter* first
    cdef Waiter* last
    cdef Waiter* spare          # pool, under the GIL
    # under the GIL
    cdef int inside             # threads in run(); read without it, as a hint
    cdef bint parsing
    cdef unsigned long parser
    cdef int64_t active_ns      # when the sockets were last looked at
    # measured
    cdef readonly int64_t sends
    cdef readonly int64_t looks

    cpdef int64_t run(self, Op op) except -1
    cpdef bint settle(self) except -1
    cdef int _idle(self, int64_t timeout_ns) except -1
    cdef void _push(self) noexcept
    cdef int64_t _freshen(self, int64_t now) except -1
    cdef int _look(self, int64_t now) except -1
    cdef int _parse(self, uint32_t todo, int64_t now) except -1
    cdef int _opened(self, Link link, Chan* c, int64_t now) except -1
    cdef int _dial(self, int64_t now) except -1
    cdef int _dial_one(self, Link link, int64_t now) except -1
    cdef int _post(self) except -1
    cdef int _wake_decided(self) except -1
    cdef Waiter* _new_waiter(self, Op op) except NULL
    cdef void _end_waiter(self, Waiter* w) noexcept
    cdef void _aim(self, Waiter* w, Op op, bint first) noexcept
    cdef void _bury(self, int i, bint abort) noexcept
    # without the GIL
    cdef int _wait(self, Waiter* w, int64_t until) noexcept nogil
    cdef int _read_once(self, Waiter* w, int64_t until) noexcept nogil
    cdef void _flush(self) noexcept nogil
    cdef void _step_down(self) noexcept nogil
    cdef void _reap(self) noexcept nogil
    cdef void _kick(self) noexcept nogil
    cdef void _link(self, Waiter* w) noexcept nogil
    cdef void _unlink(self, Waiter* w) noexcept nogil
    cdef bint _satisfied(self, Waiter* w) noexcept nogil
