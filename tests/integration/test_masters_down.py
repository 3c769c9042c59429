"""Masters that are down, hung, or come back: who decides, how long it takes, what is reported."""

from __future__ import annotations

import logging
import time

import pytest
from integration.fakes import PASS, RESET, SILENCE, Answer, MakeFake, MakeProxy
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
    clients_of,
    closed_port,
    eventually,
    in_time,
    keys_of,
    occupy,
    outcomes,
    state_of,
    taught,
    values_of,
)

from redlock_fast import Lock, NoQuorum, NotAcquired, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters


def _acquire_soon(client: Redlock, name: str = "res") -> Lock:
    """Acquire, as soon as there is a quorum."""
    lock = client.acquire(name, HOUR, wait=5000)
    assert lock is not None
    return lock


# -- down --------------------------------------------------------------------------------------


@pytest.mark.case("C36")
def test_c36_one_master_down(masters: LocalMasters, make_client: MakeClient) -> None:
    with closed_port() as port:
        client = make_client([*masters.urls[:2], f"redis://127.0.0.1:{port}"])
        for _ in range(20):
            lock = client.acquire("res", HOUR)
            assert lock is not None
            assert client.extend(lock, HOUR)
            assert client.owned(lock)
            assert client.locked("res")
            assert client.release(lock)
    row = state_of(client, 2)
    assert row["address"] == f"127.0.0.1:{port}"
    assert row["errors"].keys() == {"refused"}
    assert "refused" in row["cause"]
    assert state_of(client, 0)["errors"] == {}


@pytest.mark.case("C37")
def test_c37_two_of_three_down_is_no_quorum(masters: LocalMasters, make_client: MakeClient) -> None:
    masters.kill(1)
    masters.kill(2)
    client = make_client(masters)

    with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)

    assert watch.ms < SLACK_MS  # nobody is waited for
    error = caught.value
    assert [report.address for report in error.reports] == masters.addresses
    assert outcomes(error)[1:] == ["refused", "refused"]
    assert all("refused" in report.cause for report in error.reports[1:])
    assert masters.addresses[1] in str(error)
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C37")
def test_c37_all_up_and_taken_is_contended(client: Redlock, masters: LocalMasters) -> None:
    occupy(masters, "res")
    assert client.acquire("res", HOUR) is None


@pytest.mark.case("C37")
def test_c37_one_down_one_taken_one_granted(masters: LocalMasters, make_client: MakeClient) -> None:
    occupy([masters[1]], "res")
    masters.kill(2)
    client = make_client(masters)

    with pytest.raises(NotAcquired) as caught, client.lock("res", HOUR):
        pytest.fail("the body ran")

    assert outcomes(caught.value) == ["granted", "taken", "refused"]
    eventually(lambda: keys_of(masters) == [[], [b"res"], []])


def test_closed_ports_only(make_client: MakeClient) -> None:
    with closed_port() as port:
        client = make_client([f"redis://127.0.0.1:{port}/{db}" for db in range(3)])
        for _ in range(10):
            with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
                client.acquire("res", HOUR)
            assert watch.ms < SLACK_MS
            # Two refusals settle it.
            words = outcomes(caught.value)
            assert set(words) <= {"refused", "unanswered"}
            assert words.count("refused") >= 2


def test_a_killed_master_comes_back(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters)
    assert client.release(_acquire_soon(client))
    masters.kill(0)
    for _ in range(10):
        lock = client.acquire("res", HOUR, wait=2000)
        assert lock
        assert client.release(lock)
    masters.restart(0)
    masters.kill(1)

    lock = _acquire_soon(client)  # needs the one that came back

    assert values_of([masters[0]], "res") == [lock.token.encode()]
    assert client.release(lock)
    assert state_of(client, 0)["reconnects"] >= 1
    assert state_of(client, 0)["state"] == "ready"


