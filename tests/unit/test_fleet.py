"""Who is asked, and who is waited for: health, hopes, bounds, chunks, deadlines, clean-ups."""

from __future__ import annotations

from typing import Any

import pytest
from unit.world import (
    ACQUIRE,
    DOWN,
    EXTEND,
    FOREIGN,
    LOCKED,
    MISSING,
    MS,
    NIL,
    NO,
    NO_INFO,
    NO_QUORUM,
    OK,
    OURS,
    OWNED,
    READY,
    RELEASE,
    T0,
    UNDECIDED,
    YES,
    commands,
    connect,
    make_fleet,
    many,
    ready_fleet,
    set_op,
    verbs,
)

from redlock_fast._core.fleet import Fleet
from redlock_fast._core.op import Op

LIMIT = T0 + 50 * MS  # of a round that starts at T0
LOADING = b"-LOADING wait\r\n"


def release_op(n: int, asked: int = 0xFFFFFFFF) -> Op:
    return Op(RELEASE, n, [b"k"], [b"t"], -1, asked)


def words(op: Op) -> list[str | None]:
    return [word for word, _, _ in op.outcomes()]


def sent(fleet: Fleet) -> list[list[str]]:
    """What each master is sent now."""
    return [verbs(fleet.take(i)) for i in range(fleet.n)]


def make_suspect(fleet: Fleet, i: int, now: int = T0) -> Op:
    """Let a master owe an answer and be silent until it is suspect, 50 ms later."""
    op = set_op(fleet.n, b"old", b"old")
    fleet.start(op, now - 50 * MS)
    for other in range(fleet.n):
        if other != i:
            fleet.receive(other, OK, now - 50 * MS)
    fleet.expire(op, now)
    fleet.finish(op)
    assert fleet.links[i].suspect
    for other in range(fleet.n):
        fleet.take(other)
    return op


# -- who is asked ---------------------------------------------------------------------------------


def test_everybody_who_is_ready_is_asked_at_once() -> None:
    fleet = ready_fleet(3)
    op = set_op(3)
    fleet.start(op, T0)
    assert sent(fleet) == [["SET"], ["SET"], ["SET"]]
    assert op.hoping == 0
    assert op.reached() == 0b111


@pytest.mark.parametrize("kind", [ACQUIRE, EXTEND, RELEASE, OWNED, LOCKED])
def test_a_master_that_becomes_ready_during_a_round_is_asked_then(kind: int) -> None:
    fleet = make_fleet(3)
    for i in (0, 1):
        connect(fleet, i)
    op = Op(kind, 3, [b"k"], [b"t"], 1000 if kind in (ACQUIRE, EXTEND) else -1)
    fleet.start(op, T0)
    assert op.hoping == 0b100
    name = sent(fleet)[0]
    fleet.receive(0, OK if kind == ACQUIRE else OURS, T0)
    fleet.receive(1, b"-OOM no\r\n", T0)
    assert op.verdict() == UNDECIDED  # it hangs on the third
    connect(fleet, 2, T0 + 20 * MS)
    assert op.hoping == 0
    assert verbs(fleet.take(2)) == name
    fleet.receive(2, OK if kind == ACQUIRE else OURS, T0 + 21 * MS)
    assert op.ended
    assert op.verdict() == YES
    assert op.outcomes()[2][2] == 21.0


def test_a_master_that_becomes_ready_after_the_round_gets_no_set() -> None:
    fleet = make_fleet(3)
    for i in (0, 1):
        connect(fleet, i)
    decided, late = set_op(3, b"a"), set_op(3, b"b")
    fleet.start(decided, T0)
    fleet.start(late, T0)
    for i in (0, 1):
        fleet.receive(i, OK, T0)
    assert decided.verdict() == YES
    fleet.finish(decided)
    fleet.expire(late, LIMIT)
    fleet.finish(late)
    connect(fleet, 2, LIMIT)
    assert fleet.take(2) == b""
    assert decided.reached() == late.reached() == 0b011


def test_a_decided_round_is_not_asked_any_more_even_before_it_is_finished() -> None:
    fleet = make_fleet(3)
    for i in (0, 1):
        connect(fleet, i)
    op = set_op(3)
    fleet.start(op, T0)
    for i in (0, 1):
        fleet.receive(i, OK, T0)
    connect(fleet, 2, T0)
    assert fleet.take(2) == b""


def test_the_answer_that_decides_a_round_asks_nobody_else() -> None:
    """Although the third master's back-off ends at that very moment."""
    fleet = ready_fleet(3)
    first = set_op(3, b"first")
    fleet.start(first, T0)
    fleet.receive(2, LOADING, T0)
    fleet.finish(first)
    op = set_op(3)
    fleet.start(op, T0 + 5 * MS)
    for i in range(2):
        fleet.receive(i, OK, T0 + 5 * MS)  # of the first round
    fleet.take(2)
    fleet.receive(0, OK, T0 + 5 * MS)
    fleet.receive(1, OK, T0 + 10 * MS)
    assert op.verdict() == YES
    assert fleet.take(2) == b""
    assert op.reached() == 0b011


@pytest.mark.case("C36")
@pytest.mark.case("C41")
def test_a_dead_master_is_counted_out_at_once() -> None:
    fleet = make_fleet(3)
    connect(fleet, 0)
    for i, word in ((1, "refused"), (2, "timeout")):
        now = T0
        for _ in range(8):  # until its back-off is longer than a round
            fleet.dialing(i, now)
            fleet.lost(i, word, f"{word}!", now)
    op = set_op(3)
    fleet.start(op, T0)
    assert op.ended
    assert op.verdict() == NO_QUORUM
    assert op.outcomes()[1:] == [("refused", "refused!", None), ("timeout", "timeout!", None)]
    assert fleet.links[0].owed == 1
    fleet.clean_up(op)
    assert sent(fleet) == [["SET", "release"], [], []]


