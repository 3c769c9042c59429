"""Many threads on one client while masters hang, die, come back and forget their scripts."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
from integration.helpers import MakeClient, are_clean, eventually

from redlock_fast import Lock, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

THREADS = 8


class Crowd:
    """Threads that lock and unlock, and a record outside the masters of who holds what."""

    def __init__(self, client: Redlock) -> None:
        self.client = client
        self.stop = False
        self.good = 0
        self.overlaps = 0
        self.failures: list[BaseException] = []
        self._held: dict[str, Lock] = {}
        self._guard = threading.Lock()

    def work(self, number: int) -> None:
        draw = random.Random(number)
        try:
            while not self.stop:
                with contextlib.suppress(NoQuorum):
                    if draw.random() < 0.05:
                        self._batch(number, draw)
                    else:
                        self._single(number, draw)
        except BaseException as exc:  # noqa: BLE001 - told by the test
            self.failures.append(exc)

    def _batch(self, number: int, draw: random.Random) -> None:
        count = draw.choice([1, 10, 300, 1500])
        locks = self.client.acquire_many([f"b{number}:{i}" for i in range(count)], 5000)
        self.client.release_many([lock for lock in locks if lock])

    def _single(self, number: int, draw: random.Random) -> None:
        name = f"{draw.randrange(3)}"
        if draw.random() < 0.5:
            name = f"own:{number}:{draw.randrange(10**6)}"
        lock = self.client.acquire(name, 2000)
        if lock is None:
            return
        with self._guard:
            before = self._held.get(name)
            if before is not None and before.held and lock.held:
                self.overlaps += 1
            self._held[name] = lock
        if draw.random() < 0.2:
            lock.extend(2000)
        with self._guard:
            if self._held.get(name) is lock:
                del self._held[name]
        self.good += bool(lock.release())


def _strike(masters: LocalMasters, draw: random.Random) -> None:
    """One fault, and its end."""
    some = draw.sample(range(len(masters)), draw.choice([1, 1, 3]))
    what = draw.choice(["pause", "pause", "kill", "cut", "forget"])
    if what == "pause":
        for i in some:
            masters.pause(i)
        time.sleep(draw.uniform(0.01, 0.4))
        for i in some:
            masters.resume(i)
    elif what == "kill":
        masters.kill(some[0])
        time.sleep(draw.uniform(0.01, 0.3))
        # With its keys: one that forgets them can grant a lock that is held, as Redlock has it.
        masters.restart(some[0], keep_data=True)
    elif what == "cut":
        masters[some[0]].command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    else:
        masters[some[0]].command("SCRIPT", "FLUSH")
    time.sleep(draw.uniform(0, 0.1))


@pytest.mark.case("C70")
@pytest.mark.case("C100")
@pytest.mark.parametrize(
    "seconds", [pytest.param(5, id="short"), pytest.param(60, id="long", marks=pytest.mark.slow)]
)
def test_c100_threads_while_masters_fail(
    seconds: float, make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = make_local_masters(5, args=["--appendonly", "yes", "--appendfsync", "always"])
    client = make_client(masters, master_timeout=50, retries=1, retry_delay=5)
    crowd = Crowd(client)
    threads = [threading.Thread(target=crowd.work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    draw = random.Random(1)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not crowd.failures:
            _strike(masters, draw)
    finally:
        crowd.stop = True
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert crowd.failures == []
    assert crowd.overlaps == 0
    assert crowd.good > 100
    eventually(lambda: are_clean(masters), 10)
