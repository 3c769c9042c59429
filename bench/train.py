"""The work that a profile-guided build is trained with: locks taken, extended, released, contended.

    REDLOCK_PROFILE=generate python setup.py build_ext --inplace
    python bench/train.py
    REDLOCK_PROFILE=use python setup.py build_ext --inplace --force

Five masters of its own; some seconds. `make optimised` runs the three. What is not done here, TLS
for one, is built for size.
"""

from __future__ import annotations

import asyncio
import itertools
import threading

import redlock_fast
import redlock_fast.asyncio
from redlock_fast.testing import LocalMasters

TTL = 10_000
PATIENCE_MS = 5000
"""Counting makes the client slow; it must not take that for the masters' silence."""

names = (f"train:{i:08d}" for i in itertools.count())


def pairs(client: redlock_fast.Redlock, count: int) -> None:
    for name in itertools.islice(names, count):
        lock = client.acquire(name, TTL)
        assert lock
        assert client.release(lock)


def batches(client: redlock_fast.Redlock, count: int, size: int) -> None:
    for _ in range(count):
        locks = client.acquire_many(list(itertools.islice(names, size)), TTL)
        assert all(client.release_many([lock for lock in locks if lock]))


def lives(client: redlock_fast.Redlock, rival: redlock_fast.Redlock, count: int) -> None:
    """All that happens to locks beside pairs."""
    for name in itertools.islice(names, count):
        with client.lock(name, TTL) as lock:
            assert lock.extend()
            assert client.owned(lock)
            assert rival.acquire(name, TTL, wait=0) is None


def sync(urls: list[str]) -> None:
    with (
        redlock_fast.Redlock(urls, master_timeout=PATIENCE_MS) as client,
        redlock_fast.Redlock(urls, master_timeout=PATIENCE_MS) as rival,
    ):
        pairs(client, 3000)
        lives(client, rival, 200)
        batches(client, 20, 500)
        threads = [threading.Thread(target=pairs, args=(client, 300)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


async def tasks(urls: list[str]) -> None:
    async with redlock_fast.asyncio.Redlock(urls, master_timeout=PATIENCE_MS) as client:

        async def work(count: int) -> None:
            for name in itertools.islice(names, count):
                lock = await client.acquire(name, TTL)
                assert lock
                assert await client.release(lock)

        await work(500)
        await asyncio.gather(*(work(100) for _ in range(100)))
        for name in itertools.islice(names, 100):
            async with client.lock(name, TTL) as lock:
                assert await lock.extend()
        locks = await client.acquire_many(list(itertools.islice(names, 500)), TTL)
        assert all(await client.release_many([lock for lock in locks if lock]))


def main() -> None:
    with LocalMasters(5) as masters:
        sync(masters.urls)
        asyncio.run(tasks(masters.urls))


if __name__ == "__main__":
    main()
