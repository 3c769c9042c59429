"""Masters over TLS: real handshakes and records, cut, held and refused, under all that may happen.

`make_tls_front` puts a TLS server before a real master or a fake one.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import signal
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from integration.certs import Certs
from integration.fakes import PASS, RESET, MakeFake, MakeProxy, Talk
from integration.helpers import (
    HOUR,
    NT,
    PATIENT,
    SLACK_MS,
    Child,
    MakeClient,
    Stopwatch,
    all_have,
    are_clean,
    descriptors,
    eventually,
    fails_with,
    in_child,
    outcomes,
    pair,
    ready,
    run_script,
    state_of,
    taught,
)
from integration.tls_front import MakeTlsFront, TlsFront

from redlock_fast import NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

TLS12, TLS13 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
VERSIONS = pytest.mark.parametrize("version", [TLS12, TLS13], ids=["1.2", "1.3"])


@pytest.fixture
def make_fronts(make_tls_front: MakeTlsFront, masters: LocalMasters) -> Callable[..., Any]:
    def make(**options: Any) -> list[TlsFront]:
        return [make_tls_front(master, **options) for master in masters]

    return make


# -- lives -------------------------------------------------------------------------------------


@VERSIONS
def test_a_life_over_tls(
    make_fronts: Any, masters: LocalMasters, make_client: MakeClient, version: Any
) -> None:
    fronts = make_fronts(version=version)
    client = make_client(fronts)
    for _ in range(3):
        lock = client.acquire("res", HOUR)
        assert lock
        all_have(masters, "res", lock.token)
        assert client.extend(lock)
        assert client.owned(lock)
        assert client.locked("res")
        assert client.acquire("res", HOUR) is None
        assert client.release(lock)
        eventually(lambda: are_clean(masters))
    assert {v for front in fronts for v in front.versions} == {version.name.replace("v1_", "v1.")}
    assert [front.accepted for front in fronts] == [1] * len(fronts)


def test_a_batch_over_tls(make_fronts: Any, masters: LocalMasters, make_client: MakeClient) -> None:
    fronts = make_fronts()
    client = make_client(fronts, master_timeout=5 * PATIENT)
    names = [f"res {i}" for i in range(3000)]
    locks = [lock for lock in client.acquire_many(names, HOUR) if lock]
    assert len(locks) == 3000
    assert client.extend_many(locks) == [True] * 3000
    assert client.release_many(locks) == [True] * 3000
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C92")
@pytest.mark.parametrize("shape", ["tiny records", "bytes", "one record", "ticket"])
def test_c92_records_of_any_shape(
    make_fronts: Any, masters: LocalMasters, make_client: MakeClient, shape: str
) -> None:
    fronts = make_fronts(version=TLS13, tickets=2)
    for front in fronts:
        if shape == "tiny records":
            front.record_size = 1
        elif shape == "bytes":
            front.piece_size = 1
        elif shape == "one record":
            front.down.gather_ms = 20
        else:
            front.hold_tickets = True
    client = make_client(fronts, connect_timeout=20_000)
    names = [f"res {i}" for i in range(10)]
    locks: list[Any] = []
    with Stopwatch() as watch:
        threads = [
            threading.Thread(target=lambda n=name: locks.append(client.acquire(n, HOUR)))
            for name in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(locks) == 10
    assert all(locks)
    # Two rounds of a connection at most, and nothing waits until somebody looks by chance.
    assert watch.ms < SLACK_MS
    assert client.release_many(locks) == [True] * 10
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C92")
@pytest.mark.parametrize("first", range(1, 5))
def test_c92_the_rest_of_a_reply_in_a_later_record(
    make_tls_front: MakeTlsFront, make_fake: MakeFake, first: int
) -> None:
    """However little it is, who waits is woken; not by the regular tick, which is off here."""

    def answer(command: list[bytes], talk: Talk) -> Any:
        said = fake.behave(command)
        return [said[:first], 0.05, said[first:]] if command[0] == b"SET" else said

    fake = make_fake(answer)
    with Redlock([make_tls_front(fake).url], master_timeout=5000, retries=0) as client:
        client.connect()
        client._driver.pump.tick_ns = 10**12
        with Stopwatch() as watch:
            pair(client)
        assert watch.ms < 4 * SLACK_MS


@pytest.mark.case("C92")
def test_c92_an_answer_of_40_kilobytes(
    make_tls_front: MakeTlsFront, make_fake: MakeFake, make_client: MakeClient
) -> None:
    def answer(command: list[bytes], talk: Talk) -> Any:
        if command[0] == b"SET" and command[1] == b"long":
            return b"-ERR " + b"x" * 40_000 + b"\r\n"
        return fake.behave(command)

    fake = make_fake(answer)
    client = make_client([make_tls_front(fake)])
    with pytest.raises(NoQuorum, match="x" * 100), Stopwatch() as watch:
        client.acquire("long", HOUR)
    assert watch.ms < SLACK_MS
    pair(client, wait=5000)
    assert state_of(client, 0)["reconnects"] == 0


@pytest.mark.parametrize(
    "form",
    ["url", "dict", "redis.Redis", "redis.asyncio.Redis", "valkey.Valkey", "valkey.asyncio.Valkey"],
)
def test_every_form_of_a_master(
    make_fronts: Any, make_client: MakeClient, certs: Certs, form: str
) -> None:
    """With a certificate of the client's, which the server wants to see."""
    fronts = make_fronts(client_certs=True)
    keywords = {"ssl_certfile": certs.client.cert, "ssl_keyfile": certs.client.key}
    places: list[Any] = [certs.url(front.port, **keywords) for front in fronts]
    if form != "url":
        more = {"host": "127.0.0.1", "ssl": True, "ssl_ca_certs": certs.ca, **keywords}
        places = [{"port": front.port, **more} for front in fronts]
    if "." in form:
        module, _, name = form.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        places = [kind(**place) for place in places]
    client = make_client(places)
    pair(client)
    eventually(lambda: all(ready(client, i) for i in range(len(fronts))))


