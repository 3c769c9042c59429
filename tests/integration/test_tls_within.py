"""What comes in between while a thread is inside OpenSSL: others, signal handlers, forks.

Python's `ssl` runs signal handlers there, and gives the GIL up. `within` lets a test in just
before the client's `SSLObject` does something, where a handler would run.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from integration.bridge import Runner, ready
from integration.helpers import (
    HOUR,
    NT,
    SLACK_MS,
    MakeClient,
    Stopwatch,
    are_clean,
    eventually,
    state_of,
)
from integration.tls_front import MakeTlsFront, TlsFront

from redlock_fast import ClosedError, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters


class Within:
    """What happens inside the next call of an `SSLObject` of a client's.

    Attributes:
        thread, verb: only in this one.
        action: called once.
    """

    def __init__(self) -> None:
        self.thread = 0
        self.verb = ""
        self.action: Callable[[], Any] | None = None

    def do(self, action: Callable[[], Any], verb: str = "write") -> None:
        """In the next call of this thread's."""
        self.thread = threading.get_ident()
        self.verb = verb
        self.action = action

    def __call__(self, verb: str) -> None:
        action = self.action
        if action is not None and (self.thread, self.verb) == (threading.get_ident(), verb):
            self.action = None
            action()


class _Open(ssl.SSLObject):
    within: ClassVar[Within]

    def write(self, data: Any) -> int:
        if not self.server_side:
            _Open.within("write")
        return super().write(data)

    def read(self, *args: Any) -> Any:
        if not self.server_side:
            _Open.within("read")
        return super().read(*args)


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch) -> Iterator[Within]:
    _Open.within = Within()
    monkeypatch.setattr(ssl.SSLContext, "sslobject_class", _Open)
    yield _Open.within
    _Open.within.action = None


@pytest.fixture
def fronts(make_tls_front: MakeTlsFront, masters: LocalMasters) -> list[TlsFront]:
    return [make_tls_front(master) for master in masters]


class Call(threading.Thread):
    """A lock that another thread acquires; its replies are held until `answer`."""

    def __init__(self, client: Redlock, fronts: list[TlsFront]) -> None:
        super().__init__(daemon=True)
        self.error: Exception | None = None
        self._client = client
        self._fronts = fronts
        before = [front.up.passed for front in fronts]
        for front in fronts:
            front.down.holding = True
        self.start()
        for front, passed in zip(fronts, before, strict=True):
            eventually(lambda f=front, p=passed: f.up.passed > p)  # type: ignore[misc]

    def run(self) -> None:
        try:
            self._client.acquire("other", HOUR, wait=0)
        except Exception as error:  # noqa: BLE001 - told by the test
            self.error = error

    def answer(self) -> None:
        for front in self._fronts:
            front.heal()
        time.sleep(0.05)


@pytest.mark.case("C70")
def test_c70_a_handler_that_waits_for_another_thread(
    fronts: list[TlsFront], masters: LocalMasters, make_client: MakeClient, within: Within
) -> None:
    """As one does that ends a program: it tells all threads to end, and joins them."""
    client = make_client(fronts, master_timeout=NT)
    call = Call(client, fronts)
    ended = False

    def handle() -> None:
        nonlocal ended
        call.answer()
        call.join(20)
        ended = not call.is_alive()

    within.do(handle)
    with Stopwatch() as watch:
        lock = client.acquire("res", HOUR, wait=5000)
    assert ended
    assert watch.ms < 4 * NT + SLACK_MS
    assert call.error is None or isinstance(call.error, NoQuorum)
    assert lock
    lock.release()
    vacated = client.acquire("other", HOUR, wait=5000) if call.error else None
    if vacated:
        vacated.release()


@pytest.mark.case("C70")
def test_c70_a_handler_that_closes_the_client(
    fronts: list[TlsFront], masters: LocalMasters, make_client: MakeClient, within: Within
) -> None:
    client = make_client(fronts, master_timeout=1000)
    call = Call(client, fronts)

    def handle() -> None:
        call.answer()
        client.close()

    within.do(handle)
    with pytest.raises(ClosedError):
        client.acquire("res", HOUR)
    call.join(20)
    assert isinstance(call.error, ClosedError)
    assert [state_of(client, i)["errors"] for i in range(len(masters))] == [{}] * len(masters)
    eventually(lambda: are_clean(masters))


