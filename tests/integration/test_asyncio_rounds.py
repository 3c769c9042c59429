"""How a task waits for its round: woken with others, in its own context, by a future."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from integration.bridge import LOOPS, Run, new_loop, ready, soon
from integration.helpers import HOUR, are_clean, eventually, keys_of

from redlock_fast import asyncio as aio
from redlock_fast.testing import LocalMasters

TASKS = 600  # more than are woken in a row


def task_of_python(loop: asyncio.AbstractEventLoop, coroutine: Any, **keywords: Any) -> Any:
    """The task that asyncio has in Python, where there is no C."""
    return asyncio.tasks._PyTask(coroutine, loop=loop, **keywords)  # type: ignore[attr-defined]


FACTORIES = [None, task_of_python]

if sys.version_info >= (3, 12):

    def eager_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **keywords: Any) -> Any:
        """The task that runs at once, as far as it gets."""
        keywords.pop("eager_start", None)  # uvloop's, which 3.13.0 does not know
        return asyncio.eager_task_factory(loop, coroutine, **keywords)

    FACTORIES.append(eager_task)


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("debug", [False, True])
def test_each_task_goes_on_as_itself(
    run: Run, masters: LocalMasters, factory: Any, debug: bool
) -> None:
    """Many are woken in a row, each in its own context, as the task that is running."""
    mine: ContextVar[int] = ContextVar("mine")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(debug)
        loop.slow_callback_duration = 10
        loop.set_task_factory(factory)
        mine.set(-1)
        async with ready(masters, master_timeout=10_000) as client:

            async def work(i: int) -> None:
                task = asyncio.current_task()
                for turn in range(3):
                    mine.set(3 * i + turn)
                    lock = await client.acquire(f"res {i}", HOUR)
                    assert lock
                    assert (mine.get(), asyncio.current_task()) == (3 * i + turn, task)
                    assert await lock.release()
                    assert (mine.get(), asyncio.current_task()) == (3 * i + turn, task)

            await asyncio.gather(*[loop.create_task(work(i)) for i in range(TASKS)])
            assert mine.get() == -1
            assert client._driver.inside == 0

    run(main())
    assert are_clean(masters)


def test_a_task_that_is_woken_cancels_the_others(run: Run, masters: LocalMasters) -> None:
    """Their rounds have ended as well, in the same read: what they were granted is deleted."""

    async def main() -> None:
        async with ready(masters) as client:
            tasks: list[Any] = []

            async def work(i: int) -> bool:
                lock = await client.acquire(f"res {i}", HOUR)
                for task in tasks:
                    if task is not asyncio.current_task():
                        task.cancel("enough")
                return lock is not None and await lock.release()

            for _ in range(5):
                tasks[:] = [asyncio.ensure_future(work(i)) for i in range(50)]
                done = await asyncio.gather(*tasks, return_exceptions=True)
                # (Who was cancelled may cancel nobody, and somebody was first.)
                assert {type(each) for each in done} <= {bool, asyncio.CancelledError}
                assert asyncio.CancelledError in map(type, done)
            assert client._driver.inside == 0
            await soon(lambda: are_clean(masters))

    run(main())


def test_the_ways_to_bound_a_call(run: Run, masters: LocalMasters) -> None:
    async def main() -> None:
        async with ready(masters, master_timeout=5000) as client:
            assert await asyncio.wait_for(client.acquire("a", HOUR), 5)
            held = await asyncio.shield(client.acquire("b", HOUR))
            assert held
            done, _ = await asyncio.wait([asyncio.ensure_future(held.release())])
            assert done.pop().result() is True
            for master in masters:
                master.pause()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.acquire("c", HOUR), 0.02)
            # Who shields it may be cancelled; the call goes on.
            call = asyncio.ensure_future(client.acquire("d", HOUR))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(call), 0.02)
            if sys.version_info >= (3, 11):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await client.acquire("e", HOUR)
                with pytest.raises(ExceptionGroup):  # noqa: F821
                    async with asyncio.TaskGroup() as group:
                        group.create_task(client.acquire("f", HOUR))
                        await asyncio.sleep(0)
                        raise ValueError
            for master in masters:
                master.resume()
            lock = await call
            assert lock
            await soon(lambda: client._driver.inside == 0 and not client._fleet.unsettled)
            for master in masters:
                assert set(master.command("KEYS", "*")) == {b"a", b"d"}

    run(main())


@pytest.mark.parametrize("kind", LOOPS)
def test_who_ends_the_loop_takes_nobody_along(masters: LocalMasters, kind: str) -> None:
    """A task raises SystemExit, in the middle of a row of tasks that are woken."""
    loop = new_loop(kind)
    client = aio.Redlock([master.url for master in masters], master_timeout=5000)
    ends = []

    async def work(i: int) -> None:
        lock = await client.acquire(f"res {i}", HOUR)
        if i == 5:
            raise SystemExit(7)
        assert lock
        ends.append(await lock.release())

    async def main() -> None:
        await client.connect()
        tasks.extend(asyncio.ensure_future(work(i)) for i in range(20))
        await asyncio.wait(tasks)

    tasks: list[asyncio.Future[None]] = []
    whole = loop.create_task(main())
    with pytest.raises(SystemExit):
        loop.run_until_complete(whole)
    loop.run_until_complete(whole)
    assert ends == [True] * 19
    assert isinstance(tasks[5].exception(), SystemExit)
    loop.run_until_complete(client.aclose())
    loop.close()
    eventually(lambda: keys_of(masters) == [[b"res 5"]] * 3)
    for master in masters:
        master.command("FLUSHALL")


# -- the future that a task waits for -------------------------------------------------------------


async def until_it_waits(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Step it by hand, as a task would: the future that it waits for."""
    future = coroutine.send(None)
    assert asyncio.isfuture(future)
    assert future._asyncio_future_blocking is True
    future._asyncio_future_blocking = False
    assert future.get_loop() is asyncio.get_running_loop()
    return future


