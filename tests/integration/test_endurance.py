"""A million pairs, 50,000 reconnections, 200,000 errors, huge batches: all stays flat."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from integration.bridge import ready, soon
from integration.helpers import HOUR, MakeClient, are_clean, eventually, taught

from redlock_fast import NoQuorum, Redlock
from redlock_fast import asyncio as aio
from redlock_fast.testing import LocalMaster, LocalMasters, MakeLocalMasters

MB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
LIBC = ctypes.CDLL(None)
LIBC.open_memstream.restype = ctypes.c_void_p


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _trim() -> None:
    """Let the C library give back what is free, so that what is left is in use."""
    gc.collect()
    LIBC.malloc_trim(0)


def _malloced() -> int:
    """Bytes that malloc has given out, in all its arenas."""
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = LIBC.open_memstream(ctypes.byref(text), ctypes.byref(size))
    LIBC.malloc_info(0, ctypes.c_void_p(stream))
    LIBC.fclose(ctypes.c_void_p(stream))
    found = ctypes.string_at(text, size.value)
    LIBC.free(text)
    *_, totals = found.rpartition(b"</heap>")

    def total(pattern: bytes) -> int:
        return sum(int(size) for size in re.findall(pattern + rb' [^>]*size="(\d+)"', totals))

    return (
        total(b'<system type="current"')
        + total(b'<total type="mmap"')
        - total(b'<total type="fast"')
        - total(b'<total type="rest"')
    )


class _Usage(NamedTuple):
    rss: int
    malloced: int
    blocks: int
    descriptors: int


def _usage() -> _Usage:
    _trim()
    return _Usage(_rss(), _malloced(), sys.getallocatedblocks(), len(os.listdir("/proc/self/fd")))


@contextmanager
def _flat(what: str, mb: float = 2.0) -> Iterator[None]:
    """The body leaves memory and descriptors as they were before it.

    What is in use may grow by 1 MB, and resident memory, where the C library also keeps some of
    what is free, by `mb`.
    """
    before = _usage()
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    after = _usage()
    grown = _Usage(*[new - old for new, old in zip(after, before, strict=True)])
    print(  # noqa: T201 - the figures are what this is for; shown with -rP
        f"{what}: {seconds:.1f} s, resident memory {grown.rss / MB:+.2f} MB, malloc "
        f"{grown.malloced / 1024:+.1f} KB, {grown.blocks:+d} blocks, "
        f"{grown.descriptors:+d} descriptors"
    )
    assert grown.rss < mb * MB
    assert grown.malloced < MB
    # Free lists fill up as they happen to: some hold a thousand of their kind.
    assert grown.blocks < 6000
    assert grown.descriptors == 0


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
    """Do it in so many threads, which have ended then: so have their own caches of free memory."""
    with ThreadPoolExecutor(count) as pool:
        for _ in pool.map(work, range(count)):
            pass


def _settled(client: Any, masters: Iterable[LocalMaster] = ()) -> bool:
    """Nothing is owed, nor to be cleaned up."""
    rows = client.stats()["masters"]
    return are_clean(masters) and not any(row["owed"] or row["debts"] for row in rows)


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_a_million_pairs(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters)

    def pairs(name: str, count: int) -> None:
        _in_threads(64, lambda i: _pairs(client, f"{name}:{i}", count))
        eventually(lambda: _settled(client, masters))

    pairs("warm", 1000)
    before = client.stats()
    with _flat("1,000,000 pairs of 64 threads", mb=6):  # which use many arenas
        pairs("t", 1_000_000 // 64)
    after = client.stats()
    for what in ("acquired", "released"):
        assert after[what] - before[what] == 1_000_000


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_few_threads_and_batches(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters)

    def eight(name: str, count: int) -> None:
        _in_threads(8, lambda i: _pairs(client, f"{name}:{i}", count))

    _pairs(client, "warm", 2000)
    eight("warm", 3000)
    _batches(client, "warm", 10, 1000)
    eventually(lambda: _settled(client, masters))
    with _flat("30,000 pairs of one thread"):
        _pairs(client, "one", 30_000)
        eventually(lambda: _settled(client, masters))
    with _flat("100,000 pairs of eight threads", mb=6):
        eight("t", 100_000 // 8)
        eventually(lambda: _settled(client, masters))
    with _flat("400,000 pairs in batches of 1000"):
        _batches(client, "batch", 400, 1000)
        eventually(lambda: _settled(client, masters))


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_a_million_pairs_of_tasks(masters: LocalMasters) -> None:
    async def pairs(client: aio.Redlock, name: str, count: int) -> None:
        for turn in range(count):
            lock = await client.acquire(f"{name}:{turn}", HOUR)
            assert lock
            assert await lock.release()

    async def thousand(client: aio.Redlock, name: str, count: int) -> None:
        await asyncio.gather(*[pairs(client, f"{name}:{i}", count) for i in range(1000)])
        await soon(lambda: _settled(client, masters))

    async def main() -> None:
        async with ready(masters, master_timeout=10_000) as client:
            await thousand(client, "warm", 30)
            before = client.stats()
            # (Python takes memory from the system in pieces of 1 MB.)
            with _flat("1,000,000 pairs of 1000 tasks", mb=4.0):
                await thousand(client, "t", 1000)
            after = client.stats()
            for what in ("acquired", "released"):
                assert after[what] - before[what] == 1_000_000

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_50_000_reconnections(
    masters: LocalMasters, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "redlock_fast")  # its records would be what grows
    client = make_client(masters, retries=20, retry_delay=5)

    with _hands(masters) as kill:

        def reconnect(times: int) -> None:
            end = _reconnections(client) + times
            turn = 0
            while _reconnections(client) < end:
                turn += 1
                lock = client.acquire(f"res:{turn}", HOUR)
                assert lock
                kill()
                # Whether a quorum confirms it or not, it is deleted over the next connections.
                with suppress(NoQuorum):
                    lock.release()
            client.connect()
            eventually(lambda: _all_ready(client))

        reconnect(1000)
        with _flat("50,000 reconnections"):
            reconnect(50_000)
    eventually(lambda: are_clean(masters), 10)


@contextmanager
def _hands(masters: LocalMasters) -> Iterator[Callable[[], None]]:
    """A function that ends all other connections to the masters."""
    with ExitStack() as stack:
        hands = []
        for master in masters:
            hand = stack.enter_context(socket.create_connection(("127.0.0.1", master.port), 10))
            hands.append((hand, stack.enter_context(hand.makefile("rb"))))

        def kill() -> None:
            for hand, stream in hands:
                hand.sendall(b"CLIENT KILL TYPE normal SKIPME yes\r\n")
                assert stream.readline()[:1] == b":"

        yield kill


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_50_000_reconnections_of_tasks(
    masters: LocalMasters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "redlock_fast")

    async def main() -> None:
        async with ready(masters, retries=20, retry_delay=5) as client:
            with _hands(masters) as kill:

                async def reconnect(times: int) -> None:
                    end = _reconnections(client) + times
                    turn = 0
                    while _reconnections(client) < end:
                        turn += 1
                        lock = await client.acquire(f"res:{turn}", HOUR)
                        assert lock
                        kill()
                        with suppress(NoQuorum):
                            await lock.release()
                    await client.connect()
                    await soon(lambda: _all_ready(client))

                await reconnect(1000)
                with _flat("50,000 reconnections on a loop"):
                    await reconnect(50_000)
            await soon(lambda: are_clean(masters), 10)

    asyncio.run(main())


def _reconnections(client: Any) -> int:
    return sum(row["reconnects"] for row in client.stats()["masters"])


def _all_ready(client: Any) -> bool:
    return all(row["state"] == "ready" for row in client.stats()["masters"])


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_10_000_clients(masters: LocalMasters) -> None:
    def lives(count: int) -> None:
        for turn in range(count):
            with Redlock(masters.urls, master_timeout=1000) as client:
                lock = client.acquire(f"res:{turn}", HOUR)
                assert lock
                assert lock.release()

    lives(500)
    with _flat("10,000 clients"):
        lives(10_000)
    eventually(lambda: are_clean(masters))


@pytest.mark.slow
@pytest.mark.case("C154")
def test_c154_10_000_clients_of_a_loop(masters: LocalMasters) -> None:
    async def lives(count: int) -> None:
        for turn in range(count):
            async with aio.Redlock(masters.urls, master_timeout=1000) as client:
                lock = await client.acquire(f"res:{turn}", HOUR)
                assert lock
                assert await lock.release()

    async def main() -> None:
        await lives(500)
        with _flat("10,000 clients of a loop"):
            await lives(10_000)

    asyncio.run(main())
    eventually(lambda: are_clean(masters))


# -- what failures leave behind --------------------------------------------------------------------

# Three fakes in a process of their own, so that nothing that they leave is counted.
_FAKES = """
import sys
sys.path.insert(0, sys.argv[1])
from integration.fakes import CLOSE, PASS, FakeMaster, Net

