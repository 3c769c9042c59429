# cython: linetrace=False
"""Moving bytes and waiting: the only code that runs without the GIL.

A `Mover` has the sockets of one client's masters, buffers on both sides of them, and the threads
that wait. It knows no command and no reply: it counts line feeds, as a hint when to look. Who
drives it (the pump, under the GIL) hands bytes over, says for each waiting thread how many masters
must have sent how many lines, and takes away what has arrived. Under TLS it sees records only, and
counts for each as many lines as can be in it, until the driver says how many there were.

* Sending is a group commit: callers put bytes into `pend` under the mutex; who finds nobody
  sending sends until nothing is left.
* One thread at a time has the reading role. It polls, reads, counts lines, wakes the threads for
  which enough have come, and hands the role on when its own have.

Laws: the mutex is never held while taking the GIL, nor across a call that blocks; with both held,
nothing of Python is allocated or freed. Reader and flusher use a `Chan` outside the mutex, so a
dead one is freed, and its descriptor closed, only when neither can have it any more. No thread
leaves `wait` with the reading role. (Lines are not traced here: a trace function needs the GIL.)
"""

import _socket
import os
from libc.errno cimport EAGAIN, EINPROGRESS, EINTR, errno
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memchr, memset
from posix.time cimport timespec
from posix.unistd cimport close, read, write

from redlock_fast._core.wire cimport buf_free, buf_put

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_destroy(pthread_mutex_t*)

cdef extern from "<semaphore.h>" nogil:
    int sem_init(sem_t*, int, unsigned int)
    int sem_destroy(sem_t*)
    int sem_post(sem_t*)
    int sem_wait(sem_t*)
    int sem_clockwait(sem_t*, int, const timespec*)

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int POLLIN, POLLOUT
    int ppoll(pollfd*, unsigned long, const timespec*, const void*)

cdef extern from "<sys/socket.h>" nogil:
    int SOL_SOCKET, SO_LINGER, MSG_DONTWAIT, MSG_NOSIGNAL
    struct linger:
        int l_onoff
        int l_linger
    int setsockopt(int, int, int, const void*, unsigned int)
    ssize_t send(int, const void*, size_t, int)
    ssize_t recv(int, void*, size_t, int)

cdef extern from "<sys/eventfd.h>" nogil:
    int EFD_NONBLOCK, EFD_CLOEXEC
    int eventfd(unsigned int, int)

cdef extern from "<sys/random.h>" nogil:
    ssize_t getrandom(void*, size_t, unsigned int)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<time.h>" nogil:
    int CLOCK_MONOTONIC
    int CLOCK_BOOTTIME
    int clock_gettime(int, timespec*)

cdef enum:
    RX_SIZE = 64 * 1024         # bytes that one recv may bring
    MAX_INB = 1024 * 1024       # bytes read and not parsed; past it the reader leaves the rest
    MAX_TAIL = 64 * 1024        # bytes without a line feed that the link has to see
    DATA_RECORD = 23            # what a record of TLS begins with that holds data
cdef int64_t NEVER = 0x7FFFFFFFFFFFFFFF


cdef int64_t clock_ns() noexcept nogil:
    """Nanoseconds of a monotonic clock that runs through a suspend."""
    cdef timespec ts
    clock_gettime(CLOCK_BOOTTIME, &ts)
    return <int64_t> ts.tv_sec * 1_000_000_000 + ts.tv_nsec


def now_ns():
    """The clock of all deadlines, in whole nanoseconds (`CLOCK_BOOTTIME`)."""
    return clock_ns()


def draw_tokens(int count):
    """`count` fresh tokens: 20 bytes from the operating system each, as 40 hex digits (bytes).

    Nothing is drawn ahead, so nothing can be shared with a forked child. `getrandom(2)` with the
    GIL kept: a pair costs one call, and `os.urandom` would hand the GIL over.
    """
    cdef list tokens = []
    cdef unsigned char raw[240]
    cdef char text[40]
    cdef const char* digits = b"0123456789abcdef"
    cdef int i, j, take
    while count > 0:
        take = min(count, 12)       # up to 256 bytes the call is never interrupted or short
        if getrandom(raw, take * 20, 0) != take * 20:
            raise OSError(errno, "getrandom failed")
        for i in range(take):
            for j in range(20):
                text[2 * j] = digits[raw[20 * i + j] >> 4]
                text[2 * j + 1] = digits[raw[20 * i + j] & 15]
            tokens.append(text[:40])
        count -= take
    return tokens


