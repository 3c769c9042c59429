"""Descriptors that run out or have high numbers. Each test is a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from integration.helpers import are_clean, eventually

from redlock_fast.testing import LocalMasters

_START = """
import logging, os, resource, sys, time
from redlock_fast import NoQuorum, Redlock

logging.disable()
client = Redlock(sys.argv[1:], retries=0, master_timeout=500, connect_timeout=5000)
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

def limit(count):
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))

def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True

def used():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit(most)
    found = sorted(map(int, os.listdir("/proc/self/fd")))
    limit(before)
    return [fd for fd in found if is_open(fd)]

def life(name):
    lock = client.acquire(name, 60_000)
    assert lock, "refused"
    assert lock.extend(60_000)
    assert client.owned(lock)
    assert lock.release()
"""


def _run(script: str, masters: LocalMasters) -> None:
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", _START + script, *masters.urls],
        capture_output=True,
        timeout=120,
        text=True,
        check=False,
    )
    print(run.stderr)  # noqa: T201 - shown when it fails
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C85")
def test_c85_descriptors_above_1024(masters: LocalMasters) -> None:
    script = """
limit(min(4096, most))
null = os.open("/dev/null", os.O_RDONLY)
while os.dup(null) < 1500:
    pass
client.connect()
for turn in range(20):
    life(f"res:{turn}")
assert len([fd for fd in used() if fd > 1500]) == 4, used()
client.close()
assert used()[-1] == 1500, used()
print("done")
"""
    _run(script, masters)


@pytest.mark.case("C86")
@pytest.mark.parametrize(
    ("free", "master_timeout"),
    [(0, 50), (1, 50), (2, 50), pytest.param(2, 400, marks=pytest.mark.slow)],
)
def test_c86_no_descriptor_left(masters: LocalMasters, free: int, master_timeout: int) -> None:
    """None at all; one, that is needed to wait with; one more, for one of three masters.

    With time enough an acquire waits for the end of the back-off, so most of them try to connect.
    """
    script = f"""
client = Redlock(
    sys.argv[1:], retries=0, master_timeout={master_timeout}, connect_timeout=5000
)
before = used()
limit(before[-1] + 1 + {free})
client.connect()
for turn in range(100):
    try:
        client.acquire(f"res:{{turn}}", 60_000)
        raise AssertionError("granted")
    except NoQuorum as error:
        causes = [report.cause for report in error.reports]
        assert sum("Too many open files" in cause for cause in causes) >= 2, causes
    assert len(used()) == len(before) + {free}, used()
try:
    client.acquire_many(["a", "b"], 60_000)
    raise AssertionError("granted")
except NoQuorum:
    pass
for call in (lambda: client.locked("a"), lambda: client.adopt("a", "0" * 40, 60_000)):
    try:
        call()
        raise AssertionError("answered")
    except NoQuorum:
        pass
limit(most)
end = time.monotonic() + 10
while True:
    try:
        life("res")
        break
    except NoQuorum:
        assert time.monotonic() < end
while len(used()) != len(before) + 4:   # one to wait with, three connections
    client.acquire("res", 60_000).release()
    assert time.monotonic() < end, used()
client.close()
assert used() == before
print("done")
"""
    _run(script, masters)


def test_no_descriptor_left_in_a_forked_child(masters: LocalMasters) -> None:
    """It has none to wait with, which is not the same as a fork in the middle of the call."""
    script = """
client.connect()
life("res")
child = os.fork()
if not child:
    code = 1
    try:
        limit(used()[-1] + 1)
        client.acquire("res", 60_000)
    except NoQuorum as error:
        code = 0 if "Too many open files" in error.reports[0].cause else 2
    except BaseException:
        code = 3
    os._exit(code)
assert os.waitpid(child, 0)[1] == 0
client.close()
print("done")
"""
    _run(script, masters)