what = sys.argv[2]
net = Net()

def answer(command, talk):
    talk.received.clear()
    for fake in fakes:
        fake.received.clear()
    if what == "errors" and command[0] == b"SET":
        return b"+OK\\r\\n"
    if what == "errors" and command[0] == b"EVALSHA":
        return b"-NOSCRIPT No matching script.\\r\\n"
    if what == "errors" and command[0] == b"EVAL":
        return b"-ERR out of luck\\r\\n"
    if what == "halves" and command[0] == b"SET":
        return [b"+O", CLOSE]
    if what == "refusals" and command[0] == b"SET":
        return b"$-1\\r\\n"
    return PASS

fakes = [FakeMaster(net, answer) for _ in range(3)]
print(*[fake.url for fake in fakes], flush=True)
sys.stdin.read()
"""


def _errors(client: Redlock, count: int) -> None:
    """A release is answered -NOSCRIPT and -ERR by each of three masters."""
    for turn in range(0, count, 600):
        names = [f"res:{turn}:{i}" for i in range(100)]
        locks = [lock for lock in client.acquire_many(names, HOUR, wait=5000) if lock]
        assert len(locks) == 100
        for lock in locks:
            with pytest.raises(NoQuorum, match="out of luck"):
                lock.release()


def _half_replies(client: Redlock, count: int) -> None:
    end = _errors_of(client, "closed") + count
    while _errors_of(client, "closed") < end:
        with suppress(NoQuorum):
            assert client.acquire("res", HOUR) is None


def _refusals(client: Redlock, count: int) -> None:
    for _ in range(count):
        assert client.acquire("res", HOUR) is None


def _errors_of(client: Redlock, kind: str) -> int:
    return sum(row["errors"].get(kind, 0) for row in client.stats()["masters"])


@pytest.mark.slow
@pytest.mark.case("C155")
@pytest.mark.parametrize("collector", [True, False])
@pytest.mark.parametrize(
    ("what", "fail", "count"),
    [
        ("errors", _errors, 200_000),
        ("halves", _half_replies, 20_000),
        ("refusals", _refusals, 20_000),
    ],
    ids=["errors", "halves", "refusals"],
)
def test_c155_failures_leave_no_object(
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
    what: str,
    fail: Callable[[Redlock, int], None],
    count: int,
    collector: bool,
) -> None:
    """Also no cycle, which only the collector would find."""
    caplog.set_level(logging.CRITICAL, "redlock_fast")
    tests = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", _FAKES, tests, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout
        urls = process.stdout.readline().split()
        assert len(urls) == 3
        client = make_client(urls)

        def times(count: int) -> tuple[int, int]:
            fail(client, count)
            eventually(lambda: _settled(client))
            if collector:
                gc.collect()
            return sys.getallocatedblocks(), len(gc.get_objects())

        times(count // 20)
        gc.collect()
        if not collector:
            gc.disable()
        try:
            before = times(count // 20)
            began = time.monotonic()
            after = times(count)
        finally:
            gc.enable()
        print(  # noqa: T201 - shown with -rP
            f"{count} {what}: {time.monotonic() - began:.1f} s, "
            f"{after[0] - before[0]:+d} blocks, {after[1] - before[1]:+d} objects"
        )
        client.close()
    assert after[0] - before[0] < 1000
    assert after[1] - before[1] < 200


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
