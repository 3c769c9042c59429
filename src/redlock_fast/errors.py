"""Every exception of the library, and the report that says what each master answered.

A leaf: imports nothing of ours and knows no rule. Messages are lower case, say what failed and why,
and never hold a password or a whole token.

    RedlockError
    +-- NotAcquired          somebody else holds the lock (raised by `lock()` only)
    +-- NoQuorum             too few masters gave a usable answer, or they came too late
    +-- LockLost             the lock was no longer ours; `.reason` is "foreign" or "expired"
    +-- ClosedError          the client is closed, or was closed while the call waited
    +-- ConfigurationError   a setting makes no sense (also a ValueError)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = [
    "ClosedError",
    "ConfigurationError",
    "LockLost",
    "NoQuorum",
    "NotAcquired",
    "RedlockError",
    "Report",
]


class Report(NamedTuple):
    """What one master did in the round that decided.

    Attributes:
        address: `host:port` or `unix:/path` of the master.
        outcome: one word. Answers: `granted`, `taken` (acquire); `ours`, `foreign`, `missing`
            (extend, release, owned). No answer: `timeout` (in this round), `suspect` (silent since
            before it), `connecting`, `refused`, `unresolved` (its name), `closed`, `busy` (owes too
            many replies), `unanswered` (the round was decided without it), `unasked` (it never got
            the lock's SET). Or the kind of error: `NOPERM`, `LOADING`, `CONFIG`, `PROTO`, ...
        cause: the text behind an error, else "".
        ms: from the start of the round to this answer, in milliseconds; None when none came.
    """

    address: str
    outcome: str
    cause: str
    ms: float | None

    def __str__(self) -> str:
        when = "" if self.ms is None else f" after {self.ms:.1f} ms"
        why = f" ({self.cause})" if self.cause else ""
        return f"{self.address} {self.outcome}{when}{why}"


class RedlockError(Exception):
    """Base of everything this library raises on its own account."""


class _Reported(RedlockError):
    """An error that carries one report per master, in the order of the configuration."""

    def __init__(self, message: str, reports: Sequence[Report] = ()) -> None:
        super().__init__(message)
        self.reports: tuple[Report, ...] = tuple(reports)

    def __str__(self) -> str:
        text = super().__str__()
        if self.reports:
            text += ": " + "; ".join(map(str, self.reports))
        return text


class NotAcquired(_Reported):
    """Somebody else holds the lock; the body of the with-block did not run.

    `.reports` has one `Report` per master.
    """


class NoQuorum(_Reported):
    """Too few masters gave a usable answer, or a quorum's answer came too late.

    `.reports` has one `Report` per master. From `extend_many` and `release_many`, `.results` has
    one entry per lock: True, False, or None for a lock that had no quorum.
    """

    def __init__(
        self,
        message: str,
        reports: Sequence[Report] = (),
        results: Sequence[bool | None] | None = None,
    ) -> None:
        super().__init__(message, reports)
        self.results: list[bool | None] | None = None if results is None else list(results)


class LockLost(RedlockError):
    """The lock was lost while it was thought to be held.

    `.reason` is "foreign" (the masters do not hold our token any more) or "expired" (its validity
    ran out on our own clock).
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.reason)


class ClosedError(RedlockError):
    """The client was closed, before the call or while it waited."""


class ConfigurationError(RedlockError, ValueError):
    """A setting makes no sense or is not supported; the message names it, never a secret."""
