"""Whatever a lost reply or a broken connection leaves on a master is removed, and soon (rule 5)."""

from __future__ import annotations

import threading
import time

import pytest
from integration.fakes import PASS, RESET, SILENCE, Action, MakeFake, MakeProxy, Proxy
from integration.helpers import (
    HOUR,
    LATE,
    NT,
    MakeClient,
    all_have,
    are_clean,
    eventually,
    in_time,
    janitors,
    keys_of,
    occupy,
    outcomes,
    state_of,
    taught,
    values_of,
)

from redlock_fast import NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

# -- a reply is lost ---------------------------------------------------------------------------


@pytest.mark.case("C11")
def test_c11_a_failed_acquire_cleans_up_where_no_reply_came_from(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy], master_timeout=NT)
    occupy([masters[0], masters[1]], "res")
    proxy.down.dropping = True

    assert client.acquire("res", HOUR) is None

    eventually(lambda: proxy.up.passed > 0)
    eventually(lambda: are_clean([masters[2]]), in_time(NT + 100))
    assert values_of([masters[0], masters[1]], "res") == [b"rival"] * 2


@pytest.mark.case("C11")
def test_c11_without_a_quorum(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(masters[1]), make_proxy(masters[2])]
    client = make_client([masters[0], *proxies], master_timeout=NT)
    for proxy in proxies:
        proxy.down.dropping = True

    with pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)

    words = outcomes(caught.value)
    assert words[0] == "granted"
    assert set(words[1:]) <= LATE
    eventually(lambda: are_clean(masters), in_time(NT + 100))


@pytest.mark.case("C12")
def test_c12_a_release_reaches_the_master_whose_grant_was_lost(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy], master_timeout=NT)
    proxy.down.dropping = True
    lock = client.acquire("res", HOUR)
    assert lock
    all_have(masters, "res", lock.token)

    assert client.release(lock) is True

    eventually(lambda: are_clean(masters), in_time(NT + 100))


@pytest.mark.case("C12")
@pytest.mark.parametrize("verb", ["release", "acquire"])
def test_c12_on_a_late_master_that_does_not_know_the_script(
    make_local_masters: MakeLocalMasters,
    make_proxy: MakeProxy,
    make_client: MakeClient,
    verb: str,
) -> None:
    """The first deletion that a fresh master gets is as good as any other."""
    masters = make_local_masters(3)
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy])
    if verb == "acquire":
        occupy([masters[0], masters[1]], "res")
        proxy.down.delay_ms = 50
        assert client.acquire("res", HOUR) is None
        eventually(lambda: are_clean([masters[2]]), in_time(100))
    else:
        lock = client.acquire("res", HOUR)
        assert lock
        all_have(masters, "res", lock.token)
        proxy.down.delay_ms = 50
        assert client.release(lock) is True
        eventually(lambda: are_clean(masters), in_time(100))


