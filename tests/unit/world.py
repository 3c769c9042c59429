"""A world made of dicts: masters, connections and a clock, to drive a fleet and plans by hand.

No sockets, no sleeps. Time is an int of nanoseconds that moves only when there is something to
wait for, so every rule about time is exact. `World` does what a driver and its pump do, one event
at a time; what it may not do is decide anything about locks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

from hypothesis import settings as hypothesis_settings

from redlock_fast import plan, scripts
from redlock_fast._core.fleet import Fleet
from redlock_fast._core.op import Op
from redlock_fast.options import parse_masters

MS = 1_000_000
T0 = 1_000_000 * MS  # when every clock here starts

ACQUIRE, EXTEND, RELEASE, OWNED, LOCKED = range(1, 6)
UNDECIDED, YES, NO, NO_QUORUM = range(4)
DOWN, DIALING, GREETING, READY = range(4)

# Hypothesis without surprises: the same examples every time, no clock.
QUICK = hypothesis_settings(derandomize=True, deadline=None, database=None, max_examples=50)

OK = b"+OK\r\n"
NIL = b"$-1\r\n"
OURS = b":1\r\n"
FOREIGN = b":0\r\n"
MISSING = b":-1\r\n"


# -- the wire, written a second time --------------------------------------------------------------


def resp(*words: bytes | str | int) -> bytes:
    """One command, as RESP."""
    out = b"*%d\r\n" % len(words)
    for word in words:
        if not isinstance(word, bytes):
            word = str(word).encode()
        out += b"$%d\r\n%s\r\n" % (len(word), word)
    return out


def parse(data: bytes) -> tuple[list[list[bytes]], bytes]:
    """The whole commands in `data`, and what is left of it."""
    found: list[list[bytes]] = []
    at = 0
    while at < len(data):
        start = at
        words: list[bytes] = []
        try:
            at = data.index(b"\r\n", at)
            left = int(data[start + 1 : at])
            at += 2
            while left:
                left -= 1
                end = data.index(b"\r\n", at)
                size = int(data[at + 1 : end])
                if len(data) < end + size + 4:
                    return found, data[start:]
                assert data[at : at + 1] == b"$"
                assert data[end + size + 2 : end + size + 4] == b"\r\n"
                words.append(data[end + 2 : end + 2 + size])
                at = end + size + 4
        except ValueError:
            return found, data[start:]
        assert data[start : start + 1] == b"*"
        found.append(words)
    return found, b""


def commands(data: bytes) -> list[list[bytes]]:
    """The commands in `data`, which must be whole."""
    found, rest = parse(data)
    assert rest == b""
    return found


def verbs(data: bytes) -> list[str]:
    """The verbs of the commands in `data`; scripts by what they do, in full or by their hash."""
    return [name.rstrip("!") for name in forms(data)]


def forms(data: bytes) -> list[str]:
    """As `verbs`, with a `!` where a script's text was sent."""
    names = []
    for words in commands(data):
        verb = words[0].decode()
        if verb == "EVALSHA":
            verb = BY_SHA[words[1]]
        elif verb == "EVAL":
            verb = BY_TEXT[words[1]] + "!"
        names.append(verb)
    return names


BY_SHA = {scripts.RELEASE.sha: "release", scripts.EXTEND.sha: "extend", scripts.LOOK.sha: "look"}
BY_TEXT = {
    scripts.RELEASE.text: "release",
    scripts.EXTEND.text: "extend",
    scripts.LOOK.text: "look",
}


# -- a fleet without masters ----------------------------------------------------------------------


def make_fleet(
    n: int = 1,
    *,
    patience_ms: int = 50,
    connect_ms: int = 1000,
    jitter: Callable[[], float] = lambda: 0.0,
    masters: Iterable[Any] | None = None,
) -> Fleet:
    """A fleet of which nobody has a connection."""
    if masters is None:
        masters = [f"redis://127.0.0.1:{7001 + i}" for i in range(n)]
    return Fleet(parse_masters(list(masters)), patience_ms * MS, connect_ms * MS, jitter)


INFO = resp("INFO", "server")
NO_INFO = b"-NOPERM this user has no permissions to run the 'info' command\r\n"


