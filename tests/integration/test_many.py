"""Batches: acquire_many, extend_many, release_many, pipelined to all masters."""

from __future__ import annotations

import itertools
import threading

import pytest
from integration.fakes import RESET, MakeProxy
from integration.helpers import (
    HOUR,
    LATE,
    NT,
    SLACK_MS,
    MakeClient,
    Stopwatch,
    are_clean,
    calls_of,
    eventually,
    keys_of,
    occupy,
    outcomes,
    refresh_stats,
    taught,
    vacate,
    values_of,
)

from redlock_fast import Lock, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters


def _names(count: int) -> list[str]:
    return [f"item:{i}" for i in range(count)]


def _all(locks: list[Lock | None]) -> list[Lock]:
    assert None not in locks
    return [lock for lock in locks if lock is not None]


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 1000, 5000])
def test_a_whole_life(client: Redlock, masters: LocalMasters, count: int) -> None:
    names = _names(count)
    refresh_stats(masters)

    locks = _all(client.acquire_many(names, HOUR))

    assert [lock.resource for lock in locks] == names
    assert len({lock.token for lock in locks}) == count
    assert all(lock.held for lock in locks)
    assert client.extend_many(locks, 2 * HOUR) == [True] * count
    assert all(lock.remaining() > HOUR for lock in locks)
    assert client.release_many(locks) == [True] * count
    assert not any(locks)
    eventually(lambda: are_clean(masters))
    assert client.release_many(locks) == [False] * count
    stats = client.stats()
    assert [stats[k] for k in ("acquired", "extended", "released")] == [count] * 3
    sets = sorted(calls_of(master)["set"] for master in masters)
    if count <= 1000:
        assert sets == [count] * 3
    else:
        # A master that lags far behind the quorum is not waited for.
        assert sets[1:] == [count] * 2


def test_all_masters_have_what_the_locks_say(client: Redlock, masters: LocalMasters) -> None:
    locks = _all(client.acquire_many(_names(300), HOUR))
    eventually(lambda: [len(keys) for keys in keys_of(masters)] == [300] * 3)
    for lock in locks[::37]:
        assert values_of(masters, lock.resource) == [lock.token.encode()] * 3


def test_nothing_to_do(client: Redlock) -> None:
    assert client.acquire_many([], HOUR) == []
    assert client.extend_many([]) == []
    assert client.release_many([]) == []


def test_taken_ones_are_none(client: Redlock, masters: LocalMasters) -> None:
    occupy(masters, "item:3")
    occupy([masters[0], masters[1]], "item:5")
    occupy([masters[0]], "item:7")

    locks = client.acquire_many(_names(10), HOUR)

    assert [i for i, lock in enumerate(locks) if lock is None] == [3, 5]
    assert client.release_many([lock for lock in locks if lock]) == [True] * 8
    eventually(lambda: values_of(masters, "item:5") == [b"rival", b"rival", None])
    eventually(lambda: keys_of(masters)[2] == [b"item:3"])
    stats = client.stats()
    assert (stats["acquired"], stats["contended"]) == (8, 2)


def test_names_may_be_text_or_bytes(client: Redlock) -> None:
    locks = client.acquire_many(["a", b"b", "\u00e9"], HOUR)
    assert [lock and lock.resource for lock in locks] == ["a", b"b", "\u00e9"]


@pytest.mark.parametrize("names", [["a", "b", "a"], ["a", b"a"], ["\u00e9", "\u00e9".encode()]])
def test_a_name_twice_is_refused(
    client: Redlock, masters: LocalMasters, names: list[str | bytes]
) -> None:
    with pytest.raises(ValueError, match="twice"):
        client.acquire_many(names, HOUR)
    assert are_clean(masters)


def test_a_lock_twice_is_refused(client: Redlock) -> None:
    lock, other = _all(client.acquire_many(["a", "b"], HOUR))
    with pytest.raises(ValueError, match="twice"):
        client.extend_many([lock, other, lock])
    with pytest.raises(ValueError, match="twice"):
        client.release_many([lock, other, lock])
    assert client.release_many([lock, other]) == [True, True]


