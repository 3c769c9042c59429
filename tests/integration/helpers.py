"""What the integration tests have in common: looking at masters, waiting, measuring.

Used as `from integration.helpers import ...`; `tests` is on the path since it has a conftest.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pytest

from redlock_fast import Redlock, scripts
from redlock_fast.testing import LocalMaster, LocalMasters

T = TypeVar("T")
MakeClient = Callable[..., Redlock]  # the fixture `make_client`

# What a busy machine of two cores may add to any call or effect, in ms. Tests that bound a time
# bound it by what the library promises plus this. (The catalogue of cases proposes 50 to 100.)
SLACK_MS = 600
# `master_timeout` of clients that meet hung masters, in ms.
NT = 150
# `master_timeout` of clients whose masters are all well: a stalled test machine is no defect.
PATIENT = 1000

HOUR = 3_600_000
_SCRIPTS = (scripts.RELEASE, scripts.EXTEND, scripts.LOOK)
# Outcome words of a master that was asked and did not answer in time.
LATE = {"timeout", "suspect"}


def pair(client: Redlock, **keywords: Any) -> None:
    """Acquire and release a lock that nobody else wants."""
    lock = client.acquire("res", HOUR, **keywords)
    assert lock
    assert lock.release()


def ready(client: Redlock, i: int) -> bool:
    """Use the client; is this master's connection ready then?"""
    pair(client, wait=5000)
    return bool(state_of(client, i)["state"] == "ready")


def fails_with(client: Redlock, i: int, kind: str) -> bool:
    """Use the client; has this master failed in this way by then?"""
    pair(client)
    return kind in state_of(client, i)["errors"]


def eventually(predicate: Callable[[], T], seconds: float = 5.0) -> T:
    """Wait until `predicate()` is true, and return what it returned.

    Raises:
        AssertionError: it was not true within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = predicate()
        if value:
            return value
        assert time.monotonic() < deadline, f"not true within {seconds} s: {predicate}"
        time.sleep(0.005)


def in_time(ms: float) -> float:
    """Seconds in which something has to be seen that is promised within `ms`."""
    return (ms + SLACK_MS) / 1000


class Stopwatch:
    """Measures a with-block: `.ms` is how long it took."""

    def __enter__(self) -> Stopwatch:
        self._start = time.monotonic()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.ms = (time.monotonic() - self._start) * 1000


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# -- preparing masters -------------------------------------------------------------------------


def taught(masters: LocalMasters) -> LocalMasters:
    """Let these masters know all scripts, as they do once any client has used them.

    So each command is one round trip. What happens on a master that does not know a script is
    tested where it matters (cases C12 and C59 among others).
    """
    for master in masters:
        # All on one connection: this is done before most tests.
        loads = [("SCRIPT", "LOAD", script.text.decode()) for script in _SCRIPTS]
        replies = master._ask(*loads, limit_s=5.0)
        assert [reply[-40:] for reply in replies] == [script.sha for script in _SCRIPTS]
    return masters


# -- looking at masters ------------------------------------------------------------------------


def keys_of(masters: Iterable[LocalMaster]) -> list[list[bytes]]:
    """The keys of each master; a dead or paused one counts as having none."""
    return [m.keys() if m.running and not m.paused else [] for m in masters]


def are_clean(masters: Iterable[LocalMaster]) -> bool:
    """Whether no reachable master has any key."""
    return not any(keys_of(masters))


def values_of(masters: Iterable[LocalMaster], key: str | bytes) -> list[bytes | None]:
    """What each master holds under `key`."""
    return [m.command("GET", key) for m in masters]


def pttls_of(masters: Iterable[LocalMaster], key: str | bytes) -> list[int]:
    """The time to live of `key` on each master, in ms; -1: for ever, -2: no such key."""
    return [m.command("PTTL", key) for m in masters]


def all_have(masters: Iterable[LocalMaster], key: str | bytes, token: str) -> None:
    """Wait until each master holds `key` with `token`.

    A lock is granted at the deciding reply: the last masters get their SET a little later.
    """
    masters = list(masters)
    eventually(lambda: values_of(masters, key) == [token.encode()] * len(masters))


def occupy(masters: Iterable[LocalMaster], key: str | bytes, px: int = HOUR) -> None:
    """Let a rival hold `key` on these masters."""
    for master in masters:
        assert master.command("SET", key, "rival", "PX", px) == b"OK"


def vacate(masters: Iterable[LocalMaster], key: str | bytes) -> None:
    """Remove `key` behind the client's back."""
    for master in masters:
        master.command("DEL", key)


def calls_of(master: LocalMaster) -> dict[str, int]:
    """How often each command ran on a master: INFO commandstats, names in lower case."""
    info = master.command("INFO", "commandstats").decode()
    return {name: int(n) for name, n in re.findall(r"cmdstat_([^:]+):calls=(\d+)", info)}


def clients_of(master: LocalMaster) -> int:
    """How many other connections a master has than the one that asks."""
    info = master.command("INFO", "clients").decode()
    return int(re.search(r"connected_clients:(\d+)", info)[1]) - 1  # type: ignore[index]


def refresh_stats(masters: Iterable[LocalMaster]) -> None:
    """Start the counts of `calls_of` anew."""
    for master in masters:
        master.command("CONFIG", "RESETSTAT")


