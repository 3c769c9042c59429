"""The two classes that users have in hand: what they show, refuse, count and hand over."""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import pickle
import re
import threading
import time
import weakref
from typing import Any

import pytest
from integration.fakes import PASS, MakeFake
from integration.helpers import (
    HOUR,
    NT,
    SLACK_MS,
    MakeClient,
    Stopwatch,
    all_have,
    are_clean,
    calls_of,
    clients_of,
    closed_port,
    descriptors,
    eventually,
    in_time,
    keys_of,
    occupy,
    outcomes,
    pttls_of,
    refresh_stats,
    vacate,
)

import redlock_fast
from redlock_fast import ClosedError, LockLost, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters


def _held(client: Redlock, masters: LocalMasters, name: str = "res") -> redlock_fast.Lock:
    lock = client.acquire(name, HOUR)
    assert lock is not None
    all_have(masters, name, lock.token)
    return lock


# -- what they show ----------------------------------------------------------------------------


def test_repr(client: Redlock, masters: LocalMasters) -> None:
    assert repr(client) == f"<Redlock of {', '.join(masters.addresses)}>"
    lock = _held(client, masters)
    assert re.fullmatch(r"<Lock 'res', \d+ ms left>", repr(lock))
    assert lock.token not in repr(lock)
    assert lock.token not in str(lock)
    assert client.release(lock)
    assert repr(lock) == "<Lock 'res', released>"
    lost = _held(client, masters)
    vacate(masters, "res")
    assert client.extend(lost) is False
    assert repr(lost) == "<Lock 'res', lost>"


def test_repr_of_hostile_names(client: Redlock) -> None:
    for name in ("a\r\nb", b"\xff", "x" * 1000, "\u00e4"):
        lock = client.acquire(name, HOUR)
        assert lock
        assert lock.resource == name
        text = repr(lock)
        assert text.isascii()
        assert text.isprintable()
        assert len(text) < 150


def test_what_a_lock_tells(client: Redlock) -> None:
    lock = client.acquire("res", 60_000)
    assert lock
    assert isinstance(lock.validity, float)
    assert isinstance(lock.remaining(), float)
    assert lock.remaining() <= lock.validity
    assert isinstance(lock.token, str)
    assert lock.held is True
    lock.raise_if_lost()
    for name in ("token", "ttl", "validity", "held"):
        with pytest.raises(AttributeError):
            setattr(lock, name, 1)


def test_what_a_lock_tells_past_its_deadline(client: Redlock) -> None:
    lock = client.acquire("res", 200, wait=5000)
    assert lock
    eventually(lambda: lock.remaining() == 0.0)
    assert not lock
    assert not lock.held
    with pytest.raises(LockLost, match="'res'") as caught:
        lock.raise_if_lost()
    assert caught.value.reason == "expired"


# -- what they refuse --------------------------------------------------------------------------


@pytest.mark.case("C99")
def test_c99_neither_is_pickled_or_copied(client: Redlock, masters: LocalMasters) -> None:
    lock = _held(client, masters)
    things: list[Any] = [client, lock]
    for thing in things:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match="pickled or copied"):
                pickle.dumps(thing, protocol)
        for duplicate in (copy.copy, copy.deepcopy, lambda t: copy.deepcopy({"a": [t]})):
            with pytest.raises(TypeError, match="pickled or copied"):
                duplicate(thing)
    assert lock.held
    assert client.release(lock)


@pytest.mark.case("C99")
def test_c99_nor_by_multiprocessing(client: Redlock) -> None:
    process = multiprocessing.get_context("spawn").Process(target=print, args=(client,))
    with pytest.raises(TypeError, match="make one in each process"):
        process.start()


def test_another_clients_lock(masters: LocalMasters, make_client: MakeClient) -> None:
    one, other = make_client(masters), make_client(masters)
    lock = _held(one, masters)
    for call in (
        lambda: other.release(lock),
        lambda: other.extend(lock),
        lambda: other.extend(lock, 1000),
        lambda: other.owned(lock),
    ):
        with pytest.raises(ValueError, match="another client"):
            call()
    assert lock.held
    assert lock.extend()
    assert lock.release()


def test_locks_have_no_room_for_more(client: Redlock) -> None:
    lock = client.acquire("res", HOUR)
    with pytest.raises(AttributeError):
        lock.comment = "mine"  # type: ignore[union-attr]


