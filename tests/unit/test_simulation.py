"""Many callers on one fleet, with faults at random: what must hold whatever happens.

Each run is a seed: callers acquire, extend, release, are interrupted; connections break, masters
stop, lose replies, refuse, load, forget their scripts. Nobody may hold what another holds, no
master may vote twice, and when all is well again no key of ours may be left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from unit.world import DOWN, MS, READY, World, acquire

from redlock_fast import plan
from redlock_fast._core.op import Op
from redlock_fast.errors import NoQuorum

KEYS = [b"a", b"b", b"c"]
TTL_MS = 600_000  # so long that no key vanishes by itself within a run


class Caller:
    """A thread, or a task: one plan, and what it waits for."""

    def __init__(self, steps: Any, done: Callable[[Any], None]) -> None:
        self.steps = steps
        self.done = done
        self.op: Op | None = None
        self.wake_ns = 0


class Crew(World):
    """Many callers on one fleet."""

    def __init__(self, random: Random, n: int) -> None:
        self.random = random
        self.callers: list[Caller] = []
        self.held: list[Any] = []
        super().__init__(
            n,
            retries=2,
            retry_delay_ms=20,
            patience_ms=50,
            connect_ms=200,
            jitter=iter(random.random, None),
            ready=random.random() < 0.7,
        )

    # -- callers

    def enter(self, steps: Any, done: Callable[[Any], None]) -> None:
        caller = Caller(steps, done)
        self.callers.append(caller)
        self.resume(caller, first=True)

    def resume(self, caller: Caller, first: bool = False) -> None:
        caller.op = None
        try:
            step = next(caller.steps) if first else caller.steps.send(self.now)
            while step is None:
                step = caller.steps.send(self.now)
        except StopIteration as stop:
            self.callers.remove(caller)
            caller.done(stop.value)
        except NoQuorum:
            self.callers.remove(caller)
        else:
            if isinstance(step, Op):
                caller.op = step
                self.begin(step)
            else:
                caller.wake_ns = self.now + step

    def interrupt(self, caller: Caller) -> None:
        """As a driver does: nobody waits any more, and the plan cleans up."""
        self.callers.remove(caller)
        if caller.op is not None:
            self.fleet.finish(caller.op)
        caller.steps.close()

    def work(self, ns: int) -> None:
        """Let time pass, with everything that falls due."""
        until = self.now + ns
        while True:
            self.flush()
            self.look()
            times = [until, self._next()]
            times += [c.op.limit_ns if c.op else c.wake_ns for c in self.callers]
            self.now = max(self.now, min(times))
            if self._happen():
                continue
            self._timers()
            if self.now >= until and not self.look():
                return

    def look(self) -> bool:
        """Whoever has something to do does it."""
        busy = False
        for caller in list(self.callers):
            op = caller.op
            if op is None:
                if self.now >= caller.wake_ns:
                    busy = True
                    self.resume(caller)
                continue
            if op.k > 1 and not op.ended:
                self.fleet.refill(op, self.now)
            if not op.ended and self.now >= op.limit_ns:
                self.fleet.expire(op, self.now)
            for item in range(op.k):
                assert sum(op.votes(item)) <= self.n
            if op.ended:
                busy = True
                self.fleet.finish(op)
                self.resume(caller)
        return busy

    # -- what they do

    def granted(self, holds: Sequence[Any]) -> None:
        new = [hold for hold in holds if hold is not None]
        keys = [hold.key for hold in self.held + new]
        assert len(set(keys)) == len(keys), "held twice"
        self.held += new

    def begin_something(self) -> None:
        random, fleet = self.random, self.fleet
        what = random.randrange(10)
        if what < 4:
            wait = random.choice([0, None, 30 * MS])
            single = acquire(fleet, self.settings, random.choice(KEYS), TTL_MS, wait)
            self.enter(single, lambda result: self.granted(result[:1]))
        elif what < 6:
            keys = random.sample(KEYS, 2) + [
                b"%d" % j for j in range(random.choice([0, 0, 5, 300]))
            ]
            self.enter(plan.acquire_many(fleet, self.settings, keys, TTL_MS, 0), self.granted)
        elif what < 7 and self.held:
            self.enter(
                plan.extend(fleet, self.settings, [random.choice(self.held)], TTL_MS),
                lambda _: None,
            )
        elif what < 8 and self.held:
            holds, self.held = self.held, []
            self.enter(plan.release_many(fleet, holds), lambda _: None)
        elif self.held:
            hold = random.choice(self.held)
            self.held.remove(hold)
            self.enter(plan.release(fleet, hold), lambda _: None)

    def strike(self) -> None:
        """A fault, or the end of one."""
        random = self.random
        i = random.randrange(self.n)
        master = self.masters[i]
        what = random.randrange(9)
        if what == 0 and self.fleet.links[i].state != DOWN:
            self.cut(i)
        elif what == 1:
            master.stopped = not master.stopped
        elif what == 2:
            master.mute = not master.mute
        elif what == 3:
            master.up = not master.up
        elif what == 4:
            master.delay_ns = random.choice([0, 0, MS, 20 * MS, 60 * MS])
        elif what == 5:
            master.connect_ns = random.choice([0, 0, 10 * MS, 300 * MS])
        elif what == 6:
            master.known.clear()
        elif what == 7:
            said = random.choice(
                [b"-OOM x\r\n", b"-LOADING x\r\n", b"-READONLY x\r\n", b"+PONG\r\n"]
            )
            master.answers = {"SET": said}
        else:
            master.answers = random.choice([{}, {}, {"script": self.busy}])

    def busy(self, _: list[bytes]) -> bytes | None:
        return b"-BUSY x\r\n" if self.random.random() < 0.3 else None

    def heal(self) -> None:
        for master in self.masters:
            master.stopped = master.mute = False
            master.up = True
            master.delay_ns = master.connect_ns = 0
            master.answers = {}


# The seeds from 25 on run in `make test-all`.
SEEDS = [*range(25), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 200))]


@pytest.mark.case("C70")
@pytest.mark.case("C100")
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens(seed: int) -> None:
    random = Random(seed)
    crew = Crew(random, random.choice([1, 2, 3, 3, 5]))
    for _ in range(80):
        dice = random.random()
        if dice < 0.5:
            crew.begin_something()
        elif dice < 0.75:
            crew.strike()
        elif dice < 0.8 and crew.callers:
            crew.interrupt(random.choice(crew.callers))
        crew.work(random.choice([0, 0, MS, 5 * MS, 60 * MS]))
    crew.heal()
    while crew.callers:
        crew.work(100 * MS)
    crew.settle(2000)
    for hold in crew.held:  # no key ever vanished, so nothing can be lost
        assert (hold.state, hold.reason) == (plan.HELD, "")
        assert crew.release(hold) is True
    crew.settle(2000)
    assert crew.clean()
    for link in crew.fleet.links:
        assert (link.state, link.owed, link.stats()["debts"]) == (READY, 0, 0)
    for master in crew.masters:
        tokens = [words[2] for words in master.seen if words[0] == b"SET"]
        assert len(set(tokens)) == len(tokens)  # a SET is never sent twice
