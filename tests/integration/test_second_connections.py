"""Second connections beside silent ones, what is killed on a server, aliases of one server."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from integration.fakes import PASS, RESET, MakeFake, MakeProxy, Talk
from integration.helpers import (
    HOUR,
    NT,
    PATIENT,
    SLACK_MS,
    MakeClient,
    Stopwatch,
    eventually,
    in_time,
    keys_of,
)

from redlock_fast import NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

RUN_ID = b"0123456789abcdef0123456789abcdef01234567"


def informed(answer: Callable[[list[bytes], Talk], object] | None = None, run_id: bytes = RUN_ID):
    """What a fake answers that knows INFO."""

    def answers(command: list[bytes], talk: Talk):
        if command[0] == b"INFO":
            text = b"# Server\r\nredis_version:7.0.0\r\nrun_id:%s\r\n" % run_id
            return b"$%d\r\n%s\r\n" % (len(text), text)
        if command[:2] == [b"CLIENT", b"ID"]:
            return b":%d\r\n" % (100 + talk.index)
        if command[:2] == [b"CLIENT", b"KILL"]:
            return b":1\r\n"
        return PASS if answer is None else answer(command, talk)

    return answers


# -- second connections ----------------------------------------------------------------------------


@pytest.mark.case("C42")
def test_c42_half_open_connections_are_replaced(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies, master_timeout=NT, retries=0)
    warm(client)
    for proxy in proxies:
        # These paths are dead for good, and say nothing; new connections are carried.
        dead = set(proxy._pairs)

        def swallow(data: bytes, proxy=proxy, old=proxy.accepted) -> bytes:
            return data if proxy.accepted > old else b""

        assert dead
        proxy.up.change = proxy.down.change = swallow
    with Stopwatch() as watch, pytest.raises(NoQuorum):
        client.acquire("res", HOUR)
    assert watch.ms < NT + 600

    lock = client.acquire("res:2", HOUR, wait=5000)

    assert lock
    assert lock.release()
    assert all(proxy.accepted >= 2 for proxy in proxies)
    eventually(lambda: all(proxy.open == 1 for proxy in proxies))


def test_the_silent_connection_carries_on_if_it_answers_first(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    warm(client)
    masters.pause(2)
    for i in range(5):
        assert client.acquire(f"res:{i}", HOUR)
    eventually(lambda: suspects(client, client.locked("res:0")) == [2])
    masters.resume(2)
    eventually(lambda: not suspects(client, client.locked("res:0")))
    assert client.stats()["masters"][2]["state"] == "ready"
    eventually(lambda: masters[2].command("INFO", "clients").count(b"connected_clients:2") == 1)


def warm(client: Redlock) -> None:
    lock = client.acquire("warm", HOUR)
    assert lock
    assert lock.release()


def suspects(client: Redlock, _asked: bool) -> list[int]:
    rows = client.stats()["masters"]
    return [i for i, row in enumerate(rows) if row["state"] == "suspect"]


def test_debts_of_the_silent_connection_go_to_the_second_one(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxy = make_proxy(masters[2])
    client = make_client([masters[0], masters[1], proxy], master_timeout=NT)
    lock = client.acquire("res", HOUR)
    assert lock
    eventually(lambda: keys_of(masters) == [[b"res"]] * 3)
    old = proxy.accepted
    proxy.up.change = lambda data: data if proxy.accepted > old else b""
    assert lock.release()
    assert masters[2].keys() == [b"res"]
    # The janitor sees to the rest: suspicion, a second connection, the deletion.
    eventually(lambda: not masters[2].keys(), in_time(NT + 2000))


# -- killing what a broken connection has left -----------------------------------------------------


def test_an_unanswered_set_is_killed_before_anything_else_is_sent(
    make_fake: MakeFake, make_client: MakeClient
) -> None:
    fakes = [make_fake(informed(run_id=RUN_ID[:-1] + b"%d" % i)) for i in range(2)]
    broken = make_fake(informed(lambda c, t: RESET if c[0] == b"SET" and t.index == 0 else PASS))
    client = make_client([*fakes, broken])
    lock = client.acquire("res", HOUR)
    assert lock
    eventually(lambda: client.acquire("x", 100) is not None and len(broken.talks) == 2)
    eventually(lambda: len(broken.talks[1].received) > 2)
    host, port = broken.talks[0].writer.get_extra_info("peername")[:2]
    after = broken.talks[1].received
    assert [c[0] for c in after[:2]] == [b"CLIENT", b"INFO"]
    assert after[2] == [
        b"CLIENT",
        b"KILL",
        b"ID",
        b"100",
        b"ADDR",
        b"%s:%d" % (host.encode(), port),
    ]


@pytest.mark.parametrize("what", ["answered", "another server", "no INFO"])
def test_nothing_is_killed_when(what: str, make_fake: MakeFake, make_client: MakeClient) -> None:
    fakes = [make_fake(informed(run_id=RUN_ID[:-1] + b"%d" % i)) for i in range(2)]

    def answer(command: list[bytes], talk: Talk):
        if command[0] == b"INFO" and what == "no INFO":
            return b"-NOPERM this user has no permissions to run the 'info' command\r\n"
        if command[0] == b"SET" and talk.index == 0 and what != "answered":
            return RESET
        if command[0] in (b"EVAL", b"EVALSHA") and talk.index == 0:
            return RESET
        run_id = RUN_ID if what != "another server" else b"%040d" % talk.index
        return informed(run_id=run_id)(command, talk)

    broken = make_fake(answer)
    client = make_client([*fakes, broken])
    lock = client.acquire("res", HOUR)
    assert lock
    eventually(lambda: len(broken.named("SET")) > 0)
    assert lock.release()

    # No SET is under way when the connection breaks under the deletion.
    def moved(done: Callable[[], bool]) -> bool:
        client.connect()
        return done()

    eventually(lambda: moved(lambda: len(broken.talks) >= 2))
    eventually(lambda: moved(lambda: len(broken.talks[1].received) > 2))
    assert [b"CLIENT", b"KILL"] not in [c[:2] for c in broken.received]
    assert not broken.data.get(b"res")


# -- aliases ---------------------------------------------------------------------------------------


@pytest.mark.case("C28")
def test_c28_one_server_under_two_addresses_is_never_two_votes(
    make_local_masters: MakeLocalMasters,
    make_proxy: MakeProxy,
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    masters = make_local_masters(2)
    alias = make_proxy(masters[0])
    client = make_client([masters[0], alias, masters[1]])
    client.connect()
    masters.kill(1)
    with pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR, wait=300)
    words = [report.outcome for report in caught.value.reports]
    assert words.count("granted") == 1
    assert "CONFIG" in words
    assert "same server" in str(caught.value)
    eventually(lambda: not masters[0].keys())
    assert "same server" in caplog.text
    # The alias answers each time it is dialled, which pays no debt of the dead one's.
    with Stopwatch() as watch:
        client.close()
    assert watch.ms < PATIENT + 2 * SLACK_MS


def test_two_databases_of_one_server_are_a_warning(
    make_local_masters: MakeLocalMasters,
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    masters = make_local_masters(2)
    url = masters.urls[0].rsplit("/", 1)[0]
    with caplog.at_level(logging.WARNING, "redlock_fast"):
        client = make_client([f"{url}/0", f"{url}/1", masters.urls[1]])
        warm(client)
        warm(client)
    assert caplog.text.count("same server") == 1
