"""How long acquire goes on trying: `retries`, `wait`, and what ends a wait."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from integration.helpers import (
    HOUR,
    NT,
    SLACK_MS,
    MakeClient,
    Monitor,
    Stopwatch,
    are_clean,
    calls_of,
    closed_port,
    eventually,
    occupy,
    refresh_stats,
    vacate,
)

from redlock_fast import ClosedError, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters


def _tries(masters: LocalMasters) -> list[int]:
    return [calls_of(master).get("set", 0) for master in masters]


# -- one try -----------------------------------------------------------------------------------


@pytest.mark.case("C126")
@pytest.mark.case("C135")
@pytest.mark.parametrize(
    ("settings", "wait"),
    [
        ({"retries": 0}, None),
        ({"retries": 0, "retry_delay": 0}, None),
        ({"retries": 5}, 0),
        ({"retries": 5, "retry_delay": 0}, timedelta(0)),
    ],
)
def test_c126_exactly_one_try(
    masters: LocalMasters, make_client: MakeClient, settings: dict[str, Any], wait: Any
) -> None:
    client = make_client(masters, **{"retry_delay": 5000, **settings})
    with Monitor(masters[0]) as one, Monitor(masters[1]) as two, Monitor(masters[2]) as three:
        occupy(masters, "res")
        with Stopwatch() as watch:
            assert client.acquire("res", HOUR, wait=wait) is None
        assert client.locked("res")  # behind the last SET
        for monitor in (one, two, three):
            ours = [c for c in monitor.commands("SET") if c[2] != b"rival"]
            assert len(ours) == 1
    assert watch.ms < SLACK_MS

    vacate(masters, "res")
    lock = client.acquire("res", HOUR, wait=wait)
    assert lock is not None


@pytest.mark.case("C126")
def test_c126_retries_without_delay(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, retries=4, retry_delay=0)
    occupy(masters, "res")
    refresh_stats(masters)

    with Stopwatch() as watch:
        assert client.acquire("res", HOUR) is None

    assert watch.ms < SLACK_MS
    assert client.locked("res")
    assert _tries(masters) == [5] * 3


@pytest.mark.case("C126")
def test_c126_an_open_wait_without_delay_does_not_spin(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, retry_delay=0)
    occupy(masters, "res")
    refresh_stats(masters)
    cpu = time.process_time()

    with Stopwatch() as watch:
        assert client.acquire("res", HOUR, wait=500) is None

    assert 490 <= watch.ms <= 500 + SLACK_MS
    # 5 ms between two tries, and one try more at each end.
    assert max(_tries(masters)) <= 500 / 5 + 2
    assert time.process_time() - cpu < 0.25


# -- several -----------------------------------------------------------------------------------


def test_retries_are_tries_after_the_first(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, retries=3, retry_delay=1)
    occupy(masters, "res")
    refresh_stats(masters)

    assert client.acquire("res", HOUR) is None
    assert client.locked("res")
    assert _tries(masters) == [4] * 3
    assert client.stats()["contended"] == 1


def test_the_pause_is_drawn_from_zero_to_retry_delay(
    masters: LocalMasters, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = []
    real = random.random
    monkeypatch.setattr(random, "random", lambda: draws.append(0.5) or 0.5)  # type: ignore[func-returns-value]
    client = make_client(masters, retries=4, retry_delay=100)
    monkeypatch.setattr(random, "random", real)
    occupy(masters, "res")

    with Stopwatch() as watch:
        assert client.acquire("res", HOUR) is None

    # Half of 100 ms, four times, and no sleep after the last try.
    assert 4 * 50 <= watch.ms < 4 * 50 + SLACK_MS
    assert len(draws) >= 4


def test_a_retry_gets_the_lock(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, retries=1000, retry_delay=20)
    occupy(masters, "res", 200)

    with Stopwatch() as watch:
        lock = client.acquire("res", HOUR)

    assert lock
    assert 100 < watch.ms < 200 + 20 + SLACK_MS
    assert lock.validity > HOUR - HOUR / 100 - 2 - SLACK_MS  # counted from the last try


# -- a limit -----------------------------------------------------------------------------------


@pytest.mark.case("C128")
@pytest.mark.parametrize("retries", [0, 3, 10_000])
def test_c128_the_calls_wait_wins(
    masters: LocalMasters, make_client: MakeClient, retries: int
) -> None:
    client = make_client(masters, retries=retries, retry_delay=50)
    occupy(masters, "res")

    for wait in (200, timedelta(milliseconds=200)):
        with Stopwatch() as watch:
            assert client.acquire("res", HOUR, wait=wait) is None
        assert 190 <= watch.ms <= 200 + SLACK_MS


@pytest.mark.case("C128")
def test_c128_and_so_does_no_wait(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, retries=10_000, retry_delay=50)
    occupy(masters, "res")

    with Stopwatch() as watch:
        assert client.acquire("res", HOUR, wait=0) is None
    assert watch.ms <= SLACK_MS


@pytest.mark.case("C128")
def test_c128_the_calls_ttl_wins(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", 60_000)
    assert lock
    assert client.extend(lock, 120_000)
    assert 60_000 < lock.remaining() < 120_000
    assert lock.ttl == 120_000


def test_a_last_try_is_made_just_before_the_limit(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    """However long the drawn pauses are, what is freed before the end is got."""
    client = make_client(masters, retry_delay=60_000)
    occupy(masters, "res", 100)

    with Stopwatch() as watch:
        lock = client.acquire("res", HOUR, wait=500)

    assert lock
    assert watch.ms <= 500 + SLACK_MS


def test_the_contended_return_is_no_later_than_wait_and_one_try(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT, retry_delay=10)
    occupy(masters, "res")
    masters.pause(2)  # never needed for the verdict

    for _ in range(3):
        with Stopwatch() as watch:
            assert client.acquire("res", HOUR, wait=100) is None
        assert 90 <= watch.ms <= 100 + NT + SLACK_MS
    masters.resume(2)


def test_a_wait_ends_with_the_last_trys_reason(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, retry_delay=10, master_timeout=NT)
    occupy(masters, "res", 100)

    def kill() -> None:
        masters.kill(0)
        masters.kill(1)

    killer = threading.Timer(0.05, kill)
    killer.start()

    with pytest.raises(NoQuorum):
        client.acquire("res", HOUR, wait=600)
    killer.join()


# -- for ever ----------------------------------------------------------------------------------


@pytest.mark.case("C133")
def test_for_ever_until_another_thread_releases(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, retry_delay=20)
    held = client.acquire("res", HOUR)
    assert held
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(client.acquire("res", HOUR, wait=math.inf)))
    waiter.start()
    time.sleep(0.3)
    assert not got

    assert client.release(held)

    with Stopwatch() as watch:
        waiter.join(10)
    assert watch.ms <= 20 + SLACK_MS
    assert got[0]
    assert got[0].token != held.token


@pytest.mark.case("C133")
def test_c133_a_waiter_gets_what_a_dead_holder_leaves(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    """As soon as its ttl is over; nothing local is waited for."""
    dead = make_client(masters)
    client = make_client(masters, retry_delay=50)
    assert dead.acquire("res", 700)
    dead.close()
    with Stopwatch() as watch:
        lock = client.acquire("res", HOUR, wait=10_000)
    assert lock
    assert 600 - SLACK_MS < watch.ms < 700 + 50 + SLACK_MS


def test_many_waiters_get_their_turns(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, retry_delay=10)
    turns = []

    def take(number: int) -> None:
        lock = client.acquire("res", HOUR, wait=math.inf)
        assert lock
        turns.append(number)
        assert client.release(lock)

    threads = [threading.Thread(target=take, args=[i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(turns) == list(range(8))
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C136")
def test_for_ever_without_a_quorum_warns_once(
    masters: LocalMasters, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(masters, retry_delay=10, master_timeout=NT)
    masters.kill(0)
    masters.kill(1)
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(client.acquire("res", HOUR, wait=math.inf)))
    cpu = time.process_time()
    with caplog.at_level(logging.WARNING, "redlock_fast"):
        waiter.start()
        time.sleep(0.7)
        assert not got
        assert time.process_time() - cpu < 0.35
        for i in (0, 1):
            masters.restart(i)
        waiter.join(10)
    assert got[0]
    warnings = [r.getMessage() for r in caplog.records if "without a limit" in r.getMessage()]
    assert len(warnings) == 1
    assert masters[0].address in warnings[0]


def test_contention_for_ever_does_not_warn(
    masters: LocalMasters, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(masters, retry_delay=10)
    occupy(masters, "res", 300)
    with caplog.at_level(logging.WARNING, "redlock_fast"):
        assert client.acquire("res", HOUR, wait=math.inf)
    assert caplog.records == []


@pytest.mark.parametrize("down", [True, False])
def test_closing_ends_a_wait(masters: LocalMasters, make_client: MakeClient, down: bool) -> None:
    client = make_client(masters, retry_delay=10_000, master_timeout=NT)
    if down:
        for i in range(3):
            masters.kill(i)
    else:
        occupy(masters, "res")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.acquire("res", HOUR, wait=math.inf)
        except ClosedError as error:
            errors.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.2)
    with Stopwatch() as watch:
        client.close()
        for waiter in waiters:
            waiter.join(10)
    assert watch.ms < NT + 100 + SLACK_MS
    assert len(errors) == 3


def test_a_wait_costs_no_time_when_the_lock_is_free(client: Redlock) -> None:
    with Stopwatch() as watch:
        assert client.acquire("one", HOUR, wait=60_000)
        assert client.acquire("two", HOUR, wait=math.inf)
    assert watch.ms < 2 * SLACK_MS


def test_a_wait_on_closed_ports_lasts_as_long_as_it_says(make_client: MakeClient) -> None:
    with closed_port() as port:
        client = make_client([f"redis://127.0.0.1:{port}/{db}" for db in range(3)])
        with Stopwatch() as watch, pytest.raises(NoQuorum):
            client.acquire("res", HOUR, wait=300)
    assert 290 <= watch.ms <= 300 + SLACK_MS
