"""Masters that cannot be used: what is said about it, what is not, and that nothing leaks."""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any

import pytest
from integration.fakes import PASS, MakeFake
from integration.helpers import (
    HOUR,
    LATE,
    NT,
    SLACK_MS,
    MakeClient,
    Stopwatch,
    are_clean,
    clients_of,
    closed_port,
    descriptors,
    eventually,
    occupy,
    outcomes,
    state_of,
    taught,
)

from redlock_fast import (
    ClosedError,
    ConfigurationError,
    LockLost,
    NoQuorum,
    NotAcquired,
    Redlock,
    RedlockError,
    Report,
)
from redlock_fast.testing import LocalMasters, MakeLocalMasters

HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
SECRET = "S3cr3t!/:@"
ESCAPED = "S3cr3t%21%2F%3A%40"
WRONG = "Wr0ng!/:@"
WRONG_ESCAPED = "Wr0ng%21%2F%3A%40"


def _assert_silent(text: str, *secrets: str) -> None:
    for secret in (SECRET, ESCAPED, WRONG, WRONG_ESCAPED, *secrets):
        assert secret not in text


# -- passwords ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["url", "dict", "client"])
def test_the_right_password(
    make_local_masters: MakeLocalMasters, make_client: MakeClient, form: str
) -> None:
    masters = make_local_masters(3, password=SECRET)
    places: list[Any] = masters.urls
    if form != "url":
        places = [{"host": "127.0.0.1", "port": p, "password": SECRET} for p in masters.ports]
    if form == "client":
        redis = pytest.importorskip("redis")
        places = [redis.Redis(**place) for place in places]
    client = make_client(places)

    lock = client.acquire("res", HOUR)

    assert lock
    assert client.release(lock)
    _assert_silent(f"{client!r} {client} {client.stats()} {lock!r}")


@pytest.mark.case("C54")
@pytest.mark.parametrize("form", ["url", "dict"])
def test_a_wrong_password_is_a_matter_of_configuration(
    make_local_masters: MakeLocalMasters,
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
    form: str,
) -> None:
    masters = make_local_masters(3, password=SECRET)
    if form == "url":
        places: list[Any] = [f"redis://:{WRONG_ESCAPED}@127.0.0.1:{p}/0" for p in masters.ports]
    else:
        places = [{"host": "127.0.0.1", "port": p, "password": WRONG} for p in masters.ports]
    texts = []
    with caplog.at_level(logging.DEBUG):
        client = make_client(places, warm=False, master_timeout=NT)
        for _ in range(5):
            with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
                client.acquire("res", HOUR)
            assert watch.ms < NT + SLACK_MS
            error = caught.value
            assert set(outcomes(error)) <= {"CONFIG", "unanswered"}
            assert outcomes(error).count("CONFIG") >= 2
            assert any("WRONGPASS" in report.cause for report in error.reports)
            texts += [str(error), repr(error), repr(error.reports), repr(error.__dict__)]
        with pytest.raises(NoQuorum):
            client.acquire("res", HOUR, wait=100)
        texts += [repr(client), str(client.stats())]
        assert all(row["errors"].keys() == {"CONFIG"} for row in client.stats()["masters"])
        assert max(clients_of(master) for master in masters) <= 2
        client.close()
        eventually(lambda: [clients_of(master) for master in masters] == [0] * 3)
    texts += [record.getMessage() for record in caplog.records] + [caplog.text]
    assert any("CONFIG" in text for text in texts)
    _assert_silent("\n".join(texts))
    assert masters.addresses[0] in texts[0]


def test_no_password_where_one_is_needed(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = make_local_masters(3, password=SECRET)
    client = make_client([f"redis://127.0.0.1:{port}" for port in masters.ports])

    with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)

    assert watch.ms < SLACK_MS
    assert set(outcomes(caught.value)) <= {"CONFIG", "NOAUTH", "unanswered"}
    assert any("NOAUTH" in report.cause for report in caught.value.reports)


