"""Which server is this: INFO, run ids, aliases, connections to be killed, second connections."""

from __future__ import annotations

from typing import Any

import pytest
from unit.world import (
    DOWN,
    FOREIGN,
    GREETING,
    INFO,
    MISSING,
    MS,
    NIL,
    NO_INFO,
    OK,
    READY,
    T0,
    YES,
    commands,
    make_fleet,
    ready_fleet,
    resp,
    set_op,
    verbs,
)

from redlock_fast._core.fleet import Fleet

LOCAL = "127.0.0.1:55555"


def info(run_id: str = "a" * 40) -> bytes:
    text = f"# Server\r\nredis_version:7.4.0\r\nrun_id:{run_id}\r\ntcp_port:6379\r\n".encode()
    return b"$%d\r\n%s\r\n" % (len(text), text)


def greeted(fleet: Fleet, i: int = 0, now: int = T0, client_id: int = 7) -> Any:
    """Open a connection up to the answer to INFO."""
    fleet.dialing(i, now)
    fleet.connected(i, now)
    link: Any = fleet.links[i]
    link.local = LOCAL
    steps = len(commands(fleet.take(i)))
    fleet.receive(i, OK * (steps - 1) + b":%d\r\n" % client_id, now)
    assert fleet.take(i) == INFO
    assert link.state == GREETING
    return link


def connected(fleet: Fleet, i: int = 0, now: int = T0, run_id: str = "a" * 40, **more: int) -> Any:
    link = greeted(fleet, i, now, **more)
    fleet.receive(i, info(run_id), now)
    return link


# -- INFO -----------------------------------------------------------------------------------------


@pytest.mark.case("C71")
def test_info_cut_anywhere() -> None:
    data = info("0123abc")
    cuts = [[data], [bytes([byte]) for byte in data]]
    cuts += [[data[:at], data[at:]] for at in range(1, len(data))]
    for parts in cuts:
        fleet = make_fleet()
        link = greeted(fleet)
        for part in parts:
            assert link.state == GREETING
            fleet.receive(0, part, T0)
        assert link.state == READY
        assert link.run_id == "0123abc"
        assert link.owed == 0


@pytest.mark.parametrize(
    "reply",
    [
        NO_INFO,
        b"-ERR unknown command 'INFO'\r\n",
        b"$0\r\n\r\n",
        b"$8\r\n# Server\r\n",
        b"$13\r\nno_run_id:x\r\n\r\n",
    ],
)
def test_info_is_optional(reply: bytes) -> None:
    fleet = make_fleet()
    link = greeted(fleet)
    fleet.receive(0, reply, T0)
    assert link.state == READY
    assert link.run_id == ""
    assert fleet.news == []


@pytest.mark.case("C75")
@pytest.mark.case("C77")
@pytest.mark.parametrize(
    "reply",
    [
        b":1\r\n",
        b"+PONG\r\n",
        b"$-1\r\n",
        b"$-2\r\n",
        b"*1\r\n+x\r\n",
        b"%1\r\n+x\r\n:1\r\n",
        b"$\r\n",
        b"$x\r\n",
        b"$1x\r\n",
        b"$65537\r\n",
        b"$2147483648\r\n",
        b"$9223372036854775807\r\n",
        b"$999999999999999999999999\r\n",
        b"=15\r\ntxt:Some string\r\n",
        b"+OK\r\n",
        b"$3\r\nabcXY",
        b"$ 3\r\nabc\r\n",
    ],
)
def test_c77_other_answers_to_info(reply: bytes) -> None:
    for parts in ([reply], [bytes([byte]) for byte in reply]):
        fleet = make_fleet()
        link = greeted(fleet)
        op = set_op(1)
        fleet.start(op, T0)
        for part in parts:
            fleet.receive(0, part, T0)
        assert link.state == DOWN
        assert link.outcome == "PROTO"
        assert op.votes() == (0, 0, 1)


