"""N links, and which of them a round asks: health, back-off, bounds, chunks, deadlines.

Given a round, `start` queues its commands on every master that may take them and remembers the
others as hopes: a master that becomes ready while the round is open gets its commands then. Who
drives moves the links' bytes, tells what became of connections, and asks in between:

    serve(now)   after anything came in: debts, hopes, failures of links
    refill(op)   the next chunks of a batch
    due(now)     which slots are to be dialled now
    next_ns()    when to ask again, even if nothing comes in

Never: system calls, clocks, waiting. All under the GIL.
"""

cimport cython

from redlock_fast._core.link cimport (
    DIALING,
    DOWN,
    GREETING,
    MAX_OWED,
    MAX_UNSENT,
    READY,
    Link,
    speaks,
    wire_out,
)
from redlock_fast._core.op cimport ACQUIRE, MAX_MASTERS, RELEASE, Op, new_op, single_op
from redlock_fast._core.wire cimport Replies, buf_free

cdef int64_t NEVER = 0x7FFFFFFFFFFFFFFF

# What is counted, for stats().
COUNTERS = ("acquired", "contended", "no_quorum", "too_late", "released", "extended", "lost")

# A debt is void when its key must have expired: this long after it was noted, where the lock's
# ttl is not known.
cdef int64_t LAPSE_NS = 60_000_000_000
cdef int64_t LAPSE_MARGIN_NS = 10_000_000_000