def test_who_is_no_task_is_called_as_well(masters: LocalMasters) -> None:
    """Whatever waits for the future of a round, and however many."""
    problems: list[dict[str, Any]] = []
    heard: list[Any] = []
    where: ContextVar[str] = ContextVar("where")

    def hear(what: Any) -> Callable[[Any], None]:
        return lambda future: heard.append((what, where.get(""), future.done()))

    def fail(_: object) -> None:
        raise ValueError("of a callback")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
        async with ready(masters) as client:
            coroutine = client.acquire("res", HOUR)
            future = await until_it_waits(coroutine)
            assert (future.done(), future.cancelled()) == (False, False)
            where.set("here")
            elsewhere = copy_context()
            elsewhere.run(where.set, "elsewhere")
            removed = hear("removed")
            future.add_done_callback(fail)
            future.add_done_callback(hear(1))
            future.add_done_callback(removed)
            future.add_done_callback(hear(2), context=elsewhere)
            future.add_done_callback(removed)
            assert future.remove_done_callback(removed) == 2
            where.set("changed")
            await asyncio.wait([future])
            assert heard == [(1, "here", True), (2, "elsewhere", True)]
            assert [str(problem["exception"]) for problem in problems] == ["of a callback"]
            assert (future.done(), future.cancelled(), future.result()) == (True, False, None)
            with pytest.raises(StopIteration) as stop:
                coroutine.send(None)
            lock = stop.value.value
            assert isinstance(lock, aio.Lock)
            assert await lock.release()

    asyncio.run(main())


def test_a_round_that_is_cancelled(masters: LocalMasters) -> None:
    async def main() -> None:
        async with ready(masters) as client:
            coroutine = client.acquire("res", HOUR)
            future = await until_it_waits(coroutine)
            heard: list[Any] = []
            future.add_done_callback(heard.append)
            future.add_done_callback(heard.append)
            assert future.cancel("that is why")
            await asyncio.sleep(0)
            assert heard == [future, future]
            with pytest.raises(asyncio.CancelledError, match="that is why") as cancelled:
                future.result()
            with pytest.raises(RuntimeError, match="await wasn't used with future"):
                coroutine.send(None)
            coroutine = client.acquire("other", HOUR)
            future = await until_it_waits(coroutine)
            with pytest.raises(RuntimeError, match="await wasn't used with future"):
                coroutine.send(None)  # it is not over
            coroutine = client.acquire("third", HOUR)
            await until_it_waits(coroutine)
            with pytest.raises(asyncio.CancelledError) as thrown:
                coroutine.throw(cancelled.value)
            assert thrown.value is cancelled.value
            assert client._driver.inside == 0
            await soon(lambda: are_clean(masters))

    asyncio.run(main())


