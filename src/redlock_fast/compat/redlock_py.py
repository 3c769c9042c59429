"""Drop-in for redlock-py 1.0.8: its names, units, results and errors over `redlock_fast.Redlock`.

    from redlock_fast.compat.redlock_py import Redlock  # was: from redlock import Redlock

    dlm = Redlock([{"host": "10.0.0.1"}, {"host": "10.0.0.2"}, {"host": "10.0.0.3"}])
    lock = dlm.lock("invoice:17", 1000)  # ms; a Lock, or False
    if lock:
        dlm.unlock(lock)

Same keys, values and commands on the masters, so both may run side by side. A ttl is an int of
milliseconds, a retry delay a float of seconds. What differs on purpose (docs/migrating.md):

- A quorum is a lock: errors of a minority of masters neither raise nor leave keys behind.
- Too few usable answers raise `MultipleRedlockException`, even with no master left to ask.
- `retry_count=0` is one try, `retry_delay=0` no delay.
- The same master twice, and a ttl that could never be granted, are refused.

`strict = True` in this module brings the original's second and third back: `False` where masters
fail, and its defaults for zeros. (Its other defects are not brought back.)
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import redlock_fast
from redlock_fast import arguments, plan, rules, scripts
from redlock_fast._core.io import now_ns
from redlock_fast._core.wire import error_kind
from redlock_fast.errors import ConfigurationError, NoQuorum
from redlock_fast.rules import NS_PER_MS

__all__ = ["CannotObtainLock", "Lock", "MultipleRedlockException", "Redlock"]

strict = False
"""Whether the original's `False` for failed masters and its defaults for zeros are wanted back."""

log = logging.getLogger("redlock_fast")

_LETTERS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Bytes to letters, each as often as any other; those that would make some likelier are left out.
_TO_LETTERS = bytes(_LETTERS[byte % len(_LETTERS)] for byte in range(256))
_LEFT_OUT = bytes(range(256 - 256 % len(_LETTERS), 256))
_KEY_LENGTH = 22

# The original pauses for just the retry delay. All masters are asked at once here, so two clients
# that took a part each would do so again: a pause is up to a quarter longer, never shorter.
_LONGEST_PAUSE = 1.25
# Some ask for `sys.maxsize` or infinitely many tries.
_FOREVER = 2**31 - 1


class CannotObtainLock(Exception):
    """No master was named."""


class MultipleRedlockException(Exception):
    """Too few masters gave a usable answer.

    Attributes:
        errors: a `redis.exceptions.RedisError` for each master that failed, with its address.
    """

    def __init__(self, errors: Sequence[Exception], *args: object) -> None:
        super().__init__(*args)
        self.errors = errors

    def __str__(self) -> str:
        return " :: ".join(str(error) for error in self.errors)

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors, *self.args)


class _BadConnection(Warning, ConfigurationError):
    """A master that makes no sense: the original raises `Warning`, this library the other."""


class _Fields(NamedTuple):
    validity: int
    resource: Any
    key: Any


class Lock(_Fields):
    """A lock that was granted, as a plain tuple.

    It can be pickled, and unlocked by any client of the same masters, in any process.

    Attributes:
        validity: how long it was good for when it was granted, in whole ms.
        resource: its name, as it was given to `lock`.
        key: the random value that signs it, 22 letters and digits (bytes).
    """

    # What the native client knows about it, where it was taken by this one.
    _hold: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self)


