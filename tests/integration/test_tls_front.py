"""What the other TLS tests rely on: that the front does as it says, seen by Python's own client."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

import pytest
from integration.certs import Certs
from integration.fakes import CLOSE, MakeFake, MakeProxy, Proxy
from integration.helpers import Stopwatch, eventually
from integration.tls_front import MakeTlsFront, TlsFront

pytestmark = pytest.mark.extra

TLS12, TLS13 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
PING = b"*1\r\n$4\r\nPING\r\n"


class Client:
    """A TLS client that counts the pieces in which bytes come to it."""

    def __init__(self, front: TlsFront | Proxy, context: ssl.SSLContext, **options: Any) -> None:
        self.sock = socket.create_connection(("127.0.0.1", front.port), 20)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        options.setdefault("server_hostname", "127.0.0.1")
        self.tls = context.wrap_bio(self._incoming, self._outgoing, **options)
        self.pieces: list[bytes] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sock.close()

    def run(self, action: Any, *args: Any) -> Any:
        """An operation of the SSLObject, to its end."""
        while True:
            try:
                return action(*args)
            except ssl.SSLWantReadError:
                pass
            finally:
                with contextlib.suppress(BrokenPipeError):
                    self.sock.sendall(self._outgoing.read())
            data = self.sock.recv(2**16)
            self.pieces.append(data)
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    def greet(self) -> None:
        self.run(self.tls.do_handshake)

    def ask(self, command: bytes = PING, size: int = 7) -> bytes:
        self.run(self.tls.write, command)
        answer = b""
        while len(answer) < size and (more := self.run(self.tls.read, 2**16)):
            answer += more
        return answer


def trusting(certs: Certs, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certs.ca)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


def shaken_hands(front: TlsFront) -> None:
    """Wait for the front's side of the handshake."""
    eventually(lambda: front.handshakes == 1)


def pong(command: list[bytes], talk: object) -> bytes:
    assert command == [b"PING"]
    return b"+PONG\r\n"


@pytest.fixture
def front(make_fake: MakeFake, make_tls_front: MakeTlsFront) -> TlsFront:
    return make_tls_front(make_fake(pong))


@pytest.fixture
def client(front: TlsFront, certs: Certs) -> Iterator[Client]:
    with Client(front, trusting(certs)) as client:
        yield client


def test_a_front_passes_bytes_on(front: TlsFront, client: Client) -> None:
    client.greet()
    assert client.ask() == b"+PONG\r\n"
    assert (front.accepted, front.open, front.handshakes) == (1, 1, 1)
    assert front.versions == ["TLSv1.3"]
    assert (front.up.passed, front.down.passed) == (len(PING), 7)
    assert front.server_names == [None]  # an address is no name
    client.sock.close()
    eventually(lambda: front.open == 0)
    assert front.failures == []


@pytest.mark.parametrize("version", [TLS12, TLS13])
def test_one_version_of_tls(
    make_fake: MakeFake, make_tls_front: MakeTlsFront, certs: Certs, version: ssl.TLSVersion
) -> None:
    front = make_tls_front(make_fake(pong), version=version)
    with Client(front, trusting(certs)) as client:
        client.greet()
        assert client.ask() == b"+PONG\r\n"
        assert front.versions == [client.tls.version()] == [version.name.replace("v1_", "v1.")]
    other = TLS12 if version == TLS13 else TLS13
    with Client(front, trusting(certs, other)) as client:
        with pytest.raises(ssl.SSLError):
            client.greet()
        eventually(lambda: front.failures == ["UNSUPPORTED_PROTOCOL"])


def test_names_are_noted(front: TlsFront, certs: Certs) -> None:
    for name in ("localhost", "other.example"):
        with (
            Client(front, trusting(certs), server_hostname=name) as client,
            contextlib.suppress(ssl.SSLCertVerificationError),
        ):
            client.greet()
    assert front.server_names == ["localhost", "other.example"]
    eventually(lambda: len(front.failures) == 1)  # the alert of the second


@pytest.mark.parametrize("who", ["other", "expired", "stranger"])
def test_bad_certificates_are_bad(
    make_fake: MakeFake, make_tls_front: MakeTlsFront, certs: Certs, who: str
) -> None:
    front = make_tls_front(make_fake(pong), identity=getattr(certs, who))
    with Client(front, trusting(certs)) as client, pytest.raises(ssl.SSLCertVerificationError):
        client.greet()
    eventually(lambda: len(front.failures) == 1)
    assert front.handshakes == 0