def back_off(fleet: Fleet, i: int, word: str, times: int = 8) -> int:
    """Let dialling fail so often in a row; when the last failure was."""
    now = T0
    for _ in range(times):
        now = max(now, fleet.links[i].retry_ns)
        fleet.dialing(i, now)
        fleet.lost(i, word, f"{word}!", now)
    return now


@pytest.mark.case("C136")
@pytest.mark.parametrize("word", ["refused", "timeout", "closed"])
def test_masters_that_were_away_are_dialled_early_if_no_quorum_is_possible_otherwise(
    word: str,
) -> None:
    fleet = make_fleet(3)
    connect(fleet, 0)
    now = max(back_off(fleet, 1, word), back_off(fleet, 2, word)) + 20 * MS
    assert fleet.due(now) == 0
    op = set_op(3)
    fleet.start(op, now)
    assert not op.ended
    assert fleet.due(now) == 0b110
    assert fleet.next_ns() <= now
    connect(fleet, 1, now)
    assert verbs(fleet.take(1)) == ["SET"]
    fleet.dialing(2, now)
    fleet.lost(2, "refused", "no", now)
    fleet.receive(0, OK, now)
    fleet.receive(1, OK, now)
    assert op.verdict() == YES


def test_masters_that_were_away_are_left_alone_if_a_quorum_is_possible_without() -> None:
    fleet = make_fleet(3)
    for i in (0, 1):
        connect(fleet, i)
    now = back_off(fleet, 2, "refused") + 20 * MS
    op = set_op(3)
    fleet.start(op, now)
    assert op.votes() == (0, 0, 1)
    assert fleet.due(now) == 0


@pytest.mark.parametrize("reply", [b"-WRONGPASS no\r\n", b"-LOADING no\r\n", b"HTTP/1.1 400 x\r\n"])
def test_masters_that_refuse_to_work_are_not_hammered_even_if_they_are_needed(
    reply: bytes,
) -> None:
    fleet = make_fleet(1)
    now = T0
    dials = 0
    for ms in range(2000):
        now = T0 + ms * MS
        op = set_op(1)
        fleet.start(op, now)
        if fleet.due(now):
            dials += 1
            fleet.dialing(0, now)
            fleet.connected(0, now)
            fleet.receive(0, reply, now)
        fleet.finish(op)
    assert 3 <= dials <= 12


def test_masters_that_are_away_are_not_dialled_more_often_than_every_10_ms() -> None:
    fleet = make_fleet(1)
    dials = 0
    for ms in range(1000):
        now = T0 + ms * MS
        op = set_op(1)
        fleet.start(op, now)
        if fleet.due(now):
            dials += 1
            fleet.dialing(0, now)
            fleet.lost(0, "refused", "no", now)
        fleet.finish(op)
    assert 90 <= dials <= 101


def test_a_dead_master_is_hoped_for_when_its_back_off_ends_within_the_round() -> None:
    fleet = ready_fleet(3)
    fleet.lost(2, "closed", "reset", T0)
    connect(fleet, 2, T0)
    fleet.lost(2, "closed", "reset", T0)  # twice, and never served: back-off of 10 ms
    op = set_op(3)
    fleet.start(op, T0)
    assert op.hoping == 0b100
    assert fleet.next_ns() == T0 + 10 * MS
    assert fleet.due(T0 + 9 * MS) == 0
    assert fleet.due(T0 + 10 * MS) == 0b100
    fleet.receive(0, OK, T0)
    fleet.receive(1, NIL, T0)
    connect(fleet, 2, T0 + 10 * MS)
    assert verbs(fleet.take(2)) == ["SET"]


def test_a_connect_that_fails_during_the_round_settles_it() -> None:
    fleet = ready_fleet(3)
    fleet.lost(2, "closed", "reset", T0)
    op = set_op(3)
    fleet.start(op, T0)
    fleet.receive(0, OK, T0)
    fleet.receive(1, NIL, T0)
    fleet.dialing(2, T0 + 10 * MS)
    assert not op.ended
    fleet.lost(2, "refused", "connection refused", T0 + 11 * MS)
    assert op.ended
    assert op.verdict() == NO
    assert op.outcomes()[2] == ("refused", "connection refused", None)


@pytest.mark.case("C38")
@pytest.mark.case("C40")
def test_suspects_are_sent_no_set_but_clean_ups() -> None:
    fleet = ready_fleet(3)
    old = make_suspect(fleet, 2)
    op = set_op(3)
    fleet.start(op, T0)
    assert sent(fleet) == [["SET"], ["SET"], []]
    assert op.hoping == 0b100
    fleet.receive(0, OK, T0)
    fleet.receive(1, OK, T0)
    assert op.verdict() == YES  # nobody waits for a suspect
    fleet.finish(op)
    assert op.reached() == 0b011
    fleet.clean_up(old)  # it was sent the SET of the older try
    assert sent(fleet) == [["release"], ["release"], ["release"]]
    release = release_op(3)
    fleet.start(release, T0)
    assert sent(fleet) == [["release"], ["release"], ["release"]]


