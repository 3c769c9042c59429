"""Connections that are never made, end half way, or are refused: on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from integration.fakes import CLOSE, HALF, PASS, RESET, SILENCE, Answer, MakeFake, Talk
from integration.helpers import (
    HOUR,
    NT,
    SLACK_MS,
    MakeClient,
    Stopwatch,
    are_clean,
    black_hole,
    clients_of,
    descriptors,
    eventually,
    outcomes,
    state_of,
)

from redlock_fast import NoQuorum, Redlock
from redlock_fast.testing import LocalMaster, LocalMasters, MakeLocalMasters


def _pair(client: Redlock, name: str = "res") -> None:
    lock = client.acquire(name, HOUR, wait=5000)
    assert lock
    assert lock.release()


# -- never made --------------------------------------------------------------------------------


@pytest.mark.case("C41")
def test_c41_a_black_hole_delays_nobody(
    masters: LocalMasters, make_client: MakeClient, make_fake: MakeFake
) -> None:
    with black_hole() as hole:
        _use_beside(hole, masters, make_client, make_fake)


def _use_beside(
    hole: socket.socket, masters: LocalMasters, make_client: MakeClient, make_fake: MakeFake
) -> None:
    port = hole.getsockname()[1]
    client = make_client(
        [*masters.urls[:2], f"redis://127.0.0.1:{port}"],
        warm=False,
        master_timeout=NT,
        connect_timeout=500,
    )
    with Stopwatch() as watch:
        _pair(client, "first")
    assert watch.ms < 2 * NT + SLACK_MS
    with Stopwatch() as watch:
        for turn in range(50):
            _pair(client, f"res:{turn}")
    assert watch.ms < 50 * NT / 4 + SLACK_MS
    # Noticed by whoever calls.
    eventually(lambda: _fails(client, "timeout"))

    fake = make_fake()
    fake.take_over(hole.dup())
    eventually(lambda: _used(client, fake), 10)


def _fails(client: Redlock, kind: str) -> bool:
    _pair(client)
    return kind in state_of(client, 2)["errors"]


def _used(client: Redlock, fake: Any) -> bool:
    _pair(client)
    return bool(fake.named("SET"))


# -- end half way --------------------------------------------------------------------------------


@pytest.mark.case("C44")
def test_c44_the_end_of_a_half_closed_connection_is_noticed(
    make_fake: MakeFake, make_client: MakeClient
) -> None:
    """At once, and without turning in circles while the other half stays open."""
    fakes = [make_fake(lambda c, _: HALF if c[0] == b"SET" else PASS) for _ in range(3)]
    client = make_client(fakes, master_timeout=5000, retry_delay=100)

    with Stopwatch() as watch, pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR)

    assert watch.ms < SLACK_MS
    assert outcomes(caught.value).count("closed") >= 2
    cpu = time.process_time()
    with Stopwatch() as watch, pytest.raises(NoQuorum):
        client.acquire("res", HOUR, wait=1500)
    assert watch.ms > 1000
    assert time.process_time() - cpu < 0.5


@pytest.mark.case("C45")
@pytest.mark.parametrize("part", [b"+O", b"$5\r\n", b"$5\r\nhel", b":"])
@pytest.mark.parametrize("end", [RESET, CLOSE])
def test_c45_a_reply_that_ends_half_way(
    masters: LocalMasters, make_fake: MakeFake, make_client: MakeClient, part: bytes, end: Any
) -> None:
    broken: list[bytes] = []

    def answer(command: list[bytes], talk: Talk) -> Answer:
        if command[0] == b"SET" and not broken:
            fake.behave(command)  # it was executed
            broken.append(command[1])
            return [part, 0.02, end]
        return PASS

    fake = make_fake(answer)
    client = make_client([masters[0], masters[1], fake])
    lock = client.acquire("res", HOUR)
    assert lock
    assert lock.release()
    eventually(lambda: broken == [b"res"])
    eventually(lambda: not fake.data)  # cleaned up over a new connection
    eventually(lambda: state_of(client, 2)["state"] == "ready")
    again = client.acquire("again", HOUR)
    assert again
    eventually(lambda: b"again" in fake.data)
    assert fake.data[b"again"][0] == again.token.encode()
    assert again.release()
    eventually(lambda: not fake.data and are_clean([masters[0], masters[1]]))


# -- refused -------------------------------------------------------------------------------------


NO_ROOM = b"-ERR max number of clients reached\r\n"


@contextlib.contextmanager
def _full(master: LocalMaster) -> Iterator[Callable[[str], int]]:
    """There is room for no other client; gives a function that reads a number from INFO."""
    master.command("CONFIG", "SET", "maxclients", "2")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", master.port), 5))
            stream = stack.enter_context(sock.makefile("rb"))
            sock.sendall(b"PING\r\n")
            assert stream.readline() == b"+PONG\r\n"

        def info(field: str) -> int:
            sock.sendall(b"INFO\r\n")
            text = stream.read(int(stream.readline()[1:]) + 2).decode()
            return int(re.search(rf"\b{field}:(\d+)", text)[1])  # type: ignore[index]

        yield info
        sock.sendall(b"CONFIG SET maxclients 1000\r\n")
        assert stream.readline() == b"+OK\r\n"


def _is_refused(client: Redlock) -> None:
    row = state_of(client, 2)
    assert row["errors"].keys() <= {"MAXCLIENTS", "closed"}
    assert "max number of clients" in row["cause"]


@pytest.mark.case("C46")
def test_c46_no_room_for_a_client(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = make_local_masters(3)
    with _full(masters[2]) as info:
        client = make_client(masters)
        for turn in range(1000):
            _pair(client, f"res:{turn}")
        _is_refused(client)
        assert state_of(client, 2)["reconnects"] < 100
        assert info("connected_clients") == 2
    eventually(lambda: _is_ready(client), 10)
    assert clients_of(masters[2]) == 1
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C46")
def test_c46_a_line_instead_of_a_welcome(
    masters: LocalMasters, make_client: MakeClient, make_fake: MakeFake
) -> None:
    """As a full master does it: said before anything was read, and closed."""
    fake = make_fake(greeting=[NO_ROOM, CLOSE])
    before = len(descriptors())
    client = make_client([*masters.urls[:2], fake])
    for turn in range(200):
        _pair(client, f"res:{turn}")
    _is_refused(client)
    assert 0 < len(fake.talks) < 100
    assert len(descriptors()) <= before + 5  # one to wait with, two masters, one attempt's ends
    assert fake.received == []
    fake.greeting = SILENCE
    eventually(lambda: _is_ready(client), 10)
    assert fake.open == 1


@pytest.mark.slow
@pytest.mark.case("C46")
@pytest.mark.parametrize("real", [True, False])
def test_c46_a_thousand_refusals(
    make_local_masters: MakeLocalMasters, make_fake: MakeFake, make_client: MakeClient, real: bool
) -> None:
    """A thousand connections that come to nothing: 20 of each of 50 clients, which take turns."""
    masters = make_local_masters(3)
    with contextlib.ExitStack() as stack:
        if real:
            third: Any = masters[2]
            info = stack.enter_context(_full(masters[2]))
        else:
            third = make_fake(greeting=[NO_ROOM, CLOSE])
        before = len(descriptors())
        clients = [make_client([*masters.urls[:2], third]) for _ in range(50)]
        end = time.monotonic() + 60
        while any(sum(state_of(c, 2)["errors"].values()) < 20 for c in clients):
            for i, client in enumerate(clients):
                _pair(client, f"res:{i}")
            # Each has one to wait with, two masters, and one attempt's ends, if any.
            assert len(descriptors()) <= before + 50 * 5
            assert time.monotonic() < end
            time.sleep(0.005)
        for client in clients:
            _is_refused(client)
        if real:
            assert info("rejected_connections") >= 1000
            assert info("connected_clients") == 2
        else:
            assert len(third.talks) >= 1000
            assert third.received == []
            eventually(lambda: not third.open)

        def settled() -> bool:
            for client in clients:
                _pair(client)
            return len(descriptors()) == before + 50 * 3

        eventually(settled, 20)
        third.greeting = SILENCE
    eventually(lambda: sum(map(_is_ready, clients)) == 50, 20)
    if real:
        assert clients_of(masters[2]) == 50
    eventually(lambda: are_clean(masters))


def _is_ready(client: Redlock) -> bool:
    _pair(client)
    return bool(state_of(client, 2)["state"] == "ready")


@pytest.mark.case("C53")
def test_c53_nothing_is_sent_before_auth_was_answered(
    make_fake: MakeFake, make_client: MakeClient
) -> None:
    """Each master ends 20 connections under load, and refuses AUTH on every other one.

    AUTH is answered late: what came until then is all that went out before the answer.
    """
    fakes = []
    ended = [0, 0, 0]
    early: list[list[bytes]] = []
    answered = set()

    def let(talk: Talk) -> None:
        early.append([command[0] for command in talk.received])
        answered.add(talk)
        if not talk.writer.is_closing():
            refusal = b"-LOADING Redis is loading the dataset in memory\r\n"
            talk.writer.write(refusal if talk.index % 2 else b"+OK\r\n")

    for i in range(3):

        def answer(command: list[bytes], talk: Talk, i: int = i) -> Answer:
            if command[0] == b"AUTH":
                asyncio.get_running_loop().call_later(0.002, let, talk)
                return SILENCE
            if command[0] == b"SET" and len(talk.received) > 20:
                ended[i] += 1
                return RESET
            return PASS

        fakes.append(make_fake(answer))
    urls = [f"redis://:secret@127.0.0.1:{fake.port}" for fake in fakes]
    client = make_client(urls, retry_delay=10)
    end = time.monotonic() + 20

    def work(i: int) -> None:
        turn = 0
        while min(ended) < 20 and time.monotonic() < end:
            turn += 1
            with contextlib.suppress(NoQuorum):
                lock = client.acquire(f"res:{i}:{turn}", HOUR)
                if lock:
                    lock.release()

    threads = [threading.Thread(target=work, args=[i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert min(ended) >= 20
    assert all(names == [b"AUTH"] for names in early)
    for fake in fakes:
        assert len(fake.talks) >= 39  # every other one was refused
        for talk in fake.talks:
            names = [command[0] for command in talk.received]
            assert names[:1] in ([b"AUTH"], [])
            if talk.index % 2 or talk not in answered:
                assert names in ([b"AUTH"], [])


# -- both directions full --------------------------------------------------------------------------


class _Stubborn:
    """Answers scripts with 200 bytes each, and reads no more while its answers cannot leave.

    Attributes:
        counts: how many commands of each name came; the stream was exact if all are there.
    """

    def __init__(self) -> None:
        self._listener = socket.socket()
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._listener.setsockopt(socket.SOL_SOCKET, option, 4096)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self.counts: dict[bytes, int] = {}
        self.keys: set[bytes] = set()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            with sock, sock.makefile("rb") as stream:
                while head := stream.readline():
                    words = []
                    for _ in range(int(head[1:])):
                        size = int(stream.readline()[1:])
                        words.append(stream.read(size + 2)[:-2])
                    sock.sendall(self._answer(words))

    def _answer(self, words: list[bytes]) -> bytes:
        name = words[0].upper()
        self.counts[name] = self.counts.get(name, 0) + 1
        if name == b"SET":
            return b"+OK\r\n"
        if name in (b"EVAL", b"EVALSHA"):
            self.keys.add(words[3])
            return b"-ERR " + b"x" * 200 + b"\r\n"
        return b":7\r\n" if words[1].upper() == b"ID" else b"-ERR unknown command\r\n"


@pytest.mark.case("C82")
@pytest.mark.parametrize(
    "count", [pytest.param(5000, id="short"), pytest.param(200_000, marks=pytest.mark.slow)]
)
def test_c82_both_sides_write(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A batch of releases whose answers, longer than the commands, fill the way back."""
    fakes = [_Stubborn() for _ in range(3)]
    client = make_client([fake.url for fake in fakes], master_timeout=5000)
    names = [f"res:{i}" for i in range(count)]
    locks = [lock for lock in client.acquire_many(names, HOUR) if lock]
    assert len(locks) == count

    with pytest.raises(NoQuorum) as caught:
        client.release_many(locks)

    assert caught.value.results == [None] * count
    client.close()
    for fake in fakes:
        fake.thread.join(20)
        assert not fake.thread.is_alive()
    # Two decided; the third gets all the same what the others got.
    whole = [fake for fake in fakes if len(fake.keys) == count]
    assert len(whole) >= 2
    for fake in whole:
        assert fake.keys == {name.encode() for name in names}
        assert fake.counts[b"SET"] == count