def test_futures_are_used_again_but_not_kept_by_thousands(run: Run, masters: LocalMasters) -> None:
    """And none of them remembers who waited for it, or was cancelled."""

    def futures() -> int:
        gc.collect()
        return sum(type(it) is asyncio.Future for it in gc.get_objects())

    async def main() -> None:
        async with ready(masters, master_timeout=20_000) as client:

            async def work(i: int) -> bool:
                lock = await client.acquire(f"res {i}", HOUR)
                return lock is not None and await lock.release()

            before = futures()
            for count in (3000, 10, 3000):
                tasks = [asyncio.ensure_future(work(i)) for i in range(count)]
                await asyncio.sleep(0)
                for task in tasks[::3]:
                    task.cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(each) for each in done[::3]} == {asyncio.CancelledError}
                assert all(each is True for i, each in enumerate(done) if i % 3)
                left = list(map(weakref.ref, tasks))
                del tasks, done, task
                await asyncio.sleep(0)  # who called us had them
                assert futures() - before <= 1100
                assert not any(it() for it in left)
                assert client._driver.inside == 0
            await soon(lambda: are_clean(masters))

    run(main())


async def stepped(coroutine: Coroutine[Any, Any, Any], wait: Callable[[Any], Any]) -> Any:
    """Run it by hand, within a task that waits for each of its futures."""
    try:
        while True:
            future = coroutine.send(None)
            future._asyncio_future_blocking = False
            await wait(future)
    except StopIteration as stop:
        return stop.value


async def as_it_is(future: asyncio.Future[None]) -> None:
    await future


@pytest.mark.parametrize(
    "wait", [as_it_is, asyncio.shield, lambda it: asyncio.wait([it]), lambda it: wait_for(it)]
)
def test_a_task_that_waits_for_the_future_itself(
    run: Run, masters: LocalMasters, wait: Callable[[Any], Any]
) -> None:
    """It has to find it resolved, and nobody else may be given it."""

    async def main() -> None:
        async with ready(masters) as client:
            locks = await asyncio.gather(
                *[stepped(client.acquire(f"res {i}", HOUR), wait) for i in range(20)],
                *[client.acquire(f"other {i}", HOUR) for i in range(20)],
            )
            assert all(locks)
            done = await asyncio.gather(*[stepped(client.release(lock), wait) for lock in locks])
            assert done == [True] * 40
            assert client._driver.inside == 0
        assert are_clean(masters)

    run(main())


async def wait_for(future: asyncio.Future[None]) -> None:
    await asyncio.wait_for(future, 20)


def test_what_a_cancelled_task_was_told_is_not_kept(run: Run, masters: LocalMasters) -> None:
    class Why:
        pass

    async def main() -> None:
        async with ready(masters) as client:
            lock = await client.acquire("res", HOUR)
            assert lock
            assert await lock.release()
            for master in masters:
                master.pause()
            task = asyncio.ensure_future(client.acquire("res", HOUR))
            await asyncio.sleep(0.01)
            why = Why()
            left = weakref.ref(why)
            task.cancel(why)
            with pytest.raises(asyncio.CancelledError):
                await task
            for master in masters:
                master.resume()
            del why, task
            await asyncio.sleep(0)
            gc.collect()
            assert left() is None
            await soon(lambda: are_clean(masters))

    run(main())


def test_a_task_that_could_not_be_woken_harms_no_other(masters: LocalMasters) -> None:
    """Some run a loop inside one of its tasks, where asyncio lets no other task run."""
    problems: list[str] = []
    loop: Any = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, what: problems.append(str(what["exception"])))

    async def main() -> None:
        async with ready(masters) as client:
            lost = loop.create_task(client.acquire("lost", HOUR))
            await asyncio.sleep(0)
            while not problems:
                loop._run_once()
            assert "while another task" in problems.pop()
            other = loop.create_task(client.acquire("other", HOUR))
            await asyncio.sleep(0)
            lost.cancel()
            lock = await other
            assert lock
            assert await lock.release()
            # (It is lost with futures that are resolved by asyncio, too.)
            lost._log_destroy_pending = False
            lost.get_coro().close()
            assert client._driver.inside == 0
            await soon(lambda: are_clean(masters))

    loop.run_until_complete(main())
    loop.close()
    assert problems == []


