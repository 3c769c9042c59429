"""The drop-in for redlock-py, beside the original where both can be asked.

Each difference that is meant has a test that shows what the original does instead.
"""

from __future__ import annotations

import enum
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import redis
import redlock
from integration.fakes import PASS, Answer, MakeFake, Talk
from integration.helpers import (
    HOUR,
    NT,
    PATIENT,
    SLACK_MS,
    Stopwatch,
    all_have,
    are_clean,
    calls_of,
    closed_port,
    eventually,
    occupy,
    pttls_of,
    refresh_stats,
    state_of,
    vacate,
    values_of,
)

from redlock_fast import NoQuorum, scripts
from redlock_fast.compat import redlock_py
from redlock_fast.compat.redlock_py import Lock, MultipleRedlockException, Redlock
from redlock_fast.testing import LocalMasters

MakeDlm = Callable[..., Redlock]  # the fixture `make_dlm`


class Patient(Redlock):
    """One that a stalled test machine does not disturb."""

    master_timeout = PATIENT


@pytest.fixture
def make_dlm(masters: LocalMasters, net: Any) -> Iterator[MakeDlm]:
    """A function that makes a connected `Patient` (or another kind), closed after the test."""
    with ExitStack() as stack:

        def make(places: Any, *args: Any, kind: type[Redlock] = Patient, **kwargs: Any) -> Redlock:
            dlm = kind([getattr(p, "url", p) for p in places], *args, **kwargs)
            stack.callback(dlm.close)
            dlm._client.connect()
            return dlm

        yield make


@pytest.fixture
def dlm(masters: LocalMasters, make_dlm: MakeDlm) -> Redlock:
    return make_dlm(masters, 1)


@pytest.fixture
def original(masters: LocalMasters) -> Iterator[redlock.Redlock]:
    """redlock-py on the same three masters, by URL: so redis-py does not retry by itself."""
    client = redlock.Redlock(masters.urls, 1, 0.001)
    yield client
    for server in client.servers:
        server.close()


def _locked(dlm: Redlock, masters: Any, name: Any = "res", ttl: int = HOUR) -> Lock:
    lock = dlm.lock(name, ttl)
    assert lock
    eventually(lambda: values_of(masters, name) == [lock.key] * len(masters))
    return lock


# -- the same as the original ------------------------------------------------------------------


@pytest.mark.case("C164")
@pytest.mark.case("C34")
def test_c164_lock_and_unlock(dlm: Redlock, masters: LocalMasters) -> None:
    lock = _locked(dlm, masters, ttl=1500)
    assert all(1500 - SLACK_MS < pttl <= 1500 for pttl in pttls_of(masters, "res"))
    assert type(lock) is Lock
    assert type(lock.validity) is int
    assert 1500 - SLACK_MS < lock.validity <= 1500 - 15 - 2
    assert lock.resource == "res"
    assert type(lock.key) is bytes
    assert dlm.lock("res", 1000) is False

    assert dlm.unlock(lock) is None  # type: ignore[func-returns-value]
    eventually(lambda: are_clean(masters))
    assert dlm.unlock(lock) is None  # type: ignore[func-returns-value]
    assert dlm.lock("res", 1000)


@pytest.mark.case("C164")
def test_c164_unlock_after_expiry(dlm: Redlock, masters: LocalMasters) -> None:
    lock = _locked(dlm, masters)
    vacate(masters, "res")
    occupy(masters, "res")
    for _ in range(2):
        assert dlm.unlock(lock) is None  # type: ignore[func-returns-value]
    assert values_of(masters, "res") == [b"rival"] * 3
    short = dlm.lock("short", 60)
    assert short
    eventually(lambda: not any(values_of(masters, "short")))
    assert dlm.unlock(short) is None  # type: ignore[func-returns-value]


class Ttl(enum.IntEnum):
    LONG = 10_000