def test_locks_can_be_referred_to_weakly_and_collected(masters: LocalMasters) -> None:
    """They are recycled, but nothing of one is left in another; a client may keep its own."""
    client = Redlock([master.url for master in masters])
    locks = client.acquire_many([f"res {i}" for i in range(2000)], HOUR)
    left = [weakref.ref(lock) for lock in locks if lock]
    assert all(client.release_many([lock for lock in locks if lock]))
    tokens = {lock.token for lock in locks if lock}
    del locks
    assert not any(it() for it in left)
    lock = client.acquire("res", HOUR)
    assert lock
    assert lock.extend()
    assert lock.token not in tokens
    assert lock.release()
    client.mine = lock  # type: ignore[attr-defined]
    client.close()
    left = [weakref.ref(lock)]
    del lock, client
    gc.collect()
    assert not any(it() for it in left)


# -- closing -----------------------------------------------------------------------------------


def test_a_closed_client(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters)
    lock = _held(client, masters)
    client.close()
    client.close()
    calls = (
        lambda: client.acquire("other", HOUR),
        lambda: client.acquire("other", HOUR, wait=math.inf),
        lambda: client.acquire_many(["other"], HOUR),
        lambda: client.extend(lock),
        lambda: client.extend_many([lock]),
        lambda: client.owned(lock),
        lambda: client.locked("res"),
        lambda: client.adopt("res", lock.token, HOUR),
        lambda: client.release_token("res", lock.token),
        client.connect,
        lambda: client.lock("other", HOUR).__enter__(),
        lambda: client.release(lock),
        lambda: client.release_many([lock]),
    )
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()
    # Held locks are not released, and what needs no I/O still works.
    all_have(masters, "res", lock.token)
    assert client.stats()["acquired"] == 1
    assert repr(client)
    assert repr(lock)
    eventually(lambda: [clients_of(master) for master in masters] == [0] * 3)


def test_closing_before_anything_was_done(masters: LocalMasters) -> None:
    client = Redlock(masters.urls)
    client.close()
    with pytest.raises(ClosedError):
        client.acquire("res", HOUR)


def test_a_client_is_a_context(masters: LocalMasters) -> None:
    with Redlock(masters.urls, master_timeout=2000) as client:
        lock = client.acquire("res", HOUR)
        assert lock
    with pytest.raises(ClosedError):
        client.release(lock)


def test_closing_inside_a_with_block_of_a_lock(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters)
    with pytest.raises(ClosedError), client.lock("res", HOUR):
        client.close()


@pytest.mark.parametrize("verb", ["round", "pause"])
def test_closing_ends_waiting_callers(
    masters: LocalMasters, make_client: MakeClient, verb: str
) -> None:
    """One in the middle of a round with hung masters, or between two tries."""
    client = make_client(masters, master_timeout=60_000 if verb == "round" else NT)
    if verb == "round":
        for i in range(3):
            masters.pause(i)
    else:
        occupy(masters, "res")
        client = make_client(masters, retry_delay=60_000)
    ends: list[Any] = []

    def call() -> None:
        try:
            ends.append(client.acquire("res", HOUR, wait=math.inf))
        except ClosedError as error:
            ends.append(error)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    time.sleep(0.2)
    assert not ends
    closer = threading.Thread(target=client.close)
    closer.start()
    with Stopwatch() as watch:
        for caller in callers:
            caller.join(10)
    assert watch.ms < SLACK_MS + 100
    assert [type(end) for end in ends] == [ClosedError] * 4
    for i in range(3):
        masters.resume(i)
    closer.join(30)  # it goes on settling what it can
    assert not closer.is_alive()
    # Only the rival's keys are there.
    eventually(lambda: keys_of(masters) == [[] if verb == "round" else [b"res"]] * 3)


