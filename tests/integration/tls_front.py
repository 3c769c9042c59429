"""A master that speaks TLS: a proxy that ends TLS before a master that does not.

`TlsFront` is a `fakes.Proxy` whose clients speak TLS to it, so that all of a proxy's verbs and
ways work on the plain bytes; before it may stand another proxy, which works on the encrypted ones:
`make_proxy(front)`. Behind it may be a `FakeMaster`, for replies that are exact to the byte. It
decides itself which bytes leave when, which a server's OpenSSL would not let a test do. Made by
the fixture `make_tls_front`, ended by it, and run by the thread of `Net`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from integration.certs import Certs
from integration.fakes import Listening, Net, Proxy

MakeTlsFront: TypeAlias = "Callable[..., TlsFront]"  # the fixture `make_tls_front`


class TlsFront(Proxy):
    """Ends TLS before a master.

    Args:
        context: the server's side (`Certs.server_context`), for this front alone. By default one
            with a good certificate for 127.0.0.1, ::1 and localhost.

    Attributes (to be changed at any time; for connections that come later, unless said otherwise):
        record_size: bytes of plain text in one record, at most; 0: as many as came from the master
            in one piece. Takes effect at once.
        piece_size: bytes of cipher text that leave in one piece, handshake included; 0: all.
            Takes effect at once.
        piece_pause_ms: pause between two pieces; 0: the time of a turn of the event loop.
        silent_after: bytes of the handshake after which the front says nothing for now; None: it
            talks. 0 is a server that accepts and waits. Going back to None wakes it.
        hold_tickets: in TLS 1.3, the end of the handshake (the session tickets) leaves together
            with the first reply and not before.
        ragged: closes without TLS's close_notify.

    Attributes (to be read):
        accepted, open: as of a proxy; `open` counts finished handshakes only.
        handshakes: how many were finished.
        failures: what OpenSSL called those that failed.
        versions: `TLSv1.2` or `TLSv1.3`, of each finished handshake.
        server_names: the names that clients asked for (SNI), None for none.
        reused: how many handshakes went on with an earlier session.
        client_certs: the subjects of the clients' certificates, if the context asks for one.
    """

    def __init__(self, net: Net, master: Listening, certs: Certs, context: ssl.SSLContext) -> None:
        self.record_size = 0
        self.piece_size = 0
        self.piece_pause_ms = 0.0
        self.silent_after: int | None = None
        self.hold_tickets = False
        self.ragged = False
        self.handshakes = 0
        self.failures: list[str] = []
        self.versions: list[str] = []
        self.server_names: list[str | None] = []
        self.reused = 0
        self.client_certs: list[Any] = []
        self._certs = certs
        self._context = context
        context.sni_callback = self._note_name
        super().__init__(net, master)

    @property
    def url(self) -> str:
        """With the option that makes clients trust the authority of the tests."""
        return self._certs.url(self.port)

    def _note_name(self, _tls: Any, name: str | None, _context: ssl.SSLContext) -> None:
        self.server_names.append(name)

    async def _receive(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[_Sealed, _Sealed] | None:
        sealed = _Sealed(self, reader, writer, self._context)
        try:
            if not await sealed.greet():
                return None
        except ssl.SSLError as error:
            self.failures.append(error.reason or str(error))
            await sealed.flush()  # the alert
            return None
        except OSError as error:
            self.failures.append(error.strerror or type(error).__name__)
            return None
        self.handshakes += 1
        self.versions.append(sealed.tls.version() or "")
        self.reused += bool(sealed.tls.session_reused)
        if certificate := sealed.tls.getpeercert():
            self.client_certs.append(certificate.get("subjectAltName"))
        return sealed, sealed

    async def _put(self, writer: Any, data: bytes) -> None:
        if isinstance(writer, _Sealed):
            await writer.put(data)
        else:
            writer.write(data)


class _Sealed:
    """The client's end of a connection: plain bytes on our side, TLS on the other."""

    def __init__(
        self,
        front: TlsFront,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        context: ssl.SSLContext,
    ) -> None:
        self._front = front
        self._reader = reader
        self._writer = writer
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._pouring = asyncio.Lock()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.transport = writer.transport
        self.get_extra_info = writer.get_extra_info

    async def greet(self) -> bool:
        """The handshake; False if the client went away."""
        sent = 0
        while True:
            try:
                self.tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            if done and self._front.hold_tickets:
                return True
            words = self._outgoing.read()
            if (limit := self._front.silent_after) is not None and sent + len(words) >= limit:
                now = max(0, limit - sent)
                await self._pour(words[:now])
                while self._front.silent_after is not None:
                    await asyncio.sleep(0.001)
                words = words[now:]
                sent += now
            sent += len(words)
            await self._pour(words)
            if done:
                return True
            data = await self._reader.read(2**16)
            if not data:
                self._front.failures.append("closed by the client")
                return False
            self._incoming.write(data)

    async def read(self, n: int) -> bytes:
        """Plain bytes; none at the end."""
        while True:
            try:
                return self.tls.read(n)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                if not isinstance(error, ssl.SSLZeroReturnError):
                    self._front.failures.append(error.reason or str(error))
                return b""
            finally:
                if self._outgoing.pending and not self._front.hold_tickets:
                    await self.flush()
            data = await self._reader.read(2**16)
            if not data:
                return b""
            self._incoming.write(data)

    async def put(self, data: bytes) -> None:
        """Send plain bytes."""
        size = self._front.record_size or len(data)
        for start in range(0, len(data), size):
            self.tls.write(data[start : start + size])
        await self.flush()

    async def flush(self) -> None:
        await self._pour(self._outgoing.read())

    async def _pour(self, words: bytes) -> None:
        async with self._pouring:
            if not (size := self._front.piece_size):
                self._writer.write(words)
                return
            for start in range(0, len(words), size):
                self._writer.write(words[start : start + size])
                await asyncio.sleep(self._front.piece_pause_ms / 1000)

    def close(self) -> None:
        if not self._front.ragged and not self._writer.is_closing():
            with contextlib.suppress(ssl.SSLError):
                self.tls.unwrap()
            self._writer.write(self._outgoing.read())
        self._writer.close()


@pytest.fixture
def make_tls_front(net: Net, certs: Certs) -> MakeTlsFront:
    """A function that puts a `TlsFront` before a master; keywords are those of `server_context`."""

    def make(master: Listening, **options: Any) -> TlsFront:
        return TlsFront(net, master, certs, certs.server_context(**options))

    return make
