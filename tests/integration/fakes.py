"""A scripted master and a misbehaving network, on loopback, for tests.

`FakeMaster` answers as a small master does, but for what the test says otherwise; `Proxy` stands
between a client and a real master and delays, holds, drops and resets. Both are made by a fixture
(`make_fake`, `make_proxy`), are ended by it, and have a `url` and a `port`. Their sockets live on
the event loop of one thread (`Net`), which is started when the first of them is made. Attributes
may be set, and methods called, by any thread at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import pytest

from redlock_fast import scripts

T = TypeVar("T")


class Action(enum.Enum):
    """What to do instead of sending bytes."""

    PASS = "as a real master would"
    CLOSE = "close the connection in good order"
    RESET = "close it with a reset"
    HALF = "send no more, but keep the connection open"


PASS: Final = Action.PASS
CLOSE: Final = Action.CLOSE
RESET: Final = Action.RESET
HALF: Final = Action.HALF
SILENCE: Final = b""

# Bytes, an action, or steps: bytes and actions, and between them pauses in seconds.
Answer: TypeAlias = "bytes | Action | Sequence[bytes | Action | float]"
MakeFake: TypeAlias = "Callable[..., FakeMaster]"  # the fixture `make_fake`
MakeProxy: TypeAlias = "Callable[[Listening], Proxy]"  # the fixture `make_proxy`


class Net:
    """An event loop in a thread, started by the first `call`."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.hosts: set[asyncio.Task[Any]] = set()
        self.writers: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()
        self._servers: list[asyncio.Server] = []

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop, and wait for its result."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self.loop.run_forever, name="net", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def listen(self, host: Callable[..., Any], sock: socket.socket | None = None) -> int:
        """Accept connections, each served by `host(reader, writer)`.

        On a free port, or on a socket that listens already.
        """

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self.hosts.add(task)
            self.writers.add(writer)
            try:
                await host(reader, writer)
            finally:
                self.hosts.discard(task)

        async def start() -> tuple[asyncio.Server, int]:
            where: Any = {"host": "127.0.0.1", "port": 0} if sock is None else {"sock": sock}
            server = await asyncio.start_server(serve, **where, limit=2**24)
            return server, server.sockets[0].getsockname()[1]

        server, port = self.call(start())
        self._servers.append(server)
        return port

    def close(self) -> None:
        """End all servers and connections, and the thread."""
        if (loop := self.loop) is None:
            return

        async def end() -> None:
            # First accept no more: asyncio forgets, unclosed, a connection that it is accepting
            # while its server closes.
            for sock in [sock for server in self._servers for sock in server.sockets]:
                loop.remove_reader(sock.fileno())
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                # Hosts only: asyncio's own tasks are about to hand a connection to one, and each
                # host sees to the tasks that it has started.
                for host in self.hosts & tasks:
                    host.cancel()
                await asyncio.wait(tasks, timeout=0.01)
            for server in self._servers:
                server.close()
            # One that has bytes left, to a client that reads no more, would wait for ever.
            for writer in list(self.writers):
                writer.transport.abort()
            await asyncio.sleep(0.001)  # transports close their sockets in a callback

        self.call(end())
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(20)
        loop.close()