_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b"}


def _unescaped(text: bytes) -> bytes:
    def one(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code[1:], 16)]) if code[:1] == b"x" else _ESCAPES.get(code, code)

    return re.sub(rb"\\(x[0-9a-f]{2}|.)", one, text, flags=re.DOTALL)


class Monitor:
    """Records, by MONITOR, what a master executes; a context manager.

    with Monitor(master) as monitor:
        ...
        monitor.commands()  # [[b"SET", b"name", ...], ...]
    """

    def __init__(self, master: LocalMaster) -> None:
        self._master = master
        self._seen: list[tuple[bool, list[bytes]]] = []
        self._marks = 0

    def __enter__(self) -> Monitor:
        self._talk = socket.create_connection(("127.0.0.1", self._master.port), 5)
        self._stream = self._talk.makefile("rb")
        self._talk.sendall(b"MONITOR\r\n")
        assert self._stream.readline() == b"+OK\r\n"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stream.close()
        self._talk.close()

    def _catch_up(self) -> None:
        """Read until a command of our own shows up: all that ran before is here then."""
        self._marks += 1
        mark = b"mark %d" % self._marks
        self._master.command("ECHO", mark)
        while True:
            line = self._stream.readline()
            assert line, "MONITOR ended"
            head, _, rest = line.partition(b"] ")
            words = [_unescaped(w) for w in re.findall(rb'"((?:[^"\\]|\\.)*)"', rest)]
            if words == [b"ECHO", mark]:
                return
            words[0] = words[0].upper()
            self._seen.append((head.endswith(b" lua"), words))

    def commands(self, *names: str) -> list[list[bytes]]:
        """What clients sent, in order, the name in upper case; only these names, if any."""
        return self._some(False, names)

    def inner(self, *names: str) -> list[list[bytes]]:
        """What scripts executed."""
        return self._some(True, names)

    def _some(self, lua: bool, names: tuple[str, ...]) -> list[list[bytes]]:
        self._catch_up()
        wanted = {name.encode() for name in names}
        return [w for inner, w in self._seen if inner == lua and (not wanted or w[0] in wanted)]


# -- this process ------------------------------------------------------------------------------

# How long a forked child may take, in s.
LIMIT_S = 20.0


class Child:
    """A forked child that runs `work` and ends."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._pipe, pipe = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of every fork of a process that has threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid:
            os.close(pipe)
            return
        # No pytest in here: neither its output nor its clean-ups.
        told = b"ok"
        try:
            work()
        except BaseException:  # noqa: BLE001 - told to the parent
            told = traceback.format_exc().encode()
        finally:
            os.write(pipe, told)
            os._exit(0)

    def join(self) -> None:
        """Wait for its end; what went wrong there fails the test."""
        told = b""
        end = time.monotonic() + LIMIT_S
        try:
            while select.select([self._pipe], [], [], max(end - time.monotonic(), 0))[0]:
                data = os.read(self._pipe, 65536)
                if not data:
                    break
                told += data
            else:
                pytest.fail("the child hangs")
        finally:
            os.close(self._pipe)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        assert told == b"ok", told.decode()


def in_child(work: Callable[[], Any]) -> None:
    """Do this in a forked child, which has to end well."""
    Child(work).join()


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections, and that nobody else gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def black_hole(
    family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1"
) -> Iterator[socket.socket]:
    """A listening socket whose queue is full: connecting to it comes to no end."""
    with contextlib.ExitStack() as stack:
        hole = stack.enter_context(socket.socket(family))
        hole.bind((host, 0))
        hole.listen(0)
        for _ in range(8):
            filler = stack.enter_context(socket.socket(family))
            filler.settimeout(0.2)
            try:
                filler.connect(hole.getsockname())
            except TimeoutError:
                break
        else:
            pytest.skip("the queue of a listening socket cannot be filled here")
        yield hole


def descriptors() -> dict[str, str]:
    """The descriptors of this process, of the kinds that clients and servers open.

    Returns:
        Each with its name in the kernel (`socket:[4711]`; a number that is not used again), and
        of a socket the two addresses.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = _ends(int(name))
            elif target in ("anon_inode:[eventfd]", "anon_inode:[eventpoll]"):
                found[f"{target} {name}"] = ""
    return found


def _ends(fd: int) -> str:
    ends = []
    with socket.socket(fileno=os.dup(fd)) as sock:
        for ask in (sock.getsockname, sock.getpeername):
            try:
                ends.append(str(ask()))
            except OSError as error:
                ends.append(str(error.strerror))
    return " to ".join(ends)


def run_script(code: str, *args: str, limit_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run a Python script to its end; one that hangs is a `subprocess.TimeoutExpired`."""
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def janitors() -> int:
    """How many threads clients have started to pay debts."""
    return _thread._count() - (threading.active_count() - 1)  # not made by `threading`


def outcomes(error: Any) -> list[str]:
    """The outcome words of an error's reports, in the order of the configuration."""
    return [report.outcome for report in error.reports]


def state_of(client: Any, i: int) -> dict[str, Any]:
    """One master's part of `client.stats()`."""
    row: dict[str, Any] = client.stats()["masters"][i]
    return row
