"""Several addresses of one master: their order, their shares of one limit, late answers."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from unit.world import ACQUIRE, DIALING, DOWN, GREETING, MS, READY, T0, make_fleet, resp

from redlock_fast._core.fleet import Fleet
from redlock_fast._core.op import Op
from redlock_fast.options import Secret
from redlock_fast.resolve import Answer

A, B, C = [(socket.AF_INET, (f"127.0.0.{i}", 7001)) for i in (1, 2, 3)]


@pytest.fixture
def fleet() -> Fleet:
    return make_fleet(masters=["redis://m.test:7001"])


def found(*places: Any, outcome: str = "", cause: str = "") -> Answer:
    answer = Answer()
    answer.places = places
    answer.outcome = outcome
    answer.cause = cause
    answer.done = True
    return answer


def dial(fleet: Fleet, now: int, *places: Any) -> Any:
    """Begin a dial whose look-up has found these; returns where to connect to first."""
    fleet.dialing(0, now)
    assert fleet.asks(0)
    fleet.asked(0, found(*places), now)
    return fleet.next_place(0, now)


def go_on(fleet: Fleet, now: int) -> Any:
    """The driver's part, when the dial is due again."""
    assert fleet.due(now) == 1
    fleet.dialing(0, now)
    assert not fleet.asks(0)
    return fleet.next_place(0, now)


def tried(fleet: Fleet, now: int, *places: Any) -> Iterator[Any]:
    """Where one whole dial connects to, each being refused."""
    place = dial(fleet, now, *places)
    while True:
        yield place
        fleet.lost(0, "refused", "connection refused", now)
        if not fleet.links[0].between:
            return
        place = go_on(fleet, now)


def serve(fleet: Fleet, now: int) -> None:
    """The connection becomes READY."""
    fleet.connected(0, now)
    fleet.receive(0, b":7\r\n", now)
    fleet.receive(0, b"-ERR unknown command\r\n", now)
    assert fleet.links[0].state == READY


def test_all_are_tried_before_the_dial_has_failed(fleet: Fleet) -> None:
    op = Op(ACQUIRE, 1, [b"key"], [b"t" * 40], 1000)
    fleet.start(op, T0)
    assert list(tried(fleet, T0, A, B, C)) == [A, B, C]
    link = fleet.links[0]
    assert (link.state, link.outcome, link.errors) == (DOWN, "refused", {"refused": 1})
    assert op.ended
    assert link.reconnects == 1  # one dial


def test_a_round_waits_for_the_next_address(fleet: Fleet) -> None:
    op = Op(ACQUIRE, 1, [b"key"], [b"t" * 40], 1000)
    fleet.start(op, T0)
    dial(fleet, T0, A, B)
    fleet.lost(0, "refused", "connection refused", T0 + 1 * MS)
    assert not op.ended
    assert fleet.connecting
    assert fleet.next_ns() <= T0 + 1 * MS
    assert go_on(fleet, T0 + 1 * MS) == B
    serve(fleet, T0 + 2 * MS)
    assert resp("SET", "key", "t" * 40, "NX", "PX", 1000) in fleet.take(0)


def test_the_one_that_worked_is_the_first_next_time(fleet: Fleet) -> None:
    dial(fleet, T0, A, B, C)
    fleet.lost(0, "refused", "connection refused", T0)
    assert go_on(fleet, T0) == B
    serve(fleet, T0)
    fleet.lost(0, "closed", "connection closed by the server", T0)
    assert list(tried(fleet, T0, A, B, C)) == [B, A, C]
    # ... if it still is one of them.
    assert list(tried(fleet, T0, C, A)) == [C, A]


def test_one_that_only_accepted_is_the_last_next_time(fleet: Fleet) -> None:
    dial(fleet, T0, A, B)
    fleet.connected(0, T0)
    fleet.lost(0, "closed", "connection closed by the server", T0)
    assert fleet.links[0].state == DOWN
    assert not fleet.links[0].between
    assert list(tried(fleet, T0, A, B)) == [B, A]


