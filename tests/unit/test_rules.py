"""The arithmetic of the lock, over the compiled module and over its source."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.world import MS, NO, NO_QUORUM, QUICK, UNDECIDED, YES

import redlock_fast.rules as compiled

INT64 = 2**63 - 1
DAY_MS = 24 * 60 * 60 * 1000


def _load_source() -> Any:
    path = Path(compiled.__file__).parent / "rules.py"
    spec = importlib.util.spec_from_file_location("rules_source", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


source = _load_source()
both = pytest.mark.parametrize("rules", [compiled, source], ids=["compiled", "source"])


def test_both_worlds_are_there() -> None:
    assert not compiled.__file__.endswith(".py")
    assert source.__file__.endswith(".py")


@both
def test_numbers_of_the_verdicts(rules: Any) -> None:
    assert (rules.UNDECIDED, rules.YES, rules.NO, rules.NO_QUORUM) == (
        UNDECIDED,
        YES,
        NO,
        NO_QUORUM,
    )


# -- quorum and verdicts --------------------------------------------------------------------------


@pytest.mark.case("C02")
@pytest.mark.case("C03")
@both
def test_quorum(rules: Any) -> None:
    assert [rules.quorum(n) for n in range(1, 9)] == [1, 2, 2, 3, 3, 4, 4, 5]
    for n in range(1, 33):
        q = rules.quorum(n)
        assert type(q) is int
        assert 2 * q > n  # two quorums share a master
        assert 2 * (q - 1) <= n  # and it is the least such number


@cache
def splits(total: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to write `total` as an ordered sum of `parts` numbers >= 0."""
    if parts == 1:
        return [(total,)]
    return [
        (first, *rest) for first in range(total + 1) for rest in splits(total - first, parts - 1)
    ]


def acquire_class(yes: int, no: int, n: int) -> int:
    """DESIGN rule 4, when every answer is in: granted, contention, no quorum."""
    if yes > n / 2:
        return YES
    return NO if yes + no > n / 2 else NO_QUORUM


def holder_class(yes: int, no: int, n: int) -> int:
    """DESIGN rule 7, when every answer is in: ours, lost, no quorum."""
    if yes > n / 2:
        return YES
    # Those that did not say "not ours" would be no quorum, even if they all held the key.
    return NO if not (n - no) > n / 2 else NO_QUORUM


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("name", ["acquire", "holder"])
@both
def test_verdicts_by_brute_force(rules: Any, name: str, n: int) -> None:
    """Decided if, and only if, every way to answer that is left leads to the same class."""
    verdict = getattr(rules, f"{name}_verdict")
    final = acquire_class if name == "acquire" else holder_class
    for yes, no, still_open, _failed in splits(n, 4):
        classes = {
            final(yes + more_yes, no + more_no, n) for more_yes, more_no, _ in splits(still_open, 3)
        }
        expected = classes.pop() if len(classes) == 1 else UNDECIDED
        assert verdict(yes, no, still_open, n) == expected, (yes, no, still_open)


@pytest.mark.case("C02")
@pytest.mark.parametrize("n", range(1, 8))
@both
def test_c02_acquired_with_half_and_one(rules: Any, n: int) -> None:
    for k in range(n + 1):
        expected = YES if k >= n // 2 + 1 else NO
        assert rules.acquire_verdict(k, n - k, 0, n) == expected


@pytest.mark.case("C01")
@pytest.mark.case("C03")
@pytest.mark.parametrize(
    ("n", "up", "expected"), [(2, 1, NO_QUORUM), (4, 2, NO_QUORUM), (4, 3, YES), (5, 2, NO_QUORUM)]
)
@both
def test_c03_quorum_counts_the_configured(rules: Any, n: int, up: int, expected: int) -> None:
    assert rules.acquire_verdict(up, 0, 0, n) == expected
    assert rules.holder_verdict(up, 0, 0, n) == expected


@pytest.mark.case("C37")
@both
def test_c37_contention_is_not_an_outage(rules: Any) -> None:
    assert rules.acquire_verdict(1, 0, 0, 3) == NO_QUORUM  # two are down
    assert rules.acquire_verdict(0, 3, 0, 3) == NO
    assert rules.acquire_verdict(1, 1, 0, 3) == NO  # one is down, one is held, one grants