# -- who is who --------------------------------------------------------------------------------


@pytest.mark.case("C64")
@pytest.mark.parametrize("who", ["other", "expired", "stranger"])
def test_c64_certificates_are_checked(
    make_tls_front: MakeTlsFront,
    masters: LocalMasters,
    make_client: MakeClient,
    certs: Certs,
    who: str,
) -> None:
    front = make_tls_front(masters[2], identity=getattr(certs, who))
    client = make_client([*masters.urls[:2], front.url])
    eventually(lambda: fails_with(client, 2, "CONFIG"))
    assert "the server's certificate was refused" in state_of(client, 2)["cause"]
    assert front.down.passed == 0

    trusting = make_client(
        [*masters.urls[:2], f"rediss://127.0.0.1:{front.port}?ssl_cert_reqs=none"]
    )
    eventually(lambda: ready(trusting, 2))
    if who == "other":
        for off in ("false", "0", "no"):
            url = certs.url(front.port, ssl_check_hostname=off)
            careless = make_client([*masters.urls[:2], url])
            eventually(lambda c=careless: ready(c, 2))  # type: ignore[misc]


def test_names_are_told_and_checked(
    make_tls_front: MakeTlsFront,
    masters: LocalMasters,
    make_client: MakeClient,
    certs: Certs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import socket

    def look_up(host: Any, port: Any, *args: Any, **keywords: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    front = make_tls_front(masters[0], identity=certs.names)
    for host, good in [
        ("redis.example", True),
        ("any.wild.example", True),
        ("localhost", True),
        ("wrong.example", False),
    ]:
        client = make_client([certs.url(front.port, host)], warm=False)
        if good:
            pair(client, wait=5000)
        else:
            with pytest.raises(NoQuorum, match=r"wrong\.example"):
                client.acquire("res", HOUR, wait=1000)
        assert front.server_names[-1] == host


@VERSIONS
def test_client_certificates(
    make_tls_front: MakeTlsFront,
    masters: LocalMasters,
    make_client: MakeClient,
    certs: Certs,
    version: Any,
) -> None:
    front = make_tls_front(masters[0], client_certs=True, version=version)
    stranger = make_client([front], warm=False)
    with pytest.raises(NoQuorum) as caught:
        stranger.acquire("res", HOUR, wait=500)
    assert outcomes(caught.value)[0] in ("CONFIG", "closed")
    url = certs.url(front.port, ssl_certfile=certs.client.cert, ssl_keyfile=certs.client.key)
    pair(make_client([url], warm=False), wait=5000)


# -- ports that do not speak it ----------------------------------------------------------------


@pytest.mark.case("C63")
@pytest.mark.parametrize("what", ["plain", "silent", "half way", "http"])
def test_c63_tls_is_expected_and_does_not_come(
    masters: LocalMasters,
    make_tls_front: MakeTlsFront,
    make_fake: MakeFake,
    make_client: MakeClient,
    certs: Certs,
    what: str,
) -> None:
    port = masters[2].port
    if what in ("silent", "half way"):
        front = make_tls_front(masters[2])
        front.silent_after = 0 if what == "silent" else 300
        port = front.port
    elif what == "http":
        port = make_fake(greeting=b"HTTP/1.1 400 Bad Request\r\n\r\n").port
    client = make_client(
        [*masters.urls[:2], certs.url(port)], warm=False, master_timeout=NT, connect_timeout=300
    )
    with Stopwatch() as watch:
        for _ in range(20):
            pair(client)
    assert watch.ms < 3 * NT + SLACK_MS
    kind = "PROTO" if what == "http" else "timeout"
    eventually(lambda: fails_with(client, 2, kind))
    assert "TLS" in state_of(client, 2)["cause"]


@pytest.mark.case("C63")
def test_c63_tls_comes_unexpected(
    masters: LocalMasters, make_tls_front: MakeTlsFront, make_client: MakeClient
) -> None:
    front = make_tls_front(masters[2])
    client = make_client([*masters.urls[:2], f"redis://127.0.0.1:{front.port}"], warm=False)
    # OpenSSL says goodbye with an alert, or without a word; tests/unit/test_link.py has the alert.
    eventually(lambda: fails_with(client, 2, "PROTO") or fails_with(client, 2, "closed"))


@pytest.mark.case("C158")
@pytest.mark.parametrize("what", ["certificate", "version", "plain"])
def test_c158_200_failed_handshakes_leave_nothing(
    masters: LocalMasters,
    make_tls_front: MakeTlsFront,
    make_fake: MakeFake,
    make_client: MakeClient,
    certs: Certs,
    what: str,
) -> None:
    front = make_tls_front(masters[0], identity=certs.stranger)
    url = certs.url(front.port)
    if what == "version":
        front = make_tls_front(masters[0], version=TLS12)
        url = certs.url(front.port, ssl_min_version=str(int(TLS13)))
    elif what == "plain":
        url = certs.url(make_fake(lambda *_: b"-ERR what?\r\n").port)
    client = make_client([url], warm=False, master_timeout=20, connect_timeout=200)
    before = descriptors()
    for _ in range(200):
        with pytest.raises(NoQuorum):
            client.acquire("res", HOUR)
    client.close()
    eventually(lambda: len(descriptors()) <= len(before))
    eventually(lambda: front.open == 0)


# -- broken, hung, back again ------------------------------------------------------------------


def test_a_reset_anywhere_in_the_handshake(
    make_tls_front: MakeTlsFront,
    make_proxy: MakeProxy,
    masters: LocalMasters,
    make_client: MakeClient,
    certs: Certs,
) -> None:
    front = make_tls_front(masters[0])
    proxy = make_proxy(front)

    def cut_after(limit: int) -> Callable[[bytes], Any]:
        seen = 0

        def cut(data: bytes) -> Any:
            nonlocal seen
            seen += len(data)
            return RESET if seen > limit else data

        return cut

    for limit in (0, 1, 60, 300, 700, 1200):
        proxy.down.change = cut_after(limit)
        client = make_client([certs.url(proxy.port)], warm=False)
        with pytest.raises(NoQuorum):
            client.acquire("res", HOUR)
        proxy.heal()
        pair(client, wait=5000)
        client.close()
    assert are_clean(masters)


@pytest.mark.parametrize("tls", [True, False])
def test_few_short_calls_get_a_slow_connectionready(
    masters: LocalMasters, make_fake: MakeFake, make_tls_front: MakeTlsFront, tls: bool
) -> None:
    """Each is over before that master has answered once; and nobody looks in between."""
    fake = make_fake(lambda command, talk: [0.02, PASS])
    places = [*masters.urls[:2], make_tls_front(fake).url if tls else fake.url]
    with Redlock(places, connect_timeout=100, master_timeout=NT, retries=0) as client:

        def call() -> bool:
            # Without a release: with one, there is the janitor for a second.
            client.acquire(f"res {time.monotonic()}", 1000)
            time.sleep(0.2)
            return bool(state_of(client, 2)["state"] == "ready")

        eventually(call, 20)


def test_masters_over_tls_hang_die_and_come_back(
    make_local_masters: MakeLocalMasters, make_tls_front: MakeTlsFront, make_client: MakeClient
) -> None:
    masters = taught(make_local_masters(3))
    fronts = [make_tls_front(master) for master in masters]
    client = make_client(fronts, master_timeout=NT)
    fronts[0].down.holding = True  # silent
    for _ in range(20):
        pair(client, wait=5000)
    fronts[0].heal()
    eventually(lambda: ready(client, 0))
    masters.kill(1)
    for _ in range(20):
        pair(client, wait=5000)
    masters.restart(1)
    eventually(lambda: ready(client, 1))
    fronts[2].reset()
    pair(client, wait=5000)
    eventually(lambda: ready(client, 2))
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C11")
def test_c11_what_was_unanswered_is_cleaned_up(
    make_fronts: Any, masters: LocalMasters, make_client: MakeClient
) -> None:
    fronts = make_fronts()
    client = make_client(fronts, master_timeout=NT)
    for master in list(masters)[:2]:
        master.command("SET", "res", "rival", "PX", HOUR)
    fronts[2].down.holding = True
    with contextlib.suppress(NoQuorum):
        assert client.acquire("res", HOUR) is None
    eventually(lambda: masters[2].keys() == [])


def test_close_pays_debts_over_tls(
    make_fronts: Any, masters: LocalMasters, make_client: MakeClient
) -> None:
    fronts = make_fronts()
    client = make_client(fronts)
    locks = [lock for lock in client.acquire_many([f"res {i}" for i in range(100)], HOUR) if lock]
    assert client.release_many(locks) == [True] * 100
    client.close()
    assert are_clean(masters)
    eventually(lambda: [front.open for front in fronts] == [0] * len(fronts))


# -- threads, signals, forks, the end ----------------------------------------------------------


@VERSIONS
def test_many_threads_over_tls(
    make_fronts: Any, masters: LocalMasters, make_client: MakeClient, version: Any
) -> None:
    client = make_client(make_fronts(version=version), master_timeout=20_000)
    inside = [0]
    wrong: list[str] = []
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(25):
                own = client.acquire(f"own {i}", HOUR)
                assert own
                with client.lock("shared", HOUR, wait=60_000):
                    inside[0] += 1
                    if inside[0] != 1:
                        wrong.append(f"{inside[0]} inside")
                    inside[0] -= 1
                assert own.release()
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert not wrong
    eventually(lambda: are_clean(masters))
    assert [state_of(client, i)["reconnects"] for i in range(len(masters))] == [0] * len(masters)


class _Rung(Exception):
    pass


def test_interrupted_calls_leave_no_key(
    make_fronts: Any, masters: LocalMasters, make_client: MakeClient
) -> None:
    """`ssl` runs signal handlers in the middle of its work."""
    client = make_client(make_fronts(), master_timeout=5000)
    dice = random.Random(1)
    rung = 0
    armed = False

    def ring(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise _Rung

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for turn in range(400):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 3e-3))
                with client.lock(f"res {turn}", HOUR, wait=20_000):
                    pass
                armed = False
            except _Rung:
                rung += 1
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rung > 40
    pair(client, wait=5000)
    eventually(lambda: are_clean(masters), 20)


def test_forked_children_shake_hands_for_themselves(
    make_fronts: Any, masters: LocalMasters, make_client: MakeClient
) -> None:
    """C72, C73: the parent's TLS goes on where it was, and hears no goodbye."""
    fronts = make_fronts()
    client = make_client(fronts)
    pair(client)
    kept = client.acquire("kept", HOUR)
    assert kept

    def work() -> None:
        for _ in range(10):
            pair(client, wait=5000)
        client.close()

    for _ in range(4):
        child = Child(work)
        pair(client, wait=20_000)
        child.join()
    assert kept.extend()
    assert kept.release()
    assert [state_of(client, i)["reconnects"] for i in range(len(masters))] == [0] * len(masters)
    assert [front.handshakes for front in fronts] == [5] * len(fronts)


def test_a_fork_in_the_middle_of_a_handshake(
    make_fronts: Any, masters: LocalMasters, make_client: MakeClient
) -> None:
    fronts = make_fronts()
    for front in fronts:
        front.silent_after = 100
    client = make_client(fronts, warm=False, master_timeout=NT)
    with pytest.raises(NoQuorum):
        client.acquire("res", HOUR)
    for front in fronts:
        front.silent_after = None
    in_child(lambda: pair(client, wait=5000))
    pair(client, wait=5000)


@pytest.mark.parametrize("module", ["redlock_fast", "redlock_fast.asyncio"])
def test_the_end_of_a_process(make_fronts: Any, module: str) -> None:
    done = run_script(
        f"""
import asyncio, sys
from {module} import Redlock
async def use():
    client = Redlock(sys.argv[1:], master_timeout=5000)
    found = client.acquire("res", 1000)
    lock = await found if hasattr(found, "__await__") else found
    print(bool(lock))
asyncio.run(use())
""",
        *[front.url for front in make_fronts()],
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


@pytest.mark.case("C151")
def test_c151_secrets_stay_secret(
    make_local_masters: MakeLocalMasters,
    make_tls_front: MakeTlsFront,
    make_client: MakeClient,
    certs: Certs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    masters = make_local_masters(1, password="other")
    front = make_tls_front(masters[0])
    stranger = make_tls_front(masters[0], identity=certs.stranger)
    for port in (front.port, stranger.port, masters[0].port):
        url = certs.url(port).replace("rediss://", "rediss://:S3cr3t!@")
        client = make_client([url], warm=False)
        with pytest.raises(NoQuorum) as caught:
            client.acquire("res", HOUR, wait=300)
        said = f"{caught.value!r} {caught.value} {caught.value.reports} {client.stats()} {client!r}"
        assert "S3cr3t" not in said
    assert "S3cr3t" not in caplog.text
