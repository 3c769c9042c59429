"""Release: to every master, by compare-and-delete, and what is said about a lock that was lost."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from integration.helpers import (
    HOUR,
    LATE,
    NT,
    MakeClient,
    Monitor,
    Stopwatch,
    all_have,
    are_clean,
    eventually,
    in_time,
    occupy,
    outcomes,
    pttls_of,
    vacate,
    values_of,
)

from redlock_fast import LockLost, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters


def test_a_released_lock_is_gone_everywhere(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)

    assert client.release(lock) is True

    assert not lock
    assert not lock.held
    assert lock.remaining() == 0.0
    lock.raise_if_lost()  # released is not lost
    eventually(lambda: are_clean(masters))
    assert client.stats()["released"] == 1


def test_a_second_release_is_false_without_io(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    assert lock.release() is True
    eventually(lambda: are_clean(masters))

    with Monitor(masters[0]) as monitor:
        assert lock.release() is False
        assert client.release(lock) is False
        assert monitor.commands("EVAL", "EVALSHA") == []


@pytest.mark.case("C16")
def test_c16_an_expired_holder_does_nothing_to_the_next_one(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    x, y = make_client(masters), make_client(masters)
    old = x.acquire("res", 200, wait=5000)
    assert old is not None
    # On every master: else one of them may refuse `new` a moment before it forgets `old`.
    eventually(lambda: are_clean(masters))
    new = y.acquire("res", HOUR)
    assert new is not None
    assert not old.held
    all_have(masters, "res", new.token)
    before = pttls_of(masters, "res")

    assert x.release(old) is False
    assert x.extend(old, 5000) is False
    # Behind whatever the two may have sent.
    assert x.locked("res")

    assert values_of(masters, "res") == [new.token.encode()] * 3
    assert all(b - 60_000 < a <= b for a, b in zip(pttls_of(masters, "res"), before, strict=True))
    assert y.owned(new)
    assert y.release(new)


@pytest.mark.case("C16")
def test_c16_extend_before_release(masters: LocalMasters, make_client: MakeClient) -> None:
    x, y = make_client(masters), make_client(masters)
    old = x.acquire("res", 200, wait=5000)
    assert old is not None
    # On every master: else one of them may refuse `new` a moment before it forgets `old`.
    eventually(lambda: are_clean(masters))
    new = y.acquire("res", HOUR)
    assert new is not None
    all_have(masters, "res", new.token)

    assert old.extend(5000) is False
    assert old.release() is False
    assert x.locked("res")

    with pytest.raises(LockLost):
        old.raise_if_lost()
    assert values_of(masters, "res") == [new.token.encode()] * 3
    assert min(pttls_of(masters, "res")) > 60_000


@pytest.mark.case("C17")
def test_c17_one_master_without_the_key_is_no_failure(
    client: Redlock, masters: LocalMasters
) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)
    vacate([masters[2]], "res")

    assert client.release(lock) is True
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C17")
def test_c17_a_quorum_without_the_key_is_a_loss(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)
    vacate([masters[1], masters[2]], "res")

    assert client.release(lock) is False

    with pytest.raises(LockLost) as caught:
        lock.raise_if_lost()
    assert caught.value.reason == "foreign"
    eventually(lambda: are_clean(masters))
    assert client.stats()["lost"] == 1


def test_a_foreign_value_is_never_deleted(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)
    vacate(masters, "res")
    occupy([masters[0]], "res")
    masters[1].command("LPUSH", "res", "x")
    masters[2].command("SET", "res", lock.token + "0")

    assert client.release(lock) is False
    assert client.locked("res")  # behind it
    assert values_of([masters[0]], "res") == [b"rival"]
    assert masters[1].command("TYPE", "res") == b"list"
    assert values_of([masters[2]], "res") == [lock.token.encode() + b"0"]


@pytest.mark.case("C18")
def test_an_unconfirmed_release_may_be_repeated(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock is not None
    token = lock.token
    all_have(masters, "res", token)
    masters.pause(1)
    masters.pause(2)

    with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
        client.release(lock)

    assert watch.ms < 1000 * in_time(NT)
    assert outcomes(caught.value)[0] == "ours"
    assert set(outcomes(caught.value)[1:]) <= LATE
    assert not lock.held
    assert lock.token == token
    lock.raise_if_lost()
    assert client.extend(lock) is False
    masters.resume(1)
    masters.resume(2)
    # The commands of the first one have been carried out by now, so it is not ours any more.
    eventually(lambda: are_clean(masters))
    assert eventually(lambda: _answer(client, lock) is not None)
    assert not lock.held


def _answer(client: Redlock, lock: object) -> bool | None:
    try:
        return client.release(lock)  # type: ignore[arg-type]
    except NoQuorum:
        return None


@pytest.mark.case("C29")
def test_c29_one_client_has_many_locks(client: Redlock, masters: LocalMasters) -> None:
    one, two, three = (client.acquire(f"r{i}", HOUR) for i in range(3))
    assert one
    assert two
    assert three
    assert len({one.token, two.token, three.token}) == 3

    assert client.release(two)
    assert client.release(one)
    assert client.release(three)
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C29")
def test_c29_a_hundred_locks_of_ten_threads(client: Redlock, masters: LocalMasters) -> None:
    def life(thread: int) -> list[bool]:
        locks = [client.acquire(f"r{thread}:{i}", HOUR) for i in range(10)]
        assert all(locks)
        order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
        results = []
        for i in order:
            time.sleep(0.001)
            results.append(client.release(locks[i]))  # type: ignore[arg-type]
        return results

    with ThreadPoolExecutor(10) as pool:
        results = list(itertools.chain(*pool.map(life, range(10))))

    assert results == [True] * 100
    eventually(lambda: are_clean(masters))
    assert client.stats()["released"] == 100