@given(st.data())
@QUICK
def test_verdicts_agree_for_many_masters(data: st.DataObject) -> None:
    n = data.draw(st.integers(10, 32))
    yes = data.draw(st.integers(0, n))
    no = data.draw(st.integers(0, n - yes))
    still_open = data.draw(st.integers(0, n - yes - no))
    for name in ("acquire_verdict", "holder_verdict"):
        found = getattr(compiled, name)(yes, no, still_open, n)
        assert found == getattr(source, name)(yes, no, still_open, n)
        if found:  # for good, whatever comes
            for more, what in product(range(still_open + 1), (0, 1, 2)):
                args = [yes + more * (what == 0), no + more * (what == 1), still_open - more, n]
                assert getattr(compiled, name)(*args) == found


# -- drift and validity ---------------------------------------------------------------------------


@both
def test_drift_by_example(rules: Any) -> None:
    assert rules.drift_ns(10_000 * MS, 0.01) == 102 * MS
    assert rules.drift_ns(100 * MS, 0.01) == 3 * MS
    assert rules.drift_ns(1000 * MS, 0.0) == 2 * MS
    assert rules.drift_ns(0, 0.5) == 2 * MS


@given(st.integers(0, 2**31 * MS), st.floats(0, 1, exclude_max=True))
@QUICK
def test_drift_is_rounded_up(ttl_ns: int, factor: float) -> None:
    share = compiled.drift_ns(ttl_ns, factor) - 2 * MS
    exact = Fraction(ttl_ns) * Fraction(factor)
    slip = exact / 2**52  # one rounding of a double
    assert exact - slip <= share < exact + slip + 1
    assert source.drift_ns(ttl_ns, factor) - 2 * MS == share


@pytest.mark.parametrize(
    ("ttl_ns", "factor", "share"),
    [(1, 0.01, 1), (100, 0.01, 1), (101, 0.01, 2), (3, 0.5, 2), (4, 0.5, 2), (1, 0.0, 0)],
)
@both
def test_drift_is_rounded_up_by_example(rules: Any, ttl_ns: int, factor: float, share: int) -> None:
    assert rules.drift_ns(ttl_ns, factor) == 2 * MS + share


@pytest.mark.case("C04")
@both
def test_c04_drift_and_elapsed_are_taken_off_once(rules: Any) -> None:
    for ttl_ms, elapsed_ms, most_ms in ((10_000, 300, 9598), (100, 20, 77)):
        start = 123_456_789
        ttl = ttl_ms * MS
        deadline = rules.deadline_ns(start, ttl, rules.drift_ns(ttl, 0.01))
        validity = deadline - (start + elapsed_ms * MS)
        assert validity == most_ms * MS


@pytest.mark.case("C06")
@pytest.mark.parametrize("over_ms", [-1, 0, 1])
@both
def test_c06_deadline_to_the_millisecond(rules: Any, over_ms: int) -> None:
    start, ttl = 10**15 + 7, 300 * MS
    drift = rules.drift_ns(ttl, 0.01)
    now = start + ttl - drift - over_ms * MS
    assert rules.deadline_ns(start, ttl, drift) - now == over_ms * MS


