"""What callers pass: accepted, or refused before anything is sent."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.world import MS, QUICK

from redlock_fast import arguments
from redlock_fast.plan import FOREVER

NAN = math.nan
MAX_MS = 2**42


class Thousand(IntEnum):
    MS = 1000


class Index:
    """As numpy's integers are: no int, but an index."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class BadIndex:
    def __index__(self) -> int:
        raise ZeroDivisionError


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


class Bytes(bytes):
    __slots__ = ()


# -- resources ------------------------------------------------------------------------------------


@pytest.mark.case("C118")
def test_c118_str_and_its_utf8_are_one_key() -> None:
    assert arguments.resource_key("käse") == "käse".encode() == b"k\xc3\xa4se"
    assert arguments.resource_key("käse".encode()) == arguments.resource_key("käse")


@pytest.mark.case("C118")
@pytest.mark.parametrize("name", [Text("name"), Bytes(b"name"), "name", b"name"])
def test_c118_subclasses_are_what_they_hold(name: Any) -> None:
    key = arguments.resource_key(name)
    assert key == b"name"
    assert type(key) is bytes


@pytest.mark.case("C118")
@pytest.mark.case("C120")
@pytest.mark.parametrize(
    "name",
    [
        None,
        0,
        1,
        True,
        1.5,
        UUID(int=7),
        object(),
        [],
        ["name"],
        ("name",),
        {},
        bytearray(b"name"),
        memoryview(b"name"),
        Index(3),
        str,
        NotImplemented,
    ],
    ids=lambda name: type(name).__name__,
)
def test_c120_other_types(name: Any) -> None:
    with pytest.raises(TypeError, match="expected a resource of type str or bytes, not ") as info:
        arguments.resource_key(name)
    assert str(info.value).endswith(type(name).__name__)


@pytest.mark.case("C120")
@pytest.mark.parametrize("name", ["\ud800", "a\udfffb"])
def test_c120_lone_surrogates(name: str) -> None:
    with pytest.raises(ValueError, match="resource cannot be encoded as UTF-8") as info:
        arguments.resource_key(name)
    str(info.value).encode()


@pytest.mark.case("C121")
@pytest.mark.parametrize("name", ["", b"", Text(""), Bytes(b"")])
def test_c121_empty(name: Any) -> None:
    with pytest.raises(ValueError, match="resource is empty"):
        arguments.resource_key(name)