def test_a_handler_that_uses_the_client(
    fronts: list[TlsFront], masters: LocalMasters, make_client: MakeClient, within: Within
) -> None:
    client = make_client(fronts, master_timeout=5000)
    errors: list[Exception] = []

    def handle() -> None:
        with pytest.raises(RuntimeError, match="its encryption") as caught:
            client.acquire("other", HOUR)
        errors.append(caught.value)

    within.do(handle)
    lock = client.acquire("res", HOUR)
    assert errors
    assert lock
    assert lock.release()
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C94")
def test_c94_a_fork_waits_until_nobody_is_inside(
    fronts: list[TlsFront], masters: LocalMasters, make_client: MakeClient, within: Within
) -> None:
    """Or the child has OpenSSL's locks for ever as another thread has left them."""
    client = make_client(fronts, master_timeout=5000)
    inside, outside = threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        time.sleep(0.05)
        outside.set()

    def work() -> None:
        within.do(stay)
        lock = client.acquire("res", HOUR)
        assert lock
        assert lock.release()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(20)
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            assert outside.is_set()
            lock = client.acquire("child", HOUR, wait=5000)
            assert lock
            assert lock.release()
            status = 0
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    thread.join(20)
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C94")
def test_c94_a_handler_that_forks(
    fronts: list[TlsFront], masters: LocalMasters, make_client: MakeClient, within: Within
) -> None:
    client = make_client(fronts, master_timeout=5000)
    pid = -1
    took: list[float] = []

    def handle() -> None:
        nonlocal pid
        with Stopwatch() as watch:
            pid = os.fork()
        took.append(watch.ms)

    within.do(handle)
    try:
        lock = client.acquire("res", HOUR)
        assert pid > 0
        assert lock
        assert lock.release()
    except BaseException as error:
        if pid != 0:
            raise
        good = isinstance(error, RuntimeError) and "forked" in str(error)
        with contextlib.suppress(BaseException):
            lock = client.acquire("child", HOUR, wait=5000)
            good = good and lock is not None and lock.release()
            os._exit(0 if good else 1)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert took[0] < SLACK_MS
    eventually(lambda: are_clean(masters))


class _Rung(Exception):
    """What a signal handler raises."""


def _ring() -> None:
    raise _Rung


@pytest.mark.parametrize("verb", ["write", "read"])
def test_one_connection_is_interrupted(
    fronts: list[TlsFront],
    masters: LocalMasters,
    make_client: MakeClient,
    within: Within,
    verb: str,
) -> None:
    client = make_client(fronts, master_timeout=5000)
    within.do(_ring, verb)
    with pytest.raises(_Rung), Stopwatch() as watch:
        client.acquire("res", HOUR)
    assert watch.ms < SLACK_MS
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock
    assert lock.release()
    errors = [state_of(client, i)["errors"] for i in range(len(masters))]
    assert sorted(map(str, errors)) == ["{'closed': 1}", "{}", "{}"]
    eventually(lambda: are_clean(masters))


@pytest.mark.parametrize("verb", ["write", "read"])
def test_one_connection_is_interrupted_on_a_loop(
    fronts: list[TlsFront], masters: LocalMasters, run: Runner, within: Within, verb: str
) -> None:
    """What the handler raises is the loop's; the round goes on with the other masters."""

    async def main() -> None:
        async with ready(fronts, master_timeout=5000) as client:
            within.do(_ring, verb)
            with Stopwatch() as watch:
                lock = await client.acquire("res", HOUR)
            assert watch.ms < SLACK_MS
            assert lock
            assert await lock.release()
            errors = [row["errors"] for row in client.stats()["masters"]]
            assert sorted(map(str, errors)) == ["{'closed': 1}", "{}", "{}"]

    run(main())
    assert [type(problem["exception"]) for problem in run.problems] == [_Rung]
    run.problems.clear()
    eventually(lambda: are_clean(masters))