@pytest.mark.case("C164")
@pytest.mark.case("C122")
@pytest.mark.case("C123")
@pytest.mark.parametrize("hooked", [False, True])
def test_c164_c122_c123_ttls(make_dlm: MakeDlm, masters: LocalMasters, hooked: bool) -> None:
    dlm = make_dlm(masters, 1, kind=Hooked if hooked else Patient)
    lock = dlm.lock("res", HOUR)
    assert lock
    eventually(lambda: values_of(masters, "res") == [lock.key] * 3)
    before = [calls_of(master).get("set", 0) for master in masters]
    # (2: not above its own drift; the original never gets such a lock.)
    for odd in ("1000", 1000.0, None, True, 0, -1, 2, 2**63):
        for name in ("other", "res"):
            with pytest.raises(ValueError, match="ttl"):
                dlm.lock(name, odd)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="ttl"):
            dlm.extend(lock, odd)  # type: ignore[arg-type]
        for server in dlm.servers[:1] if type(odd) is not int else []:
            with pytest.raises(ValueError, match="ttl"):
                dlm.lock_instance(server, "other", b"key", odd)  # type: ignore[arg-type]
    assert [calls_of(master).get("set", 0) for master in masters] == before
    assert min(pttls_of(masters, "res")) > HOUR - 60_000
    assert dlm.lock("enum", Ttl.LONG)
    assert 0 < pttls_of(masters, "enum")[0] <= 10_000


@pytest.mark.case("C164")
def test_c164_masters_as_urls_dicts_and_clients(make_dlm: MakeDlm, masters: LocalMasters) -> None:
    client = redis.Redis(port=masters[2].port)
    connection = client.client_id()
    dicts = [{"host": "localhost", "port": port} for port in masters.ports]
    for places in (masters.urls, dicts, [masters.urls[0], dicts[1], client]):
        dlm = make_dlm(places, 1)
        lock = _locked(dlm, masters)
        assert [server.get("res") for server in dlm.servers] == [lock.key] * 3
        dlm.unlock(lock)
        eventually(lambda: are_clean(masters))
        dlm.close()
    assert client.client_id() == connection  # the caller's own was not closed
    client.close()


@pytest.mark.parametrize("name", ["text \u00e4", b"\xff\x00", 17, -3, 1.5])
def test_names_are_encoded_as_the_original_does(
    dlm: Redlock, original: redlock.Redlock, masters: LocalMasters, name: Any
) -> None:
    theirs = original.lock(name, HOUR)
    assert theirs
    keys = masters[0].keys()
    assert dlm.lock(name, HOUR) is False
    original.unlock(theirs)
    lock = dlm.lock(name, HOUR)
    assert lock
    assert lock.resource is name
    eventually(lambda: [master.keys() for master in masters] == [keys] * 3)
    assert original.lock(name, HOUR) is False
    dlm.unlock(lock)


def test_names_that_make_no_sense(dlm: Redlock) -> None:
    for name, error in ((None, TypeError), (True, TypeError), ("", ValueError)):
        with pytest.raises(error, match="resource"):
            dlm.lock(name, HOUR)  # type: ignore[arg-type]


@pytest.mark.case("C164")
def test_c164_the_original_and_the_drop_in_unlock_each_others_locks(
    dlm: Redlock, original: redlock.Redlock, masters: LocalMasters
) -> None:
    original.unlock(_locked(dlm, masters))
    assert are_clean(masters)
    theirs = original.lock("res", HOUR)
    assert dlm.lock("res", HOUR) is False
    dlm.unlock(theirs)
    eventually(lambda: are_clean(masters))


_UNLOCK = """
import pickle, sys
from redlock_fast.compat.redlock_py import Redlock
with Redlock(sys.argv[2:]) as dlm:
    dlm.unlock(pickle.loads(bytes.fromhex(sys.argv[1])))
"""


