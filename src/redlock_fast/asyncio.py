"""The asyncio facade: `Redlock` and `Lock`, whose verbs are awaited; drives plans under a loop.

One client belongs to one event loop and is shared by all its tasks; it has one connection per
master. Verbs, arguments, results and errors are those of `redlock_fast.Redlock`; no rule of the
lock is decided here: see `rules` and `plan`.

    from redlock_fast.asyncio import Redlock

    async with Redlock(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"]) as client:
        async with client.lock("invoice:17", ttl=10_000):
            ...
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from redlock_fast import plan
from redlock_fast._core.io import now_ns
from redlock_fast.arguments import Milliseconds, wait_ns
from redlock_fast.drive_aio import Driver, Round
from redlock_fast.errors import ClosedError, NoQuorum
from redlock_fast.holds import BaseClient, BaseContext, BaseLock
from redlock_fast.plan import deleted, deletion, granted
from redlock_fast.wrap import wrapped

__all__ = ["Lock", "LockContext", "Redlock"]

P = ParamSpec("P")
R = TypeVar("R")


class Lock(BaseLock):
    """A lock that was granted. Made by `Redlock`, never by hand.

    It is held until it is released, lost, or past its deadline on our own monotonic clock. A lock
    that is dropped is not released; its ttl ends it.
    """

    async def release(self) -> bool:
        """Release the lock; see `Redlock.release`."""
        released: bool = await self.owner.release(self)
        return released

    async def extend(self, ttl: Milliseconds | None = None) -> bool:
        """Extend the lock in one round; see `Redlock.extend`."""
        extended: bool = await self.owner.extend(self, ttl)
        return extended

    async def __aenter__(self) -> Lock:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release. A lock that was lost meanwhile raises `LockLost`, one whose release no quorum
        confirmed `NoQuorum`; when the body raised, its exception comes out, with a note.
        """
        if not self._to_leave():
            return
        if exc_type is GeneratorExit:
            # The coroutine is thrown away: it may not wait any more.
            self.owner._release_unseen(self)
            return
        expired = now_ns() >= self.deadline_ns
        released = False
        failure = None
        try:
            released = self.state != plan.LOST and await self.release()
        except (NoQuorum, ClosedError) as error:
            failure = error
        self._leave(exc, released, expired, failure)

    def _serial(self) -> asyncio.Lock:
        """Extends of one lock are serialised by this."""
        loop = asyncio.get_running_loop()
        if self.guard is None or self.guard[0] is not loop:
            self.guard = (loop, asyncio.Lock())
        guard: asyncio.Lock = self.guard[1]
        return guard