@cython.final
cdef class Fleet:
    """The masters of one client.

    Attributes:
        ask: given by who drives: `resolve.ask`, for one that is to be woken.

    Args:
        masters: sequence of `options.MasterOptions`, at most 32.
        patience_ns: `master_timeout`; a round ends so long after its start.
        connect_ns: `connect_timeout`; a connection has so long to become ready.
        jitter: draws from [0, 1).
    """

    def __cinit__(self, masters, int64_t patience_ns, int64_t connect_ns, jitter):
        if not 0 < len(masters) <= MAX_MASTERS:
            raise ValueError(f"expected 1 to {MAX_MASTERS} masters, not {len(masters)}")
        self.n = len(masters)
        self.patience_ns = patience_ns
        self.connect_ns = connect_ns
        self.replies = Replies()
        self.news = []
        self.hoping = {}
        self.sealed = any([options.tls is not None for options in masters])
        self.jitter = jitter
        self.rivals = [None] * self.n
        self.links = [
            Link(i, options, self.replies, patience_ns, jitter, self.news)
            for i, options in enumerate(masters)
        ]
        self._place()

    def __dealloc__(self):
        buf_free(&self.scratch)

    cdef int _place(self) except -1:
        """`links` or `rivals` have changed."""
        cdef int i
        for i in range(self.n):
            self.at[i] = <void*> self.links[i]
            self.at[self.n + i] = NULL if self.rivals[i] is None else <void*> self.rivals[i]
        self.slots = 2 * self.n if any(self.rivals) else self.n
        return 0

    # -- rounds --------------------------------------------------------------------------------

    cpdef int start(self, Op op, int64_t now) except -1:
        """Begin a round: queue its first chunk wherever it may go."""
        cdef Link link
        cdef uint32_t bit, away = 0
        cdef int i, count
        self.now_ns = now
        op.start_ns = now
        op.limit_ns = now + self.patience_ns
        op.forks = self.forks
        if op.lapse_ns == 0:
            op.lapse_ns = now + max(LAPSE_NS, op.lasts_ms * 1_000_000 + LAPSE_MARGIN_NS)
        count = self._encode(op, 0)
        for i in range(self.n):
            bit = <uint32_t> 1 << i
            if not op.asked & bit:
                continue
            link = <Link> self.at[i]
            if link.takes(op, now):
                link.queue(op, 0, count, &self.scratch, now)
                continue
            if op.kind == RELEASE:
                if link.state == READY:
                    continue        # a batch, and it owes much: refill() sees to it
                link.owe(op, 0, op.k)
                op.parts[i].queued = op.k
            op.hoping |= bit
            if link.retry_ns > op.limit_ns and (
                link.state == DOWN or link.state == READY and op.kind == ACQUIRE
            ):
                away |= bit
        if away:
            self._part_with(op, away, now)
        if op.hoping and not op.ended:
            self.hoping[op] = None
            self.hoped |= op.hoping
        if op.k > count:
            self.refill(op, now)
        return 0

    cdef int _part_with(self, Op op, uint32_t away, int64_t now) except -1:
        """Masters in back-off for longer than this round: count them out.

        Unless no quorum is possible without them: then those that were merely not there are
        dialled now, if the last attempt was not just now; they may be back.
        """
        cdef Link link
        cdef int i, others = 0
        for i in range(self.n):
            others += (op.asked & ~away) >> i & 1
        for i in range(self.n):
            if away >> i & 1:
                link = <Link> self.at[i]
                if others < self.n // 2 + 1 and link.may_redial(now):
                    link.retry_ns = now
                else:
                    self._give_up(op, link)
        return 0

    cdef int _encode(self, Op op, int first) except -1:
        """Put the commands of the next chunk into `scratch`; returns how many items that is."""
        cdef int item = first
        cdef int last = min(op.k, first + CHUNK)
        self.scratch.n = 0
        while item < last and (item == first or self.scratch.n < CHUNK_BYTES):
            op.put(&self.scratch, item, False)
            item += 1
        return item - first

    cpdef int refill(self, Op op, int64_t now) except -1:
        """Queue a batch's next chunks where there is room.

        Returns 1 while a master that works has not been given all of them.
        """
        cdef Link link
        cdef uint32_t bit
        cdef int i, first, count = 0, encoded = -1
        cdef bint more = False
        for i in range(self.n):
            bit = <uint32_t> 1 << i
            if not op.asked & bit or op.hoping & bit or op.parts[i].queued >= op.k:
                continue
            link = <Link> self.at[i]
            if op.closed & bit:
                continue
            if link.state != READY or op.kind == ACQUIRE and link.retry_ns > now:
                # It broke, or answers with errors, half way: the rest is not sent.
                op.explain(i, link.outcome, link.cause)
                op.fail(i, op.parts[i].queued, op.k - op.parts[i].queued)
                if op.kind == RELEASE:
                    link.owe(op, op.parts[i].queued, op.k - op.parts[i].queued)
                    op.parts[i].queued = op.k
                op.close(i)
                continue
            while op.parts[i].queued < op.k:
                if (
                    op.parts[i].owed > WINDOW - CHUNK
                    or link.promised - link.booked >= MAX_OWED
                    or link.unsent + link.out.n > 2 * CHUNK_BYTES
                ):
                    more = more or not link.suspect
                    break
                first = op.parts[i].queued
                if encoded != first:
                    count = self._encode(op, first)
                    encoded = first
                link.queue(op, first, count, &self.scratch, now)
        return more

    cdef int _give_up(self, Op op, Link link) except -1:
        """A master that cannot answer within this round: say why, and count it out."""
        op.explain(link.index, link.outcome, link.cause)
        op.fail(link.index, 0, op.k)
        op.close(link.index)
        op.nudged = True
        return 0

    cpdef int refuse(self, Op op, str cause, int64_t now) except -1:
        """A round that cannot even begin: no master can be asked."""
        cdef int i
        op.start_ns = op.limit_ns = now
        op.forks = self.forks
        for i in range(self.n):
            if op.asked >> i & 1:
                op.explain(i, "refused", cause)
                op.fail(i, 0, op.k)
                op.close(i)
        return 0

    cpdef int serve(self, int64_t now) except -1:
        """Something came in or fell due: pay debts, fulfil hopes."""
        cdef Link link
        cdef Op op
        cdef int i, count
        cdef uint32_t bit, able = 0
        self.now_ns = now
        for i in range(self.n):
            link = <Link> self.at[i]
            if link.fresh:
                link.fresh = False
                self._kin(link, now)
            if link.state == READY and link.indebted and now >= link.retry_ns:
                link.pay(now)
        if not self.hoping:
            return 0
        # With many rounds inside, and none of their hopes come true, this must not look at each.
        for i in range(self.n):
            link = <Link> self.at[i]
            if link.state == READY and not link.suspect:
                able |= <uint32_t> 1 << i
        if not able & self.hoped:
            return 0
        self.hoped = 0
        for op in list(self.hoping):
            for i in range(self.n):
                bit = <uint32_t> 1 << i
                link = <Link> self.at[i]
                if op.ended or not op.hoping & bit or not link.takes(op, now):
                    continue
                op.hoping &= ~bit
                op.nudged = True
                if op.kind == RELEASE:
                    continue    # its debt was paid just now
                count = self._encode(op, 0)
                link.queue(op, 0, count, &self.scratch, now)
            if op.ended or not op.hoping:
                self._forget(op)
            else:
                self.hoped |= op.hoping
        return 0

    cpdef int finish(self, Op op) except -1:
        """The round is over: nobody waits for it any more."""
        self._forget(op)
        if op.k > 1:
            self._round_off(op)
        return 0

    cdef int _forget(self, Op op) except -1:
        op.hoping = 0
        if self.hoping:
            self.hoping.pop(op, None)
        return 0

    cdef int _round_off(self, Op op) except -1:
        """A batch was decided while slower masters had not been given all of it.

        Deletions have to reach them all the same, as debts. SETs that are few go out too, so that
        the locks do not rest on a bare quorum.
        """
        cdef Link link
        cdef int i, count
        for i in range(self.n):
            link = <Link> self.at[i]
            if not op.asked >> i & 1 or op.closed >> i & 1 or op.parts[i].queued == op.k:
                continue
            if op.kind == RELEASE:
                link.owe(op, op.parts[i].queued, op.k - op.parts[i].queued)
                op.parts[i].queued = op.k
                if link.state == READY:
                    link.pay(self.now_ns)
            elif (
                op.kind == ACQUIRE and op.ended and not op.late and op.parts[i].queued > 0
                and op.k - op.parts[i].queued <= WINDOW and link.takes(op, self.now_ns)
            ):
                while op.parts[i].queued < op.k:
                    count = self._encode(op, op.parts[i].queued)
                    link.queue(op, op.parts[i].queued, count, &self.scratch, self.now_ns)
        return 0

    cpdef int expire(self, Op op, int64_t now) except -1:
        """The round's time is up: say why each master that did not answer did not, and judge."""
        cdef Link link
        cdef int i
        self.judge(now)
        for i in range(self.n):
            if not op.asked >> i & 1 or op.closed >> i & 1:
                continue
            link = <Link> self.at[i]
            if op.parts[i].owed or op.parts[i].queued < op.k and not op.hoping >> i & 1:
                op.explain(i, "timeout", "no answer in time")
            elif op.hoping >> i & 1:
                if link.state == DIALING or link.state == GREETING or link.between:
                    op.explain(i, "connecting", "the connection is not ready yet")
                elif link.suspect:
                    op.explain(i, "suspect", "owes replies and is silent")
                elif link.state == READY and now >= link.retry_ns:
                    op.explain(i, "busy", "owes too many replies")
                else:
                    op.explain(i, link.outcome, link.cause)
        op.expire()
        return self._forget(op)

    # -- health --------------------------------------------------------------------------------

    cdef bint calm(self, int64_t now) noexcept:
        """Is every master ready and prompt, and nobody has anything to say, to pay or to hope for?

        Then `serve`, `judge`, `due` and `next_ns` have nothing to do, and need not be asked.
        """
        cdef Link link
        cdef int i
        if self.slots != self.n or self.hoping:
            return False
        for i in range(self.n):
            link = <Link> self.at[i]
            if (
                link.state != READY or link.fresh or link.indebted or speaks(link)
                or link.retry_ns > now
                or link.promised != link.booked and now - link.quiet_ns >= self.patience_ns
            ):
                return False
        return True

    cdef bint overdue(self, int64_t now) noexcept:
        """Would `judge` find anybody? Only to be asked after the sockets were drained."""
        cdef Link link
        cdef int i
        for i in range(self.slots):
            link = link_at(self, i)
            if link is None:
                continue
            if link.state == READY:
                if not link.suspect and link.promised != link.booked \
                        and now - link.quiet_ns >= self.patience_ns:
                    return True
            elif link.state == DOWN:
                if now >= link.retry_ns:
                    return True
            elif now >= link.limit() or link.moves():
                return True
        return False

    cpdef int judge(self, int64_t now) except -1:
        """Mark who is suspect; give up on connections that take too long or owe too much.

        Beside a suspect connection a second one is tried; whichever answers first carries on.

        The caller has drained the sockets: a stalled caller is not the master's fault.
        """
        cdef Link link
        cdef int i
        self.now_ns = now
        for i in range(self.slots):
            link = link_at(self, i)
            if link is None:
                continue
            if link.state == READY:
                if link.promised - link.booked > 2 * MAX_OWED or link.unsent > 2 * MAX_UNSENT:
                    self.broke(link, "busy", "owes too many replies", now)
                elif link.promised != link.booked and now - link.quiet_ns >= self.patience_ns:
                    link.suspect = True
                    if self.rivals[i] is None:
                        self.rivals[i] = Link(
                            i, link.options, self.replies, self.patience_ns, self.jitter, None
                        )
                        (<Link> self.rivals[i]).good = link.good
                        self._place()
            elif link.state != DOWN and now >= link.limit():
                self.broke(link, "timeout", f"the {link.waits_for()} took longer than "
                           f"{self.connect_ns // 1_000_000} ms", now)
        return 0

    cpdef int excuse(self, int64_t since, int64_t now) except -1:
        """Nobody looked for long, until `since`: who has answered since then has its time anew.

        Or a connection that takes several answers to be READY would never be, with calls that are
        few and short.
        """
        cdef Link link
        cdef int i
        for i in range(self.slots):
            link = link_at(self, i)
            if link is not None and link.state == GREETING and link.quiet_ns >= since:
                link.dial_limit_ns = now + self.connect_ns
        return 0

    cpdef uint64_t due(self, int64_t now) except? 0xFFFFFFFFFFFFFFFF:
        """Bits of the slots to be dialled now."""
        cdef Link link
        cdef uint64_t bits = 0
        cdef int i
        for i in range(self.slots):
            link = link_at(self, i)
            if link is None:
                continue
            if link.state == DOWN and now >= link.retry_ns or link.moves():
                bits |= <uint64_t> 1 << i
        return bits

    cdef object place_to_dial(self, Link link, int64_t now):
        """Begin a dial, or go on with one: where to connect to, as (family, sockaddr).

        None: that is being asked, or there is no place.
        """
        cdef object place
        if link.state == DOWN:
            link.dialing(now, now + self.connect_ns)
        if link.asks():
            link.asked(self.ask(link.options), now)
        place = link.next_place(now)
        if place is None and link.state == DOWN:
            self.after_break(link)
        return place

    cpdef bint rival_won(self, int i) noexcept:
        """Has a second connection to this master answered first? Then it is to be promoted."""
        cdef Link link = <Link> self.links[i]
        cdef Link rival = <Link> self.rivals[i]
        return (
            rival is not None and rival.state == READY and (link.suspect or link.state != READY)
        )

    cpdef bint rival_lost(self, int i) noexcept:
        """Is a second connection to this master of no use any more? Then it is to be dropped."""
        cdef Link link = <Link> self.links[i]
        return (
            self.rivals[i] is not None and (link.state != READY or not link.suspect)
            and not self.rival_won(i)
        )

    cpdef int drop_rival(self, int i) except -1:
        """No second connection any more."""
        self.rivals[i] = None
        return self._place()

    cpdef int promote(self, int i, int64_t now) except -1:
        """The second connection answered first: it carries on."""
        cdef Link old = <Link> self.links[i]
        cdef Link new = <Link> self.rivals[i]
        if old.state != DOWN:
            old.broke("suspect", "silent; another connection to it answered first", now)
        self.links[i] = new
        self.drop_rival(i)
        return new.succeed(old, now)

    cdef int _kin(self, Link link, int64_t now) except -1:
        """A link has become ready: is it a server that is here already, under another address?"""
        cdef Link other
        for other in self.links:
            if other is link or other.state != READY or not link.run_id:
                continue
            if other.run_id != link.run_id:
                continue
            text = f"is the same server as {other.address}"
            if other.options.db == link.options.db:
                # Never two votes.
                return self.broke(link, "CONFIG", text, now)
            if not link.akin:
                link.akin = other.akin = True
                self.news.append((link.options.address, "akin", text + ", another db of it"))
        return 0

    cpdef int64_t next_ns(self) noexcept:
        """When something falls due by time alone."""
        cdef Link link
        cdef int64_t at = NEVER
        cdef int i
        for i in range(self.slots):
            link = link_at(self, i)
            if link is None:
                continue
            if link.state == READY:
                if link.retry_ns > self.now_ns and (link.indebted or self.hoping):
                    at = min(at, link.retry_ns)
            elif link.moves():
                return self.now_ns
            elif link.state == DOWN:
                if link.indebted or self.hoping:
                    at = min(at, link.retry_ns)
            else:
                at = min(at, link.limit())
        return at

    cpdef int broke(self, Link link, str outcome, str cause, int64_t now) except -1:
        """A connection failed, and whoever hoped for it has to know."""
        link.broke(outcome, cause, now)
        return self.after_break(link)

    cdef int after_break(self, Link link) except -1:
        cdef Op op
        if self.links[link.index] is not link:
            return 0        # a rival: the master's own connection is still there
        if link.between:
            return 0        # it has other addresses
        for op in list(self.hoping):
            if op.hoping >> link.index & 1:
                self._give_up(op, link)
        return 0

    cdef int after_fork(self) except -1:
        cdef Link link
        self.forks += 1
        self.hoping = {}
        self.rivals = [None] * self.n
        self._place()
        self.news.clear()
        self.replies._renew()
        for link in self.links:
            link.after_fork()
        return 0

    # -- for who drives by hand: the event loop, and tests -----------------------------------------

    def dialing(self, int slot, int64_t now):
        """A connection for this slot is being opened."""
        cdef Link link = link_at(self, slot)
        self.now_ns = now
        link.dialing(now, now + self.connect_ns)

    def asks(self, int slot):
        """Is somebody to be asked for the way, or for credentials, before this dial goes on?"""
        return bool(link_at(self, slot).asks())

    def asked(self, int slot, answer, int64_t now):
        """Somebody was asked, and will fill in this answer."""
        link_at(self, slot).asked(answer, now)

    def next_place(self, int slot, int64_t now):
        """Where to connect to: (family, sockaddr); None as long as nobody knows."""
        return link_at(self, slot).next_place(now)

    def connected(self, int slot, int64_t now):
        """The connection is open; the greeting is there to `take`."""
        self.now_ns = now
        link_at(self, slot).connected(now)

    def receive(self, int slot, bytes data not None, int64_t now):
        """Bytes came on this slot's connection, cut anywhere."""
        cdef Link link = link_at(self, slot)
        self.now_ns = now
        if link.seal is not None:
            link.unseal(data, now)
        self.replies.begin()
        if link.seal is None:
            link.feed(data, len(data), now)
        elif link.seal.plain.n:
            link.feed(link.seal.plain.p, link.seal.plain.n, now)
            link.seal.plain.n = 0
        self.replies.parse()
        if link.lines:
            link.book_lines(now)
        link.seal_broke(now)
        if link.state == DOWN:
            self.after_break(link)
        self.serve(now)

    def lost(self, int slot, str outcome, str cause, int64_t now):
        """This slot's connection failed."""
        self.broke(link_at(self, slot), outcome, cause, now)
        self.serve(now)

    def take(self, int slot):
        """Take away the bytes to be sent on this slot's connection."""
        cdef Link link = link_at(self, slot)
        cdef bytes data
        if link.seal is not None:
            link.encrypt(self.now_ns)
        data = wire_out(link).p[:wire_out(link).n] if wire_out(link).n else b""
        wire_out(link).n = 0
        return data

    # -- what plan and the facades use ---------------------------------------------------------

    def clean_up(self, Op op, items=None):
        """Have a try's keys deleted, wherever its SETs went; nobody waits for that.

        Args:
            op: an ACQUIRE round, or an EXTEND that found its lock lost.
            items: which items, as a list of indexes; None for all.
        """
        if op.start_ns and op.forks != self.forks:
            return      # the parent's, and it may well get its locks
        cdef uint32_t asked = op.asked
        cdef list keys, tokens
        cdef Link link
        cdef Op debt
        cdef int i
        self._forget(op)
        if op.kind == ACQUIRE:
            asked = op.reached(min(items) if items else 0)
        if not op.k or not asked or items is not None and not items:
            return
        if op.k == 1:
            debt = single_op(RELEASE, self.n, op.key, op.token, -1, asked)
        else:
            keys, tokens = op.keys, op.tokens
            if items is not None:
                keys = [keys[j] for j in items]
                tokens = [tokens[j] for j in items]
            debt = new_op(RELEASE, self.n, keys, tokens, -1, asked)
        debt.ended = True
        debt.start_ns = self.now_ns
        debt.lapse_ns = self.now_ns + max(op.ttl_ms, op.lasts_ms) * 1_000_000 + LAPSE_MARGIN_NS
        for i in range(self.n):
            if asked >> i & 1:
                link = <Link> self.at[i]
                link.owe(debt, 0, debt.k)
                if link.state == READY:
                    link.pay(self.now_ns)

    cpdef int count(self, int what) except -1:
        """Count one event of `COUNTERS`."""
        self.counts[what] += 1
        return 0

    @property
    def indebted(self):
        """Is there a deletion that was not answered, or bytes that wait for a socket?"""
        return self.owes()

    cdef bint owes(self) noexcept:
        cdef Link link
        cdef int i
        for i in range(self.n):
            link = <Link> self.at[i]
            if link.stuck or link.unpaid or link.indebted:
                return True
        return False

    @property
    def connecting(self):
        """Is a connection under way?"""
        cdef Link link
        for link in self.links:
            if link.state == DIALING or link.state == GREETING or link.between:
                return True
        return False

    @property
    def answers(self):
        """Replies ever booked: as they grow, what is owed is being paid."""
        cdef int64_t total = 0
        cdef int i
        for i in range(self.n):
            if not (<Link> self.at[i]).hopeless():
                total += (<Link> self.at[i]).answers
        return total

    @property
    def unsettled(self):
        """Would closing now lose clean-ups that a master could still take or answer?"""
        cdef Link link
        for link in self.links:
            if link.state == READY and link.promised != link.booked:
                return True
            if link.hopeless():
                continue
            if link.indebted or link.unsent or link.out.n:
                return True
        return False

    def stats(self):
        """See `Redlock.stats`."""
        result = {}
        for i, name in enumerate(COUNTERS):
            result[name] = self.counts[i]
        result["masters"] = [link.stats() for link in self.links]
        return result
