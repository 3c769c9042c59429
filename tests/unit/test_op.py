"""One round: votes, and the earliest answer that settles it, for every order of answers."""

from __future__ import annotations

import copy
import pickle
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.world import (
    ACQUIRE,
    EXTEND,
    FOREIGN,
    LOCKED,
    MISSING,
    MS,
    NIL,
    NO,
    NO_QUORUM,
    OK,
    OURS,
    OWNED,
    QUICK,
    RELEASE,
    T0,
    UNDECIDED,
    YES,
    many,
    ready_fleet,
    set_op,
)

from redlock_fast import rules
from redlock_fast._core.fleet import Fleet
from redlock_fast._core.op import Op

ERROR = b"-ERR no\r\n"
SECOND = 1000 * MS


def verdict_of(kind: int, answers: list[bytes], n: int) -> int:
    """What `rules` says once these have answered and the others have not."""
    good = {ACQUIRE: [OK], LOCKED: [OURS, FOREIGN]}.get(kind, [OURS])
    bad = {ACQUIRE: [NIL], LOCKED: [MISSING]}.get(kind, [FOREIGN, MISSING])
    yes = sum(answer in good for answer in answers)
    no = sum(answer in bad for answer in answers)
    judge = rules.acquire_verdict if kind == ACQUIRE else rules.holder_verdict
    return int(judge(yes, no, n - len(answers), n))


