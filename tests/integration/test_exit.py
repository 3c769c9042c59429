"""The end of the interpreter, at any moment: no hang, no crash, no word on stderr.

Scripts end in processes of their own. What masters that fail have to do with it is said by the
log, which these scripts switch off: without a handler Python prints warnings on stderr.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from integration.helpers import (
    SLACK_MS,
    are_clean,
    closed_port,
    eventually,
    keys_of,
    occupy,
    run_script,
)

from redlock_fast.testing import LocalMasters

_PRELUDE = """
import atexit, faulthandler, logging, os, signal, sys, threading, time
from redlock_fast import NoQuorum, Redlock, RedlockError
logging.disable()
faulthandler.enable()
urls = sys.argv[1:]
client = Redlock(urls, retries=0, master_timeout=100)

def starts(threads):
    for thread in threads:
        thread.start()
    time.sleep(0.1)

def daemons(count, work):
    starts([threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)])

def pairs(i):
    while True:
        lock = client.acquire(f"daemon:{i}", 500)
        lock and lock.release()

def forever(i):
    "In sleeps and short rounds."
    client.acquire("rival", 2000, wait=float("inf"))

def long_round(i):
    "All in one round, one of them reading."
    slow.acquire(f"daemon:{i}", 500)

def refused(i):
    while True:
        try:
            client.acquire("res", 2000)
        except NoQuorum:
            pass
"""


def _ends(body: str, *urls: str, code: int = 0, within_s: float = 5.0) -> str:
    """Run a script to its end, which must be in good order; returns what it printed.

    `within_s` bounds its own end: from when it prints "the end" on.
    """
    start = time.monotonic()
    done = run_script(_PRELUDE + body, *urls)
    took = time.monotonic() - start
    assert (done.returncode, done.stderr) == (code, "")
    assert took < within_s + SLACK_MS / 1000, f"took {took:.1f} s"
    return done.stdout


@pytest.mark.case("C114")
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("os._exit(3)", 3),
        ("t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", 0),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("client.me = client", 0),  # a cycle
    ],
)
def test_c114_a_lock_is_held(masters: LocalMasters, how: str, code: int) -> None:
    body = f"""
client.connect()
lock = client.acquire("res", 300)
assert lock
{how}
"""
    _ends(body, *masters.urls, code=code)
    # Its ttl ends it.
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C114")
def test_c114_a_lock_is_held_and_masters_hang(masters: LocalMasters) -> None:
    body = """
client.connect()
lock = client.acquire("res", 300)
for pid in PIDS: os.kill(pid, signal.SIGSTOP)
try:
    lock.release()
except NoQuorum:
    print("unconfirmed")
""".replace("PIDS", str([master.pid for master in masters]))
    try:
        assert _ends(body, *masters.urls) == "unconfirmed\n"
    finally:
        for master in masters:
            os.kill(master.pid, signal.SIGCONT)
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C115")
@pytest.mark.parametrize("close", ["", "client.close()"])
def test_c115_the_janitor_is_at_work(masters: LocalMasters, close: str) -> None:
    body = f"""
client.connect()
lock = client.acquire("res", 60_000)
os.kill({masters[2].pid}, signal.SIGKILL)
time.sleep(0.1)
assert lock.release()
assert client._driver.pump.paying
{close}
"""
    _ends(body, *masters.urls)


@pytest.mark.case("C115")
@pytest.mark.parametrize(
    ("work", "close"),
    [
        ("pairs", ""),
        ("forever", ""),
        ("long_round", ""),
        ("pairs", "atexit.register(client.close)"),
        ("forever", "client.close()"),
        ("long_round", "slow.close()"),
    ],
)
def test_c115_daemon_threads_inside(masters: LocalMasters, work: str, close: str) -> None:
    occupy(masters, "rival")
    body = f"slow = Redlock(urls, master_timeout=60_000)\ndaemons(16, {work})\n{close}\n"
    if work == "long_round":
        masters.pause(0)
        masters.pause(1)
    if close:
        # Who waits gets a ClosedError, which its thread would print.
        body = "threading.excepthook = lambda args: None\n" + body
    try:
        _ends(body, *masters.urls)
    finally:
        if work == "long_round":
            masters.resume(0)
            masters.resume(1)


@pytest.mark.case("C115")
def test_c115_daemon_threads_against_closed_ports() -> None:
    with closed_port() as one, closed_port() as two:
        _ends("daemons(16, refused)", *(f"redis://127.0.0.1:{port}" for port in (one, two)))


@pytest.mark.slow
@pytest.mark.case("C115")
@pytest.mark.parametrize("work", ["pairs", "forever", "refused"])
def test_c115_exits_at_random_moments(masters: LocalMasters, work: str) -> None:
    occupy(masters, "rival")
    draw = random.Random(1)
    with closed_port() as one, closed_port() as two:
        urls = masters.urls
        if work == "refused":
            urls = [f"redis://127.0.0.1:{port}" for port in (one, two)]
        for _ in range(70):
            _ends(f"daemons(16, {work})\ntime.sleep({draw.uniform(0, 0.1)})", *urls)


@pytest.mark.parametrize("daemon", ["", "daemons(8, pairs)"])
def test_atexit_handlers_use_the_client(masters: LocalMasters, daemon: str) -> None:
    body = f"""
def leave(name):
    with client.lock(name, 60_000) as lock:
        print(lock.extend(), lock.held)
    assert client.release(kept) is (name == "first")

atexit.register(client.close)
atexit.register(leave, "second")
atexit.register(leave, "first")
kept = client.acquire("kept", 60_000)
threading.excepthook = lambda args: None
{daemon}
"""
    occupy(masters, "rival")
    assert _ends(body, *masters.urls) == "True True\n" * 2
    # Daemon threads die holding what they hold, for their ttl.
    eventually(lambda: keys_of(masters) == [[b"rival"]] * 3)


@pytest.mark.parametrize(
    ("daemon", "debts"),
    [("", False), ("", True), ("daemons(8, pairs)", False), ("daemons(8, forever)", True)],
)
def test_finalizers_use_the_client(masters: LocalMasters, daemon: str, debts: bool) -> None:
    """When the interpreter is half gone, and no thread can be started any more."""
    body = f"""
class Holder:
    def __init__(self):
        client.connect()
        self.lock = client.acquire("res", 60_000)

    def __del__(self, print=print, done=sys.is_finalizing):
        print(done(), self.lock.release())

# In a module of its own: this one's names are kept by the daemon threads' frames.
sys.modules["extra"] = type(sys)("extra")
sys.modules["extra"].holder = Holder()
{daemon}
"""
    if debts:
        body += f"os.kill({masters[2].pid}, signal.SIGKILL)\ntime.sleep(0.1)\n"
    occupy(masters, "rival")
    assert _ends(body, *masters.urls) == "True True\n"
    if not debts:
        eventually(lambda: keys_of(masters) == [[b"rival"]] * 3)


@pytest.mark.case("C113")
def test_c113_a_dropped_client_closes_its_connections(masters: LocalMasters) -> None:
    """Without close(), and with a lock of it dropped: nothing stays but the key, for its ttl."""
    body = """
import gc, warnings
warnings.simplefilter("error")
before = set(os.listdir("/proc/self/fd"))
other = Redlock(urls)
other.connect()
lock = other.acquire("res", 300)
print(len(os.listdir("/proc/self/fd")) - len(before))
del lock, other
gc.collect()
print(set(os.listdir("/proc/self/fd")) <= before, threading.active_count())
"""
    assert _ends(body, *masters.urls) == "4\nTrue 1\n"
    eventually(lambda: are_clean(masters))
