"""The sync facade: `Redlock` and `Lock`. Checks arguments, drives plans, raises Python errors.

One client is shared by all threads of a process; it has one connection per master. No rule of the
lock is decided here: see `rules` and `plan`.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, SupportsIndex, TypeVar

from redlock_fast import arguments, plan
from redlock_fast._core.fleet import Fleet
from redlock_fast._core.io import draw_tokens, now_ns
from redlock_fast.arguments import Milliseconds, resource_key, ttl_ms
from redlock_fast.drive_sync import Driver
from redlock_fast.errors import ClosedError, LockLost, NoQuorum, NotAcquired
from redlock_fast.options import parse_masters
from redlock_fast.plan import LOST, RELEASED
from redlock_fast.plan import acquire as _acquire
from redlock_fast.plan import release as _release
from redlock_fast.rules import NS_PER_MS

P = ParamSpec("P")
R = TypeVar("R")


class _Process:
    """Stands for this process; a forked child gets another one."""


_process = _Process()


def _after_fork_in_child() -> None:
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_after_fork_in_child)

# Guards the making of a lock's own guard, which most locks never need.
_guards = threading.Lock()


class Lock(plan.Hold):
    """A lock that was granted. Made by `Redlock`, never by hand.

    It is held until it is released, lost, or past its deadline on our own monotonic clock. A lock
    that is dropped is not released; its ttl ends it.
    """

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        raise TypeError("a Lock is made by Redlock.acquire(), not by hand")

    @property
    def token(self) -> str:
        """The random value that signs this lock on the masters: 40 hex digits.

        Whoever has it can release the lock: keep it out of logs.
        """
        return self.secret.decode()

    @property
    def ttl(self) -> int:
        """What the key's expiry was last set to, in ms."""
        return self.ttl_ms

    @property
    def validity(self) -> float:
        """How long the lock was good for when it was granted, in ms."""
        return self.validity_ns / NS_PER_MS

    def remaining(self) -> float:
        """How long the lock is still ours, in ms; 0.0 when it is not held. No I/O."""
        if self.state != plan.HELD or self.process is not _process:
            return 0.0
        return max(self.deadline_ns - now_ns(), 0) / NS_PER_MS

    @property
    def held(self) -> bool:
        """Not released, not lost, before its deadline, and taken by this process. No I/O."""
        return self.state == plan.HELD and self.process is _process and now_ns() < self.deadline_ns

    def __bool__(self) -> bool:
        return self.held

    def raise_if_lost(self) -> None:
        """Raise `LockLost` if the lock was lost or its validity is over. No I/O.

        A lock that was released is not lost.
        """
        if self.state == plan.LOST:
            raise self._lost(self.reason)
        if self.process is not _process:
            raise self._lost("foreign")
        if self.state != plan.RELEASED and now_ns() >= self.deadline_ns:
            raise self._lost("expired")

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
        failure: LockLost | NoQuorum | ClosedError | None = None
        if self.process is not _process or self.state == plan.RELEASED:
            return
        expired = now_ns() >= self.deadline_ns
        try:
            if self.state == plan.LOST or not self.release():
                failure = self._lost(self.reason)
            elif expired:
                failure = self._lost("expired")
        except (NoQuorum, ClosedError) as error:
            failure = error
        if failure is None:
            return
        if exc is None:
            raise failure
        if hasattr(exc, "add_note"):
            exc.add_note(f"and the lock: {type(failure).__name__}: {failure}")
        elif exc.__context__ is None:
            exc.__context__ = failure

    def _lost(self, reason: str) -> LockLost:
        why = "its validity is over" if reason == "expired" else "the masters do not hold our token"
        return LockLost(f"lock {_shown(self.resource)} was lost: {why}", reason)

    def _serial(self) -> threading.Lock:
        """Extends of one lock are serialised by this."""
        with _guards:
            if self.guard is None:
                self.guard = threading.Lock()
            guard: threading.Lock = self.guard
        return guard

    def __repr__(self) -> str:
        if self.process is not _process:
            state = "another process'"
        elif self.state == plan.HELD:
            state = f"{self.remaining():.0f} ms left"
        else:
            state = ("held", "released", "release unconfirmed", "lost")[self.state]
        return f"<Lock {_shown(self.resource)}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Lock cannot be pickled or copied, it belongs to one process; "
            "hand its token over, and take it up with Redlock.adopt()"
        )

    __copy__ = __reduce__

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce__()