def test_one_wrong_password_is_outvoted(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = make_local_masters(3, password=SECRET)
    wrong = f"redis://:{WRONG_ESCAPED}@127.0.0.1:{masters[2].port}/0"
    client = make_client([*masters.urls[:2], wrong])
    for _ in range(20):
        lock = client.acquire("res", HOUR)
        assert lock
        assert client.release(lock)
    row = state_of(client, 2)
    assert row["state"] != "ready"
    assert "WRONGPASS" in row["cause"]
    _assert_silent(str(client.stats()))


def test_a_configuration_error_is_not_hammered(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = make_local_masters(3, password=SECRET)
    wrong = f"redis://:{WRONG_ESCAPED}@127.0.0.1:{masters[2].port}/0"
    client = make_client([*masters.urls[:2], wrong])
    with Stopwatch() as watch:
        while watch_ms(watch) < 1000:
            lock = client.acquire("res", HOUR)
            assert lock
            assert client.release(lock)
    # From 10 ms doubling to 500 ms, less a random half: 12 in a second at the most.
    assert state_of(client, 2)["reconnects"] <= 15


def watch_ms(watch: Stopwatch) -> float:
    watch.__exit__()
    return watch.ms


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{ESCAPED}@127.0.0.1:99999/0",
        f"redis://:{ESCAPED}@127.0.0.1:6379/zero",
        f"redis://user:{ESCAPED}@127.0.0.1:6379/0?unknown=1",
        f"http://user:{ESCAPED}@127.0.0.1:6379/0",
        f"redis://:{SECRET}@127.0.0.1:6379/0",
        f"user:{SECRET}",
    ],
)
def test_a_bad_url_does_not_show_its_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(ConfigurationError) as caught:
        Redlock([url])
    error: BaseException | None = caught.value
    assert isinstance(error, ValueError)
    while error is not None:
        _assert_silent(f"{error} {error!r} {error.args}", "S3cr3t")
        error = error.__cause__ or error.__context__
    _assert_silent(caplog.text, "S3cr3t")