@pytest.mark.parametrize("kind", [EXTEND, OWNED, LOCKED])
def test_suspects_are_not_asked_about_locks(kind: int) -> None:
    fleet = ready_fleet(3)
    make_suspect(fleet, 2)
    op = Op(kind, 3, [b"k"], [b"t"], 1000 if kind == EXTEND else -1)
    fleet.start(op, T0)
    assert fleet.take(2) == b""
    fleet.receive(0, OURS, T0)
    fleet.receive(1, OURS, T0)
    assert op.verdict() == YES


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ((OK, OK), YES),
        ((NIL, NIL), NO),
        ((NIL, OK), UNDECIDED),
        ((b"-OOM x\r\n", OK), UNDECIDED),
        ((b"-OOM x\r\n", b"-OOM x\r\n"), NO_QUORUM),
    ],
)
def test_a_suspect_is_waited_for_only_if_no_quorum_is_possible_otherwise(
    answers: tuple[bytes, bytes], verdict: int
) -> None:
    fleet = ready_fleet(3)
    make_suspect(fleet, 2)
    op = set_op(3)
    fleet.start(op, T0)
    for i, said in enumerate(answers):
        fleet.receive(i, said, T0)
    assert op.verdict() == verdict


def test_a_suspect_is_one_until_it_sends_a_whole_reply() -> None:
    fleet = ready_fleet(1)
    old, op = set_op(1), set_op(1)
    fleet.start(old, T0 - 50 * MS)
    fleet.take(0)
    fleet.judge(T0 - 1)
    assert not fleet.links[0].suspect
    fleet.judge(T0)
    assert fleet.links[0].suspect
    fleet.start(op, T0)
    fleet.receive(0, b"+O", T0 + MS)
    assert fleet.links[0].suspect
    assert fleet.take(0) == b""
    fleet.receive(0, b"K\r\n", T0 + 2 * MS)
    assert not fleet.links[0].suspect
    assert verbs(fleet.take(0)) == ["SET"]  # of the round that hoped for it
    assert fleet.stats()["masters"][0]["state"] == "ready"


def test_a_master_that_answers_slowly_but_steadily_is_not_suspect() -> None:
    fleet = ready_fleet(1)
    for _ in range(5):
        fleet.start(set_op(1), T0)
    for j in range(1, 6):
        fleet.judge(T0 + (j * 40 - 1) * MS)
        assert not fleet.links[0].suspect
        fleet.receive(0, OK, T0 + j * 40 * MS)
    fleet.judge(T0 + 10**12)  # it owes nothing: idle is not silent
    assert not fleet.links[0].suspect


def test_silence_is_counted_from_when_it_began_to_owe() -> None:
    fleet = ready_fleet(1)
    later = T0 + 10**10
    fleet.start(set_op(1), later)
    fleet.judge(later + 49 * MS)
    assert not fleet.links[0].suspect
    fleet.judge(later + 50 * MS)
    assert fleet.links[0].suspect


@pytest.mark.case("C48")
def test_masters_in_back_off_are_not_asked() -> None:
    fleet = ready_fleet(3)
    first = set_op(3)
    fleet.start(first, T0)
    fleet.receive(2, LOADING, T0)
    fleet.receive(0, OK, T0)
    fleet.receive(1, OK, T0)
    fleet.finish(first)
    sent(fleet)
    op = set_op(3)
    fleet.start(op, T0 + MS)
    assert sent(fleet) == [["SET"], ["SET"], []]
    assert op.hoping == 0b100  # 10 ms only: it may be asked yet
    fleet.receive(0, OK, T0 + MS)
    fleet.receive(1, NIL, T0 + MS)
    assert not op.ended
    assert fleet.next_ns() == T0 + 10 * MS
    fleet.serve(T0 + 10 * MS)
    assert verbs(fleet.take(2)) == ["SET"]
    fleet.receive(2, OK, T0 + 11 * MS)
    assert op.verdict() == YES


def test_a_back_off_longer_than_the_round_counts_a_master_out() -> None:
    fleet = ready_fleet(1, patience_ms=50)
    now = T0
    for _ in range(4):
        fleet.start(set_op(1), now)
        fleet.receive(0, LOADING, now)
        now = fleet.links[0].retry_ns
    now = T0 + 70 * MS  # 10 + 20 + 40, then 80
    op = set_op(1)
    fleet.start(op, now)
    assert op.ended
    assert op.outcomes() == [("LOADING", "LOADING wait", None)]
    assert op.votes() == (0, 0, 1)
    hopeful = set_op(1)
    fleet.start(hopeful, now + 30 * MS)
    assert not hopeful.ended


@pytest.mark.case("C70")
@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.99])
def test_back_off_has_jitter(jitter: float) -> None:
    fleet = make_fleet(jitter=lambda: jitter)
    now = T0
    for full in (10, 20, 40, 80, 160, 320, 500, 500):
        fleet.dialing(0, now)
        fleet.lost(0, "refused", "no", now)
        pause = fleet.links[0].retry_ns - now
        assert pause == full * MS - int(full * MS * jitter / 2)
        now += pause


# -- who did not answer, and why ------------------------------------------------------------------