def silent(fleet: Fleet, now: int, *places: Any) -> list[int]:
    """How many ms each address is waited for, if none answers."""
    times = []
    dial(fleet, now, *places)
    start = now
    while True:
        now += 1 * MS
        fleet.judge(now)
        if fleet.links[0].state == DOWN:
            times.append((now - start) // MS)
            start = now
            if not fleet.links[0].between:
                return times
            go_on(fleet, now)


@pytest.mark.case("C69")
def test_c69_the_limit_is_shared(fleet: Fleet) -> None:
    # master_timeout is 50 ms, connect_timeout 1000.
    assert silent(fleet, T0, A, B, C) == [17, 17, 966]
    assert silent(fleet, T0, A, B, C) == [34, 34, 932]
    assert silent(fleet, T0, A, B, C) == [67, 67, 866]
    for _ in range(4):
        silent(fleet, T0, A, B, C)
    assert silent(fleet, T0, A, B, C) == [334, 333, 333]
    assert silent(fleet, T0, A) == [1000]
    assert fleet.links[0].cause == "the connect took longer than 1000 ms"


def test_a_look_up_that_takes_too_long(fleet: Fleet) -> None:
    fleet.dialing(0, T0)
    assert fleet.asks(0)
    answer = Answer()
    fleet.asked(0, answer, T0)
    assert fleet.next_place(0, T0) is None
    assert fleet.links[0].state == DIALING
    assert fleet.due(T0 + 999 * MS) == 0
    fleet.judge(T0 + 1000 * MS)
    link = fleet.links[0]
    assert (link.state, link.outcome) == (DOWN, "timeout")
    assert link.cause == "the look-up took longer than 1000 ms"

    # The next dial waits for the same answer.
    fleet.dialing(0, T0 + 1500 * MS)
    assert not fleet.asks(0)
    assert fleet.next_place(0, T0 + 1500 * MS) is None
    answer.places = (B,)
    answer.done = True
    assert fleet.next_ns() <= T0 + 1500 * MS
    assert go_on(fleet, T0 + 1600 * MS) == B
    serve(fleet, T0 + 1600 * MS)
    assert link.answer is None


def test_an_old_answer_is_not_used(fleet: Fleet) -> None:
    fleet.dialing(0, T0)
    answer = Answer()
    fleet.asked(0, answer, T0)
    fleet.judge(T0 + 1000 * MS)
    answer.places = (A,)
    answer.done = True
    fleet.dialing(0, T0 + 61_000 * MS)
    assert fleet.asks(0)


def test_a_dial_that_was_given_up_is_not_gone_on_with(fleet: Fleet) -> None:
    dial(fleet, T0, A, B)
    # The loop was closed, say, and the next one comes a minute later.
    fleet.lost(0, "closed", "its event loop was closed", T0 + 1 * MS)
    link = fleet.links[0]
    assert not link.between
    assert dial(fleet, T0 + 60_000 * MS, A, B) == A
    assert link.dial_limit_ns == T0 + 61_000 * MS


def test_credentials_are_not_kept() -> None:
    """Neither when the connection is ready nor when it has failed."""
    provider = type("Provider", (), {"get_credentials": lambda self: None})()
    fleet = make_fleet(
        masters=[{"host": "127.0.0.1", "port": 7001, "credential_provider": provider}]
    )
    password = b"S3cr3t! " * 4
    references = sys.getrefcount(password)
    for ready in (True, False):
        answer = found(A)
        answer.username, answer.password = "app", Secret(password)
        fleet.dialing(0, T0)
        assert fleet.asks(0)
        fleet.asked(0, answer, T0)
        del answer
        fleet.next_place(0, T0)
        fleet.connected(0, T0)
        assert fleet.take(0) == resp("AUTH", "app", password)
        assert sys.getrefcount(password) > references
        if ready:
            for reply in (b"+OK\r\n", b":7\r\n", b"-ERR unknown command\r\n"):
                fleet.receive(0, reply, T0)
            assert fleet.links[0].state == READY
        else:
            fleet.receive(0, b"-WRONGPASS invalid username-password pair\r\n", T0)
            assert fleet.links[0].state == DOWN
        assert sys.getrefcount(password) == references
        fleet.lost(0, "closed", "connection closed by the server", T0)


def test_a_name_that_is_not_found(fleet: Fleet) -> None:
    op = Op(ACQUIRE, 1, [b"key"], [b"t" * 40], 1000)
    fleet.start(op, T0)
    fleet.dialing(0, T0)
    fleet.asked(0, found(outcome="unresolved", cause="host name m.test cannot be looked up"), T0)
    assert fleet.next_place(0, T0) is None
    link = fleet.links[0]
    assert (link.state, link.outcome) == (DOWN, "unresolved")
    assert link.retry_ns > T0


def test_known_places_need_no_answer() -> None:
    fleet = make_fleet(masters=["redis://localhost:7001"])
    fleet.dialing(0, T0)
    assert not fleet.asks(0)
    assert fleet.next_place(0, T0) == (socket.AF_INET, ("127.0.0.1", 7001))
    fleet.lost(0, "refused", "connection refused", T0)
    assert go_on(fleet, T0) == (socket.AF_INET6, ("::1", 7001, 0, 0))
    fleet.connected(0, T0)
    assert fleet.links[0].state == GREETING