def test_a_token_is_nowhere_to_be_read(
    masters: LocalMasters, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        client = make_client(masters, master_timeout=NT)
        lock = client.acquire("res\r\n", HOUR, wait=5000)
        assert lock
        texts = [repr(lock), str(lock), repr(client), str(client.stats())]
        masters.pause(0)
        masters.pause(1)
        for call in (lambda: client.extend(lock), lambda: client.release(lock)):
            with pytest.raises(NoQuorum) as caught:
                call()
            texts += [str(caught.value), repr(caught.value), repr(caught.value.reports)]
        masters.resume(0)
        masters.resume(1)
        client.close()
    text = "\n".join([*texts, caplog.text])
    assert lock.token not in text
    assert lock.token[:20] not in text
    assert "\r" not in text


# -- what is no master -------------------------------------------------------------------------


@pytest.mark.case("C62")
def test_c62_a_port_that_speaks_http(
    masters: LocalMasters, make_fake: MakeFake, make_client: MakeClient
) -> None:
    fake = make_fake(lambda *_: HTTP)
    client = make_client([*masters.urls[:2], fake])

    for _ in range(50):
        lock = client.acquire("res", HOUR)
        assert lock
        assert client.release(lock)

    row = state_of(client, 2)
    assert row["errors"].keys() == {"PROTO"}
    assert "HTTP" in row["cause"]
    eventually(lambda: fake.open == 0)


@pytest.mark.case("C62")
def test_c62_nothing_but_http(make_fake: MakeFake, make_client: MakeClient) -> None:
    fakes = [make_fake(lambda *_: HTTP) for _ in range(3)]
    client = make_client(fakes, warm=False)

    for _ in range(8):
        with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
            client.acquire("res", HOUR)
        assert watch.ms < SLACK_MS
        assert set(outcomes(caught.value)) <= {"PROTO", "unanswered"}
    assert sum(fake.open for fake in fakes) <= 3
    client.close()
    eventually(lambda: not any(fake.open for fake in fakes))


@pytest.mark.parametrize(
    "greeting",
    [
        b"220 mail.example.org ESMTP\r\n",
        b"SSH-2.0-OpenSSH_9.7\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"\x00" * 100,
        b"+OK\r\n",
        b":1\r\n",
        b"-ERR max number of clients reached\r\n",
        b"-DENIED Redis is running in protected mode because\r\n",
        b"x" * 70_000,
    ],
)
def test_a_port_that_speaks_first(
    masters: LocalMasters, make_fake: MakeFake, make_client: MakeClient, greeting: bytes
) -> None:
    """It is of no use, whatever it says, and it says nothing about the others."""
    fake = make_fake(lambda *_: b"", greeting=greeting)
    client = make_client([*masters.urls[:2], fake], connect_timeout=200, master_timeout=NT)
    for _ in range(5):
        lock = client.acquire("res", HOUR, wait=5000)
        assert lock
        assert client.release(lock)
    client.close()
    eventually(lambda: fake.open == 0)


def test_bytes_that_nobody_asked_for(make_fake: MakeFake, make_client: MakeClient) -> None:
    """The link is closed before anything is booked wrongly."""
    fakes = [make_fake() for _ in range(3)]
    client = make_client(fakes)
    lock = client.acquire("res", HOUR)
    assert lock
    assert client.extend(lock)
    for fake in fakes:
        fake.data.clear()  # nobody has the lock any more
        fake.say(b":1\r\n")
    time.sleep(0.02)  # looked for after 5 ms of idleness

    assert eventually(lambda: client.owned(lock) is False)
    assert client.release(lock) is False


def test_a_hung_peer_is_left_after_connect_timeout(
    make_fake: MakeFake, make_client: MakeClient
) -> None:
    fake = make_fake(lambda *_: b"")
    client = make_client([fake], warm=False, master_timeout=NT, connect_timeout=300)
    words = set()
    for _ in range(6):
        with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
            client.acquire("res", HOUR)
        assert watch.ms <= NT + SLACK_MS
        words |= set(outcomes(caught.value))
    assert "connecting" in words
    assert words <= {"connecting", "timeout"}
    assert len(fake.talks) >= 2
    assert fake.open <= 2


# -- nothing leaks -----------------------------------------------------------------------------


def _bad_places(kind: str, make_fake: MakeFake, make_local_masters: MakeLocalMasters) -> list[Any]:
    if kind == "http":
        return [make_fake(lambda *_: HTTP)]
    if kind == "half a reply":
        return [make_fake(lambda *_: b":1")]
    if kind == "loading":
        return [make_fake(lambda *_: b"-LOADING Redis is loading the dataset in memory\r\n")]
    if kind == "silence":
        return [make_fake(lambda *_: b"")]
    masters = make_local_masters(1, password=SECRET)
    return [f"redis://:{WRONG_ESCAPED}@127.0.0.1:{masters[0].port}/0"]


@pytest.mark.case("C158")
@pytest.mark.parametrize(
    "kind", ["http", "half a reply", "loading", "silence", "wrong password", "closed port"]
)
@pytest.mark.parametrize("fresh", [pytest.param(True, marks=pytest.mark.slow), False])
def test_200_failures_leave_no_descriptor(
    make_fake: MakeFake,
    make_local_masters: MakeLocalMasters,
    make_client: MakeClient,
    kind: str,
    fresh: bool,
) -> None:
    with closed_port() as port:
        if kind == "closed port":
            places: list[Any] = [f"redis://127.0.0.1:{port}"]
        else:
            places = _bad_places(kind, make_fake, make_local_masters)
        settings = {"master_timeout": 5, "connect_timeout": 5}
        client = make_client(places, **settings)
        before = descriptors()
        for _ in range(200):
            if fresh:
                client.close()
                client = make_client(places, warm=False, **settings)
            with pytest.raises(NoQuorum):
                client.acquire("res", HOUR)
        client.close()
    eventually(lambda: len(_sockets(descriptors())) <= len(_sockets(before)))
    for place in places:
        eventually(lambda place=place: getattr(place, "open", 0) == 0)  # type: ignore[misc]


def _sockets(found: dict[str, str]) -> list[str]:
    return [name for name in found if name.startswith("socket")]


def test_200_lives_leave_no_descriptor(masters: LocalMasters) -> None:
    before = descriptors()
    for _ in range(200):
        with Redlock(masters.urls, master_timeout=2000) as client:
            lock = client.acquire("res", HOUR)
            assert lock
            assert client.release(lock)
        # Locks know their client.
        del lock, client
    eventually(lambda: descriptors().keys() <= before.keys())
    eventually(lambda: are_clean(masters))


def test_a_name_of_ten_megabytes_is_refused_within_a_moment(client: Redlock) -> None:
    for name in ("x" * 10**7, bytes(10**7)):
        with Stopwatch() as watch, pytest.raises(ValueError, match="too long") as caught:
            client.acquire(name, HOUR)
        assert watch.ms < SLACK_MS
        assert len(str(caught.value)) < 200
    assert client.acquire("res", HOUR)


# -- causes ------------------------------------------------------------------------------------


@pytest.mark.case("C163")
def test_c163_every_master_says_why(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = taught(make_local_masters(3))
    locked_up = make_local_masters(1, password=SECRET)
    wrong = f"redis://:{WRONG_ESCAPED}@127.0.0.1:{locked_up[0].port}/0"
    with closed_port() as port:
        refused = f"redis://127.0.0.1:{port}"
        client = make_client(
            [masters[0], masters[1], refused, masters[2], wrong], master_timeout=NT
        )
        occupy([masters[1]], "res")
        masters.pause(2)

        with pytest.raises(NoQuorum) as caught:
            client.acquire("res", HOUR)

        reports = caught.value.reports
        words = outcomes(caught.value)
        assert words[:3] == ["granted", "taken", "refused"]
        assert words[3] in LATE
        assert words[4] == "CONFIG"
        assert [report.address for report in reports] == [
            masters.addresses[0],
            masters.addresses[1],
            f"127.0.0.1:{port}",
            masters.addresses[2],
            locked_up.addresses[0],
        ]
        assert "refused" in reports[2].cause
        assert reports[3].cause
        assert "WRONGPASS" in reports[4].cause
        assert all(isinstance(report, Report) for report in reports)
        assert all(report.ms is not None and report.ms < 10_000 for report in reports[:2])
        assert all(report.ms is None for report in reports[2:])
        for report in reports:
            assert f"{report.address} {report.outcome}" in str(caught.value)
        stats = client.stats()
        assert (stats["acquired"], stats["contended"], stats["no_quorum"]) == (0, 0, 1)
        assert stats["masters"][2]["errors"].keys() == {"refused"}
        assert stats["masters"][4]["errors"].keys() == {"CONFIG"}
        masters.resume(2)


def test_errors_can_be_pickled() -> None:
    """They travel between processes, with all they carry."""
    report = Report("127.0.0.1:1", "refused", "why", None)
    for error in (
        NotAcquired("taken", [report]),
        NoQuorum("none", [report], [True, None]),
        LockLost("lost", "foreign"),
        ClosedError("closed"),
        ConfigurationError("bad"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__
        assert isinstance(again, RedlockError)


def test_trouble_and_recovery_are_logged_once_each(
    masters: LocalMasters, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(masters)
    with caplog.at_level(logging.INFO, "redlock_fast"):
        masters.kill(0)
        for _ in range(200):
            lock = client.acquire("res", HOUR, wait=2000)
            assert lock
            assert client.release(lock)
        masters.restart(0)

        def recovered() -> bool:
            lock = client.acquire("res", HOUR, wait=2000)
            assert lock
            assert client.release(lock)
            return any("answers again" in text for text in caplog.messages)

        eventually(recovered)
    about = [text for text in caplog.messages if masters.addresses[0] in text]
    assert len(about) == 2
    assert "fails" in about[0]
    assert "answers again" in about[1]


def test_a_master_that_does_not_know_client_is_fine(
    make_fake: MakeFake, make_client: MakeClient
) -> None:
    """CLIENT is optional: any answer proves life."""
    fakes = [
        make_fake(lambda c, _: b"-ERR unknown command 'CLIENT'\r\n" if c[0] == b"CLIENT" else PASS)
        for _ in range(3)
    ]
    client = make_client(fakes)
    lock = client.acquire("res", HOUR)
    assert lock
    assert client.extend(lock)
    assert client.release(lock)
    assert client.stats()["masters"][0]["errors"] == {}