def test_closing_is_bounded_when_masters_hang(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock
    for i in range(3):
        masters.pause(i)
    with pytest.raises(NoQuorum):
        client.acquire("other", HOUR)
    with Stopwatch() as watch:
        client.close()
    assert watch.ms < NT + SLACK_MS
    for i in range(3):
        masters.resume(i)
    eventually(lambda: keys_of(masters) == [[b"res"]] * 3)  # clean-ups were sent


def test_closing_closes_every_descriptor(masters: LocalMasters, make_client: MakeClient) -> None:
    before = descriptors()
    client = make_client(masters)
    assert client.acquire("res", HOUR)

    client.close()

    assert repr(client)  # still there
    assert descriptors().keys() <= before.keys()


# -- connecting --------------------------------------------------------------------------------


def test_connect_opens_one_connection_to_each(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, warm=False)
    assert [clients_of(master) for master in masters] == [0] * 3
    for _ in range(3):
        client.connect()
    assert [row["state"] for row in client.stats()["masters"]] == ["ready"] * 3
    assert [clients_of(master) for master in masters] == [1] * 3
    for _ in range(10):
        assert client.acquire(str(_), HOUR)
    assert [clients_of(master) for master in masters] == [1] * 3


def test_connect_does_not_raise(masters: LocalMasters, make_client: MakeClient) -> None:
    masters.pause(1)
    with closed_port() as port:
        client = make_client(
            [masters[0], masters[1], f"redis://127.0.0.1:{port}"],
            warm=False,
            connect_timeout=300,
        )
        with Stopwatch() as watch:
            client.connect()
        assert watch.ms < 300 + SLACK_MS
        states = [row["state"] for row in client.stats()["masters"]]
        assert states[0] == "ready"
        assert "ready" not in states[1:]
    masters.resume(1)


# -- stats -------------------------------------------------------------------------------------


def test_the_shape_of_stats(client: Redlock, masters: LocalMasters) -> None:
    lock = _held(client, masters)
    assert client.release(lock)
    stats = client.stats()
    counters = ["acquired", "contended", "no_quorum", "too_late", "released", "extended", "lost"]
    assert list(stats) == [*counters, "masters"]
    assert all(type(stats[name]) is int for name in counters)
    assert [row["address"] for row in stats["masters"]] == masters.addresses
    for row in stats["masters"]:
        assert type(row) is dict
        assert row.keys() == {
            "address",
            "state",
            "owed",
            "debts",
            "reconnects",
            "replies",
            "errors",
            "cause",
            "ms",
        }
        assert row["state"] == "ready"
        assert row["errors"] == {}
        assert row["cause"] == ""
        assert row["reconnects"] == row["debts"] == 0
        assert 0 < row["ms"] < 10_000
        assert row["replies"] >= 2
    stats["acquired"] = stats["masters"][0]["replies"] = 99  # a copy
    assert client.stats()["acquired"] == 1


def test_counters(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, master_timeout=NT)
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock
    all_have(masters, "res", lock.token)
    assert client.acquire("res", HOUR) is None
    assert client.extend(lock)
    assert client.extend(lock)
    vacate(masters, "res")
    assert client.extend(lock) is False
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock
    assert client.release(lock)
    assert client.release(lock) is False
    base = client.stats()
    for i in range(2):
        masters.pause(i)
    with pytest.raises(NoQuorum):
        client.acquire("res", HOUR)
    for i in range(2):
        masters.resume(i)
    stats = client.stats()
    assert {k: v for k, v in base.items() if k != "masters"} == {
        "acquired": 2,
        "contended": 1,
        "no_quorum": 0,
        "too_late": 0,
        "released": 1,
        "extended": 2,
        "lost": 1,
    }
    assert stats["no_quorum"] == 1
    assert stats["acquired"] == 2


def test_ms_of_the_last_reply_after_a_clean_up(
    make_fake: MakeFake, make_client: MakeClient
) -> None:
    fakes = [make_fake(lambda c, _: b"$-1\r\n" if c[0] == b"SET" else PASS) for _ in range(3)]
    client = make_client(fakes)
    assert client.acquire("res", HOUR) is None
    eventually(lambda: all(fake.named("EVALSHA", "EVAL") for fake in fakes))

    def all_read() -> bool:
        client.connect()  # moves what has come
        return not any(row["owed"] for row in client.stats()["masters"])

    eventually(all_read)
    assert all(0 < row["ms"] < 60_000 for row in client.stats()["masters"])


# -- asking ------------------------------------------------------------------------------------


def test_locked(client: Redlock, masters: LocalMasters) -> None:
    assert client.locked("res") is False
    lock = _held(client, masters)
    assert client.locked("res") is True
    assert client.locked(b"res") is True
    assert client.release(lock)
    assert client.locked("res") is False
    occupy([masters[0]], "res")
    assert client.locked("res") is False
    occupy([masters[1]], "res")
    assert client.locked("res") is True
    vacate(masters, "res")
    for master in masters:
        master.command("LPUSH", "res", "x")
    assert client.locked("res") is True


def test_owned(client: Redlock, masters: LocalMasters) -> None:
    lock = _held(client, masters)
    assert client.owned(lock) is True
    vacate([masters[0]], "res")
    assert client.owned(lock) is True
    vacate([masters[1]], "res")
    assert client.owned(lock) is False
    occupy([masters[0], masters[1]], "res")
    assert client.owned(lock) is False
    assert client.release(lock) is False
    assert client.owned(lock) is False


def test_asking_changes_nothing(client: Redlock, masters: LocalMasters) -> None:
    lock = _held(client, masters)
    for master in masters:
        master.command("PEXPIRE", "res", 60_000)
    for _ in range(3):
        assert client.locked("res")
        assert client.owned(lock)
    assert all(0 < pttl <= 60_000 for pttl in pttls_of(masters, "res"))


def test_asking_without_a_quorum(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, master_timeout=NT)
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock
    masters.kill(0)
    masters.kill(1)
    for call in (lambda: client.locked("res"), lambda: client.owned(lock)):
        with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
            call()
        assert watch.ms < NT + SLACK_MS
        assert len(outcomes(caught.value)) == 3
    assert lock.held  # by our own clock


# -- handing over ------------------------------------------------------------------------------


def test_adopt(masters: LocalMasters, make_client: MakeClient) -> None:
    one, other = make_client(masters), make_client(masters)
    lock = _held(one, masters)

    mine = other.adopt("res", lock.token, 60_000)

    assert mine
    assert mine.token == lock.token
    assert mine.ttl == 60_000
    assert 60_000 - 602 - SLACK_MS < mine.remaining() <= 60_000 - 602
    assert max(pttls_of(masters, "res")) <= HOUR
    assert other.extend(mine, 120_000)
    eventually(lambda: 60_000 < min(pttls_of(masters, "res")) <= 120_000)
    assert other.release(mine)
    eventually(lambda: are_clean(masters))
    assert one.release(lock) is False


def test_adopt_what_is_gone(client: Redlock, masters: LocalMasters) -> None:
    lock = _held(client, masters)
    token = lock.token
    assert client.release(lock)
    assert client.adopt("res", token, HOUR) is None
    occupy(masters, "res")
    assert client.adopt("res", token.encode(), HOUR) is None
    assert client.locked("res")
    assert max(pttls_of(masters, "res")) <= HOUR


def test_adopt_without_a_quorum(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters)
    lock = _held(client, masters)
    masters.kill(0)
    masters.kill(1)
    with pytest.raises(NoQuorum):
        client.adopt("res", lock.token, HOUR)
    with pytest.raises(NoQuorum):
        client.release_token("res", lock.token)


def test_release_token(masters: LocalMasters, make_client: MakeClient) -> None:
    one, other = make_client(masters), make_client(masters)
    lock = _held(one, masters)
    assert other.release_token("res", "0" * 40) is False
    assert other.release_token("other", lock.token) is False
    assert one.owned(lock)
    assert other.release_token("res", lock.token) is True
    assert other.release_token(b"res", lock.token.encode()) is False
    eventually(lambda: are_clean(masters))
    assert one.extend(lock) is False


def test_two_clients_of_one_process_are_rivals(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    clients = [make_client(masters) for _ in range(2)]
    for turn in range(20):
        lock = clients[turn % 2].acquire("res", HOUR, wait=5000)
        assert lock
        assert clients[1 - turn % 2].acquire("res", HOUR) is None
        assert clients[turn % 2].release(lock)
    eventually(lambda: are_clean(masters))


# -- lives of objects --------------------------------------------------------------------------


def test_a_dropped_lock_is_not_released(client: Redlock, masters: LocalMasters) -> None:
    lock = _held(client, masters)
    token = lock.token
    del lock
    assert client.locked("res")
    all_have(masters, "res", token)


@pytest.mark.case("C113")
def test_c113_a_dropped_lock_ends_with_its_ttl(client: Redlock, masters: LocalMasters) -> None:
    """Also one in a cycle, or in a thread that is gone; dropping it sends nothing."""
    refresh_stats(masters)
    lock = client.acquire("one", 400)
    cycle: list[Any] = [client.acquire("two", 400)]
    cycle.append(cycle)
    thread = threading.Thread(target=lambda: client.acquire("three", 400))
    thread.start()
    thread.join(10)
    assert lock
    assert cycle[0]
    with Stopwatch() as watch:
        for i in range(3):
            masters.pause(i)
        del lock, cycle
        gc.collect()
        for i in range(3):
            masters.resume(i)
    assert watch.ms < SLACK_MS
    eventually(lambda: keys_of(masters) == [[]] * 3, in_time(400))
    assert not any({"eval", "evalsha", "del"} & calls_of(master).keys() for master in masters)


def test_a_lock_keeps_its_client(masters: LocalMasters) -> None:
    lock = Redlock(masters.urls, master_timeout=2000).acquire("res", HOUR)
    assert lock
    assert lock.extend()
    assert lock.release()
    lock.owner.close()


def test_a_dropped_client_closes_its_connections(masters: LocalMasters) -> None:
    client = Redlock(masters.urls, master_timeout=2000)
    client.connect()
    assert [clients_of(master) for master in masters] == [1] * 3
    del client
    eventually(lambda: [clients_of(master) for master in masters] == [0] * 3)