@pytest.mark.parametrize("more", [OK, b"+", b"\r\n", info()])
def test_more_than_the_answer_to_info(more: bytes) -> None:
    fleet = make_fleet()
    link = greeted(fleet)
    op = set_op(1)
    fleet.start(op, T0)
    fleet.receive(0, info() + more, T0)
    assert link.state == DOWN
    assert op.votes() == (0, 0, 1)


@pytest.mark.case("C80")
@pytest.mark.parametrize(
    "start",
    [
        b"$",
        b"-",
        b"+",
        b"$60000\r\n",
    ],
)
def test_c80_endless_answer_to_info_is_bounded(start: bytes) -> None:
    fleet = make_fleet()
    link = greeted(fleet)
    fleet.receive(0, start, T0)
    for _ in range(20):
        fleet.receive(0, b"1" * 10_000, T0)
    assert link.state == DOWN


# -- aliases --------------------------------------------------------------------------------------


@pytest.mark.case("C28")
def test_c28_one_server_under_two_addresses_never_votes_twice() -> None:
    fleet = make_fleet(3)
    connected(fleet, 0, run_id="same")
    alias = connected(fleet, 1, run_id="same")
    connected(fleet, 2, run_id="other")
    assert [link.state for link in fleet.links] == [READY, DOWN, READY]
    assert (alias.outcome, alias.cause) == ("CONFIG", "is the same server as 127.0.0.1:7001")
    assert fleet.news == [("127.0.0.1:7002", "CONFIG", alias.cause)]
    op = set_op(3)
    fleet.start(op, alias.retry_ns - 1)
    assert [verbs(fleet.take(i)) for i in range(3)] == [["SET"], [], ["SET"]]


@pytest.mark.case("C28")
def test_c28_an_alias_that_becomes_ready_in_a_round_is_not_asked() -> None:
    fleet = make_fleet(3)
    connected(fleet, 0, run_id="same")
    op = set_op(3)
    fleet.start(op, T0)
    fleet.receive(0, OK, T0)
    link = greeted(fleet, 1)
    fleet.receive(1, info("same"), T0)
    assert link.state == DOWN
    assert fleet.take(1) == b""
    assert op.outcomes()[1][0] == "CONFIG"
    assert op.votes() == (1, 0, 1)
    assert not op.ended