class Redlock:
    """redlock-py's lock manager, on any number of independent masters.

    The constructor does no I/O. Disconnects when it is closed or dropped. May be shared by threads,
    and subclassed; where a subclass overrides `lock_instance`, `unlock_instance` or
    `unlock_script`, masters are asked through them, one after the other on the clients in
    `servers`, as the original does.

    Args:
        connection_list: URL texts, dicts of redis-py keywords, or `redis.Redis` clients, whose
            address, db and credentials are used.
        retry_count: number of tries; None: 3; 0: one.
        retry_delay: pause between two tries in seconds, up to a quarter is added; None: 0.2.

    Attributes:
        servers: a `redis.Redis` client for each master, the caller's where he gave one. For the
            caller to use: locks travel on connections of their own.
        default_retry_count, default_retry_delay: what None means (class attributes).
        clock_drift_factor: share of a ttl that clocks may be wrong by (class attribute).
        master_timeout: a try ends at most so many ms after its start (class attribute, not in the
            original).
        unlock_script: what deletes a key that is still ours (class attribute).

    Raises:
        Warning: a master that makes no sense, is named twice, or is not supported (also a
            `redlock_fast.ConfigurationError`).
        CannotObtainLock: no master was named.
        TypeError, ValueError: a retry count or delay of the wrong type or out of range.
    """

    default_retry_count = 3
    default_retry_delay = 0.2
    clock_drift_factor = 0.01
    master_timeout = 50
    unlock_script = scripts.RELEASE.text.decode()

    def __init__(
        self,
        connection_list: Sequence[Any],
        retry_count: int | None = None,
        retry_delay: float | None = None,
    ) -> None:
        if isinstance(connection_list, (list, tuple)) and not connection_list:
            raise CannotObtainLock("no master was named")
        try:
            self._client = redlock_fast.Redlock(
                connection_list,
                clock_drift_factor=self.clock_drift_factor,
                master_timeout=self.master_timeout,
            )
            problem, self.servers, self._made = _servers(connection_list)
        except ConfigurationError as error:
            problem = str(error)
        if problem:
            del connection_list  # no frame of ours may hold a password while this passes
            raise _BadConnection(problem)
        self._quorum = rules.quorum(len(connection_list))
        settings = self._client._settings
        settings.draw = _draw_with(weakref.ref(self))
        settings.jitter = _jitter
        self.retry_count = self.default_retry_count if retry_count is None else retry_count
        self.retry_delay = self.default_retry_delay if retry_delay is None else retry_delay
        _open.add(self)

    @property
    def quorum(self) -> int:
        """How many of the configured masters must agree."""
        return self._quorum

    @property
    def retry_count(self) -> int:
        """Number of tries."""
        return self._client._settings.retries + 1

    @retry_count.setter
    def retry_count(self, value: int) -> None:
        if isinstance(value, (int, float)) and value > _FOREVER:
            value = _FOREVER
        count = arguments.count("retry_count", value)
        if strict:
            count = count or self.default_retry_count
        self._client._settings.retries = max(count - 1, 0)

    @property
    def retry_delay(self) -> float:
        """Pause between two tries, in seconds."""
        return self._retry_delay

    @retry_delay.setter
    def retry_delay(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"retry_delay: expected seconds, not {type(value).__name__}")
        if not (math.isfinite(value) and 0 <= value <= rules.MAX_MS / 1000):
            raise ValueError("retry_delay: expected seconds, 0 up to 2**42 ms")
        if strict:
            value = value or self.default_retry_delay
        self._retry_delay = value
        self._client._settings.retry_delay_ns = int(value * _LONGEST_PAUSE * 1e9)

    # -- locks -----------------------------------------------------------------------------------

    def lock(self, resource: str | bytes | float, ttl: int) -> Lock | Literal[False]:
        """Acquire the lock of a resource, in up to `retry_count` tries.

        Args:
            resource: its name and Redis key; a number is its decimal text, as in redis-py.
            ttl: expiry of the key, an int of ms.

        Returns:
            The lock, or False when somebody else holds it.

        Raises:
            MultipleRedlockException: too few masters gave a usable answer in the last try.
            ValueError: the ttl is no int or makes no sense, or the resource is empty or too long.
            TypeError: the resource is of another type.
        """
        _check_ttl(ttl)
        if self._hooked():
            return self._lock_by_hooks(resource, ttl)
        try:
            hold = self._client.acquire(_name(resource), ttl)
        except NoQuorum as error:
            granted = sum(report.outcome == "granted" for report in error.reports)
            if strict or granted >= self.quorum:  # a quorum, but too late for the ttl
                return False
            raise _failed(error) from error
        if hold is None:
            return False
        return self._granted(hold.validity, resource, hold)

    def unlock(self, lock: Lock) -> None:
        """Release a lock. Silent when it has expired, was never held, or masters fail.

        Args:
            lock: what `lock` returned, here or elsewhere: anything with `resource` and `key`.
        """
        if self._hooked():
            self._unlock_by_hooks(lock)
            return
        hold = self._known(lock)
        try:
            if hold is not None and (self._client.release(hold) or hold.state != plan.HELD):
                return
            # Another client's, or a parent process': by its key alone.
            self._client._driver.drive(
                plan.release_token(
                    self._client._fleet,
                    arguments.resource_key(_name(lock.resource)),
                    _bytes(lock.key),
                )
            )
        except NoQuorum as error:
            log.warning("unlock: %s", error)

    def extend(self, lock: Lock, ttl: int) -> Lock | Literal[False]:
        """Let a lock last `ttl` ms from now. Not in the original.

        Args:
            lock: what `lock` or `extend` returned, here or elsewhere.
            ttl: the key's new expiry, an int of ms.

        Returns:
            The lock with its new validity; or False: it is lost, and not held any more.

        Raises:
            MultipleRedlockException: too few masters gave a usable answer.
            ValueError: the ttl is no int, or makes no sense.
        """
        _check_ttl(ttl)
        client = self._client
        hold = self._known(lock)
        try:
            if hold is not None:
                if client.extend(hold, ttl):
                    return self._granted(hold.remaining(), lock.resource, hold)
                if hold.state != plan.HELD:
                    return False
            hold = client._driver.drive(
                plan.adopt(
                    client._fleet,
                    client._settings,
                    arguments.resource_key(_name(lock.resource)),
                    _bytes(lock.key),
                    arguments.ttl_ms(ttl, client._settings.drift_factor),
                )
            )
        except NoQuorum as error:
            raise _failed(error) from error
        if hold is None:
            return False
        return Lock(hold.validity_ns // NS_PER_MS, lock.resource, lock.key)

    def close(self) -> None:
        """Disconnect; held locks are not released. Idempotent. Not in the original."""
        self._client.close()
        _open.discard(self)
        for server in self._made:
            server.close()

    def __enter__(self) -> Redlock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Redlock cannot be pickled or copied; make one in each process")

    def _known(self, lock: Lock) -> Any:
        """The native lock behind this one, if this client took it."""
        hold = getattr(lock, "_hold", None)
        return hold if hold is not None and hold.owner is self._client else None

    def _granted(self, validity_ms: float, resource: Any, hold: Any) -> Lock:
        key = hold.secret.decode() if self._text_keys else hold.secret
        lock = Lock(int(validity_ms), resource, key)
        lock._hold = hold
        return lock

    # -- what subclasses may override ----------------------------------------------------------

    _text_keys = False

    def get_unique_id(self) -> Any:
        """A fresh value to sign one try with: 22 letters and digits (bytes)."""
        key = b""
        while len(key) < _KEY_LENGTH:
            key += os.urandom(32).translate(_TO_LETTERS, _LEFT_OUT)
        return key[:_KEY_LENGTH]

    def lock_instance(self, server: Any, resource: Any, val: Any, ttl: int) -> Any:
        """Take the lock on one server, by its redis-py client. True if it was granted."""
        _check_ttl(ttl)
        return server.set(resource, val, nx=True, px=ttl)

    def unlock_instance(self, server: Any, resource: Any, val: Any) -> None:
        """Release the lock on one server, by its redis-py client. Failures are logged."""
        try:
            server.eval(self.unlock_script, 1, resource, val)
        except Exception as error:  # noqa: BLE001 - the original's contract
            log.warning("unlock: %s on one server: %s", type(error).__name__, error)

    def _hooked(self) -> bool:
        """Whether servers are to be asked by what a subclass (or a patch) has overridden."""
        return (
            getattr(self.lock_instance, "__func__", None) is not _LOCK_INSTANCE
            or getattr(self.unlock_instance, "__func__", None) is not _UNLOCK_INSTANCE
            or self.unlock_script is not _UNLOCK_SCRIPT
        )

    def _lock_by_hooks(self, resource: Any, ttl: int) -> Lock | Literal[False]:
        from redis.exceptions import RedisError

        ttl_ms = arguments.ttl_ms(ttl, self.clock_drift_factor)
        lasting_ns = self._client._settings.lasting_ns(ttl_ms)
        errors: list[Exception] = []
        for attempt in range(self.retry_count):
            if attempt:
                time.sleep(self.retry_delay * _LONGEST_PAUSE * _jitter())
            key = self.get_unique_id()
            votes = left_ns = 0
            errors.clear()
            start_ns = now_ns()
            try:
                for server in self.servers:
                    try:
                        votes += bool(self.lock_instance(server, resource, key, ttl_ms))
                    except RedisError as error:
                        errors.append(error)
                if votes >= self.quorum:
                    left_ns = start_ns + lasting_ns - now_ns()
            finally:
                if left_ns <= 0:
                    for server in self.servers:
                        try:
                            self.unlock_instance(server, resource, key)
                        except Exception as error:  # noqa: BLE001 - the others come first
                            log.warning("unlock: %s", error)
            if left_ns > 0:
                return Lock(left_ns // NS_PER_MS, resource, key)
        if len(errors) > len(self.servers) - self.quorum and not strict:
            raise MultipleRedlockException(errors)
        return False

    def _unlock_by_hooks(self, lock: Lock) -> None:
        from redis.exceptions import RedisError

        errors: list[Exception] = []
        for server in self.servers:
            try:
                self.unlock_instance(server, lock.resource, lock.key)
            except RedisError as error:
                errors.append(error)
        if errors:
            raise MultipleRedlockException(errors)


# Clients that may still owe something when the interpreter ends.
_open: weakref.WeakSet[Redlock] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    """The original's users close nothing; what they unlocked last has to reach every master.

    Takes a client's `master_timeout` at most. Closes nothing: a daemon thread may be in a call.
    """
    for dlm in list(_open):
        driver = dlm._client._driver
        end_ns = now_ns() + int(dlm.master_timeout * NS_PER_MS)
        while driver.fleet.unsettled and now_ns() < end_ns:
            driver.pump.last_call(5 * NS_PER_MS)


_LOCK_INSTANCE = Redlock.lock_instance
_UNLOCK_INSTANCE = Redlock.unlock_instance
_UNLOCK_SCRIPT = Redlock.unlock_script


def _jitter() -> float:
    """The share of the longest pause to take: from just the retry delay on."""
    return random.uniform(1 / _LONGEST_PAUSE, 1)


def _draw_with(owner: weakref.ref[Redlock]) -> Callable[[int], list[bytes]]:
    """Draws tokens by `get_unique_id`, without keeping the client alive."""

    def draw(count: int) -> list[bytes]:
        dlm = owner()
        assert dlm is not None  # who draws is in a call of its
        keys = [dlm.get_unique_id() for _ in range(count)]
        if isinstance(keys[0], str):
            dlm._text_keys = True
        return [_bytes(key) for key in keys]

    return draw


def _check_ttl(ttl: object) -> None:
    if not isinstance(ttl, int) or isinstance(ttl, bool):
        raise ValueError(f"ttl {ttl!r} is not an integer")


def _name(resource: Any) -> str | bytes:
    """A resource as redis-py encodes it."""
    if isinstance(resource, (int, float)) and not isinstance(resource, bool):
        return repr(resource) if isinstance(resource, float) else str(int(resource))
    return resource  # type: ignore[no-any-return]


def _bytes(key: Any) -> bytes:
    if isinstance(key, str):
        return key.encode()
    if not isinstance(key, bytes):
        raise TypeError(f"expected a key of type bytes or str, not {type(key).__name__}")
    return key


def _servers(connection_list: Sequence[Any]) -> tuple[str, list[Any], list[Any]]:
    """redis-py clients for all masters, the caller's among them; and those that were made here.

    Before them what is wrong, as text, or "".
    """
    import redis

    servers: list[Any] = []
    made: list[Any] = []
    for master in connection_list:
        try:
            if isinstance(master, str):
                servers.append(redis.Redis.from_url(master))
            elif isinstance(master, Mapping):
                servers.append(redis.Redis(**master))
            else:
                servers.append(master)
                continue
            made.append(servers[-1])
        except Exception as error:  # noqa: BLE001 - the original's contract
            # No text of redis-py's, which may hold a piece of a URL.
            why = f"masters[{len(servers)}]: redis-py refuses it ({type(error).__name__})"
            return why, servers, made
    return "", servers, made


# Outcome words of masters that did not fail.
_NO_FAILURES = frozenset(
    {"granted", "taken", "ours", "foreign", "missing", "unasked", "unanswered"}
)
_REDIS_ERRORS = {
    "timeout": "TimeoutError",
    "suspect": "TimeoutError",
    "PROTO": "InvalidResponse",
    "MAXCLIENTS": "ConnectionError",
    "NOAUTH": "AuthenticationError",
    "WRONGPASS": "AuthenticationError",
    "NOPERM": "NoPermissionError",
    "LOADING": "BusyLoadingError",
    "READONLY": "ReadOnlyError",
    "OOM": "OutOfMemoryError",
}


def _failed(failure: NoQuorum) -> MultipleRedlockException:
    """The original's error: what redis-py would have raised for each master that failed."""
    from redis import exceptions

    errors: list[Exception] = []
    for report in failure.reports:
        if report.outcome not in _NO_FAILURES:
            kind = error_kind(report.cause) if report.outcome == "CONFIG" else report.outcome
            # Words in lower case are about connections, kinds of errors are in upper case.
            other = "ConnectionError" if kind.islower() else "ResponseError"
            error_type = getattr(exceptions, _REDIS_ERRORS.get(kind, other), exceptions.RedisError)
            errors.append(error_type(str(report)))
    return MultipleRedlockException(errors)
