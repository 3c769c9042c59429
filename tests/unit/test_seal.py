"""TLS between link and wire: real handshakes, by hand, with a server that is an `SSLObject`."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.certs import Certs
from unit.world import (
    ACQUIRE,
    DOWN,
    GREETING,
    MS,
    NO_INFO,
    OK,
    READY,
    T0,
    YES,
    commands,
    make_fleet,
    resp,
)

from redlock_fast._core.fleet import Fleet
from redlock_fast._core.op import Op

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


class Server:
    """The other end of one connection: records in, records out."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.open = False

    def hear(self, records: bytes) -> bytes:
        """What they say; in the handshake that is nothing."""
        self.incoming.write(records)
        said = b""
        try:
            if not self.open:
                self.tls.do_handshake()
                self.open = True
            while part := self.tls.read(2**16):
                said += part
        except ssl.SSLWantReadError:
            pass
        return said

    def say(self, *texts: bytes) -> bytes:
        """Records to send, one for each text, behind what is still to be sent."""
        for text in texts:
            self.tls.write(text)
        return self.outgoing.read()


@pytest.fixture
def fleet_of(certs: Certs) -> Callable[..., Fleet]:
    """Makes a fleet of one TLS master; keywords are redis-py's."""

    def make(host: str = "127.0.0.1", **keywords: Any) -> Fleet:
        keywords.setdefault("ssl_ca_certs", certs.ca)
        return make_fleet(masters=[{"host": host, "port": 7001, "ssl": True, **keywords}])

    return make


def whole(data: bytes) -> list[bytes]:
    return [data]


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def meet(
    fleet: Fleet, server: Server, cut: Callable[[bytes], list[bytes]] = whole, now: int = T0
) -> bytes:
    """Shake hands; returns the first thing that the client says then."""
    fleet.dialing(0, now)
    fleet.connected(0, now)
    said = b""
    for _ in range(10):
        for part in cut(fleet.take(0)):
            said += server.hear(part)
        if said:
            return said
        for part in cut(server.say()):
            fleet.receive(0, part, now)
        if fleet.links[0].state == DOWN:
            return b""
    raise AssertionError("the handshake comes to no end")


def greet(fleet: Fleet, server: Server, cut: Callable[[bytes], list[bytes]] = whole) -> None:
    """Up to READY."""
    assert meet(fleet, server, cut) == resp("CLIENT", "ID")
    for answer in (b":7\r\n", NO_INFO):
        for part in cut(server.say(answer)):
            fleet.receive(0, part, T0)
        for part in cut(fleet.take(0)):
            server.hear(part)
    assert fleet.links[0].state == READY


def acquire(fleet: Fleet, count: int = 1, now: int = T0) -> Op:
    keys = [b"key:%d" % i for i in range(count)]
    op = Op(ACQUIRE, fleet.n, keys, [b"%040d" % i for i in range(count)], 1000)
    fleet.start(op, now)
    return op


@pytest.mark.parametrize("cut", [whole, bytewise])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_a_round_over_tls(fleet_of: Any, certs: Certs, version: Any, cut: Any) -> None:
    context = certs.server_context(version=version)
    fleet, server = fleet_of(), Server(context)
    greet(fleet, server, cut)
    op = acquire(fleet)
    records = fleet.take(0)
    assert b"key:0" not in records
    (command,) = commands(b"".join(map(server.hear, cut(records))))
    assert command[:2] == [b"SET", b"key:0"]
    assert not op.ended
    for part in cut(server.say(OK)):
        fleet.receive(0, part, T0)
    assert op.ended
    assert op.verdict() == YES


@pytest.mark.case("C92")
def test_c92_replies_in_one_record_and_one_in_many(fleet_of: Any, certs: Certs) -> None:
    fleet, server = fleet_of(), Server(certs.server_context())
    greet(fleet, server)
    first, second = acquire(fleet), acquire(fleet)
    assert len(commands(server.hear(fleet.take(0)))) == 2
    fleet.receive(0, server.say(OK + OK), T0)
    assert first.ended
    assert second.ended
    third = acquire(fleet)
    server.hear(fleet.take(0))
    text = b"-ERR " + b"x" * 40_000 + b"\r\n"
    fleet.receive(0, server.say(*(text[i : i + 3000] for i in range(0, len(text), 3000))), T0)
    assert third.ended
    batch = acquire(fleet, 200, T0 + 1000 * MS)
    server.hear(fleet.take(0))
    fleet.receive(0, server.say(OK * 200), T0 + 1000 * MS)
    assert batch.ended


@pytest.mark.case("C92")
def test_c92_a_ticket_right_before_the_reply(fleet_of: Any, certs: Certs) -> None:
    context = certs.server_context(version=ssl.TLSVersion.TLSv1_3, tickets=2)
    fleet, server = fleet_of(), Server(context)
    # The tickets are written when the server has the client's last word; they go out only with
    # what it says first.
    assert meet(fleet, server) == resp("CLIENT", "ID")
    records = server.say(b":7\r\n")
    assert len(records) > 400
    for part in bytewise(records):
        fleet.receive(0, part, T0)
    assert server.hear(fleet.take(0)) == resp("INFO", "server")