def test_client_certificates(
    make_fake: MakeFake, make_tls_front: MakeTlsFront, certs: Certs
) -> None:
    front = make_tls_front(make_fake(pong), client_certs=True)
    context = trusting(certs)
    with Client(front, context) as client:
        client.greet()  # in TLS 1.3 the client has finished before the server has seen it
        # (Who writes now may be answered with a reset, which would take the alert away.)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            client.run(client.tls.read, 1)
    eventually(lambda: front.failures == ["PEER_DID_NOT_RETURN_A_CERTIFICATE"])
    context.load_cert_chain(certs.client.both)
    with Client(front, context) as client:
        client.greet()
        assert client.ask() == b"+PONG\r\n"
    assert front.client_certs == [(("email", "client@redis.example"),)]


def test_records_as_small_as_one_byte(front: TlsFront, client: Client) -> None:
    client.greet()
    client.ask()
    front.record_size = 1
    client.pieces.clear()
    assert client.ask() == b"+PONG\r\n"
    assert sum(map(len, client.pieces)) >= 7 * (5 + 16 + 1)  # header and tag of each record


def test_several_replies_in_one_record(front: TlsFront, client: Client) -> None:
    client.greet()
    client.ask()
    front.down.gather_ms = 50
    client.pieces.clear()
    client.run(client.tls.write, PING)
    time.sleep(0.005)
    assert client.ask(size=14) == b"+PONG\r\n" * 2
    assert sum(map(len, client.pieces)) < 2 * (5 + 16)


def test_pieces_of_one_byte(front: TlsFront, client: Client) -> None:
    front.piece_size = 1
    client.greet()
    client.ask()
    front.piece_pause_ms = 1.0
    client.pieces.clear()
    with Stopwatch() as took:
        assert client.ask() == b"+PONG\r\n"
    assert took.ms >= sum(map(len, client.pieces)) - 1 >= 7 + 16


def test_silence_in_the_handshake(front: TlsFront, client: Client) -> None:
    front.silent_after = 100
    client.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.greet()
    assert sum(map(len, client.pieces)) == 100
    client.sock.settimeout(20)
    front.silent_after = None
    client.greet()
    assert client.ask() == b"+PONG\r\n"


def test_silence_from_the_start_ends_with_the_test(front: TlsFront, client: Client) -> None:
    front.silent_after = 0
    client.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.greet()
    assert (front.accepted, client.pieces) == (1, [])


def test_tickets_leave_with_the_first_reply(
    make_fake: MakeFake, make_tls_front: MakeTlsFront, certs: Certs
) -> None:
    sizes = {}
    for hold in (True, False):
        front = make_tls_front(make_fake(pong), tickets=3)
        front.hold_tickets = hold
        with Client(front, trusting(certs)) as client:
            client.greet()
            shaken_hands(front)
            client.sock.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                client.run(client.tls.read, 1)
            before = sum(map(len, client.pieces))
            client.sock.settimeout(20)
            assert client.ask() == b"+PONG\r\n"
            sizes[hold] = sum(map(len, client.pieces)) - before
    assert sizes[True] > sizes[False] + 3 * 100


def test_sessions_go_on(front: TlsFront, certs: Certs) -> None:
    context = trusting(certs)
    with Client(front, context) as first:
        first.greet()
        first.ask()
        session = first.tls.session
        with Client(front, context, session=session) as second:
            second.greet()
            second.ask()
    assert front.reused == 1


@pytest.mark.parametrize("ragged", [False, True])
def test_the_end_of_a_connection(
    make_fake: MakeFake, make_tls_front: MakeTlsFront, certs: Certs, ragged: bool
) -> None:
    front = make_tls_front(make_fake(lambda command, talk: CLOSE))
    front.ragged = ragged
    with Client(front, trusting(certs)) as client:
        client.greet()
        if ragged:
            with pytest.raises(ssl.SSLEOFError):
                client.ask()
        else:
            assert client.ask() == b""  # what a close_notify is to an SSLObject


def test_a_proxy_before_it_and_its_own_ways(
    front: TlsFront, make_proxy: MakeProxy, certs: Certs
) -> None:
    outer = make_proxy(front)
    with Client(outer, trusting(certs)) as client:
        client.greet()
        assert client.ask() == b"+PONG\r\n"
        assert outer.down.passed > front.down.passed == 7
        front.down.holding = True
        client.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.ask()
        front.heal()
        client.sock.settimeout(20)
        assert client.run(client.tls.read, 100) == b"+PONG\r\n"
        front.reset()
        with pytest.raises(ConnectionResetError):
            client.ask()