@pytest.mark.case("C35")
@pytest.mark.parametrize("ttl_ms", [2**31 - 1, 2**31, 2**32, 30 * DAY_MS, 365 * DAY_MS, 2**42])
@both
def test_c35_long_ttls_do_not_overflow(rules: Any, ttl_ms: int) -> None:
    ttl = ttl_ms * MS
    start = 100 * 365 * DAY_MS * MS  # a machine that is up for a century
    drift = rules.drift_ns(ttl, 0.01)
    validity = rules.deadline_ns(start, ttl, drift) - start
    assert abs(validity - (ttl * 99 // 100 - 2 * MS)) < 1000 * MS
    assert 0 < start + ttl <= INT64
    assert 0 < drift <= INT64


@both
def test_products_fit_into_int64(rules: Any) -> None:
    assert rules.NS_PER_MS == MS
    assert rules.MAX_MS == 2**42
    assert rules.MAX_MS * rules.NS_PER_MS < INT64 // 2
    assert rules.drift_ns(rules.MAX_MS * MS, 0.999999) <= rules.MAX_MS * MS + 2 * MS


@given(st.integers(0, 2**42 * MS), st.floats(0, 1, exclude_max=True))
@QUICK
def test_drift_is_the_same_in_both_worlds(ttl_ns: int, factor: float) -> None:
    assert compiled.drift_ns(ttl_ns, factor) == source.drift_ns(ttl_ns, factor)
    assert compiled.drift_ns(ttl_ns, factor) >= 2 * MS


# -- back-off and pauses --------------------------------------------------------------------------


@both
def test_backoff_doubles_from_10_to_500_ms(rules: Any) -> None:
    found = [rules.backoff_ns(failures, 0.0) // MS for failures in range(10)]
    assert found == [0, 10, 20, 40, 80, 160, 320, 500, 500, 500]
    assert rules.backoff_ns(10**9, 0.0) == 500 * MS
    assert rules.backoff_ns(-1, 0.0) == 0


@given(st.integers(0, 100), st.floats(0, 1, exclude_max=True))
@QUICK
def test_backoff_jitter_takes_off_half_at_most(failures: int, jitter: float) -> None:
    full = source.backoff_ns(failures, 0.0)
    found = source.backoff_ns(failures, jitter)
    assert full / 2 <= found <= full
    assert found == compiled.backoff_ns(failures, jitter)


@both
def test_backoff_is_not_the_same_for_everybody(rules: Any) -> None:
    assert len({rules.backoff_ns(3, jitter / 10) for jitter in range(10)}) == 10


@pytest.mark.case("C130")
@both
def test_pause_without_a_limit_is_uniform(rules: Any) -> None:
    for jitter in (0.0, 0.25, 0.5, 0.999):
        assert rules.pause_ns(-1, 200 * MS, jitter) == (int(200 * MS * jitter), False)
    assert rules.pause_ns(-1, 0, 0.5) == (0, False)


@both
def test_pause_at_the_limit_is_none(rules: Any) -> None:
    assert rules.pause_ns(0, 200 * MS, 0.5) == (-1, True)
    assert rules.pause_ns(0, 0, 0.0) == (-1, True)


@both
def test_pause_is_clipped_so_that_a_last_try_starts_just_before_the_limit(rules: Any) -> None:
    assert rules.pause_ns(100 * MS, 200 * MS, 0.25) == (50 * MS, False)
    assert rules.pause_ns(100 * MS, 200 * MS, 0.75) == (99 * MS, True)
    assert rules.pause_ns(100 * MS, 200 * MS, 0.5) == (99 * MS, True)  # it would start too late
    assert rules.pause_ns(MS, 200 * MS, 0.5) == (0, True)
    assert rules.pause_ns(1, 200 * MS, 0.5) == (0, True)


@both
def test_an_open_ended_wait_pauses_5_ms_at_least(rules: Any) -> None:
    assert rules.pause_ns(1000 * MS, 0, 0.0) == (5 * MS, False)
    assert rules.pause_ns(1000 * MS, 200 * MS, 0.001) == (5 * MS, False)
    assert rules.pause_ns(3 * MS, 0, 0.0) == (2 * MS, True)


@given(
    st.integers(-1, 2**62),
    st.integers(0, 2**42 * MS),
    st.floats(0, 1, exclude_max=True),
)
@QUICK
def test_pause_bounds(left: int, retry_delay: int, jitter: float) -> None:
    found = compiled.pause_ns(left, retry_delay, jitter)
    assert found == source.pause_ns(left, retry_delay, jitter)
    pause, last = found
    if left < 0:
        assert 0 <= pause <= retry_delay
        assert not last
    elif left == 0:
        assert found == (-1, True)
    else:
        assert 0 <= pause < left  # the try starts before the limit
        assert pause <= max(retry_delay, 5 * MS)
        wish = max(int(retry_delay * jitter), 5 * MS)
        assert pause == (max(left - MS, 0) if last else wish)
        assert last == (wish >= left)
