"""One client, many threads: no two holders, no lost wake-ups, one connection per master."""

from __future__ import annotations

import _socket
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from integration.fakes import MakeProxy
from integration.helpers import (
    HOUR,
    NT,
    SLACK_MS,
    MakeClient,
    Stopwatch,
    are_clean,
    clients_of,
    eventually,
    keys_of,
    occupy,
    taught,
    vacate,
)

from redlock_fast import Lock, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

THREADS = 16


class Room:
    """Knows who is inside, without Redis, and notes when somebody was not alone."""

    def __init__(self) -> None:
        self._inside: list[int] = []
        self.visits = 0
        self.overlaps = 0

    def visit(self, lock: Lock) -> None:
        self._inside.append(threading.get_ident())
        alone = self._inside == [threading.get_ident()]
        time.sleep(0.0002)  # lets others in, if they can
        alone = alone and self._inside == [threading.get_ident()]
        # Who is past the validity does not count as a holder.
        if not alone and lock.held:
            self.overlaps += 1
        self._inside.remove(threading.get_ident())
        self.visits += 1


def _in_threads(count: int, work: Callable[[int], Any], seconds: float = 60.0) -> None:
    """Run `work(i)` in `count` threads at once; what one of them raises is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        try:
            barrier.wait(30)
            work(i)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=[i]) for i in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.01))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "threads hang"


def test_distinct_names(make_local_masters: MakeLocalMasters, make_client: MakeClient) -> None:
    masters = taught(make_local_masters(5))
    client = make_client(masters)

    def work(i: int) -> None:
        for turn in range(100):
            lock = client.acquire(f"res:{i}:{turn % 3}", HOUR)
            assert lock
            if turn % 10 == 0:
                assert client.extend(lock)
            assert client.release(lock)

    _in_threads(THREADS, work)
    eventually(lambda: are_clean(masters))
    stats = client.stats()
    assert stats["acquired"] == stats["released"] == THREADS * 100
    assert [clients_of(master) for master in masters] == [1] * 5


@pytest.mark.parametrize("shared_client", [True, False])
def test_one_common_name(
    masters: LocalMasters, make_client: MakeClient, shared_client: bool
) -> None:
    room = Room()
    clients = [make_client(masters, retry_delay=5)]
    if not shared_client:
        clients += [make_client(masters, retry_delay=5) for _ in range(3)]

    def work(i: int) -> None:
        client = clients[i % len(clients)]
        for _ in range(5):
            lock = client.acquire("res", 60_000, wait=30_000)
            assert lock, "starved"
            room.visit(lock)
            assert client.release(lock)

    _in_threads(THREADS, work)
    assert room.visits == THREADS * 5
    assert room.overlaps == 0
    eventually(lambda: are_clean(masters))


def test_many_names_and_refusals(masters: LocalMasters, make_client: MakeClient) -> None:
    """One try each, four names: whoever gets one is alone with it."""
    client = make_client(masters)
    rooms = [Room() for _ in range(4)]
    granted = [0] * THREADS

    def work(i: int) -> None:
        draw = random.Random(i)
        for _ in range(60):
            which = draw.randrange(4)
            lock = client.acquire(f"res:{which}", 60_000)
            if lock:
                granted[i] += 1
                rooms[which].visit(lock)
                assert client.release(lock)

    _in_threads(THREADS, work)
    assert sum(room.overlaps for room in rooms) == 0
    assert sum(room.visits for room in rooms) == sum(granted) > 0
    stats = client.stats()
    assert stats["acquired"] == stats["released"] == sum(granted)
    assert stats["acquired"] + stats["contended"] == THREADS * 60
    eventually(lambda: not client.locked("other") and are_clean(masters))


def test_all_verbs_at_once(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters)

    def work(i: int) -> None:
        for turn in range(10):
            if i % 4 == 0:
                locks = client.acquire_many([f"b:{i}:{turn}:{j}" for j in range(50)], HOUR)
                held = [lock for lock in locks if lock]
                assert len(held) == 50
                assert client.extend_many(held) == [True] * 50
                assert client.release_many(held) == [True] * 50
            elif i % 4 == 1:
                with client.lock(f"c:{i}", HOUR) as lock:
                    assert client.owned(lock)
                    assert client.locked(f"c:{i}")
            else:
                lock = client.acquire(f"d:{i}", HOUR)  # type: ignore[assignment]
                assert lock
                adopted = client.adopt(f"d:{i}", lock.token, HOUR)
                assert adopted
                assert client.release_token(f"d:{i}", lock.token)
            client.stats()

    _in_threads(THREADS, work)
    eventually(lambda: are_clean(masters))


def test_threads_that_share_a_lock(client: Redlock, masters: LocalMasters) -> None:
    """Extends are serialised; of many releases one is True."""
    lock = client.acquire("res", HOUR)
    assert lock
    results: list[bool] = []
    _in_threads(8, lambda i: client.extend(lock, HOUR + i) or pytest.fail("lost"))
    assert lock.held
    _in_threads(8, lambda _: results.append(client.release(lock)))
    assert True in results
    assert not lock
    eventually(lambda: are_clean(masters))


def test_masters_that_come_and_go(make_local_masters: MakeLocalMasters, make_client: Any) -> None:
    masters = taught(make_local_masters(5))
    client = make_client(masters, master_timeout=NT, retries=50, retry_delay=20)
    room = Room()
    stop = threading.Event()

    def trouble() -> None:
        draw = random.Random(5)
        while not stop.wait(0.05):
            i = draw.randrange(5)
            masters.pause(i)
            stop.wait(0.05)
            masters.resume(i)
            for master in masters:
                if draw.random() < 0.3:
                    master.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def work(i: int) -> None:
        for turn in range(20):
            try:
                lock = client.acquire("res" if turn % 2 else f"res:{i}", 30_000, wait=20_000)
                if lock is None:
                    continue
                if turn % 2:
                    room.visit(lock)
                client.release(lock)
            except NoQuorum:
                continue

    troublemaker = threading.Thread(target=trouble)
    troublemaker.start()
    try:
        _in_threads(8, work)
    finally:
        stop.set()
        troublemaker.join()
    assert room.overlaps == 0
    # All is well again: so is the client, and nothing that was given up stays.
    assert client.acquire("after", HOUR, wait=5000)
    client.connect()
    eventually(lambda: client.locked("after") and _only_after(masters), 15)


def _only_after(masters: LocalMasters) -> bool:
    return all(keys in ([], [b"after"]) for keys in keys_of(masters))


class _SlowSocket(_socket.socket):
    """Opening a connection takes a while, during which other threads run."""

    def connect_ex(self, address: Any, /) -> int:
        time.sleep(0.02)
        return super().connect_ex(address)


def test_threads_that_connect_at_once_open_one_connection(
    masters: LocalMasters, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(masters, warm=False)
    monkeypatch.setattr(_socket, "socket", _SlowSocket)
    try:
        _in_threads(4, lambda i: client.acquire(f"res:{i}", HOUR) or pytest.fail("refused"))
    finally:
        monkeypatch.undo()
    assert [clients_of(master) for master in masters] == [1] * 3
    assert all(row["reconnects"] == 0 for row in client.stats()["masters"])


def test_no_wake_up_is_lost_while_connections_open(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    # Who is decided, or has its commands sent, by another thread's look hears of it, and a reader
    # polls a connection again once it was looked at. Without its regular tick, which would heal a
    # lost wake-up after 100 ms, a thread would wait for its whole timeout.
    for life in range(12):
        client = make_client(masters, retries=0, master_timeout=5000)
        client._driver.pump.tick_ns = 10**12
        slowest = 0.0

        def pairs(i: int, client: Redlock = client, life: int = life) -> None:
            nonlocal slowest
            for _ in range(3):
                start = time.monotonic()
                lock = client.acquire(f"{life}:{i}", HOUR)
                slowest = max(slowest, time.monotonic() - start)
                assert lock
                assert lock.release()

        _in_threads(THREADS, pairs)
        assert slowest < 4
        client.close()


def test_a_slow_master_does_not_delay_threads(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy])
    proxy.down.delay_ms = 500

    def work(i: int) -> None:
        for _ in range(20):
            lock = client.acquire(f"res:{i}", HOUR)
            assert lock
            assert client.release(lock)

    with Stopwatch() as watch:
        _in_threads(8, work)
    assert watch.ms < 20 * 500 / 4 + SLACK_MS  # it would be 20 s if it were waited for
    proxy.heal()
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C159")
def test_c159_200_threads_share_one_connection(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, warm=False, master_timeout=5000)

    locks: list[Lock | None] = [None] * 200

    def take(i: int) -> None:
        locks[i] = client.acquire(f"res:{i}", HOUR, wait=5000)

    _in_threads(200, take)
    assert all(locks)
    assert [clients_of(master) for master in masters] == [1] * 3
    assert all(row["reconnects"] == 0 for row in client.stats()["masters"])
    _in_threads(200, lambda i: locks[i].release() or pytest.fail("lost"))  # type: ignore[union-attr]
    eventually(lambda: are_clean(masters))


def test_64_threads_and_names_that_collide(masters: LocalMasters, make_client: MakeClient) -> None:
    """Three names, in singles and in batches: never two holders of one."""
    client = make_client(masters, retry_delay=5)
    rooms = [Room() for _ in range(3)]

    def work(i: int) -> None:
        draw = random.Random(i)
        for turn in range(6):
            if turn % 3:
                which = draw.randrange(3)
                locks = {which: client.acquire(f"res:{which}", 60_000, wait=100)}
            else:
                names = draw.sample(range(3), 2)
                many = client.acquire_many([f"res:{which}" for which in names], 60_000)
                locks = dict(zip(names, many, strict=True))
            for which, lock in locks.items():
                if lock:
                    rooms[which].visit(lock)
            held = [lock for lock in locks.values() if lock]
            assert client.release_many(held) == [True] * len(held)

    _in_threads(64, work)
    assert sum(room.overlaps for room in rooms) == 0
    assert all(room.visits for room in rooms)
    eventually(lambda: are_clean(masters))


@pytest.mark.usefixtures("hasty")
def test_threads_that_come_and_go(masters: LocalMasters, make_client: MakeClient) -> None:
    """Each reads for the others for a moment, and is gone: none of those who stay is forgotten."""
    client = make_client(masters, retry_delay=5)
    occupy(masters, "res")
    got: list[Any] = []
    stay = [
        threading.Thread(target=lambda: got.append(client.acquire("res", HOUR, wait=30_000)))
        for _ in range(4)
    ]
    for thread in stay:
        thread.start()

    def work(i: int) -> None:
        def once() -> None:
            lock = client.acquire(f"own:{i}", HOUR)
            assert lock
            assert lock.release()

        for _ in range(15):
            thread = threading.Thread(target=once)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()

    _in_threads(8, work)
    assert not got
    vacate(masters, "res")
    eventually(lambda: got, 10)
    assert got[0].release()
    for turn in range(1, 4):
        eventually(lambda turn=turn: len(got) > turn, 10)  # type: ignore[misc]
        assert got[turn].release()
    for thread in stay:
        thread.join(10)
    assert client.stats()["acquired"] == 8 * 15 + 4


def _turns(masters: LocalMasters, clients: list[Redlock], seconds: float) -> list[int]:
    """How often each of as many threads had a lock of its own within a time."""
    turns = [0] * len(clients)
    end = time.monotonic() + seconds

    def work(i: int) -> None:
        while time.monotonic() < end:
            lock = clients[i].acquire(f"own:{i}", HOUR)
            assert lock
            assert lock.release()
            turns[i] += 1

    _in_threads(len(clients), work)
    eventually(lambda: are_clean(masters))
    return turns


def test_no_thread_starves(masters: LocalMasters, make_client: MakeClient) -> None:
    """Who reads for the others, or sends, does not do so for long."""
    client = make_client(masters)
    turns = _turns(masters, [client] * 8, 2)
    print(turns)  # noqa: T201 - shown when it fails, and with -rP
    assert min(turns) >= sum(turns) / len(turns) / 4


@pytest.mark.case("C132")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "seconds", [pytest.param(3, id="short"), pytest.param(30, id="long", marks=pytest.mark.slow)]
)
def test_c132_no_waiter_starves(
    masters: LocalMasters, make_client: MakeClient, shared: bool, seconds: float
) -> None:
    """Ten that hold it for 5 ms, and want it again at once."""
    settings = {"retry_delay": 20, "master_timeout": 1000}
    clients = [make_client(masters, **settings) for _ in range(1 if shared else 10)]
    turns = [0] * 10
    end = time.monotonic() + seconds

    def work(i: int) -> None:
        while time.monotonic() < end:
            lock = clients[i % len(clients)].acquire("res", 60_000, wait=20_000)
            assert lock, "starved"
            time.sleep(0.005)
            assert lock.release()
            turns[i] += 1

    _in_threads(10, work, seconds + 60)
    print(turns)  # noqa: T201 - shown when it fails, and with -rP
    if seconds > 10:
        assert max(turns) < 5 * min(turns)
    assert min(turns) > 0


@pytest.mark.case("C131")
@pytest.mark.parametrize(
    "rounds", [pytest.param(4, id="short"), pytest.param(100, id="long", marks=pytest.mark.slow)]
)
def test_c131_split_votes(
    make_local_masters: MakeLocalMasters,
    make_proxy: MakeProxy,
    make_client: MakeClient,
    rounds: int,
) -> None:
    """20 that start at once, each with its own order of the five masters."""
    masters = taught(make_local_masters(5))
    draw = random.Random(1)
    clients = []
    for _ in range(20):
        proxies = [make_proxy(master) for master in masters]
        for proxy in proxies:
            proxy.up.delay_ms = draw.uniform(0, 10)
        clients.append(make_client(proxies, retry_delay=100, master_timeout=1000))
    for turn in range(rounds):
        name = f"res:{turn}"
        seconds, lock = _one_winner(clients, name)
        assert seconds < (1000 + SLACK_MS) / 1000
        assert _only_holder(masters, name, lock.token.encode())
        assert lock.release()


def _one_winner(clients: list[Redlock], name: str) -> tuple[float, Lock]:
    """All want a lock at once: who got it, and after how many seconds."""
    winners: list[tuple[float, Lock]] = []
    barrier = threading.Barrier(len(clients))

    def work(i: int) -> None:
        barrier.wait(30)
        began = time.monotonic()
        lock = clients[i].acquire(name, 60_000, wait=1000 + SLACK_MS)
        if lock:
            winners.append((time.monotonic() - began, lock))

    _in_threads(len(clients), work)
    assert len(winners) == 1
    return winners[0]


def _only_holder(masters: LocalMasters, name: str, token: bytes) -> bool:
    """What the losers had is gone, soon: only the winner's is there."""
    return eventually(lambda: {m.command("GET", name) for m in masters} <= {token, None}, 2)