def test_outcome_words_of_those_who_did_not_answer() -> None:
    fleet = make_fleet(7)
    for i in (0, 1, 2, 5, 6):
        connect(fleet, i)
    make_suspect_of_two(fleet)
    fleet.dialing(3, T0)
    fleet.dialing(4, T0)
    fleet.connected(4, T0)
    for _ in range(2):
        fleet.start(set_op(7, b"load"), T0)
    op = set_op(7)
    fleet.start(op, T0)
    fleet.receive(0, OK * 3, T0)
    fleet.receive(1, OK * 2, T0 + 30 * MS)  # busy with older rounds
    fleet.lost(5, "closed", "reset", T0 + MS)
    assert op.verdict() == UNDECIDED
    fleet.expire(op, LIMIT)
    assert words(op) == [
        "granted",
        "timeout",
        "suspect",
        "connecting",
        "connecting",
        "closed",
        "timeout",  # silent too, but only since this round began
    ]
    assert op.verdict() == NO_QUORUM
    assert all(cause for word, cause, _ in op.outcomes() if word != "granted")


def make_suspect_of_two(fleet: Fleet) -> None:
    """Master 2 owes from before, and is silent."""
    op = Op(RELEASE, 7, [b"x"], [b"x"], -1, 0b100)
    fleet.start(op, T0 - 50 * MS)
    fleet.judge(T0)
    assert fleet.links[2].suspect


def test_outcome_of_a_master_in_back_off_is_its_error() -> None:
    fleet = ready_fleet(2)
    fleet.start(set_op(2), T0)
    fleet.receive(0, b"-OOM full\r\n", T0)
    fleet.receive(1, OK, T0)
    fleet.lost(1, "closed", "reset", T0)
    fleet.dialing(1, T0)
    fleet.lost(1, "refused", "no", T0)
    op = set_op(2)
    fleet.start(op, T0)
    assert op.hoping == 0b11
    fleet.expire(op, T0 + 5 * MS)  # (as if master_timeout were so short)
    assert op.outcomes() == [("OOM", "OOM full", None), ("refused", "no", None)]


def test_a_master_never_dialled_is_connecting() -> None:
    fleet = make_fleet(1)
    op = set_op(1)
    fleet.start(op, T0)
    assert fleet.due(T0) == 1
    fleet.expire(op, LIMIT)
    assert words(op) == ["connecting"]
    assert op.votes() == (0, 0, 0)
    assert op.verdict() == NO_QUORUM


def test_a_connect_has_its_own_limit_that_outlives_rounds() -> None:
    fleet = make_fleet(1, patience_ms=50, connect_ms=1000)
    fleet.dialing(0, T0)
    for j in range(20):
        op = set_op(1)
        fleet.start(op, T0 + j * 50 * MS)
        assert fleet.next_ns() == T0 + 1000 * MS
        fleet.expire(op, T0 + (j + 1) * 50 * MS - 1)
        assert words(op) == ["connecting"]
    fleet.judge(T0 + 1000 * MS)
    assert fleet.links[0].state == DOWN
    assert fleet.links[0].stats()["cause"] == "timeout: the connect took longer than 1000 ms"


# -- bounds ---------------------------------------------------------------------------------------


def test_no_set_goes_where_4096_replies_are_owed() -> None:
    fleet = ready_fleet(2)
    for _ in range(4096):
        fleet.start(release_op(2, 0b01), T0)
    assert fleet.links[0].owed == 4096
    fleet.take(0)
    op = set_op(2)
    fleet.start(op, T0)
    assert fleet.take(0) == b""
    assert verbs(fleet.take(1)) == ["SET"]
    fleet.receive(1, OK, T0)
    fleet.receive(0, MISSING, T0 + MS)  # room for one
    assert verbs(fleet.take(0)) == ["SET"]
    assert fleet.links[0].owed == 4096


def test_busy_is_what_a_master_is_that_owes_too_much() -> None:
    fleet = ready_fleet(1)
    for _ in range(4097):
        fleet.start(release_op(1), T0)
    op = set_op(1)
    fleet.start(op, T0)
    fleet.receive(0, OURS, T0 + 49 * MS)  # not silent, only slow
    assert fleet.links[0].owed == 4096
    fleet.expire(op, LIMIT)
    assert op.outcomes() == [("busy", "owes too many replies", None)]


def test_clean_ups_still_go_past_the_bound_and_twice_it_is_the_end() -> None:
    fleet = ready_fleet(1)
    tries = [set_op(1, b"%d" % j) for j in range(4096)]
    for op in tries:
        fleet.start(op, T0)
    fleet.take(0)
    for op in tries:
        fleet.clean_up(op)
    released = len(commands(fleet.take(0)))
    link = fleet.links[0]
    assert link.owed == 4096 + released
    assert released > 3000
    assert released + link.stats()["debts"] == 4096
    while link.owed <= 2 * 4096:
        fleet.start(release_op(1), T0)
    fleet.judge(T0)
    assert link.state == DOWN
    assert link.stats()["cause"] == "busy: owes too many replies"
    assert link.stats()["debts"] >= 4096  # kept
    connect(fleet, 0, T0 + 10 * MS)
    keys = [w[3] for w in commands(fleet.take(0))]
    while fleet.links[0].owed:
        fleet.receive(0, MISSING * min(fleet.links[0].owed, 1000), T0 + 11 * MS)
        keys += [w[3] for w in commands(fleet.take(0))]
    assert set(keys) >= {b"%d" % j for j in range(4096)}
    assert not fleet.indebted


@pytest.mark.parametrize(("unsent", "asked"), [(1024 * 1024 - 1, True), (1024 * 1024, False)])
def test_no_set_goes_where_a_mebibyte_is_unsent(unsent: int, asked: bool) -> None:
    fleet = ready_fleet(1)
    fleet.links[0].unsent = unsent
    op = set_op(1)
    fleet.start(op, T0)
    assert (fleet.links[0].owed == 1) == asked
    fleet.start(release_op(1), T0)  # clean-ups still go
    assert verbs(fleet.take(0))[-1] == "release"
    fleet.judge(T0)
    assert fleet.links[0].state == READY


