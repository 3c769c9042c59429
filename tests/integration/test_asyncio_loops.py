"""A client and its event loop: one at a time, another after that was closed, never a parent's."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
from integration.bridge import LOOPS, Run, new_loop, ready, soon
from integration.fakes import MakeFake
from integration.helpers import (
    HOUR,
    all_have,
    are_clean,
    clients_of,
    descriptors,
    eventually,
    values_of,
)

from redlock_fast import ClosedError
from redlock_fast import asyncio as aio
from redlock_fast.testing import LocalMasters


def urls_of(masters: LocalMasters) -> list[str]:
    return [master.url for master in masters]


@pytest.mark.case("C108")
@pytest.mark.parametrize("kind", LOOPS)
def test_c108_one_client_for_one_loop_after_the_other(masters: LocalMasters, kind: str) -> None:
    clients = [aio.Redlock(urls_of(masters))]
    before = len(descriptors())

    async def use(client: aio.Redlock) -> None:
        lock = await client.acquire("res", HOUR)
        assert lock
        assert await client.acquire("res", HOUR, wait=0) is None
        assert await lock.release()

    for _ in range(3):
        loop = new_loop(kind)
        loop.run_until_complete(use(clients[0]))
        loop.close()
        assert len(descriptors()) <= before + 3
    eventually(lambda: are_clean(masters))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clients.clear()
        gc.collect()
    assert len(descriptors()) == before


@pytest.mark.case("C108")
def test_c108_not_from_two_loops_at_once(masters: LocalMasters) -> None:
    async def use(client: aio.Redlock, other: aio.Lock) -> None:
        here = [clients_of(master) for master in masters]
        calls: list[Any] = [
            client.acquire("second", HOUR),
            client.acquire_many(["second"], HOUR),
            client.release(other),
            client.extend(other),
            client.locked("res"),
            client.connect(),
            client.aclose(),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="another event loop"):
                await call
        assert [clients_of(master) for master in masters] == here
        assert other.held

    failures: list[BaseException] = []

    def elsewhere(client: aio.Redlock, lock: aio.Lock) -> None:
        try:
            asyncio.run(use(client, lock))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    async def main() -> None:
        async with ready(masters) as client:
            lock = await client.acquire("res", HOUR)
            assert lock
            thread = threading.Thread(target=elsewhere, args=[client, lock])
            thread.start()
            await asyncio.to_thread(thread.join, 20)
            assert await lock.release()

    asyncio.run(main())
    assert not failures


@pytest.mark.case("C108")
def test_c108_what_a_closed_loop_left_is_cleaned_up_on_the_next(masters: LocalMasters) -> None:
    client = aio.Redlock(urls_of(masters), master_timeout=1000)
    held: list[aio.Lock] = []

    async def leave() -> None:
        await client.connect()
        lock = await client.acquire("held", HOUR)
        assert lock
        held.append(lock)
        for master in masters:
            master.pause()
        task = asyncio.ensure_future(client.acquire("left", HOUR))
        await asyncio.sleep(0.05)
        assert not task.done()

    async def go_on() -> None:
        assert await held[0].release()
        lock = await client.acquire("left", HOUR)
        assert lock
        assert await lock.release()
        await soon(lambda: are_clean(masters))
        await client.aclose()

    asyncio.run(leave())
    for master in masters:
        master.resume()
    asyncio.run(go_on())


@pytest.mark.case("C108")
def test_c108_a_task_that_its_loop_left_behind(masters: LocalMasters) -> None:
    """The loop is closed with a task inside; it is thrown away without a sound."""
    client = aio.Redlock(urls_of(masters))
    loop = asyncio.new_event_loop()

    async def begin() -> asyncio.Task[Any]:
        await client.connect()
        for master in masters:
            master.pause()
        task = asyncio.ensure_future(client.acquire("left", HOUR, wait=HOUR))
        await asyncio.sleep(0.02)
        return task

    task = loop.run_until_complete(begin())
    loop.close()
    for master in masters:
        master.resume()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del task
        gc.collect()

    async def go_on() -> None:
        async with client:
            lock = await client.acquire("left", HOUR, wait=5000)
            assert lock
            assert await lock.release()

    asyncio.run(go_on())
    eventually(lambda: are_clean(masters))


_NOISE = """
import asyncio, sys
from redlock_fast.asyncio import Redlock
{use_uvloop}
client = Redlock(sys.argv[1:])

async def use():
    lock = await client.acquire("res", 60_000)
    assert lock and await lock.release()
    {more}

async def wait():
    await client.acquire("res", 60_000, wait=60_000)