def test_another_clients_lock_is_refused(masters: LocalMasters, make_client: MakeClient) -> None:
    one, other = make_client(masters), make_client(masters)
    mine, theirs = one.acquire("mine", HOUR), other.acquire("theirs", HOUR)
    assert mine
    assert theirs
    for verb in (one.extend_many, one.release_many):
        with pytest.raises(ValueError, match="another client"):
            verb([mine, theirs])
    assert mine.held
    assert one.release(mine)
    assert other.release(theirs)


def test_mixed_states(client: Redlock, masters: LocalMasters) -> None:
    locks = _all(client.acquire_many(_names(5), HOUR))
    eventually(lambda: [len(keys) for keys in keys_of(masters)] == [5] * 3)
    assert client.release(locks[1])
    vacate(masters, "item:3")

    assert client.extend_many(locks, HOUR) == [True, False, True, False, True]
    assert [lock.held for lock in locks] == [True, False, True, False, True]
    assert client.release_many(locks) == [True, False, True, False, True]
    eventually(lambda: are_clean(masters))


def test_wait_tries_what_is_taken_again(client: Redlock, masters: LocalMasters) -> None:
    occupy(masters, "item:3", 200)

    locks = client.acquire_many(_names(10), HOUR, wait=5000)

    assert all(locks)
    assert client.stats()["acquired"] == 10


def test_wait_is_limited(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, retry_delay=10)
    occupy(masters, "item:3")

    with Stopwatch() as watch:
        locks = client.acquire_many(_names(10), HOUR, wait=300)

    assert [i for i, lock in enumerate(locks) if lock is None] == [3]
    assert 290 <= watch.ms <= 300 + SLACK_MS


def test_waiting_ends_while_half_the_validity_is_left(
    client: Redlock, masters: LocalMasters
) -> None:
    occupy(masters, "item:3")

    with Stopwatch() as watch:
        locks = client.acquire_many(_names(10), 1000, wait=60_000)

    granted = [lock for lock in locks if lock]
    assert watch.ms < 500 + SLACK_MS
    assert len(granted) == 9


def test_taken_ones_come_late_with_their_own_validity(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, retry_delay=10)
    occupy(masters, "item:1", 500)

    first, late = _all(client.acquire_many(_names(2), 60_000, wait=5000))

    assert late.remaining() > first.remaining() + 300


def test_a_release_reaches_the_slowest_master_in_full(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    """Far more than may be owed at once, and decided before the third has got half of it."""
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy])
    locks = _all(client.acquire_many(_names(5000), HOUR))
    pairs = [(lock.resource, lock.token) for lock in locks]
    masters[2].command("MSET", *itertools.chain(*pairs))
    proxy.down.delay_ms = 300

    assert client.release_many(locks) == [True] * 5000

    proxy.heal()
    eventually(lambda: are_clean(masters))