def test_two_mebibytes_unsent_are_the_end() -> None:
    fleet = ready_fleet(1)
    op = set_op(1)
    fleet.start(op, T0)
    fleet.clean_up(op)
    fleet.links[0].unsent = 2 * 1024 * 1024
    fleet.judge(T0)
    assert fleet.links[0].state == READY
    fleet.links[0].unsent += 1
    fleet.judge(T0)
    assert fleet.links[0].state == DOWN
    assert fleet.links[0].stats()["debts"] == 1
    assert fleet.indebted


# -- batches --------------------------------------------------------------------------------------


def test_a_batch_leaves_in_chunks_as_replies_arrive() -> None:
    fleet = ready_fleet(1)
    op = many(ACQUIRE, 1, 3000, 1000)
    fleet.start(op, T0)
    out = commands(fleet.take(0))
    assert len(out) == 1024  # four chunks of 256
    assert fleet.refill(op, T0) == 1
    fleet.receive(0, OK * 255, T0)
    assert fleet.refill(op, T0) == 1
    assert fleet.take(0) == b""
    fleet.receive(0, OK, T0)
    assert fleet.refill(op, T0) == 1
    more = commands(fleet.take(0))
    assert len(more) == 256
    out += more
    answered = 256
    while not op.ended:
        fleet.receive(0, OK * (len(out) - answered), T0)
        answered = len(out)
        fleet.refill(op, T0)
        more = commands(fleet.take(0))
        assert len(more) <= 1024
        out += more
    assert [w[1] for w in out] == [b"k%d" % j for j in range(3000)]
    assert op.verdicts() == bytes([YES]) * 3000
    assert fleet.refill(op, T0) == 0
    assert fleet.links[0].owed == 0


def test_a_batch_of_long_names_leaves_in_chunks_of_256_kib() -> None:
    fleet = ready_fleet(1)
    names = [b"%05d" % j + b"n" * 65_000 for j in range(40)]
    op = Op(ACQUIRE, 1, names, [b"t"] * 40, 1000)
    fleet.start(op, T0)
    answered = 0
    seen = []
    while not op.ended:
        data = fleet.take(0)
        assert 0 < len(data) < 800_000
        found = commands(data)
        assert len(found) < 13
        seen += [w[1] for w in found]
        fleet.receive(0, OK * (len(seen) - answered), T0)
        answered = len(seen)
        fleet.refill(op, T0)
    assert seen == names


def test_masters_of_a_batch_go_on_at_their_own_pace() -> None:
    fleet = ready_fleet(3)
    op = many(ACQUIRE, 3, 2000, 1000)
    fleet.start(op, T0)
    fast = slow = 0
    for _ in range(10):
        for i in (0, 1):
            count = len(commands(fleet.take(i)))
            fleet.receive(i, OK * count, T0)
            fast += count
        fleet.refill(op, T0)
    slow = len(commands(fleet.take(2)))
    assert fast == 4000
    assert slow == 1024
    assert op.ended
    assert op.verdicts() == bytes([YES]) * 2000


def test_a_batch_ends_so_long_after_its_last_reply() -> None:
    fleet = ready_fleet(1)
    op = many(ACQUIRE, 1, 3, 1000)
    fleet.start(op, T0)
    assert op.limit_ns == LIMIT
    fleet.receive(0, OK, T0 + 40 * MS)
    assert op.limit_ns == T0 + 90 * MS
    fleet.receive(0, b"+O", T0 + 80 * MS)  # no complete reply
    assert op.limit_ns == T0 + 90 * MS
    single = set_op(1)
    fleet.start(single, T0 + 80 * MS)
    fleet.receive(0, b"K\r\n" + OK, T0 + 85 * MS)
    assert op.ended
    assert single.limit_ns == T0 + 130 * MS


def test_a_single_round_is_not_prolonged() -> None:
    fleet = ready_fleet(3)
    op = set_op(3)
    fleet.start(op, T0)
    fleet.receive(0, OK, T0 + 40 * MS)
    assert op.limit_ns == LIMIT


@pytest.mark.parametrize("again", [False, True], ids=["stays away", "comes again"])
def test_a_link_that_breaks_half_way_through_a_batch(again: bool) -> None:
    """Master 0 answers 300 of 600 and breaks: exact results, and nothing is voted twice."""
    fleet = ready_fleet(3)
    k = 600
    op = many(ACQUIRE, 3, k, 1000)
    fleet.start(op, T0)
    assert sent(fleet) == [["SET"] * k] * 3
    fleet.receive(0, OK * 300, T0)
    fleet.lost(0, "closed", "reset", T0)
    assert [op.votes(j) for j in (0, 299, 300, 599)] == [(1, 0, 0)] * 2 + [(0, 0, 1)] * 2
    if again:
        connect(fleet, 0, T0 + MS)
        assert fleet.refill(op, T0 + MS) == 0
        assert fleet.take(0) == b""  # a SET is never sent twice
    fleet.receive(1, OK * 450 + NIL * 150, T0 + MS)
    assert [op.verdict(j) for j in (0, 299, 300, 599)] == [YES, YES, UNDECIDED, UNDECIDED]
    fleet.receive(2, (OK + NIL) * 300, T0 + MS)
    assert op.ended
    for j in range(k):
        yes = (j < 300) + (j < 450) + (j % 2 == 0)
        failed = j >= 300
        assert op.votes(j) == (yes, 3 - yes - failed, failed)
        assert op.verdict(j) == (YES if yes >= 2 else NO)
    assert words(op)[0] == "closed"
    assert op.reached(599) == 0b111
    fleet.finish(op)
    fleet.clean_up(op, [j for j in range(k) if op.verdict(j) != YES])
    lost = sum(op.verdict(j) != YES for j in range(k))
    if not again:
        assert fleet.links[0].stats()["debts"] == lost
        connect(fleet, 0, T0 + MS)
    assert [len(commands(fleet.take(i))) for i in range(3)] == [lost] * 3


