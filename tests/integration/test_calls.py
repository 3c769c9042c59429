"""Arguments: what is accepted means what it says, what is refused is refused before any byte."""

from __future__ import annotations

import contextlib
import enum
import math
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from integration.helpers import (
    HOUR,
    MakeClient,
    all_have,
    are_clean,
    calls_of,
    eventually,
    keys_of,
    pttls_of,
    refresh_stats,
    taught,
)

from redlock_fast import ConfigurationError, Lock, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters


@pytest.fixture(scope="module")
def trio() -> Iterator[LocalMasters]:
    """Three masters for all tests of this module: there are many, and none harms a server."""
    with LocalMasters(3) as masters:
        yield taught(masters)


@pytest.fixture
def masters(trio: LocalMasters) -> LocalMasters:
    """These three, empty and with their counts at zero."""
    trio.flush_all()
    refresh_stats(trio)
    return trio


class Text(str):
    __slots__ = ()


class Data(bytes):
    pass


class Index:
    """Stands for numpy integers and the like."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Ttl(enum.IntEnum):
    LONG = 10**4


def _sent(masters: LocalMasters) -> list[int]:
    return [calls_of(m).get("set", 0) + calls_of(m).get("evalsha", 0) for m in masters]


def _held(client: Redlock, masters: LocalMasters) -> Lock:
    lock = client.acquire("held", HOUR)
    assert lock is not None
    all_have(masters, "held", lock.token)
    return lock


# -- names -------------------------------------------------------------------------------------


@pytest.mark.case("C118")
def test_c118_text_is_its_utf8(client: Redlock, masters: LocalMasters) -> None:
    name = "k\u00e4se"
    lock = client.acquire(name, HOUR)
    assert lock
    all_have(masters, name.encode(), lock.token)

    assert client.acquire(name.encode(), HOUR) is None
    assert client.acquire(Text(name), HOUR) is None
    assert client.acquire(Data(name.encode()), HOUR) is None
    assert client.locked(name.encode())
    assert keys_of(masters) == [[name.encode()]] * 3
    assert client.release(lock)


@pytest.mark.case("C118")
@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_c118_other_buffers_are_refused(
    client: Redlock, masters: LocalMasters, kind: Callable[[bytes], Any]
) -> None:
    for call in (
        lambda: client.acquire(kind(b"res"), HOUR),
        lambda: client.acquire_many([kind(b"res")], HOUR),
        lambda: client.lock(kind(b"res"), HOUR),
        lambda: client.locked(kind(b"res")),
        lambda: client.adopt(kind(b"res"), "0" * 40, HOUR),
        lambda: client.release_token(kind(b"res"), "0" * 40),
    ):
        with pytest.raises(TypeError, match="resource"):
            call()
    assert _sent(masters) == [0] * 3


@pytest.mark.case("C119")
def test_c119_hostile_names_are_exact_keys(client: Redlock, masters: LocalMasters) -> None:
    names: list[str | bytes] = [
        "a\r\nSET pwn 1\r\n",
        "a\0b",
        "a\0c",
        " ",
        "%s%n",
        "{x}",
        "*",
        "\U0001f512",
        "\ufeff",
        "\"'\\",
        "$-1\r\n",
        b"\xff\xfe\x80",
        "-ERR x",
        "e\u0301",
        "\u00e9",
        "A",
        "a",
    ]
    expected = sorted(name.encode() if isinstance(name, str) else name for name in names)

    locks = [client.acquire(name, HOUR) for name in names]

    assert all(locks)
    eventually(lambda: keys_of(masters) == [expected] * 3)
    for lock in locks:
        assert lock
        assert client.extend(lock, HOUR)
        assert client.owned(lock)
        assert client.release(lock)
    eventually(lambda: are_clean(masters))
    many = client.acquire_many(names, HOUR)
    assert all(many)
    eventually(lambda: keys_of(masters) == [expected] * 3)
    assert client.release_many([lock for lock in many if lock]) == [True] * len(names)
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C120")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        (None, TypeError),
        (0, TypeError),
        (True, TypeError),
        (1.5, TypeError),
        (uuid.uuid4(), TypeError),
        (object(), TypeError),
        ([], TypeError),
        (["res"], TypeError),
        ("\ud800", ValueError),
        (b"", ValueError),
        ("", ValueError),
    ],
)
def test_c120_other_types_are_refused(
    client: Redlock, masters: LocalMasters, name: Any, error: type[Exception]
) -> None:
    for call in (
        lambda: client.acquire(name, HOUR),
        lambda: client.acquire(name, HOUR, wait=1000),
        lambda: client.acquire_many(["fine", name], HOUR),
        lambda: client.lock(name, HOUR),
        lambda: client.locked(name),
        lambda: client.adopt(name, "0" * 40, HOUR),
        lambda: client.release_token(name, "0" * 40),
    ):
        with pytest.raises(error, match="resource"):
            call()
    assert _sent(masters) == [0] * 3
    assert are_clean(masters)


@pytest.mark.case("C121")
def test_c121_64_kib_and_not_a_byte_more(client: Redlock, masters: LocalMasters) -> None:
    for name in ("x" * 65536, b"y" * 65536, "\u00e9" * 32768):
        lock = client.acquire(name, HOUR)
        assert lock
        all_have(masters, name, lock.token)
        assert client.extend(lock)
        assert client.release(lock)
    eventually(lambda: are_clean(masters))
    refused: tuple[str | bytes, ...] = (
        "x" * 65537,
        b"y" * 65537,
        "\u00e9" * 32769,
        bytes(10**6),
        "\u20ac" * 2**24,
        bytes(64 * 2**20),
        bytes(600 * 10**6),
    )
    for name in refused:
        with pytest.raises(ValueError, match="too long") as caught:
            client.acquire(name, HOUR)
        assert len(str(caught.value)) < 200
        with pytest.raises(ValueError, match="too long"):
            client.acquire_many([name], HOUR)
    assert client.acquire("x", HOUR)  # the connections are as they were
    assert [row["reconnects"] for row in client.stats()["masters"]] == [0] * 3


@pytest.mark.case("C121")
def test_c121_many_long_names(client: Redlock, masters: LocalMasters) -> None:
    """Eight MiB to each master, far more than the buffer of a socket."""
    names = [b"%0*d" % (65536, i) for i in range(128)]
    locks = client.acquire_many(names, HOUR)
    assert all(locks)
    assert client.release_many([lock for lock in locks if lock]) == [True] * 128
    eventually(lambda: are_clean(masters))


# -- ttl ---------------------------------------------------------------------------------------

_BAD_TTLS: list[tuple[Any, type[Exception]]] = [
    (0, ValueError),
    (-1, ValueError),
    (-5, ValueError),
    (timedelta(0), ValueError),
    (timedelta(seconds=-1), ValueError),
    (1, ValueError),  # nothing left after the drift
    (2, ValueError),
    (123.45, TypeError),
    (1000.0, TypeError),
    (True, TypeError),
    (False, TypeError),
    ("1000", TypeError),
    (b"1000", TypeError),
    (math.nan, TypeError),
    (math.inf, TypeError),
    (Decimal(1000), TypeError),
    (Fraction(1000), TypeError),
    (1000j, TypeError),
    ([1000], TypeError),
    (timedelta(microseconds=1500), ValueError),
    (2**42 + 1, ValueError),
    (2**53, ValueError),
    (2**63 - 1, ValueError),
    (2**63, ValueError),
    (2**64, ValueError),
    (10**30, ValueError),
    (-(10**30), ValueError),
    (timedelta.max, ValueError),
    (Index(0), ValueError),
]


@pytest.mark.case("C122")
@pytest.mark.case("C123")
@pytest.mark.case("C125")
@pytest.mark.parametrize(("ttl", "error"), [*_BAD_TTLS, (None, TypeError)])
def test_c122_c123_c125_refused_ttls(
    client: Redlock, masters: LocalMasters, ttl: Any, error: type[Exception]
) -> None:
    lock = _held(client, masters)
    before = _sent(masters)
    calls: list[Callable[[], Any]] = [
        lambda: client.acquire("res", ttl),
        lambda: client.acquire("res", ttl, wait=math.inf),
        lambda: client.acquire_many(["res"], ttl),
        lambda: client.lock("res", ttl),
        lambda: client.adopt("res", "0" * 40, ttl),
    ]
    if ttl is not None:  # None: the ttl that the lock has
        calls += [
            lambda: client.extend(lock, ttl),
            lambda: lock.extend(ttl),
            lambda: client.extend_many([lock], ttl),
        ]
    for call in calls:
        with pytest.raises(error, match="ttl"):
            call()
    assert _sent(masters) == before
    assert keys_of(masters) == [[b"held"]] * 3
    assert min(pttls_of(masters, "held")) > HOUR - 60_000
    assert lock.held
    assert lock.remaining() > HOUR - HOUR / 100 - 60_000


@pytest.mark.case("C123")
@pytest.mark.parametrize(
    ("ttl", "ms"),
    [
        (10_000, 10_000),
        (timedelta(seconds=10), 10_000),
        (timedelta(milliseconds=10_001), 10_001),
        (Ttl.LONG, 10_000),
        (Index(10_000), 10_000),
        (timedelta(days=1), 24 * HOUR),
        (2**42, 2**42),
    ],
)
def test_c123_accepted_ttls(client: Redlock, masters: LocalMasters, ttl: Any, ms: int) -> None:
    lock = client.acquire("res", ttl)
    assert lock
    assert lock.ttl == ms
    all_have(masters, "res", lock.token)
    assert all(ms - 10_000 < pttl <= ms for pttl in pttls_of(masters, "res"))
    assert client.extend(lock, ttl)
    assert lock.ttl == ms


def test_the_shortest_ttl_leaves_something(client: Redlock) -> None:
    assert client.acquire("res", 100, wait=5000)
    with contextlib.suppress(NoQuorum):  # 0.97 ms: accepted, whatever comes of it
        client.acquire("other", 3)


# -- wait, retries and the rest ----------------------------------------------------------------


@pytest.mark.case("C127")
@pytest.mark.parametrize(
    ("wait", "error"),
    [
        (-1, ValueError),
        (-2, ValueError),
        (math.nan, TypeError),
        (-math.inf, TypeError),
        (1.5, TypeError),
        (0.0, TypeError),
        (True, TypeError),
        ("3", TypeError),
        (2**42 + 1, ValueError),
        (timedelta(seconds=-1), ValueError),
    ],
)
def test_c127_refused_waits(
    client: Redlock, masters: LocalMasters, wait: Any, error: type[Exception]
) -> None:
    for call in (
        lambda: client.acquire("res", HOUR, wait=wait),
        lambda: client.acquire_many(["res"], HOUR, wait=wait),
        lambda: client.lock("res", HOUR, wait=wait),
    ):
        with pytest.raises(error, match="wait"):
            call()
    assert _sent(masters) == [0] * 3


@pytest.mark.case("C127")
@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("retries", -1, ValueError),
        ("retries", -2, ValueError),
        ("retries", 1.5, TypeError),
        ("retries", 2.0, TypeError),
        ("retries", math.nan, TypeError),
        ("retries", math.inf, TypeError),
        ("retries", True, TypeError),
        ("retries", "3", TypeError),
        ("retries", None, TypeError),
        ("retries", 2**31, ValueError),
        ("retries", 10**30, ValueError),
        ("retry_delay", -1, ValueError),
        ("retry_delay", math.nan, TypeError),
        ("retry_delay", math.inf, TypeError),
        ("retry_delay", 0.2, TypeError),
        ("retry_delay", None, TypeError),
        ("retry_delay", 2**42 + 1, ValueError),
        ("clock_drift_factor", -0.01, ValueError),
        ("clock_drift_factor", 1, ValueError),
        ("clock_drift_factor", math.nan, ValueError),
        ("clock_drift_factor", math.inf, ValueError),
        ("clock_drift_factor", True, TypeError),
        ("clock_drift_factor", "0.01", TypeError),
        ("clock_drift_factor", None, TypeError),
        ("master_timeout", 0, ValueError),
        ("master_timeout", -1, ValueError),
        ("master_timeout", 0.05, TypeError),
        ("master_timeout", math.inf, TypeError),
        ("master_timeout", None, TypeError),
        ("connect_timeout", 0, ValueError),
        ("connect_timeout", 1.0, TypeError),
        ("connect_timeout", None, TypeError),
    ],
)
def test_c127_refused_settings(setting: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=setting):
        Redlock(["redis://127.0.0.1:1"], **{setting: value})


@pytest.mark.case("C127")
def test_c127_accepted_settings(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(
        masters,
        retries=Index(2),
        retry_delay=timedelta(milliseconds=5),
        clock_drift_factor=0,
        master_timeout=timedelta(seconds=2),
        connect_timeout=Index(3000),
    )
    lock = client.acquire("res", HOUR)
    assert lock
    assert HOUR - 2 - 60_000 < lock.validity <= HOUR - 2


@pytest.mark.parametrize(
    "masters",
    [
        [],
        "redis://127.0.0.1:1",
        None,
        5,
        ["redis://127.0.0.1:1", "redis://127.0.0.1:1"],
        ["redis://127.0.0.1:1/0", {"host": "127.0.0.1", "port": 1}],
        ["http://127.0.0.1:1"],
        ["127.0.0.1:1"],
        ["no url at all"],
        [""],
        [None],
        [{"hots": "127.0.0.1"}],
        [f"redis://127.0.0.1:{port}" for port in range(1, 34)],
    ],
)
def test_masters_that_make_no_sense(masters: Any) -> None:
    with pytest.raises((ConfigurationError, TypeError)):
        Redlock(masters)


@pytest.mark.parametrize(
    ("token", "error"),
    [
        (None, TypeError),
        (5, TypeError),
        ("", ValueError),
        ("0" * 39, ValueError),
        ("0" * 41, ValueError),
        ("A" * 40, ValueError),
        ("\u00e9" * 40, ValueError),
        (b"\xff" * 40, ValueError),
    ],
)
def test_tokens_that_are_none(
    client: Redlock, masters: LocalMasters, token: Any, error: type[Exception]
) -> None:
    for call in (
        lambda: client.adopt("res", token, HOUR),
        lambda: client.release_token("res", token),
    ):
        with pytest.raises(error, match="token") as caught:
            call()
        if token:
            assert str(token) not in str(caught.value)
    assert _sent(masters) == [0] * 3


@pytest.mark.parametrize("not_a_lock", [None, "res", object(), ("res", "token")])
def test_what_is_no_lock(client: Redlock, not_a_lock: Any) -> None:
    for call in (
        lambda: client.release(not_a_lock),
        lambda: client.extend(not_a_lock),
        lambda: client.owned(not_a_lock),
        lambda: client.release_many([not_a_lock]),
        lambda: client.extend_many([not_a_lock]),
    ):
        with pytest.raises(TypeError, match="Lock"):
            call()


def test_a_lock_is_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="acquire"):
        Lock()
    with pytest.raises(TypeError, match="acquire"):
        Lock("res", 1000)