class Redlock(BaseClient):
    """A Redlock client for N independent Redis or Valkey masters, shared by all tasks of a loop.

    The constructor does no I/O and needs no loop; arguments and errors are those of
    `redlock_fast.Redlock`. The client is bound to the loop that it is first used on; while that
    one is open, use from another one is a `RuntimeError`; after it was closed, the client goes on
    with the next one.

    A task may be cancelled, or time out, wherever it waits: what it had sent is cleaned up in the
    background, on the same connections.
    """

    _lock_type = Lock

    def _set_up(self) -> None:
        self._driver = Driver(self._fleet)

    # -- one lock --------------------------------------------------------------------------------

    async def acquire(
        self,
        resource: str | bytes,
        ttl: Milliseconds,
        *,
        wait: Milliseconds | float | None = None,
    ) -> Lock | None:
        """Acquire the lock of a resource; None when somebody else holds it.

        Arguments and errors: see `redlock_fast.Redlock.acquire`.
        """
        limit = None if wait is None else wait_ns(wait, plan.FOREVER)
        attempt = self._attempt(resource, ttl)
        await attempt
        lock = self._granted(attempt)
        if lock is None:
            lock, _ = await self._driver.drive(self._plan_again(attempt, limit))
        return self._claimed(lock, resource)  # type: ignore[no-any-return]

    async def extend(self, lock: Lock, ttl: Milliseconds | None = None) -> bool:
        """Extend a lock to `ttl` ms from now, in one round; False: it is lost.

        Arguments and errors: see `redlock_fast.Redlock.extend`.
        """
        ms = self._extension_ms(lock, ttl)
        if ms < 0:
            return False
        async with lock._serial():
            results, op = await self._driver.drive(self._plan_extend([lock], ms))
        return self._confirmed(results[0], op, "cannot extend")

    async def release(self, lock: Lock) -> bool:
        """Release a lock on every master; True: it was ours on a quorum until now.

        Once begun, the release is sent completely, even if the task is cancelled; the lock counts
        as no longer held then, and may be released again.
        Errors: see `redlock_fast.Redlock.release`.
        """
        if not self._releasable(lock):
            return False
        attempt = self._deletion(lock)
        await attempt
        return self._deleted(lock, attempt)

    def _release_unseen(self, lock: Lock) -> None:
        """Release a lock, and do not wait for the answers."""
        if self._releasable(lock):
            self._driver.send_off(plan.release(self._fleet, lock))

    # One round without a plan, which most calls are: how it begins, and what it comes to.

    def _attempt(self, resource: str | bytes, ttl: Milliseconds) -> Round:
        """The first try of an acquire."""
        return self._driver.attempt(self._first_try(resource, ttl))

    def _granted(self, attempt: Round) -> Any:
        try:
            return granted(self._fleet, self._settings, attempt.op, attempt.now_ns)
        except BaseException:
            self._driver.settle()
            raise

    def _plan_again(self, attempt: Round, limit: int | None) -> plan.Plan[tuple[Any, Any]]:
        return plan.again(self._fleet, self._settings, attempt.op, attempt.now_ns, limit)

    def _deletion(self, lock: Lock) -> Round:
        self._driver.enter()  # while the lock is as it was
        return self._driver.attempt(deletion(self._fleet, lock))

    def _deleted(self, lock: Lock, attempt: Round) -> bool:
        result: bool | None = deleted(self._fleet, lock, attempt.op)
        if result is None:
            return self._confirmed(result, attempt.op, "cannot confirm the release")
        return result

    def lock(
        self,
        resource: str | bytes,
        ttl: Milliseconds,
        *,
        wait: Milliseconds | float | None = None,
    ) -> LockContext:
        """An async context manager that acquires on enter and releases on exit; also a decorator.

        Enter raises `NotAcquired` when somebody else holds the lock, and what `acquire` raises.
        Exit raises `LockLost` when the lock was lost meanwhile, `NoQuorum` when no quorum confirmed
        the release; the body's own exception comes first. Arguments: see `acquire`.
        """
        return LockContext(self, resource, ttl, wait)

    # -- many locks ------------------------------------------------------------------------------

    async def acquire_many(
        self,
        resources: Iterable[str | bytes],
        ttl: Milliseconds,
        *,
        wait: Milliseconds | float | None = 0,
    ) -> list[Lock | None]:
        """Acquire many locks, each on its own, pipelined; None for each that somebody else holds.

        Arguments and errors: see `redlock_fast.Redlock.acquire_many`.
        """
        names = list(resources)
        steps = self._plan_many(names, ttl, wait)
        if steps is None:
            return []
        locks = await self._driver.drive(steps)
        return [self._claimed(lock, name) for name, lock in zip(names, locks, strict=True)]

    async def extend_many(
        self, locks: Iterable[Lock], ttl: Milliseconds | None = None
    ) -> list[bool]:
        """Extend many locks, pipelined; all are finished before anything is raised.

        Results and errors: see `redlock_fast.Redlock.extend_many`.
        """
        results, todo = self._extensions(locks, ttl)
        failed = None
        for ms, places, held in todo:
            async with AsyncExitStack() as stack:
                # In one order, so that two batches cannot wait for each other.
                for lock in sorted(held, key=id):
                    await stack.enter_async_context(lock._serial())
                answers, op = await self._driver.drive(self._plan_extend(held, ms))
            failed = self._filled(results, places, answers, op, failed)
        return self._finished(results, failed, "cannot extend")

    async def release_many(self, locks: Iterable[Lock]) -> list[bool]:
        """Release many locks, pipelined; all are finished before anything is raised.

        Results and errors: see `redlock_fast.Redlock.release_many`.
        """
        results, places, held = self._releases(locks)
        failed = None
        if held:
            answers, op = await self._driver.drive(plan.release_many(self._fleet, held))
            failed = self._filled(results, places, answers, op, failed)
        return self._finished(results, failed, "cannot confirm the release")

    # -- asking, handing over ---------------------------------------------------------------------

    async def locked(self, resource: str | bytes) -> bool:
        """Does a quorum of masters hold the key, whoever set it? `NoQuorum`: they do not say."""
        return await self._driver.drive(self._plan_locked(resource))

    async def owned(self, lock: Lock) -> bool:
        """Does a quorum of masters still hold our token? Asks them; see `Lock.held` for no I/O."""
        steps = self._plan_owned(lock)
        return steps is not None and await self._driver.drive(steps)

    async def adopt(
        self, resource: str | bytes, token: str | bytes, ttl: Milliseconds
    ) -> Lock | None:
        """Take over a lock that was handed over by its token; None: no quorum holds that token."""
        lock = await self._driver.drive(self._plan_adopt(resource, token, ttl))
        return self._claimed(lock, resource)  # type: ignore[no-any-return]

    async def release_token(self, resource: str | bytes, token: str | bytes) -> bool:
        """Release a lock by its token alone; True: a quorum held that token until now."""
        return await self._driver.drive(self._plan_release_token(resource, token))

    # -- the client ------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Open the connections ahead of the first lock; optional.

        Returns when each is ready or has failed, or after `connect_timeout`; see `stats` for which.
        """
        await self._driver.connect(self._connect_ns)

    async def aclose(self) -> None:
        """Disconnect; held locks are not released. Idempotent.

        Waiting tasks get `ClosedError`. What masters owe is settled first, so that no clean-up is
        lost: until none has answered anything for `master_timeout`, and at most 5 s.
        """
        await self._driver.close(self._patience_ns)

    async def __aenter__(self) -> Redlock:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        driver = self._driver
        if driver is not None and driver.abandon():
            warnings.warn(f"unclosed client {self!r}", ResourceWarning, 2, self)


class LockContext(BaseContext):
    """What `Redlock.lock()` returns: an async context manager, and a decorator for `async def`."""

    __slots__ = ()

    async def __aenter__(self) -> Lock:
        self._begin()
        try:
            client = self._client
            limit = None if self._wait is None else wait_ns(self._wait, plan.FOREVER)
            attempt = client._attempt(self._resource, self._ttl)
            await attempt
            lock, op = client._granted(attempt), attempt.op
            if lock is None:
                lock, op = await client._driver.drive(client._plan_again(attempt, limit))
            client._claimed(lock, self._resource)
            return self._entered(lock, op)  # type: ignore[no-any-return]
        except BaseException:
            self._end()
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lock = self._end()
        if lock is not None:
            await lock.__aexit__(exc_type, exc, traceback)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        """Decorate: every call acquires the lock anew, and releases it."""
        if not inspect.iscoroutinefunction(function):
            raise TypeError("cannot decorate a function that is no coroutine function")
        return wrapped(
            function, lambda: LockContext(self._client, self._resource, self._ttl, self._wait)
        )