OF_PYTHON = """
import asyncio, sys
from asyncio import futures, tasks
asyncio.Future = futures.Future = futures._PyFuture
asyncio.Task = tasks.Task = tasks._PyTask
from redlock_fast.asyncio import Redlock

problems = []

async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, what: problems.append(what))
    async with Redlock(sys.argv[1:]) as client:
        await client.connect()
        coroutine = client.acquire("by hand", 60_000)
        future = coroutine.send(None)
        assert type(future) is futures._PyFuture
        calls = [asyncio.ensure_future(client.acquire(f"res {i}", 60_000)) for i in range(30)]
        await asyncio.sleep(0)
        for call in calls[::3]:
            call.cancel()
        got = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in got[::3]} == {asyncio.CancelledError}
        for _ in range(1000):
            if future.done():
                break
            await asyncio.sleep(0.001)
        try:
            coroutine.send(None)
        except StopIteration as stop:
            assert await stop.value.release()
        held = [each for i, each in enumerate(got) if i % 3]
        assert await client.release_many(held) == [True] * 20
        assert client._driver.inside == 0
    assert problems == [], problems

asyncio.run(main())
"""


def test_futures_and_tasks_in_python(masters: LocalMasters) -> None:
    """As where there are none in C, or where somebody put these in their place."""
    command = [sys.executable, "-c", OF_PYTHON, *[master.url for master in masters]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    eventually(lambda: are_clean(masters))


def test_a_fork_in_the_middle_of_a_call(masters: LocalMasters) -> None:
    """The child owns nothing of what its parent is about to get."""

    async def main() -> None:
        async with ready(masters) as client:
            coroutine = client.acquire("res", HOUR)
            future = await until_it_waits(coroutine)
            await asyncio.wait([future])
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    coroutine.send(None)
                except RuntimeError as error:
                    code = 0 if "forked" in str(error) else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            with pytest.raises(StopIteration) as stop:
                coroutine.send(None)
            assert await stop.value.value.release()

    asyncio.run(main())
    eventually(lambda: are_clean(masters))


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_dropped_with_calls_under_way_leaves_nothing(
    masters: LocalMasters, kind: str
) -> None:
    """Tasks and rounds refer to each other: the garbage collector must see through that."""

    def drop(calls: int) -> None:
        loop = new_loop(kind)
        loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending!"
        client = aio.Redlock([master.url for master in masters], master_timeout=600_000)
        loop.run_until_complete(client.connect())
        for master in masters:
            master.pause()
        try:
            tasks = [loop.create_task(client.acquire(f"res {i}", HOUR)) for i in range(calls)]
            loop.run_until_complete(asyncio.sleep(0.01))
            left.extend(map(weakref.ref, [client, *tasks]))
            loop.close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                del client, tasks, loop
                gc.collect()
        finally:
            for master in masters:
                master.resume()

    left: list[Any] = []
    drop(100)
    before = sys.getallocatedblocks()
    for _ in range(5):
        left.clear()
        drop(100)
        assert [it() for it in left if it() is not None] == []
    assert sys.getallocatedblocks() - before < 300  # one for each call would be 500


@pytest.mark.parametrize("verb", ["acquire", "acquire_many"])
def test_a_task_that_nobody_keeps_is_kept_while_it_waits(
    run: Run, masters: LocalMasters, verb: str
) -> None:
    """asyncio itself holds tasks weakly; whoever has them wait has to keep them alive."""

    async def main() -> None:
        got: list[Any] = []
        async with ready(masters, master_timeout=10_000) as client:

            async def work() -> None:
                what: Any = "res" if verb == "acquire" else ["res", "other"]
                got.append(await getattr(client, verb)(what, HOUR))

            for master in masters:
                master.pause()
            try:
                left = weakref.ref(asyncio.get_running_loop().create_task(work()))
                for _ in range(3):
                    await asyncio.sleep(0.02)
                    gc.collect()
                assert left() is not None
            finally:
                for master in masters:
                    master.resume()
            await soon(lambda: got)
            assert got[0]

    run(main())


def test_no_memory_for_a_lock_that_was_granted(run: Run, masters: LocalMasters) -> None:
    """What could not be returned is deleted at once, not with the next call."""

    class Unmade(aio.Lock):
        def __new__(cls) -> Unmade:
            raise MemoryError("no room for a lock")

    async def main() -> None:
        async with ready(masters) as client:
            client._settings.lock_type = Unmade
            with pytest.raises(MemoryError, match="no room"):
                await client.acquire("res", HOUR)
            assert client.stats()["acquired"] == 1
            await soon(lambda: are_clean(masters))

    run(main())
