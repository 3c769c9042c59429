"""Clocks that jump, and clients that are stopped: no lock whose validity ran out meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.fakes import MakeProxy, Proxy
from integration.helpers import (
    SLACK_MS,
    all_have,
    are_clean,
    eventually,
    in_time,
    keys_of,
    occupy,
    pttls_of,
)

from redlock_fast.testing import LocalMasters

SECOND = 1_000_000_000
HOUR_NS = 3600 * SECOND

# Executes the lines it is given, one at a time, and says what each expression was, or raised.
_CLIENT = """
import json, sys, time
from redlock_fast import Redlock

client = Redlock(json.loads(sys.argv[1]), **json.loads(sys.argv[2]))
client.connect()
print("ready", flush=True)
for line in sys.stdin:
    began = time.monotonic()
    try:
        code = compile(line.strip(), "line", "single" if " = " in line else "eval")
        value = eval(code)
    except Exception as error:
        value = f"{type(error).__name__}: {error}"
    print(json.dumps([value, (time.monotonic() - began) * 1000]), flush=True)
client.close()
"""


class Puppet:
    """A client in a process of its own, whose clocks can jump and which can be stopped."""

    def __init__(self, shim: Path, clocks: Path, urls: list[str], settings: dict[str, Any]) -> None:
        self._clocks = clocks
        self.jump()
        # A sanitizer's library wants to be the first.
        preload = [*filter(None, [os.environ.get("LD_PRELOAD")]), str(shim)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, json.dumps(urls), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": ":".join(preload), "CLOCK_SHIM": str(clocks)},
        )
        assert self._process.stdin
        assert self._process.stdout
        self._to, self._from = self._process.stdin, self._process.stdout
        assert self._from.readline() == "ready\n"

    def jump(self, wall_ns: int = 0, boot_ns: int = 0) -> None:
        """From now on its wall clock, and its clock that runs through a suspend, are so far on."""
        with self._clocks.open("r+b" if self._clocks.exists() else "wb") as file:
            file.write(struct.pack("qq", wall_ns, boot_ns))

    def begin(self, line: str) -> None:
        self._to.write(line + "\n")
        self._to.flush()

    def end(self) -> tuple[Any, float]:
        """What the line that was begun came to, and how many ms it took."""
        value, ms = json.loads(self._from.readline())
        return value, ms

    def do(self, line: str) -> Any:
        self.begin(line)
        return self.end()[0]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(") ")[2].startswith("T"))

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        self.resume()
        try:
            self._to.close()
            assert self._process.wait(20) == 0
        finally:
            self._process.kill()
            self._process.wait(20)
            self._from.close()


MakePuppet = Callable[..., Puppet]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("shim") / "clock_shim.so"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


@pytest.fixture
def proxies(masters: LocalMasters, make_proxy: MakeProxy) -> list[Proxy]:
    return [make_proxy(master) for master in masters]


@pytest.fixture
def puppet(proxies: list[Proxy], shim: Path, tmp_path: Path) -> Iterator[Puppet]:
    """Its masters are behind the proxies; a try may take a minute."""
    settings = {"retries": 0, "master_timeout": 60_000}
    puppet = Puppet(shim, tmp_path / "clocks", [proxy.url for proxy in proxies], settings)
    yield puppet
    puppet.finish()


def _stopped_while(
    puppet: Puppet, proxies: list[Proxy], line: str, effect: Callable[[], Any]
) -> None:
    """Begin a line; stop its process when it took effect, and all answers are in its sockets."""
    for proxy in proxies:
        proxy.down.holding = True
    puppet.begin(line)
    eventually(effect)
    puppet.stop()
    for proxy in proxies:
        proxy.heal()
    time.sleep(0.1)


# -- suspended -----------------------------------------------------------------------------------


@pytest.mark.case("C27")
def test_c27_a_client_that_is_stopped_for_longer_than_the_ttl(
    puppet: Puppet, proxies: list[Proxy], masters: LocalMasters
) -> None:
    _stopped_while(
        puppet,
        proxies,
        "str(client.acquire('res', 1000))",
        lambda: keys_of(masters) == [[b"res"]] * 3,
    )
    time.sleep(1.2)
    puppet.resume()
    value, _ = puppet.end()
    assert value.startswith("NoQuorum: cannot acquire: a quorum granted too late"), value
    assert puppet.do("client.stats()['too_late']") == 1
    # The same stop, but shorter, costs validity only.
    _stopped_while(
        puppet,
        proxies,
        "client.acquire('two', 10_000).validity",
        lambda: keys_of(masters) == [[b"two"]] * 3,
    )
    time.sleep(0.5)
    puppet.resume()
    value, _ = puppet.end()
    assert 9898 - 600 - SLACK_MS < value < 9898 - 600


@pytest.mark.case("C27")
def test_c27_suspended_during_an_acquire(
    puppet: Puppet, proxies: list[Proxy], masters: LocalMasters
) -> None:
    """The masters' clocks went on as the machine's own monotonic clock did not."""
    _stopped_while(
        puppet,
        proxies,
        "str(client.acquire('res', 20_000))",
        lambda: keys_of(masters) == [[b"res"]] * 3,
    )
    puppet.jump(boot_ns=30 * SECOND)
    puppet.resume()
    value, _ = puppet.end()
    assert value.startswith("NoQuorum: cannot acquire: a quorum granted too late"), value
    eventually(lambda: are_clean(masters), in_time(0))
    assert puppet.do("client.acquire('res', 20_000).held") is True


@pytest.mark.case("C27")
def test_c27_suspended_while_a_lock_is_held(puppet: Puppet, masters: LocalMasters) -> None:
    puppet.do("lock = client.acquire('res', 20_000)")
    all_have(masters, "res", puppet.do("lock.token"))
    assert puppet.do("lock.held") is True
    puppet.jump(boot_ns=10 * SECOND)
    assert puppet.do("lock.held") is True
    assert 0 < puppet.do("lock.remaining()") < 9800
    puppet.jump(boot_ns=20 * SECOND)
    assert puppet.do("[lock.held, bool(lock), lock.remaining()]") == [False, False, 0.0]
    assert puppet.do("lock.raise_if_lost()").startswith("LockLost: ")
    assert puppet.do("lock.extend(60_000)") is False
    eventually(lambda: are_clean(masters), in_time(0))


@pytest.mark.case("C27")
def test_c27_suspended_during_an_extension(
    puppet: Puppet, proxies: list[Proxy], masters: LocalMasters
) -> None:
    """Every master has extended it, but the old deadline has passed when that is read."""
    puppet.do("lock = client.acquire('res', 20_000)")
    all_have(masters, "res", puppet.do("lock.token"))
    _stopped_while(
        puppet,
        proxies,
        "lock.extend(50_000)",
        lambda: min(pttls_of(masters, "res")) > 40_000,
    )
    puppet.jump(boot_ns=30 * SECOND)
    puppet.resume()
    assert puppet.end()[0] is False
    assert puppet.do("[lock.held, lock.remaining()]") == [False, 0.0]
    eventually(lambda: are_clean(masters), in_time(0))


# -- the wall clock ------------------------------------------------------------------------------


@pytest.mark.case("C26")
@pytest.mark.parametrize("jump_ns", [HOUR_NS, -HOUR_NS], ids=["forth", "back"])
def test_c26_the_wall_clock_decides_nothing(
    puppet: Puppet, proxies: list[Proxy], masters: LocalMasters, jump_ns: int
) -> None:
    wall = puppet.do("time.time()")

    # In the middle of a try.
    for proxy in proxies:
        proxy.down.holding = True
    puppet.begin("lock = client.acquire('res', 10_000)")
    eventually(lambda: keys_of(masters) == [[b"res"]] * 3)
    puppet.jump(wall_ns=jump_ns)
    for proxy in proxies:
        proxy.heal()
    puppet.end()
    assert 9898 - SLACK_MS < puppet.do("lock.validity") <= 9898
    # (The shim works.)
    assert abs(puppet.do("time.time()") - wall - jump_ns / SECOND) < 60

    # Between extensions, and before the release.
    puppet.jump(wall_ns=-jump_ns)
    assert puppet.do("lock.extend(5_000)") is True
    assert 4948 - SLACK_MS < puppet.do("lock.remaining()") <= 4948
    puppet.jump(wall_ns=jump_ns)
    assert puppet.do("lock.held") is True
    assert puppet.do("lock.release()") is True

    # In the middle of a wait.
    occupy(masters, "res")
    puppet.begin("client.acquire('res', 10_000, wait=1000)")
    time.sleep(0.3)
    puppet.jump(wall_ns=-jump_ns)
    value, ms = puppet.end()
    assert value is None
    assert 700 < ms < 1000 + SLACK_MS
