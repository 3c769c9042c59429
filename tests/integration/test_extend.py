"""Extend: the new deadline, and all the ways in which a lock turns out to be lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from integration.fakes import MakeProxy
from integration.helpers import (
    HOUR,
    LATE,
    NT,
    SLACK_MS,
    MakeClient,
    Monitor,
    Stopwatch,
    all_have,
    are_clean,
    eventually,
    keys_of,
    occupy,
    outcomes,
    pttls_of,
    taught,
    vacate,
    values_of,
)

from redlock_fast import LockLost, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters


def test_the_same_object_stays_good(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", 5000)
    assert lock is not None
    all_have(masters, "res", lock.token)
    validity = lock.validity

    assert client.extend(lock, 60_000)

    assert lock.held
    assert lock.ttl == 60_000
    assert lock.validity == validity  # at the grant
    assert 60_000 - 602 - SLACK_MS < lock.remaining() <= 60_000 - 602
    eventually(lambda: min(pttls_of(masters, "res")) > 5000)
    assert lock.extend()  # its ttl, which is the new one
    assert lock.remaining() > 50_000
    assert lock.release()


@pytest.mark.case("C07")
def test_c07_an_extension_that_takes_too_long_is_a_loss(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies, retries=20)
    lock = client.acquire("res", HOUR)
    assert lock is not None
    assert client.extend(lock, 300)  # the masters know the script now: one round trip
    for proxy in proxies:
        proxy.down.delay_ms = 400

    assert client.extend(lock, 300) is False

    assert lock.remaining() == 0.0
    assert not lock.held
    with pytest.raises(LockLost) as caught:
        lock.raise_if_lost()
    assert caught.value.reason == "expired"
    assert client.extend(lock, 300) is False  # never revived


@pytest.mark.case("C07")
def test_c07_a_fast_extension_moves_the_deadline(client: Redlock) -> None:
    lock = client.acquire("res", 5000)
    assert lock is not None
    before = lock.remaining()

    assert client.extend(lock, 20_000)

    assert before < 5000 < lock.remaining()


def test_a_shorter_ttl_is_set_too(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)

    assert client.extend(lock, 5000)

    assert 0 < lock.remaining() < 5000
    eventually(lambda: max(pttls_of(masters, "res")) <= 5000)
    assert lock.remaining() <= sorted(pttls_of(masters, "res"))[1] + 1


@pytest.mark.case("C19")
def test_c19_a_lost_key_is_not_made_again(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", 5000)
    assert lock is not None
    all_have(masters, "res", lock.token)
    vacate(masters, "res")

    assert client.extend(lock, 5000) is False

    assert not lock.held
    with pytest.raises(LockLost) as caught:
        lock.raise_if_lost()
    assert caught.value.reason == "foreign"
    assert client.release(lock) is False
    assert are_clean(masters)


@pytest.mark.case("C20")
def test_c20_a_minority_is_no_extension(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = taught(make_local_masters(5))
    client, rival = make_client(masters), make_client(masters)
    lock = client.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)
    vacate([masters[2], masters[3], masters[4]], "res")

    assert client.extend(lock, 5000) is False

    theirs = rival.acquire("res", HOUR)
    assert theirs is not None
    # What was left on the others is removed by the extension that failed.
    eventually(lambda: lock.token.encode() not in values_of(masters, "res"))
    assert rival.owned(theirs)
    assert rival.release(theirs)


def test_one_foreign_master_is_no_loss(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)
    vacate([masters[0]], "res")
    occupy([masters[0]], "res", 60_000)

    assert client.extend(lock, HOUR)
    assert values_of([masters[0]], "res") == [b"rival"]
    assert pttls_of([masters[0]], "res")[0] <= 60_000


def test_a_key_of_another_type_is_foreign(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)
    vacate(masters, "res")
    for master in masters:
        master.command("LPUSH", "res", "x")

    assert client.extend(lock) is False
    assert [master.command("TYPE", "res") for master in masters] == [b"list"] * 3


def test_without_a_quorum_of_answers_the_lock_stays_held(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock is not None
    all_have(masters, "res", lock.token)
    before = lock.remaining()
    masters.pause(1)
    masters.pause(2)

    with pytest.raises(NoQuorum) as caught:
        client.extend(lock, 60_000)

    words = outcomes(caught.value)
    assert words[0] == "ours"
    assert set(words[1:]) <= LATE
    assert lock.held
    assert 0 < lock.remaining() <= 60_000 - 602 < before  # the earlier of the two deadlines
    masters.resume(1)
    masters.resume(2)
    assert eventually(lambda: _quietly(client, lock))
    assert lock.remaining() > 60_000


def _quietly(client: Redlock, lock: object) -> bool:
    try:
        return client.extend(lock, HOUR)  # type: ignore[arg-type]
    except NoQuorum:
        return False


def test_extending_what_is_not_held_is_false_without_io(
    client: Redlock, masters: LocalMasters
) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    assert client.release(lock)
    eventually(lambda: are_clean(masters))

    with Monitor(masters[0]) as monitor:
        assert client.extend(lock, HOUR) is False
        assert monitor.commands("EVAL", "EVALSHA") == []
    assert are_clean(masters)


def test_past_the_local_deadline_extend_cleans_up(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, clock_drift_factor=0.999)  # held for a few ms only
    lock = client.acquire("res", 60_000, wait=5000)
    assert lock is not None
    eventually(lambda: not lock.held)
    eventually(lambda: keys_of(masters) == [[b"res"]] * 3)  # long after our own deadline

    assert client.extend(lock, HOUR) is False

    with pytest.raises(LockLost) as caught:
        lock.raise_if_lost()
    assert caught.value.reason == "expired"
    eventually(lambda: are_clean(masters))


def test_extensions_of_one_lock_are_serialised(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies)
    lock = client.acquire("res", HOUR)
    assert lock is not None
    for proxy in proxies:
        proxy.down.delay_ms = 50

    with Stopwatch() as watch, ThreadPoolExecutor(5) as pool:
        results = list(pool.map(lambda _: client.extend(lock, HOUR), range(5)))

    assert results == [True] * 5
    assert watch.ms >= 5 * 50


@pytest.mark.case("C59")
def test_c59_all_verbs_survive_a_script_flush(client: Redlock, masters: LocalMasters) -> None:
    for _ in range(3):
        lock = client.acquire("res", HOUR, wait=2000)
        assert lock is not None
        for _ in range(2):
            for master in masters:
                master.command("SCRIPT", "FLUSH")
            assert client.extend(lock, HOUR)
            assert client.owned(lock)
            assert client.locked("res")
        for master in masters:
            master.command("SCRIPT", "FLUSH")
        assert client.release(lock)
        # Another call takes care of what is still under way.
        eventually(lambda: not client.locked("other") and are_clean(masters))


@pytest.mark.case("C59")
def test_c59_a_missing_script_costs_one_more_round_trip(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = taught(make_local_masters(1))
    client = make_client(masters)
    with client.lock("res", HOUR) as first:  # the first use on a connection is another matter
        assert client.extend(first)
    with Monitor(masters[0]) as monitor:
        lock = client.acquire("res", HOUR)
        assert lock is not None
        for _ in range(2):
            masters[0].command("SCRIPT", "FLUSH")
            for _ in range(3):
                assert client.extend(lock, HOUR)
        assert client.release(lock)
        assert are_clean(masters)

        sent = [command[0] for command in monitor.commands("EVAL", "EVALSHA")]
        once = [b"EVALSHA", b"EVAL", b"EVALSHA", b"EVALSHA"]
        assert sent == once + once + [b"EVALSHA", b"EVAL"]