# -- masters that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1000, 5000])
def test_one_master_that_breaks_half_way(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient, count: int
) -> None:
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy])
    limit = proxy.down.passed + count // 2 * len(b"+OK\r\n")
    proxy.down.change = lambda data: RESET if proxy.down.passed > limit else data

    locks = _all(client.acquire_many(_names(count), HOUR))

    proxy.refusing = True
    assert client.extend_many(locks, HOUR) == [True] * count
    assert client.release_many(locks) == [True] * count
    eventually(lambda: are_clean([masters[0], masters[1]]))
    # Of a batch, a master that lags may have been given no more than a window of 1024 commands.
    assert len(masters[2].keys()) >= min(count // 2, 1024)
    # What is left on the third is a debt, paid when the master can be reached again.
    proxy.heal()
    eventually(lambda: are_clean(masters), 10)


@pytest.mark.parametrize("count", [1000, 5000])
def test_a_quorum_that_breaks_half_way(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient, count: int
) -> None:
    proxies = [make_proxy(masters[1]), make_proxy(masters[2])]
    client = make_client([masters[0], *proxies])
    for proxy in proxies:
        limit = proxy.down.passed + count // 2 * len(b"+OK\r\n")
        proxy.down.change = lambda data, p=proxy, n=limit: RESET if p.down.passed > n else data

    with pytest.raises(NoQuorum) as caught:
        client.acquire_many(_names(count), HOUR)

    assert set(outcomes(caught.value)[1:]) == {"closed"}
    for proxy in proxies:
        proxy.heal()
    # What was granted has been released, and what may stand on the broken ones is removed.
    eventually(lambda: are_clean(masters), 10)
    assert client.stats()["acquired"] == 0
    assert all(client.acquire_many(_names(count), HOUR, wait=5000))


@pytest.mark.parametrize("verb", ["acquire", "extend", "release"])
def test_a_master_killed_by_surprise(
    make_local_masters: MakeLocalMasters, make_client: MakeClient, verb: str
) -> None:
    """Whenever the kill comes, the other two decide."""
    masters = taught(make_local_masters(3))
    client = make_client(masters)
    names = _names(5000)
    locks: list[Lock] = []
    if verb != "acquire":
        # In parts that are sent as a whole: no lock rests on a bare quorum.
        for i in range(0, 5000, 1000):
            locks += _all(client.acquire_many(names[i : i + 1000], HOUR))
        eventually(lambda: [len(keys) for keys in keys_of(masters)] == [5000] * 3)
    before = client.stats()["masters"][2]["replies"]

    def kill() -> None:
        eventually(lambda: client.stats()["masters"][2]["replies"] > before + 500, 10)
        masters.kill(2)

    killer = threading.Thread(target=kill)
    killer.start()
    if verb == "acquire":
        locks = _all(client.acquire_many(names, HOUR))
    elif verb == "extend":
        assert client.extend_many(locks, HOUR) == [True] * 5000
    else:
        assert client.release_many(locks) == [True] * 5000
    killer.join()
    assert not masters[2].running
    if verb != "release":
        assert client.release_many(locks) == [True] * 5000
    eventually(lambda: are_clean(masters))


def test_results_say_which_locks_had_no_quorum(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    locks = _all(client.acquire_many(_names(10), HOUR, wait=5000))
    assert client.release(locks[4])
    masters.pause(0)
    masters.pause(1)

    with pytest.raises(NoQuorum) as caught:
        client.extend_many(locks, HOUR)
    expected = [None if i != 4 else False for i in range(10)]
    assert caught.value.results == expected
    assert [lock.held for lock in locks] == [i != 4 for i in range(10)]

    with pytest.raises(NoQuorum) as caught:
        client.release_many(locks)
    assert caught.value.results == expected
    assert not any(locks)
    assert set(outcomes(caught.value)[:2]) <= LATE
    masters.resume(0)
    masters.resume(1)
    eventually(lambda: are_clean(masters))


def test_no_quorum_at_all(make_client: MakeClient, make_local_masters: MakeLocalMasters) -> None:
    masters = taught(make_local_masters(3))
    client = make_client(masters, master_timeout=NT)
    masters.kill(0)
    masters.kill(1)

    with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
        client.acquire_many(_names(1000), HOUR)

    assert watch.ms < 2 * SLACK_MS
    assert set(outcomes(caught.value)[:2]) <= {"refused", "closed"}
    eventually(lambda: are_clean(masters))


def test_hung_masters_end_a_batch_within_its_bound(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    masters.pause(0)
    masters.pause(1)

    with Stopwatch() as watch, pytest.raises(NoQuorum):
        client.acquire_many(_names(1000), HOUR)

    # A batch's time runs from its last complete reply: the third master's.
    assert watch.ms < 2 * NT + 2 * SLACK_MS
    masters.resume(0)
    masters.resume(1)
    eventually(lambda: are_clean(masters), 10)