def _abort(writer: Any) -> None:
    """Close a connection with a reset."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# -- a scripted master -------------------------------------------------------------------------


class Talk:
    """One connection of a `FakeMaster`.

    Attributes:
        index: the how-manieth it is, from 0.
        received: its commands, as lists of bytes, the name in upper case.
    """

    def __init__(self, index: int, writer: asyncio.StreamWriter) -> None:
        self.index = index
        self.received: list[list[bytes]] = []
        self.writer = writer


class FakeMaster:
    """A master that does what the test says.

    Args:
        answer: given a command (list of bytes, the name in upper case) and its `Talk`, says what
            to answer; PASS, or no function at all: as a small real master does.
        greeting: what each new connection gets before anything came.

    Attributes:
        answer, greeting: may be changed at any time.
        received: all commands, of all connections, in the order they came.
        talks: all connections there were.
        open: how many connections there are.
        data: its keys: (value, time of expiry on `time.monotonic`).
    """

    def __init__(
        self,
        net: Net,
        answer: Callable[[list[bytes], Talk], Answer] | None = None,
        greeting: Answer = SILENCE,
    ) -> None:
        self.answer = answer
        self.greeting = greeting
        self.received: list[list[bytes]] = []
        self.talks: list[Talk] = []
        self.open = 0
        self.data: dict[bytes, tuple[bytes, float]] = {}
        self._known: set[bytes] = set()
        self._net = net
        self.port = net.listen(self._host)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def named(self, *names: str) -> list[list[bytes]]:
        """Those of `received` with one of these names."""
        wanted = {name.encode() for name in names}
        return [command for command in list(self.received) if command[0] in wanted]

    def say(self, data: bytes) -> None:
        """Send bytes that nobody asked for, on all connections."""

        async def send() -> None:
            for talk in self.talks:
                if not talk.writer.is_closing():
                    talk.writer.write(data)

        self._net.call(send())

    def take_over(self, sock: socket.socket) -> None:
        """Answer on another listening socket too."""
        self._net.listen(self._host, sock)

    async def _host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = Talk(len(self.talks), writer)
        self.talks.append(talk)
        self.open += 1
        try:
            goes_on = await self._say(self.greeting, [], writer)
            while goes_on and (command := await _read_command(reader)):
                talk.received.append(command)
                self.received.append(command)
                answer = PASS if self.answer is None else self.answer(command, talk)
                goes_on = await self._say(answer, command, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            if not writer.is_closing():
                writer.close()

    async def _say(
        self, answer: Answer, command: list[bytes], writer: asyncio.StreamWriter
    ) -> bool:
        """Do all steps; False: the connection has ended."""
        steps = [answer] if isinstance(answer, (bytes, Action)) else answer
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif step is RESET:
                _abort(writer)
                return False
            elif step is CLOSE:
                return False
            elif step is HALF:
                writer.write_eof()
            else:
                writer.write(self.behave(command) if step is PASS else step)
        return True

    def behave(self, command: list[bytes]) -> bytes:
        """What a real master answers, as far as a lock client can tell."""
        name = command[0]
        now = time.monotonic()
        if name == b"SET":
            key, value, ttl_ms = command[1], command[2], int(command[5])
            if key in self.data and self.data[key][1] > now:
                return b"$-1\r\n"
            self.data[key] = (value, now + ttl_ms / 1000)
            return b"+OK\r\n"
        if name in (b"EVAL", b"EVALSHA"):
            return self._run(command, now)
        if command[:2] == [b"CLIENT", b"ID"]:
            return b":%d\r\n" % len(self.talks)
        if name in (b"AUTH", b"SELECT", b"CLIENT"):
            return b"+OK\r\n"
        return b"-ERR unknown command\r\n"

    def _run(self, command: list[bytes], now: float) -> bytes:
        ours = (scripts.RELEASE, scripts.EXTEND, scripts.LOOK)
        script = next((s for s in ours if command[1] in (s.text, s.sha)), None)
        if script is None or (command[0] == b"EVALSHA" and script.sha not in self._known):
            return b"-NOSCRIPT No matching script.\r\n"
        self._known.add(script.sha)
        key, token = command[3], command[4]
        held = self.data.get(key)
        if held is None or held[1] <= now:
            return b":-1\r\n"
        if held[0] != token:
            return b":0\r\n"
        if script is scripts.RELEASE:
            del self.data[key]
        elif script is scripts.EXTEND:
            self.data[key] = (token, now + int(command[5]) / 1000)
        return b":1\r\n"


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    """The next command; an empty one at the end of the connection."""
    head = await reader.readline()
    if not head.endswith(b"\r\n"):
        return []
    words = []
    for _ in range(int(head[1:])):
        size = int((await reader.readline())[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return [words[0].upper(), *words[1:]]


# -- a network that misbehaves -----------------------------------------------------------------


class Way:
    """One direction through a `Proxy`; all attributes may be changed at any time.

    Attributes:
        delay_ms: everything arrives so much later, in order.
        holding: nothing arrives; what comes meanwhile is kept, and goes on when this is False.
        dropping: what comes is swallowed for good.
        gather_ms: after the first bytes, wait so long for more, and pass all on as one piece.
        change: given bytes as they come, returns those to pass on instead, or RESET to end the
            connection on both sides.
        passed: bytes that came this way.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.heal()

    def heal(self) -> None:
        """From now on all is well."""
        self.delay_ms = 0.0
        self.holding = False
        self.dropping = False
        self.gather_ms = 0.0
        self.change: Callable[[bytes], bytes | Action] | None = None