{go}
"""


@pytest.mark.case("C108")
@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize(
    ("more", "go"),
    [
        ("pass", "asyncio.run(use())"),
        ("await client.aclose()", "asyncio.run(use())"),
        ("pass", "for _ in range(3): asyncio.run(use())"),
        ("pass", "asyncio.run(use()); del client"),
        ("tasks.append(asyncio.ensure_future(wait()))", "tasks = []; asyncio.run(use())"),
        ("pass", "loop = asyncio.new_event_loop(); loop.run_until_complete(use()); loop.close()"),
    ],
)
def test_c108_no_noise_at_exit(masters: LocalMasters, kind: str, more: str, go: str) -> None:
    if kind == "uvloop":
        pytest.importorskip("uvloop")
    use_uvloop = "import uvloop; asyncio.new_event_loop = uvloop.new_event_loop"
    if kind == "asyncio" or sys.version_info >= (3, 12):
        use_uvloop = ""
    code = _NOISE.format(use_uvloop=use_uvloop, more=more, go=go)
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", code, *urls_of(masters)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("kind", LOOPS)
def test_calls_thrown_away_after_their_loop(masters: LocalMasters, kind: str) -> None:
    """Some had begun, others waited for their turn: nothing is raised, nothing stays."""
    client = aio.Redlock(urls_of(masters), master_timeout=10_000)
    loop = new_loop(kind)

    loop.run_until_complete(client.connect())
    calls = [client.acquire(f"res {i}", HOUR) for i in range(3000)]
    tasks: list[Any] = [loop.create_task(each) for each in calls]
    for master in masters:
        master.pause()
    try:
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        for task, call in zip(tasks, calls, strict=True):
            task._log_destroy_pending = False
            call.close()
    finally:
        for master in masters:
            master.resume()
    loop = new_loop(kind)
    lock = loop.run_until_complete(client.acquire("res", HOUR))
    assert lock
    assert loop.run_until_complete(lock.release())
    assert client._driver.inside == 0
    eventually(lambda: are_clean(masters))
    loop.run_until_complete(client.aclose())
    loop.close()


def test_a_client_that_is_dropped_while_its_loop_goes_on(run: Run, masters: LocalMasters) -> None:
    """One warning, as asyncio's own; and its connections are closed."""

    async def main() -> None:
        client = aio.Redlock(urls_of(masters))
        await client.connect()
        before = len(descriptors())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del client
            gc.collect()
        (warning,) = caught
        assert warning.category is ResourceWarning
        assert str(warning.message).startswith("unclosed client <Redlock of 127")
        await soon(lambda: len(descriptors()) == before - 3)
        await soon(lambda: not any(map(clients_of, masters)))

    run(main())


def test_a_client_never_used_is_dropped_silently() -> None:
    client = aio.Redlock(["redis://127.0.0.1:1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del client
        gc.collect()


def test_aclose_without_a_connection(run: Run) -> None:
    async def main() -> None:
        client = aio.Redlock(["redis://127.0.0.1:1"])
        await client.aclose()
        await client.aclose()
        for call in (client.acquire("res", HOUR), client.connect()):
            with pytest.raises(ClosedError):
                await call

    run(main())


def test_aclose_ends_who_waits(run: Run, masters: LocalMasters) -> None:
    """In a round, in a pause, in `connect`."""

    async def main() -> None:
        async with ready(masters, retry_delay=HOUR, master_timeout=5000) as client:
            lock = await client.acquire("res", HOUR)
            assert lock
            pausing = asyncio.ensure_future(client.acquire("res", HOUR, wait=HOUR))
            await soon(lambda: client.stats()["masters"][0]["owed"] == 0)
            await asyncio.sleep(0.05)
            for master in masters:
                master.pause()
            asking = asyncio.ensure_future(client.acquire("other", HOUR))
            await asyncio.sleep(0.05)
            for master in masters:
                master.resume()
            await client.aclose()
            for task in (pausing, asking):
                result = (await asyncio.gather(task, return_exceptions=True))[0]
                assert isinstance(result, ClosedError) or (task is asking and result)
        await soon(lambda: [*map(clients_of, masters)] == [0, 0, 0])
        assert values_of(masters, "res") == [lock.token.encode()] * 3

    run(main())


def test_aclose_ends_who_connects(run: Run, make_fake: MakeFake) -> None:
    fake = make_fake(lambda _command, _talk: b"")

    async def main() -> None:
        async with ready([fake], warm=False) as client:
            task = asyncio.ensure_future(client.connect())
            await asyncio.sleep(0.05)
            await client.aclose()
            with pytest.raises(ClosedError):
                await task

    run(main())


@pytest.mark.case("C93")
def test_a_forked_child_starts_as_new(masters: LocalMasters) -> None:
    """It has nothing of the parent's, touches nothing of it, and can take locks of its own."""

    def child(client: aio.Redlock, lock: aio.Lock, suspended: Any) -> None:
        async def use() -> None:
            assert not lock.held
            assert await lock.release() is False
            assert await client.extend(lock) is False
            mine = await client.acquire("child", HOUR)
            assert mine
            assert await mine.release()
            await client.aclose()

        suspended.close()  # a try of the parent's is thrown away here, and goes on there
        asyncio.run(use())

    async def main() -> None:
        async with ready(masters) as client:
            lock = await client.acquire("res", HOUR)
            assert lock
            all_have(masters, "res", lock.token)
            for master in masters:
                master.pause()
            suspended = client.acquire("slow", HOUR)
            task = asyncio.ensure_future(suspended)
            await asyncio.sleep(0.01)
            for master in masters:
                master.resume()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a fork beside threads
                pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    child(client, lock, suspended)
                    status = 0
                finally:
                    os._exit(status)
            slow = await task
            assert slow
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert status == 0
            assert await client.owned(slow)
            assert await client.owned(lock)
            assert await lock.release()
            assert await slow.release()
            assert {row["reconnects"] for row in client.stats()["masters"]} == {0}

    asyncio.run(main())
    assert are_clean(masters)