@pytest.mark.case("C164")
@pytest.mark.case("C99")
def test_c164_c99_another_process_unlocks_what_was_pickled(
    dlm: Redlock, masters: LocalMasters
) -> None:
    lock = _locked(dlm, masters)
    data = pickle.dumps(lock).hex()
    subprocess.run([sys.executable, "-c", _UNLOCK, data, *masters.urls], check=True, timeout=60)
    eventually(lambda: are_clean(masters))
    dlm.unlock(lock)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_unlocks_and_extends(dlm: Redlock, masters: LocalMasters) -> None:
    """As with the original: the tuple says whose lock it is, not the process."""
    one, two = _locked(dlm, masters, "one"), _locked(dlm, masters, "two", 10_000)

    def child() -> None:
        dlm.unlock(one)
        assert dlm.extend(two, HOUR)
        dlm.close()  # what the slowest master is owed
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    eventually(lambda: not any(values_of(masters, "one")))
    # On a quorum: the child is decided before it is connected to the slowest master.
    assert sorted(pttls_of(masters, "two"))[1] > 10_000
    dlm.unlock(one)
    dlm.unlock(two)


@pytest.mark.case("C164")
def test_c164_majority_of_the_configured(dlm: Redlock, masters: LocalMasters) -> None:
    occupy([masters[0], masters[1]], "res")
    assert dlm.lock("res", HOUR) is False
    eventually(lambda: values_of(masters, "res") == [b"rival", b"rival", None])
    vacate([masters[0]], "res")
    lock = dlm.lock("res", HOUR)
    assert lock
    dlm.unlock(lock)


