"""Forks at any moment: a child owns nothing of its parent's, works at once, and harms nobody.

A child runs a function and tells how it went through a pipe; it ends by `os._exit`, unless the
test is about its end.
"""

from __future__ import annotations

import _socket
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from integration.helpers import (
    HOUR,
    LIMIT_S,
    Child,
    MakeClient,
    all_have,
    are_clean,
    calls_of,
    clients_of,
    descriptors,
    eventually,
    in_child,
    keys_of,
    occupy,
    run_script,
    state_of,
    taught,
    vacate,
    values_of,
)

from redlock_fast import Lock, LockLost, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

# Python 3.12 and later warn of every fork of a process that has threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def _works(client: Redlock, name: str, masters: LocalMasters | None = None) -> None:
    """The whole life of a lock, with a name of its own."""
    lock = client.acquire(name, HOUR, wait=5000)
    assert lock
    assert lock.extend()
    assert client.owned(lock)
    if masters is not None:
        assert values_of(masters, name).count(lock.token.encode()) >= len(masters) // 2 + 1
    assert client.release(lock) is True


def _owns_nothing(client: Redlock, lock: Lock) -> None:
    """In a child: what the parent's lock says, and does."""
    assert not lock
    assert not lock.held
    assert lock.remaining() == 0.0
    assert "another process" in repr(lock)
    with pytest.raises(LockLost) as caught:
        lock.raise_if_lost()
    assert caught.value.reason == "foreign"
    assert lock.extend() is False
    assert lock.release() is False
    assert client.owned(lock) is False
    assert client.extend_many([lock]) == [False]
    assert client.release_many([lock]) == [False]


def _unharmed(client: Redlock, masters: LocalMasters) -> None:
    """In the parent: the same connections as ever, and they work."""
    _works(client, "parent:after", masters)
    rows = client.stats()["masters"]
    assert [row["reconnects"] for row in rows] == [0] * len(masters)
    assert not any(row["errors"] for row in rows)


def _descriptors_to(masters: LocalMasters) -> set[str]:
    """This process's connections to these masters, and all eventfds."""
    ends = [f" to ('127.0.0.1', {port})" for port in masters.ports]
    return {
        name
        for name, where in descriptors().items()
        if "eventfd" in name or any(end in where for end in ends)
    }


