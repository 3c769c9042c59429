"""The asyncio client behind the sync client's verbs, so that one test serves both facades.

A `Bridge` is an event loop in a thread, of a given kind; `bridge.client(...)` makes a client whose
verbs run on that loop while the calling thread waits. `Runner` (the fixture `run`) runs a coroutine
of a test's own. Both fail a test that left an unhandled exception on its loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from integration.helpers import PATIENT, names

from redlock_fast import asyncio as aio

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, None]], None]  # the fixture `run`

LIMIT_S = 60.0  # no test waits longer for its loop
LOOPS = ["asyncio", "uvloop"]


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    """A loop of this kind; the test is skipped where it is not installed."""
    if kind == "asyncio":
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return loop


async def _end_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def soon(predicate: Callable[[], Any], seconds: float = 5.0) -> None:
    """As `eventually`, with the loop going on."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not predicate():
        assert loop.time() < deadline, f"not true within {seconds} s: {predicate}"
        await asyncio.sleep(0.005)


class Runner:
    """Runs coroutines on a fresh loop, and closes it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.problems: list[dict[str, Any]] = []

    def __call__(self, main: Coroutine[Any, Any, T]) -> T:
        loop = new_loop(self.kind)
        loop.set_exception_handler(lambda _, context: self.problems.append(context))
        try:
            return loop.run_until_complete(asyncio.wait_for(main, LIMIT_S))
        finally:
            try:
                loop.run_until_complete(_end_others())
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                loop.close()

    def check(self) -> None:
        """No callback and no task has failed unseen."""
        assert not self.problems


@asynccontextmanager
async def ready(masters: Any, *, warm: bool = True, **settings: Any) -> AsyncIterator[aio.Redlock]:
    """A client as the fixture `make_client` makes them, closed afterwards."""
    places = [getattr(master, "url", master) for master in masters]
    settings = {"retries": 0, "master_timeout": PATIENT, **settings}
    async with aio.Redlock(places, **settings) as client:
        if warm:
            await client.connect()
        yield client


class Bridge:
    """A loop in a thread; `client(...)` makes a client there."""

    def __init__(self, kind: str) -> None:
        self.problems: list[dict[str, Any]] = []
        self.loop = new_loop(kind)
        self.loop.set_exception_handler(lambda _, context: self.problems.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, name="bridge", daemon=True)
        self._thread.start()

    def run(self, awaitable: Awaitable[T]) -> T:
        """Run it on the loop, and wait for its result."""

        async def main() -> T:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(main(), self.loop).result(LIMIT_S)

    def close(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LIMIT_S)
        self.loop.close()
        assert not self.problems

    def client(self, *args: Any, **keywords: Any) -> BridgedClient:
        """A client whose verbs are those of the sync one."""
        return BridgedClient(self, aio.Redlock(*args, **keywords))


def _awaited(bridge: Bridge, target: Any, verb: str) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        coroutine = getattr(target, verb)(*map(_bare, args), **keywords)
        return _dressed(bridge, bridge.run(coroutine))

    return call


def _bare(value: Any) -> Any:
    if isinstance(value, list):
        return [_bare(each) for each in value]
    return value.real if isinstance(value, BridgedLock) else value


def _dressed(bridge: Bridge, value: Any) -> Any:
    if isinstance(value, list):
        return [_dressed(bridge, each) for each in value]
    return BridgedLock(bridge, value) if isinstance(value, aio.Lock) else value


class _Bridged:
    VERBS: frozenset[str] = frozenset()

    def __init__(self, bridge: Bridge, real: Any) -> None:
        self.bridge = bridge
        self.real = real

    def __getattr__(self, name: str) -> Any:
        if name in self.VERBS:
            return _awaited(self.bridge, self.real, name)
        return getattr(self.real, name)

    def __enter__(self) -> Any:
        entered = self.bridge.run(self.real.__aenter__())
        return self if entered is self.real else _dressed(self.bridge, entered)

    def __exit__(self, *exc_info: object) -> None:
        self.bridge.run(self.real.__aexit__(*exc_info))

    def __setattr__(self, name: str, value: Any) -> None:
        target = self if name in ("bridge", "real") else self.real
        object.__setattr__(target, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.real.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self.real)

    def __bool__(self) -> bool:
        return bool(self.real)


class BridgedLock(_Bridged):
    """A lock of an asyncio client; two of the same lock are equal."""

    VERBS = names("release extend")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BridgedLock) and other.real is self.real

    def __hash__(self) -> int:
        return hash(self.real)


class BridgedContext(_Bridged):
    """What `BridgedClient.lock` returns; also a decorator of plain functions."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def body(*args: Any, **keywords: Any) -> Any:
            # In a thread, as the function may use the client.
            return await asyncio.to_thread(function, *args, **keywords)

        body.__name__ = function.__name__
        body.__doc__ = function.__doc__
        decorated = self.real(body)

        def call(*args: Any, **keywords: Any) -> Any:
            return self.bridge.run(decorated(*args, **keywords))

        call.__name__ = decorated.__name__
        call.__doc__ = decorated.__doc__
        return call


class BridgedClient(_Bridged):
    """An asyncio client with the verbs of the sync one."""

    VERBS = names(
        """acquire extend release acquire_many extend_many release_many locked owned adopt
        release_token connect"""
    )

    def lock(self, *args: Any, **keywords: Any) -> BridgedContext:
        return BridgedContext(self.bridge, self.real.lock(*args, **keywords))

    def close(self) -> None:
        self.bridge.run(self.real.aclose())