def test_threads_share_one(dlm: Redlock, masters: LocalMasters) -> None:
    failed: list[str] = []

    def work(name: str) -> None:
        for _ in range(50):
            lock = dlm.lock(name, HOUR)
            if not lock or dlm.lock(name, HOUR) is not False:
                failed.append(name)
                return
            dlm.unlock(lock)

    threads = [threading.Thread(target=work, args=(f"name {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    eventually(lambda: are_clean(masters))


def test_what_is_dropped_is_closed(masters: LocalMasters) -> None:
    """(The leak guard looks.) No cycle keeps it: the collector is off."""
    gc.collect()
    gc.disable()
    try:
        before = [master.command("CLIENT", "LIST").count(b"id=") for master in masters]
        lock = Patient(masters.urls).lock("res", HOUR)
        assert lock
        lock = False
        eventually(lambda: [m.command("CLIENT", "LIST").count(b"id=") for m in masters] == before)
    finally:
        gc.enable()


_EXIT = """
import sys
from redlock_fast.compat.redlock_py import Lock, Redlock
Redlock.master_timeout = 1000
dlm = Redlock(sys.argv[1:])
dlm.unlock(Lock(1, "res", b"key"))
"""


def test_what_was_unlocked_last_reaches_every_master(make_fake: MakeFake) -> None:
    """Though the process ends without a close, as all programs of the original's users do."""

    def answer(command: list[bytes], talk: Talk) -> Answer:
        return (0.3, PASS) if command[0] == b"CLIENT" else PASS  # it is not ready at once

    fakes = [make_fake(), make_fake(), make_fake(answer)]
    for fake in fakes:
        fake.data[b"res"] = (b"key", time.monotonic() + 60)
    urls = [fake.url for fake in fakes]
    subprocess.run([sys.executable, "-c", _EXIT, *urls], check=True, timeout=60)
    eventually(lambda: not any(fake.data for fake in fakes), 1.0)


_EXIT_IN_A_CALL = """
import sys, threading, time
from redlock_fast.compat.redlock_py import Redlock
dlm = Redlock(sys.argv[1:], retry_count=sys.maxsize)
threading.Thread(target=dlm.lock, args=("res", 60_000), daemon=True).start()
time.sleep(0.3)
"""


def test_a_daemon_thread_in_a_call_prints_nothing_at_exit(masters: LocalMasters) -> None:
    occupy(masters, "res")
    done = subprocess.run(
        [sys.executable, "-c", _EXIT_IN_A_CALL, *masters.urls],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""


# -- pauses and tries --------------------------------------------------------------------------


@pytest.mark.case("C126")
@pytest.mark.case("C135")
@pytest.mark.parametrize(("count", "delay"), [(0, 5), (1, 5), (0, 0)])
def test_c126_c135_one_try_and_no_pause(
    make_dlm: MakeDlm, masters: LocalMasters, count: int, delay: float
) -> None:
    dlm = make_dlm(masters, count, delay)
    occupy(masters, "res")
    refresh_stats(masters)
    with Stopwatch() as watch:
        assert dlm.lock("res", HOUR) is False
    assert watch.ms < SLACK_MS
    assert dlm._client.locked("res")  # behind the last SET
    assert [calls_of(master)["set"] for master in masters] == [1, 1, 1]
    vacate(masters, "res")
    assert dlm.lock("res", HOUR)


@pytest.mark.case("C126")
def test_c126_the_original_turns_zero_into_three(masters: LocalMasters) -> None:
    original = redlock.Redlock(masters.urls, retry_count=0, retry_delay=0)
    occupy(masters, "res")
    refresh_stats(masters)
    with Stopwatch() as watch:
        assert original.lock("res", HOUR) is False
    assert watch.ms > 600 - 1  # the last of them after the last try
    assert [calls_of(master)["set"] for master in masters] == [3, 3, 3]
    for server in original.servers:
        server.close()


def test_pauses_are_not_shorter_than_the_retry_delay(
    make_dlm: MakeDlm, masters: LocalMasters
) -> None:
    dlm = make_dlm(masters, 4, 0.1)
    occupy(masters, "res")
    refresh_stats(masters)
    with Stopwatch() as watch:
        assert dlm.lock("res", HOUR) is False
    assert 300 <= watch.ms < 3 * 125 + SLACK_MS
    assert dlm._client.locked("res")
    assert [calls_of(master)["set"] for master in masters] == [4, 4, 4]


# -- better than the original: masters that fail -----------------------------------------------


def test_a_quorum_is_a_lock_though_a_master_is_down(
    dlm: Redlock, original: redlock.Redlock, masters: LocalMasters
) -> None:
    masters.kill(0)
    live = [masters[1], masters[2]]
    with pytest.raises(redlock.MultipleRedlockException):
        original.lock("theirs", HOUR)
    assert all(values_of(live, "theirs"))  # until its ttl, for nobody

    lock = dlm.lock("res", HOUR)
    assert lock
    assert values_of(live, "res") == [lock.key] * 2
    assert dlm.lock("res", HOUR) is False
    dlm.unlock(lock)
    eventually(lambda: values_of(live, "res") == [None, None])


def test_a_dead_master_is_owed_nothing_for_locks_it_never_saw(
    dlm: Redlock, masters: LocalMasters
) -> None:
    masters.kill(0)
    for i in range(20):
        lock = dlm.lock(f"res {i}", HOUR)
        assert lock
        dlm.unlock(lock)
    assert state_of(dlm._client, 0)["debts"] <= 2  # of the tries that found out


def test_a_hung_master_costs_no_more_than_its_timeout(
    make_dlm: MakeDlm, masters: LocalMasters
) -> None:
    class Usual(Redlock):
        master_timeout = NT

    dlm = make_dlm(masters, 1, kind=Usual)
    masters.pause(0)
    for i in range(3):
        with Stopwatch() as watch:
            lock = dlm.lock(f"res {i}", HOUR)
            assert lock
            dlm.unlock(lock)
        assert watch.ms < 2 * NT + SLACK_MS
    masters.resume(0)


def test_no_quorum_raises_with_what_each_master_did(
    make_dlm: MakeDlm, original: redlock.Redlock, masters: LocalMasters
) -> None:
    class Usual(Redlock):
        master_timeout = NT

    with closed_port() as port:
        places = [masters.urls[0], f"redis://127.0.0.1:{port}", masters.urls[1]]
        dlm = make_dlm(places, 2, 0, kind=Usual)
        masters.pause(1)
        with pytest.raises(MultipleRedlockException) as caught:
            dlm.lock("res", HOUR)
        masters.resume(1)
    refused, late = caught.value.errors
    assert type(refused) is redis.ConnectionError
    assert type(late) is redis.TimeoutError
    assert f"127.0.0.1:{port} refused" in str(caught.value)
    assert masters.addresses[1] in str(late)
    assert isinstance(caught.value.__cause__, NoQuorum)
    eventually(lambda: are_clean(masters))

    masters.kill(0)
    masters.kill(1)
    assert original.lock("res", HOUR) is False  # no word of why


def test_no_quorum_in_the_way_of_the_original(
    dlm: Redlock, masters: LocalMasters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redlock_py, "strict", True)
    masters.kill(0)
    masters.kill(1)
    assert dlm.lock("res", HOUR) is False
    eventually(lambda: are_clean(masters))


def test_contention_is_contention_though_a_master_is_down(
    dlm: Redlock, masters: LocalMasters
) -> None:
    masters.kill(0)
    occupy([masters[1], masters[2]], "res")
    assert dlm.lock("res", HOUR) is False


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"-NOPERM no permission\r\n", redis.exceptions.NoPermissionError),
        (b"-LOADING loading\r\n", redis.exceptions.BusyLoadingError),
        (b"-READONLY read only\r\n", redis.exceptions.ReadOnlyError),
        (b"-WRONGPASS wrong\r\n", redis.AuthenticationError),
        (b"-OOM out of memory\r\n", redis.exceptions.OutOfMemoryError),
        (b"-MISCONF disk\r\n", redis.ResponseError),
        (b"-MOVED 1 127.0.0.1:7000\r\n", redis.ResponseError),
        (b":1\r\n", redis.exceptions.InvalidResponse),
    ],
)
def test_errors_are_those_of_redis_py(
    make_fake: MakeFake, make_dlm: MakeDlm, reply: bytes, error: type[Exception]
) -> None:
    def answer(command: list[bytes], talk: Talk) -> Answer:
        return reply if command[0] == b"SET" else PASS

    dlm = make_dlm([make_fake(answer)], 1)
    with pytest.raises(MultipleRedlockException) as caught:
        dlm.lock("res", HOUR)
    assert [type(e) for e in caught.value.errors] == [error]


def test_an_error_at_the_greeting(make_fake: MakeFake, make_dlm: MakeDlm) -> None:
    fake = make_fake(lambda command, talk: b"-WRONGPASS no\r\n" if command[0] == b"AUTH" else PASS)
    dlm = make_dlm([f"redis://:S3cr3t@127.0.0.1:{fake.port}"], 1)
    with pytest.raises(MultipleRedlockException) as caught:
        dlm.lock("res", HOUR)
    assert [type(e) for e in caught.value.errors] == [redis.AuthenticationError]
    assert "S3cr3t" not in str(caught.value)


def test_a_quorum_that_comes_too_late_is_none(make_fake: MakeFake, make_dlm: MakeDlm) -> None:
    def answer(command: list[bytes], talk: Talk) -> Answer:
        return (0.1, PASS) if command[0] == b"SET" else PASS

    fakes = [make_fake(answer) for _ in range(3)]
    dlm = make_dlm(fakes, 1)
    assert dlm.lock("res", 60) is False
    eventually(lambda: not any(fake.data for fake in fakes))


def test_unlock_is_silent_though_masters_are_down(
    make_dlm: MakeDlm, masters: LocalMasters, caplog: pytest.LogCaptureFixture
) -> None:
    class Usual(Redlock):
        master_timeout = NT

    dlm = make_dlm(masters, 1, kind=Usual)
    lock, foreign = _locked(dlm, masters), Lock(1, "other", b"key")
    masters.kill(0)
    masters.pause(1)
    for each in (lock, foreign):
        caplog.clear()
        assert dlm.unlock(each) is None  # type: ignore[func-returns-value]
        assert "no quorum of answers" in caplog.text
        assert str(lock.key) not in caplog.text
    masters.resume(1)
    eventually(lambda: not values_of([masters[1]], "res")[0])
    dlm.unlock(lock)


# -- extend, which the original has not --------------------------------------------------------


def test_extend(dlm: Redlock, masters: LocalMasters) -> None:
    lock = _locked(dlm, masters, ttl=10_000)
    for held in (lock, Lock(*lock)):  # known by this client, or just by its key
        longer = dlm.extend(held, HOUR)
        assert longer
        assert type(longer) is Lock
        assert (longer.resource, longer.key) == (lock.resource, lock.key)
        assert HOUR - HOUR // 100 - 2 - SLACK_MS < longer.validity <= HOUR - HOUR // 100 - 2
        eventually(lambda: min(pttls_of(masters, "res")) > HOUR - 60_000)
        assert dlm.extend(longer, 10_000)
        eventually(lambda: max(pttls_of(masters, "res")) <= 10_000)
    dlm.unlock(lock)
    eventually(lambda: are_clean(masters))
    assert dlm.extend(lock, HOUR) is False


def test_extend_of_a_lost_lock(dlm: Redlock, masters: LocalMasters) -> None:
    lock = _locked(dlm, masters)
    foreign = Lock(*_locked(dlm, masters, "other"))
    for name in ("res", "other"):
        vacate([masters[0], masters[1]], name)
    assert dlm.extend(lock, HOUR) is False
    assert dlm.extend(foreign, HOUR) is False
    eventually(lambda: are_clean(masters))


def test_extend_without_a_quorum(dlm: Redlock, masters: LocalMasters) -> None:
    lock = _locked(dlm, masters)
    foreign = Lock(*_locked(dlm, masters, "other"))
    masters.kill(0)
    # One says ours, one missing, one nothing: that is neither.
    vacate([masters[1]], "res")
    vacate([masters[1]], "other")
    for held in (lock, foreign):
        with pytest.raises(MultipleRedlockException) as caught:
            dlm.extend(held, HOUR)
        assert [type(e) for e in caught.value.errors] == [redis.ConnectionError]


# -- what subclasses override ------------------------------------------------------------------


def test_ids_of_a_subclass(make_dlm: MakeDlm, masters: LocalMasters) -> None:
    made: list[Any] = []

    class Named(Patient):
        def get_unique_id(self) -> Any:
            made.append(f"host-{len(made)}")
            return made[-1] if text else made[-1].encode()

    for text in (True, False):
        made.clear()
        dlm = make_dlm(masters, 3, 0, kind=Named)
        occupy(masters, "res")
        assert dlm.lock("res", HOUR) is False
        assert len(made) == 3  # a fresh one for each try
        vacate(masters, "res")
        lock = dlm.lock("res", HOUR)
        assert lock
        assert lock.key == ("host-3" if text else b"host-3")
        all_have(masters, "res", "host-3")
        dlm.unlock(Lock(*lock))
        eventually(lambda: are_clean(masters))


def test_ids_that_cannot_be_sent(dlm: Redlock) -> None:
    with mock.patch.object(dlm, "get_unique_id", return_value=17), pytest.raises(TypeError):
        dlm.lock("res", HOUR)
    with pytest.raises(TypeError, match="key"):
        dlm.unlock(Lock(1, "res", 17))


class Hooked(Patient):
    """Asks servers by itself, and remembers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[tuple[str, Any]] = []

    def lock_instance(self, server: Any, resource: Any, val: Any, ttl: int) -> Any:
        self.asked.append(("lock", server))
        return super().lock_instance(server, resource, val, ttl)

    def unlock_instance(self, server: Any, resource: Any, val: Any) -> None:
        self.asked.append(("unlock", server))
        super().unlock_instance(server, resource, val)


def test_hooks_ask_the_servers(make_dlm: MakeDlm, masters: LocalMasters) -> None:
    dlm = make_dlm(masters, 2, 0.01, kind=Hooked)
    assert isinstance(dlm, Hooked)
    refresh_stats(masters)
    lock = dlm.lock("res", 10_000)
    assert lock
    assert 10_000 - 102 - SLACK_MS < lock.validity <= 10_000 - 102
    assert dlm.asked == [("lock", server) for server in dlm.servers]
    assert [calls_of(master)["set"] for master in masters] == [1, 1, 1]
    assert values_of(masters, "res") == [lock.key] * 3
    dlm.asked.clear()
    dlm.unlock(lock)
    assert dlm.asked == [("unlock", server) for server in dlm.servers]
    assert are_clean(masters)

    dlm.asked.clear()
    occupy([masters[0], masters[1]], "res")
    assert dlm.lock("res", 10_000) is False
    assert [what for what, _ in dlm.asked] == (["lock"] * 3 + ["unlock"] * 3) * 2
    assert values_of(masters, "res") == [b"rival", b"rival", None]


def test_hooks_of_failing_servers(
    make_dlm: MakeDlm, masters: LocalMasters, monkeypatch: pytest.MonkeyPatch
) -> None:
    dlm = make_dlm(masters, 1, kind=Hooked)
    masters.kill(0)
    lock = dlm.lock("res", HOUR)
    assert lock
    dlm.unlock(lock)  # the one that fails is logged
    assert are_clean(masters)
    masters.kill(1)
    with pytest.raises(MultipleRedlockException) as caught:
        dlm.lock("res", HOUR)
    assert [type(e) for e in caught.value.errors] == [redis.ConnectionError] * 2
    assert are_clean(masters)
    monkeypatch.setattr(redlock_py, "strict", True)
    assert dlm.lock("res", HOUR) is False


def test_hooks_that_are_too_slow_or_are_interrupted(
    make_dlm: MakeDlm, masters: LocalMasters
) -> None:
    class Slow(Patient):
        def lock_instance(self, server: Any, resource: Any, val: Any, ttl: int) -> Any:
            granted = super().lock_instance(server, resource, val, ttl)
            if server is self.servers[-1]:
                slow()
            return granted

    dlm = make_dlm(masters, 1, kind=Slow)

    def slow() -> None:
        time.sleep(0.2)

    assert dlm.lock("res", 200) is False
    assert are_clean(masters)

    def slow() -> None:  # type: ignore[no-redef]  # noqa: F811
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dlm.lock("res", HOUR)
    assert are_clean(masters)


def test_unlock_hooks_that_raise(make_dlm: MakeDlm, masters: LocalMasters) -> None:
    """As in the original: what an overridden `unlock_instance` lets out is collected."""

    class Loud(Patient):
        def unlock_instance(self, server: Any, resource: Any, val: Any) -> None:
            raise redis.ConnectionError("loud")

    dlm = make_dlm(masters, 1, kind=Loud)
    lock = dlm.lock("res", HOUR)
    assert lock
    with pytest.raises(MultipleRedlockException, match="loud :: loud :: loud"):
        dlm.unlock(lock)
    occupy(masters, "other")
    assert dlm.lock("other", HOUR) is False


def test_patches_and_another_script_count_as_overridden(
    dlm: Redlock, make_dlm: MakeDlm, masters: LocalMasters
) -> None:
    with mock.patch.object(dlm, "lock_instance", return_value=True) as patched:
        assert dlm.lock("res", HOUR)
    assert patched.call_count == 3
    assert are_clean(masters)

    class Scripted(Patient):
        unlock_script = scripts.RELEASE.text.decode() + " -- mine"

    scripted = make_dlm(masters, 1, kind=Scripted)
    lock = scripted.lock("res", HOUR)
    assert lock
    with mock.patch.object(scripted.servers[0], "eval", wraps=scripted.servers[0].eval) as wrapped:
        scripted.unlock(lock)
    assert wrapped.call_args.args == (Scripted.unlock_script, 1, "res", lock.key)
    assert are_clean(masters)


# -- interrupts --------------------------------------------------------------------------------


def test_an_interrupted_wait_leaves_nothing(make_dlm: MakeDlm, masters: LocalMasters) -> None:
    dlm = make_dlm(masters, 100, 0.05)
    occupy([masters[0], masters[1]], "res")

    def interrupt(*_: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedError):
            dlm.lock("res", HOUR)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    eventually(lambda: values_of(masters, "res") == [b"rival", b"rival", None])