class Redlock:
    """A Redlock client for N independent Redis or Valkey masters, shared by all threads.

    The constructor does no I/O. All durations are whole milliseconds (int or timedelta).

    Args:
        masters: sequence of URL texts, dicts of redis-py keywords, or `redis.Redis` clients, whose
            address, db and credentials are used.
        retries: tries after the first one; 0: exactly one try.
        retry_delay: upper bound of the random pause between tries, uniform(0, retry_delay). 200 is
            what the clients in the field use.
        clock_drift_factor: share of a ttl that the client's and a server's clock may be wrong by
            together; 0.01 as on the Redlock page's reference client.
        master_timeout: a try ends at most so long after its start, connecting included.
        connect_timeout: bound of connect and handshake of one connection; goes on across tries.

    Raises:
        ConfigurationError: a master that makes no sense, is named twice, or is not supported.
        TypeError, ValueError: another argument of the wrong type or out of range.
    """

    def __init__(
        self,
        masters: Sequence[Any],
        *,
        retries: SupportsIndex = 3,
        retry_delay: Milliseconds = 200,
        clock_drift_factor: float = 0.01,
        master_timeout: Milliseconds = 50,
        connect_timeout: Milliseconds = 1000,
    ) -> None:
        options = parse_masters(masters)
        self._patience_ns = (
            arguments.milliseconds("master_timeout", master_timeout, least=1) * NS_PER_MS
        )
        connect_ms = arguments.milliseconds("connect_timeout", connect_timeout, least=1)
        self._settings = plan.Settings(
            retries=arguments.count("retries", retries),
            retry_delay_ns=arguments.milliseconds("retry_delay", retry_delay) * NS_PER_MS,
            drift_factor=arguments.drift_factor(clock_drift_factor),
            draw=draw_tokens,
            jitter=random.random,
            lock_type=Lock,
        )
        self._connect_ns = connect_ms * NS_PER_MS
        self._fleet = Fleet(options, self._patience_ns, self._connect_ns, random.random)
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
        return lock

    def _try(
        self, resource: str | bytes, ttl: Milliseconds, wait: Milliseconds | float | None
    ) -> tuple[Lock | None, Any]:
        lock, op = self._driver.drive(
            _acquire(
                self._fleet,
                self._settings,
                resource_key(resource),
                ttl_ms(ttl, self._settings.drift_factor),
                None if wait is None else arguments.wait_ns(wait, plan.FOREVER),
            )
        )
        if lock is not None:
            lock.claim(resource, self, _process)
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
        """
        self._check(lock)
        ms = lock.ttl_ms
        if ttl is not None:
            ms = arguments.ttl_ms(ttl, self._settings.drift_factor)
        if lock.process is not _process:
            return False
        with lock._serial():
            results, op = self._driver.drive(plan.extend(self._fleet, self._settings, [lock], ms))
        if results[0] is None:
            raise plan.no_quorum(self._fleet, op, "cannot extend")  # type: ignore[arg-type]
        return results[0]

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
        self._check(lock)
        hold = lock
        if hold.process is not _process or hold.state == RELEASED or hold.state == LOST:
            return False
        result, op = self._driver.drive(_release(self._fleet, hold))
        if result is None:
            raise plan.no_quorum(self._fleet, op, "cannot confirm the release")
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
        arguments.resource_key(resource)
        arguments.ttl_ms(ttl, self._settings.drift_factor)
        arguments.wait_ns(wait, plan.FOREVER)
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
        keys = [arguments.resource_key(name) for name in names]
        if len(set(keys)) != len(keys):
            raise ValueError("a resource is named twice")
        ms = arguments.ttl_ms(ttl, self._settings.drift_factor)
        limit = arguments.wait_ns(wait, plan.FOREVER)
        if not keys:
            return []
        locks = self._driver.drive(plan.acquire_many(self._fleet, self._settings, keys, ms, limit))
        for name, lock in zip(names, locks, strict=True):
            if lock is not None:
                lock.claim(name, self, _process)
        return locks

    def extend_many(self, locks: Iterable[Lock], ttl: Milliseconds | None = None) -> list[bool]:
        """Extend many locks, pipelined; all are finished before anything is raised.

        Returns:
            Per lock, in order: as `extend`.

        Raises:
            NoQuorum: some had no quorum of answers; `.results` has None for them.
            ValueError: a lock is another client's.
        """
        batch = self._batch(locks)
        ms = None
        if ttl is not None:
            ms = arguments.ttl_ms(ttl, self._settings.drift_factor)
        results: list[bool | None] = [False] * len(batch)
        failed = None
        groups: dict[int, list[int]] = {}
        for i, lock in enumerate(batch):
            if lock.process is _process:
                groups.setdefault(lock.ttl_ms if ms is None else ms, []).append(i)
        for each, places in groups.items():
            held = [batch[i] for i in places]
            # In one order for everybody, or two batches could wait for each other.
            serials = [lock._serial() for lock in sorted(set(held), key=id)]
            for serial in serials:
                serial.acquire()
            try:
                answers, op = self._driver.drive(
                    plan.extend(self._fleet, self._settings, held, each)
                )
            finally:
                for serial in serials:
                    serial.release()
            for i, answer in zip(places, answers, strict=True):
                results[i] = answer
                if answer is None:
                    failed = op
        return self._finished(results, failed, "cannot extend")

    def release_many(self, locks: Iterable[Lock]) -> list[bool]:
        """Release many locks, pipelined; all are finished before anything is raised.

        Returns:
            Per lock, in order: as `release`.

        Raises:
            NoQuorum: some had no quorum of answers; `.results` has None for them.
            ValueError: a lock is another client's.
        """
        batch = self._batch(locks)
        results: list[bool | None] = [False] * len(batch)
        failed = None
        places = [
            i
            for i, lock in enumerate(batch)
            if lock.process is _process and lock.state not in (plan.RELEASED, plan.LOST)
        ]
        if places:
            held = [batch[i] for i in places]
            answers, op = self._driver.drive(plan.release_many(self._fleet, held))
            for i, answer in zip(places, answers, strict=True):
                results[i] = answer
                if answer is None:
                    failed = op
        return self._finished(results, failed, "cannot confirm the release")

    def _batch(self, locks: Iterable[Lock]) -> list[Lock]:
        batch = list(locks)
        for lock in batch:
            self._check(lock)
        if len(set(map(id, batch))) != len(batch):
            raise ValueError("a lock is named twice")
        return batch

    def _finished(self, results: list[bool | None], failed: Any, what: str) -> list[bool]:
        if failed is not None:
            raise plan.no_quorum(self._fleet, failed, what, results)
        return results  # type: ignore[return-value]

    # -- asking, handing over ---------------------------------------------------------------------

    def locked(self, resource: str | bytes) -> bool:
        """Does a quorum of masters hold the key, whoever set it?

        Raises:
            NoQuorum: no quorum of answers.
        """
        key = arguments.resource_key(resource)
        return self._driver.drive(plan.look(self._fleet, plan.LOCKED, key, b"", plan.EVERYBODY))

    def owned(self, lock: Lock) -> bool:
        """Does a quorum of masters still hold our token? Asks them; see `Lock.held` for no I/O.

        Raises:
            NoQuorum: no quorum of answers.
            ValueError: the lock is another client's.
        """
        self._check(lock)
        if lock.process is not _process or lock.state in (plan.RELEASED, plan.LOST):
            return False
        return self._driver.drive(
            plan.look(self._fleet, plan.OWNED, lock.key, lock.secret, lock.voters())
        )

    def adopt(self, resource: str | bytes, token: str | bytes, ttl: Milliseconds) -> Lock | None:
        """Take over a lock that was handed over by its token: one extension to `ttl` ms.

        Returns:
            The lock, or None when no quorum holds that token any more.

        Raises:
            NoQuorum: no quorum of answers.
            TypeError, ValueError: an argument.
        """
        lock: Lock | None = self._driver.drive(
            plan.adopt(
                self._fleet,
                self._settings,
                arguments.resource_key(resource),
                arguments.token(token),
                arguments.ttl_ms(ttl, self._settings.drift_factor),
            )
        )
        if lock is not None:
            lock.claim(resource, self, _process)
        return lock

    def release_token(self, resource: str | bytes, token: str | bytes) -> bool:
        """Release a lock by its token alone.

        Returns:
            True: a quorum held that token until now.

        Raises:
            NoQuorum: no quorum of answers.
            TypeError, ValueError: an argument.
        """
        key = arguments.resource_key(resource)
        return self._driver.drive(plan.release_token(self._fleet, key, arguments.token(token)))

    # -- the client ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open the connections ahead of the first lock; optional.

        Returns when each is ready or has failed, or after `connect_timeout`; see `stats` for which.
        """
        self._driver.connect(self._connect_ns)

    def stats(self) -> dict[str, Any]:
        """Counters since the client was made, and the state of each master.

        Returns:
            A plain dict: acquired, contended, no_quorum, too_late, released, extended, lost; and
            `masters`, a list of dicts: address, state (down, connecting, greeting, ready, suspect),
            owed (replies), debts (clean-ups that wait for a connection), reconnects, replies,
            errors (count by kind), cause (of the last failure), ms (of the last reply, or None).
        """
        stats: dict[str, Any] = self._fleet.stats()
        return stats

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

    def __repr__(self) -> str:
        rows = ", ".join(link.address for link in self._fleet.links)
        return f"<Redlock of {rows}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Redlock client cannot be pickled or copied, its connections belong to one process; "
            "make one in each process from the same settings"
        )

    __copy__ = __reduce__

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce__()

    def _check(self, lock: Lock) -> None:
        if not isinstance(lock, Lock):
            raise TypeError(f"expected a Lock, not {type(lock).__name__}")
        hold = lock
        if hold.owner is not self:
            raise ValueError("the lock was taken by another client")


class LockContext:
    """What `Redlock.lock()` returns: a context manager, and a decorator for plain functions."""

    __slots__ = ("_client", "_lock", "_resource", "_ttl", "_wait")

    def __init__(
        self,
        client: Redlock,
        resource: str | bytes,
        ttl: Milliseconds,
        wait: Milliseconds | float | None,
    ) -> None:
        self._client = client
        self._resource = resource
        self._ttl = ttl
        self._wait = wait
        self._lock: Lock | None = None

    def __enter__(self) -> Lock:
        if self._lock is not None:
            raise RuntimeError("cannot enter: this context is in use; make another with lock()")
        client = self._client
        lock, op = client._try(self._resource, self._ttl, self._wait)
        if lock is None:
            raise NotAcquired(
                f"lock {_shown(self._resource)} is held by somebody else",
                plan.reports(client._fleet, op),
            )
        self._lock = lock
        return lock

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lock, self._lock = self._lock, None
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


def _shown(resource: str | bytes) -> str:
    """A resource for messages: quoted, escaped, bounded."""
    text = ascii(resource)
    return text if len(text) <= 80 else text[:77] + "..."