class Listening(Protocol):
    """A master, or what stands for one: something on a port of 127.0.0.1."""

    @property
    def port(self) -> int: ...


class Proxy:
    """Stands between a client and a master.

    Attributes:
        up: the way to the master.
        down: the way to the client.
        refusing: new connections are reset at once.
        accepted: how many connections there were.
        open: how many there are.
    """

    def __init__(self, net: Net, master: Listening) -> None:
        self.up = Way()
        self.down = Way()
        self.refusing = False
        self.accepted = 0
        self._net = net
        self._master = master
        self._pairs: list[tuple[Any, asyncio.StreamWriter]] = []
        self.port = net.listen(self._host)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def open(self) -> int:
        return len(self._pairs)

    def heal(self) -> None:
        """From now on all is well; what was held arrives."""
        self.refusing = False
        self.up.heal()
        self.down.heal()

    def reset(self) -> None:
        """Reset all connections, on both sides; what is on the way is lost."""

        async def reset() -> None:
            for pair in tuple(self._pairs):
                for writer in pair:
                    _abort(writer)

        self._net.call(reset())

    async def _host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refusing:
            _abort(writer)
            return
        near = await self._receive(reader, writer)
        if near is None:
            writer.close()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._master.port)
        except OSError:
            _abort(writer)
            return
        self._net.writers.add(far_writer)
        pair = (near[1], far_writer)
        self._pairs.append(pair)
        ways = (
            asyncio.ensure_future(self._carry(near[0], far_writer, self.up)),
            asyncio.ensure_future(self._carry(far_reader, near[1], self.down)),
        )
        try:
            # As soon as one side has ended, so does the other.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass
        finally:
            for way in ways:
                way.cancel()
            broken = RESET in [w.result() for w in ways if w.done() and not w.cancelled()]
            self._pairs.remove(pair)
            for end in pair:
                if broken:
                    _abort(end)
                else:
                    end.close()

    async def _receive(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Any, Any] | None:
        """What reads from and writes to a client, as streams do; None to close the connection."""
        return reader, writer

    async def _put(self, writer: Any, data: bytes) -> None:
        writer.write(data)

    async def _carry(self, reader: Any, writer: Any, way: Way) -> Action:
        """Carry bytes one way until that side ends: CLOSE, or RESET."""
        parcels: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def deliver() -> None:
            while parcel := await parcels.get():
                when, data = parcel
                if when > loop.time():
                    await asyncio.sleep(when - loop.time())
                while way.holding:
                    await asyncio.sleep(0.001)
                await self._put(writer, data)

        courier = asyncio.ensure_future(deliver())
        try:
            while data := await reader.read(2**16):
                if way.gather_ms:
                    data += await _read_for(reader, way.gather_ms / 1000)
                way.passed += len(data)
                passed: bytes | Action = data if way.change is None else way.change(data)
                if passed is RESET:
                    return RESET
                if passed and not way.dropping:
                    assert isinstance(passed, bytes)
                    parcels.put_nowait((loop.time() + way.delay_ms / 1000, passed))
            parcels.put_nowait(None)
            await courier
        except OSError:
            return RESET
        finally:
            courier.cancel()
        return CLOSE


async def _read_for(reader: Any, seconds: float) -> bytes:
    """What comes within this time."""
    data = b""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    with contextlib.suppress(asyncio.TimeoutError):
        while more := await asyncio.wait_for(reader.read(2**16), end - loop.time()):
            data += more
    return data


# -- fixtures ----------------------------------------------------------------------------------


@pytest.fixture
def net() -> Iterator[Net]:
    """Where fakes and proxies live."""
    net = Net()
    yield net
    net.close()


@pytest.fixture
def make_fake(net: Net) -> MakeFake:
    """A function that starts a `FakeMaster`; arguments are its."""

    def make(
        answer: Callable[[list[bytes], Talk], Answer] | None = None, greeting: Answer = SILENCE
    ) -> FakeMaster:
        return FakeMaster(net, answer, greeting)

    return make


@pytest.fixture
def make_proxy(net: Net) -> MakeProxy:
    """A function that starts a `Proxy` before a master."""
    return lambda master: Proxy(net, master)