def connect(fleet: Fleet, i: int = 0, now: int = T0) -> None:
    """Open a connection up to READY (masters without password)."""
    fleet.dialing(i, now)
    fleet.connected(i, now)
    assert fleet.take(i).endswith(resp("CLIENT", "ID"))
    fleet.receive(i, b":%d\r\n" % (1000 + i), now)
    assert fleet.take(i) == INFO
    fleet.receive(i, NO_INFO, now)
    assert fleet.links[i].state == READY


def ready_fleet(n: int = 1, **keywords: Any) -> Fleet:
    """A fleet whose masters have been READY for a second at T0, and owe nothing."""
    fleet = make_fleet(n, **keywords)
    for i in range(fleet.n):
        connect(fleet, i, T0 - 1000 * MS)
    return fleet


def set_op(n: int, key: bytes = b"k", token: bytes = b"t", ttl_ms: int = 1000) -> Op:
    """A try for one lock."""
    return Op(ACQUIRE, n, [key], [token], ttl_ms)


def many(kind: int, n: int, k: int, ttl_ms: int = -1) -> Op:
    """A round over `k` items."""
    return Op(kind, n, [b"k%d" % j for j in range(k)], [b"t%d" % j for j in range(k)], ttl_ms)


# -- masters --------------------------------------------------------------------------------------


class Master:
    """One master: a callable that is given a command and the time, and returns its reply.

    Attributes:
        keys: what it holds: key -> (value, when that expires in ns).
        known: hashes of the scripts it knows.
        seen: every command it has executed.
        up: accepts connections.
        stopped: reads nothing (SIGSTOP); goes on where it was afterwards.
        mute: executes, but its replies do not come before it is no longer mute.
        delay_ns: how long a reply takes.
        connect_ns: how long a connect takes.
        answers: verb (or "script") -> what it says instead of executing: bytes, or a callable.
    """

    def __init__(self) -> None:
        self.keys: dict[bytes, tuple[bytes, int]] = {}
        self.known = set(BY_SHA)
        self.seen: list[list[bytes]] = []
        self.up = True
        self.stopped = False
        self.mute = False
        self.delay_ns = 0
        self.connect_ns = 0
        self.answers: dict[str, bytes | Callable[[list[bytes]], bytes | None]] = {}

    def get(self, key: bytes, now: int) -> bytes | None:
        """The value of a key, unless it has expired."""
        value, expires = self.keys.get(key, (b"", 0))
        if now < expires:
            return value
        self.keys.pop(key, None)
        return None

    def pttl(self, key: bytes, now: int) -> int:
        """How long a key lasts, in ns."""
        return self.keys[key][1] - now if self.get(key, now) is not None else -1

    def __call__(self, words: list[bytes], now: int) -> bytes:
        self.seen.append(words)
        verb = words[0].decode()
        said = self.answers.get("script" if verb.startswith("EVAL") else verb)
        if callable(said):
            said = said(words)
        if said is not None:
            return said
        if verb == "SET":
            _, key, token, nx, px, ttl = words
            assert (nx, px) == (b"NX", b"PX")
            if self.get(key, now) is not None:
                return NIL
            self.keys[key] = (token, now + int(ttl) * MS)
            return OK
        if verb == "EVAL":
            self.known.update(sha for sha, name in BY_SHA.items() if BY_TEXT[words[1]] == name)
            return self.run(BY_TEXT[words[1]], words[3:], now)
        if verb == "EVALSHA":
            if words[1] not in self.known:
                return b"-NOSCRIPT No matching script. Please use EVAL.\r\n"
            return self.run(BY_SHA[words[1]], words[3:], now)
        if verb == "CLIENT":
            return b":77\r\n" if words[1] == b"ID" else OK
        if verb == "INFO":
            return NO_INFO
        assert verb in ("AUTH", "SELECT")
        return OK

    def run(self, name: str, words: list[bytes], now: int) -> bytes:
        """A script: what `scripts` says that it does."""
        key, token = words[:2]
        held = self.get(key, now)
        if held is None:
            return MISSING
        if held != token:
            return FOREIGN
        if name == "release":
            del self.keys[key]
        elif name == "extend":
            self.keys[key] = (token, now + int(words[2]) * MS)
        return OURS

    def count(self, verb: str) -> int:
        """How many commands of this verb it was sent; "script" is EVAL and EVALSHA."""
        verbs = ("EVAL", "EVALSHA") if verb == "script" else (verb,)
        return sum(words[0].decode() in verbs for words in self.seen)