def test_all_masters_restart(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters)
    lock = _acquire_soon(client)
    for i in range(3):
        masters.restart(i)

    # Empty ones: nobody holds the lock any more.
    assert client.release(lock) is False
    lock = _acquire_soon(client)
    assert client.release(lock)


def test_a_broken_idle_connection_costs_nothing(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    """All connections are cut while nothing is under way: the next call just works."""
    client = make_client(masters)
    assert client.release(_acquire_soon(client))
    eventually(lambda: are_clean(masters))
    for _ in range(3):
        for master in masters:
            master.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        time.sleep(0.02)
        lock = client.acquire("res", HOUR)
        assert lock is not None
        for master in masters:
            master.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        time.sleep(0.02)
        assert client.release(lock)


@pytest.mark.case("C43")
def test_c43_the_server_closes_idle_connections(client: Redlock, masters: LocalMasters) -> None:
    for master in masters:
        master.command("CONFIG", "SET", "timeout", "1")

    def idle() -> None:
        eventually(lambda: [clients_of(master) for master in masters] == [1] * 3, 10)

    with Monitor(masters[0]) as one, Monitor(masters[1]) as two, Monitor(masters[2]) as three:
        idle()  # but for the monitors, nobody is connected
        lock = client.acquire("res", HOUR)
        assert lock is not None
        idle()
        assert client.release(lock)
        for monitor in (one, two, three):
            assert len(monitor.commands("SET")) <= 1
        sets = [monitor.commands("SET") for monitor in (one, two, three)]
        assert sum(map(len, sets)) >= 2


@pytest.mark.case("C43")
def test_c43_the_end_of_a_connection_that_was_only_opened_is_no_news(
    masters: LocalMasters, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(masters)
    with caplog.at_level(logging.WARNING, "redlock_fast"):
        for master in masters:
            master.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        time.sleep(0.02)
        assert client.acquire("res", HOUR)
    assert caplog.messages == []


# -- hung --------------------------------------------------------------------------------------


@pytest.mark.case("C38")
def test_c38_one_hung_master_delays_nobody(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, master_timeout=NT)
    assert client.release(_acquire_soon(client))
    masters.pause(2)

    times = []
    for _ in range(20):
        with Stopwatch() as watch:
            lock = client.acquire("res", 2000)
        times.append(watch.ms)
        assert lock is not None
        with Stopwatch() as watch:
            assert client.release(lock)
        times.append(watch.ms)
    assert max(times) <= NT + SLACK_MS
    assert sorted(times)[len(times) // 2] < NT / 2  # nobody waits for it
    masters.resume(2)
    # What it was sent is carried out, in order.
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C39")
def test_c39_release_does_not_wait_for_a_hung_master(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    lock = _acquire_soon(client)
    all_have(masters, "res", lock.token)
    masters.pause(2)

    with Stopwatch() as watch:
        assert client.release(lock) is True

    assert watch.ms <= NT + SLACK_MS
    eventually(lambda: are_clean(masters))  # of those that answer
    time.sleep(3 * NT / 1000)
    masters.resume(2)
    eventually(lambda: are_clean(masters), in_time(1000))


@pytest.mark.case("C40")
def test_c40_all_masters_hung(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, master_timeout=NT)
    held = _acquire_soon(client, "held")
    all_have(masters, "held", held.token)
    for i in range(3):
        masters.pause(i)

    with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR, wait=0)
    assert watch.ms <= NT + SLACK_MS
    assert set(outcomes(caught.value)) <= LATE
    with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR, wait=1000)
    assert 990 <= watch.ms <= 1000 + NT + SLACK_MS
    assert set(outcomes(caught.value)) == {"suspect"}
    with Stopwatch() as watch, pytest.raises(NoQuorum):
        client.release(held)
    assert watch.ms <= NT + SLACK_MS
    assert not held

    for i in range(3):
        masters.resume(i)
    eventually(lambda: are_clean(masters))
    lock = client.acquire("res", HOUR, wait=0)
    assert lock is not None
    assert client.release(lock)


def test_masters_that_never_answered(masters: LocalMasters, make_client: MakeClient) -> None:
    """Hung before the first connection: the kernel accepts, and nobody greets."""
    for i in range(3):
        masters.pause(i)
    client = make_client(masters, master_timeout=NT, connect_timeout=300, warm=False)

    for _ in range(4):
        with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
            client.acquire("res", HOUR)
        assert watch.ms <= NT + SLACK_MS
        # The third is not waited for when two handshakes have timed out.
        assert set(outcomes(caught.value)) <= {"connecting", "timeout", "unanswered"}
    for i in range(3):
        masters.resume(i)
    lock = _acquire_soon(client)
    assert client.release(lock)


def test_a_master_that_hangs_again_and_again(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    assert client.release(_acquire_soon(client))
    for turn in range(6):
        masters.pause(turn % 3)
        with Stopwatch() as watch:
            lock = _acquire_soon(client)
            assert client.release(lock)
        assert watch.ms <= 2 * NT + SLACK_MS
        masters.resume(turn % 3)
        eventually(lambda: are_clean(masters))


def test_a_minority_is_asked_again_as_soon_as_it_answers(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    lock = _acquire_soon(client)
    all_have(masters, "res", lock.token)
    masters.pause(1)
    masters.pause(2)
    with pytest.raises(NoQuorum):
        client.extend(lock, HOUR)
    assert lock.held
    masters.resume(1)

    # The suspect one is needed for a quorum, and answers.
    assert client.extend(lock, HOUR) is True
    masters.resume(2)


# -- every outcome -----------------------------------------------------------------------------


def _refusal(text: bytes) -> Answer:
    return b"-" + text + b"\r\n"


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (_refusal(b"LOADING Redis is loading the dataset in memory"), "LOADING"),
        (_refusal(b"BUSY Redis is busy running a script"), "BUSY"),
        (_refusal(b"OOM command not allowed when used memory > 'maxmemory'."), "OOM"),
        (_refusal(b"MISCONF Redis is configured to save RDB snapshots"), "MISCONF"),
        (_refusal(b"NOPERM this user has no permissions to run the 'set' command"), "NOPERM"),
        (_refusal(b"NOAUTH Authentication required."), "NOAUTH"),
        (_refusal(b"READONLY You can't write against a read only replica."), "READONLY"),
        (_refusal(b"MOVED 3999 127.0.0.1:6381"), "CONFIG"),
        (_refusal(b"CROSSSLOT Keys in request don't hash to the same slot"), "CONFIG"),
        (_refusal(b"CLUSTERDOWN The cluster is down"), "CLUSTERDOWN"),
        (_refusal(b"MASTERDOWN Link with MASTER is down"), "MASTERDOWN"),
        (_refusal(b"TRYAGAIN Multiple keys request during rehashing of slot"), "TRYAGAIN"),
        (_refusal(b"NOREPLICAS Not enough good replicas to write."), "NOREPLICAS"),
        (_refusal(b"ERR max number of clients reached"), "MAXCLIENTS"),
        (_refusal(b"ERR something else"), "ERR"),
        (_refusal(b"SOMETHING new"), "ERR"),
        (b"+QUEUED\r\n", "PROTO"),
        (b":1\r\n", "PROTO"),
        (b"$2\r\nOK\r\n", "PROTO"),
        (b"*0\r\n", "PROTO"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "PROTO"),
        (b"+OK\r\n+OK\r\n", "PROTO"),
        (RESET, "closed"),
        (SILENCE, "late"),
    ],
)
def test_every_outcome_has_its_word(
    make_fake: MakeFake, make_client: MakeClient, answer: Answer, word: str
) -> None:
    sound = make_fake()
    fakes = [make_fake(lambda c, _: answer if c[0] == b"SET" else PASS) for _ in range(2)]
    client = make_client([sound, *fakes], master_timeout=NT)

    with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)

    assert watch.ms < NT + SLACK_MS
    # Two failures settle it; who had not answered by then is "unanswered".
    expected = LATE if word == "late" else {word}
    words = outcomes(caught.value)
    assert words[0] in ("granted", "unanswered")
    assert set(words[1:]) <= expected
    assert all(report.cause for report in caught.value.reports[1:])
    assert (caught.value.reports[0].ms is not None) == (words[0] == "granted")
    eventually(lambda: sound.named("EVAL", "EVALSHA"))
    assert not sound.data


@pytest.mark.parametrize(
    "answer", [_refusal(b"OOM"), _refusal(b"LOADING"), b"$2\r\nOK\r\n", RESET, SILENCE]
)
def test_one_bad_answer_is_outvoted(
    masters: LocalMasters, make_fake: MakeFake, make_client: MakeClient, answer: Answer
) -> None:
    fake = make_fake(lambda c, _: answer if c[0] == b"SET" else PASS)
    client = make_client([masters[0], masters[1], fake], master_timeout=NT)
    for _ in range(5):
        lock = _acquire_soon(client)
        assert client.extend(lock)
        assert client.release(lock)
    eventually(lambda: are_clean(masters))


def test_a_refused_release_is_no_loss(make_fake: MakeFake, make_client: MakeClient) -> None:
    refuse = [False]
    fakes = [
        make_fake(
            lambda c, _: b"-MISCONF cannot persist\r\n" if refuse[0] and b"EVAL" in c[0] else PASS
        )
        for _ in range(3)
    ]
    client = make_client(fakes, master_timeout=NT)
    lock = _acquire_soon(client)
    assert client.extend(lock)
    refuse[0] = True

    with pytest.raises(NoQuorum) as caught:
        client.extend(lock)
    assert set(outcomes(caught.value)) <= {"MISCONF", "unanswered"}
    assert lock.held
    with pytest.raises(NoQuorum) as caught:
        client.release(lock)
    assert set(outcomes(caught.value)) <= {"MISCONF", "unanswered"}
    assert not lock.held
    refuse[0] = False
    assert client.release(lock) is True
    eventually(lambda: not any(fake.data for fake in fakes))


def test_a_master_that_answers_late_counts_for_later_rounds_only(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies, master_timeout=NT)
    assert client.release(_acquire_soon(client))
    for proxy in proxies[:2]:
        proxy.down.holding = True

    with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)
    assert watch.ms <= NT + SLACK_MS
    assert set(outcomes(caught.value)[:2]) <= LATE
    for proxy in proxies:
        proxy.heal()

    lock = _acquire_soon(client)
    assert client.release(lock)
    eventually(lambda: are_clean(masters))
    assert client.stats()["acquired"] == client.stats()["released"] == 2


def test_slow_masters_within_the_limit_are_no_trouble(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies)
    for i, proxy in enumerate(proxies):
        proxy.up.delay_ms = 10 * i
        proxy.down.delay_ms = 20
    for _ in range(5):
        lock = client.acquire("res", HOUR)
        assert lock
        assert client.extend(lock)
        assert client.release(lock)
    for proxy in proxies:
        proxy.heal()
    eventually(lambda: are_clean(masters))
    assert all(not row["errors"] for row in client.stats()["masters"])


def test_five_masters_survive_any_two(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = taught(make_local_masters(5))
    client = make_client(masters, master_timeout=NT)
    assert client.release(_acquire_soon(client))
    masters.kill(4)
    masters.pause(1)

    lock = _acquire_soon(client)

    assert client.extend(lock)
    assert client.release(lock)
    masters.kill(0)
    with pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)
    words = outcomes(caught.value)
    assert words[0] in ("closed", "refused")
    assert words[1] in LATE
    assert words[2:4] == ["granted", "granted"]
    assert words[4] == "refused"
    masters.resume(1)
    assert client.release(_acquire_soon(client))
    eventually(lambda: are_clean(masters))
