"""The drop-ins, as far as no server is needed: names, arguments, errors, `compat.install`."""

from __future__ import annotations

import copy
import math
import pickle
import re
import subprocess
import sys
import traceback
from collections import UserDict
from typing import Any

import pytest
import redis
import redlock

from redlock_fast import ConfigurationError, compat, scripts
from redlock_fast.compat import redlock_py
from redlock_fast.compat.redlock_py import (
    CannotObtainLock,
    Lock,
    MultipleRedlockException,
    Redlock,
)

ONE = ["redis://127.0.0.1:7001"]


# -- install -----------------------------------------------------------------------------------


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


def test_install_lets_imports_find_the_drop_in() -> None:
    code = """
from redlock_fast import compat
assert compat.install("redlock_py") is compat.install("redlock_py")
from redlock import Redlock, MultipleRedlockException, CannotObtainLock, Lock
print(Redlock.__module__)
"""
    assert _run(code) == "redlock_fast.compat.redlock_py\n"


def test_install_does_not_replace_what_is_imported() -> None:
    code = """
import redlock, sys
from redlock_fast import compat
try:
    compat.install("redlock_py")
except RuntimeError as error:
    print(error)
assert sys.modules["redlock"] is redlock
"""
    assert _run(code) == "cannot replace redlock: it is imported already\n"


def test_install_of_something_else() -> None:
    with pytest.raises(ValueError, match=r"'redis'; there is redlock_py"):
        compat.install("redis")


# -- redlock_py: the same names ----------------------------------------------------------------


@pytest.mark.case("C164")
def test_c164_names_and_defaults_of_the_original() -> None:
    for name in ("default_retry_count", "default_retry_delay", "clock_drift_factor"):
        assert getattr(Redlock, name) == getattr(redlock.Redlock, name)
    assert Lock._fields == redlock.Lock._fields
    assert issubclass(Lock, tuple)
    ours, theirs = Redlock(ONE), redlock.Redlock(ONE)
    for thing in (ours, theirs):
        assert thing.quorum == 1
        assert thing.retry_count == 3
        assert thing.retry_delay == 0.2
        assert [type(server) for server in thing.servers] == [redis.Redis]
        key = thing.get_unique_id()
        assert type(key) is bytes
        assert re.fullmatch(rb"[0-9A-Za-z]{22}", key)
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert public <= set(dir(ours))


@pytest.mark.case("C164")
def test_c164_a_lock_is_a_tuple() -> None:
    lock = Lock(987, "name", b"key")
    assert lock == redlock.Lock(987, "name", b"key")
    assert repr(lock) == repr(redlock.Lock(987, "name", b"key"))
    validity, resource, key = lock
    assert (lock.validity, lock.resource, lock.key) == (validity, resource, key)
    for twin in (copy.copy(lock), copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
        assert type(twin) is Lock
        assert twin == lock


def test_keys_hold_every_letter_and_digit_alike() -> None:
    dlm = Redlock(ONE)
    text = b"".join(dlm.get_unique_id() for _ in range(2000))
    counts = {letter: text.count(letter) for letter in set(text)}
    assert len(counts) == 62
    expected = len(text) / 62  # 710; a deviation of 6.6 standard deviations fails
    assert all(abs(count - expected) < 175 for count in counts.values())


def test_the_error() -> None:
    error = MultipleRedlockException([ValueError("one"), KeyError("two")], "more")
    assert str(error) == repr(error) == "one :: 'two'"
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert twin.args == ("more",)


def test_the_script_is_the_one_of_the_native_client() -> None:
    assert Redlock.unlock_script.encode() == scripts.RELEASE.text


# -- redlock_py: what it is made of ------------------------------------------------------------


def test_forms_of_masters() -> None:
    caller = redis.Redis(port=7003)
    config: dict[str, Any] = {"host": "127.0.0.1", "port": 7002, "db": 2, "password": "x"}
    before = dict(config)
    dlm = Redlock(("redis://:x@127.0.0.1:7001/1", config, caller))
    assert config == before
    assert dlm.servers[2] is caller
    assert dlm.quorum == 2
    found = [server.connection_pool.connection_kwargs for server in dlm.servers]
    assert [kwargs["port"] for kwargs in found] == [7001, 7002, 7003]
    assert [kwargs["db"] for kwargs in found] == [1, 2, 0]
    dlm.servers.clear()
    assert dlm.quorum == 2


SECRET = "S3cr3tPassw0rd"


@pytest.mark.case("C164")
@pytest.mark.parametrize(
    "masters",
    [
        [{"cat": "hog"}],
        ["127.0.0.1:6379"],
        [f"redis://:{SECRET}@127.0.0.1:port"],
        [f"redis://:{SECRET}/@127.0.0.1"],
        [{"host": "127.0.0.1", "password": SECRET, "cat": "hog"}],
        {"host": "127.0.0.1"},
        f"redis://:{SECRET}@127.0.0.1",
        [ONE[0], ONE[0]],
        [None],
        [redis.Sentinel([("127.0.0.1", 26379)]).master_for("name")],
        [UserDict({"host": "127.0.0.1"}), 1],
    ],
)
def test_c164_bad_connection_info(masters: Any) -> None:
    with pytest.raises(Warning, match="masters") as caught:
        Redlock(masters)
    error = caught.value
    assert isinstance(error, ConfigurationError)
    assert error.__cause__ is None
    assert error.__context__ is None
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == redlock_py.__file__
    ]
    shown = "".join(traceback.StackSummary.extract(iter(frames), capture_locals=True).format())
    assert SECRET not in f"{error} {error!r} {error.args} {shown}"