# -- what is left behind ---------------------------------------------------------------------------


@pytest.mark.case("C157")
def test_c157_no_script_but_ours_is_ever_cached(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = make_local_masters(3)
    client = make_client(masters)
    for turn in range(50):
        locks = client.acquire_many([f"res:{turn}:{i}" for i in range(100)], 60_000 + turn)
        held = [lock for lock in locks if lock]
        client.extend_many(held, 70_000 + turn)
        assert client.owned(held[0])
        client.release_many(held)
    eventually(lambda: are_clean(masters))
    assert [_scripts_of(master) for master in masters] == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.case("C157")
def test_c157_10_000_names_and_ttls(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    """Each with its own, and with everything that can be done to a lock."""
    masters = make_local_masters(3)
    before = [_scripts_of(master) for master in masters]
    client = make_client(masters)

    def life(i: int) -> None:
        lock = client.acquire(f"res:{i}", 60_000 + i)
        assert lock
        assert lock.extend(80_000 + i)
        assert client.owned(lock)
        assert client.locked(lock.resource)
        adopted = client.adopt(lock.resource, lock.token, 100_000 + i)
        assert adopted
        if i % 2:
            assert adopted.release()
        else:
            assert client.release_token(lock.resource, lock.token)

    with ThreadPoolExecutor(16) as pool:
        assert len(list(pool.map(life, range(10_000)))) == 10_000
    eventually(lambda: are_clean(masters))
    assert [_scripts_of(master) for master in masters] == [count + 3 for count in before]


def _scripts_of(master: LocalMaster) -> int:
    info = master.command("INFO", "memory").decode()
    return int(re.search(r"number_of_cached_scripts:(\d+)", info)[1])  # type: ignore[index]
