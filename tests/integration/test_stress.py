"""Many threads on one client while masters hang, die, come back and forget their scripts.

Plain ones, some behind TLS, and some with a name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from integration.certs import Certs
from integration.helpers import MakeClient, are_clean, eventually
from integration.tls_front import MakeTlsFront

from redlock_fast import ClosedError, Lock, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

THREADS = 8


def _look_up(host: str, port: int, *args: object, **keywords: object) -> list[Any]:
    """For names that nobody knows elsewhere."""
    places = [("127.0.0.9", port), ("127.0.0.1", port)]
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]


class _Alarm(Exception):
    """What the handler of a signal raises, now and then."""


class Crowd:
    """Threads that lock and unlock, and a record outside the masters of who holds what.

    Their client is closed under them, and another one takes its place.
    """

    def __init__(self, make: Callable[[], Redlock]) -> None:
        self._make = make
        self.client = make()
        self.stop = False
        self.good = 0
        self.closed = 0
        self.alarms = 0
        self.overlaps = 0
        self.failures: list[BaseException] = []
        self._held: dict[str, Lock] = {}
        self._guard = threading.Lock()

    def renew(self) -> None:
        """Close the client, whatever goes on, after the next one has taken its place."""
        old, self.client = self.client, self._make()
        old.close()

    def work(self, number: int, seed: int) -> None:
        draw = random.Random(f"{seed} {number}")
        try:
            while not self.stop:
                try:
                    if draw.random() < 0.05:
                        self._batch(number, draw)
                    else:
                        self.single(number, draw)
                except NoQuorum:
                    pass
                except ClosedError:
                    self.closed += 1
        except BaseException as exc:  # noqa: BLE001 - told by the test
            self.failures.append(exc)

    def interrupted(self, draw: random.Random) -> None:
        """In the main thread: one turn, in which a signal's handler may raise."""

        armed = True

        def raise_alarm(*args: object) -> None:
            if armed:
                raise _Alarm

        before = signal.signal(signal.SIGALRM, raise_alarm)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0002, 0.01))
                with contextlib.suppress(NoQuorum):
                    self.single(-1, draw)
            finally:
                armed = False  # it rings once, here at the latest
        except _Alarm:
            self.alarms += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _batch(self, number: int, draw: random.Random) -> None:
        client = self.client
        count = draw.choice([1, 10, 300, 1500])
        locks = client.acquire_many([f"b{number}:{i}" for i in range(count)], 5000)
        client.release_many([lock for lock in locks if lock])

    def single(self, number: int, draw: random.Random) -> None:
        name = f"{draw.randrange(3)}"
        if draw.random() < 0.5:
            name = f"own:{number}:{draw.randrange(10**6)}"
        lock = self.client.acquire(name, 2000, wait=draw.choice([None, None, 0, 50]))
        if lock is None:
            return
        # Main holds no guard: a handler that raises while it takes one would leave it taken. (These
        # steps are atomic by themselves, as long as nobody else is in here with the same name.)
        guard = self._guard if number >= 0 else contextlib.nullcontext()
        with guard:
            before = self._held.get(name)
            if before is not None and before.held and lock.held:
                self.overlaps += 1
            self._held[name] = lock
        if draw.random() < 0.2:
            lock.extend(2000)
        with guard:
            if self._held.get(name) is lock:
                self._held.pop(name, None)
        self.good += bool(lock.release())


def _strike(masters: LocalMasters, crowd: Crowd, draw: random.Random) -> None:
    """One fault, and its end."""
    some = draw.sample(range(len(masters)), draw.choice([1, 1, 3]))
    what = draw.choice(["pause", "pause", "kill", "cut", "forget", "close"])
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
    elif what == "forget":
        masters[some[0]].command("SCRIPT", "FLUSH")
    else:
        crowd.renew()
    for _ in range(draw.randrange(10)):
        crowd.interrupted(draw)


# A signal that comes in a finalizer of other code raises there, and is swallowed.
@pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <function (Weak\w+|Popen|_HiredisParser)\."
    ":pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.case("C70")
@pytest.mark.case("C100")
@pytest.mark.parametrize(
    "seconds", [pytest.param(5, id="short"), pytest.param(60, id="long", marks=pytest.mark.slow)]
)
def test_c100_threads_while_masters_fail(
    seconds: float,
    make_local_masters: MakeLocalMasters,
    make_tls_front: MakeTlsFront,
    make_client: MakeClient,
    certs: Certs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """REDLOCK_STRESS_SECONDS sets how long the long one takes, REDLOCK_SEED what happens.

    Two masters are reached over TLS, one of them and another by a name with two addresses, of which
    the first takes no connections.
    """
    if seconds > 5:
        seconds = float(os.environ.get("REDLOCK_STRESS_SECONDS", seconds))
        # Instead of pytest's own limit.
        faulthandler.dump_traceback_later(seconds + 200, exit=True)
    seed = int(os.environ.get("REDLOCK_SEED", "1"))
    draw = random.Random(seed)
    # With their keys on disk: one that forgets them can grant a lock that is held (case C24).
    # (Rewritten often, or a master takes longer and longer to read its file.)
    args = ["--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-min-size", "1mb"]
    masters = make_local_masters(5, args=args)
    fronts = [make_tls_front(masters[i], identity=certs.names) for i in (1, 2)]
    monkeypatch.setattr(socket, "getaddrinfo", _look_up)
    places = [
        masters[0].url,
        certs.url(fronts[0].port, "redis.example"),
        certs.url(fronts[1].port, ssl_check_hostname="false"),
        f"redis://plain.example:{masters[3].port}",
        masters[4].url,
    ]

    def make() -> Redlock:
        limit = draw.choice([20, 50, 50, 200])
        return make_client(places, warm=False, master_timeout=limit, retries=1, retry_delay=5)

    crowd = Crowd(make)
    threads = [threading.Thread(target=crowd.work, args=(i, seed)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not crowd.failures:
            _strike(masters, crowd, draw)
    finally:
        crowd.stop = True
        for thread in threads:
            thread.join(30)
    print(  # noqa: T201 - shown when it fails, and with -rP
        f"REDLOCK_SEED={seed}: {crowd.good} pairs, {crowd.closed} calls ended by close, "
        f"{crowd.alarms} by a signal, {crowd.overlaps} overlaps"
    )
    assert not any(thread.is_alive() for thread in threads)
    assert crowd.failures == []
    assert crowd.overlaps == 0
    assert crowd.good > 20
    eventually(lambda: are_clean(masters), 10)
