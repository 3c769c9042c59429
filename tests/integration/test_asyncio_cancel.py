"""A task is cancelled wherever it waits: no key is left, and no reply goes to the wrong caller."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from integration.bridge import Run, ready, soon
from integration.fakes import PASS, FakeMaster, MakeFake, MakeProxy
from integration.helpers import HOUR, NT, SLACK_MS, are_clean, clients_of, eventually, keys_of

from redlock_fast import asyncio as aio
from redlock_fast.testing import LocalMasters


def slow_fakes(make_fake: MakeFake, pause: float) -> list[FakeMaster]:
    """Masters that answer everything, the greeting too, a little later."""
    return [make_fake(lambda _command, _talk: [pause, PASS]) for _ in range(3)]


async def cancelled_after(ms: float, coroutine: Any) -> Any:
    """Cancel it after so long, unless it has ended: its result, or the CancelledError."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(ms / 1000)
    task.cancel()
    began = asyncio.get_running_loop().time()
    result: Any = (await asyncio.gather(task, return_exceptions=True))[0]
    assert (asyncio.get_running_loop().time() - began) * 1000 < SLACK_MS
    return result


@pytest.mark.case("C104")
@pytest.mark.parametrize("verb", ["acquire", "acquire_many", "wait", "context"])
def test_c104_an_acquire_cancelled_at_any_time(run: Run, make_fake: MakeFake, verb: str) -> None:
    """While it connects, greets, asks, pauses before a retry; and then all is as if it never was.

    Each step takes 10 ms here: connecting is over after two, a try after one, a pause is any.
    """
    fakes = slow_fakes(make_fake, 0.01)

    async def main() -> None:
        ends = set()
        for ms in range(0, 90, 6):
            async with ready(fakes, warm=False, retry_delay=20) as client:
                call: Any = client.acquire("res", HOUR)
                if verb == "acquire_many":
                    call.close()
                    call = client.acquire_many(["res", "other"], HOUR)
                elif verb == "context":
                    call.close()
                    call = client.lock("res", HOUR).__aenter__()
                elif verb == "wait":
                    call.close()
                    for fake in fakes:
                        fake.data[b"res"] = (b"rival", float("inf"))
                    call = client.acquire("res", HOUR, wait=10_000)
                result = await cancelled_after(ms, call)
                ends.add(type(result))
                if not isinstance(result, asyncio.CancelledError):
                    for lock in result if isinstance(result, list) else [result]:
                        assert await lock.release()
                # The same connections serve the next call, with its own replies.
                lock = await client.acquire("next", HOUR)
                assert lock
                assert await client.owned(lock)
                assert await client.acquire("next", HOUR) is None
                assert await lock.release()
                assert await client.release(lock) is False
            for fake in fakes:
                assert set(fake.data) <= {b"res"} if verb == "wait" else not fake.data
        assert asyncio.CancelledError in ends
        assert len(ends) == (1 if verb == "wait" else 2)

    run(main())


@pytest.mark.case("C104")
@pytest.mark.parametrize("turns", range(12))
def test_c104_an_acquire_cancelled_after_so_many_turns(
    run: Run, masters: LocalMasters, turns: int
) -> None:
    async def main() -> None:
        async with ready(masters) as client:
            task = asyncio.ensure_future(client.acquire("res", HOUR))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            (lock,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(lock, aio.Lock):
                assert await lock.release()
            await soon(lambda: are_clean(masters))
            second = await client.acquire("res", HOUR)
            assert second
            assert await client.owned(second)
            assert await second.release()
        assert client.stats()["masters"][0]["reconnects"] == 0

    run(main())


@pytest.mark.case("C104")
def test_c104_a_timeout_around_an_acquire(
    run: Run, masters: LocalMasters, make_proxy: MakeProxy
) -> None:
    proxies = [make_proxy(master) for master in masters]

    async def main() -> None:
        async with ready(proxies, master_timeout=5000) as client:
            for proxy in proxies:
                proxy.down.holding = True
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.acquire("res", HOUR), 0.05)
            for proxy in proxies:
                proxy.heal()
            await soon(lambda: are_clean(masters))
            assert await client.acquire("res", HOUR)
            assert {row["reconnects"] for row in client.stats()["masters"]} == {0}

    run(main())


@pytest.mark.case("C105")
@pytest.mark.parametrize("turns", [*range(8), 1000])
def test_c105_a_release_cancelled_after_so_many_turns(
    run: Run, masters: LocalMasters, turns: int
) -> None:
    """Before it has begun nothing has happened; afterwards it is not stopped any more."""

    async def main() -> None:
        async with ready(masters) as client:
            lock = await client.acquire("res", HOUR)
            assert lock
            task = asyncio.ensure_future(lock.release())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if turns == 0:
                assert lock.held
                assert await lock.release()
            else:
                assert not lock.held
                await soon(lambda: are_clean(masters))
                # It knows its token still; the masters do not.
                assert await lock.release() is False
            assert result is True or isinstance(result, asyncio.CancelledError)
        assert are_clean(masters)

    run(main())


def test_a_cancelled_extend_never_claims_more(
    run: Run, masters: LocalMasters, make_proxy: MakeProxy
) -> None:
    proxies = [make_proxy(master) for master in masters]

    async def main() -> None:
        async with ready(proxies) as client:
            lock = await client.acquire("res", 60_000)
            assert lock
            for proxy in proxies:
                proxy.down.holding = True
            result = await cancelled_after(20, lock.extend(HOUR))
            assert isinstance(result, asyncio.CancelledError)
            assert 0 < lock.remaining() <= 60_000
            for proxy in proxies:
                proxy.heal()
            assert await lock.extend(5000)
            assert lock.remaining() <= 5000
            assert await lock.release()

    run(main())


@pytest.mark.case("C107")
def test_c107_a_storm_of_cancellations(run: Run, masters: LocalMasters) -> None:
    """Five hundred tasks, a cold client, everything cancelled within 30 ms."""
    chance = random.Random(107)

    async def main() -> None:
        async with ready(masters, warm=False) as client:

            async def one(i: int) -> None:
                await client.acquire(f"res {i % 50}", HOUR, wait=HOUR)

            tasks = [asyncio.ensure_future(one(i)) for i in range(500)]
            loop = asyncio.get_running_loop()
            for task in tasks:
                loop.call_later(chance.random() * 0.03, task.cancel)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
            for master in masters:
                master.command("FLUSHALL")  # what was granted in time
            locks = await asyncio.gather(*[client.acquire(f"new {i}", HOUR) for i in range(10)])
            assert all(locks)
            assert all(await client.release_many([lock for lock in locks if lock]))
            assert client._driver.inside == 0
            assert all(clients_of(master) <= 2 for master in masters)

    run(main())
    eventually(lambda: are_clean(masters))


def test_what_a_hung_master_was_sent_is_cleaned_up_when_it_goes_on(
    run: Run, masters: LocalMasters
) -> None:
    """In the background: no call comes along, and there is no thread for it."""

    async def main() -> None:
        async with ready(masters, master_timeout=NT) as client:
            masters[2].pause()
            lock = await client.acquire("res", HOUR)
            assert lock
            result = await cancelled_after(0, lock.release())
            assert result is True or isinstance(result, asyncio.CancelledError)
            if not result:
                assert await lock.release()
            await asyncio.sleep(2 * NT / 1000)
            masters[2].resume()
            await soon(lambda: keys_of(masters) == [[], [], []])
            await soon(lambda: not client._fleet.indebted)

    run(main())
