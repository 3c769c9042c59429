"""The sync facade: `Redlock` and `Lock`. Checks arguments, drives plans, raises Python errors.

One client is shared by all threads of a process; it has one connection per master. No rule of the
lock is decided here: see `rules` and `plan`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from threading import RLock
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from redlock_fast import plan
from redlock_fast._core.io import now_ns
from redlock_fast.arguments import Milliseconds, wait_ns
from redlock_fast.drive_sync import Driver
from redlock_fast.errors import ClosedError, NoQuorum
from redlock_fast.holds import BaseClient, BaseContext, BaseLock, let_others_run
from redlock_fast.plan import deleted, deletion, granted

P = ParamSpec("P")
R = TypeVar("R")


class Lock(BaseLock):
    """A lock that was granted. Made by `Redlock`, never by hand.

    It is held until it is released, lost, or past its deadline on our own monotonic clock. A lock
    that is dropped is not released; its ttl ends it.
    """

    def release(self) -> bool:
        """Release the lock; see `Redlock.release`."""
        released: bool = self.owner.release(self)
        return released

    def extend(self, ttl: Milliseconds | None = None) -> bool:
        """Extend the lock in one round; see `Redlock.extend`."""
        extended: bool = self.owner.extend(self, ttl)
        return extended

    def __enter__(self) -> Lock:
        return self

    def __exit__(
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
        expired = now_ns() >= self.deadline_ns
        released = False
        failure = None
        try:
            released = self.state != plan.LOST and self.release()
        except (NoQuorum, ClosedError) as error:
            failure = error
        self._leave(exc, released, expired, failure)

    def _serial(self) -> Any:
        """Extends of one lock are serialised by this; most locks never need it."""
        if self.guard is None:
            guard = RLock()
            if self.guard is None:  # still: a finalizer may have run meanwhile
                self.guard = guard
        return self.guard


class Redlock(BaseClient):
    """A Redlock client for N independent Redis or Valkey masters, shared by all threads.

    The constructor does no I/O. All durations are whole milliseconds (int or timedelta).

    Args:
        masters: sequence of URL texts, dicts of redis-py keywords, or clients of redis-py or
            valkey-py, whose address, db, credentials and TLS settings are used.
        retries: tries after the first one; 0: exactly one try.
        retry_delay: upper bound of the random pause between tries, uniform(0, retry_delay). 200 is
            what the clients in the field use.
        clock_drift_factor: share of a ttl that the client's and a server's clock may be wrong by
            together; 0.01 as on the Redlock page's reference client.
        master_timeout: a try ends at most so long after its start, connecting included.
        connect_timeout: bound of one connection's look-up, connect, TLS and log-in; goes on across
            tries.

    Raises:
        ConfigurationError: a master that makes no sense, is named twice, or is not supported.
        TypeError, ValueError: another argument of the wrong type or out of range.
    """

    _lock_type = Lock

    def _set_up(self) -> None:
        self._driver = Driver(self._fleet)

    # -- one lock --------------------------------------------------------------------------------

    def acquire(
        self,
        resource: str | bytes,
        ttl: Milliseconds,
        *,
        wait: Milliseconds | float | None = None,
    ) -> Lock | None:
        """Acquire the lock of a resource.

        Args:
            resource: name of the lock and Redis key: str (UTF-8) or bytes, 1 byte to 64 KiB.
            ttl: expiry of the key, in ms.
            wait: None: `retries` decides; 0: one try; a number of ms: keep trying that long,
                whatever `retries`; `math.inf`: for ever (interruptible).

        Returns:
            The lock, or None when somebody else holds it.

        Raises:
            NoQuorum: too few masters gave a usable answer in the last try, or they came too late.
            ClosedError: the client is closed, or was closed meanwhile.
            TypeError, ValueError: an argument, before anything was sent.
        """
        lock, _ = self._try(resource, ttl, wait)
        self._driver.hand_over(lock)
        return lock

    def _try(
        self, resource: str | bytes, ttl: Milliseconds, wait: Milliseconds | float | None
    ) -> tuple[Lock | None, Any]:
        limit = None if wait is None else wait_ns(wait, plan.FOREVER)
        op = self._first_try(resource, ttl)
        now = self._driver.attempt(op)
        try:
            lock = granted(self._fleet, self._settings, op, now)
        finally:
            self._driver.leave(op)
        if lock is None:
            following = plan.again(self._fleet, self._settings, op, now, limit)
            lock, op = self._driver.drive(following)
        if lock is not None:
            self._claimed(lock, resource)
        return lock, op

    def extend(self, lock: Lock, ttl: Milliseconds | None = None) -> bool:
        """Extend a lock to `ttl` ms from now, in one round; a shorter ttl is set too.

        Args:
            ttl: in ms; None: the ttl it has.

        Returns:
            True; or False: the lock is lost (or was not held), and is not held any more.

        Raises:
            NoQuorum: no quorum of answers; the lock stays held until `remaining()` says 0.
            ValueError: the lock is another client's, or the ttl makes no sense.
            ClosedError: the client is closed.
            RuntimeError: called by a signal handler in the middle of an extension of this lock.
        """
        ms = self._extension_ms(lock, ttl)
        if ms < 0:
            return False
        guard = lock._serial()
        self._driver.seize(guard)
        try:
            results, op = self._driver.drive(self._plan_extend([lock], ms))
        finally:
            guard.release()
        return self._confirmed(results[0], op, "cannot extend")

    def release(self, lock: Lock) -> bool:
        """Release a lock on every master.

        Returns:
            True: it was ours on a quorum until now. False: it was not, or it was released before.

        Raises:
            NoQuorum: no quorum of answers. The lock counts as no longer held, and may be released
                again.
            ValueError: the lock is another client's.
            ClosedError: the client is closed.
        """
        if not self._releasable(lock):
            return False
        op = deletion(self._fleet, lock)
        self._driver.attempt(op)
        result: bool | None = deleted(self._fleet, lock, op)
        self._driver.leave(op)
        if result is None:
            return self._confirmed(result, op, "cannot confirm the release")
        return result

    def lock(
        self,
        resource: str | bytes,
        ttl: Milliseconds,
        *,
        wait: Milliseconds | float | None = None,
    ) -> LockContext:
        """A context manager that acquires on enter and releases on exit; also a decorator.

        Enter raises `NotAcquired` when somebody else holds the lock, and what `acquire` raises.
        Exit raises `LockLost` when the lock was lost meanwhile, `NoQuorum` when no quorum confirmed
        the release; the body's own exception comes first. Arguments: see `acquire`.
        """
        return LockContext(self, resource, ttl, wait)

    # -- many locks ------------------------------------------------------------------------------

    def acquire_many(
        self,
        resources: Iterable[str | bytes],
        ttl: Milliseconds,
        *,
        wait: Milliseconds | float | None = 0,
    ) -> list[Lock | None]:
        """Acquire many locks, each on its own, pipelined to all masters.

        Args:
            resources: names, none of them twice.
            ttl: expiry of each key, in ms.
            wait: as for `acquire`; tries go on only while what was granted keeps half its validity.

        Returns:
            Per resource, in order: the lock, or None when somebody else holds it.

        Raises:
            NoQuorum: some item ended without a quorum; what was granted has been released.
            ValueError: a resource is named twice; and as `acquire`.
        """
        names = list(resources)
        steps = self._plan_many(names, ttl, wait)
        if steps is None:
            return []
        locks = self._driver.drive(steps)
        for name, lock in zip(names, locks, strict=True):
            self._claimed(lock, name)
        self._driver.hand_over(locks)
        return locks

    def extend_many(self, locks: Iterable[Lock], ttl: Milliseconds | None = None) -> list[bool]:
        """Extend many locks, pipelined; all are finished before anything is raised.

        Returns:
            Per lock, in order: as `extend`.

        Raises:
            NoQuorum: some had no quorum of answers; `.results` has None for them.
            ValueError: a lock is another client's.
        """
        results, todo = self._extensions(locks, ttl)
        failed = None
        for ms, places, held in todo:
            taken: list[Any] = []
            try:
                # In one order, so that two batches cannot wait for each other.
                for i, lock in enumerate(sorted(held, key=id)):
                    guard = lock._serial()
                    self._driver.seize(guard)
                    taken.append(guard)
                    let_others_run(i)
                answers, op = self._driver.drive(self._plan_extend(held, ms))
            finally:
                for guard in taken:
                    guard.release()
            failed = self._filled(results, places, answers, op, failed)
        return self._finished(results, failed, "cannot extend")

    def release_many(self, locks: Iterable[Lock]) -> list[bool]:
        """Release many locks, pipelined; all are finished before anything is raised.

        Returns:
            Per lock, in order: as `release`.

        Raises:
            NoQuorum: some had no quorum of answers; `.results` has None for them.
            ValueError: a lock is another client's.
        """
        results, places, held = self._releases(locks)
        failed = None
        if held:
            answers, op = self._driver.drive(plan.release_many(self._fleet, held))
            failed = self._filled(results, places, answers, op, failed)
        return self._finished(results, failed, "cannot confirm the release")

    # -- asking, handing over ---------------------------------------------------------------------

    def locked(self, resource: str | bytes) -> bool:
        """Does a quorum of masters hold the key, whoever set it?

        Raises:
            NoQuorum: no quorum of answers.
        """
        return self._driver.drive(self._plan_locked(resource))

    def owned(self, lock: Lock) -> bool:
        """Does a quorum of masters still hold our token? Asks them; see `Lock.held` for no I/O.

        Raises:
            NoQuorum: no quorum of answers.
            ValueError: the lock is another client's.
        """
        steps = self._plan_owned(lock)
        return steps is not None and self._driver.drive(steps)

    def adopt(self, resource: str | bytes, token: str | bytes, ttl: Milliseconds) -> Lock | None:
        """Take over a lock that was handed over by its token: one extension to `ttl` ms.

        Returns:
            The lock, or None when no quorum holds that token any more.

        Raises:
            NoQuorum: no quorum of answers.
            TypeError, ValueError: an argument.
        """
        lock = self._driver.drive(self._plan_adopt(resource, token, ttl))
        return self._claimed(lock, resource)  # type: ignore[no-any-return]

    def release_token(self, resource: str | bytes, token: str | bytes) -> bool:
        """Release a lock by its token alone.

        Returns:
            True: a quorum held that token until now.

        Raises:
            NoQuorum: no quorum of answers.
            TypeError, ValueError: an argument.
        """
        return self._driver.drive(self._plan_release_token(resource, token))

    # -- the client ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open the connections ahead of the first lock; optional.

        Returns when each is ready or has failed, or after `connect_timeout`; see `stats` for which.
        """
        self._driver.connect(self._connect_ns)

    def close(self) -> None:
        """Disconnect; held locks are not released. Idempotent.

        Waiting callers get `ClosedError`. What masters owe is settled first, so that no clean-up
        is lost: until none has answered anything for `master_timeout`, and at most 5 s.
        """
        self._driver.close(self._patience_ns)

    def __enter__(self) -> Redlock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LockContext(BaseContext):
    """What `Redlock.lock()` returns: a context manager, and a decorator for plain functions."""

    __slots__ = ()

    def __enter__(self) -> Lock:
        self._begin()
        try:
            lock, op = self._client._try(self._resource, self._ttl, self._wait)
            return self._entered(lock, op)  # type: ignore[no-any-return]
        except BaseException:
            self._end()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lock = self._end()
        if lock is not None:
            lock.__exit__(exc_type, exc, traceback)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate: every call acquires the lock anew, and releases it."""
        if inspect.iscoroutinefunction(function):
            raise TypeError("cannot decorate a coroutine function with a sync lock")

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with LockContext(self._client, self._resource, self._ttl, self._wait):
                return function(*args, **kwargs)

        return locked
