"""A million pairs, 50,000 reconnections, huge batches: memory and descriptors stay flat."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from integration.helpers import HOUR, MakeClient, are_clean, eventually, taught

from redlock_fast import NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

MB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _trim() -> None:
    """Let the C library give back what is free, so that what is left is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _usage() -> tuple[int, int, int]:
    """Resident bytes, allocated blocks of Python, open descriptors."""
    _trim()
    return _rss(), sys.getallocatedblocks(), len(os.listdir("/proc/self/fd"))


@contextmanager
def _flat(what: str, mb: float = 2.0, blocks: int = 3000) -> Iterator[None]:
    """The body leaves memory and descriptors as they were before it, but for so much."""
    before = _usage()
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    after = _usage()
    grown = after[0] - before[0]
    print(  # noqa: T201 - the figures are what this is for; shown with -rP
        f"{what}: {seconds:.1f} s, resident memory {grown / MB:+.2f} MB, "
        f"{after[1] - before[1]:+d} blocks, {after[2] - before[2]:+d} descriptors"
    )
    assert grown < mb * MB
    assert after[1] - before[1] < blocks
    assert after[2] == before[2]


def _pairs(client: Redlock, name: str, count: int) -> None:
    for turn in range(count):
        lock = client.acquire(f"{name}:{turn}", HOUR)
        assert lock
        assert lock.release()


def _batches(client: Redlock, name: str, count: int, size: int) -> None:
    for turn in range(count):
        locks = client.acquire_many([f"{name}:{turn}:{i}" for i in range(size)], HOUR)
        assert client.release_many([lock for lock in locks if lock]) == [True] * size


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=run, args=[i]) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_a_million_pairs(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters)

    def eight(count: int) -> None:
        _in_threads(8, lambda i: _pairs(client, f"t{i}", count))

    def settled() -> bool:
        return are_clean(masters) and not any(row["owed"] for row in client.stats()["masters"])

    _pairs(client, "warm", 2000)
    eight(3000)
    _batches(client, "warm", 10, 1000)
    eventually(settled)
    with _flat("50,000 pairs of one thread"):
        _pairs(client, "one", 50_000)
        eventually(settled)
    with _flat("150,000 pairs of eight threads", mb=6):  # an arena of malloc for each thread
        eight(150_000 // 8)
        eventually(settled)
    with _flat("800,000 pairs in batches of 1000"):
        _batches(client, "batch", 800, 1000)
        eventually(settled)
    assert client.stats()["released"] >= 1_000_000


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_50_000_reconnections(
    masters: LocalMasters, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "redlock_fast")  # its records would be what grows
    client = make_client(masters, retries=20, retry_delay=5)

    with ExitStack() as stack:
        hands = []
        for master in masters:
            hand = stack.enter_context(socket.create_connection(("127.0.0.1", master.port), 10))
            hands.append((hand, stack.enter_context(hand.makefile("rb"))))

        def reconnect(times: int) -> None:
            end = _reconnections(client) + times
            turn = 0
            while _reconnections(client) < end:
                turn += 1
                lock = client.acquire(f"res:{turn}", HOUR)
                assert lock
                for hand, stream in hands:
                    hand.sendall(b"CLIENT KILL TYPE normal SKIPME yes\r\n")
                    assert stream.readline()[:1] == b":"
                # Whether a quorum confirms it or not, it is deleted over the next connections.
                with suppress(NoQuorum):
                    lock.release()
            client.connect()
            eventually(lambda: all(row["state"] == "ready" for row in client.stats()["masters"]))

        reconnect(1000)
        with _flat("50,000 reconnections"):
            reconnect(50_000)
    eventually(lambda: are_clean(masters), 10)


def _reconnections(client: Redlock) -> int:
    return sum(row["reconnects"] for row in client.stats()["masters"])


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_2000_clients(masters: LocalMasters) -> None:
    """(Its 10,000 take a minute and show no more.)"""

    def lives(count: int) -> None:
        for turn in range(count):
            with Redlock(masters.urls, master_timeout=1000) as client:
                lock = client.acquire(f"res:{turn}", HOUR)
                assert lock
                assert lock.release()

    lives(100)
    with _flat("2000 clients"):
        lives(2000)
    eventually(lambda: are_clean(masters))


@pytest.mark.slow
def test_a_batch_of_200_000(make_local_masters: MakeLocalMasters, make_client: MakeClient) -> None:
    """Memory is that of the locks themselves: commands and replies pass through in chunks."""
    masters = taught(make_local_masters(3))
    client = make_client(masters)
    count = 200_000
    names = [f"res:{i}" for i in range(count)]
    highest = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.01):
            highest = max(highest, _rss())

    _batches(client, "warm", 5, 1000)
    _trim()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        base = _rss()
        began = time.monotonic()
        locks = [lock for lock in client.acquire_many(names, HOUR) if lock]
        acquired = time.monotonic()
        held = _rss()
        assert len(locks) == count
        assert client.release_many(locks) == [True] * count
        released = time.monotonic()
        last = _rss()
    finally:
        stop.set()
        watcher.join()
    del locks
    eventually(lambda: are_clean(masters), 20)
    _trim()
    print(  # noqa: T201 - shown with -rP
        f"200,000: acquired in {acquired - began:.1f} s, released in {released - acquired:.1f} s; "
        f"memory over its base of {base / MB:.0f} MB: held {(held - base) / MB:.0f} MB, "
        f"released {(last - base) / MB:.0f} MB, peak {(highest - base) / MB:.0f} MB, "
        f"afterwards {(_rss() - base) / MB:.0f} MB"
    )
    # A lock is an object, its key and its token: some hundred bytes.
    assert highest - base < count * 700
    assert _rss() - base < 16 * MB
