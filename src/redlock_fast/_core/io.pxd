# Moving bytes and waiting, without the GIL. See io.pyx for the contract.

from libc.stdint cimport int64_t, uint64_t

from redlock_fast._core.op cimport MAX_MASTERS
from redlock_fast._core.wire cimport Buf

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef extern from "<semaphore.h>" nogil:
    ctypedef struct sem_t:
        pass

cdef enum:
    MAX_CHANS = 2 * MAX_MASTERS
    END_OF_FILE = -1            # in Chan.err
    LEAST_REPLY = 4             # bytes: ":1" and the line's end

# Why a wait ended.
cdef enum:
    WOKEN = 0       # enough has arrived
    TIMEOUT = 1
    INTERRUPTED = 2
    ALERT = 3       # an event, a timer, or a full buffer: the GIL has to look

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
    bint sealed         # TLS: `lines` is what can be, at most, and is put right at each look
    int64_t ahead       # of `lines`, those in `inb`
    unsigned char head[5]   # of a TLS record
    int heads           # bytes of it that were read
    size_t left         # bytes of the record behind it that were not
    int extra           # bytes of a record that are no data
    int rest            # bytes of data that did not count yet
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
    Waiter* newer       # among those in use, under the GIL
    Waiter* older

cdef int64_t clock_ns() noexcept nogil
cdef tuple open_socket(tuple place, list kept)

cdef class Mover:
    cdef int n
    cdef pthread_mutex_t mu
    cdef int slots              # chans in use: n, or 2 n while second connections are tried
    cdef Chan* chans[MAX_CHANS]
    cdef Chan* graves
    cdef int kick_fd            # an eventfd: wakes the reader out of its poll
    cdef bint shut              # ... and is to be closed by who has it last
    cdef bint pending           # some chan has bytes to send
    cdef bint flushing          # somebody sends
    cdef bint leading           # somebody has the reading role
    cdef bint polling           # ... and is inside its system calls
    cdef Waiter* reader         # who that is, while polling
    cdef bint behind            # at the last `collect`, some socket took no more
    cdef bint alert             # some chan has an event that nobody took
    cdef int64_t timer_ns       # when the GIL has to look even if nothing comes in
    cdef Waiter* first
    cdef Waiter* last
    cdef Waiter* newest         # those in use, under the GIL
    cdef Waiter* spare          # pool, under the GIL
    cdef int inside             # threads with a round; written under the GIL, read as a hint
    cdef bint parsing           # a thread parses what chans had taken; under the GIL
    cdef readonly int64_t sends

    # under the GIL, without the mutex
    cdef int open_kick(self) except -1
    cdef int open_chan(self, int i, int fd, int64_t lines, bint sealed, bint opened) except -1
    cdef void bury(self, int i, bint abort) noexcept
    cdef uint64_t collect(self) noexcept
    cdef void move_chan(self, int source, int target, int64_t lines) noexcept
    cdef void parsed(self) noexcept
    cdef void push(self) noexcept
    cdef Waiter* new_waiter(self, void* op) except NULL
    cdef void end_waiter(self, Waiter* w) noexcept
    cdef void poke_all(self) noexcept
    cdef void shut_kick(self) noexcept
    cdef void forget(self) noexcept
    # without the GIL and without the mutex
    cdef int wait(self, Waiter* w, int64_t until) noexcept nogil
    cdef void wake(self, Waiter* chain) noexcept nogil
    # with the mutex
    cdef void kick(self) noexcept nogil
    cdef void _close_kick(self) noexcept nogil
    cdef void unlink(self, Waiter* w) noexcept nogil
    cdef void _link(self, Waiter* w) noexcept nogil
    cdef int _read_once(self, Waiter* w, int64_t until) noexcept nogil
    cdef void _flush(self) noexcept nogil
    cdef void _step_down(self) noexcept nogil
    cdef void _reap(self) noexcept nogil
    cdef bint _satisfied(self, Waiter* w) noexcept nogil