def test_a_try_is_not_refused_by_what_the_last_one_left(
    make_local_masters: MakeLocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    """On masters that have never seen the script; nobody else holds the lock at the second try."""
    masters = make_local_masters(5)
    proxies = [make_proxy(masters[i]) for i in range(3)]
    client = make_client([*proxies, masters[3], masters[4]], retries=1, retry_delay=0)
    masters.kill(3)
    masters.kill(4)
    occupy([masters[2]], "res")

    def free_it(data: bytes) -> bytes:
        if b"$-1" in data:
            masters[2].command("DEL", "res")
        return data

    proxies[2].down.change = free_it
    for proxy in proxies:
        proxy.down.delay_ms = 20

    assert client.acquire("res", HOUR), "nobody else holds it"


# -- a connection breaks -----------------------------------------------------------------------


def _break_after_the_set(proxy: Proxy, broken: list[Proxy]) -> None:
    """Let the master carry out the next SET, and reset the connection instead of answering."""

    def answer(data: bytes) -> bytes | Action:
        if b"+OK" in data and proxy not in broken:
            broken.append(proxy)
            return RESET
        return data

    proxy.down.change = answer


@pytest.mark.case("C15")
@pytest.mark.parametrize("how_many", [1, 2, 3])
def test_c15_reset_after_the_set_was_applied(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient, how_many: int
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies, master_timeout=NT)
    broken: list[Proxy] = []
    for proxy in proxies[:how_many]:
        _break_after_the_set(proxy, broken)

    if how_many == 1:
        lock = client.acquire("res", HOUR)
        assert lock
        assert client.owned(lock)
        assert client.release(lock)
    else:
        with pytest.raises(NoQuorum) as caught:
            client.acquire("res", HOUR)
        assert outcomes(caught.value).count("closed") >= 2

    eventually(lambda: len(broken) == how_many)
    eventually(lambda: are_clean(masters), in_time(NT + 100))


@pytest.mark.case("C15")
def test_c15_the_next_try_gets_the_lock(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies, master_timeout=NT, retries=30, retry_delay=50)
    broken: list[Proxy] = []
    for proxy in proxies:
        _break_after_the_set(proxy, broken)

    lock = client.acquire("res", HOUR)

    assert lock is not None
    assert client.owned(lock)
    eventually(lambda: set(values_of(masters, "res")) <= {lock.token.encode(), None})
    assert client.release(lock)
    eventually(lambda: are_clean(masters), in_time(NT + 100))


@pytest.mark.case("C14")
def test_c14_a_left_over_does_not_block_the_same_client(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    """The second master's answer is lost, its clean-up is held up, then its connection breaks."""
    proxy = make_proxy(masters[1])
    client = make_client(
        [masters[0], proxy, masters[2]], master_timeout=NT, retries=20, retry_delay=50
    )
    occupy([masters[2]], "res", 100)

    def after_the_set() -> None:
        eventually(lambda: values_of([masters[1]], "res") != [None])
        proxy.up.holding = True
        time.sleep(0.15)
        proxy.reset()
        proxy.heal()

    proxy.down.dropping = True
    trouble = threading.Thread(target=after_the_set)
    trouble.start()

    lock = client.acquire("res", 10_000)

    trouble.join()
    assert lock is not None
    assert lock.remaining() > 10_000 - 102 - 5000  # nothing like "when the ttl has run out"
    # What the first try left on the second master is gone, too.
    eventually(lambda: set(values_of(masters, "res")) <= {lock.token.encode(), None})
    assert client.release(lock)
    eventually(lambda: are_clean(masters))


# -- who pays, and when ------------------------------------------------------------------------


def test_the_janitor_pays_when_the_master_can_be_reached_again(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    """Without any further call."""
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy])
    lock = client.acquire("res", HOUR)
    assert lock
    all_have(masters, "res", lock.token)
    assert janitors() == 0
    proxy.refusing = True
    proxy.reset()

    assert client.release(lock) is True

    eventually(lambda: keys_of(masters) == [[], [], [b"res"]])
    time.sleep(0.2)
    assert keys_of(masters) == [[], [], [b"res"]]
    assert janitors() == 1
    assert state_of(client, 2)["debts"] == 1
    proxy.heal()
    # The back-off is at most 500 ms.
    eventually(lambda: are_clean(masters), in_time(500 + 100))
    eventually(lambda: janitors() == 0)
    assert state_of(client, 2)["debts"] == 0


@pytest.mark.parametrize("verb", ["acquire", "release"])
def test_the_janitor_pays_for_a_clean_up_that_was_lost_with_its_connection(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient, verb: str
) -> None:
    """It was sent, and then the connection broke: without any further call, as above."""
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy])
    lock = None
    if verb == "acquire":
        occupy([masters[0], masters[1]], "res")
    else:
        lock = client.acquire("res", HOUR)
        assert lock
        all_have(masters, "res", lock.token)
    proxy.up.change = lambda data: data.partition(b"*5")[0]  # loses what deletes
    if verb == "acquire":
        assert client.acquire("res", HOUR) is None
    else:
        assert lock
        assert client.release(lock) is True
    eventually(lambda: keys_of(masters)[2] == [b"res"])
    time.sleep(0.1)

    proxy.reset()
    proxy.heal()

    eventually(lambda: keys_of(masters)[2] == [], in_time(1000))


def test_a_clean_up_that_was_lost_goes_out_before_the_next_call(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy])
    occupy([masters[0], masters[1]], "res")
    proxy.up.change = lambda data: data.partition(b"*5")[0]
    assert client.acquire("res", HOUR) is None
    eventually(lambda: keys_of(masters)[2] == [b"res"])
    time.sleep(0.1)
    proxy.reset()
    proxy.heal()

    client.locked("other")

    eventually(lambda: keys_of(masters)[2] == [], in_time(1000))


def test_a_master_that_restarts_with_its_keys_is_cleaned(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters)
    lock = client.acquire("res", HOUR)
    assert lock
    all_have(masters, "res", lock.token)
    restart = threading.Thread(target=lambda: masters.restart(2, keep_data=True))
    restart.start()

    assert client.release(lock) is True

    restart.join()
    eventually(lambda: not client.locked("other") and are_clean(masters))