def acquire(
    fleet: Fleet, settings: plan.Settings, key: bytes, ttl_ms: int, wait_ns: int | None
) -> plan.Plan[tuple[Any, Op]]:
    """All of acquiring one lock as a plan: the first try, which drivers run without one, too."""
    op = plan.attempt(fleet, settings, key, ttl_ms)
    try:
        now = yield op
    except BaseException:
        fleet.clean_up(op)
        raise
    hold = plan.granted(fleet, settings, op, now)
    if hold is not None:
        return hold, op
    return (yield from plan.again(fleet, settings, op, now, wait_ns))


class World:
    """Masters, a fleet, and a driver that runs plans.

    Args:
        masters: how many, or those of another world (a rival's client).
        jitter: what every draw gives, or an iterator of draws.
        now: when it starts, in ns.
        ready: connect before anything happens.
    """

    def __init__(
        self,
        masters: int | list[Master] = 3,
        *,
        patience_ms: int = 50,
        connect_ms: int = 1000,
        retries: int = 0,
        retry_delay_ms: int = 0,
        drift_factor: float = 0.01,
        jitter: float | Iterator[float] = 0.5,
        now: int = T0,
        ready: bool = True,
    ) -> None:
        self.masters = [Master() for _ in range(masters)] if isinstance(masters, int) else masters
        self.n = len(self.masters)
        self.now = now
        self.jitter = jitter
        self.fleet = make_fleet(
            self.n, patience_ms=patience_ms, connect_ms=connect_ms, jitter=self._draw_jitter
        )
        self.settings = plan.Settings(
            retries, retry_delay_ms * MS, drift_factor, self._draw, self._draw_jitter, plan.Hold
        )
        self.tokens: list[bytes] = []
        self.ops: list[Op] = []
        self.pauses: list[int] = []
        self._events: list[tuple[int, int, int, int, Callable[[], None]]] = []
        self._order = count()
        self._life = [0] * self.n  # which connection an event belongs to
        self._inbox = [b""] * self.n
        self._held: list[list[bytes]] = [[] for _ in range(self.n)]
        self._said = [0] * self.n  # when the last reply of each arrives; they keep their order
        if ready:
            self.settle(0)

    # -- what plans are given

    _serial = count(1)

    def _draw(self, number: int) -> list[bytes]:
        fresh = [b"%040x" % next(World._serial) for _ in range(number)]
        self.tokens += fresh
        return fresh

    def _draw_jitter(self) -> float:
        return self.jitter if isinstance(self.jitter, float) else next(self.jitter)

    # -- the plans, ready to run

    def acquire(self, key: bytes = b"k", ttl_ms: int = 1000, wait_ns: int | None = 0) -> Any:
        """Acquire one lock; the lock or None."""
        return self.run(acquire(self.fleet, self.settings, key, ttl_ms, wait_ns))[0]

    def acquire_many(self, keys: list[bytes], ttl_ms: int = 1000, wait_ns: int | None = 0) -> Any:
        """Run `plan.acquire_many`."""
        return self.run(plan.acquire_many(self.fleet, self.settings, keys, ttl_ms, wait_ns))

    def extend(self, hold: Any, ttl_ms: int = 1000) -> bool | None:
        """Run `plan.extend` for one lock."""
        results, _ = self.run(plan.extend(self.fleet, self.settings, [hold], ttl_ms))
        (result,) = results
        return result  # type: ignore[no-any-return]

    def release(self, hold: Any) -> bool | None:
        """Run `plan.release` for one lock."""
        result: bool | None
        result, _ = self.run(plan.release(self.fleet, hold))
        return result

    # -- driving

    def run(self, steps: Any) -> Any:
        """Run a plan to its end."""
        try:
            step = next(steps)
            while True:
                if isinstance(step, Op):
                    self.run_op(step)
                elif step is not None:
                    self.pauses.append(step)
                    self.sleep(step)
                step = steps.send(self.now)
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()
            self.flush()

    def run_op(self, op: Op) -> None:
        """Run one round to its end, as `Pump.run` does."""
        self.begin(op)
        while not op.ended:
            self.step(op)
        self.fleet.finish(op)

    def begin(self, op: Op) -> None:
        """Start a round, without sending anything yet."""
        self.ops.append(op)
        self.fleet.judge(self.now)
        self._dial()
        self.fleet.start(op, self.now)

    def step(self, op: Op) -> None:
        """Send, then let the next thing happen that this round waits for."""
        self.flush()
        if op.ended:
            return
        self.now = max(self.now, min(self._next(), op.limit_ns))
        if not self._happen():
            if self.now >= op.limit_ns:
                self.fleet.expire(op, self.now)
                return
            self._timers()
        if op.k > 1:
            self.fleet.refill(op, self.now)

    def sleep(self, ns: int) -> None:
        """Let time pass, with everything that happens meanwhile."""
        until = self.now + ns
        for _ in range(100_000):
            self.flush()
            at = self._next()
            if at > until:
                self.now = until
                return
            self.now = max(self.now, at)
            if not self._happen():
                self._timers()
        raise AssertionError("the world does not come to rest")

    def settle(self, ms: int = 100) -> None:
        """As a janitor would: dial who is due, and let time pass."""
        self.fleet.judge(self.now)
        self._dial()
        self.sleep(ms * MS)

    def flush(self) -> None:
        """Send what the links have to say; masters read it at once, unless they are stopped."""
        for i, master in enumerate(self.masters):
            link = self.fleet.links[i]
            self._bury(i)
            if link.state in (GREETING, READY):
                self._inbox[i] += self.fleet.take(i)
            if not master.stopped and self._inbox[i]:
                found, self._inbox[i] = parse(self._inbox[i])
                for words in found:
                    self._held[i].append(master(words, self.now))
            if self._held[i] and not master.mute:
                self._say(i, b"".join(self._held[i]), master.delay_ns)
                self._held[i] = []

    def cut(self, i: int, word: str = "closed", cause: str = "connection reset by peer") -> None:
        """The connection to this master breaks; what was under way is lost."""
        self.flush()
        self.fleet.lost(i, word, cause, self.now)
        self._bury(i)

    # -- what tests look at

    def values(self, key: bytes = b"k") -> list[bytes | None]:
        """Each master's value of a key."""
        return [master.get(key, self.now) for master in self.masters]

    def clean(self, *keys: bytes) -> bool:
        """Does no master hold a token that was drawn here?"""
        ours = set(self.tokens)
        return not any(
            value in ours and self.now < expires
            for master in self.masters
            for value, expires in master.keys.values()
        )

    def plant(self, i: int, key: bytes = b"k", value: bytes = b"rival", ms: int = 60_000) -> None:
        """A key of somebody else."""
        self.masters[i].keys[key] = (value, self.now + ms * MS)

    # -- inside

    def _say(self, i: int, data: bytes, delay_ns: int) -> None:
        self._said[i] = max(self._said[i], self.now + delay_ns)
        self._later(i, self._said[i] - self.now, lambda: self.fleet.receive(i, data, self.now))

    def _later(self, i: int, delay_ns: int, what: Callable[[], None]) -> None:
        at = self.now + delay_ns
        heapq.heappush(self._events, (at, next(self._order), i, self._life[i], what))

    def _next(self) -> int:
        at = self._events[0][0] if self._events else 1 << 63
        return min(at, self.fleet.next_ns())

    def _happen(self) -> bool:
        """Let the first event that is due happen; False when there is none."""
        while self._events and self._events[0][0] <= self.now:
            _, _, i, life, what = heapq.heappop(self._events)
            self._bury(i)
            if life == self._life[i]:
                what()
                return True
        return False

    def _timers(self) -> None:
        self.fleet.judge(self.now)
        self._dial()
        self.fleet.serve(self.now)

    def _dial(self) -> None:
        due = self.fleet.due(self.now)
        for i in range(len(self.masters)):
            # Second connections are tried, and nobody ever answers there.
            if due >> len(self.masters) + i & 1:
                self.fleet.dialing(len(self.masters) + i, self.now)
            elif self.fleet.rival_lost(i):
                self.fleet.drop_rival(i)
        for i, master in enumerate(self.masters):
            if not due >> i & 1:
                continue
            self._bury(i)
            self.fleet.dialing(i, self.now)
            if not master.connect_ns:
                self._opened(i)
            else:
                self._later(i, master.connect_ns, lambda i=i: self._opened(i))  # type: ignore[misc]

    def _opened(self, i: int) -> None:
        if self.masters[i].up:
            self.fleet.connected(i, self.now)
        else:
            self.fleet.lost(i, "refused", "connection refused", self.now)

    def _bury(self, i: int) -> None:
        """A link that is DOWN has no connection any more, nor anything on its way."""
        if self.fleet.links[i].state == DOWN:
            self._life[i] += 1
            self._said[i] = 0
            self._inbox[i] = b""
            self._held[i] = []