# -- the waiting primitive: a semaphore remembers a post that comes before the wait --------------

cdef inline int _park(sem_t* sem, int64_t until) noexcept nogil:
    """0: posted. Else errno: ETIMEDOUT at `until` on our clock, or EINTR."""
    cdef timespec ts
    cdef int64_t at
    cdef int64_t left = until - clock_ns()
    if left < 0:
        left = 0
    clock_gettime(CLOCK_MONOTONIC, &ts)
    at = <int64_t> ts.tv_sec * 1_000_000_000 + ts.tv_nsec + left
    ts.tv_sec = at // 1_000_000_000
    ts.tv_nsec = at % 1_000_000_000
    if sem_clockwait(sem, CLOCK_MONOTONIC, &ts) == 0:
        return 0
    return errno


# -- connections ---------------------------------------------------------------------------------

cdef tuple open_socket(tuple place, list kept):
    """A non-blocking connection to a place, (family, sockaddr), that was begun, or has failed.

    `kept`: holds the socket from here on; whoever takes its descriptor over removes it.

    Returns:
        The socket; whether it is connected already; our address on it, as the server sees it.

    Raises:
        OSError: also when the connect has failed at once.
    """
    # The C type, not socket.socket: no Python code runs here, so no signal handler can. But the
    # GIL is given up.
    cdef object family = place[0]
    cdef object local = ""
    cdef object sock = _socket.socket(
        family, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
    )
    cdef int err
    kept.append(sock)
    try:
        if family != _socket.AF_UNIX:
            sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
        err = sock.connect_ex(place[1])
        if err and err != EINPROGRESS:
            raise OSError(err, os.strerror(err))
        if family == _socket.AF_INET:
            local = "%s:%d" % sock.getsockname()
        elif family == _socket.AF_INET6:
            local = "[%s]:%d" % sock.getsockname()[:2]
    except BaseException:
        kept.remove(sock)
        sock.close()
        raise
    return sock, err == 0, local


cdef Chan* _new_chan(int fd, int64_t lines) noexcept:
    cdef Chan* c = <Chan*> calloc(1, sizeof(Chan))
    if c == NULL:
        return NULL
    c.rx = <char*> malloc(RX_SIZE)
    if c.rx == NULL:
        free(c)
        return NULL
    c.fd = fd
    c.lines = lines
    return c


cdef void _free_chan(Chan* c) noexcept nogil:
    if c.fd >= 0:
        close(c.fd)
    buf_free(&c.pend)
    buf_free(&c.fly)
    buf_free(&c.inb)
    buf_free(&c.taken)
    free(c.rx)
    free(c)


cdef void _swallow_records(Chan* c, int64_t now) noexcept nogil:
    """Count the lines that can be in the records that the reader got."""
    cdef const unsigned char* at = <const unsigned char*> c.rx
    cdef const unsigned char* end = at + c.got
    cdef size_t take
    cdef int size
    while at < end:
        if c.left == 0:
            c.head[c.heads] = at[0]
            c.heads += 1
            at += 1
            if c.heads < 5:
                continue
            c.heads = 0
            c.left = c.head[3] << 8 | c.head[4]
            if c.head[0] != DATA_RECORD:
                c.event = True      # an alert, say; or no TLS at all
        take = min(c.left, <size_t> (end - at))
        at += take
        c.left -= take
        size = c.head[3] << 8 | c.head[4]
        if c.left == 0 and size > c.extra:
            # What is too short for a reply counts together with what comes next.
            size += c.rest - c.extra
            c.lines += size // LEAST_REPLY
            c.ahead += size // LEAST_REPLY
            c.rest = size % LEAST_REPLY
            c.heard_ns = now


