"""`close` from another thread, at any moment of any verb: all callers end, and nothing is left."""

from __future__ import annotations

import _socket
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from integration.fakes import SILENCE, MakeFake
from integration.helpers import (
    HOUR,
    SLACK_MS,
    Stopwatch,
    descriptors,
    eventually,
    in_time,
    occupy,
    taught,
)

from redlock_fast import ClosedError, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

# `master_timeout` of the clients here.
LIMIT = 100
# Once closed, a call that waits ends within a look for signals; what masters owe is waited for.
ENDS_WITHIN_S = (LIMIT + 100 + 2 * SLACK_MS) / 1000


class Callers:
    """Threads that call verbs of one client until it is closed, and know what they were granted.

    Attributes:
        granted: tokens of the locks that came back to a caller.
        odd: what was raised other than ClosedError and NoQuorum.
        calls: how many calls came back.
    """

    def __init__(self, client: Redlock, draw: random.Random, count: int) -> None:
        self.client = client
        self.granted: set[bytes] = set()
        self.odd: list[BaseException] = []
        self.calls = 0
        verbs: list[Callable[[str, random.Random], None]] = [
            self._single,
            self._extend,
            self._ask,
            self._many,
            self._wait,
            self._with,
            self._hand_over,
            self._connect,
        ]
        self.threads = [
            threading.Thread(
                target=self._work,
                args=(verbs[i % len(verbs)], f"{i}", random.Random(draw.random())),
            )
            for i in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def _work(
        self, verb: Callable[[str, random.Random], None], name: str, draw: random.Random
    ) -> None:
        turn = 0
        try:
            while True:
                turn += 1
                try:
                    verb(f"{name}:{turn}", draw)
                except NoQuorum:
                    time.sleep(0.001)
                self.calls += 1
        except ClosedError:
            pass
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.odd.append(error)

    def _note(self, lock: Any) -> Any:
        if lock:
            self.granted.add(lock.token.encode())
        return lock

    def _single(self, name: str, draw: random.Random) -> None:
        lock = self._note(self.client.acquire(name, HOUR))
        if lock:
            lock.release()

    def _extend(self, name: str, draw: random.Random) -> None:
        lock = self._note(self.client.acquire(name, HOUR))
        if lock:
            lock.extend(HOUR)
            lock.release()

    def _ask(self, name: str, draw: random.Random) -> None:
        lock = self._note(self.client.acquire(name, HOUR))
        self.client.locked("held by a rival")
        if lock:
            self.client.owned(lock)
            lock.release()

    def _many(self, name: str, draw: random.Random) -> None:
        count = draw.choice([2, 40, 600])
        locks = self.client.acquire_many([f"{name}:{i}" for i in range(count)], HOUR)
        held = [self._note(lock) for lock in locks if lock]
        if draw.random() < 0.3:
            self.client.extend_many(held, HOUR)
        self.client.release_many(held)

    def _wait(self, name: str, draw: random.Random) -> None:
        self._note(self.client.acquire("held by a rival", HOUR, wait=math.inf))

    def _with(self, name: str, draw: random.Random) -> None:
        with self.client.lock(name, HOUR) as lock:
            self._note(lock)

    def _hand_over(self, name: str, draw: random.Random) -> None:
        lock = self._note(self.client.acquire(name, HOUR))
        if lock:
            self.client.adopt(name, lock.token, HOUR)
            self.client.release_token(name, lock.token)

    def _connect(self, name: str, draw: random.Random) -> None:
        self.client.stats()
        self.client.connect()
        repr(self.client)

    def still_there(self) -> list[str]:
        return [thread.name for thread in self.threads if thread.is_alive()]

    def are_gone_within(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(end - time.monotonic(), 0.001))
        assert not self.still_there(), "callers hang"


def _tokens_on(masters: LocalMasters) -> set[bytes | None]:
    found: set[bytes | None] = set()
    for master in masters:
        keys = master.keys()
        found.update(master.command("MGET", *keys) if keys else [])
    return found - {b"rival", None}


def _close_at_any_moment(masters: LocalMasters, draw: random.Random, fault: str) -> None:
    """One life of a client: callers begin, a fault, close; then everything is as before."""
    before = set(descriptors())
    client = Redlock(
        [master.url for master in masters],
        master_timeout=LIMIT,
        retries=draw.choice([0, 2]),
        retry_delay=draw.choice([0, 5]),
    )
    if draw.random() < 0.5:
        client.connect()
    callers = Callers(client, draw, draw.choice([1, 3, 8, 16]))
    struck = draw.sample(range(len(masters)), {"one hangs": 1, "most hang": 2}.get(fault, 0))
    time.sleep(draw.choice([0, draw.uniform(0, 0.003), draw.uniform(0, 0.03)]))
    for i in struck:
        masters.pause(i)
    if fault == "connections break":
        for master in masters:
            master.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    time.sleep(draw.choice([0, draw.uniform(0, 0.003)]))
    try:
        closers = [threading.Thread(target=client.close) for _ in range(draw.choice([0, 0, 2]))]
        with Stopwatch() as watch:
            for closer in closers:
                closer.start()
            client.close()
        callers.are_gone_within(ENDS_WITHIN_S)
        for closer in closers:
            closer.join(10)
            assert not closer.is_alive(), "close hangs"
    finally:
        client.close()
        for i in struck:
            masters.resume(i)
    assert callers.odd == []
    assert watch.ms < 5000 + SLACK_MS if not struck else watch.ms < LIMIT * 3 + 2 * SLACK_MS
    eventually(lambda: set(descriptors()) <= before)
    if not struck:
        # Nobody has what is not a caller's: all other tries were cleaned up before the end.
        eventually(lambda: _tokens_on(masters) <= callers.granted, 1)
    masters.flush_all()


def test_closing_while_a_connection_is_awaited(make_fake: MakeFake) -> None:
    """The last thread to leave takes what it waited on along."""
    before = set(descriptors())
    fakes = [make_fake(lambda command, talk: SILENCE) for _ in range(3)]
    client = Redlock([fake.url for fake in fakes], connect_timeout=60_000)
    ends: list[Any] = []

    def connect() -> None:
        try:
            client.connect()
            ends.append(None)
        except ClosedError as error:
            ends.append(error)

    for _ in range(10):
        caller = threading.Thread(target=connect)
        caller.start()
        eventually(lambda: [fake.open for fake in fakes] == [1] * 3)
        client.close()
        caller.join(in_time(0))
        assert not caller.is_alive()
        eventually(lambda: [fake.open for fake in fakes] == [0] * 3)
        ours = {name for name in descriptors() if "eventfd" in name}
        assert ours <= before
        client = Redlock([fake.url for fake in fakes], connect_timeout=60_000)
    assert [type(end) for end in ends] == [ClosedError] * 10


class _SlowSocket(_socket.socket):
    """Asking for its own address takes a while, during which other threads run."""

    def getsockname(self) -> Any:
        time.sleep(0.1)
        return super().getsockname()


def test_closing_while_a_connection_is_opened(
    masters: LocalMasters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was torn down meanwhile gets no connection any more."""
    client = Redlock(masters.urls, master_timeout=LIMIT)
    monkeypatch.setattr(_socket, "socket", _SlowSocket)
    try:
        before = set(descriptors())
        callers = Callers(client, random.Random(1), 1)
        time.sleep(0.05)
        client.close()
        callers.are_gone_within(ENDS_WITHIN_S)
    finally:
        monkeypatch.undo()
    assert callers.odd == []
    assert set(descriptors()) <= before
    assert client.stats()["acquired"] == 0


@pytest.mark.parametrize("fault", ["none", "connections break", "one hangs", "most hang"])
@pytest.mark.parametrize(
    "times", [pytest.param(15, id="short"), pytest.param(250, id="long", marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("hasty")
def test_closing_at_any_moment(
    make_local_masters: MakeLocalMasters, fault: str, times: int
) -> None:
    masters = taught(make_local_masters(3))
    first = int(os.environ.get("REDLOCK_SEED", "1"))
    for seed in range(first, first + times):
        print(f"REDLOCK_SEED={seed}")  # noqa: T201 - to be seen when it fails
        occupy(masters, "held by a rival")
        _close_at_any_moment(masters, random.Random(f"{fault} {seed}"), fault)


class _Alarm(Exception):
    """What a signal handler raises here."""


def test_closing_that_is_interrupted_closes(masters: LocalMasters) -> None:
    """It does not wait for the clean-ups any more, but leaves no connection behind."""
    before = set(descriptors())
    client = Redlock(masters.urls, master_timeout=3000)
    client.connect()
    assert client.acquire("res", HOUR)
    for i in range(3):
        masters.pause(i)

    def ask() -> None:
        with pytest.raises(ClosedError):
            client.locked("res")

    lost = threading.Thread(target=ask)
    lost.start()
    eventually(lambda: client.stats()["masters"][0]["owed"])

    def raise_alarm(*args: object) -> None:
        raise _Alarm

    handler = signal.signal(signal.SIGALRM, raise_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(_Alarm):
            client.close()
    finally:
        signal.signal(signal.SIGALRM, handler)
    lost.join(10)
    assert not lost.is_alive()
    assert set(descriptors()) <= before
    client.close()
    for i in range(3):
        masters.resume(i)
