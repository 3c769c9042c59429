"""What callers pass, checked before any byte is sent: resources, durations, tokens, counts.

A leaf, shared by both facades. Every duration of the native API is in whole milliseconds: what
`operator.index` takes, but no bool; or a `timedelta` of whole milliseconds; or `math.inf` where
"for ever" makes sense. A float is refused, 0.5 would be a caller who thinks in seconds.
"""

from __future__ import annotations

import math
from datetime import timedelta
from operator import index
from typing import Final, SupportsIndex, TypeAlias

from redlock_fast.rules import MAX_MS, NS_PER_MS, drift_ns, ns_of

# SupportsIndex: int, IntEnum, numpy integers, ...
Milliseconds: TypeAlias = SupportsIndex | timedelta

MAX_RESOURCE: Final = 64 * 1024
_TOKEN_CHARS: Final = frozenset(b"0123456789abcdef")


def resource_key(resource: str | bytes) -> bytes:
    """The Redis key of a resource: 1 byte to 64 KiB; a str is its UTF-8.

    Raises:
        TypeError: neither str nor bytes.
        ValueError: empty, too long, or not encodable (a lone surrogate).
    """
    if isinstance(resource, str):
        if len(resource) > MAX_RESOURCE:
            raise ValueError(f"resource is too long: {len(resource)} characters, at most 64 KiB")
        try:
            text = resource if type(resource) is str else str.__str__(resource)
            key = text.encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"resource cannot be encoded as UTF-8: {exc.reason}") from None
    elif isinstance(resource, bytes):
        key = bytes(resource)
    else:
        raise TypeError(f"expected a resource of type str or bytes, not {_kind(resource)}")
    if not key:
        raise ValueError("resource is empty")
    if len(key) > MAX_RESOURCE:
        raise ValueError(f"resource is too long: {len(key)} bytes, at most 64 KiB")
    return key


def milliseconds(name: str, value: Milliseconds, *, least: int = 0) -> int:
    """A duration in whole milliseconds.

    Raises:
        TypeError: a bool, a float, a text, ...
        ValueError: below `least`, above 2**42, or a timedelta with a fraction of a millisecond.
    """
    if type(value) is int:
        ms = value
    elif isinstance(value, timedelta):
        ms, rest = divmod(value, timedelta(milliseconds=1))
        if rest:
            raise ValueError(f"{name}: expected whole milliseconds, not {value!r}")
    elif isinstance(value, bool):
        raise TypeError(f"{name}: expected milliseconds as an int, not a bool")
    else:
        try:
            ms = index(value)
        except TypeError:
            hint = " (seconds? the unit is ms)" if isinstance(value, float) else ""
            raise TypeError(
                f"{name}: expected milliseconds as an int or a timedelta, not {_kind(value)}{hint}"
            ) from None
    if ms < least:
        raise ValueError(f"{name}: expected at least {least} ms, not {_number(ms)}")
    if ms > MAX_MS:
        raise ValueError(f"{name}: expected at most 2**42 ms, not {_number(ms)}")
    return ms


def ttl_ms(value: Milliseconds, drift_factor: float) -> int:
    """A ttl: milliseconds that leave some validity after the drift.

    Raises:
        TypeError, ValueError: as `milliseconds`; ValueError also when nothing is left.
    """
    if type(value) is int and 0 < value <= MAX_MS:
        ms = value  # what nearly every caller gives, the short way
    else:
        ms = milliseconds("ttl", value, least=1)
    ns = ns_of(ms)
    if ns <= drift_ns(ns, drift_factor):
        raise ValueError(f"ttl: {ms} ms is not above its own drift, nothing would be left of it")
    return ms


def wait_ns(value: Milliseconds | float | None, forever: int) -> int | None:
    """A wait in nanoseconds; None as it is, `math.inf` as `forever`."""
    if value is None:
        return None
    if isinstance(value, float) and value == math.inf:
        return forever
    return milliseconds("wait", value) * NS_PER_MS  # type: ignore[arg-type]


def count(name: str, value: SupportsIndex) -> int:
    """A number of times, 0 or more, that fits in 31 bits.

    Raises:
        TypeError: not an integer, or a bool.
        ValueError: out of range.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, not a bool")
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, not {_kind(value)}") from None
    if not 0 <= number < 2**31:
        raise ValueError(f"{name}: expected 0 or more, not {_number(number)}")
    return number


def drift_factor(value: float) -> float:
    """The share of a ttl that clocks may be wrong by: 0 up to, not including, 1.

    Raises:
        TypeError: not a number, or a bool.
        ValueError: out of range, or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"clock_drift_factor: expected a number, not {_kind(value)}")
    if not 0 <= value < 1:
        shown = _number(value) if isinstance(value, int) else repr(value)
        raise ValueError(f"clock_drift_factor: expected 0 <= factor < 1, not {shown}")
    return float(value)


def token(value: str | bytes) -> bytes:
    """A token as it was handed over: 40 hex digits.

    Raises:
        TypeError: neither str nor bytes.
        ValueError: not a token (the message does not repeat it).
    """
    if isinstance(value, str):
        value = value.encode("ascii", "replace")
    elif not isinstance(value, bytes):
        raise TypeError(f"expected a token of type str or bytes, not {_kind(value)}")
    if len(value) != 40 or not _TOKEN_CHARS.issuperset(value):
        raise ValueError("expected a token of 40 lower-case hex digits")
    return value


def _kind(value: object) -> str:
    return type(value).__name__


def _number(value: int) -> str:
    return str(value) if -(2**64) < value < 2**64 else "a far larger number"
