"""Other ways to a master: unix sockets, IPv6, users and databases."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from integration.helpers import (
    HOUR,
    NT,
    MakeClient,
    all_have,
    are_clean,
    eventually,
    outcomes,
    state_of,
    taught,
)

from redlock_fast import NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters


def _live_a_life(client: Redlock, masters: LocalMasters) -> None:
    for _ in range(3):
        lock = client.acquire("res", HOUR)
        assert lock
        all_have(masters, "res", lock.token)
        assert client.extend(lock)
        assert client.owned(lock)
        assert client.acquire("res", HOUR) is None
        assert client.release(lock)
        eventually(lambda: are_clean(masters))


# -- unix sockets ------------------------------------------------------------------------------


@pytest.mark.parametrize("password", [None, "S3cr3t!/:@"])
@pytest.mark.parametrize("form", ["url", "dict", "client"])
def test_unix_sockets(
    make_local_masters: MakeLocalMasters, make_client: MakeClient, password: Any, form: str
) -> None:
    masters = make_local_masters(3, unix=True, password=password)
    places: list[Any] = masters.urls
    if form != "url":
        places = [{"unix_socket_path": p, "password": password} for p in masters.addresses]
    if form == "client":
        redis = pytest.importorskip("redis")
        places = [redis.Redis(**place) for place in places]
    client = make_client(places)
    assert state_of(client, 0)["address"] == f"unix:{masters.addresses[0]}"
    _live_a_life(client, taught(masters))


def test_unix_sockets_go_and_come_back(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = taught(make_local_masters(3, unix=True))
    client = make_client(masters, master_timeout=NT)
    masters.kill(0)
    masters.pause(1)
    with pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)
    assert outcomes(caught.value)[0] in ("closed", "refused")
    masters.restart(0)
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock
    assert client.release(lock)
    masters.resume(1)
    eventually(lambda: are_clean(masters))


def test_a_unix_socket_that_is_not_there(tmp_path: Path, make_client: MakeClient) -> None:
    (tmp_path / "file").write_text("no socket")
    paths = ["missing", "file", "no/such/folder"]
    client = make_client([f"unix://{quote(str(tmp_path / p))}" for p in paths], warm=False)
    with pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)
    assert set(outcomes(caught.value)) <= {"refused", "unanswered"}
    assert str(tmp_path) in str(caught.value)


# -- ipv6 --------------------------------------------------------------------------------------


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
@pytest.mark.parametrize("form", ["url", "dict"])
def test_ipv6(make_local_masters: MakeLocalMasters, make_client: MakeClient, form: str) -> None:
    masters = taught(make_local_masters(3, args=["--bind", "127.0.0.1", "::1"]))
    places: list[Any] = [f"redis://[::1]:{port}/0" for port in masters.ports]
    if form == "dict":
        places = [{"host": "::1", "port": port} for port in masters.ports]
    client = make_client(places)
    assert state_of(client, 0)["address"] == f"[::1]:{masters.ports[0]}"
    _live_a_life(client, masters)
    client = make_client(places, master_timeout=NT)
    masters.kill(0)
    masters.kill(1)
    with pytest.raises(NoQuorum, match=r"\[::1\]:"):
        client.acquire("res", HOUR)


def test_the_name_localhost(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client([f"redis://localhost:{port}" for port in masters.ports])
    _live_a_life(client, masters)


# -- users and databases -----------------------------------------------------------------------


def _add_user(masters: LocalMasters, *rules: str) -> None:
    for master in masters:
        assert master.command("ACL", "SETUSER", "app", "on", *rules) == b"OK"


@pytest.mark.parametrize("form", ["url", "dict", "client"])
def test_a_user_of_an_acl(masters: LocalMasters, make_client: MakeClient, form: str) -> None:
    _add_user(masters, ">pa ss/@:%", "~*", "+@all")
    places: list[Any] = [
        f"redis://app:{quote('pa ss/@:%', safe='')}@127.0.0.1:{port}/0" for port in masters.ports
    ]
    if form != "url":
        places = [
            {"host": "127.0.0.1", "port": port, "username": "app", "password": "pa ss/@:%"}
            for port in masters.ports
        ]
    if form == "client":
        redis = pytest.importorskip("redis")
        places = [redis.Redis(**place) for place in places]
    client = make_client(places)
    _live_a_life(client, masters)
    assert b"user=app" in masters[0].command("CLIENT", "LIST")


def test_a_user_without_a_password(masters: LocalMasters, make_client: MakeClient) -> None:
    _add_user(masters, "nopass", "~*", "+@all")
    client = make_client([f"redis://app:any@127.0.0.1:{port}" for port in masters.ports])
    _live_a_life(client, masters)


def test_a_password_of_bytes_that_are_no_text(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    for master in masters:
        master.command("ACL", "SETUSER", "app", "on", b">\xff\xfe", "~*", "+@all")
    client = make_client([f"redis://app:%FF%FE@127.0.0.1:{port}" for port in masters.ports])
    _live_a_life(client, masters)


@pytest.mark.parametrize("form", ["path", "query", "dict"])
def test_another_database(masters: LocalMasters, make_client: MakeClient, form: str) -> None:
    places: list[Any] = [f"redis://127.0.0.1:{port}/3" for port in masters.ports]
    if form == "query":
        places = [f"redis://127.0.0.1:{port}?db=3" for port in masters.ports]
    if form == "dict":
        places = [{"host": "127.0.0.1", "port": port, "db": 3} for port in masters.ports]
    client = make_client(places)
    plain = make_client(masters)

    lock = client.acquire("res", HOUR)

    assert lock
    assert are_clean(masters)  # database 0
    eventually(lambda: all(b"db3:keys=1" in m.command("INFO", "keyspace") for m in masters))
    assert plain.acquire("res", HOUR)  # another key
    assert client.extend(lock)
    # And after a reconnection, too.
    for master in masters:
        master.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert eventually(lambda: _is_extended(client, lock))
    assert client.release(lock)
    eventually(lambda: not any(b"db3" in m.command("INFO", "keyspace") for m in masters))


def _is_extended(client: Redlock, lock: Any) -> bool:
    try:
        return client.extend(lock)
    except NoQuorum:
        return False


def test_a_database_that_does_not_exist(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client([f"redis://127.0.0.1:{port}/999" for port in masters.ports])
    with pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)
    assert set(outcomes(caught.value)) <= {"CONFIG", "unanswered"}
    assert "CONFIG" in outcomes(caught.value)
    assert any("DB index" in report.cause for report in caught.value.reports)


def test_databases_of_one_server_may_vote(masters: LocalMasters, make_client: MakeClient) -> None:
    """They are different masters by their address; that it is unwise is another matter."""
    client = make_client([f"redis://127.0.0.1:{masters.ports[0]}/{db}" for db in range(3)])
    lock = client.acquire("res", HOUR)
    assert lock
    assert client.release(lock)


def test_a_client_name_is_set(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(
        [f"redis://127.0.0.1:{port}/0?client_name=locks" for port in masters.ports]
    )
    _live_a_life(client, masters)
    assert b"name=locks" in masters[0].command("CLIENT", "LIST")