cdef void _swallow(Chan* c, int64_t now) noexcept nogil:
    """Keep what the reader got, and count its lines."""
    cdef const char* at = c.rx
    cdef const char* end = c.rx + c.got
    cdef const char* nl
    if buf_put(&c.inb, c.rx, c.got) != 0:
        c.err = END_OF_FILE
        c.event = True
        return
    if c.sealed:
        if c.phase != SERVING:
            c.event = True
        _swallow_records(c, now)
        return
    while True:
        nl = <const char*> memchr(at, c'\n', end - at)
        if nl == NULL:
            break
        c.lines += 1
        c.heard_ns = now
        c.tail = 0
        at = nl + 1
        if c.phase != SERVING:
            c.event = True
    if c.tail == 0 and at < end and at[0] != c'+' and at[0] != c':' and at[0] != c'-' \
            and at[0] != c'$':
        c.event = True      # no line of ours starts so; it may never end
    c.tail += end - at
    if c.tail > MAX_TAIL:
        c.event = True


# -- the mover -----------------------------------------------------------------------------------

cdef class Mover:
    """The sockets of `n` masters, and who waits for them."""

    def __cinit__(self, int n):
        self.n = self.slots = n
        self.kick_fd = -1
        self.timer_ns = NEVER
        pthread_mutex_init(&self.mu, NULL)

    def __dealloc__(self):
        cdef int i
        cdef Waiter* w
        for i in range(MAX_CHANS):
            if self.chans[i] != NULL:
                _free_chan(self.chans[i])
        self._reap()
        while self.spare != NULL:
            w = self.spare
            self.spare = w.next
            sem_destroy(&w.sem)
            free(w)
        if self.kick_fd >= 0:
            close(self.kick_fd)
        pthread_mutex_destroy(&self.mu)

    # -- a round, under the GIL ------------------------------------------------------------------

    cdef int open_kick(self) except -1:
        """Make the eventfd, unless it is there."""
        if self.kick_fd < 0:
            self.kick_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
            if self.kick_fd < 0:
                raise OSError(errno, os.strerror(errno))
        return 0

    cdef int open_chan(self, int i, int fd, int64_t lines, bint sealed, bint opened) except -1:
        """Take over a descriptor; `lines`: where its count of replies starts."""
        cdef Chan* c = _new_chan(fd, lines)
        if c == NULL:
            raise MemoryError("no memory for a connection")
        c.sealed = sealed
        c.event = opened
        pthread_mutex_lock(&self.mu)
        self.chans[i] = c
        if opened:
            self.alert = True
        if self.polling:
            self.kick()     # the reader has to take it into its set
        pthread_mutex_unlock(&self.mu)
        return 0

    cdef void bury(self, int i, bint abort) noexcept:
        """Take a connection out of use; it is closed when nobody can have its descriptor any more.

        `abort`: discard what is in flight (RST), so that a late SET has less of a chance.
        """
        cdef Chan* c = self.chans[i]
        cdef linger hard
        if c == NULL:
            return
        if abort:
            hard.l_onoff = 1
            hard.l_linger = 0
            setsockopt(c.fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard))
        pthread_mutex_lock(&self.mu)
        self.chans[i] = NULL
        c.polled = self.polling
        c.flown = self.flushing
        c.parsed = self.parsing
        c.next = self.graves
        self.graves = c
        self._reap()
        pthread_mutex_unlock(&self.mu)

    cdef void move_chan(self, int source, int target, int64_t lines) noexcept:
        """Let a connection take another's slot, which must be free."""
        pthread_mutex_lock(&self.mu)
        self.chans[target] = self.chans[source]
        self.chans[source] = NULL
        if self.chans[target] != NULL:
            self.chans[target].lines = lines + self.chans[target].ahead
        pthread_mutex_unlock(&self.mu)

    cdef uint64_t collect(self) noexcept:
        """Take away what has arrived: bits of the chans with bytes in `taken`, or an event."""
        cdef Chan* c
        cdef int i
        cdef uint64_t bits = 0
        pthread_mutex_lock(&self.mu)
        self.alert = self.behind = False
        for i in range(self.slots):
            c = self.chans[i]
            if c == NULL:
                continue
            if c.stuck:
                self.behind = True
            if c.event or c.inb.n:
                bits |= <uint64_t> 1 << i
                c.taken, c.inb = c.inb, c.taken
                c.ahead = 0
        pthread_mutex_unlock(&self.mu)
        return bits

    cdef void parsed(self) noexcept:
        """The parser is done with what it had taken."""
        cdef Chan* c
        self.parsing = False
        if self.graves == NULL:
            return
        pthread_mutex_lock(&self.mu)
        c = self.graves
        while c != NULL:
            c.parsed = False
            c = c.next
        self._reap()
        pthread_mutex_unlock(&self.mu)

    cdef void push(self) noexcept:
        """Send what is there to send, and wait for nothing."""
        with nogil:
            pthread_mutex_lock(&self.mu)
            self._flush()
            pthread_mutex_unlock(&self.mu)

    cdef Waiter* new_waiter(self, void* op) except NULL:
        cdef Waiter* w = self.spare
        cdef int i
        if w != NULL:
            self.spare = w.next
        else:
            w = <Waiter*> calloc(1, sizeof(Waiter))
            if w == NULL:
                raise MemoryError("no memory for a waiting thread")
            sem_init(&w.sem, 0, 0)
        w.op = op
        w.want = 1
        w.linked = False
        w.promoted = False
        w.poked = False
        w.sweep = False
        w.next = NULL
        w.prev = NULL
        w.newer = NULL
        w.older = self.newest
        if w.older != NULL:
            w.older.newer = w
        self.newest = w
        for i in range(self.n):
            w.mark[i] = -1
        return w

    cdef void end_waiter(self, Waiter* w) noexcept:
        if w.newer != NULL:
            w.newer.older = w.older
        elif self.newest == w:      # not in a forked child, see forget()
            self.newest = w.older
        if w.older != NULL:
            w.older.newer = w.newer
        w.op = NULL
        w.next = self.spare
        self.spare = w

    cdef void poke_all(self) noexcept:
        """Let every thread that waits, or is about to, look."""
        cdef Waiter* w = self.newest
        pthread_mutex_lock(&self.mu)
        while w != NULL:
            w.poked = True
            if w.linked:
                self.unlink(w)
                sem_post(&w.sem)
            w = w.older
        if self.polling:
            self.kick()
        pthread_mutex_unlock(&self.mu)

    cdef void shut_kick(self) noexcept:
        """Close the eventfd; a reader that still has it does so when it is back."""
        pthread_mutex_lock(&self.mu)
        self.shut = True
        if not self.polling:
            self._close_kick()
        pthread_mutex_unlock(&self.mu)

    cdef void forget(self) noexcept:
        """In a forked child: all of this is the parent's. Close descriptors, never shut down.

        Another thread of the parent may have been in the middle of anything without the GIL, so
        nothing of what the mutex guards is freed, or looked at but for the descriptors: a few
        buffers are lost per fork.
        """
        cdef Chan* c = self.graves      # what is in this list has its descriptor, see _reap()
        cdef Waiter* w
        cdef int i
        memset(&self.mu, 0, sizeof(self.mu))
        pthread_mutex_init(&self.mu, NULL)
        for i in range(MAX_CHANS):
            if self.chans[i] != NULL:
                close(self.chans[i].fd)
                self.chans[i] = NULL
        while c != NULL:
            close(c.fd)
            c = c.next
        self.graves = NULL
        if self.kick_fd >= 0:
            close(self.kick_fd)
            self.kick_fd = -1
        self.pending = self.flushing = self.leading = self.polling = self.alert = False
        self.timer_ns = NEVER
        self.first = self.last = self.spare = self.reader = NULL
        while self.newest != NULL:
            w = self.newest
            self.newest = w.older
            w.newer = w.older = NULL
        self.inside = 0
        self.parsing = False

    cdef void wake(self, Waiter* chain) noexcept nogil:
        """Post waiters that were unlinked and chained; without the mutex."""
        cdef Waiter* w
        while chain != NULL:
            w = chain
            chain = w.next      # after the post it is its owner's again
            sem_post(&w.sem)

    # -- waiting, without the GIL ----------------------------------------------------------------
    # Every method from here on is entered and left with the mutex held, but for `wait`.

    cdef int wait(self, Waiter* w, int64_t until) noexcept nogil:
        """Send, then wait until enough has arrived for `w`, or `until`, or the GIL has to look."""
        cdef bint lead = False
        cdef int rc = WOKEN
        cdef int err
        pthread_mutex_lock(&self.mu)
        self._flush()
        while not self._satisfied(w):
            if self.alert:
                self.alert = False
                rc = ALERT
                break
            if lead or not self.leading:
                lead = True
                self.leading = True
                rc = self._read_once(w, until)
                if rc != WOKEN:
                    break
                continue
            # Deciding to follow and being linked happen under one hold of the mutex, so no wake-up
            # can be lost; and the semaphore remembers one that comes before the wait.
            self._link(w)
            if w.sweep:
                self.kick()
            pthread_mutex_unlock(&self.mu)
            err = _park(&w.sem, until)
            pthread_mutex_lock(&self.mu)
            if err != 0:
                if w.linked:
                    self.unlink(w)
                    rc = INTERRUPTED if err == EINTR else TIMEOUT
                    break
                # Somebody unlinked us in between, so the post is certain: take it, the semaphore
                # must be back at zero.
                pthread_mutex_unlock(&self.mu)
                while sem_wait(&w.sem) != 0:
                    pass
                pthread_mutex_lock(&self.mu)
            if w.promoted:
                w.promoted = False
                lead = True
        if lead:
            self._step_down()
        if rc != WOKEN and self._satisfied(w):
            rc = WOKEN
        pthread_mutex_unlock(&self.mu)
        return rc

    cdef bint _satisfied(self, Waiter* w) noexcept nogil:
        cdef int i
        cdef int have = 0
        if w.poked:
            return True
        for i in range(self.n):
            if w.mark[i] >= 0 and (self.chans[i] == NULL or self.chans[i].lines >= w.mark[i]):
                have += 1
        return have >= w.want

    cdef int _read_once(self, Waiter* w, int64_t until) noexcept nogil:
        """Poll all connections once and read what is there. The caller has the reading role."""
        cdef pollfd fds[MAX_CHANS + 1]
        cdef Chan* live[MAX_CHANS]
        cdef Chan* c
        cdef Waiter* follower
        cdef Waiter* after
        cdef Waiter* woken = NULL
        cdef timespec ts
        cdef int64_t left, now
        cdef uint64_t word
        cdef int i, ready, err, count = 0
        cdef bint full = False, again = False
        for i in range(self.slots):
            c = self.chans[i]
            if c == NULL or c.event:
                continue
            fds[count].events = 0
            if c.phase == OPENING or c.stuck:
                fds[count].events |= POLLOUT
            if c.inb.n < MAX_INB:
                fds[count].events |= POLLIN
            else:
                full = True
            fds[count].fd = c.fd
            fds[count].revents = 0
            live[count] = c
            count += 1
        if full:
            return ALERT
        fds[count].fd = self.kick_fd
        fds[count].events = POLLIN
        fds[count].revents = 0
        left = min(until, self.timer_ns) - clock_ns()
        if left < 0 or w.sweep:
            left = 0
        self.polling = True
        self.reader = w
        pthread_mutex_unlock(&self.mu)
        ts.tv_sec = left // 1_000_000_000
        ts.tv_nsec = left % 1_000_000_000
        ready = ppoll(fds, count + 1, &ts, NULL)
        err = errno if ready < 0 else 0
        if ready > 0:
            for i in range(count):
                c = live[i]
                c.got = 0
                c.got_err = 0
                if fds[i].revents & ~POLLOUT and c.phase != OPENING:
                    c.got = recv(c.fd, c.rx, RX_SIZE, MSG_DONTWAIT)
                    if c.got < 0:
                        c.got_err = errno
                    elif c.got == 0:
                        c.got_err = END_OF_FILE
            if fds[count].revents:
                read(self.kick_fd, &word, 8)
        now = clock_ns()
        pthread_mutex_lock(&self.mu)
        self.polling = False
        self.reader = NULL
        if self.shut:
            self._close_kick()
        if ready > 0:
            for i in range(count):
                if fds[i].revents == 0:
                    continue
                c = live[i]
                if c.phase == OPENING:
                    c.event = True
                elif c.got > 0:
                    _swallow(c, now)
                elif c.got_err and c.got_err != EAGAIN \
                        and c.got_err != EINTR:
                    c.err = c.got_err
                    c.event = True
                if fds[i].revents & POLLOUT and c.stuck:
                    c.stuck = False
                    again = True
                if c.event and not c.polled:
                    self.alert = True
            follower = self.first
            while follower != NULL:
                after = follower.next
                if follower.sweep or self._satisfied(follower):
                    follower.poked = True
                    self.unlink(follower)
                    follower.next = woken
                    woken = follower
                follower = after
        # `polled` marks the dead whose descriptor was in this sweep's set: it no longer is.
        if self.graves != NULL:
            c = self.graves
            while c != NULL:
                c.polled = False
                c = c.next
            self._reap()
        if woken != NULL:
            pthread_mutex_unlock(&self.mu)
            self.wake(woken)
            pthread_mutex_lock(&self.mu)
        if again:
            self.pending = True
            self._flush()
        if err == EINTR:
            return INTERRUPTED
        if w.sweep:
            w.poked = True
            return WOKEN
        if ready == 0:
            if now >= until:
                return TIMEOUT
            if now >= self.timer_ns:
                self.timer_ns = NEVER       # taken: no other thread has to wake for it
                return ALERT
        return WOKEN

    cdef void _flush(self) noexcept nogil:
        """Group commit: send for everyone, unless somebody does already."""
        cdef Chan* live[MAX_CHANS]
        cdef int errs[MAX_CHANS]
        cdef Chan* c
        cdef ssize_t sent
        cdef int i, count
        if self.flushing or not self.pending:
            return
        self.flushing = True
        while self.pending:
            if self.inside > 1:
                # Others are about to queue: one system call can take theirs along.
                pthread_mutex_unlock(&self.mu)
                sched_yield()
                pthread_mutex_lock(&self.mu)
            self.pending = False
            count = 0
            for i in range(self.slots):
                c = self.chans[i]
                if c == NULL or c.stuck or c.err or c.phase == OPENING:
                    continue
                if c.sent == c.fly.n:
                    c.fly.n = 0
                    c.sent = 0
                    c.fly, c.pend = c.pend, c.fly
                if c.fly.n:
                    live[count] = c
                    count += 1
            pthread_mutex_unlock(&self.mu)
            for i in range(count):
                c = live[i]
                errs[i] = 0
                while c.sent < c.fly.n:
                    sent = send(c.fd, c.fly.p + c.sent, c.fly.n - c.sent,
                                MSG_DONTWAIT | MSG_NOSIGNAL)
                    self.sends += 1
                    if sent >= 0:
                        c.sent += sent
                    elif errno != EINTR:
                        errs[i] = errno
                        break
            pthread_mutex_lock(&self.mu)
            for i in range(count):
                c = live[i]
                if errs[i] == EAGAIN:
                    c.stuck = True
                    if self.polling:
                        self.kick()
                elif errs[i]:
                    c.err = errs[i]
                    c.event = True
                    self.alert = True
                    if self.polling:
                        self.kick()
                elif c.pend.n:
                    self.pending = True
        self.flushing = False
        if self.graves != NULL:
            c = self.graves
            while c != NULL:
                c.flown = False
                c = c.next
            self._reap()

    cdef void _step_down(self) noexcept nogil:
        """Hand the reading role on, if anybody waits."""
        cdef Waiter* heir = self.first
        if heir == NULL:
            self.leading = False
            return
        self.unlink(heir)
        heir.promoted = True
        sem_post(&heir.sem)

    cdef void _reap(self) noexcept nogil:
        """Close and free the dead that no reader, flusher or parser can have any more."""
        cdef Chan** at = &self.graves
        cdef Chan* c
        while at[0] != NULL:
            c = at[0]
            if c.polled or c.flown or c.parsed:
                at = &c.next
            else:
                at[0] = c.next
                _free_chan(c)

    cdef void _close_kick(self) noexcept nogil:
        if self.kick_fd >= 0:
            close(self.kick_fd)
            self.kick_fd = -1

    cdef void kick(self) noexcept nogil:
        cdef uint64_t one = 1
        write(self.kick_fd, &one, 8)

    cdef void _link(self, Waiter* w) noexcept nogil:
        w.linked = True
        w.next = NULL
        w.prev = self.last
        if self.last == NULL:
            self.first = w
        else:
            self.last.next = w
        self.last = w

    cdef void unlink(self, Waiter* w) noexcept nogil:
        w.linked = False
        if w.prev == NULL:
            self.first = w.next
        else:
            w.prev.next = w.next
        if w.next == NULL:
            self.last = w.prev
        else:
            w.next.prev = w.prev
