"""What a lock does next: tries, pauses, clean-ups, extensions; plans driven through `World`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.world import (
    ACQUIRE,
    EXTEND,
    FOREIGN,
    MS,
    NO,
    OK,
    QUICK,
    T0,
    YES,
    Master,
    World,
    acquire,
    commands,
)

from redlock_fast import plan
from redlock_fast._core.op import Op
from redlock_fast.errors import NoQuorum

RIVAL = b"rival"
EVERYBODY = plan.EVERYBODY
Setup = Callable[[], World]


def taken(n: int = 3, held: int = 3, **settings: Any) -> World:
    """A world where a rival holds `k` on the last `held` masters."""
    world = World(n, **settings)
    for i in range(n - held, n):
        world.plant(i)
    return world


def acquired(n: int = 3, ttl_ms: int = 1000, **settings: Any) -> tuple[World, Any]:
    """A world, and a lock on `k` that it holds everywhere."""
    world = World(n, **settings)
    hold = world.acquire(ttl_ms=ttl_ms)
    world.settle()
    assert world.values() == [hold.secret] * n
    return world, hold


def outcomes(error: NoQuorum) -> list[str]:
    return [report.outcome for report in error.reports]


def starts(world: World) -> list[int]:
    """When each round began, in ms after T0."""
    return [(op.start_ns - T0) // MS for op in world.ops]


def counted(world: World) -> dict[str, int]:
    return {name: n for name, n in world.fleet.stats().items() if name != "masters" and n}


# -- acquire: verdicts ----------------------------------------------------------------------------


@pytest.mark.case("C01")
@pytest.mark.case("C02")
@pytest.mark.parametrize("n", range(1, 8))
def test_c02_acquired_if_half_and_one_can_grant_else_clean(n: int) -> None:
    for k in range(n + 1):
        world = taken(n, n - k)
        hold = world.acquire()
        world.settle()
        assert (hold is not None) == (k >= n // 2 + 1)
        if hold is None:
            assert world.values() == [None] * k + [RIVAL] * (n - k)
            assert world.clean()
        else:
            assert world.values() == [hold.secret] * k + [RIVAL] * (n - k)


@pytest.mark.case("C01")
@pytest.mark.case("C03")
@pytest.mark.case("C36")
@pytest.mark.parametrize("since", ["before", "after"])
@pytest.mark.parametrize(
    ("n", "down", "held", "expected"),
    [
        (5, [3, 4], [2], None),  # no grant is possible, and three of five did answer
        (5, [2, 3, 4], [], NoQuorum),
        (2, [1], [], NoQuorum),
        (4, [2, 3], [], NoQuorum),
        (4, [3], [], True),
        (3, [2], [], True),
        (3, [2], [0, 1], None),
        (3, [2], [1], None),
        (1, [0], [], NoQuorum),
    ],
)
def test_c01_masters_that_are_down(
    n: int, down: list[int], held: list[int], expected: Any, since: str
) -> None:
    world = World(n, ready=since == "after")
    for i in down:
        world.masters[i].up = False
        if since == "after":
            world.cut(i)
    for i in held:
        world.plant(i)
    if expected is NoQuorum:
        with pytest.raises(NoQuorum) as info:
            world.acquire()
        words = outcomes(info.value)
        assert [words[i] for i in down] == ["refused"] * len(down)
        assert len(words) == n
    else:
        hold = world.acquire()
        assert (hold is not None) == (expected is True)
    world.settle()
    if expected is not True:
        assert world.clean()
    assert [world.masters[i].get(b"k", world.now) for i in held] == [RIVAL] * len(held)


@pytest.mark.case("C37")
def test_c37_an_outage_is_not_contention() -> None:
    world = World(3)
    for i in (1, 2):
        world.masters[i].up = False
        world.cut(i, "closed", "connection reset by peer")
    with pytest.raises(NoQuorum, match="cannot acquire: no quorum of answers") as info:
        world.acquire()
    assert info.value.reports[0].outcome in ("granted", "unanswered")
    assert [str(report) for report in info.value.reports[1:]] == [
        "127.0.0.1:7002 refused (connection refused)",
        "127.0.0.1:7003 refused (connection refused)",
    ]
    world.settle()
    assert world.clean()
    assert counted(world) == {"no_quorum": 1}
    rivals = taken(3)
    assert rivals.acquire() is None
    assert counted(rivals) == {"contended": 1}


@pytest.mark.case("C163")
@pytest.mark.case("C54")
def test_c163_every_masters_own_reason() -> None:
    world = World(5, patience_ms=50)
    world.plant(1)
    world.masters[2].up = False
    world.cut(2)
    world.masters[3].stopped = True
    world.masters[4].answers["SET"] = b"-NOPERM this user has no permissions to access 'k'\r\n"
    with pytest.raises(NoQuorum) as info:
        world.acquire()
    assert outcomes(info.value) == ["granted", "taken", "refused", "timeout", "NOPERM"]
    assert [report.address for report in info.value.reports] == [
        f"127.0.0.1:{7001 + i}" for i in range(5)
    ]
    text = str(info.value)
    assert "127.0.0.1:7005 NOPERM after 0.0 ms (NOPERM this user has no permissions" in text
    assert counted(world) == {"no_quorum": 1}


@pytest.mark.case("C153")
def test_c153_no_token_in_an_error() -> None:
    world = taken(3, 1)
    world.masters[1].answers["SET"] = b"-OOM no\r\n"
    world.masters[0].answers["SET"] = b"-MISCONF no\r\n"
    with pytest.raises(NoQuorum) as info:
        world.acquire(b"a\r\nb")
    for token in world.tokens:
        assert token.decode() not in str(info.value) + repr(info.value.reports)
    assert str(info.value).isprintable()


@pytest.mark.case("C50")
@pytest.mark.parametrize("n", [1, 3])
def test_c50_misconf(n: int) -> None:
    world = World(n)
    world.masters[-1].answers["SET"] = b"-MISCONF Redis is configured to save RDB snapshots\r\n"
    if n == 3:
        assert world.acquire()
    else:
        with pytest.raises(NoQuorum, match="MISCONF Redis is configured"):
            world.acquire()


@pytest.mark.case("C38")
@pytest.mark.case("C40")
def test_c38_hung_masters() -> None:
    world = World(3, patience_ms=50)
    world.masters[2].stopped = True
    for j in range(20):
        began = world.now
        hold = world.acquire(b"%d" % j)
        assert hold
        assert world.now == began  # nobody waits for it
        assert world.release(hold)
    for master in world.masters:
        master.stopped = True
    began = world.now
    with pytest.raises(NoQuorum):
        world.acquire(wait_ns=0)
    assert world.now - began == 50 * MS
    began = world.now
    with pytest.raises(NoQuorum):
        world.acquire(wait_ns=1000 * MS)
    assert 1000 * MS - MS <= world.now - began <= 1050 * MS
    for master in world.masters:
        master.stopped = False
    world.settle()
    assert world.acquire()
    world.settle()
    assert world.fleet.stats()["masters"][2]["state"] == "ready"


@pytest.mark.case("C39")
@pytest.mark.case("C11")
@pytest.mark.case("C12")
@pytest.mark.parametrize("granted", [True, False])
def test_c11_c12_a_master_whose_reply_is_lost_is_cleaned_too(granted: bool) -> None:
    world = World(3) if granted else taken(3, 2)
    lossy = world.masters[0]
    lossy.mute = True  # it executes, nobody hears
    hold = world.acquire()
    if granted:
        assert hold
        assert lossy.get(b"k", world.now) == hold.secret
        assert world.release(hold) is True
    else:
        assert hold is None
    world.settle()
    assert world.clean()


# -- acquire: validity ----------------------------------------------------------------------------


@pytest.mark.case("C04")
@pytest.mark.parametrize(
    ("ttl_ms", "elapsed_ms", "validity"), [(10_000, 300, 9598), (100, 20, 77), (1000, 0, 988)]
)
def test_c04_validity(ttl_ms: int, elapsed_ms: int, validity: int) -> None:
    world = World(3, patience_ms=1000)
    for master in world.masters:
        master.delay_ns = elapsed_ms * MS
    began = world.now
    hold = world.acquire(ttl_ms=ttl_ms)
    assert hold.validity_ns == validity * MS
    assert hold.deadline_ns == began + (validity + elapsed_ms) * MS
    assert (hold.state, hold.reason, hold.ttl_ms) == (plan.HELD, "", ttl_ms)
    assert hold.reached == 0b111
    assert counted(world) == {"acquired": 1}


@pytest.mark.case("C09")
@given(
    st.lists(st.integers(0, 50 * MS), min_size=3, max_size=3),
    st.integers(200, 2000),
    st.sampled_from([0.0, 0.01, 0.1]),
)
@QUICK
def test_c09_never_longer_than_a_quorum_of_servers_grants(
    delays: list[int], ttl_ms: int, drift_factor: float
) -> None:
    world = World(3, patience_ms=100, drift_factor=drift_factor)
    for master, delay in zip(world.masters, delays, strict=True):
        master.delay_ns = delay
    hold = world.acquire(ttl_ms=ttl_ms)
    lasting = sorted(master.pttl(b"k", world.now) for master in world.masters)
    remaining = hold.deadline_ns - world.now
    assert remaining == hold.validity_ns
    assert remaining <= lasting[-2]
    assert remaining >= lasting[-2] - ttl_ms * MS * drift_factor - 3 * MS


@pytest.mark.case("C06")
@pytest.mark.parametrize("left_ms", [-1, 0, 1])
def test_c06_acquire_at_the_very_end_of_the_validity(left_ms: int) -> None:
    world = World(3, patience_ms=1000)
    for master in world.masters:
        master.delay_ns = (300 - 5 - left_ms) * MS  # drift of 300 ms: 5 ms
    if left_ms > 0:
        hold = world.acquire(ttl_ms=300)
        assert hold.validity_ns == MS
        assert hold.deadline_ns == world.now + MS
    else:
        with pytest.raises(NoQuorum, match="too late"):
            world.acquire(ttl_ms=300)
        world.settle(0)
        assert world.clean()


@pytest.mark.case("C05")
def test_c05_grants_that_come_too_late() -> None:
    world = World(3, patience_ms=1000)
    for master in world.masters:
        master.delay_ns = 400 * MS
    world.masters[0].delay_ns = 0
    with pytest.raises(NoQuorum, match="a quorum granted too late") as info:
        world.acquire(ttl_ms=300)
    assert outcomes(info.value)[0] == "granted"
    assert counted(world) == {"too_late": 1}
    assert [master.count("script") for master in world.masters] == [1, 1, 1]
    assert len(world.ops) == 1  # no retry beyond the limit
    world.settle(1000)
    assert world.clean()


@pytest.mark.case("C05")
def test_c05_too_late_is_tried_again_within_the_wait() -> None:
    world = World(3, patience_ms=1000, retry_delay_ms=1000, jitter=0.5)
    slow_tries(world, 400 * MS, 0)
    hold = world.acquire(ttl_ms=300, wait_ns=2000 * MS)
    assert starts(world) == [0, 900]
    assert hold.validity_ns == 295 * MS
    assert hold.secret == world.tokens[1]
    world.settle()
    assert world.values() == [hold.secret] * 3


def slow(world: World, delay_ns: int) -> None:
    for master in world.masters:
        master.delay_ns = delay_ns


def slow_tries(world: World, *delays_ns: int) -> None:
    """Each try has a delay of its own."""
    draw, left = world.settings.draw, iter(delays_ns)

    def slower(number: int) -> list[bytes]:
        slow(world, next(left))
        return draw(number)

    world.settings.draw = slower


@pytest.mark.case("C08")
def test_c08_validity_counts_from_the_try_that_won() -> None:
    world = World(3, retry_delay_ms=50, jitter=0.99)
    for i in range(3):
        world.plant(i, ms=800)
    hold = world.acquire(ttl_ms=1000, wait_ns=5000 * MS)
    assert 800 * MS <= world.now - T0 <= 850 * MS
    assert hold.validity_ns == 988 * MS
    assert hold.deadline_ns == world.ops[-1].start_ns + 988 * MS


@pytest.mark.case("C35")
@pytest.mark.parametrize("ttl_ms", [2**31, 30 * 86_400_000, 365 * 86_400_000, 2**42])
def test_c35_long_ttls(ttl_ms: int) -> None:
    world = World(3)
    hold = world.acquire(ttl_ms=ttl_ms)
    assert world.masters[0].seen[-1][-1] == b"%d" % ttl_ms
    assert abs(hold.validity_ns - (ttl_ms * MS * 99 // 100 - 2 * MS)) < 1000 * MS
    assert world.extend(hold, ttl_ms)
    assert world.release(hold)


# -- acquire: tries -------------------------------------------------------------------------------


@pytest.mark.case("C126")
@pytest.mark.case("C135")
@pytest.mark.parametrize("retry_delay_ms", [0, 200, 2000])
@pytest.mark.parametrize(("retries", "wait_ns"), [(0, None), (0, 0), (3, 0)])
def test_c126_exactly_one_try_and_no_sleep(
    retries: int, wait_ns: int | None, retry_delay_ms: int
) -> None:
    world = taken(3, retries=retries, retry_delay_ms=retry_delay_ms)
    assert world.acquire(wait_ns=wait_ns) is None
    assert len(world.ops) == 1
    assert world.pauses == []
    assert world.now == T0
    assert [master.count("SET") for master in world.masters] == [1, 1, 1]
    free = World(3, retries=retries, retry_delay_ms=retry_delay_ms)
    assert free.acquire(wait_ns=wait_ns)


@pytest.mark.case("C126")
@pytest.mark.case("C130")
def test_c126_retries_after_the_first_try() -> None:
    world = taken(3, retries=3, retry_delay_ms=200, jitter=iter([0.5, 0.0, 0.999, 0.1]))
    assert world.acquire(wait_ns=None) is None
    assert world.pauses == [100 * MS, 0, int(199.8 * MS)]
    assert len(world.ops) == 4
    assert counted(world) == {"contended": 1}


@pytest.mark.case("C126")
def test_c126_retries_without_a_delay() -> None:
    world = taken(3, retries=5, retry_delay_ms=0)
    assert world.acquire(wait_ns=None) is None
    assert world.pauses == [0] * 5
    assert world.now == T0


@pytest.mark.case("C128")
@pytest.mark.parametrize("retries", [0, 1, 1000])
def test_c128_wait_decides_whatever_retries_says(retries: int) -> None:
    world = taken(3, retries=retries, retry_delay_ms=100, jitter=0.5)
    assert world.acquire(wait_ns=200 * MS) is None
    assert starts(world) == [0, 50, 100, 150, 199]
    assert world.now - T0 == 199 * MS


@given(
    st.integers(1, 500 * MS),
    st.integers(0, 300),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1),
    st.integers(0, 40 * MS),
)
@QUICK
def test_a_last_try_is_made_just_before_the_limit(
    wait_ns: int, retry_delay_ms: int, draws: list[float], delay_ns: int
) -> None:
    jitter = (draws[j % len(draws)] for j in count())
    world = taken(3, retry_delay_ms=retry_delay_ms, jitter=jitter)
    slow(world, delay_ns)
    assert world.acquire(wait_ns=wait_ns) is None
    limit = T0 + wait_ns
    begun = [op.start_ns for op in world.ops]
    assert begun[-1] < limit
    assert world.now >= limit - MS  # it did not give up early
    assert world.now <= limit + delay_ns
    assert len(world.pauses) == len(world.ops) - 1  # no sleep after the last try
    for pause in world.pauses[:-1]:
        assert pause >= 5 * MS
    assert all(pause <= max(retry_delay_ms, 5) * MS for pause in world.pauses)


@pytest.mark.parametrize("wait_ns", [1, MS, 3 * MS, 5 * MS])
def test_a_short_wait_is_two_tries(wait_ns: int) -> None:
    world = taken(3, retry_delay_ms=200)
    assert world.acquire(wait_ns=wait_ns) is None
    assert len(world.ops) == 2
    assert world.pauses == [max(wait_ns - MS, 0)]


def test_a_try_that_outlasts_the_limit_is_the_last() -> None:
    world = World(3, patience_ms=50)
    for master in world.masters:
        master.stopped = True
    with pytest.raises(NoQuorum):
        world.acquire(wait_ns=30 * MS)
    assert len(world.ops) == 1
    assert world.now == T0 + 50 * MS


def test_waiting_for_a_turn_counts_as_waiting() -> None:
    """A driver that lets a try wait for its turn says since when: the limit runs from then."""
    world = taken(3)
    steps: Any = acquire(world.fleet, world.settings, b"k", 1000, 30 * MS)
    op = next(steps)
    op.asked_ns = world.now
    world.sleep(40 * MS)
    world.run_op(op)
    with pytest.raises(StopIteration) as stop:
        steps.send(world.now)
    assert stop.value.value == (None, op)


@pytest.mark.case("C138")
def test_c138_the_last_try_decides() -> None:
    """Down at first, held by a rival at the end: contention; and the reverse: no quorum."""
    world = taken(3, retries=1, retry_delay_ms=100, jitter=0.5)
    for master in world.masters:
        master.up = False
    for i in range(3):
        world.cut(i)
    for master in world.masters:
        master.up = True
    world.masters[0].up = world.masters[1].up = False
    steps: Any = acquire(world.fleet, world.settings, b"k", 1000, None)
    op = next(steps)
    world.run_op(op)
    assert isinstance(steps.send(world.now), int)
    world.masters[0].up = world.masters[1].up = True
    world.settle(1000)
    op = steps.send(world.now)
    world.run_op(op)
    with pytest.raises(StopIteration) as stop:
        steps.send(world.now)
    assert stop.value.value == (None, op)
    assert counted(world) == {"contended": 1}
    assert world.values() == [RIVAL] * 3

    world = taken(3, retries=1)
    steps = acquire(world.fleet, world.settings, b"k", 1000, None)
    world.run_op(next(steps))
    steps.send(world.now)
    for i in (0, 1):
        world.masters[i].up = False
        world.cut(i)
    world.run_op(steps.send(world.now))
    with pytest.raises(NoQuorum):
        steps.send(world.now)


@pytest.mark.case("C136")
@pytest.mark.case("C133")
def test_c136_for_ever_goes_on_until_it_is_granted() -> None:
    world = World(3, retry_delay_ms=0)
    for i in range(3):
        world.plant(i, ms=5_000)
    hold = world.acquire(wait_ns=plan.FOREVER)
    assert hold
    assert world.now - T0 == 5_000 * MS
    assert set(world.pauses) == {5 * MS}
    assert len(world.ops) == 1001


@pytest.mark.case("C136")
def test_c136_for_ever_without_masters_warns_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(3, retry_delay_ms=100, ready=False)
    for master in world.masters:
        master.up = False
    steps: Any = acquire(world.fleet, world.settings, b"k", 1000, plan.FOREVER)
    with caplog.at_level(logging.WARNING, logger="redlock_fast"):
        step = next(steps)
        while world.now < T0 + 150_000 * MS:
            if isinstance(step, Op):
                world.run_op(step)
            else:
                assert isinstance(step, int)
                assert step >= 5 * MS
                world.sleep(step)
            step = steps.send(world.now)
    steps.close()
    assert len(caplog.records) == 3
    message = caplog.records[0].getMessage()
    assert "no quorum" in message
    assert "127.0.0.1:7001 refused" in message
    for token in world.tokens:
        assert token.decode() not in message
    for master in world.masters:
        master.up = True
    world.settle(1000)
    assert world.acquire()


def test_contention_for_ever_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    world = World(3, retry_delay_ms=100)
    for i in range(3):
        world.plant(i, ms=70_000)
    with caplog.at_level(logging.DEBUG, logger="redlock_fast"):
        assert world.acquire(wait_ns=plan.FOREVER)
    assert caplog.records == []


@pytest.mark.case("C156")
def test_c156_an_error_carries_the_last_round_only() -> None:
    world = World(3, retries=50)
    for master in world.masters:
        master.answers["SET"] = b"-OOM no\r\n"
    with pytest.raises(NoQuorum) as info:
        world.acquire(wait_ns=None)
    assert len(world.ops) == 51
    assert len(info.value.reports) == 3


def test_every_try_has_a_token_of_its_own() -> None:
    world = taken(3, 2, retries=9)
    world.acquire(wait_ns=None)
    tokens = [op.tokens[0] for op in world.ops]
    assert len(set(tokens)) == 10
    sent = [words[2] for words in world.masters[0].seen if words[0] == b"SET"]
    assert sent == tokens  # each SET once
    released = [words[4] for words in world.masters[0].seen if words[0] in (b"EVAL", b"EVALSHA")]
    assert released == tokens  # and each try cleaned up
    assert world.clean()


@pytest.mark.case("C14")
def test_c14_a_lost_reply_of_the_first_try_does_not_block_the_second() -> None:
    world = World(3, retry_delay_ms=50, jitter=0.9, patience_ms=50)
    world.plant(2, ms=100)
    world.masters[1].mute = True
    steps: Any = acquire(world.fleet, world.settings, b"k", 10_000, 500 * MS)
    world.run_op(next(steps))  # A grants, B's reply is lost, C is held
    pause = steps.send(world.now)
    assert isinstance(pause, int)
    world.masters[1].mute = False
    world.sleep(pause)
    world.run_op(steps.send(world.now))
    with pytest.raises(StopIteration) as stop:
        steps.send(world.now)
    hold = stop.value.value[0]
    assert hold is not None
    assert len(world.ops) == 2
    world.settle()
    assert world.values()[:2] == [hold.secret] * 2


@pytest.mark.case("C15")
def test_c15_connections_that_break_after_the_set_was_executed() -> None:
    world = World(3, retries=1)
    steps: Any = acquire(world.fleet, world.settings, b"k", 10_000, None)
    op = next(steps)
    world.begin(op)
    for master in world.masters:
        master.mute = True
    for i in range(3):
        world.cut(i)
    for master in world.masters:
        assert master.get(b"k", world.now) == op.tokens[0]
        master.mute = False
    while not op.ended:
        world.step(op)
    assert op.verdict() not in (YES, NO)  # its own key is neither a grant nor contention
    assert steps.send(world.now) == 0
    world.run_op(steps.send(world.now))
    with pytest.raises(StopIteration) as stop:
        steps.send(world.now)
    hold = stop.value.value[0]
    world.settle()
    if hold is None:
        assert world.clean()
    else:
        assert world.values() == [hold.secret] * 3
    assert [master.count("SET") for master in world.masters] == [2, 2, 2]


@pytest.mark.case("C131")
@given(st.lists(st.permutations(range(3)), min_size=2, max_size=6))
@QUICK
def test_two_clients_never_both_hold(orders: list[list[int]]) -> None:
    """Tries of as many clients, whose SETs arrive in any order: at most one is granted."""
    first = World(3)
    worlds = [first] + [World(first.masters, now=first.now) for _ in orders[1:]]
    plans = [acquire(w.fleet, w.settings, b"k", 1000, 0) for w in worlds]
    ops: list[Any] = [next(steps) for steps in plans]
    for world, op in zip(worlds, ops, strict=True):
        world.begin(op)
    for turn in range(3):
        for world, order in zip(worlds, orders, strict=True):
            i = order[turn]
            for words in commands(world.fleet.take(i)):
                world.fleet.receive(i, world.masters[i](words, world.now), world.now)
    holds = []
    for world, op, steps in zip(worlds, ops, plans, strict=True):
        assert op.ended
        with pytest.raises(StopIteration) as stop:
            steps.send(world.now)
        holds.append(stop.value.value[0])
        world.flush()
    granted = [hold for hold in holds if hold is not None]
    assert len(granted) <= 1
    values = set(first.values())
    assert values <= {None, *(hold.secret for hold in granted)}


# -- interrupted at every point -------------------------------------------------------------------


POINTS = ["before the round", "queued", "sent", "one answer", "two answers", "decided", "pause"]


def drive_to(world: World, steps: Any, stop_at: int, point: str) -> bool:
    """Drive a plan up to a point of its round (or pause) number `stop_at`, and close it there.

    False when the plan ends before that.
    """
    try:
        step = next(steps)
        for _ in range(stop_at):
            if isinstance(step, Op):
                world.run_op(step)
            elif step is not None:
                world.sleep(step)
            step = steps.send(world.now)
    except (StopIteration, NoQuorum):
        return False
    if isinstance(step, Op):
        if point == "pause":
            return False
        if point != "before the round":
            world.begin(step)
        if point not in ("before the round", "queued"):
            world.flush()
        answers = {"one answer": 1, "two answers": 2}.get(point, 0)
        for _ in range(answers):
            if not step.ended:
                world.step(step)
        while point == "decided" and not step.ended:
            world.step(step)
        # As `Pump.run` and an event loop's driver do when they are interrupted.
        world.fleet.finish(step)
    elif point != "pause":
        return False
    steps.close()
    return True


WORLDS: dict[str, Setup] = {
    "free": lambda: World(3, retries=2, retry_delay_ms=20),
    "taken": lambda: taken(3, 2, retries=2, retry_delay_ms=20),
    "minority taken": lambda: taken(3, 1, retries=2, retry_delay_ms=20),
    "one away": lambda: away(World(3, retries=2, retry_delay_ms=20), 2),
    "two away": lambda: away(World(3, retries=2, retry_delay_ms=20), 1, 2),
    "nobody connected": lambda: World(3, retries=2, retry_delay_ms=20, ready=False),
    "slow connects": lambda: connecting(World(3, retries=2, retry_delay_ms=20, ready=False)),
    "one hung": lambda: hung(World(3, retries=2, retry_delay_ms=20), 0),
    "two hung": lambda: hung(World(3, retries=2, retry_delay_ms=20), 0, 1),
    "replies lost": lambda: muted(World(3, retries=2, retry_delay_ms=20), 0, 1),
    "errors": lambda: failing(World(3, retries=2, retry_delay_ms=20), b"-LOADING wait\r\n"),
    "no scripts": lambda: forgetful(taken(3, 2, retries=2, retry_delay_ms=20)),
}


def away(world: World, *masters: int) -> World:
    for i in masters:
        world.masters[i].up = False
        world.cut(i)
    return world


def connecting(world: World) -> World:
    for i, master in enumerate(world.masters):
        master.connect_ns = 10 * MS * i
    return world


def hung(world: World, *masters: int) -> World:
    for i in masters:
        world.masters[i].stopped = True
    return world


def muted(world: World, *masters: int) -> World:
    for i in masters:
        world.masters[i].mute = True
    return world


def failing(world: World, reply: bytes) -> World:
    world.masters[0].answers["SET"] = reply
    world.plant(1)
    return world


def forgetful(world: World) -> World:
    for master in world.masters:
        master.known.clear()
    return world


def heal(world: World) -> None:
    for master in world.masters:
        master.up = True
        master.stopped = master.mute = False
        master.answers.clear()
    world.flush()
    world.settle(1200)


@pytest.mark.case("C101")
@pytest.mark.case("C104")
@pytest.mark.parametrize("name", WORLDS)
def test_c104_acquire_closed_at_every_point_leaves_no_key(name: str) -> None:
    reached = 0
    for stop_at, point in product(range(5), POINTS):
        world = WORLDS[name]()
        steps: Any = acquire(world.fleet, world.settings, b"k", 600_000, None)
        if not drive_to(world, steps, stop_at, point):
            continue
        reached += 1
        heal(world)
        assert world.clean(), (stop_at, point, world.values())
        for master in world.masters:
            master.keys.pop(b"k", None)  # of the rival
        assert world.acquire() is not None  # nothing is left misaligned
        world.settle()
        assert [link.owed for link in world.fleet.links] == [0, 0, 0]
    assert reached >= 6  # every point of one round, at least


@pytest.mark.case("C104")
@pytest.mark.parametrize("name", WORLDS)
def test_c104_acquire_many_closed_at_every_point_leaves_no_key(name: str) -> None:
    for stop_at, point in product(range(5), POINTS):
        world = WORLDS[name]()
        keys = [b"k", b"a", b"b"]
        steps: Any = plan.acquire_many(world.fleet, world.settings, keys, 600_000, 100 * MS)
        if drive_to(world, steps, stop_at, point):
            heal(world)
            assert world.clean(), (stop_at, point)
            assert world.acquire(b"c") is not None


@pytest.mark.case("C104")
def test_c104_the_plan_itself_sees_to_it_that_no_set_goes_out_later() -> None:
    """`finish` is the driver's courtesy; what closing achieves stands in plan's contract."""
    world = World(3, ready=False)
    for master in world.masters:
        master.connect_ns = 20 * MS
    steps: Any = acquire(world.fleet, world.settings, b"k", 600_000, 0)
    world.begin(next(steps))
    steps.close()
    world.settle(100)
    assert world.clean()
    assert [master.count("SET") for master in world.masters] == [0, 0, 0]


@pytest.mark.case("C101")
@pytest.mark.case("C15")
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("point", ["queued", "sent", "one answer", "decided"])
@pytest.mark.parametrize("name", ["free", "taken", "one hung", "replies lost", "no scripts"])
def test_connections_that_break_at_the_interruption_keep_their_debts(
    name: str, point: str, many: bool
) -> None:
    world = WORLDS[name]()
    if many:
        keys = [b"k", b"a", b"b"]
        steps: Any = plan.acquire_many(world.fleet, world.settings, keys, 600_000, 0)
    else:
        steps = acquire(world.fleet, world.settings, b"k", 600_000, 0)
    assert drive_to(world, steps, 0, point)
    for i in range(3):
        world.fleet.lost(i, "closed", "connection reset by peer", world.now)
    heal(world)
    assert world.clean()
    assert not world.fleet.indebted
    assert all(link.stats()["reconnects"] == 1 for link in world.fleet.links)


@pytest.mark.case("C105")
@pytest.mark.parametrize("point", POINTS[:-1])
def test_c105_release_closed_at_any_point_can_be_repeated(point: str) -> None:
    world, hold = acquired()
    assert drive_to(world, plan.release(world.fleet, hold), 0, point)
    assert hold.state == plan.UNCONFIRMED
    world.settle()
    gone = world.values() == [None] * 3
    assert world.release(hold) is (not gone)
    assert world.clean()


@pytest.mark.parametrize("point", POINTS[:-1])
def test_extend_closed_at_any_point_leaves_the_earlier_deadline(point: str) -> None:
    world, hold = acquired(ttl_ms=1000)
    old = hold.deadline_ns
    steps: Any = plan.extend(world.fleet, world.settings, [hold], 60_000)
    assert next(steps) is None
    op = steps.send(world.now)
    if point != "before the round":
        world.begin(op)
    if point not in ("before the round", "queued"):
        world.flush()
        world.step(op)
    world.fleet.finish(op)
    steps.close()
    assert hold.deadline_ns == old
    assert hold.state == plan.HELD
    world.settle(100)
    assert world.release(hold)


# -- release --------------------------------------------------------------------------------------


def test_release() -> None:
    world, hold = acquired()
    assert world.release(hold) is True
    assert hold.state == plan.RELEASED
    assert world.values() == [None] * 3
    assert counted(world) == {"acquired": 1, "released": 1}


@pytest.mark.case("C16")
def test_c16_of_a_lock_that_somebody_else_holds_now() -> None:
    world, hold = acquired(ttl_ms=200)
    world.sleep(300 * MS)
    rival = World(world.masters, now=world.now)
    theirs = rival.acquire(ttl_ms=5000)
    before = [master.pttl(b"k", world.now) for master in world.masters]
    assert world.extend(hold, 5000) is False
    assert world.release(hold) is False
    world.settle(0)
    assert world.values() == [theirs.secret] * 3
    assert [master.pttl(b"k", world.now) for master in world.masters] == before


@pytest.mark.case("C17")
@pytest.mark.case("C25")
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_c17_keys_that_are_gone(lost: int) -> None:
    world, hold = acquired()
    for i in range(lost):
        del world.masters[i].keys[b"k"]
    assert world.release(hold) is (lost == 1)
    assert hold.state == (plan.RELEASED if lost == 1 else plan.LOST)
    assert hold.reason == ("" if lost == 1 else "foreign")
    world.settle()
    assert world.clean()


@pytest.mark.case("C18")
@pytest.mark.parametrize("how", ["errors", "silence", "away"])
def test_c18_a_release_that_nobody_confirms(how: str) -> None:
    world, hold = acquired(ttl_ms=60_000, patience_ms=50)
    for i, master in enumerate(world.masters):
        if how == "errors":
            master.answers["script"] = b"-MISCONF no\r\n"
        elif how == "silence":
            master.stopped = True
        else:
            master.up = False
            world.cut(i)
    began = world.now
    steps: Any = plan.release(world.fleet, hold)
    result, op = world.run(steps)
    assert result is None
    assert world.now - began <= 50 * MS
    assert hold.state == plan.UNCONFIRMED
    words = [report.outcome for report in plan.reports(world.fleet, op)]
    assert set(words) - {"unanswered"} == {
        {"errors": "MISCONF", "silence": "timeout", "away": "refused"}[how]
    }
    secret = hold.secret
    for master in world.masters:
        master.answers.clear()
        master.stopped, master.up = False, True
    world.settle(600)
    assert hold.secret == secret  # and may be released again
    if how == "errors":
        assert world.release(hold) is True
    else:
        assert world.values() == [None] * 3  # the masters got it, once they could
        assert world.release(hold) is False
    assert world.clean()


@pytest.mark.case("C29")
def test_c29_many_locks_of_one_client() -> None:
    world = World(3)
    holds = {key: world.acquire(key) for key in (b"r1", b"r2", b"r3")}
    for key in (b"r2", b"r1", b"r3"):
        assert world.release(holds[key]) is True
    world.settle()
    assert world.clean()


def test_release_asks_only_where_the_set_went() -> None:
    world = World(3, ready=False)
    world.masters[2].connect_ns = 30 * MS
    hold = world.acquire()
    assert hold.reached == 0b011
    world.settle()
    assert world.masters[2].get(b"k", world.now) is None
    assert world.release(hold) is True
    assert world.masters[2].count("script") == 0


def test_release_many() -> None:
    world = World(3)
    holds = world.acquire_many([b"%d" % j for j in range(4)])
    for master in world.masters[:2]:
        del master.keys[b"1"]
    world.masters[0].keys[b"2"] = (RIVAL, world.now + 10**10)
    world.masters[1].keys[b"2"] = (RIVAL, world.now + 10**10)
    results, _ = world.run(plan.release_many(world.fleet, holds))
    assert results == [True, False, False, True]
    assert [hold.state for hold in holds] == [
        plan.RELEASED,
        plan.LOST,
        plan.LOST,
        plan.RELEASED,
    ]
    world.settle()
    assert world.clean()
    assert counted(world) == {"acquired": 4, "released": 2, "lost": 2}


def test_release_many_without_a_quorum_for_some() -> None:
    world = World(3)
    holds = world.acquire_many([b"a", b"b"])

    def odd(words: list[bytes]) -> bytes | None:
        return b"-OOM no\r\n" if words[3] == b"b" else None

    for master in world.masters[:2]:
        master.answers["script"] = odd
    results, op = world.run(plan.release_many(world.fleet, holds))
    assert results == [True, None]
    assert holds[1].state == plan.UNCONFIRMED
    error = plan.no_quorum(world.fleet, op, "cannot confirm the release", results)
    assert error.results == [True, None]
    assert outcomes(error)[:2] == ["OOM", "OOM"]


@pytest.mark.case("C60")
@pytest.mark.parametrize("k", [500, 3000])
def test_c60_releases_of_many_after_script_flush_on_one(k: int) -> None:
    world = World(3)
    holds = world.acquire_many([b"%d" % j for j in range(k)], ttl_ms=60_000)
    assert all(holds)
    world.masters[1].known.clear()
    results, _ = world.run(plan.release_many(world.fleet, holds))
    world.settle()
    assert results == [True] * k
    assert world.clean()
    assert [master.count("script") for master in (world.masters[0], world.masters[2])] == [k, k]
    b = world.masters[1]
    assert b.count("EVAL") + b.count("EVALSHA") <= 2 * k + 5
    assert b.count("EVAL") == 1


@pytest.mark.case("C59")
def test_c59_script_flush_everywhere() -> None:
    world = forgetful(World(3))
    hold = world.acquire()
    assert world.extend(hold, 2000) is True
    forgetful(world)
    assert world.release(hold) is True
    assert world.clean()
    hold = world.acquire()
    before = [master.count("EVAL") for master in world.masters]
    assert world.release(hold) is True
    assert [master.count("EVAL") for master in world.masters] == before


@pytest.mark.case("C55")
def test_c55_without_scripts_release_and_extend_have_no_quorum() -> None:
    world, hold = acquired(ttl_ms=1000)
    refusal = b"-NOPERM User lock has no permissions to run the 'evalsha' command\r\n"
    for master in world.masters:
        master.answers["script"] = refusal
    assert world.extend(hold, 1000) is None
    result, op = world.run(plan.release(world.fleet, hold))
    assert result is None
    assert "NOPERM" in str(plan.no_quorum(world.fleet, op, "cannot confirm the release"))
    verbs = {words[0] for master in world.masters for words in master.seen}
    assert verbs <= {b"SET", b"EVAL", b"EVALSHA", b"CLIENT", b"INFO"}  # never an unconditional DEL


# -- extend ---------------------------------------------------------------------------------------


@pytest.mark.case("C07")
@pytest.mark.case("C23")
def test_c23_a_fast_extend_moves_the_deadline_of_the_same_object() -> None:
    world, hold = acquired(ttl_ms=1000)
    for _ in range(3):
        world.sleep(500 * MS)
        assert world.extend(hold, 1000) is True
        assert hold.deadline_ns == world.now + 988 * MS
        assert hold.validity_ns == 988 * MS  # at the grant
        assert {master.pttl(b"k", world.now) for master in world.masters} == {1000 * MS}
    assert world.release(hold) is True
    assert counted(world) == {"acquired": 1, "extended": 3, "released": 1}


@pytest.mark.case("C07")
def test_c07_a_slow_extend_is_a_lost_lock() -> None:
    world, hold = acquired(ttl_ms=300, patience_ms=1000)
    slow(world, 400 * MS)
    assert world.extend(hold, 300) is False
    assert (hold.state, hold.reason) == (plan.LOST, "expired")
    slow(world, 0)
    world.settle()
    assert world.clean()  # its late refresh does not stand in anybody's way
    assert world.extend(hold, 300) is False  # never revived


@pytest.mark.case("C06")
@pytest.mark.parametrize("left_ms", [-1, 0, 1])
@pytest.mark.parametrize("new_ttl_ms", [60_000, 400])
def test_c06_extend_answered_at_the_very_end_of_the_old_deadline(
    left_ms: int, new_ttl_ms: int
) -> None:
    world, hold = acquired(ttl_ms=400, patience_ms=1000)
    slow(world, hold.deadline_ns - left_ms * MS - world.now)
    began = world.now
    result = world.extend(hold, new_ttl_ms)
    if left_ms > 0:
        assert result is True
        assert hold.deadline_ns == began + world.settings.lasting_ns(new_ttl_ms)
    else:
        assert result is False
        assert hold.reason == "expired"


@pytest.mark.case("C06")
@pytest.mark.parametrize("left_ms", [-1, 0, 1])
def test_c06_extend_answered_at_the_very_end_of_the_new_deadline(left_ms: int) -> None:
    world, hold = acquired(ttl_ms=60_000, patience_ms=1000)
    slow(world, (300 - 5 - left_ms) * MS)
    result = world.extend(hold, 300)
    assert result is (left_ms > 0)
    assert hold.deadline_ns - world.now == left_ms * MS
    assert hold.state == (plan.HELD if left_ms > 0 else plan.LOST)


@pytest.mark.case("C06")
@pytest.mark.parametrize("left_ms", [-1, 0, 1])
def test_c06_extend_begun_at_the_very_end_of_the_deadline(left_ms: int) -> None:
    world, hold = acquired(ttl_ms=400)
    world.sleep(hold.deadline_ns - left_ms * MS - world.now)
    assert world.extend(hold, 400) is (left_ms > 0)
    asked = [master.count("script") for master in world.masters]
    assert asked == [1, 1, 1]  # the extend, or the clean-up of what has expired here
    world.settle(0)
    if left_ms <= 0:
        assert hold.reason == "expired"
        assert world.clean()


@pytest.mark.parametrize(
    ("old_ms", "new_ms", "lowered"), [(60_000, 1000, True), (1000, 60_000, False)]
)
@pytest.mark.parametrize("end", ["ours", "no quorum", "lost"])
def test_before_it_is_sent_the_deadline_is_the_earlier_of_both(
    old_ms: int, new_ms: int, lowered: bool, end: str
) -> None:
    world, hold = acquired(ttl_ms=old_ms)
    old = hold.deadline_ns
    new = world.now + world.settings.lasting_ns(new_ms)
    steps: Any = plan.extend(world.fleet, world.settings, [hold], new_ms)
    assert next(steps) is None
    op = steps.send(world.now)
    assert (op.kind, op.ttl_ms, op.keys, op.tokens) == (EXTEND, new_ms, [b"k"], [hold.secret])
    assert hold.deadline_ns == min(old, new) == (new if lowered else old)
    assert hold.state == plan.HELD
    for master in world.masters:
        if end == "no quorum":
            master.answers["script"] = b"-OOM no\r\n"
        elif end == "lost":
            master.answers["script"] = FOREIGN
    world.run_op(op)
    with pytest.raises(StopIteration) as stop:
        steps.send(world.now)
    results, last = stop.value.value
    assert last is op
    if end == "ours":
        assert results == [True]
        assert hold.deadline_ns == new
        assert hold.ttl_ms == new_ms
    else:
        assert results == [None if end == "no quorum" else False]
        assert hold.deadline_ns == min(old, new)
        assert hold.ttl_ms == old_ms
        assert hold.state == (plan.HELD if end == "no quorum" else plan.LOST)


@pytest.mark.case("C22")
def test_c22_a_shorter_extension_counts_everywhere() -> None:
    world, hold = acquired(ttl_ms=5000)
    assert world.extend(hold, 100) is True
    assert hold.deadline_ns == world.now + 97 * MS
    assert {master.pttl(b"k", world.now) for master in world.masters} == {100 * MS}


@pytest.mark.case("C19")
def test_c19_extend_never_makes_a_key() -> None:
    world, hold = acquired(ttl_ms=5000)
    for master in world.masters:
        master.keys.clear()
    assert world.extend(hold, 5000) is False
    world.settle()
    assert world.values() == [None] * 3
    assert (hold.state, hold.reason) == (plan.LOST, "foreign")


@pytest.mark.case("C20")
def test_c20_a_minority_cannot_be_extended() -> None:
    world, hold = acquired(5, ttl_ms=5000)
    for i in (2, 3, 4):
        world.masters[i].keys.clear()
    assert world.extend(hold, 5000) is False
    world.settle()
    assert world.values() == [None] * 5  # what was left over is cleaned up
    rival = World(world.masters, now=world.now)
    assert rival.acquire()
    assert world.extend(hold, 5000) is False
    assert counted(world) == {"acquired": 1, "lost": 1}


@pytest.mark.case("C20")
def test_c20_the_clean_up_of_a_lost_extension_lasts_as_long_as_its_key() -> None:
    world, hold = acquired(ttl_ms=1000)
    for i in (1, 2):
        world.masters[i].keys.clear()
    steps: Any = plan.extend(world.fleet, world.settings, [hold], 600_000)
    next(steps)
    op = steps.send(world.now)
    world.run_op(op)
    world.settle(0)
    away(world, 0)  # it has extended the key to 600 s
    with pytest.raises(StopIteration) as stop:
        steps.send(world.now)
    assert stop.value.value[0] == [False]
    world.sleep(12_000 * MS)
    world.masters[0].up = True
    world.settle(2000)
    assert world.clean()


@pytest.mark.case("C21")
def test_c21_masters_that_restart_empty_one_after_the_other() -> None:
    world, hold = acquired(3, ttl_ms=5000)
    world.masters[2].keys.clear()
    assert world.extend(hold, 5000) is True
    world.masters[1].keys.clear()
    assert world.extend(hold, 5000) is False


@pytest.mark.case("C24")
def test_c24_a_quorum_that_changed_under_us_is_noticed() -> None:
    world = World(3)
    world.masters[2].up = False
    world.cut(2)
    hold = world.acquire(ttl_ms=5000)
    world.masters[1].keys.clear()
    world.masters[2].up = True
    world.settle(600)
    rival = World(world.masters, now=world.now)
    theirs = rival.acquire()
    assert theirs
    assert world.extend(hold, 5000) is False
    world.settle()
    assert world.values() == [None, theirs.secret, theirs.secret]


@pytest.mark.case("C28")
def test_c28_an_alias_is_never_two_votes() -> None:
    """Masters 0 and 1 are one server; 2 loses the key. One server is no quorum of three."""
    world = World(3)
    world.masters[1].keys = world.masters[0].keys
    hold = world.acquire(ttl_ms=60_000)
    world.settle()
    assert hold  # granted by 0 and 2, refused by 1
    world.masters[2].keys.clear()
    assert world.extend(hold, 60_000) is not True


@pytest.mark.case("C28")
def test_c28_an_alias_is_never_two_votes_in_a_batch_either() -> None:
    """Masters 0 and 1 are one server: 0 granted `a`, 1 granted `b`. 2 loses both."""
    world = World(3, patience_ms=50)
    world.masters[1].keys = world.masters[0].keys
    first = world.acquire(b"a", ttl_ms=60_000)
    world.settle()
    world.masters[0].stopped = True
    second = world.acquire(b"b", ttl_ms=60_000)
    world.masters[0].stopped = False
    world.settle()
    assert (first.voters(), second.voters()) == (0b101, 0b110)
    world.masters[2].keys.clear()
    results, _ = world.run(plan.extend(world.fleet, world.settings, [first, second], 60_000))
    assert True not in results


@pytest.mark.case("C140")
def test_no_quorum_keeps_the_lock_until_its_deadline() -> None:
    world, hold = acquired(ttl_ms=1500, patience_ms=50)
    old = hold.deadline_ns
    for master in world.masters:
        master.stopped = True
    assert world.extend(hold, 1500) is None
    assert (hold.state, hold.deadline_ns) == (plan.HELD, old)
    for master in world.masters:
        master.stopped = False
    world.settle(0)
    assert world.extend(hold, 1500) is True
    assert hold.deadline_ns > old


def test_no_quorum_that_lasts_beyond_the_deadline_is_a_loss() -> None:
    world, hold = acquired(ttl_ms=130, patience_ms=50)
    for master in world.masters:
        master.stopped = True
    world.sleep(hold.deadline_ns - 20 * MS - world.now)
    assert world.extend(hold, 130) is False
    assert hold.reason == "expired"


def test_extend_of_what_is_not_held_sends_nothing() -> None:
    world, hold = acquired()
    world.release(hold)
    before = [len(master.seen) for master in world.masters]
    results, op = world.run(plan.extend(world.fleet, world.settings, [hold], 1000))
    assert (results, op) == ([False], None)
    assert [len(master.seen) for master in world.masters] == before
    assert hold.state == plan.RELEASED


def test_a_lock_that_was_released_during_its_extension_is_not_held_again() -> None:
    world, hold = acquired()
    steps: Any = plan.extend(world.fleet, world.settings, [hold], 60_000)
    next(steps)
    op = steps.send(world.now)
    world.begin(op)
    world.flush()
    assert world.release(hold) is True  # by another thread
    while not op.ended:
        world.step(op)
    with pytest.raises(StopIteration) as stop:
        steps.send(world.now)
    assert stop.value.value[0] == [False]
    assert hold.state == plan.RELEASED


def test_extend_of_many() -> None:
    world = World(3)
    holds = world.acquire_many([b"%d" % j for j in range(5)], ttl_ms=1000)
    world.settle(10)
    world.masters[0].keys.pop(b"1")
    for master in world.masters[:2]:
        master.keys.pop(b"2")
    holds[3].deadline_ns = world.now  # expired here
    assert world.release(holds[4])
    results, op = world.run(plan.extend(world.fleet, world.settings, holds, 2000))
    world.settle(0)
    assert results == [True, True, False, False, False]
    assert op.keys == [b"0", b"1", b"2"]
    assert [(hold.state, hold.reason) for hold in holds] == [
        (plan.HELD, ""),
        (plan.HELD, ""),
        (plan.LOST, "foreign"),
        (plan.LOST, "expired"),
        (plan.RELEASED, ""),
    ]
    left = {key for master in world.masters for key in master.keys if master.get(key, world.now)}
    assert left == {b"0", b"1"}


# -- acquire_many ---------------------------------------------------------------------------------


def test_acquire_many_is_item_by_item() -> None:
    world = World(3)
    for i in range(3):
        world.plant(i, b"1")
    for i in range(2):
        world.plant(i, b"2")
    world.plant(0, b"3")
    holds = world.acquire_many([b"%d" % j for j in range(5)])
    world.settle()
    assert [hold is not None for hold in holds] == [True, False, False, True, True]
    assert [hold.key for hold in holds if hold] == [b"0", b"3", b"4"]
    assert len({hold.secret for hold in holds if hold}) == 3
    assert world.values(b"2") == [RIVAL, RIVAL, None]
    assert world.values(b"3") == [RIVAL, holds[3].secret, holds[3].secret]
    assert len(world.ops) == 1
    assert counted(world) == {"acquired": 3, "contended": 2}


def test_acquire_many_tries_again_only_what_is_left() -> None:
    world = World(3, retry_delay_ms=50, jitter=0.5)
    for i in range(3):
        world.plant(i, b"b", ms=60)
    holds = world.acquire_many([b"a", b"b", b"c"], ttl_ms=10_000, wait_ns=1000 * MS)
    world.settle()
    assert all(holds)
    assert [op.keys for op in world.ops] == [[b"a", b"b", b"c"], [b"b"], [b"b"], [b"b"]]
    assert starts(world) == [0, 25, 50, 75]
    assert holds[0].deadline_ns == T0 + 9898 * MS
    assert holds[1].deadline_ns == T0 + (75 + 9898) * MS
    for key, hold in zip([b"a", b"b", b"c"], holds, strict=True):
        assert world.values(key) == [hold.secret] * 3
    assert world.masters[0].count("SET") == 6


def test_acquire_many_stops_while_what_was_granted_keeps_half_its_validity() -> None:
    world = World(3, retry_delay_ms=50, jitter=0.5)
    for i in range(3):
        world.plant(i, b"b")
    holds = world.acquire_many([b"a", b"b"], ttl_ms=1000, wait_ns=plan.FOREVER)
    assert holds[1] is None
    assert holds[0].deadline_ns - world.now >= 494 * MS
    assert world.now - T0 == 475 * MS  # another try would begin past half of 988 ms
    assert world.values(b"a") == [holds[0].secret] * 3


def test_acquire_many_of_nothing_granted_waits_as_long_as_it_is_told() -> None:
    world = World(3, retry_delay_ms=50, jitter=0.5)
    for key in (b"a", b"b"):
        for i in range(3):
            world.plant(i, key)
    assert world.acquire_many([b"a", b"b"], ttl_ms=100, wait_ns=1000 * MS) == [None, None]
    assert starts(world)[-1] == 999


@pytest.mark.parametrize("when", ["first round", "second round"])
def test_acquire_many_without_a_quorum_releases_everything(when: str) -> None:
    world = World(3, retry_delay_ms=50, jitter=0.5)
    for i in range(3):
        world.plant(i, b"b")
    rounds = count()

    def odd(words: list[bytes]) -> bytes | None:
        if words[1] == b"b" and (when == "first round" or next(rounds) > 1):
            return b"-OOM no\r\n"
        return None

    for master in world.masters[:2]:
        master.answers["SET"] = odd
    wait_ns = 0 if when == "first round" else 30 * MS
    with pytest.raises(NoQuorum, match="cannot acquire: no quorum of answers"):
        world.acquire_many([b"a", b"b", b"c"], ttl_ms=10_000, wait_ns=wait_ns)
    world.settle()
    assert world.clean()
    assert counted(world) == {"no_quorum": 1}


@pytest.mark.case("C163")
def test_c163_acquire_many_says_why_an_item_failed() -> None:
    world = World(3)
    for master in world.masters:
        master.answers["SET"] = lambda w: b"-OOM no\r\n" if w[1] == b"b" else None
    with pytest.raises(NoQuorum) as info:
        world.acquire_many([b"a", b"b", b"c"])
    assert "OOM" in outcomes(info.value)


def test_acquire_many_in_an_outage() -> None:
    world = away(World(3), 0, 1)
    with pytest.raises(NoQuorum):
        world.acquire_many([b"a", b"b"])
    heal(world)
    assert world.clean()


def test_acquire_many_too_late() -> None:
    world = World(3, patience_ms=1000)
    slow(world, 400 * MS)
    with pytest.raises(NoQuorum, match="too late"):
        world.acquire_many([b"a", b"b"], ttl_ms=300)
    world.settle(1000)
    assert world.clean()
    assert counted(world) == {"too_late": 1}


@pytest.mark.case("C05")
def test_c05_acquire_many_never_returns_a_lock_that_has_run_out() -> None:
    world = World(3, patience_ms=1000, retry_delay_ms=10, jitter=0.5)
    for i in range(3):
        world.plant(i, b"b", ms=3)
    slow_tries(world, 0, 95 * MS)
    try:
        holds = world.acquire_many([b"a", b"b"], ttl_ms=100, wait_ns=1000 * MS)
    except NoQuorum:
        holds = []
    assert all(hold.deadline_ns > world.now for hold in holds if hold is not None)


@pytest.mark.parametrize("k", [1, 2, 257, 1500, 3000])
def test_acquire_and_release_many_of_any_size(k: int) -> None:
    world = World(3)
    keys = [b"%d" % j for j in range(k)]
    holds = world.acquire_many(keys, ttl_ms=60_000)
    assert all(holds)
    world.settle()
    assert [len(master.keys) for master in world.masters] == [k] * 3
    results, _ = world.run(plan.release_many(world.fleet, holds))
    world.settle()
    assert results == [True] * k
    assert [len(master.keys) for master in world.masters] == [0] * 3
    assert [master.count("SET") for master in world.masters] == [k] * 3
    assert [master.count("script") for master in world.masters] == [k] * 3


def test_a_long_batch_lets_others_run() -> None:
    """Compiled loops keep the GIL, so the driver gets a turn every so many items."""
    world = World(3)
    keys = [b"%d" % j for j in range(2 * plan.TURN)]
    holds = world.acquire_many(keys, ttl_ms=600_000)
    assert world.pauses == [0] * 2
    results, _ = world.run(plan.extend(world.fleet, world.settings, holds, 600_000))
    assert results == [True] * len(keys)
    assert world.pauses == [0] * 6
    results, _ = world.run(plan.release_many(world.fleet, holds))
    assert results == [True] * len(keys)
    assert world.pauses == [0] * 8
    # Closed in such a moment, a batch is nobody's.
    steps: Any = plan.acquire_many(world.fleet, world.settings, keys, 600_000, 0)
    world.run_op(next(steps))
    assert steps.send(world.now) == 0
    steps.close()
    world.settle()
    assert world.clean()


@pytest.mark.parametrize("state", ["hung", "away", "slow"])
def test_many_locks_with_a_master_less(state: str) -> None:
    world = World(3, patience_ms=50)
    third = world.masters[2]
    if state == "hung":
        third.stopped = True
    elif state == "away":
        away(world, 2)
    else:
        third.delay_ns = 30 * MS
    keys = [b"%d" % j for j in range(2000)]
    holds = world.acquire_many(keys, ttl_ms=600_000)
    assert all(holds)
    results, _ = world.run(plan.release_many(world.fleet, holds))
    assert results == [True] * 2000
    heal(world)
    world.settle(2000)
    assert world.clean()


# -- adopt, look, by token ------------------------------------------------------------------------


def test_adopt_takes_over_by_token() -> None:
    world, hold = acquired(ttl_ms=1000)
    other = World(world.masters, now=world.now + 100 * MS)
    taken_over = other.run(plan.adopt(other.fleet, other.settings, b"k", hold.secret, 5000))
    assert taken_over.secret == hold.secret
    assert taken_over.deadline_ns == other.now + 4948 * MS
    assert taken_over.reached == EVERYBODY
    assert {master.pttl(b"k", other.now) for master in world.masters} == {5000 * MS}
    assert other.release(taken_over) is True
    assert other.clean()


def test_adopt_of_what_is_gone_or_foreign_is_none() -> None:
    world = taken(3)
    steps: Any = plan.adopt(world.fleet, world.settings, b"k", b"0" * 40, 5000)
    assert world.run(steps) is None
    assert world.values() == [RIVAL] * 3
    free = World(3)
    assert free.run(plan.adopt(free.fleet, free.settings, b"k", b"0" * 40, 5000)) is None
    assert free.values() == [None] * 3


@pytest.mark.case("C20")
def test_c20_adopt_of_a_lost_lock_cleans_up_what_is_left_of_it() -> None:
    world, hold = acquired(5, ttl_ms=1000)
    for i in (2, 3, 4):
        world.masters[i].keys.clear()
    other = World(world.masters, now=world.now)
    steps: Any = plan.adopt(other.fleet, other.settings, b"k", hold.secret, 600_000)
    assert other.run(steps) is None
    other.settle()
    assert other.values() == [None] * 5


def test_adopt_without_a_quorum_or_too_late() -> None:
    world, hold = acquired(ttl_ms=60_000, patience_ms=1000)
    slow(world, 400 * MS)
    steps: Any = plan.adopt(world.fleet, world.settings, b"k", hold.secret, 300)
    assert world.run(steps) is None
    slow(world, 0)
    away(world, 0, 1)
    with pytest.raises(NoQuorum, match="cannot adopt"):
        world.run(plan.adopt(world.fleet, world.settings, b"k", hold.secret, 300))


@pytest.mark.case("C167")
@pytest.mark.parametrize(("held", "expected"), [(0, False), (1, False), (2, True), (3, True)])
def test_c167_locked_whoever_holds_it(held: int, expected: bool) -> None:
    world = taken(3, held)
    found = world.run(plan.look(world.fleet, plan.LOCKED, b"k", b"", EVERYBODY))
    assert found is expected
    away(world, 0, 1)
    with pytest.raises(NoQuorum, match="cannot tell who holds the lock"):
        world.run(plan.look(world.fleet, plan.LOCKED, b"k", b"", EVERYBODY))


def test_owned_asks_for_our_token() -> None:
    world, hold = acquired()

    def owned() -> Any:
        return world.run(plan.look(world.fleet, plan.OWNED, b"k", hold.secret, hold.reached))

    assert owned() is True
    world.plant(0)
    assert owned() is True
    world.masters[1].keys.clear()
    assert owned() is False
    assert [master.count("SET") for master in world.masters] == [1, 1, 1]


def test_release_token() -> None:
    world, hold = acquired()
    assert world.run(plan.release_token(world.fleet, b"k", hold.secret)) is True
    assert world.clean()
    assert world.run(plan.release_token(world.fleet, b"k", hold.secret)) is False
    away(world, 0, 1)
    with pytest.raises(NoQuorum, match="cannot release"):
        world.run(plan.release_token(world.fleet, b"k", hold.secret))


# -- the world itself -----------------------------------------------------------------------------


def test_rounds_begin_with_the_time_of_their_first_byte() -> None:
    world = World(3, patience_ms=70)
    steps: Any = acquire(world.fleet, world.settings, b"k", 1000, 0)
    op = next(steps)
    assert (op.kind, op.keys, op.ttl_ms) == (ACQUIRE, [b"k"], 1000)
    assert op.tokens == world.tokens
    world.sleep(500 * MS)
    world.run_op(op)
    assert op.start_ns == T0 + 500 * MS
    with pytest.raises(StopIteration) as stop:
        steps.send(world.now)
    assert stop.value.value[0].deadline_ns == T0 + (500 + 988) * MS


def test_lasting() -> None:
    world = World(1, drift_factor=0.1)
    assert world.settings.lasting_ns(1000) == 898 * MS
    assert world.settings.lasting_ns(2**42) > 2**41 * MS


def test_a_scripted_master_is_a_master() -> None:
    master = Master()
    assert master([b"SET", b"k", b"t", b"NX", b"PX", b"10"], T0) == OK
    assert master.get(b"k", T0 + 10 * MS - 1) == b"t"
    assert master.get(b"k", T0 + 10 * MS) is None