class Rounds:
    """One round after another on one fleet, each a second after the last."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.fleet = ready_fleet(n)
        self.now = T0

    def play(self, kind: int, order: tuple[int, ...], answers: tuple[bytes, ...]) -> None:
        """Masters answer in this order: the round ends at the first answer that settles it."""
        self.now += SECOND  # past every back-off
        ttl_ms = 1000 if kind in (ACQUIRE, EXTEND) else -1
        op = Op(kind, self.n, [b"k"], [b"t"], ttl_ms)
        self.fleet.start(op, self.now)
        heard: list[bytes] = []
        expected = UNDECIDED
        for i in order:
            assert op.ended == (expected != UNDECIDED)
            assert op.verdict() == expected
            heard.append(answers[i])
            self.fleet.receive(i, answers[i], self.now)
            if expected == UNDECIDED:  # once it is decided, nothing changes it
                expected = verdict_of(kind, heard, self.n)
        assert op.ended
        assert op.verdict() == expected != UNDECIDED
        assert sum(op.votes()) == self.n


@pytest.mark.case("C02")
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_acquire_ends_at_the_earliest_answer_for_every_order(n: int) -> None:
    rounds = Rounds(n)
    for answers in product([OK, NIL, ERROR], repeat=n):
        for order in permutations(range(n)):
            rounds.play(ACQUIRE, order, answers)


@pytest.mark.case("C02")
def test_acquire_ends_at_the_earliest_answer_of_five() -> None:
    rounds = Rounds(5)
    for answers in product([OK, NIL, ERROR], repeat=5):  # every sequence of answers there is,
        for order in [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)]:  # and from different masters
            rounds.play(ACQUIRE, order, answers)


@pytest.mark.parametrize("kind", [EXTEND, RELEASE, OWNED, LOCKED])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_holders_round_ends_at_the_earliest_answer_for_every_order(n: int, kind: int) -> None:
    rounds = Rounds(n)
    for answers in product([OURS, FOREIGN, MISSING, ERROR], repeat=n):
        for order in permutations(range(n)):
            rounds.play(kind, order, answers)


@pytest.mark.parametrize("kind", [EXTEND, LOCKED])
@pytest.mark.parametrize("n", [4, 5])
def test_holders_round_ends_at_the_earliest_answer_of_more(n: int, kind: int) -> None:
    rounds = Rounds(n)
    for answers in product([OURS, MISSING, ERROR], repeat=n):
        rounds.play(kind, tuple(range(n)), answers)


@pytest.mark.parametrize(
    ("answers", "verdict", "at"),
    [
        ([OK, OK, OK], YES, 2),
        ([OK, NIL, OK], YES, 3),
        ([NIL, NIL, OK], NO, 2),
        ([NIL, ERROR, OK], NO, 3),
        ([NIL, ERROR, ERROR], NO_QUORUM, 3),
        ([ERROR, ERROR, OK], NO_QUORUM, 2),
        ([OK, NIL, ERROR], NO, 3),
    ],
)
def test_examples_of_early_verdicts(answers: list[bytes], verdict: int, at: int) -> None:
    fleet = ready_fleet(3)
    op = set_op(3)
    fleet.start(op, T0)
    ended = []
    for i, answer in enumerate(answers):
        fleet.receive(i, answer, T0)
        ended.append(op.ended)
    assert ended.index(True) + 1 == at
    assert op.verdict() == verdict


@given(st.data())
@QUICK
def test_each_item_of_a_batch_has_its_own_verdict(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5))
    k = data.draw(st.integers(1, 6))
    answer = st.sampled_from([OK, NIL, b"-OOM no\r\n"])
    table = data.draw(st.lists(st.lists(answer, min_size=k, max_size=k), min_size=n, max_size=n))
    fleet = ready_fleet(n)
    op = many(ACQUIRE, n, k, 1000)
    fleet.start(op, T0)
    todo = {i: list(row) for i, row in enumerate(table)}
    heard: list[list[bytes]] = [[] for _ in range(k)]
    expected = [UNDECIDED] * k
    while todo:
        i = data.draw(st.sampled_from(sorted(todo)))
        count = data.draw(st.integers(1, len(todo[i])))
        first = k - len(todo[i])
        part, todo[i] = todo[i][:count], todo[i][count:]
        if not todo[i]:
            del todo[i]
        fleet.receive(i, b"".join(part), T0)
        for j, said in enumerate(part, first):
            heard[j].append(said)
            if expected[j] == UNDECIDED:
                expected[j] = verdict_of(ACQUIRE, heard[j], n)
        assert op.verdicts() == bytes(expected)
        assert op.ended == (UNDECIDED not in expected)
    assert [sum(op.votes(j)) for j in range(k)] == [n] * k


def test_answers_after_the_end_change_no_verdict() -> None:
    fleet = ready_fleet(3)
    op = set_op(3)
    fleet.start(op, T0)
    fleet.receive(0, NIL, T0)
    fleet.expire(op, T0 + 50 * MS)
    assert op.verdict() == NO_QUORUM
    for i in (1, 2):
        fleet.receive(i, OK, T0 + 60 * MS)
    assert op.verdict() == NO_QUORUM


# -- what a round is made of ----------------------------------------------------------------------


def bits(*masters: int) -> int:
    return sum(1 << i for i in masters)


def test_who_is_not_asked_counts_as_missing() -> None:
    op = Op(RELEASE, 3, [b"k"], [b"t"], -1, bits(0, 2))
    assert op.asked == bits(0, 2)
    assert op.votes() == (0, 1, 0)
    assert op.outcomes() == [(None, "", None), ("unasked", "", None), (None, "", None)]
    assert not op.ended
    fleet = ready_fleet(3)
    fleet.start(op, T0)
    assert [len(fleet.take(i)) > 0 for i in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("n", "asked", "ended"),
    [(3, [0], True), (3, [], True), (5, [0, 1], True), (5, [0, 1, 2], False)],
)
def test_a_round_that_cannot_be_ours_is_over_before_it_begins(
    n: int, asked: list[int], ended: bool
) -> None:
    op = Op(EXTEND, n, [b"k"], [b"t"], 1000, bits(*asked))
    assert op.ended == ended
    assert op.verdict() == (NO if ended else UNDECIDED)


def test_everybody_is_asked_by_default() -> None:
    for n in (1, 5, 31, 32):
        assert set_op(n).asked == (1 << n) - 1


@pytest.mark.parametrize("n", [31, 32])
def test_32_masters(n: int) -> None:
    fleet = ready_fleet(n)
    op = set_op(n)
    fleet.start(op, T0)
    for i in reversed(range(n)):
        assert not op.ended
        fleet.receive(i, OK, T0)
        if n - i == n // 2 + 1:
            break
    assert op.verdict() == YES
    assert op.reached() == (1 << n) - 1


def test_fleet_of_none_or_of_33() -> None:
    nobody: Any = None
    for masters in ([], [nobody] * 33):
        with pytest.raises(ValueError, match="expected 1 to 32 masters"):
            Fleet(masters, MS, MS, float)


def test_attributes_of_a_round() -> None:
    op = many(ACQUIRE, 3, 4, 1000)
    assert (op.kind, op.n, op.k, op.ttl_ms) == (ACQUIRE, 3, 4, 1000)
    assert op.keys == [b"k0", b"k1", b"k2", b"k3"]
    assert op.tokens == [b"t0", b"t1", b"t2", b"t3"]
    assert op.verdicts() == b"\0\0\0\0"
    assert op.reached() == 0
    fleet = ready_fleet(3, patience_ms=70)
    fleet.start(op, T0)
    assert op.start_ns == T0
    assert op.limit_ns == T0 + 70 * MS
    assert op.reached(3) == bits(0, 1, 2)


@pytest.mark.parametrize("item", [-1, 1, 1000])
def test_items_out_of_range(item: int) -> None:
    op = set_op(3)
    with pytest.raises(IndexError):
        op.verdict(item)
    with pytest.raises(IndexError):
        op.votes(item)


@pytest.mark.case("C99")
def test_rounds_are_neither_pickled_nor_copied() -> None:
    op = set_op(3)
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="a round cannot be pickled or copied"):
            act(op)


@pytest.mark.case("C163")
def test_c163_outcomes_say_what_each_master_did_and_when() -> None:
    fleet = ready_fleet(5)
    op = set_op(5)
    fleet.start(op, T0)
    fleet.receive(0, OK, T0 + MS)
    fleet.receive(1, NIL, T0 + 2 * MS)
    fleet.receive(2, b"-OOM no memory\r\n", T0 + 3 * MS)
    fleet.lost(3, "closed", "connection reset by peer", T0 + 4 * MS)
    fleet.expire(op, T0 + 50 * MS)
    assert op.outcomes()[:4] == [
        ("granted", "", 1.0),
        ("taken", "", 2.0),
        ("OOM", "OOM no memory", 3.0),
        ("closed", "connection reset by peer", None),
    ]
    assert op.outcomes()[4][0] == "timeout"
    assert op.outcomes()[4][2] is None
    assert op.verdict() == NO_QUORUM