def test_a_link_that_breaks_before_the_rest_of_a_batch_was_sent() -> None:
    fleet = ready_fleet(3)
    op = many(ACQUIRE, 3, 2000, 1000)
    fleet.start(op, T0)
    assert [len(commands(fleet.take(i))) for i in range(3)] == [1024] * 3
    fleet.receive(0, OK * 100, T0)
    fleet.lost(0, "closed", "reset", T0)
    connect(fleet, 0, T0)
    fleet.refill(op, T0)
    assert fleet.take(0) == b""
    assert [op.votes(j) for j in (99, 100, 1023, 1024, 1999)] == [(1, 0, 0)] + [(0, 0, 1)] * 4
    assert op.reached(1023) == 0b111
    assert op.reached(1024) == 0
    answered = [1024, 1024]
    fleet.receive(1, OK * 1024, T0)
    fleet.receive(2, OK * 1024, T0)
    while not op.ended:
        fleet.refill(op, T0)
        for i in (1, 2):
            count = len(commands(fleet.take(i)))
            answered[i - 1] += count
            fleet.receive(i, OK * count, T0)
    assert answered == [2000, 2000]
    assert op.reached(1024) == 0b110
    assert op.verdicts() == bytes([YES]) * 2000


def test_an_error_half_way_through_a_batch_ends_it_for_that_master() -> None:
    fleet = ready_fleet(1)
    op = many(ACQUIRE, 1, 2000, 1000)
    fleet.start(op, T0)
    assert len(commands(fleet.take(0))) == 1024
    fleet.receive(0, OK * 500 + b"-OOM full\r\n" * 524, T0)
    fleet.refill(op, T0)
    assert fleet.take(0) == b""
    assert op.ended
    assert op.verdicts() == bytes([YES] * 500 + [NO_QUORUM] * 1500)
    assert words(op) == ["OOM"]


def test_a_batch_of_releases_that_breaks_half_way_is_owed() -> None:
    fleet = ready_fleet(1)
    op = many(RELEASE, 1, 2000)
    fleet.start(op, T0)
    assert len(commands(fleet.take(0))) == 1024
    fleet.receive(0, OURS * 100, T0)
    fleet.lost(0, "closed", "reset", T0)
    assert op.ended
    assert op.verdicts() == bytes([YES] * 100 + [NO_QUORUM] * 1900)
    assert fleet.links[0].stats()["debts"] == 1900
    fleet.finish(op)
    connect(fleet, 0, T0 + 10 * MS)
    names = pay_all(fleet, 0, T0 + 10 * MS)
    assert sorted(names) == sorted(b"k%d" % j for j in range(100, 2000))
    assert op.verdicts() == bytes([YES] * 100 + [NO_QUORUM] * 1900)
    assert [op.votes(j) for j in range(2000)] == [(1, 0, 0)] * 100 + [(0, 0, 1)] * 1900


def pay_all(fleet: Fleet, i: int, now: int) -> list[bytes]:
    """Answer releases until nothing is owed either way; the keys that were released."""
    names: list[bytes] = []
    while True:
        found = commands(fleet.take(i))
        names += [w[3] for w in found]
        if not fleet.links[i].owed:
            return names
        assert found
        fleet.receive(i, OURS * len(found), now)


def test_a_release_of_many_reaches_the_slowest_master_all_the_same() -> None:
    fleet = ready_fleet(3)
    k = 3000
    op = many(RELEASE, 3, k)
    fleet.start(op, T0)
    names = {2: [w[3] for w in commands(fleet.take(2))]}
    assert len(names[2]) == 1024
    while not op.ended:
        for i in (0, 1):
            fleet.receive(i, OURS * len(commands(fleet.take(i))), T0)
        fleet.refill(op, T0)
    assert op.verdicts() == bytes([YES]) * k
    fleet.finish(op)
    names[2] += [w[3] for w in commands(fleet.take(2))]
    fleet.receive(2, OURS * len(names[2]), T0)
    names[2] += pay_all(fleet, 2, T0)
    assert sorted(names[2]) == sorted(op.keys)
    assert not fleet.indebted


def test_a_release_of_a_few_reaches_a_master_that_owes_much() -> None:
    fleet = ready_fleet(3)
    for _ in range(4096):
        fleet.start(release_op(3, 0b100), T0)
    fleet.take(2)
    op = many(RELEASE, 3, 2)
    fleet.start(op, T0)
    for i in (0, 1):
        fleet.receive(i, OURS * 2, T0)
    assert op.ended
    fleet.finish(op)
    fleet.receive(2, OURS * 4096, T0)
    assert sorted(w[3] for w in commands(fleet.take(2))) == [b"k0", b"k1"]


