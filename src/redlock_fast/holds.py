"""What both facades' locks, clients and contexts have in common: all that neither sends nor waits.

Checks arguments, makes the plans, keeps what a lock knows of itself, and says how a with-block
ends. The facades (`client`, `asyncio`) add the verbs, which drive the plans. No rule of the lock is
decided here: see `rules` and `plan`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, SupportsIndex, TypeVar

from redlock_fast import arguments, plan
from redlock_fast._core.fleet import Fleet
from redlock_fast._core.io import draw_tokens, now_ns
from redlock_fast._core.op import Op
from redlock_fast.arguments import Milliseconds, resource_key, ttl_ms
from redlock_fast.errors import ClosedError, LockLost, NoQuorum, NotAcquired
from redlock_fast.options import parse_masters
from redlock_fast.plan import LOST, RELEASED, TURN, Hold, Plan, attempt
from redlock_fast.rules import NS_PER_MS

L = TypeVar("L", bound="BaseLock")


class _Process:
    """Stands for this process; a forked child gets another one."""


_process = _Process()


def _after_fork_in_child() -> None:
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_after_fork_in_child)


class BaseLock(Hold):
    """What a lock knows of itself."""

    def __init__(self, *args: object, **kwargs: object) -> None:
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

    def _to_leave(self) -> bool:
        """At the end of a with-block: is there anything to release, or to complain about?"""
        return self.process is _process and self.state != plan.RELEASED

    def _leave(
        self,
        exc: BaseException | None,
        released: bool,
        expired: bool,
        failure: LockLost | NoQuorum | ClosedError | None,
    ) -> None:
        """End a with-block: raise what befell the lock, or note it on the body's exception.

        Args:
            exc: the body's exception.
            released: what `release` returned.
            expired: the validity was over before.
            failure: what `release` raised.
        """
        if failure is None:
            if not released:
                failure = self._lost(self.reason)
            elif expired:
                failure = self._lost("expired")
            else:
                return
        if exc is None:
            raise failure
        if hasattr(exc, "add_note"):
            exc.add_note(f"and the lock: {type(failure).__name__}: {failure}")
        elif exc.__context__ is None:
            exc.__context__ = failure

    def _lost(self, reason: str) -> LockLost:
        why = "its validity is over" if reason == "expired" else "the masters do not hold our token"
        return LockLost(f"lock {shown(self.resource)} was lost: {why}", reason)

    def __repr__(self) -> str:
        if self.process is not _process:
            state = "another process'"
        elif self.state == plan.HELD:
            state = f"{self.remaining():.0f} ms left"
        else:
            state = ("held", "released", "release unconfirmed", "lost")[self.state]
        return f"<Lock {shown(self.resource)}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Lock cannot be pickled or copied, it belongs to one process; "
            "hand its token over, and take it up with Redlock.adopt()"
        )

    __copy__ = __reduce__

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce__()


class BaseClient:
    """What a client is without its driver. Arguments: see `redlock_fast.Redlock`."""

    _lock_type = BaseLock  # the facade's own

    # For type checkers; holds.pxd makes them fields of a C struct.
    _fleet: Fleet
    _settings: plan.Settings
    _patience_ns: int
    _connect_ns: int

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
            lock_type=self._lock_type,
        )
        self._connect_ns = connect_ms * NS_PER_MS
        self._fleet = Fleet(options, self._patience_ns, self._connect_ns, random.random)
        self._set_up()

    def _set_up(self) -> None:
        """The facade makes its driver."""
        raise NotImplementedError

    # -- the plans of the verbs, their arguments checked -------------------------------------------

    def _first_try(self, resource: str | bytes, ttl: Milliseconds) -> Op:
        """The round that an acquire begins with."""
        settings = self._settings
        key = resource_key(resource)
        op: Op = attempt(self._fleet, settings, key, ttl_ms(ttl, settings.drift_factor))
        return op

    def _plan_many(
        self, names: list[str | bytes], ttl: Milliseconds, wait: Milliseconds | float | None
    ) -> Plan[list[Any]] | None:
        """None: there is nothing to do."""
        keys = []
        for i, name in enumerate(names):
            keys.append(resource_key(name))
            let_others_run(i)
        if len(set(keys)) != len(keys):
            raise ValueError("a resource is named twice")
        ms = ttl_ms(ttl, self._settings.drift_factor)
        limit = arguments.wait_ns(wait, plan.FOREVER)
        if not keys:
            return None
        return plan.acquire_many(self._fleet, self._settings, keys, ms, limit)

    def _plan_locked(self, resource: str | bytes) -> Plan[bool]:
        return plan.look(self._fleet, plan.LOCKED, resource_key(resource), b"", plan.EVERYBODY)

    def _plan_owned(self, lock: BaseLock) -> Plan[bool] | None:
        """None: it is not."""
        if not self._releasable(lock):
            return None
        return plan.look(self._fleet, plan.OWNED, lock.key, lock.secret, lock.voters())

    def _plan_adopt(
        self, resource: str | bytes, token: str | bytes, ttl: Milliseconds
    ) -> Plan[Any]:
        return plan.adopt(
            self._fleet,
            self._settings,
            resource_key(resource),
            arguments.token(token),
            ttl_ms(ttl, self._settings.drift_factor),
        )

    def _plan_release_token(self, resource: str | bytes, token: str | bytes) -> Plan[bool]:
        return plan.release_token(self._fleet, resource_key(resource), arguments.token(token))

    def _plan_extend(self, locks: Sequence[BaseLock], ms: int) -> Plan[Any]:
        return plan.extend(self._fleet, self._settings, locks, ms)

    # -- and what comes before and after them ------------------------------------------------------

    def _claimed(self, lock: Any, resource: str | bytes) -> Any:
        """A lock that was granted, or None, for the user."""
        if lock is not None:
            hold = lock
            hold.claim(resource, self, _process)
        return lock

    def _check(self, lock: Any) -> None:
        if not isinstance(lock, BaseLock):
            raise TypeError(f"expected a Lock, not {type(lock).__name__}")
        hold = lock
        if hold.owner is not self:
            raise ValueError("the lock was taken by another client")

    def _releasable(self, lock: Any) -> bool:
        """Is it ours, and neither released nor lost?"""
        self._check(lock)
        hold = lock
        return hold.process is _process and hold.state != RELEASED and hold.state != LOST

    def _extension_ms(self, lock: Any, ttl: Milliseconds | None) -> int:
        """To how long a lock is to be extended; -1: it is another process'."""
        self._check(lock)
        ms: int = lock.ttl_ms
        if ttl is not None:
            ms = ttl_ms(ttl, self._settings.drift_factor)
        return ms if lock.process is _process else -1

    def _extensions(
        self, locks: Iterable[L], ttl: Milliseconds | None
    ) -> tuple[list[bool | None], list[tuple[int, list[int], list[L]]]]:
        """Results to be filled in, and what to do: (ttl in ms, places, locks) for each round."""
        batch = self._batch(locks)
        ms = None if ttl is None else ttl_ms(ttl, self._settings.drift_factor)
        groups: dict[int, list[int]] = {}
        for i, lock in enumerate(batch):
            if lock.process is _process:
                groups.setdefault(lock.ttl_ms if ms is None else ms, []).append(i)
        todo = [(each, places, [batch[i] for i in places]) for each, places in groups.items()]
        return [False] * len(batch), todo

    def _releases(self, locks: Iterable[L]) -> tuple[list[bool | None], list[int], list[L]]:
        """Results to be filled in, and what to release: its places, and the locks."""
        batch = self._batch(locks)
        places = [i for i, lock in enumerate(batch) if self._releasable(lock)]
        return [False] * len(batch), places, [batch[i] for i in places]

    def _batch(self, locks: Iterable[L]) -> list[L]:
        batch = list(locks)
        for lock in batch:
            self._check(lock)
        if len(set(map(id, batch))) != len(batch):
            raise ValueError("a lock is named twice")
        return batch

    def _filled(
        self,
        results: list[bool | None],
        places: list[int],
        answers: Iterable[bool | None],
        op: Any,
        failed: Any,
    ) -> Any:
        """Put one round's answers in their places; returns a round without a quorum, if any."""
        for i, answer in zip(places, answers, strict=True):
            results[i] = answer
            if answer is None:
                failed = op
        return failed

    def _finished(self, results: list[bool | None], failed: Any, what: str) -> list[bool]:
        if failed is not None:
            raise plan.no_quorum(self._fleet, failed, what, results)
        return results  # type: ignore[return-value]

    def _confirmed(self, result: bool | None, op: Any, what: str) -> bool:
        """One lock's result; None, no quorum of answers, is raised."""
        if result is None:
            raise plan.no_quorum(self._fleet, op, what)
        return result

    def _check_later(
        self, resource: str | bytes, ttl: Milliseconds, wait: Milliseconds | float | None
    ) -> None:
        """Complain about the arguments of a context now, not on enter."""
        resource_key(resource)
        ttl_ms(ttl, self._settings.drift_factor)
        arguments.wait_ns(wait, plan.FOREVER)

    # -- the client --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the client was made, and the state of each master. No I/O.

        Returns:
            A plain dict: acquired, contended, no_quorum, too_late, released, extended, lost; and
            `masters`, a list of dicts: address, state (down, connecting, greeting, ready, suspect),
            owed (replies), debts (clean-ups that wait for a connection), reconnects, replies,
            errors (count by kind), cause (of the last failure), ms (of the last reply, or None).
        """
        stats: dict[str, Any] = self._fleet.stats()
        return stats

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


class BaseContext:
    """What `Redlock.lock()` returns, without its verbs."""

    __slots__ = ("_client", "_lock", "_resource", "_ttl", "_used", "_wait")

    def __init__(
        self,
        client: Any,
        resource: str | bytes,
        ttl: Milliseconds,
        wait: Milliseconds | float | None,
    ) -> None:
        client._check_later(resource, ttl, wait)
        self._client = client
        self._resource = resource
        self._ttl = ttl
        self._wait = wait
        self._used = False
        self._lock: Any = None

    def _begin(self) -> None:
        if self._used:
            raise RuntimeError("cannot enter: this context is in use; make another with lock()")
        self._used = True

    def _entered(self, lock: Any, op: Any) -> Any:
        if lock is None:
            raise NotAcquired(
                f"lock {shown(self._resource)} is held by somebody else",
                plan.reports(self._client._fleet, op),
            )
        self._lock = lock
        return lock

    def _end(self) -> Any:
        """The lock that was entered, if any; the context may be entered again."""
        lock, self._lock = self._lock, None
        self._used = False
        return lock


def let_others_run(i: int) -> None:
    """Called for each item of a batch: compiled loops keep the GIL, and a batch may be long."""
    if i % TURN == TURN - 1:
        time.sleep(0)


def shown(resource: str | bytes) -> str:
    """A resource for messages: quoted, escaped, bounded."""
    text = ascii(resource)
    return text if len(text) <= 80 else text[:77] + "..."
