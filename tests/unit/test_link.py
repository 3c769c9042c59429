"""The conversation with one master, by hand: greeting, replies, order, NOSCRIPT, errors, debts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.world import (
    ACQUIRE,
    DIALING,
    DOWN,
    EXTEND,
    FOREIGN,
    GREETING,
    INFO,
    LOCKED,
    MISSING,
    MS,
    NIL,
    NO,
    NO_INFO,
    OK,
    OURS,
    OWNED,
    QUICK,
    READY,
    RELEASE,
    T0,
    YES,
    commands,
    connect,
    forms,
    make_fleet,
    many,
    ready_fleet,
    resp,
    set_op,
    verbs,
)

from redlock_fast import scripts
from redlock_fast._core.fleet import Fleet
from redlock_fast._core.op import Op

PASSWORD = "S3cr3t!"
TOKEN = b"0123456789abcdef0123456789abcdef01234567"
CLIENT_ID = resp("CLIENT", "ID")
NOSCRIPT = b"-NOSCRIPT No matching script. Please use EVAL.\r\n"
DAY_NS = 86_400_000 * MS


def one_op(kind: int, token: bytes = TOKEN) -> Op:
    return Op(kind, 1, [b"k"], [token], 1000 if kind in (ACQUIRE, EXTEND) else -1)


def outcome(op: Op, i: int = 0) -> str | None:
    word: str | None = op.outcomes()[i][0]
    return word


def cause(op: Op, i: int = 0) -> str:
    text: str = op.outcomes()[i][1]
    return text


def greet(**options: Any) -> Fleet:
    """A fleet of one master that is connected, and not yet greeted."""
    fleet = make_fleet(masters=[{"host": "127.0.0.1", "port": 7001, **options}])
    fleet.dialing(0, T0)
    assert fleet.links[0].state == DIALING
    assert fleet.take(0) == b""
    fleet.connected(0, T0)
    assert fleet.links[0].state == GREETING
    return fleet


# -- greeting -------------------------------------------------------------------------------------


def test_greeting_of_a_master_without_settings_is_the_proof_of_life() -> None:
    fleet = greet()
    assert fleet.take(0) == CLIENT_ID
    fleet.receive(0, b":42\r\n", T0)
    assert fleet.links[0].state == GREETING
    assert fleet.take(0) == INFO
    fleet.receive(0, NO_INFO, T0)
    assert fleet.links[0].state == READY
    assert fleet.links[0].client_id == 42
    assert fleet.links[0].owed == 0
    assert fleet.take(0) == b""


@pytest.mark.case("C53")
def test_c53_nothing_goes_out_before_auth_was_answered() -> None:
    fleet = greet(password=PASSWORD, db=3, client_name="me")
    op = set_op(1)
    fleet.start(op, T0)
    assert fleet.take(0) == resp("AUTH", PASSWORD)
    fleet.serve(T0 + 10 * MS)
    fleet.start(Op(RELEASE, 1, [b"k"], [b"t"]), T0 + 20 * MS)
    fleet.clean_up(op)
    assert fleet.take(0) == b""
    fleet.receive(0, OK, T0 + 30 * MS)
    assert fleet.take(0) == (
        resp("SELECT", 3) + resp("CLIENT", "SETNAME", "me") + resp("CLIENT", "ID")
    )
    fleet.receive(0, OK + OK, T0 + 31 * MS)
    assert fleet.links[0].state == GREETING
    assert fleet.take(0) == b""
    fleet.receive(0, b":5\r\n", T0 + 32 * MS)
    assert fleet.take(0) == INFO
    fleet.receive(0, NO_INFO, T0 + 33 * MS)
    assert fleet.links[0].state == READY
    assert "release" in verbs(fleet.take(0))


@pytest.mark.case("C91")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"password": "p"}, ["AUTH", "p"]),
        ({"username": "u", "password": "p"}, ["AUTH", "u", "p"]),
        ({"username": "u"}, ["AUTH", "u", ""]),
        ({"username": "ü", "password": "p@ss:w/rd#?%25$ é"}, ["AUTH", "ü", "p@ss:w/rd#?%25$ é"]),
        ({"password": "a\r\nFLUSHALL\r\n"}, ["AUTH", "a\r\nFLUSHALL\r\n"]),
    ],
)
def test_c91_words_of_auth(options: dict[str, Any], words: list[str]) -> None:
    assert greet(**options).take(0) == resp(*words)


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({"db": 0}, []),
        ({"db": 1}, [["SELECT", 1]]),
        ({"db": 15, "client_name": "x"}, [["SELECT", 15], ["CLIENT", "SETNAME", "x"]]),
        ({"client_name": "x"}, [["CLIENT", "SETNAME", "x"]]),
    ],
)
def test_steps_without_auth(options: dict[str, Any], after: list[list[Any]]) -> None:
    expected = b"".join(resp(*words) for words in after) + CLIENT_ID
    assert greet(**options).take(0) == expected


SETTINGS = {"username": "user", "password": PASSWORD, "db": 3, "client_name": "me"}
STEPS = ["AUTH", "SELECT", "SETNAME", "ID"]


def refuse(step: str, reply: bytes) -> tuple[Fleet, Op]:
    """Answer the greeting up to `step` well, and that step with `reply`."""
    fleet = greet(**SETTINGS)
    op = set_op(1)
    fleet.start(op, T0)
    for before in STEPS[: STEPS.index(step)]:
        fleet.receive(0, OK, T0)
        assert fleet.links[0].state == GREETING, before
    fleet.take(0)
    fleet.receive(0, reply, T0 + MS)
    return fleet, op


@pytest.mark.parametrize("cut", ["whole", "bytes"])
@pytest.mark.parametrize(
    ("step", "reply", "word"),
    [
        ("AUTH", b"-WRONGPASS invalid username-password pair or user is disabled.", "CONFIG"),
        ("AUTH", b"-ERR invalid password", "CONFIG"),
        ("AUTH", b"-ERR Client sent AUTH, but no password is set", "CONFIG"),
        ("AUTH", b"-ERR wrong number of arguments for 'auth' command", "CONFIG"),
        ("AUTH", b"-NOPERM not you", "CONFIG"),
        ("AUTH", b"-DENIED Redis is running in protected mode because ...", "CONFIG"),
        ("AUTH", b"-ERR max number of clients reached", "MAXCLIENTS"),
        ("AUTH", b"-LOADING Redis is loading the dataset in memory", "LOADING"),
        ("AUTH", b"-BUSY Redis is busy running a script.", "BUSY"),
        ("AUTH", b"+QUEUED", "PROTO"),
        ("AUTH", b":1", "PROTO"),
        ("AUTH", b"$-1", "PROTO"),
        ("AUTH", b"$2\r\nOK", "PROTO"),
        ("SELECT", b"-ERR DB index is out of range", "CONFIG"),
        ("SELECT", b"-NOPERM User user has no permissions to run the 'select' command", "CONFIG"),
        ("SELECT", b"-NOAUTH Authentication required.", "CONFIG"),
        ("SELECT", b"-LOADING Redis is loading the dataset in memory", "LOADING"),
        ("SELECT", b"-BUSY Redis is busy running a script.", "BUSY"),
        ("SELECT", b":1", "PROTO"),
        ("SETNAME", b"-NOAUTH Authentication required.", "CONFIG"),
        ("SETNAME", b"-LOADING Redis is loading the dataset in memory", "LOADING"),
        ("SETNAME", b"$-1", "PROTO"),
        ("ID", b"-NOAUTH Authentication required.", "CONFIG"),
        ("ID", b"-LOADING Redis is loading the dataset in memory", "LOADING"),
        ("ID", b"-BUSY Redis is busy running a script.", "BUSY"),
        ("ID", b"+OK", "PROTO"),
        ("ID", b"$-1", "PROTO"),
        ("ID", b":x", "PROTO"),
    ],
)
def test_a_refused_step_fails_the_master(step: str, reply: bytes, word: str, cut: str) -> None:
    fleet, op = refuse(step, b"")
    data = reply + b"\r\n"
    for part in [data] if cut == "whole" else [bytes([b]) for b in data]:
        fleet.receive(0, part, T0 + MS)
    link = fleet.links[0]
    assert link.state == DOWN
    assert fleet.take(0) == b""
    assert link.retry_ns == T0 + 11 * MS  # jitter 0: 10 ms
    # The round that hoped for it knows why it was in vain, and that it was.
    assert op.ended
    assert outcome(op) == word
    assert link.stats()["cause"].startswith(word)
    if word != "PROTO":
        assert cause(op) == reply[1:].decode()
    assert fleet.news == [("127.0.0.1:7001", word, cause(op))]
    assert PASSWORD not in repr((op.outcomes(), link.stats(), fleet.news))


@pytest.mark.parametrize(
    ("step", "reply"),
    [
        ("SETNAME", b"-NOPERM no permissions to run the 'client|setname' command"),
        ("SETNAME", b"-ERR unknown command 'CLIENT'"),
        ("ID", b"-NOPERM no permissions to run the 'client|id' command"),
        ("ID", b"-ERR Unknown subcommand or wrong number of arguments for 'ID'"),
        ("ID", b"-ERR unknown command 'CLIENT'"),
        ("ID", b"-READONLY what"),
    ],
)
def test_a_refusal_of_what_is_optional_is_silent(step: str, reply: bytes) -> None:
    fleet, _ = refuse(step, reply + b"\r\n")
    if step != "ID":
        fleet.receive(0, b":5\r\n", T0)
    assert fleet.take(0).endswith(INFO)
    fleet.receive(0, NO_INFO, T0)
    assert fleet.links[0].state == READY
    assert fleet.links[0].client_id == (None if step == "ID" else 5)
    assert fleet.news == []
    assert verbs(fleet.take(0)) == ["SET"]


@pytest.mark.case("C46")
@pytest.mark.case("C47")
@pytest.mark.parametrize(
    ("banner", "word"),
    [
        (b"-ERR max number of clients reached\r\n", "MAXCLIENTS"),
        (b"-DENIED Redis is running in protected mode because ...\r\n", "CONFIG"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"password": PASSWORD}])
def test_c46_c47_banners(banner: bytes, word: str, options: dict[str, Any]) -> None:
    fleet = greet(**options)
    op = set_op(1)
    fleet.start(op, T0)
    fleet.receive(0, banner, T0)
    assert fleet.links[0].state == DOWN
    assert outcome(op) == word
    assert cause(op) == banner[1:-2].decode()
    assert op.votes() == (0, 0, 1)
    assert not fleet.due(T0)  # not hammered
    assert fleet.due(T0 + 10 * MS)


@pytest.mark.case("C62")
@pytest.mark.parametrize("when", ["greeting", "set"])
@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "HTTP"),
        (b"<html>\r\n", "HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\n", "TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not a Redis reply"),
        (b"220 smtp.example ESMTP\r\n", "not a Redis reply"),
        (b"\r\n", "not a Redis reply"),
        (b"\n", "not a Redis reply"),
        (b"\0\0\0\0\n", "not a Redis reply"),
        (b"\xff\xfe\n", "not a Redis reply"),
    ],
)
def test_c62_other_protocols(data: bytes, hint: str, when: str) -> None:
    fleet = greet() if when == "greeting" else ready_fleet()
    op = set_op(1)
    fleet.start(op, T0)
    fleet.receive(0, data, T0)
    assert fleet.links[0].state == DOWN
    assert outcome(op) == "PROTO"
    assert hint in cause(op)
    assert cause(op).isprintable()
    assert op.votes() == (0, 0, 1)


@pytest.mark.case("C63")
def test_c63_tls_alert_is_a_breach_at_once() -> None:
    fleet = greet()
    op = set_op(1)
    fleet.start(op, T0)
    fleet.receive(0, bytes.fromhex("15030100020246"), T0)
    assert fleet.links[0].state == DOWN
    assert outcome(op) == "PROTO"
    assert "TLS" in cause(op)


@pytest.mark.case("C54")
@pytest.mark.case("C48")
@pytest.mark.parametrize(
    "reply", [b"-WRONGPASS no\r\n", b"-LOADING wait\r\n", b"HTTP/1.0 400 no\r\n", b"+QUEUED\r\n"]
)
def test_c54_failed_greetings_back_off(reply: bytes) -> None:
    fleet = greet(password=PASSWORD)
    link = fleet.links[0]
    now = T0
    pauses = []
    for _ in range(9):
        fleet.receive(0, reply, now)
        assert link.state == DOWN
        pauses.append((link.retry_ns - now) // MS)
        assert not fleet.due(link.retry_ns - 1)
        assert fleet.due(link.retry_ns) == 1
        now = link.retry_ns
        fleet.dialing(0, now)
        fleet.connected(0, now)
        assert fleet.take(0) == resp("AUTH", PASSWORD)
    assert pauses == [10, 20, 40, 80, 160, 320, 500, 500, 500]
    assert len(fleet.news) == 1  # C161: one line, not nine


@pytest.mark.case("C161")
def test_c161_news_of_trouble_and_of_recovery_once() -> None:
    fleet = make_fleet()
    now = T0
    for _ in range(20):
        fleet.dialing(0, now)
        fleet.lost(0, "refused", "connection refused", now)
        now += 500 * MS
    connect(fleet, 0, now)
    for _ in range(3):
        fleet.start(set_op(1), now)
        fleet.receive(0, OK, now)
    assert fleet.news == [
        ("127.0.0.1:7001", "refused", "connection refused"),
        ("127.0.0.1:7001", "well", ""),
    ]


@pytest.mark.case("C151")
def test_c151_a_server_that_repeats_the_password() -> None:
    fleet = greet(password=PASSWORD)
    op = set_op(1)
    fleet.start(op, T0)
    # Redis with `rename-command AUTH ""`, and other servers
    fleet.receive(
        0, f"-ERR unknown command 'AUTH', with args beginning with: '{PASSWORD}' \r\n".encode(), T0
    )
    assert outcome(op) == "CONFIG"
    assert PASSWORD not in repr((op.outcomes(), fleet.stats(), fleet.news))


@pytest.mark.case("C153")
def test_c153_a_server_that_repeats_the_token() -> None:
    fleet = ready_fleet()
    op = one_op(RELEASE)
    fleet.start(op, T0)
    fleet.receive(
        0,
        b"-ERR unknown command 'EVALSHA', with args beginning with: '%s' '1' 'k' '%s' \r\n"
        % (scripts.RELEASE.sha, TOKEN),
        T0,
    )
    assert outcome(op) == "ERR"
    assert TOKEN.decode() not in repr((op.outcomes(), fleet.stats(), fleet.news))


@pytest.mark.case("C153")
@pytest.mark.parametrize("token", [TOKEN, b"22LettersDigitsRandom0"], ids=["ours", "redlock-py's"])
def test_c153_a_server_with_words_of_its_own(token: bytes) -> None:
    fleet = ready_fleet()
    op = one_op(RELEASE, token)
    fleet.start(op, T0)
    fleet.receive(0, b"-ERR cannot take %s here\r\n" % token, T0)
    assert cause(op) == "ERR cannot take *** here"
    assert token.decode() not in repr((op.outcomes(), fleet.stats(), fleet.news))


def test_causes_are_one_printable_line_of_bounded_length() -> None:
    fleet = ready_fleet()
    op = set_op(1)
    fleet.start(op, T0)
    fleet.receive(0, b"-ERR \x1b[31m\x00\xff\t" + b"x" * 60_000 + b"\r\n", T0)
    assert outcome(op) == "ERR"
    assert cause(op).isprintable()
    assert len(cause(op)) < 300


def test_a_new_connection_counts_as_alive_only_after_one_answer() -> None:
    fleet = make_fleet(connect_ms=1000)
    op = set_op(1)
    fleet.dialing(0, T0)
    fleet.connected(0, T0)
    fleet.start(op, T0)
    assert fleet.take(0) == CLIENT_ID
    fleet.judge(T0 + 999 * MS)
    assert fleet.links[0].state == GREETING
    assert fleet.next_ns() == T0 + 1000 * MS
    fleet.judge(T0 + 1000 * MS)
    assert fleet.links[0].state == DOWN
    assert outcome(op) == "timeout"
    assert "handshake" in cause(op)


# -- replies: cut anywhere ------------------------------------------------------------------------


def view(fleet: Fleet, ops: list[Op]) -> Any:
    """All that is to be the same however the bytes were cut."""
    link = fleet.links[0]
    return (
        link.state,
        link.owed,
        link.suspect,
        sum(count for _, _, count in link.debts),
        [op.votes(j) for op in ops for j in range(op.k)],
        [op.verdicts() for op in ops],
        [op.ended for op in ops],
        [
            (word, "" if word == "PROTO" else text, ms)
            for op in ops
            for word, text, ms in op.outcomes()
        ],
        fleet.take(0),
        [(text if word != "PROTO" else word) for _, word, text in fleet.news],
    )


def feed(kinds: list[int], parts: list[bytes]) -> Any:
    """Begin a round of each kind, feed the parts, and look."""
    fleet = ready_fleet()
    ops = [one_op(kind) for kind in kinds]
    for op in ops:
        fleet.start(op, T0)
    assert len(commands(fleet.take(0))) == len(ops)
    for part in parts:
        fleet.receive(0, part, T0 + MS)
    return view(fleet, ops)


LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"
STREAMS: dict[str, tuple[list[int], bytes]] = {
    "granted": ([ACQUIRE], OK),
    "taken": ([ACQUIRE], NIL),
    "ours": ([RELEASE], OURS),
    "foreign": ([RELEASE], FOREIGN),
    "missing": ([RELEASE], MISSING),
    "extended": ([EXTEND], OURS),
    "owned": ([OWNED], OURS),
    "locked": ([LOCKED], FOREIGN),
    "noscript": ([RELEASE], b"-NOSCRIPT x\r\n"),
    "noscript to SET": ([ACQUIRE], b"-NOSCRIPT x\r\n"),
    "err": ([ACQUIRE], b"-ERR x\r\n"),
    "err to a script": ([RELEASE], b"-ERR x\r\n"),
    "loading": ([ACQUIRE], LOADING),
    "loading to a release": ([RELEASE], LOADING),
    "readonly": ([ACQUIRE], b"-READONLY x\r\n"),
    "noauth": ([EXTEND], b"-NOAUTH x\r\n"),
    "nil array": ([ACQUIRE], b"*-1\r\n"),
    "null of RESP3": ([ACQUIRE], b"_\r\n"),
    "hello map": ([ACQUIRE], b"%2\r\n+server\r\n+redis\r\n+proto\r\n:3\r\n"),
    "push": ([ACQUIRE], b">2\r\n+invalidate\r\n*1\r\n+k\r\n"),
    "bulk": ([ACQUIRE], b"$2\r\nOK\r\n"),
    "garbage": ([ACQUIRE], b"garbage\r\n"),
    "bad integer": ([RELEASE], b":1a\r\n"),
    "too many": ([ACQUIRE, RELEASE, ACQUIRE], OK + OURS + NIL),
    "one and a half": ([ACQUIRE, RELEASE], OK + b":1"),
    "one and a carriage return": ([ACQUIRE, RELEASE], OK + b":1\r"),
    "half": ([ACQUIRE], b"+O"),
    "a type byte": ([RELEASE], b":"),
    "errors among answers": (
        [ACQUIRE, RELEASE, EXTEND, ACQUIRE],
        OK + b"-ERR x\r\n" + MISSING + b"-OOM x\r\n",
    ),
    "noscript among answers": (
        [RELEASE, RELEASE, ACQUIRE, RELEASE],
        NOSCRIPT + NOSCRIPT + OK + OURS,
    ),
}


@pytest.mark.case("C71")
@pytest.mark.case("C72")
@pytest.mark.case("C73")
@pytest.mark.parametrize("name", STREAMS)
def test_c71_whole_split_and_byte_by_byte_are_the_same(name: str) -> None:
    kinds, data = STREAMS[name]
    whole = feed(kinds, [data])
    assert feed(kinds, [bytes([byte]) for byte in data]) == whole
    for at in range(1, len(data)):
        assert feed(kinds, [data[:at], data[at:]]) == whole, at
    assert feed(kinds, [data[:1], data[1:-1], data[-1:]]) == whole
    assert feed(kinds, [b"", data, b""]) == whole


ANSWERS = {
    ACQUIRE: [OK, NIL, b"-ERR x\r\n", b"-OOM no\r\n"],
    RELEASE: [OURS, FOREIGN, MISSING, b"-ERR x\r\n", NOSCRIPT, LOADING],
    EXTEND: [OURS, FOREIGN, MISSING, b"-WRONGTYPE x\r\n", NOSCRIPT],
    LOCKED: [OURS, FOREIGN, MISSING, b"-NOPERM x\r\n", NOSCRIPT],
}
ROUNDS = st.sampled_from(list(ANSWERS)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.sampled_from(ANSWERS[kind]))
)


@pytest.mark.case("C71")
@pytest.mark.case("C72")
@given(st.lists(ROUNDS, min_size=1, max_size=12), st.data())
@QUICK
def test_c71_any_cut_of_any_pipeline(rounds: list[tuple[int, bytes]], data: st.DataObject) -> None:
    kinds = [kind for kind, _ in rounds]
    stream = b"".join(answer for _, answer in rounds)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert feed(kinds, parts) == feed(kinds, [stream])


@pytest.mark.case("C72")
def test_c72_each_reply_is_matched_to_its_command() -> None:
    fleet = ready_fleet()
    first, second, third = one_op(ACQUIRE), one_op(RELEASE), one_op(ACQUIRE)
    for op in (first, second, third):
        fleet.start(op, T0)
    assert verbs(fleet.take(0)) == ["SET", "release", "SET"]
    fleet.receive(0, OK + FOREIGN + b"$", T0)
    assert (outcome(first), outcome(second), outcome(third)) == ("granted", "foreign", None)
    fleet.receive(0, b"-1\r\n", T0)
    assert outcome(third) == "taken"


@pytest.mark.parametrize(
    ("kind", "reply", "word", "verdict"),
    [
        (ACQUIRE, OK, "granted", YES),
        (ACQUIRE, NIL, "taken", NO),
        (RELEASE, OURS, "ours", YES),
        (RELEASE, FOREIGN, "foreign", NO),
        (RELEASE, MISSING, "missing", NO),
        (EXTEND, OURS, "ours", YES),
        (EXTEND, FOREIGN, "foreign", NO),
        (EXTEND, MISSING, "missing", NO),
        (OWNED, OURS, "ours", YES),
        (OWNED, FOREIGN, "foreign", NO),
        (OWNED, MISSING, "missing", NO),
        (LOCKED, OURS, "ours", YES),
        (LOCKED, FOREIGN, "foreign", YES),
        (LOCKED, MISSING, "missing", NO),
    ],
)
def test_what_each_answer_means(kind: int, reply: bytes, word: str, verdict: int) -> None:
    fleet = ready_fleet()
    op = one_op(kind)
    fleet.start(op, T0)
    fleet.receive(0, reply, T0 + 3 * MS)
    assert op.ended
    assert op.verdict() == verdict
    assert op.outcomes() == [(word, "", 3.0)]
    assert fleet.links[0].state == READY


# -- replies: only the expected one counts --------------------------------------------------------

BAD_INTEGERS = [
    b":",
    b":+1",
    b":1a",
    b":1 ",
    b": 1",
    b":99999999999999999999",
    b":9223372036854775808",
    b":-0",
    b":01",
    b":0x1",
    b":1.0",
    b":1\r",
    b":1\0",
    b":\xd9\xa1",
    b":2",
    b":-2",
    b":9223372036854775807",
    b":4294967297",
    b":-4294967295",
]
WRONG_FOR_SCRIPTS = [
    b"+OK",
    b"+1",
    b"$-1",
    b"$1\r\n1",
    b"*-1",
    b"*0",
    b"*1\r\n:1",
    b"#t",
    b",1.0",
    b"(1",
    b"_",
    b"$ 3\r\nabc",
    b"$03\r\nabc",
    b"$3\r\nabcdef",
]
WRONG_FOR_SET = [
    b":1",
    b":0",
    b"+QUEUED",
    b"+PONG",
    b"+ok",
    b"+OKAY",
    b"+OK ",
    b"+OK\0",
    b"+OK\r",
    b"+",
    b"$2\r\nOK",
    b"$0\r\n",
    b"*0",
    b"*-1",
    b"#t",
    b"_",
    b"=6\r\ntxt:OK",
    b"~1\r\n+OK",
]
# C74, C75
HUGE = [
    b"*4294967295",
    b"*9223372036854775807",
    b"%9223372036854775807",
    b"$9223372036854775807",
    b"$2147483648",
    b"*-2",
    b"$-2",
    b"$-9223372036854775808",
    b"$-99999999999999999999",
    b"$-",
    b"$-1x",
    b"$-01",
    b"$",
    b"*",
]


def must_break(kind: int, data: bytes) -> None:
    """Whole and byte by byte: no vote, connection gone, and no promise kept from it."""
    for parts in (
        [data],
        [bytes([byte]) for byte in data] if len(data) < 100 else [data[:50], data[50:]],
    ):
        fleet = ready_fleet()
        op, behind = one_op(kind), one_op(RELEASE)
        fleet.start(op, T0)
        fleet.start(behind, T0)
        for part in parts:
            fleet.receive(0, part, T0)
        link = fleet.links[0]
        assert link.state == DOWN
        assert op.votes() == (0, 0, 1)
        assert behind.votes() == (0, 0, 1)
        assert outcome(op) == "PROTO"
        assert cause(op)
        assert link.stats()["errors"] == {"PROTO": 1}
        assert fleet.take(0) == b""
        fleet.receive(0, OK + OURS, T0)  # too late: a connection is not reused
        assert op.votes() == (0, 0, 1)
        assert link.owed == 0


@pytest.mark.case("C76")
@pytest.mark.parametrize("reply", BAD_INTEGERS)
def test_c76_bad_integers(reply: bytes) -> None:
    for kind in (RELEASE, EXTEND, OWNED, LOCKED):
        must_break(kind, reply + b"\r\n")


@pytest.mark.case("C76")
@pytest.mark.case("C77")
@pytest.mark.parametrize("reply", WRONG_FOR_SCRIPTS)
def test_c77_wrong_types_for_scripts(reply: bytes) -> None:
    for kind in (RELEASE, EXTEND):
        must_break(kind, reply + b"\r\n")


@pytest.mark.case("C77")
@pytest.mark.parametrize("reply", WRONG_FOR_SET)
def test_c77_wrong_types_for_set(reply: bytes) -> None:
    must_break(ACQUIRE, reply + b"\r\n")


@pytest.mark.case("C75")
@pytest.mark.parametrize("reply", HUGE)
def test_c75_giant_counts(reply: bytes) -> None:
    for kind in (ACQUIRE, RELEASE):
        must_break(kind, reply + b"\r\n")


@pytest.mark.case("C74")
@pytest.mark.parametrize("depth", [1, 9, 100_000, 1_000_000])
def test_c74_deep_nesting(depth: int) -> None:
    must_break(ACQUIRE, b"*1\r\n" * depth)


@pytest.mark.case("C79")
@pytest.mark.parametrize(
    "data",
    [
        b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n" + OK,
        b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n" * 1000 + OK,
        b"|1\r\n+a\r\n+b\r\n" + OK,
        b">0\r\n",
    ],
)
def test_c79_pushes_are_a_breach(data: bytes) -> None:
    must_break(ACQUIRE, data)


@pytest.mark.case("C79")
def test_c79_push_behind_an_answer_never_is_one() -> None:
    fleet = ready_fleet()
    first, second = set_op(1), set_op(1)
    fleet.start(first, T0)
    fleet.start(second, T0)
    fleet.receive(0, OK, T0)
    fleet.receive(0, b">2\r\n+invalidate\r\n+k\r\n" + OK, T0)
    assert fleet.links[0].state == DOWN
    assert outcome(first) == "granted"
    assert outcome(second) == "PROTO"


@pytest.mark.case("C79")
def test_c79_push_while_idle() -> None:
    fleet = ready_fleet()
    fleet.receive(0, b">2\r\n+invalidate\r\n*1\r\n+k\r\n", T0)
    assert fleet.links[0].state == DOWN


@pytest.mark.case("C80")
@pytest.mark.parametrize("start", [b"-ERR ", b"+", b":", b"$-", b"$", b"*", b"x"])
@pytest.mark.parametrize("step", [1000, 16_384, 65_536, 300_000])
def test_c80_endless_line_is_bounded(start: bytes, step: int) -> None:
    fleet = ready_fleet()
    op = set_op(1)
    fleet.start(op, T0)
    fleet.receive(0, start, T0)
    given_bytes = 0
    while fleet.links[0].state != DOWN:
        fleet.receive(0, b"1" * step, T0)
        given_bytes += step
        assert given_bytes <= 64 * 1024 + step
    assert outcome(op) == "PROTO"
    assert op.votes() == (0, 0, 1)


@pytest.mark.case("C80")
def test_c80_long_line_that_ends() -> None:
    for size, state in ((65_000, READY), (65_535, DOWN), (200_000, DOWN)):
        data = b"-ERR " + b"x" * (size - 5) + b"\r\n"
        for parts in ([data], [data[:30_000], data[30_000:60_000], data[60_000:]]):
            fleet = ready_fleet()
            op = set_op(1)
            fleet.start(op, T0)
            for part in parts:
                fleet.receive(0, part, T0)
            assert fleet.links[0].state == state, (size, len(parts))
            assert op.votes() == (0, 0, 1)


@pytest.mark.case("C80")
def test_c80_many_whole_lines_and_an_endless_one() -> None:
    fleet = ready_fleet()
    op = many(ACQUIRE, 1, 200, 1000)
    fleet.start(op, T0)
    fleet.receive(0, OK * 100 + b"-" + b"x" * 70_000, T0)
    assert fleet.links[0].state == DOWN
    for j in range(200):
        yes, no, failed = op.votes(j)
        assert (no, yes + failed) == (0, 1)


@pytest.mark.parametrize("data", [OK, OURS, NIL, b"-ERR x\r\n", b"+O\r\n"])
def test_unasked_replies_close_an_idle_connection(data: bytes) -> None:
    fleet = ready_fleet()
    fleet.receive(0, data, T0)
    assert fleet.links[0].state == DOWN
    assert fleet.links[0].stats()["errors"] == {"PROTO": 1}


def test_more_replies_than_were_asked_for() -> None:
    fleet = ready_fleet()
    first, second = set_op(1), set_op(1)
    fleet.start(first, T0)
    fleet.start(second, T0)
    fleet.receive(0, OK * 3, T0)  # whatever shifted the order, none can be trusted
    assert fleet.links[0].state == DOWN
    assert first.votes() == second.votes() == (0, 0, 1)


@pytest.mark.parametrize("before", [b"", OK])
def test_half_a_reply_that_nobody_asked_for_is_no_answer(before: bytes) -> None:
    fleet = ready_fleet()
    if before:
        fleet.start(set_op(1), T0)
    fleet.receive(0, before + b"+O", T0)
    op = set_op(1)
    fleet.start(op, T0 + MS)
    fleet.receive(0, b"K\r\n", T0 + 2 * MS)  # not an answer to that SET
    assert op.votes()[0] == 0
    assert fleet.links[0].state == DOWN


@pytest.mark.parametrize(
    "first",
    [
        b":7\r\n" + OURS,
        b"+OK\r\n" + OURS,
        b"-READONLY x\r\n" + OURS,
        b":x\r\n" + OURS,
        b"-ERR x\n" + OURS,
        b"-NOAUTH x\r\n" + OURS,
    ],
)
def test_what_a_broken_connection_still_said_counts_for_nobody(first: bytes) -> None:
    """The parser is shared by all masters: the rest of one's chunk is never another's answer."""
    fleet = ready_fleet(3)
    one, two = Op(RELEASE, 3, [b"a"], [b"t"]), Op(RELEASE, 3, [b"b"], [b"t"])
    fleet.start(one, T0)
    fleet.start(two, T0)
    fleet.receive(0, first, T0)
    assert fleet.links[0].state == DOWN
    fleet.receive(1, FOREIGN, T0)
    fleet.receive(2, MISSING + FOREIGN, T0)
    assert [outcome(one, i) for i in (1, 2)] == ["foreign", "missing"]
    assert [outcome(two, i) for i in (1, 2)] == [None, "foreign"]
    assert one.votes() == (0, 2, 1)
    assert two.votes() == (0, 1, 1)


@given(st.binary(max_size=60), st.lists(st.integers(1, 59), max_size=3))
@QUICK
def test_garbage_never_votes_yes(data: bytes, cuts: list[int]) -> None:
    for kind, grants in ((ACQUIRE, b"+OK\r\n"), (RELEASE, b":1\r\n")):
        fleet = ready_fleet()
        op = one_op(kind)
        fleet.start(op, T0)
        at = 0
        for cut in [*sorted(cuts), len(data)]:
            fleet.receive(0, data[at:cut], T0)
            at = max(at, cut)
        assert op.votes()[0] == 0 or data.startswith(grants)
        assert sum(op.votes()) <= 1


LINES = st.lists(
    st.sampled_from(
        [
            *(OK, NIL, OURS, FOREIGN, MISSING, NOSCRIPT, LOADING),
            *(b"-READONLY x\r\n", b"+x\r\n", b":7\r\n", b"*1\r\n", b"\r\n"),
            *(b"+OK\n", b":1\n", b"$-1\n", b"-ERR\n", b"+OK", b":1", b"\r", b"\n"),
        ]
    ),
    max_size=8,
).map(b"".join)


@given(LINES, st.lists(st.sampled_from([ACQUIRE, RELEASE, EXTEND]), min_size=1, max_size=4))
@QUICK
def test_nearly_right_streams_never_vote_twice_nor_shift(data: bytes, kinds: list[int]) -> None:
    """Whatever comes: at most one vote per command, and a YES only for its own line."""
    fleet = ready_fleet()
    ops = [one_op(kind) for kind in kinds]
    for op in ops:
        fleet.start(op, T0)
    fleet.receive(0, data, T0)
    lines = data.split(b"\n")
    for place, op in enumerate(ops):
        assert sum(op.votes()) <= 1
        if op.votes()[0] and b"NOSCRIPT" not in data:
            assert lines[place] == (b"+OK\r" if op.kind == ACQUIRE else b":1\r")


# -- order ----------------------------------------------------------------------------------------


def test_stragglers_of_ended_rounds_are_dropped() -> None:
    fleet = ready_fleet()
    late = set_op(1, b"late")
    fleet.start(late, T0)
    fleet.expire(late, T0 + 50 * MS)
    assert late.ended
    fleet.clean_up(late)
    fleet.receive(0, b"", T0 + 60 * MS)
    op = Op(RELEASE, 1, [b"k"], [b"t"])
    fleet.start(op, T0 + 60 * MS)
    assert fleet.links[0].owed == 3
    fleet.receive(0, OK, T0 + 61 * MS)  # of the late try
    assert not op.ended
    fleet.receive(0, OURS, T0 + 61 * MS)  # of its clean-up
    assert not op.ended
    assert late.verdict() != YES
    fleet.receive(0, FOREIGN, T0 + 61 * MS)
    assert op.ended
    assert op.verdict() == NO
    assert fleet.links[0].owed == 0


@pytest.mark.parametrize("rounds", [1, 63, 64, 65, 200, 1000])
def test_fifo_of_many_rounds(rounds: int) -> None:
    fleet = ready_fleet()
    ops: list[Op] = []
    done = 0
    for j in range(rounds):  # the ring wraps around and grows while it is in use
        op = set_op(1, b"%d" % j)
        fleet.start(op, T0)
        ops.append(op)
        if j % 3 == 2:
            fleet.receive(0, OK if done % 5 else NIL, T0)
            done += 1
    assert [words[1] for words in commands(fleet.take(0))] == [b"%d" % j for j in range(rounds)]
    answers = [OK if j % 5 else NIL for j in range(done, rounds)]
    fleet.receive(0, b"".join(answers), T0)
    assert [op.verdict() for op in ops] == [YES if j % 5 else NO for j in range(rounds)]
    assert fleet.links[0].owed == 0


def test_rounds_are_let_go_when_they_are_answered_or_lost() -> None:
    fleet = ready_fleet()
    op = set_op(1)
    before = sys.getrefcount(op)
    fleet.start(op, T0)
    assert sys.getrefcount(op) > before
    fleet.receive(0, OK, T0)
    assert sys.getrefcount(op) == before
    fleet.start(op, T0)
    fleet.lost(0, "closed", "reset", T0)
    gc.collect()
    assert sys.getrefcount(op) == before


# -- NOSCRIPT -------------------------------------------------------------------------------------


def warm(fleet: Fleet) -> Fleet:
    """Every script was used once on every connection, so its hash is enough from here on."""
    for kind in (RELEASE, EXTEND, OWNED):
        op = Op(kind, fleet.n, [b"w"], [b"w"], 1 if kind == EXTEND else -1)
        fleet.start(op, T0 - MS)
        for i in range(fleet.n):
            fleet.take(i)
            fleet.receive(i, MISSING, T0 - MS)
    return fleet


NAMES = [(RELEASE, "release"), (EXTEND, "extend"), (OWNED, "look"), (LOCKED, "look")]


@pytest.mark.case("C59")
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_c59_a_connection_needs_the_text_once(kind: int, name: str) -> None:
    """Whether by NOSCRIPT or ahead of it, by then the text was sent, and the hash is enough."""
    fleet = ready_fleet()
    seen = []
    for known in (False, True, True):
        op = one_op(kind)
        fleet.start(op, T0)
        for form in forms(fleet.take(0)):
            seen.append(form)
            known = known or form.endswith("!")
            fleet.receive(0, OURS if known else NOSCRIPT, T0)
        seen += forms(fleet.take(0))
        if not op.ended:
            fleet.receive(0, OURS, T0)
        assert op.votes() == (1, 0, 0)
    assert seen.count(name + "!") == 1
    assert seen[-2:] == [name, name]


@pytest.mark.case("C59")
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_c59_text_after_noscript_and_the_hash_again_afterwards(kind: int, name: str) -> None:
    fleet = warm(ready_fleet())
    op = one_op(kind)
    fleet.start(op, T0)
    assert forms(fleet.take(0)) == [name]
    fleet.receive(0, NOSCRIPT, T0)
    assert not op.ended
    sent = fleet.take(0)
    assert forms(sent) == [name + "!"]
    tail = [b"1000"] if kind == EXTEND else []
    assert commands(sent)[0][2:] == [b"1", b"k", TOKEN, *tail]
    fleet.receive(0, OURS, T0)
    assert op.votes() == (1, 0, 0)
    assert op.verdict() == YES
    again = one_op(kind)
    fleet.start(again, T0)
    assert forms(fleet.take(0)) == [name]
    fleet.receive(0, OURS, T0)
    assert fleet.links[0].stats()["errors"] == {}


@pytest.mark.case("C60")
def test_c60_what_was_under_way_follows_by_hash() -> None:
    fleet = warm(ready_fleet())
    ops = [Op(RELEASE, 1, [b"k%d" % j], [b"t"]) for j in range(4)]
    granted = set_op(1)
    for op in [*ops[:3], granted, ops[3]]:
        fleet.start(op, T0)
    assert forms(fleet.take(0)) == ["release", "release", "release", "SET", "release"]
    fleet.receive(0, NOSCRIPT * 2, T0)
    assert forms(fleet.take(0)) == ["release!", "release"]
    fleet.receive(0, NOSCRIPT + OK + NOSCRIPT, T0)
    assert granted.verdict() == YES
    sent = fleet.take(0)
    assert forms(sent) == ["release", "release"]
    assert [words[3] for words in commands(sent)] == [b"k2", b"k3"]
    fleet.receive(0, OURS + MISSING + OURS + FOREIGN, T0)
    assert [op.votes() for op in ops] == [(1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 1, 0)]
    assert fleet.links[0].owed == 0


@pytest.mark.case("C60")
def test_c60_batch_of_500() -> None:
    fleet = warm(ready_fleet())
    op = many(RELEASE, 1, 500)
    fleet.start(op, T0)
    assert forms(fleet.take(0)) == ["release"] * 500
    # SCRIPT FLUSH strikes after 100 of them.
    fleet.receive(0, OURS * 100 + NOSCRIPT * 400, T0)
    again = fleet.take(0)
    assert forms(again) == ["release!"] + ["release"] * 399
    assert [words[3] for words in commands(again)] == [b"k%d" % j for j in range(100, 500)]
    fleet.receive(0, OURS * 399 + MISSING, T0)
    assert [op.votes(j) for j in range(499)] == [(1, 0, 0)] * 499
    assert op.votes(499) == (0, 1, 0)
    assert op.verdicts() == bytes([YES] * 499 + [NO])
    assert fleet.links[0].owed == 0
    assert not fleet.refill(op, T0)
    assert fleet.take(0) == b""


def test_texts_of_two_scripts_are_sent_once_each() -> None:
    fleet = warm(ready_fleet())
    ops = [one_op(RELEASE), one_op(EXTEND), one_op(RELEASE), one_op(EXTEND)]
    for op in ops:
        fleet.start(op, T0)
    assert forms(fleet.take(0)) == ["release", "extend"] * 2
    fleet.receive(0, NOSCRIPT * 4, T0)
    assert forms(fleet.take(0)) == ["release!", "extend!", "release", "extend"]
    fleet.receive(0, OURS * 4, T0)
    assert [op.verdict() for op in ops] == [YES] * 4


def test_flushed_again_behind_the_text() -> None:
    fleet = warm(ready_fleet())
    for _ in range(3):
        op = one_op(RELEASE)
        fleet.start(op, T0)
        assert forms(fleet.take(0)) == ["release"]
        fleet.receive(0, NOSCRIPT, T0)
        assert forms(fleet.take(0)) == ["release!"]
        fleet.receive(0, OURS, T0)
        assert op.votes() == (1, 0, 0)


def test_a_new_connection_knows_nothing_of_what_the_old_one_sent() -> None:
    fleet = warm(ready_fleet())
    fleet.start(one_op(RELEASE), T0)
    fleet.take(0)
    fleet.lost(0, "closed", "reset", T0)
    connect(fleet, 0, T0)  # another server may be there now
    sent = forms(fleet.take(0))
    if "release!" not in sent:
        fleet.receive(0, NOSCRIPT, T0)
        sent = forms(fleet.take(0))
    assert sent == ["release!"]


@pytest.mark.parametrize("make", [ready_fleet, lambda: warm(ready_fleet())], ids=["new", "warm"])
def test_endless_noscript_is_bounded(make: Callable[[], Fleet]) -> None:
    fleet = make()
    op = one_op(RELEASE)
    fleet.start(op, T0)
    sent = forms(fleet.take(0))
    while fleet.links[0].owed:
        fleet.receive(0, NOSCRIPT, T0)
        sent += forms(fleet.take(0))
        assert len(sent) < 10
    assert op.votes() == (0, 0, 1)
    assert outcome(op) == "NOSCRIPT"
    assert fleet.links[0].state == READY


def test_noscript_is_no_answer_to_set() -> None:
    fleet = ready_fleet()
    op = set_op(1)
    fleet.start(op, T0)
    fleet.take(0)
    fleet.receive(0, NOSCRIPT, T0)
    assert outcome(op) == "NOSCRIPT"
    assert fleet.take(0) == b""


def test_an_answer_by_text_keeps_the_master_from_being_suspect() -> None:
    fleet = warm(ready_fleet())
    op = one_op(RELEASE)
    fleet.start(op, T0)
    fleet.receive(0, NOSCRIPT, T0 + 40 * MS)
    fleet.judge(T0 + 60 * MS)
    assert not fleet.links[0].suspect


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.case("C49")
@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (b"-READONLY You can't write against a read only replica.", "READONLY"),
        (b"-NOAUTH Authentication required.", "CONFIG"),
        (b"-ERR max number of clients reached", "MAXCLIENTS"),
        (b"-DENIED Redis is running in protected mode", "CONFIG"),
    ],
)
def test_c49_errors_that_end_the_connection(reply: bytes, word: str) -> None:
    fleet = ready_fleet()
    op, behind = set_op(1), one_op(EXTEND)
    fleet.start(op, T0)
    fleet.start(behind, T0)
    fleet.receive(0, reply + b"\r\n", T0)
    link = fleet.links[0]
    assert link.state == DOWN
    assert op.votes() == behind.votes() == (0, 0, 1)
    assert cause(op) == reply[1:].decode()
    assert outcome(behind) == word
    assert link.stats()["cause"] == f"{word}: {reply[1:].decode()}"
    assert link.retry_ns == T0 + 10 * MS  # it never served


@pytest.mark.case("C49")
def test_c49_a_connection_that_served_is_dialled_again_at_once_but_not_for_ever() -> None:
    fleet = ready_fleet()
    fleet.start(set_op(1), T0)
    fleet.receive(0, OK, T0)
    pauses = []
    now = T0
    for _ in range(4):
        fleet.start(set_op(1), now)
        fleet.receive(0, b"-READONLY x\r\n", now)
        pauses.append((fleet.links[0].retry_ns - now) // MS)
        now = fleet.links[0].retry_ns
        connect(fleet, 0, now)
    assert pauses == [0, 10, 20, 40]


@pytest.mark.case("C48")
@pytest.mark.case("C50")
@pytest.mark.case("C52")
@pytest.mark.parametrize(
    "word",
    ["LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "OOM", "MISCONF", "ERR"],
)
def test_c48_errors_that_pass_keep_the_connection_and_back_off(word: str) -> None:
    fleet = ready_fleet()
    link = fleet.links[0]
    now = T0
    pauses = []
    for _ in range(8):
        op = set_op(1)
        fleet.start(op, now)
        assert verbs(fleet.take(0)) == ["SET"]
        fleet.receive(0, f"-{word} why\r\n".encode(), now)
        assert outcome(op) == word
        assert cause(op) == f"{word} why"
        assert link.state == READY
        pauses.append((link.retry_ns - now) // MS)
        early = set_op(1)
        fleet.start(early, link.retry_ns - 1)
        assert fleet.take(0) == b""
        fleet.finish(early)
        now = link.retry_ns
    assert pauses == [10, 20, 40, 80, 160, 320, 500, 500]
    assert len(fleet.news) == 1
    fleet.start(set_op(1), now)
    fleet.receive(0, OK, now)
    assert fleet.news[-1][1] == "well"
    fleet.start(set_op(1), now)
    fleet.receive(0, f"-{word} again\r\n".encode(), now)
    assert (link.retry_ns - now) // MS == 10  # it had recovered


@pytest.mark.case("C48")
def test_c48_few_requests_while_a_master_loads() -> None:
    fleet = ready_fleet()
    asked = 0
    for ms in range(3000):  # an acquire every millisecond
        now = T0 + ms * MS
        op = set_op(1)
        fleet.start(op, now)
        found = len(commands(fleet.take(0)))
        asked += found
        if found:
            fleet.receive(0, LOADING, now)
        fleet.finish(op)
    assert 3 <= asked < 50


def test_back_off_holds_up_sets_only() -> None:
    fleet = ready_fleet()
    fleet.start(set_op(1), T0)
    fleet.take(0)
    fleet.receive(0, LOADING, T0)
    for kind in (EXTEND, RELEASE, OWNED, LOCKED):
        fleet.start(one_op(kind), T0 + MS)
    assert verbs(fleet.take(0)) == ["extend", "release", "look", "look"]


def test_errors_are_counted_by_kind() -> None:
    fleet = ready_fleet()
    for reply in (b"-ERR a\r\n", b"-ERR b\r\n", b"-OOM c\r\n"):
        fleet.start(one_op(EXTEND), T0)
        fleet.receive(0, reply, T0)
    fleet.lost(0, "closed", "reset", T0)
    stats = fleet.links[0].stats()
    assert stats["errors"] == {"ERR": 2, "OOM": 1, "closed": 1}
    assert stats["state"] == "down"
    assert stats["cause"] == "closed: reset"


@pytest.mark.case("C61")
@pytest.mark.parametrize("reply", [b"-MOVED 15784 10.9.9.9:7003\r\n", b"-CROSSSLOT Keys\r\n"])
def test_c61_cluster_errors_are_failures_and_lead_nowhere_else(reply: bytes) -> None:
    fleet = ready_fleet()
    for op in (set_op(1), one_op(RELEASE)):
        fleet.start(op, T0)
        fleet.receive(0, reply, T0)
        assert op.votes() == (0, 0, 1)
    assert fleet.links[0].address == "127.0.0.1:7001"
    assert fleet.links[0].state == READY


@pytest.mark.case("C61")
def test_c61_says_that_this_is_cluster_mode() -> None:
    fleet = ready_fleet()
    op = set_op(1)
    fleet.start(op, T0)
    fleet.receive(0, b"-MOVED 15784 10.9.9.9:7003\r\n", T0)
    assert outcome(op) == "CONFIG"
    assert "cluster" in cause(op)


# -- broken connections and debts -----------------------------------------------------------------


@pytest.mark.case("C45")
@pytest.mark.parametrize("part", [b"", b"+O", b"+OK\r", b"$", b"$-"])
def test_c45_half_a_reply_is_forgotten_with_its_connection(part: bytes) -> None:
    fleet = ready_fleet()
    op = set_op(1, ttl_ms=1000)
    fleet.start(op, T0)
    fleet.take(0)
    fleet.receive(0, part, T0)
    fleet.lost(0, "closed", "connection reset by peer", T0)
    assert op.votes() == (0, 0, 1)
    assert (outcome(op), cause(op)) == ("closed", "connection reset by peer")
    fleet.clean_up(op)
    connect(fleet, 0, T0 + MS)
    assert verbs(fleet.take(0)) == ["release"]
    again = set_op(1)
    fleet.start(again, T0 + MS)
    fleet.receive(0, MISSING + OK, T0 + MS)
    assert again.verdict() == YES


@pytest.mark.case("C15")
def test_c15_a_set_is_never_sent_twice() -> None:
    fleet = ready_fleet()
    op = set_op(1, b"k", b"first")
    fleet.start(op, T0)
    assert verbs(fleet.take(0)) == ["SET"]
    fleet.lost(0, "closed", "reset", T0)
    assert op.ended
    connect(fleet, 0, T0)
    fleet.serve(T0)
    assert fleet.take(0) == b""
    fleet.clean_up(op)
    sent = fleet.take(0)
    assert verbs(sent) == ["release"]
    assert commands(sent)[0][3:5] == [b"k", b"first"]


def test_debts_go_first_on_the_next_connection() -> None:
    fleet = ready_fleet()
    ops = [set_op(1, b"k%d" % j, b"t%d" % j) for j in range(3)]
    for op in ops:
        fleet.start(op, T0)
    fleet.take(0)
    fleet.lost(0, "closed", "reset", T0)
    for op in ops:
        fleet.clean_up(op)
    assert fleet.indebted
    assert fleet.links[0].stats()["debts"] == 3
    waiting = set_op(1, b"new", b"new")
    fleet.start(waiting, T0)  # a round that hopes for the next connection
    fleet.dialing(0, T0)
    fleet.connected(0, T0)
    assert fleet.take(0) == CLIENT_ID
    fleet.receive(0, b":1\r\n", T0)
    assert fleet.take(0) == INFO
    fleet.receive(0, NO_INFO, T0)
    sent = fleet.take(0)
    assert verbs(sent) == ["release", "release", "release", "SET"]
    assert [words[3:5] for words in commands(sent)[:3]] == [
        [b"k0", b"t0"],
        [b"k1", b"t1"],
        [b"k2", b"t2"],
    ]
    fleet.receive(0, OURS + MISSING + FOREIGN + OK, T0)
    assert waiting.verdict() == YES
    assert not fleet.indebted


def test_a_clean_up_that_was_under_way_is_sent_again() -> None:
    fleet = ready_fleet()
    op = set_op(1)
    fleet.start(op, T0)
    fleet.clean_up(op)
    assert verbs(fleet.take(0)) == ["SET", "release"]  # behind the SET, on the same connection
    fleet.receive(0, OK, T0)
    fleet.lost(0, "closed", "reset", T0)
    assert fleet.links[0].stats()["debts"] == 1
    connect(fleet, 0, T0)
    assert verbs(fleet.take(0)) == ["release"]
    fleet.receive(0, OURS, T0)
    fleet.lost(0, "closed", "reset", T0)
    assert not fleet.indebted  # paid


def test_bytes_that_were_never_sent_are_dropped_with_the_connection() -> None:
    fleet = ready_fleet()
    op = set_op(1)
    fleet.start(op, T0)
    fleet.clean_up(op)
    fleet.lost(0, "closed", "reset", T0)
    connect(fleet, 0, T0)
    assert verbs(fleet.take(0)) == ["release"]


def test_the_part_of_a_batch_of_debts_that_was_answered_is_not_sent_again() -> None:
    fleet = ready_fleet()
    op = many(ACQUIRE, 1, 600, 1000)
    fleet.start(op, T0)
    fleet.take(0)
    fleet.receive(0, OK * 600, T0)
    fleet.clean_up(op)
    assert verbs(fleet.take(0)) == ["release"] * 600
    fleet.receive(0, OURS * 300, T0)
    fleet.lost(0, "closed", "reset", T0)
    assert fleet.links[0].stats()["debts"] == 300
    connect(fleet, 0, T0)
    sent = commands(fleet.take(0))
    assert sorted(words[3] for words in sent) == sorted(b"k%d" % j for j in range(300, 600))
    fleet.receive(0, OURS * 300, T0)
    assert not fleet.indebted
    assert fleet.links[0].owed == 0


def test_debts_survive_connections_that_never_serve() -> None:
    fleet = ready_fleet()
    op = set_op(1, ttl_ms=60_000)
    fleet.start(op, T0)
    fleet.clean_up(op)
    fleet.lost(0, "closed", "reset", T0)
    now = T0
    for reply in (b"-LOADING x\r\n", b"-WRONGPASS x\r\n", b"HTTP/1.0 404\r\n"):
        now += 600 * MS
        fleet.dialing(0, now)
        fleet.connected(0, now)
        fleet.receive(0, reply, now)
        fleet.dialing(0, now)
        fleet.lost(0, "refused", "connection refused", now)
    assert fleet.links[0].stats()["debts"] == 1
    assert fleet.next_ns() == fleet.links[0].retry_ns
    connect(fleet, 0, now + 600 * MS)
    assert verbs(fleet.take(0)) == ["release"]


@pytest.mark.parametrize("ttl_ms", [1000, 60_000, 30 * 86_400_000])
def test_a_debt_ends_with_its_key(ttl_ms: int) -> None:
    for late_ms, expected in ((0, ["release"]), (60_000, [])):
        fleet = ready_fleet()
        op = set_op(1, ttl_ms=ttl_ms)
        fleet.start(op, T0)
        fleet.clean_up(op)
        fleet.lost(0, "closed", "reset", T0)
        connect(fleet, 0, T0 + (ttl_ms + late_ms) * MS)
        assert verbs(fleet.take(0)) == expected
        fleet.receive(0, MISSING * len(expected), T0 + (ttl_ms + late_ms) * MS)
        assert not fleet.indebted


@pytest.mark.case("C52")
@pytest.mark.parametrize("word", [b"LOADING", b"BUSY", b"MASTERDOWN", b"TRYAGAIN"])
def test_a_clean_up_that_a_busy_master_refused_is_sent_again(word: bytes) -> None:
    fleet = ready_fleet()
    op = set_op(1)
    fleet.start(op, T0)
    fleet.clean_up(op)
    fleet.take(0)
    fleet.receive(0, OK + b"-%s later\r\n" % word, T0)
    link = fleet.links[0]
    assert link.stats()["debts"] == 1
    assert fleet.next_ns() == link.retry_ns == T0 + 10 * MS
    fleet.serve(T0 + 9 * MS)
    assert fleet.take(0) == b""
    fleet.serve(T0 + 10 * MS)
    assert verbs(fleet.take(0)) == ["release"]
    fleet.receive(0, OURS, T0 + 11 * MS)
    assert not fleet.indebted


@pytest.mark.case("C52")
def test_c52_a_release_that_a_busy_master_refused_is_asked_again_in_its_round() -> None:
    fleet = ready_fleet()
    op = one_op(RELEASE)
    fleet.start(op, T0)
    fleet.take(0)
    fleet.receive(0, b"-BUSY script\r\n", T0)
    assert not op.ended
    fleet.serve(T0 + 10 * MS)
    assert verbs(fleet.take(0)) == ["release"]
    fleet.receive(0, OURS, T0 + 11 * MS)
    assert op.votes() == (1, 0, 0)
    assert op.verdict() == YES


@pytest.mark.case("C43")
def test_c43_an_idle_connection_that_was_closed_is_no_trouble() -> None:
    fleet = ready_fleet()
    fleet.start(set_op(1), T0)
    fleet.receive(0, OK, T0)
    fleet.lost(0, "closed", "connection closed by the server", T0 + MS)
    assert fleet.due(T0 + MS) == 1
    assert fleet.news == []
    connect(fleet, 0, T0 + MS)
    assert fleet.links[0].stats()["reconnects"] == 1


def test_a_connection_that_broke_is_down_and_says_nothing() -> None:
    fleet = ready_fleet()
    fleet.start(set_op(1), T0)
    fleet.lost(0, "closed", "reset", T0)
    assert fleet.take(0) == b""
    assert fleet.links[0].owed == 0
    assert fleet.links[0].unsent == 0
    fleet.receive(0, OK, T0)
    assert fleet.links[0].state == DOWN
    fleet.start(set_op(1), T0)
    assert fleet.take(0) == b""


def test_stats_of_a_link() -> None:
    fleet = ready_fleet()
    op = set_op(1)
    fleet.start(op, T0)
    assert fleet.links[0].stats() == {
        "address": "127.0.0.1:7001",
        "state": "ready",
        "owed": 1,
        "debts": 0,
        "reconnects": 0,
        "replies": 2,
        "errors": {},
        "cause": "",
        "ms": None,
    }
    fleet.receive(0, OK, T0 + 2 * MS)
    assert fleet.links[0].stats()["ms"] == 2.0
    assert fleet.stats()["masters"] == [fleet.links[0].stats()]
    words = []
    fresh = make_fleet()
    words.append(fresh.links[0].stats()["state"])
    fresh.dialing(0, T0)
    words.append(fresh.links[0].stats()["state"])
    fresh.connected(0, T0)
    words.append(fresh.links[0].stats()["state"])
    assert words == ["down", "connecting", "greeting"]


# -- what failures leave behind -------------------------------------------------------------------


def _errors(fleet: Fleet, now: int) -> None:
    for kind, reply in ((ACQUIRE, b"-ERR no\r\n"), (RELEASE, NOSCRIPT), (RELEASE, b"-ERR no\r\n")):
        op = one_op(kind)
        fleet.start(op, now)
        assert fleet.take(0)
        fleet.receive(0, reply, now)
        while fleet.links[0].owed:  # after NOSCRIPT
            assert fleet.take(0)
            fleet.receive(0, NOSCRIPT, now)
        assert op.ended
        fleet.finish(op)


def _half_replies(fleet: Fleet, now: int) -> None:
    op = one_op(ACQUIRE)
    fleet.start(op, now)
    assert fleet.take(0)
    fleet.receive(0, b"+O", now)
    fleet.lost(0, "closed", "", now)
    assert op.ended
    fleet.finish(op)
    connect(fleet, 0, now)


def _refusals(fleet: Fleet, now: int) -> None:
    op = one_op(ACQUIRE)
    fleet.start(op, now)
    assert fleet.take(0)
    fleet.receive(0, NIL, now)
    assert op.ended
    fleet.finish(op)
    fleet.clean_up(op)
    assert fleet.take(0)
    fleet.receive(0, MISSING, now)


@pytest.mark.case("C155")
@pytest.mark.parametrize("collector", [True, False])
@pytest.mark.parametrize("fail", [_errors, _half_replies, _refusals])
@pytest.mark.parametrize("count", [3000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_c155_failures_leave_no_object(
    fail: Callable[[Fleet, int], None], collector: bool, count: int
) -> None:
    """Also no cycle, which only the collector would find. (`_errors` are four replies each.)"""
    fleet = ready_fleet()

    def times(count: int, now: int) -> int:
        for _ in range(count):
            now += 1000 * MS
            fail(fleet, now)
            fleet.news.clear()
        return now

    now = times(100, T0)
    gc.collect()
    objects = len(gc.get_objects())
    before = sys.getallocatedblocks()
    if not collector:
        gc.disable()
    try:
        times(count, now)
        if collector:
            gc.collect()
        grown = sys.getallocatedblocks() - before
        more = len(gc.get_objects()) - objects
    finally:
        gc.enable()
    assert grown < 500  # one for each failure would be 3000, or more
    assert more < 100