@pytest.mark.parametrize("sent_already", [0, 1024])
def test_the_rest_of_a_release_is_owed_by_a_master_that_breaks(sent_already: int) -> None:
    """The round is decided and over before anybody had more of it queued there."""
    fleet = ready_fleet(3)
    if not sent_already:
        for _ in range(4096):  # it owes too much for any of a batch
            fleet.start(release_op(3, 0b100), T0)
        fleet.take(2)
    op = many(RELEASE, 3, 1500)
    fleet.start(op, T0)
    assert len(commands(fleet.take(2))) == sent_already
    while not op.ended:
        for i in (0, 1):
            fleet.receive(i, OURS * len(commands(fleet.take(i))), T0)
        fleet.refill(op, T0)
    fleet.receive(2, OURS * (sent_already or 4096), T0)  # all that it owes
    fleet.lost(2, "closed", "connection closed by the server", T0)
    fleet.finish(op)
    connect(fleet, 2, T0 + 10 * MS)
    assert sorted(pay_all(fleet, 2, T0 + 10 * MS)) == sorted(op.keys[sent_already:])


def test_an_item_that_is_asked_again_does_not_take_its_successors_along() -> None:
    """A batch of releases; master 0 is BUSY for the first and fine for the second."""
    fleet = ready_fleet(3)
    op = many(RELEASE, 3, 2)
    fleet.start(op, T0)
    assert sent(fleet)[0] == ["release"] * 2
    fleet.receive(0, b"-BUSY script\r\n" + OURS, T0)
    assert [op.votes(j) for j in (0, 1)] == [(0, 0, 0), (1, 0, 0)]
    fleet.serve(T0 + 10 * MS)
    fleet.refill(op, T0 + 10 * MS)
    again = commands(fleet.take(0))
    fleet.receive(0, OURS * len(again), T0 + 11 * MS)
    assert [op.votes(j) for j in (0, 1)] == [(1, 0, 0), (1, 0, 0)]
    assert op.verdicts() == bytes([UNDECIDED] * 2)  # one master is no quorum
    assert [w[3] for w in again] == [b"k0"]


def test_a_large_release_at_a_master_that_comes_back_is_voted_once() -> None:
    fleet = make_fleet(3)
    for i in (1, 2):
        connect(fleet, i)
    k = 10_000
    op = many(RELEASE, 3, k)
    fleet.dialing(0, T0)
    fleet.start(op, T0)
    connect(fleet, 0, T0)  # takes its debts, as many as it may owe
    seen = 0
    for _ in range(100):
        fleet.refill(op, T0)
        found = len(commands(fleet.take(0)))
        seen += found
        if not fleet.links[0].owed:
            break
        fleet.receive(0, OURS * found, T0)
    assert seen == k
    assert not op.ended
    assert {op.votes(j) for j in range(k)} == {(1, 0, 0)}


# -- clean-ups ------------------------------------------------------------------------------------


def test_a_clean_up_reaches_exactly_the_masters_the_set_went_to() -> None:
    fleet = make_fleet(5)
    for i in (0, 1, 2):
        connect(fleet, i)
    fleet.dialing(3, T0)
    op = set_op(5)
    fleet.start(op, T0)
    fleet.receive(0, OK, T0)
    fleet.receive(1, NIL, T0)  # whatever it answered
    fleet.lost(2, "closed", "reset", T0)  # or did not
    sent(fleet)
    assert op.reached() == 0b00111
    fleet.clean_up(op)
    assert sent(fleet) == [["release"], ["release"], [], [], []]
    assert [link.stats()["debts"] for link in fleet.links] == [0, 0, 1, 0, 0]
    assert fleet.indebted
    connect(fleet, 3, T0)
    connect(fleet, 4, T0)
    assert sent(fleet) == [[]] * 5  # nor is the abandoned SET sent now
    connect(fleet, 2, T0 + 10 * MS)
    assert sent(fleet) == [[], [], ["release"], [], []]
    for i, said in enumerate((OURS, MISSING, OURS)):
        fleet.receive(i, said, T0 + 10 * MS)
    assert not fleet.indebted


def test_a_try_that_was_given_up_before_anybody_was_ready_is_never_sent() -> None:
    fleet = make_fleet(3)
    op = set_op(3)
    fleet.start(op, T0)
    fleet.clean_up(op)  # the caller was interrupted
    for i in range(3):
        connect(fleet, i, T0)
    assert sent(fleet) == [[], [], []]


def test_clean_up_of_some_items() -> None:
    fleet = ready_fleet(3)
    op = many(ACQUIRE, 3, 4, 1000)
    fleet.start(op, T0)
    for i in range(3):
        fleet.take(i)
        fleet.receive(i, OK + NIL + OK + NIL, T0)
    fleet.clean_up(op, [1, 3])
    for i in range(3):
        found = commands(fleet.take(i))
        assert [w[3:5] for w in found] == [[b"k1", b"t1"], [b"k3", b"t3"]]
    fleet.clean_up(op, [])
    assert sent(fleet) == [[], [], []]


def test_answers_to_clean_ups_are_nobodys_business() -> None:
    fleet = ready_fleet(3)
    op = set_op(3)
    fleet.start(op, T0)
    fleet.clean_up(op)
    for i, answer in enumerate((OURS, MISSING, b"-NOPERM no\r\n")):
        fleet.receive(i, OK + answer, T0)
    assert [link.owed for link in fleet.links] == [0, 0, 0]
    assert [link.state for link in fleet.links] == [READY] * 3
    assert not fleet.indebted


