"""What users write, as a type checker sees it. Nothing runs this file.

mypy (strict) and pyright read it beside the installed wheel (`make smoke`), where they find types
only if the wheel brings `py.typed` and the stubs. A line that must not pass carries `ignore`; one
that is not needed is an error as well.
"""
# pyright: strict, reportMissingModuleSource=false, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import math
from datetime import timedelta

from typing_extensions import assert_type

import redlock_fast
from redlock_fast import Lock, NoQuorum, NotAcquired, Redlock, Report, asyncio
from redlock_fast.compat import redlock_py
from redlock_fast.testing import LocalMasters


def verbs(client: Redlock) -> None:
    lock = client.acquire("name", 10_000, wait=math.inf)
    assert_type(lock, Lock | None)
    lock.release()  # type: ignore[union-attr]
    client.acquire("name", 1.5)  # type: ignore[arg-type]
    client.acquire(7, 1000)  # type: ignore[arg-type]
    if lock:
        assert_type(lock.resource, str | bytes)
        assert_type(lock.token, str)
        assert_type(lock.extend(timedelta(seconds=10)), bool)
        assert_type(lock.remaining(), float)
        assert_type(lock.held, bool)
        assert_type(client.release(lock), bool)
    assert_type(client.acquire_many(["a", b"b"], 10_000), list[Lock | None])
    assert_type(client.locked(b"name"), bool)
    assert_type(client.adopt("name", b"0" * 40, 1000), Lock | None)


def contexts(client: Redlock) -> int:
    with client.lock("name", ttl=10_000) as lock:
        assert_type(lock, Lock)

    @client.lock("name", ttl=timedelta(seconds=10))
    def work(amount: int, *, times: int = 1) -> int:
        return amount * times

    assert_type(work(1, times=2), int)
    work("1")  # type: ignore[arg-type]
    try:
        return work(2)
    except NotAcquired:
        return 0
    except NoQuorum as error:
        assert_type(error.reports, tuple[Report, ...])
        raise


async def coroutines(client: asyncio.Redlock) -> int:
    lock = await client.acquire("name", 10_000)
    assert_type(lock, asyncio.Lock | None)
    if lock:
        assert_type(await lock.release(), bool)
    async with client.lock("name", ttl=10_000) as held:
        assert_type(held, asyncio.Lock)

    @client.lock("name", ttl=10_000)
    async def work(amount: int) -> int:
        return amount

    return await work(1)


def drop_in() -> None:
    lock = redlock_py.Redlock(["redis://127.0.0.1"]).lock("name", 1000)
    if lock:
        assert_type(lock, redlock_py.Lock)
        assert_type(lock.validity, int)


def masters() -> None:
    with LocalMasters(5) as five, Redlock(five.urls) as client:
        assert_type(client, Redlock)
    assert_type(redlock_fast.__version__, str)
