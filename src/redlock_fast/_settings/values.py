"""Single values: passwords, texts, numbers and truth values, as redis-py users write them.

Given: a value of any type and the name of its option. Returns: the value in the one type that the
rest of the package knows. Every complaint is a `Refused`, whose text names the option and never
shows the value: out of a URL that was not escaped it may be a piece of a password.
"""

from __future__ import annotations

import contextlib
import hmac
import operator
import re
from typing import NoReturn, final

__all__ = ["Refused", "Secret", "integer", "is_true", "maybe_bytes", "maybe_secret", "maybe_text"]

# What redis-py and valkey-py take for false (FALSE_STRINGS of both), compared in upper case.
FALSE = frozenset(["", "0", "F", "FALSE", "N", "NO", "OFF", "DISABLED"])


class Refused(Exception):
    """Why one master is refused: text only. Never leaves `options.parse_masters`."""


@final
class Secret:
    """The bytes of a password, which no repr, message, log line or pickle shows.

    Equality takes the same time wherever two values of one length differ. Pickling and copying
    raise `TypeError`.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if not isinstance(value, bytes):
            raise TypeError(f"a Secret is made of bytes, not {type(value).__name__}")
        self._value = value

    def reveal(self) -> bytes:
        """The bytes themselves, to be sent and forgotten."""
        return self._value

    def __repr__(self) -> str:
        return "Secret('***')"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(Secret)  # one for all: a hash of the value would say something about it

    def __getstate__(self, protocol: object = None) -> NoReturn:
        raise TypeError("a Secret cannot be pickled or copied")

    __reduce_ex__ = __getstate__


def is_true(value: object) -> bool:
    """The truth of a value; texts such as 'false', '0', 'no' and '' are false."""
    return value.upper() not in FALSE if isinstance(value, str) else bool(value)


def integer(name: str, value: object, low: int, high: int) -> int:
    """An int, or a str of digits, from `low` to `high`."""
    number = None
    if isinstance(value, str):
        if re.fullmatch("[0-9]{1,10}", value):
            number = int(value)
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
    if number is None or not low <= number <= high:
        raise Refused(f"{name} must be an integer from {low} to {high}")
    return number


def maybe_bytes(name: str, value: object) -> bytes | None:
    """A str in UTF-8, whatever `encoding` says; None for None and for an empty one (redis-py)."""
    if isinstance(value, Secret):
        value = value.reveal()
    with contextlib.suppress(UnicodeError):
        value = value.encode() if isinstance(value, str) else value
    if value is None or isinstance(value, bytes):
        return value or None
    if isinstance(value, str):
        raise Refused(f"{name} is not valid UTF-8")
    raise Refused(f"{name} must be str or bytes, not {type(value).__name__}")


def maybe_secret(name: str, value: object) -> Secret | None:
    """Like `maybe_bytes`, as a `Secret`."""
    found = maybe_bytes(name, value)
    return None if found is None else Secret(found)


def maybe_text(name: str, value: object) -> str | None:
    """Like `maybe_bytes`, as str."""
    try:
        return (maybe_bytes(name, value) or b"").decode() or None
    except UnicodeError:
        raise Refused(f"{name} is not valid UTF-8") from None
