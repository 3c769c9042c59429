"""What comes in between while a thread is inside OpenSSL: others, signal handlers, forks.

Python's `ssl` runs signal handlers there, and gives the GIL up. `within` lets a test in just
before the client's `SSLObject` does something, where a handler would run.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
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
        thread: only in this one; None: in any.
        action: called once.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.action: Callable[[], Any] | None = None

    def do(self, action: Callable[[], Any]) -> None:
        """In the next call of this thread's."""
        self.thread = threading.get_ident()
        self.action = action

    def __call__(self) -> None:
        action = self.action
        if action is not None and self.thread in (None, threading.get_ident()):
            self.action = None
            action()


class _Open(ssl.SSLObject):
    within: ClassVar[Within]

    def write(self, data: Any) -> int:
        if not self.server_side:
            _Open.within()
        return super().write(data)


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