def test_clean_up_behind_a_slow_set_on_the_same_connection() -> None:
    """The late SET of an abandoned try cannot win: its clean-up is behind it."""
    fleet = ready_fleet(1)
    op = set_op(1, b"k", b"mine")
    fleet.start(op, T0)
    fleet.expire(op, LIMIT)
    assert fleet.links[0].suspect
    fleet.clean_up(op)
    found = commands(fleet.take(0))
    assert [w[0][:4] for w in found] == [b"SET", b"EVAL"]
    assert found[0][2] == found[1][4] == b"mine"


@pytest.mark.case("C49")
def test_a_release_waits_for_a_connection_that_is_to_come() -> None:
    fleet = ready_fleet(3)
    fleet.start(set_op(3), T0)
    for i in range(3):
        fleet.receive(i, OK, T0)
    fleet.lost(2, "closed", "reset", T0)
    sent(fleet)
    op = release_op(3)
    fleet.start(op, T0)
    assert sent(fleet) == [["release"], ["release"], []]
    fleet.receive(0, OURS, T0)
    fleet.receive(1, FOREIGN, T0)
    assert not op.ended
    connect(fleet, 2, T0 + MS)
    assert sent(fleet)[2] == ["release"]
    fleet.receive(2, OURS, T0 + 2 * MS)
    assert op.verdict() == YES
    assert op.votes() == (2, 1, 0)
    assert not fleet.indebted


def test_a_release_is_owed_to_a_master_that_is_away() -> None:
    fleet = ready_fleet(3)
    now = T0
    for _ in range(8):
        fleet.lost(2, "refused", "no", now)
        fleet.dialing(2, now)
    fleet.lost(2, "refused", "no", now)
    op = release_op(3)
    fleet.start(op, now)
    assert op.votes() == (0, 0, 1)
    fleet.receive(0, OURS, now)
    fleet.receive(1, OURS, now)
    assert op.verdict() == YES
    sent(fleet)
    assert fleet.links[2].stats()["debts"] == 1
    now = fleet.links[2].retry_ns
    connect(fleet, 2, now)
    assert sent(fleet) == [[], [], ["release"]]
    fleet.receive(2, OURS, now)
    assert op.votes() == (2, 0, 1)  # too late for a vote


# -- timers and counters --------------------------------------------------------------------------


def test_next_ns() -> None:
    never = 2**63 - 1
    fleet = make_fleet(2)
    assert fleet.next_ns() == never  # nobody needs anything
    assert fleet.due(T0) == 0b11
    fleet.dialing(0, T0)
    assert fleet.next_ns() == T0 + 1000 * MS
    fleet.connected(0, T0)
    assert fleet.next_ns() == T0 + 1000 * MS
    fleet.receive(0, b":1\r\n", T0)
    fleet.receive(0, NO_INFO, T0)
    assert fleet.next_ns() == never
    assert fleet.due(T0) == 0b10
    fleet.dialing(1, T0)
    fleet.lost(1, "refused", "no", T0)
    assert fleet.next_ns() == never
    op = set_op(2)
    fleet.start(op, T0)
    assert fleet.next_ns() == T0 + 10 * MS  # somebody hopes for it
    fleet.finish(op)
    assert fleet.next_ns() == never


def test_connecting_and_unsettled() -> None:
    fleet = make_fleet(1)
    assert not fleet.connecting
    fleet.dialing(0, T0)
    assert fleet.connecting
    fleet.connected(0, T0)
    assert fleet.connecting
    fleet.take(0)
    fleet.receive(0, b":1\r\n", T0)
    assert fleet.connecting
    fleet.take(0)
    fleet.receive(0, NO_INFO, T0)
    assert not fleet.connecting
    assert not fleet.unsettled
    op = set_op(1)
    fleet.start(op, T0)
    assert fleet.unsettled
    fleet.take(0)
    fleet.receive(0, OK, T0)
    assert not fleet.unsettled
    assert not fleet.indebted


def test_counters() -> None:
    fleet = make_fleet(1)
    names = ["acquired", "contended", "no_quorum", "too_late", "released", "extended", "lost"]
    assert [name for name in fleet.stats() if name != "masters"] == names
    for what in range(len(names)):
        for _ in range(what):
            fleet.count(what)
    assert [fleet.stats()[name] for name in names] == list(range(len(names)))


def flap(fleet: Fleet, i: int, now: int) -> None:
    fleet.lost(i, "closed", "reset", now)
    connect(fleet, i, now)


@pytest.mark.case("C70")
def test_c70_rounds_while_a_master_flaps() -> None:
    fleet = ready_fleet(3)
    now = T0
    for j in range(50):
        op: Any = set_op(3, b"%d" % j)
        fleet.start(op, now)
        if j % 3 == 0:
            flap(fleet, 2, now)
        for i in (0, 1):
            fleet.receive(i, OK, now)
        assert op.verdict() == YES
        fleet.finish(op)
        release = release_op(3, op.reached())
        fleet.start(release, now)
        if j % 3 == 1:
            flap(fleet, 2, now)
        for i in range(3):
            fleet.receive(i, OURS * fleet.links[i].owed if i < 2 else b"", now)
        if fleet.links[2].owed and j % 3 == 2:
            fleet.receive(2, b"".join(answer(v) for v in verbs(fleet.take(2))), now)
        assert release.verdict() == YES
        fleet.finish(release)
        now += 10 * MS
    assert [link.state for link in fleet.links] == [READY] * 3


def answer(verb: str) -> bytes:
    return OK if verb == "SET" else OURS