@pytest.mark.case("C28")
def test_c28_an_alias_is_not_hammered() -> None:
    fleet = make_fleet(2)
    connected(fleet, 0, run_id="same")
    now, pauses = T0, []
    for _ in range(8):
        link = connected(fleet, 1, now, run_id="same")
        pauses.append((link.retry_ns - now) // MS)
        now = link.retry_ns
    assert pauses == [10, 20, 40, 80, 160, 320, 500, 500]
    assert len(fleet.news) == 1


@pytest.mark.case("C28")
def test_c28_two_databases_of_one_server_are_worth_one_warning() -> None:
    fleet = make_fleet(masters=["redis://127.0.0.1:7001/0", "redis://127.0.0.1:7001/1"])
    now = T0
    for _ in range(3):
        for i in range(2):
            connected(fleet, i, now, run_id="same")
        assert [link.state for link in fleet.links] == [READY, READY]
        for i in range(2):
            fleet.lost(i, "closed", "reset", now)
        now += 1000 * MS
    (news,) = (row for row in fleet.news if row[1] == "akin")
    assert news == (
        "127.0.0.1:7001",
        "akin",
        "is the same server as 127.0.0.1:7001, another db of it",
    )


def test_servers_that_do_not_tell_are_not_taken_for_one() -> None:
    fleet = ready_fleet(3)  # INFO is refused
    assert [link.run_id for link in fleet.links] == ["", "", ""]
    assert [link.state for link in fleet.links] == [READY] * 3


# -- what a broken connection leaves --------------------------------------------------------------


def kill(client_id: int = 7) -> bytes:
    return resp("CLIENT", "KILL", "ID", client_id, "ADDR", LOCAL)


def test_the_connection_of_an_unanswered_set_is_killed_before_all_else() -> None:
    fleet = make_fleet()
    connected(fleet)
    op = set_op(1, b"k", b"old")
    fleet.start(op, T0)
    fleet.take(0)
    fleet.lost(0, "closed", "reset", T0)
    fleet.clean_up(op)
    waiting = set_op(1, b"k", b"new")
    fleet.start(waiting, T0)
    link = connected(fleet, now=T0 + 10 * MS, client_id=8)
    sent = fleet.take(0)
    assert sent.startswith(kill())
    assert verbs(sent) == ["CLIENT", "release", "SET"]
    fleet.receive(0, b":1\r\n" + MISSING + OK, T0 + 10 * MS)
    assert waiting.verdict() == YES
    assert link.owed == 0
    fleet.lost(0, "closed", "reset", T0 + 20 * MS)
    connected(fleet, now=T0 + 30 * MS)
    assert fleet.take(0) == b""  # killed once


@pytest.mark.parametrize("reply", [b":0\r\n", b"-ERR No such client\r\n", b"-NOPERM no\r\n"])
def test_a_kill_that_is_refused_is_no_trouble(reply: bytes) -> None:
    fleet = make_fleet()
    connected(fleet)
    op = set_op(1)
    fleet.start(op, T0)
    fleet.lost(0, "closed", "reset", T0)
    fleet.clean_up(op)
    link = connected(fleet, now=T0 + 10 * MS)
    assert verbs(fleet.take(0)) == ["CLIENT", "release"]
    fleet.receive(0, reply + MISSING, T0 + 10 * MS)
    assert (link.state, link.owed, fleet.indebted) == (READY, 0, False)


@pytest.mark.parametrize("reply", [OK, NIL, b"$2\r\nOK\r\n"])
def test_a_wrong_answer_to_kill_breaks_the_connection(reply: bytes) -> None:
    fleet = make_fleet()
    connected(fleet)
    fleet.start(set_op(1), T0)
    fleet.lost(0, "closed", "reset", T0)
    link = connected(fleet, now=T0 + 10 * MS)
    fleet.receive(0, reply, T0 + 10 * MS)
    assert link.state == DOWN


@pytest.mark.parametrize("run_id", ["b" * 40, ""])
def test_nobody_is_killed_on_another_server(run_id: str) -> None:
    fleet = make_fleet()
    connected(fleet)
    op = set_op(1)
    fleet.start(op, T0)
    fleet.lost(0, "closed", "reset", T0)
    fleet.clean_up(op)
    connected(fleet, now=T0 + 10 * MS, run_id=run_id)
    assert verbs(fleet.take(0)) == ["release"]


def test_nobody_is_killed_when_every_set_was_answered() -> None:
    fleet = make_fleet()
    connected(fleet)
    op = set_op(1)
    fleet.start(op, T0)
    fleet.receive(0, OK, T0)
    fleet.clean_up(op)
    fleet.lost(0, "closed", "reset", T0)
    connected(fleet, now=T0 + 10 * MS)
    assert verbs(fleet.take(0)) == ["release"]


def test_a_kill_outlasts_connections_that_do_not_become_ready() -> None:
    fleet = make_fleet()
    connected(fleet)
    fleet.start(set_op(1), T0)
    fleet.lost(0, "closed", "reset", T0)
    now = T0 + 600 * MS
    greeted(fleet, now=now)
    fleet.receive(0, b"-LOADING x\r\n", now)
    fleet.lost(0, "closed", "reset", now)
    connected(fleet, now=now + 600 * MS, client_id=9)
    assert fleet.take(0) == kill()


def test_a_kill_that_was_not_answered_is_sent_again() -> None:
    fleet = make_fleet()
    connected(fleet)
    fleet.start(set_op(1), T0)
    fleet.lost(0, "closed", "reset", T0)
    connected(fleet, now=T0 + 10 * MS, client_id=8)
    assert fleet.take(0) == kill()
    fleet.lost(0, "closed", "reset", T0 + 11 * MS)  # before the server read it
    connected(fleet, now=T0 + 30 * MS, client_id=9)
    assert kill() in fleet.take(0)


def test_two_broken_connections_are_both_killed() -> None:
    fleet = make_fleet()
    connected(fleet, client_id=7)
    fleet.start(set_op(1), T0)
    fleet.lost(0, "closed", "reset", T0)
    connected(fleet, now=T0 + 10 * MS, client_id=8)
    fleet.start(set_op(1), T0 + 10 * MS)
    fleet.lost(0, "closed", "reset", T0 + 11 * MS)  # neither KILL nor SET was answered
    connected(fleet, now=T0 + 600 * MS, client_id=9)
    sent = fleet.take(0)
    assert kill(7) in sent
    assert kill(8) in sent


# -- second connections ---------------------------------------------------------------------------


def silent(fleet: Fleet) -> None:
    """Master 0 owes an answer, and is suspect at T0."""
    fleet.start(set_op(fleet.n), T0 - 50 * MS)
    for i in range(fleet.n):
        fleet.take(i)
        if i:
            fleet.receive(i, OK, T0 - 50 * MS)
    fleet.judge(T0)
    assert fleet.links[0].suspect


@pytest.mark.case("C42")
def test_c42_a_second_connection_is_tried_beside_a_silent_one() -> None:
    fleet = ready_fleet(3)
    assert fleet.slots == 3
    assert fleet.due(T0) == 0
    silent(fleet)
    assert fleet.rivals[0] is not None
    assert fleet.rivals[1:] == [None, None]
    assert fleet.slots == 6
    assert fleet.due(T0) == 0b1000  # slot 3: of master 0
    fleet.dialing(3, T0)
    fleet.connected(3, T0)
    assert verbs(fleet.take(3)) == ["CLIENT"]
    fleet.receive(3, b":5\r\n", T0)
    assert fleet.take(3) == INFO
    fleet.receive(3, info(), T0)
    rival: Any = fleet.rivals[0]
    assert rival.state == READY
    assert fleet.take(3) == b""  # nothing goes there before it has carried on
    assert fleet.links[0].owed == 1


@pytest.mark.case("C42")
def test_c42_a_second_connection_that_fails_backs_off_and_disturbs_nobody() -> None:
    fleet = ready_fleet(3)
    silent(fleet)
    op = set_op(3)
    fleet.start(op, T0)
    assert op.hoping == 0b001
    now, pauses = T0, []
    for _ in range(4):
        fleet.dialing(3, now)
        fleet.lost(3, "refused", "no", now)
        rival: Any = fleet.rivals[0]
        pauses.append((rival.retry_ns - now) // MS)
        now = rival.retry_ns
    assert pauses == [10, 20, 40, 80]
    assert op.hoping == 0b001  # the first connection may answer yet
    assert op.votes() == (0, 0, 0)
    assert fleet.news == []


def test_a_second_connection_is_dropped_when_the_first_answers() -> None:
    fleet = ready_fleet(3)
    silent(fleet)
    fleet.dialing(3, T0)
    assert not fleet.rival_lost(0)
    fleet.receive(0, OK, T0 + MS)
    assert (fleet.rival_won(0), fleet.rival_lost(0)) == (False, True)
    fleet.drop_rival(0)  # as whoever drives does
    assert fleet.rivals == [None] * 3
    assert fleet.slots == 3


def test_judging_twice_makes_one_second_connection() -> None:
    fleet = ready_fleet(3)
    silent(fleet)
    rival = fleet.rivals[0]
    fleet.judge(T0 + 100 * MS)
    assert fleet.rivals[0] is rival


def test_clean_ups_go_behind_their_set_on_the_first_connection() -> None:
    fleet = ready_fleet(1)
    op = set_op(1)
    fleet.start(op, T0 - 50 * MS)
    fleet.expire(op, T0)
    fleet.clean_up(op)
    assert fleet.rivals[0] is not None
    assert [words[0][:4] for words in commands(fleet.take(0))] == [b"SET", b"EVAL"]
    fleet.receive(0, OK + FOREIGN, T0)
    assert fleet.links[0].owed == 0