@pytest.mark.case("C93")
@pytest.mark.case("C94")
def test_c94_child_of_an_idle_client(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock
    all_have(masters, "res", lock.token)
    before = _descriptors_to(masters)
    assert len(before) == 4
    calls = [calls_of(master) for master in masters]

    def work() -> None:
        assert _descriptors_to(masters) == set()
        _owns_nothing(client, lock)
        with lock:
            pass
        assert _descriptors_to(masters) == set()
        for master, then in zip(masters, calls, strict=True):
            now = calls_of(master)
            assert {k: now.get(k, 0) - then.get(k, 0) for k in ("set", "evalsha", "eval")} == {
                "set": 0, "evalsha": 0, "eval": 0,
            }  # fmt: skip
        client.connect()  # or the first lock may rest on a bare quorum
        assert client.acquire("res", HOUR) is None
        mine = client.acquire("child", HOUR)
        assert mine
        assert mine.token != lock.token
        all_have(masters, "child", mine.token)
        assert [clients_of(master) for master in masters] == [2] * 3
        assert client.release(mine)

    in_child(work)

    assert lock.held
    assert values_of(masters, "res") == [lock.token.encode()] * 3
    _unharmed(client, masters)
    assert client.release(lock) is True
    assert _descriptors_to(masters) == before


def test_tokens_of_parent_and_child_differ(client: Redlock, masters: LocalMasters) -> None:
    """Nothing is drawn ahead that both would have."""

    def work() -> None:
        client.connect()
        lock = client.acquire("child", HOUR)
        assert lock
        all_have(masters, "child", lock.token)

    _works(client, "res")
    in_child(work)
    lock = client.acquire("parent", HOUR)
    assert lock
    all_have(masters, "parent", lock.token)
    assert values_of(masters, "child") != values_of(masters, "parent")


@pytest.mark.case("C94")
@pytest.mark.parametrize("works", [False, True])
def test_c94_close_in_a_child(client: Redlock, masters: LocalMasters, works: bool) -> None:
    lock = client.acquire("res", HOUR)
    assert lock
    all_have(masters, "res", lock.token)

    def work() -> None:
        if works:
            _works(client, "child")
        client.close()
        client.close()
        assert lock.release() is False

    in_child(work)

    assert lock.held
    _unharmed(client, masters)
    assert client.release(lock) is True


_PARENT = """
import gc, os, sys
from redlock_fast import Redlock
client = Redlock(sys.argv[2:])
client.connect()
with client.lock("res", 60_000) as lock:
    if os.fork() == 0:
        if sys.argv[1] == "_exit":
            os._exit(3)
        elif sys.argv[1] == "exit":
            sys.exit(3)
        elif sys.argv[1] == "fall":
            raise RuntimeError("the child fails")
        elif sys.argv[1] == "delete":
            del client, lock
            gc.collect()
            sys.exit(3)
    else:
        code = os.waitstatus_to_exitcode(os.wait()[1])
        print(code, lock.held, client.owned(lock))
with client.lock(f"after {os.getpid()}", 60_000):
    print(sum(row["reconnects"] for row in client.stats()["masters"]), flush=True)
"""


@pytest.mark.case("C94")
@pytest.mark.parametrize(
    ("how", "code"), [("_exit", 3), ("exit", 3), ("delete", 3), ("fall", 1), ("pass", 0)]
)
def test_c94_a_child_leaves_a_with_block(masters: LocalMasters, how: str, code: int) -> None:
    done = run_script(_PARENT, how, *masters.urls)
    # (The child that passes connects anew after its fork.)
    told = ["3"] * (how == "pass") + [f"{code} True True", "0"]
    assert (done.returncode, done.stdout.splitlines()) == (0, told), done.stderr
    assert "RedlockError" not in done.stderr
    assert bool(done.stderr) == (how == "fall")
    eventually(lambda: are_clean(masters))


def test_a_child_of_a_child(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock

    def grandchild(parents: Lock) -> None:
        _owns_nothing(client, lock)
        _owns_nothing(client, parents)
        _works(client, "grandchild", masters)

    def child() -> None:
        client.connect()
        mine = client.acquire("child", HOUR)
        assert mine
        all_have(masters, "child", mine.token)
        in_child(lambda: grandchild(mine))
        assert client.release(mine) is True
        rows = client.stats()["masters"]
        assert not any(row["errors"] for row in rows)

    in_child(child)
    _unharmed(client, masters)
    assert client.release(lock) is True


# -- while the client is busy ------------------------------------------------------------------


@contextlib.contextmanager
def _busy(client: Redlock, count: int) -> Iterator[list[int]]:
    """Threads in the middle of everything: rounds, batches, sleeps, extensions."""
    done = [0] * count
    errors: list[BaseException] = []
    stop = threading.Event()

    def work(i: int) -> None:
        try:
            while not stop.is_set():
                if i % 4 == 0:
                    assert client.acquire("rival", HOUR, wait=20) is None
                elif i % 4 == 1:
                    names = [f"busy:{i}:{j}" for j in range(30)]
                    locks = [lock for lock in client.acquire_many(names, HOUR) if lock]
                    assert len(locks) == 30
                    assert client.release_many(locks) == [True] * 30
                else:
                    _works(client, f"busy:{i}")
                done[i] += 1
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "threads hang"
    assert errors == []
    assert all(done)


@pytest.mark.case("C93")
@pytest.mark.parametrize("times", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_c93_forks_under_busy_threads(
    make_local_masters: MakeLocalMasters, make_client: MakeClient, times: int
) -> None:
    masters = taught(make_local_masters(5))
    client = make_client(masters, retry_delay=5)
    lock = client.acquire("parent", HOUR)
    assert lock
    all_have(masters, "parent", lock.token)
    occupy(masters, "rival")

    def work(i: int) -> None:
        assert _descriptors_to(masters) == set()
        _owns_nothing(client, lock)
        for turn in range(3):
            _works(client, f"child:{i}:{turn}")
        # Sleeps, and is woken by nobody.
        assert client.acquire("rival", HOUR, wait=20) is None
        if i % 2:
            client.close()

    with _busy(client, 8):
        for i in range(times):
            in_child(partial(work, i))

    assert lock.held
    _unharmed(client, masters)
    assert client.release(lock) is True
    eventually(lambda: keys_of(masters) == [[b"rival"]] * 5)


@pytest.mark.case("C93")
@pytest.mark.parametrize("children", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_c93_nobody_overlaps(
    masters: LocalMasters, make_client: MakeClient, tmp_path: Path, children: int
) -> None:
    client = make_client(masters, retry_delay=5)
    pairs = 25 if children == 4 else 500
    inside = tmp_path / "inside"

    def work(who: int) -> None:
        for turn in range(pairs):
            _works(client, f"own:{who}")
            if turn % 5 == 0:
                lock = client.acquire("common", 60_000, wait=60_000)
                assert lock
                with open(inside, "x"):
                    time.sleep(0.0005)
                os.unlink(inside)
                assert client.release(lock) is True

    _works(client, "warm")
    family = [Child(partial(work, i)) for i in range(children)]
    work(children)
    for child in family:
        child.join()
    _unharmed(client, masters)
    eventually(lambda: are_clean(masters))


def test_while_a_thread_has_the_reading_role(masters: LocalMasters, make_client: Any) -> None:
    """And another one waits for it to have read."""
    client = make_client(masters, master_timeout=10_000)
    masters.pause(0)
    masters.pause(1)
    got: list[Lock | None] = []
    threads = [
        threading.Thread(target=lambda i=i: got.append(client.acquire(f"res:{i}", HOUR)))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)

    def work() -> None:
        assert not client.stats()["masters"][0]["owed"]
        masters_go_on.wait(10)
        _works(client, "child")

    masters_go_on = multiprocessing.get_context("fork").Event()
    child = Child(work)
    masters.resume(0)
    masters.resume(1)
    masters_go_on.set()
    child.join()
    for thread in threads:
        thread.join(10)
    assert all(got)
    assert len(got) == 3
    _unharmed(client, masters)


class _SlowSocket(_socket.socket):
    """Is connected for a while before who dials has it back."""

    def connect_ex(self, address: Any, /) -> int:
        result = super().connect_ex(address)
        time.sleep(0.5)
        return result


def test_while_a_thread_opens_a_connection(
    masters: LocalMasters, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(masters, warm=False)
    monkeypatch.setattr(_socket, "socket", _SlowSocket)
    dialer = threading.Thread(target=client.connect)
    dialer.start()
    eventually(lambda: len(_descriptors_to(masters)) == 2)  # the eventfd is another one
    monkeypatch.undo()

    def work() -> None:
        assert _descriptors_to(masters) == set()
        _works(client, "child", masters)

    in_child(work)
    dialer.join()
    _unharmed(client, masters)


def test_debts_and_the_janitor_stay_with_the_parent(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters)
    lock = client.acquire("res", HOUR)
    assert lock
    all_have(masters, "res", lock.token)
    masters.kill(2)
    assert client.release(lock)
    assert state_of(client, 2)["debts"] == 1

    def work() -> None:
        assert state_of(client, 2)["debts"] == 0
        mine = client.acquire("child", HOUR)
        assert mine
        assert client.release(mine)
        # Its own janitor would by now have paid the debt, were it there.
        masters_went_on.wait(10)
        _works(client, "child")

    masters_went_on = multiprocessing.get_context("fork").Event()
    child = Child(work)
    masters.restart(2)
    occupy([masters[2]], "res")
    eventually(lambda: state_of(client, 2)["debts"] == 0)
    masters_went_on.set()
    child.join()
    assert values_of(masters, "res") == [None, None, b"rival"]


# -- in the middle of a call -------------------------------------------------------------------


@contextlib.contextmanager
def _forking_handler(work: Callable[[], Any]) -> Iterator[list[Child]]:
    """A signal handler that forks; its child returns from it and goes on where that leads."""
    family: list[Child] = []
    me = os.getpid()

    def fork(signum: int, frame: Any) -> None:
        child = Child.__new__(Child)
        child._pipe, pipe = os.pipe()
        child.pid = os.fork()
        if child.pid:
            os.close(pipe)
            family.append(child)
        else:
            pipes.append(pipe)

    pipes: list[int] = []
    before = signal.signal(signal.SIGUSR1, fork)
    told = b"ok"
    try:
        yield family
    except BaseException:
        if os.getpid() == me:
            raise
        told = traceback.format_exc().encode()
    finally:
        if os.getpid() != me:
            try:
                work()
            except BaseException:  # noqa: BLE001 - told to the parent
                told = traceback.format_exc().encode()
            os.write(pipes[0], told)
            os._exit(0)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("where", ["round", "sleep", "grant"])
def test_forked_by_a_handler_in_the_middle_of_an_acquire(
    masters: LocalMasters, make_client: MakeClient, where: str
) -> None:
    """Parent and child are in the same call, and only one of them may get the lock."""
    client = make_client(masters, master_timeout=10_000, retry_delay=300)
    me = os.getpid()
    if where == "sleep":
        occupy(masters, "res")
    else:
        masters.pause(0)
        masters.pause(1)

    def disturb() -> None:
        # One that another thread takes is seen by the caller's next look, when it has its answers.
        caller = None if where == "grant" else threading.main_thread().ident
        signal.pthread_kill(caller or threading.get_ident(), signal.SIGUSR1)
        if where == "round":
            time.sleep(0.3)
        if where == "sleep":
            vacate(masters, "res")
        else:
            masters.resume(0)
            masters.resume(1)

    def work() -> None:
        # The parent's lock stays: not even a clean-up of what it had sent goes out from here.
        _works(client, "child")
        client.close()

    disturber = threading.Timer(0.2, disturb)
    disturber.start()
    with _forking_handler(work) as family:
        try:
            lock = client.acquire("res", HOUR, wait=10_000)
        except RuntimeError as error:
            assert os.getpid() != me
            assert "forked" in str(error)  # noqa: PT017
        else:
            assert os.getpid() == me
    disturber.join()
    for child in family:
        child.join()
    assert len(family) == 1
    assert lock
    assert lock.held
    time.sleep(0.1)
    # (While the rival left, master after master, two were enough.)
    assert values_of(masters, "res").count(lock.token.encode()) >= (2 if where == "sleep" else 3)
    assert client.release(lock) is True


# -- multiprocessing ---------------------------------------------------------------------------


def _use(urls: list[str], client: Redlock | None) -> None:
    """What a process of multiprocessing does: with an inherited client, and with one of its own."""
    if client is not None:
        _works(client, f"inherited:{os.getpid()}")
    with Redlock(urls) as own:
        _works(own, f"own:{os.getpid()}")


@pytest.mark.case("C99")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_c99_multiprocessing(client: Redlock, masters: LocalMasters, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    lock = client.acquire("res", HOUR)
    assert lock
    inherited = client if method == "fork" else None
    if inherited is None:
        # What would have to be pickled is refused, and says what to do.
        with pytest.raises(TypeError, match="make one in each process"):
            context.Process(target=_use, args=(masters.urls, client)).start()
        with pytest.raises(TypeError, match="adopt"):
            context.Process(target=_use, args=(masters.urls, lock)).start()
    processes = [context.Process(target=_use, args=(masters.urls, inherited)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
        process.close()
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    multiprocessing.resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    assert lock.held
    _unharmed(client, masters)
    assert client.release(lock) is True