@pytest.mark.case("C121")
@pytest.mark.parametrize("unit", ["x", b"x", "é", "\U0001f512", "\0"])
def test_c121_64_kib_and_no_byte_more(unit: Any) -> None:
    size = len(arguments.resource_key(unit))
    assert len(arguments.resource_key(unit * (65536 // size))) == 65536
    with pytest.raises(ValueError, match="resource is too long"):
        arguments.resource_key(unit * (65536 // size + 1))


@pytest.mark.case("C121")
@pytest.mark.parametrize("make", [lambda: "x" * 2**20, lambda: bytes(2**20), lambda: bytes(2**26)])
def test_c121_huge(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="too long") as info:
        arguments.resource_key(make())
    assert len(str(info.value)) < 100


@pytest.mark.case("C119")
def test_c119_hostile_names_are_distinct_exact_keys() -> None:
    names = ["a\r\nSET pwn 1\r\n", "a\0b", "a\0c", " ", "%s%n", "{x}", "*", "\U0001f512", "\ufeff"]
    keys = [arguments.resource_key(name) for name in names]
    assert keys == [name.encode() for name in names]
    assert len(set(keys)) == len(names)


@given(st.text(min_size=1))
@QUICK
def test_any_text_is_its_utf8_or_refused(name: str) -> None:
    try:
        expected = name.encode()
    except UnicodeEncodeError:
        with pytest.raises(ValueError):
            arguments.resource_key(name)
    else:
        assert arguments.resource_key(name) == expected


# -- durations ------------------------------------------------------------------------------------


@pytest.mark.case("C123")
@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (0, 0),
        (1000, 1000),
        (MAX_MS, MAX_MS),
        (Thousand.MS, 1000),
        (Index(1000), 1000),
        (timedelta(seconds=1), 1000),
        (timedelta(milliseconds=1), 1),
        (timedelta(microseconds=2000), 2),
        (timedelta(0), 0),
        (timedelta(days=365), 365 * 86_400_000),
    ],
)
def test_c123_what_is_a_duration(value: Any, ms: int) -> None:
    found = arguments.milliseconds("ttl", value)
    assert found == ms
    assert type(found) is int


@pytest.mark.case("C123")
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (123.45, TypeError),
        (1000.0, TypeError),
        (NAN, TypeError),
        (math.inf, TypeError),
        (-math.inf, TypeError),
        (True, TypeError),
        (False, TypeError),
        ("1000", TypeError),
        (b"1000", TypeError),
        (None, TypeError),
        (Decimal(1000), TypeError),
        (Fraction(1000), TypeError),
        (1000 + 0j, TypeError),
        ([1000], TypeError),
        (object(), TypeError),
        (timedelta(microseconds=1), ValueError),
        (timedelta(microseconds=1500), ValueError),
        (timedelta(milliseconds=-1), ValueError),
        (timedelta.max, ValueError),
        (timedelta.min, ValueError),
        (-1, ValueError),
        (Index(-1), ValueError),
    ],
    ids=repr,
)
def test_c123_what_is_none(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="^ttl: expected ") as info:
        arguments.milliseconds("ttl", value)
    assert type(info.value) is error


@pytest.mark.case("C123")
def test_c123_a_float_is_told_about_the_unit() -> None:
    with pytest.raises(TypeError, match="seconds"):
        arguments.milliseconds("ttl", 0.5)  # type: ignore[arg-type]


def test_what_an_index_raises_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        arguments.milliseconds("ttl", BadIndex())


@pytest.mark.case("C123")
def test_c123_numpy_integers_are_integers() -> None:
    # Apart, since numpy brings threads, which tests that fork would be warned of.
    code = """
import numpy
from redlock_fast import arguments

for kind in (numpy.int64, numpy.uint16, numpy.intp):
    ms = arguments.milliseconds("ttl", kind(10_000))
    assert (ms, type(ms)) == (10_000, int)
    assert arguments.count("retries", kind(3)) == 3
for odd in (numpy.float64(10_000), numpy.bool_(True), numpy.array([10_000, 1])):
    try:
        arguments.milliseconds("ttl", odd)
    except TypeError:
        continue
    raise AssertionError(odd)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.case("C125")
@pytest.mark.parametrize(
    "value",
    [
        MAX_MS + 1,
        2**53,
        2**63 - 1,
        2**63,
        2**64,
        10**30,
        Index(2**64),
        pytest.param(10**5000, id="huge"),
    ],
)
def test_c125_too_long(value: Any) -> None:
    with pytest.raises(ValueError, match="expected at most 2\\*\\*42 ms") as info:
        arguments.ttl_ms(value, 0.01)
    assert len(str(info.value)) < 100
    with pytest.raises(ValueError):
        arguments.milliseconds("wait", value)
    with pytest.raises(ValueError):
        arguments.wait_ns(value, FOREVER)


@pytest.mark.case("C125")
@pytest.mark.parametrize(
    "value", [-(2**63), -(2**64), -(10**30), pytest.param(-(10**5000), id="huge")]
)
def test_c125_too_negative(value: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1 ms") as info:
        arguments.ttl_ms(value, 0.01)
    assert len(str(info.value)) < 100


@pytest.mark.case("C122")
@pytest.mark.parametrize("value", [0, -1, -5, Index(0), timedelta(0), timedelta(seconds=-1)])
def test_c122_ttl_of_nothing(value: Any) -> None:
    with pytest.raises(ValueError, match="^ttl: expected at least 1 ms"):
        arguments.ttl_ms(value, 0.01)


@pytest.mark.case("C122")
@pytest.mark.parametrize(
    ("factor", "least"), [(0.0, 3), (0.01, 3), (0.1, 3), (0.5, 5), (0.9, 21), (0.99, 201)]
)
def test_c122_a_ttl_is_above_its_own_drift(factor: float, least: int) -> None:
    assert arguments.ttl_ms(least, factor) == least
    for ms in range(1, least):
        with pytest.raises(ValueError, match=f"^ttl: {ms} ms is not above its own drift"):
            arguments.ttl_ms(ms, factor)


@pytest.mark.case("C35")
@pytest.mark.parametrize("ms", [2**31, 30 * 86_400_000, 365 * 86_400_000, MAX_MS])
def test_c35_long_ttls(ms: int) -> None:
    assert arguments.ttl_ms(ms, 0.01) == ms


@given(st.integers() | st.floats() | st.booleans() | st.text() | st.none() | st.timedeltas())
@QUICK
def test_a_duration_is_whole_milliseconds_or_refused(value: Any) -> None:
    with contextlib.suppress(TypeError, ValueError):
        ms = arguments.milliseconds("x", value)
        assert type(ms) is int
        assert 0 <= ms <= MAX_MS
        if isinstance(value, timedelta):
            assert timedelta(milliseconds=ms) == value
        else:
            assert type(value) is int
            assert ms == value


# -- waits ----------------------------------------------------------------------------------------


@pytest.mark.case("C127")
@pytest.mark.case("C135")
@pytest.mark.parametrize(
    ("value", "ns"),
    [
        (None, None),
        (0, 0),
        (1, MS),
        (2000, 2000 * MS),
        (MAX_MS, MAX_MS * MS),
        (math.inf, FOREVER),
        (float("inf"), FOREVER),
        (timedelta(seconds=2), 2000 * MS),
        (Index(5), 5 * MS),
    ],
)
def test_c127_waits(value: Any, ns: int | None) -> None:
    assert arguments.wait_ns(value, FOREVER) == ns


@pytest.mark.case("C127")
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ValueError),
        (NAN, TypeError),
        (-math.inf, TypeError),
        (0.0, TypeError),
        (1.5, TypeError),
        (True, TypeError),
        ("inf", TypeError),
        (Decimal("Infinity"), TypeError),
        (timedelta(milliseconds=-1), ValueError),
    ],
    ids=repr,
)
def test_c127_no_waits(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="^wait: expected "):
        arguments.wait_ns(value, FOREVER)


def test_for_ever_is_longer_than_any_wait() -> None:
    assert MAX_MS * MS < FOREVER < 2**63


# -- counts and factors ---------------------------------------------------------------------------


@pytest.mark.case("C126")
@pytest.mark.parametrize(
    ("value", "number"),
    [(0, 0), (3, 3), (2**31 - 1, 2**31 - 1), (Index(4), 4), (Thousand.MS, 1000)],
)
def test_c126_counts(value: Any, number: int) -> None:
    found = arguments.count("retries", value)
    assert found == number
    assert type(found) is int


@pytest.mark.case("C127")
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ValueError),
        (-2, ValueError),
        (2**31, ValueError),
        pytest.param(10**5000, ValueError, id="huge"),
        (1.5, TypeError),
        (3.0, TypeError),
        (NAN, TypeError),
        (math.inf, TypeError),
        (True, TypeError),
        (False, TypeError),
        ("3", TypeError),
        (None, TypeError),
        (timedelta(1), TypeError),
    ],
    ids=repr,
)
def test_c127_no_counts(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="^retries: expected ") as info:
        arguments.count("retries", value)
    assert len(str(info.value)) < 100


@pytest.mark.parametrize("value", [0, 0.0, 0.01, 0.5, 0.999999, -0.0])
def test_drift_factors(value: float) -> None:
    found = arguments.drift_factor(value)
    assert found == value
    assert type(found) is float


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (1, ValueError),
        (1.0, ValueError),
        (-0.01, ValueError),
        (math.inf, ValueError),
        (NAN, ValueError),
        pytest.param(10**5000, ValueError, id="huge"),
        (True, TypeError),
        (False, TypeError),
        ("0.01", TypeError),
        (None, TypeError),
        (Decimal("0.01"), TypeError),
        (Fraction(1, 100), TypeError),
    ],
    ids=repr,
)
def test_no_drift_factors(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="^clock_drift_factor: expected "):
        arguments.drift_factor(value)


# -- tokens ---------------------------------------------------------------------------------------

TOKEN = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("value", [TOKEN, TOKEN.encode(), "0" * 40])
def test_tokens(value: Any) -> None:
    found = arguments.token(value)
    assert type(found) is bytes
    assert found == (value if isinstance(value, bytes) else value.encode())


@pytest.mark.case("C153")
@pytest.mark.parametrize(
    "value",
    [
        "",
        b"",
        TOKEN[:-1],
        TOKEN + "0",
        TOKEN.upper(),
        "g" * 40,
        "é" * 40,
        "\uff10" * 40,
        "\ud800" * 40,
        TOKEN[:-1] + "\n",
        TOKEN[:-1].encode() + b"\0",
        " " * 40,
        TOKEN[:-1] + "?",
    ],
)
def test_c153_no_tokens_and_no_message_repeats_them(value: Any) -> None:
    with pytest.raises(ValueError, match="^expected a token of 40 lower-case hex digits$"):
        arguments.token(value)


@pytest.mark.parametrize("value", [None, 1, bytearray(TOKEN.encode()), [TOKEN]])
def test_tokens_of_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match="expected a token of type str or bytes, not ") as info:
        arguments.token(value)
    assert TOKEN not in str(info.value)
