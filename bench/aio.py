"""The asyncio side of the benches: contestants whose pairs are awaited, and the load of tasks.

A contestant has an event loop of its own, of asyncio or uvloop, which runs only while a load does.
`CLIENTS` has what is installed: no uvloop, no rows of it.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import loads
from harness import TTL, Contestant, Counts, Result

JOIN_S = 60.0
"""A task that does not come back by then fails the run."""


class AsyncContestant(Contestant):
    """A client for tasks: `await acquire(name)`, `await release(lock)`, and `Tasks` as its load."""

    fast_loop = False
    """uvloop's instead of asyncio's own."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls)
        if self.fast_loop:
            import uvloop

            self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
            self.built += f", on uvloop {importlib.metadata.version('uvloop')}"
        else:
            self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.start())

    async def start(self) -> None:
        """Make the client, inside the loop."""
        raise NotImplementedError

    async def end(self) -> None:
        """Close its connections."""
        raise NotImplementedError

    def acquire(self, name: str) -> Awaitable[Any]:
        """A lock; or None: not granted. To be awaited, with no coroutine of ours around it."""
        raise NotImplementedError

    def release(self, lock: Any) -> Awaitable[bool]:
        """Likewise: was it ours until now?"""
        raise NotImplementedError

    async def pair(self, name: str) -> bool:  # type: ignore[override]
        lock = await self.acquire(name)
        return lock is not None and await self.release(lock)

    def close(self) -> None:
        self.loop.run_until_complete(self.end())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class AsyncRedlockFast(AsyncContestant):
    """This project's."""

    name = "redlock_fast.asyncio"
    tag = "ra"
    built = "redlock_fast.asyncio.Redlock([url, ...])"

    async def start(self) -> None:
        import redlock_fast

        module = importlib.import_module("redlock_fast.asyncio")
        self.errors = (redlock_fast.RedlockError,)
        self.client: Any = module.Redlock(self.urls)
        await self.client.connect()

    def acquire(self, name: str) -> Awaitable[Any]:
        return self.client.acquire(name, TTL)  # type: ignore[no-any-return]

    def release(self, lock: Any) -> Awaitable[bool]:
        return self.client.release(lock)  # type: ignore[no-any-return]

    def owed(self) -> int:
        return sum(master["owed"] for master in self.client.stats()["masters"])

    def counts(self) -> Counts:
        return Counts(self.client._driver.sends)

    def version(self) -> str:
        return importlib.metadata.version("redlock_fast")

    async def end(self) -> None:
        await self.client.aclose()


class AsyncPottery(AsyncContestant):
    """pottery's; always waits for all masters."""

    name = "pottery.AIORedlock"
    tag = "pa"
    built = "pottery.AIORedlock(key=..., masters={redis.asyncio.Redis.from_url(url), ...}) for each"

    async def start(self) -> None:
        import pottery
        import redis
        import redis.asyncio

        self.errors = (pottery.PrimitiveError, redis.RedisError)
        self.factory = pottery.AIORedlock
        self.masters = frozenset(redis.asyncio.Redis.from_url(url) for url in self.urls)

    async def acquire(self, name: str) -> Any:
        lock = self.factory(key=name, masters=self.masters, auto_release_time=TTL / 1000)
        return lock if await lock.acquire(blocking=False) else None

    async def release(self, lock: Any) -> bool:
        await lock.release()
        return True

    def version(self) -> str:
        return importlib.metadata.version("pottery")

    async def end(self) -> None:
        for master in self.masters:
            await master.aclose()


class AsyncRedisLock(AsyncContestant):
    """redis-py's own, on the first master only, with no quorum."""

    name = "redis.asyncio Lock"
    tag = "la"
    built = "redis.asyncio.Redis.from_url(url).lock(name, timeout=10, blocking=False) for each lock"

    async def start(self) -> None:
        import redis
        import redis.asyncio

        self.errors = (redis.RedisError,)
        self.client: Any = redis.asyncio.Redis.from_url(self.urls[0])

    async def acquire(self, name: str) -> Any:
        lock = self.client.lock(name, timeout=TTL / 1000, blocking=False)
        return lock if await lock.acquire() else None

    async def release(self, lock: Any) -> bool:
        await lock.release()
        return True

    def version(self) -> str:
        return importlib.metadata.version("redis")

    async def end(self) -> None:
        await self.client.aclose()


def on_uvloop(client: type[AsyncContestant]) -> type[AsyncContestant]:
    """The same client on the other loop."""
    name = f"{client.name} on uvloop"
    return type(f"{client.__name__}OnUvloop", (client,), {"name": name, "fast_loop": True})


def installed() -> Mapping[str, type[AsyncContestant]]:
    """What can take part; nobody, where ours is not there."""
    if not importlib.util.find_spec("redlock_fast.asyncio"):
        return {}
    clients: list[type[AsyncContestant]] = [AsyncRedlockFast, AsyncPottery, AsyncRedisLock]
    if importlib.util.find_spec("uvloop"):
        clients.insert(1, on_uvloop(AsyncRedlockFast))
    return {client.name: client for client in clients}


CLIENTS = installed()
OURS = AsyncRedlockFast.name
OURS_ON_UVLOOP = f"{OURS} on uvloop"
PEERS = (AsyncPottery.name, AsyncRedisLock.name)


@dataclass(frozen=True)
class Tasks:
    """`count` tasks share one client, each makes one pair after another; see `loads.Threads`."""

    count: int

    def __call__(self, contestant: Any, seconds: float) -> Result:
        def stretch(seconds: float, timed: bool) -> Result:
            done: Result = contestant.loop.run_until_complete(
                self.stretch(contestant, seconds, timed)
            )
            return done

        rate, times = stretch(seconds, False), stretch(seconds / 2, True)
        return loads.joined(rate, times)

    async def stretch(self, contestant: Any, seconds: float, timed: bool) -> Result:
        """One stretch; p50, p99 and the slowest call are 0 unless `timed`."""
        tally = loads.Tally(contestant, self.count)
        acquire: Callable[[str], Awaitable[Any]] = contestant.acquire
        release: Callable[[Any], Awaitable[bool]] = contestant.release
        errors, next_name = contestant.errors, contestant.names.next

        async def work(index: int) -> None:
            good = calls = 0
            clock, note = time.perf_counter, tally.took[index].append
            end = clock()
            while not tally.over:
                calls += 1
                try:
                    lock = await acquire(next_name())
                    good += lock is not None and await release(lock)
                except errors as error:
                    contestant.blame(error)
                tally.done[index] = good
                if timed:
                    began, end = end, clock()
                    note(end - began)
            tally.failed[index] = calls - good

        gc.collect()
        tasks = [asyncio.ensure_future(work(i)) for i in range(self.count)]
        try:
            await asyncio.sleep(loads.START_S)
            tally.begin()
            await asyncio.sleep(seconds)
            while tally.lacking():
                await asyncio.sleep(seconds)
            tally.end()
        finally:
            tally.over = True
            await asyncio.wait_for(asyncio.gather(*tasks), JOIN_S)
        return tally.result()