def test_what_redis_py_alone_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise TypeError(SECRET)

    monkeypatch.setattr(redis, "Redis", refuse)
    with pytest.raises(Warning, match=r"masters\[0\]: redis-py refuses it \(TypeError\)") as caught:
        Redlock([{"password": SECRET}])
    frame = next(
        f for f, _ in traceback.walk_tb(caught.value.__traceback__) if "self" in f.f_locals
    )
    assert SECRET not in repr(frame.f_locals)


def test_no_master_at_all() -> None:
    for kind in (Redlock, redlock.Redlock):
        with pytest.raises((CannotObtainLock, redlock.CannotObtainLock)):
            kind([])


@pytest.mark.case("C126")
@pytest.mark.case("C127")
def test_c126_c127_retry_count_and_delay() -> None:
    dlm = Redlock(ONE, 0, 0)
    assert (dlm.retry_count, dlm.retry_delay) == (1, 0)
    assert (dlm._client._settings.retries, dlm._client._settings.retry_delay_ns) == (0, 0)
    dlm = Redlock(ONE, retry_count=5, retry_delay=1)
    assert (dlm.retry_count, dlm.retry_delay) == (5, 1)
    assert dlm._client._settings.retries == 4
    many: list[Any] = [sys.maxsize, math.inf, 10**30]
    for forever in many:
        dlm.retry_count = forever
        assert dlm.retry_count == 2**31 - 1
    dlm.retry_delay = 0.5
    assert 0.5e9 < dlm._client._settings.retry_delay_ns < 1e9
    for count in (-1, -2):
        with pytest.raises(ValueError, match="retry_count"):
            Redlock(ONE, count)
    for odd in (1.5, -math.inf, math.nan, True, "3"):
        with pytest.raises(TypeError, match="retry_count"):
            Redlock(ONE, odd)  # type: ignore[arg-type]
    for delay in (-1, -0.1, math.nan, math.inf, 1e30):
        with pytest.raises(ValueError, match="retry_delay"):
            Redlock(ONE, 1, delay)
    for odd in (True, "0.2"):
        with pytest.raises(TypeError, match="retry_delay"):
            Redlock(ONE, 1, odd)  # type: ignore[arg-type]
    assert dlm.retry_delay == 0.5


def test_pauses_are_random_and_not_shorter_than_asked() -> None:
    """Two clients that took a part of the masters each must not meet again for ever."""
    settings = Redlock(ONE, retry_delay=1)._client._settings
    pauses = [settings.retry_delay_ns * settings.jitter() / 1e9 for _ in range(1000)]
    assert 1 <= min(pauses) < 1.01
    assert 1.24 < max(pauses) <= 1.25


@pytest.mark.case("C126")
def test_c126_zeros_where_the_original_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redlock_py, "strict", True)
    for kind in (Redlock, redlock.Redlock):
        thing = kind(ONE, retry_count=0, retry_delay=0)
        assert (thing.retry_count, thing.retry_delay) == (3, 0.2)


def test_defaults_of_a_subclass() -> None:
    class Patient(Redlock):
        default_retry_count = 7
        default_retry_delay = 3
        clock_drift_factor = 0.05

    dlm = Patient(ONE)
    assert (dlm.retry_count, dlm.retry_delay) == (7, 3)
    assert dlm._client._settings.drift_factor == 0.05

    class Hasty(Redlock):
        master_timeout = 0

    with pytest.raises(ValueError, match="master_timeout"):
        Hasty(ONE)


@pytest.mark.case("C99")
def test_c99_the_client_is_not_copied() -> None:
    dlm = Redlock(ONE)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="pickled or copied"):
            duplicate(dlm)