def test_close_pays_what_can_be_paid(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy], master_timeout=NT)
    occupy([masters[0], masters[1]], "res")
    proxy.up.delay_ms = 50
    assert client.acquire("res", HOUR) is None

    client.close()

    eventually(lambda: keys_of(masters) == [[b"res"], [b"res"], []])
    time.sleep(0.2)
    assert keys_of(masters)[2] == []


def test_close_pays_over_a_new_connection(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    """The old one broke; the master can be reached again within `master_timeout`."""
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy])
    lock = client.acquire("res", HOUR)
    assert lock
    all_have(masters, "res", lock.token)
    proxy.refusing = True
    proxy.reset()
    assert client.release(lock) is True
    assert state_of(client, 2)["debts"] == 1

    healer = threading.Timer(0.1, proxy.heal)
    healer.start()
    client.close()
    healer.join()

    eventually(lambda: are_clean(masters), in_time(100))


def test_an_idle_client_has_no_janitor(client: Redlock, masters: LocalMasters) -> None:
    for _ in range(20):
        lock = client.acquire("res", HOUR)
        assert lock
        assert client.release(lock)
    eventually(lambda: are_clean(masters))
    eventually(lambda: janitors() == 0)


def test_a_dead_master_keeps_one_janitor_only(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters)
    locks = [client.acquire(f"res:{i}", HOUR) for i in range(20)]
    assert all(locks)
    eventually(lambda: [len(keys) for keys in keys_of(masters)] == [20] * 3)
    masters.kill(2)
    for lock in locks:
        assert lock
        assert client.release(lock)
    eventually(lambda: janitors() == 1)  # which may still be starting
    assert state_of(client, 2)["debts"] == 20
    masters.restart(2)
    eventually(lambda: janitors() == 0)


def test_a_held_lock_survives_a_broken_connection(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    """Debts are of abandoned tries, never of a lock that is held."""
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies, master_timeout=NT)
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock
    all_have(masters, "res", lock.token)
    for _ in range(3):
        for proxy in proxies:
            proxy.reset()
        time.sleep(0.05)
        assert client.acquire("res", HOUR, wait=200) is None
    all_have(masters, "res", lock.token)
    assert client.owned(lock)
    assert client.release(lock)
    eventually(lambda: are_clean(masters))


def test_a_lost_grant_of_a_held_lock_is_no_debt(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    """The third master's reply is lost with its connection; the lock goes on being held there."""
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy])
    broken: list[Proxy] = []
    _break_after_the_set(proxy, broken)
    lock = client.acquire("res", HOUR)
    assert lock
    all_have(masters, "res", lock.token)
    eventually(lambda: broken)

    assert client.extend(lock)
    time.sleep(0.1)
    assert client.owned(lock)

    all_have(masters, "res", lock.token)
    assert client.release(lock)
    eventually(lambda: are_clean(masters))


def test_a_lapsed_debt_is_forgotten(make_fake: MakeFake, make_client: MakeClient) -> None:
    """A fake that never answers a SET keeps nothing busy once it is gone."""
    fakes = [make_fake(lambda c, _: SILENCE if c[0] == b"SET" else PASS) for _ in range(3)]
    client = make_client(fakes, master_timeout=30)
    for _ in range(5):
        with pytest.raises(NoQuorum):
            client.acquire("res", 1000)
    assert all(row["owed"] <= 30 for row in client.stats()["masters"])


def test_each_master_gets_its_clean_up_on_the_same_connection_behind_the_set(
    make_fake: MakeFake, make_client: MakeClient
) -> None:
    fakes = [make_fake(lambda c, _: SILENCE if c[0] == b"SET" else PASS) for _ in range(3)]
    client = make_client(fakes, master_timeout=NT)

    with pytest.raises(NoQuorum):
        client.acquire("res", HOUR)

    for fake in fakes:
        eventually(lambda f=fake: f.named("EVALSHA", "EVAL"))  # type: ignore[misc]
        talk = fake.talks[0]
        set_, delete = (c for c in talk.received if c[0] in (b"SET", b"EVALSHA", b"EVAL"))
        assert set_[0] == b"SET"
        assert delete[3:5] == set_[1:3]


def test_quickly_taken_and_released_by_five(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    """Nothing is left behind by stragglers, however they are interleaved."""
    masters = taught(make_local_masters(5))
    client = make_client(masters)
    for i in range(300):
        lock = client.acquire(f"res:{i % 3}", HOUR)
        assert lock
        if i % 7 == 0:
            assert client.acquire(f"res:{i % 3}", HOUR) is None
        assert client.release(lock)
    eventually(lambda: are_clean(masters))