@pytest.mark.case("C64")
@pytest.mark.parametrize(
    ("keywords", "accepted"),
    [
        ({}, False),
        ({"ssl_check_hostname": False}, True),
        ({"ssl_check_hostname": "false"}, True),
        ({"ssl_cert_reqs": "none"}, True),
        ({"ssl_check_hostname": True}, False),
    ],
)
def test_c64_a_certificate_for_another_host(
    fleet_of: Any, certs: Certs, keywords: Any, accepted: bool
) -> None:
    fleet = fleet_of(**keywords)
    server = Server(certs.server_context(certs.other))
    meet(fleet, server)
    link = fleet.links[0]
    if accepted:
        assert link.state == GREETING
        return
    assert link.state == DOWN
    assert link.outcome == "CONFIG"
    assert link.cause.startswith("the server's certificate was refused: ")
    assert "127.0.0.1" in link.cause


@pytest.mark.case("C64")
def test_c64_a_certificate_of_unknown_origin(fleet_of: Any, certs: Certs) -> None:
    fleet = fleet_of(ssl_ca_certs=None)
    meet(fleet, Server(certs.server_context()))
    assert fleet.links[0].outcome == "CONFIG"
    assert "certificate was refused" in fleet.links[0].cause
    fleet = fleet_of(ssl_ca_certs=None, ssl_cert_reqs="none")
    assert meet(fleet, Server(certs.server_context()))


def test_a_server_that_wants_a_certificate(fleet_of: Any, certs: Certs) -> None:
    context = certs.server_context(version=ssl.TLSVersion.TLSv1_3, client_certs=True)
    fleet, server = fleet_of(), Server(context)
    with pytest.raises(ssl.SSLError):
        meet(fleet, server)
    # The client was done before the server was; it hears of it when it reads.
    fleet.receive(0, server.outgoing.read(), T0)
    assert fleet.links[0].outcome == "CONFIG"
    assert "certificate required" in fleet.links[0].cause

    fleet = fleet_of(ssl_certfile=certs.client.cert, ssl_keyfile=certs.client.key)
    greet(fleet, Server(context))


@pytest.mark.case("C63")
@pytest.mark.parametrize("answer", [b"-ERR unknown command\r\n", b"HTTP/1.1 400 Bad Request\r\n"])
def test_c63_a_port_that_speaks_no_tls(fleet_of: Any, answer: bytes) -> None:
    fleet = fleet_of()
    fleet.dialing(0, T0)
    fleet.connected(0, T0)
    assert fleet.take(0)
    fleet.receive(0, answer, T0)
    link = fleet.links[0]
    assert (link.state, link.outcome) == (DOWN, "PROTO")
    assert "does the port speak TLS?" in link.cause


@pytest.mark.case("C63")
def test_c63_a_port_that_is_silent(fleet_of: Any) -> None:
    fleet = fleet_of()
    fleet.dialing(0, T0)
    fleet.connected(0, T0)
    assert fleet.take(0)
    fleet.judge(T0 + 999 * MS)
    assert fleet.links[0].state == GREETING
    fleet.judge(T0 + 1000 * MS)
    link = fleet.links[0]
    assert (link.state, link.outcome) == (DOWN, "timeout")
    assert link.cause == "the TLS handshake took longer than 1000 ms"


def test_goodbye_behind_a_reply(fleet_of: Any, certs: Certs) -> None:
    fleet, server = fleet_of(), Server(certs.server_context())
    greet(fleet, server)
    first, second = acquire(fleet), acquire(fleet)
    server.hear(fleet.take(0))
    server.tls.write(OK)
    with pytest.raises(ssl.SSLWantReadError):
        server.tls.unwrap()
    fleet.receive(0, server.outgoing.read(), T0)
    assert first.verdict() == YES
    link = fleet.links[0]
    assert (link.state, link.outcome) == (DOWN, "closed")
    assert second.ended


@pytest.mark.parametrize("cut", [whole, bytewise])
def test_a_record_that_was_tampered_with(fleet_of: Any, certs: Certs, cut: Any) -> None:
    fleet, server = fleet_of(), Server(certs.server_context())
    greet(fleet, server)
    first, second = acquire(fleet), acquire(fleet)
    server.hear(fleet.take(0))
    records = bytearray(server.say(OK, OK))
    records[-1] ^= 1
    for part in cut(bytes(records)):
        fleet.receive(0, part, T0)
    assert first.verdict() == YES
    link = fleet.links[0]
    assert (link.state, link.outcome) == (DOWN, "PROTO")
    assert link.cause.startswith("TLS failed: ")
    assert second.ended


def test_a_new_connection_begins_with_tls_again(fleet_of: Any, certs: Certs) -> None:
    fleet = fleet_of()
    context = certs.server_context()
    greet(fleet, Server(context))
    op = acquire(fleet)
    fleet.take(0)
    fleet.lost(0, "closed", "connection closed by the server", T0)
    assert op.ended
    fleet.clean_up(op)
    server = Server(context)
    greet(fleet, server)
    # The deletion of what was unanswered goes first; nothing of the old connection is left.
    assert fleet.links[0].owed == 1


def test_no_secret_is_in_the_clear(fleet_of: Any, certs: Certs) -> None:
    fleet = fleet_of(username="app", password="S3cr3t!")
    server = Server(certs.server_context())
    assert meet(fleet, server) == resp("AUTH", "app", "S3cr3t!")
    assert "S3cr3t" not in repr(fleet.links[0].options)


def test_files_are_read_once(certs: Certs, tmp_path: Path, fleet_of: Any) -> None:
    copy = tmp_path / "ca.pem"
    copy.write_text(certs.ca_pem)
    fleet = fleet_of(ssl_ca_certs=str(copy))
    copy.unlink()
    greet(fleet, Server(certs.server_context()))
