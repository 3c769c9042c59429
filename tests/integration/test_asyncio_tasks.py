"""Many tasks, a loop that is never blocked, and what a body under `async with` may do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import math
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from integration.bridge import Run, ready, soon
from integration.fakes import SILENCE, MakeFake
from integration.helpers import HOUR, NT, are_clean, black_hole, closed_port, keys_of

from redlock_fast import LockLost, NoQuorum, NotAcquired, plan, rules
from redlock_fast import asyncio as aio
from redlock_fast.testing import LocalMasters, MakeLocalMasters

# -- the loop is never blocked -------------------------------------------------------------------

# Between two ticks that are meant to be 5 ms apart: the catalogue's bound, for the time that the
# loop's thread has computed in between, which no other process adds to. In all it may take longer,
# by what a busy machine of two cores adds; a call that blocks takes `NT` or more.
GAP_MS = 30
WALL_GAP_MS = GAP_MS + 60


@asynccontextmanager
async def watched() -> AsyncIterator[list[tuple[float, float]]]:
    """Ticks every 5 ms meanwhile: how long each took to come, and how much of it the thread has
    computed, in ms.
    """
    late: list[tuple[float, float]] = []
    loop = asyncio.get_running_loop()

    async def tick() -> None:
        while True:
            before, used = loop.time(), time.thread_time()
            await asyncio.sleep(0.005)
            late.append(((loop.time() - before) * 1000, (time.thread_time() - used) * 1000))

    task = asyncio.ensure_future(tick())
    await asyncio.sleep(0.02)
    yield late
    task.cancel()


async def contend(client: aio.Redlock, tasks: int, seconds: float) -> None:
    """So many tasks acquire and release, whatever comes of it."""
    until = asyncio.get_running_loop().time() + seconds

    async def one(i: int) -> None:
        while asyncio.get_running_loop().time() < until:
            try:
                lock = await client.acquire(f"res {i}", 5000)
                if lock is not None:
                    await lock.release()
            except NoQuorum:
                pass

    await asyncio.gather(*[one(i) for i in range(tasks)])


@pytest.mark.case("C111")
@pytest.mark.parametrize("fault", ["none", "hung", "dead", "black hole", "mute"])
def test_c111_the_loop_is_never_blocked(
    run: Run, make_local_masters: MakeLocalMasters, make_fake: MakeFake, fault: str
) -> None:
    """Two hundred tasks while masters hang, are gone, take no connection, or say nothing.

    The best of three runs is compared: what blocks would be in each, what the machine does in one.
    """
    masters = make_local_masters(3)
    holding = contextlib.ExitStack()
    places: list[Any] = [master.url for master in masters]
    if fault == "dead":
        with closed_port() as port:
            places = [f"redis://127.0.0.1:{port}/{db}" for db in range(3)]
    elif fault == "black hole":
        holes = [holding.enter_context(black_hole()) for _ in range(3)]
        places = [f"redis://127.0.0.1:{hole.getsockname()[1]}" for hole in holes]
    elif fault == "mute":
        places = [make_fake(lambda _command, _talk: SILENCE) for _ in range(3)]

    async def main() -> None:
        async with ready(places, warm=False, master_timeout=NT, connect_timeout=300) as client:
            if fault in ("none", "hung"):
                await client.connect()
            if fault == "hung":
                for master in masters:
                    master.pause()
            worst = []
            computed = []
            for _ in range(3):
                async with watched() as gaps:
                    await contend(client, 200, 0.4)
                worst.append(max(wall for wall, _ in gaps))
                computed.append(max(cpu for _, cpu in gaps))
            for master in masters:
                if fault == "hung":
                    master.resume()
            assert min(worst) < WALL_GAP_MS, worst
            assert min(computed) < GAP_MS, computed

    with holding:
        run(main())


# -- many tasks ----------------------------------------------------------------------------------


def test_two_thousand_tasks_at_once(run: Run, masters: LocalMasters) -> None:
    """More than may be under way at once: the rest wait for their turns."""

    async def main() -> None:
        async with ready(masters, master_timeout=5000) as client:
            locks = await asyncio.gather(*[client.acquire(f"r{i}", HOUR) for i in range(2500)])
            assert all(locks)
            assert all(await asyncio.gather(*[lock.release() for lock in locks if lock]))
            assert client._driver.inside == 0
            await soon(lambda: all(row["owed"] == 0 for row in client.stats()["masters"]))
        assert are_clean(masters)

    run(main())


def test_who_waits_for_a_turn_may_be_cancelled(run: Run, masters: LocalMasters) -> None:
    async def main() -> None:
        async with ready(masters, master_timeout=5000) as client:
            tasks = [asyncio.ensure_future(client.acquire(f"r{i}", HOUR)) for i in range(2000)]
            await asyncio.sleep(0)
            for task in tasks[1::2]:
                task.cancel()
            locks = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(lock, aio.Lock) for lock in locks[::2])
            assert all(isinstance(lock, asyncio.CancelledError) for lock in locks[1::2])
            assert all(await client.release_many(locks[::2]))  # type: ignore[arg-type]
            await soon(lambda: are_clean(masters))
            assert client._driver.inside == 0

    run(main())


def test_a_round_knows_since_when_it_waits_for_its_turn(run: Run, masters: LocalMasters) -> None:
    async def main() -> None:
        async with ready(masters, master_timeout=5000) as client:
            fleet, settings, driver = client._fleet, client._settings, client._driver
            rounds = [
                driver.attempt(plan.attempt(fleet, settings, b"res %d" % i, HOUR))
                for i in range(1100)
            ]

            async def wait_for(attempt: Any) -> None:
                await attempt

            await asyncio.gather(*map(wait_for, rounds))
            assert [attempt.op.verdict() for attempt in rounds] == [rules.YES] * 1100
            waited = [attempt.op for attempt in rounds if attempt.op.asked_ns]
            assert waited == [attempt.op for attempt in rounds[1024:]]
            assert all(op.asked_ns < op.start_ns for op in waited)
        for master in masters:
            master.command("FLUSHALL")

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("distinct", [False, True])
def test_ten_thousand_tasks(run: Run, masters: LocalMasters, distinct: bool) -> None:
    """For one lock or for distinct ones: all finish, and memory returns."""

    async def main() -> None:
        async with ready(masters, master_timeout=10_000, retry_delay=500) as client:

            async def one(i: int) -> bool:
                # For one lock, all but some find it taken in the end; nobody is refused otherwise.
                name = f"res {i}" if distinct else "res"
                lock = await client.acquire(name, HOUR, wait=math.inf if distinct else 2000)
                return lock is not None and await lock.release()

            async def all_of_them() -> Counter[bool]:
                return Counter(await asyncio.gather(*[one(i) for i in range(10_000)]))

            await all_of_them()
            gc.collect()
            tracemalloc.start()
            got = await all_of_them()
            await soon(lambda: not client._fleet.unsettled, 20)
            await asyncio.sleep(0.1)
            gc.collect()
            size, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert got[True] == 10_000 if distinct else got[True] > 0
            # Two MB are the table of all tasks, which asyncio keeps; a round of each would be ten.
            assert size < 4_000_000
            assert client._driver.inside == 0

    run(main())


def test_extends_of_one_lock_take_turns(run: Run, masters: LocalMasters) -> None:
    """The last one that was asked for is what counts."""

    async def main() -> None:
        async with ready(masters) as client:
            lock = await client.acquire("res", HOUR)
            assert lock
            assert all(await asyncio.gather(*[lock.extend(60_000 + i) for i in range(50)]))
            assert lock.ttl == 60_049
            assert await client.extend_many([lock], 70_000) == [True]
            assert await lock.release()

    run(main())


def test_a_stalled_loop_is_not_the_masters_fault(run: Run, masters: LocalMasters) -> None:
    """Something else keeps the loop for longer than a round may take, at every point of one."""

    async def main() -> None:
        async with ready(masters, master_timeout=NT) as client:
            for turns in range(8):
                task = asyncio.ensure_future(client.acquire("res", HOUR))
                for _ in range(turns):
                    await asyncio.sleep(0)
                time.sleep(1.5 * NT / 1000)
                lock = await task
                assert lock
                assert await lock.release()
            assert {row["state"] for row in client.stats()["masters"]} == {"ready"}
            assert {row["reconnects"] for row in client.stats()["masters"]} == {0}

    run(main())


# -- bodies --------------------------------------------------------------------------------------


@pytest.mark.case("C109")
def test_c109_a_body_that_is_cancelled_or_thrown_away(run: Run, masters: LocalMasters) -> None:
    async def main() -> None:
        async with ready(masters) as client:
            entered = asyncio.Event()

            async def work() -> None:
                async with client.lock("res", HOUR):
                    entered.set()
                    await asyncio.sleep(60)

            task = asyncio.ensure_future(work())
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await soon(lambda: are_clean(masters))

            async def numbers() -> AsyncIterator[int]:
                async with client.lock("res", HOUR):
                    yield 1

            generator = numbers()
            assert await anext(generator) == 1
            await soon(lambda: keys_of(masters) == [[b"res"]] * 3)
            await generator.aclose()  # type: ignore[attr-defined]
            await soon(lambda: are_clean(masters))

            # GeneratorExit, where nothing may be awaited any more.
            entered.clear()
            coroutine = work()
            while not entered.is_set():  # stepped by hand, as a task would
                future = coroutine.send(None)
                future._asyncio_future_blocking = False
                if not entered.is_set():
                    await asyncio.wait([future])
            await soon(lambda: keys_of(masters) == [[b"res"]] * 3)
            coroutine.close()
            await soon(lambda: are_clean(masters))

    run(main())


@pytest.mark.case("C162")
def test_c162_the_decorator_of_coroutine_functions(run: Run, masters: LocalMasters) -> None:
    async def main() -> None:
        async with ready(masters) as client:
            inside = 0

            @client.lock("res", HOUR, wait=10_000)
            async def work(number: int) -> int:
                """Doc."""
                nonlocal inside
                inside += 1
                assert inside == 1
                await asyncio.sleep(0.01)
                inside -= 1
                return number

            assert inspect.iscoroutinefunction(work)
            assert (work.__name__, work.__doc__) == ("work", "Doc.")
            assert await asyncio.gather(*[work(i) for i in range(5)]) == [0, 1, 2, 3, 4]
            lock = await client.acquire("other", HOUR)
            assert lock

            @client.lock("other", HOUR, wait=0)
            async def never() -> None:
                pytest.fail("the body ran")

            with pytest.raises(NotAcquired):
                await never()
            with pytest.raises(TypeError, match="coroutine function"):
                client.lock("res", HOUR)(lambda: None)  # type: ignore[arg-type, return-value]
            context = client.lock("res", HOUR)
            async with context:
                with pytest.raises(RuntimeError, match="in use"):
                    await context.__aenter__()
            with pytest.raises(LockLost):
                async with lock:
                    for master in masters:
                        master.command("FLUSHALL")

    run(main())
