"""Signals that hit a call anywhere: no key stays, nobody else is held up, handlers may use it too.

The handlers here run in the main thread, as pytest runs tests there. What a handler raises is
raised once, and only while the test wants it (`Alarm`).
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import pytest
from integration.fakes import MakeProxy
from integration.helpers import (
    HOUR,
    SLACK_MS,
    MakeClient,
    Stopwatch,
    all_have,
    are_clean,
    calls_of,
    closed_port,
    eventually,
    in_time,
    keys_of,
    occupy,
    refresh_stats,
    state_of,
    vacate,
    values_of,
)

from redlock_fast import ClosedError, Lock, Redlock
from redlock_fast.testing import LocalMasters

# An alarm may ring in a finalizer of Python's own, which swallows what its handler raises.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function Weak:pytest.PytestUnraisableExceptionWarning"
)

T = TypeVar("T")

# A waiting thread looks so often for a signal that was delivered elsewhere, in ms.
TICK_MS = 100


class Rung(Exception):
    """What the alarm's handler raises."""


class Alarm:
    """A timer whose signal's handler raises `Rung`, or does something else.

    Attributes:
        rung: what ended the last call, if anything did.
        armed: does the handler do anything?
        action: what the handler does; it raises when this is None.
    """

    def __init__(self) -> None:
        self.rung: Rung | None = None
        self.action: Callable[[], Any] | None = None
        self.armed = False

    def ring(self, signum: int, frame: FrameType | None) -> None:
        if self.armed:
            if self.action is not None:
                self.action()
                return
            self.armed = False
            raise Rung

    def after(self, seconds: float, call: Callable[[], T], every: float = 0.0) -> T | None:
        """Let it ring so long after the start of this call (and then every so often)."""
        self.rung = None
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), every)
            result = call()
            self.armed = False
            return result
        except Rung as rung:
            self.rung = rung
            return None
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    before = {number: signal.signal(number, alarm.ring) for number in (signal.SIGALRM, _OTHER)}
    yield alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


_OTHER = signal.SIGUSR1


def _came_from_the_client(rung: Rung) -> bool:
    """Was it raised inside of a call? Else it hit between the return and the assignment."""
    return any("redlock_fast" in row.filename for row in traceback.extract_tb(rung.__traceback__))


@contextlib.contextmanager
def _busy(client: Redlock, count: int = 3) -> Iterator[list[int]]:
    """Threads that lock and unlock names of their own meanwhile, and have to get them."""
    done = [0] * count
    errors: list[BaseException] = []
    stop = threading.Event()

    def work(i: int) -> None:
        try:
            while not stop.is_set():
                lock = client.acquire(f"busy:{i}", HOUR)
                assert lock
                assert client.release(lock)
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
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "threads hang"
    assert errors == []


def _seconds_of(call: Callable[[str], Any]) -> float:
    """How long a call takes, undisturbed."""
    start = time.monotonic()
    for i in range(20):
        call(f"warm:{i}")
    return (time.monotonic() - start) / 20


def _owes_nothing(client: Redlock, i: int) -> bool:
    return bool(state_of(client, i)["owed"] == state_of(client, i)["debts"] == 0)


# -- an exception at any point -----------------------------------------------------------------

# Given a client and a name, a call that leaves no key when it ends well.
Verb = Callable[[Redlock, str], Any]


def _pair(client: Redlock, name: str) -> None:
    lock = client.acquire(name, HOUR)
    assert lock
    assert client.release(lock)


def _with(client: Redlock, name: str) -> None:
    with client.lock(name, HOUR):
        pass


def _with_batch(client: Redlock, name: str) -> None:
    locks = [lock for lock in client.acquire_many([f"{name}:{i}" for i in range(20)], HOUR) if lock]
    assert len(locks) == 20
    assert client.release_many(locks) == [True] * 20


def _with_extends(client: Redlock, name: str) -> None:
    with client.lock(name, HOUR) as lock:
        assert lock.extend()
        assert client.owned(lock)


def _wait(client: Redlock, name: str) -> None:
    assert client.acquire("rival", HOUR, wait=10) is None


VERBS = {
    "pair": _pair,
    "with": _with,
    "batch": _with_batch,
    "extend": _with_extends,
    "wait": _wait,
}


def _storm(
    client: Redlock, masters: LocalMasters, alarm: Alarm, verb: Verb, times: int
) -> tuple[int, int]:
    """Interrupt so many calls. Returns how many there were, and how many left a key behind.

    Those are some of the exceptions that hit outside of the client, in the documented instant.
    """
    seconds = _seconds_of(lambda name: verb(client, name))
    draw = random.Random(times)
    rung = gaps = 0
    allowed: set[str] = set()
    while rung < times:
        name = f"res:{rung}"
        alarm.after(draw.uniform(0, 1.1 * seconds), partial(verb, client, name))
        if alarm.rung is not None:
            rung += 1
            if not _came_from_the_client(alarm.rung):
                allowed.add(name)

    def left() -> set[str]:
        names = {key.decode() for keys in keys_of(masters) for key in keys}
        return {name.rsplit(":", name.count(":") - 1)[0] for name in names if name[:4] == "res:"}

    eventually(lambda: left() <= allowed, 10)
    gaps = len(left())
    return rung, gaps


# A signal that comes in a finalizer of the standard library raises there, and is swallowed.
@pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <function (Weak\w+|Popen)\."
    ":pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.case("C101")
@pytest.mark.case("C102")
@pytest.mark.parametrize("verb", VERBS)
def test_c102_interrupted_anywhere(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm, verb: str
) -> None:
    client = make_client(masters, retry_delay=3)
    occupy(masters, "rival")

    with _busy(client) as done:
        _storm(client, masters, alarm, VERBS[verb], 200)
        before = sum(done)
        eventually(lambda: sum(done) > before)

    for i in range(3):
        eventually(partial(_owes_nothing, client, i))
        assert state_of(client, i)["reconnects"] == 0  # so every reply met its command
    assert values_of(masters, "rival") == [b"rival"] * 3


@pytest.mark.case("C102")
def test_c102_interrupted_while_masters_are_slow(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient, alarm: Alarm
) -> None:
    """Almost every exception hits in the middle of a round, with SETs on their way."""
    proxies = [make_proxy(master) for master in masters]
    for proxy in proxies:
        proxy.up.delay_ms = 5
    client = make_client(proxies)

    _, gaps = _storm(client, masters, alarm, _with, 60)

    assert gaps == 0
    assert [proxy.accepted for proxy in proxies] == [1] * 3


@pytest.mark.slow
@pytest.mark.case("C102")
@pytest.mark.parametrize("verb", ["pair", "with"])
def test_c102_ten_thousands_of_interrupted_calls(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm, verb: str
) -> None:
    client = make_client(masters)
    rung, gaps = _storm(client, masters, alarm, VERBS[verb], 50_000)
    print(f"{gaps} of {rung} interrupted calls left a key")  # noqa: T201 - pytest -s
    # A with-block has no such instant: what `__enter__` returns is the block's already.
    assert gaps <= (rung // 200 if verb == "pair" else 0)


@pytest.mark.case("C101")
def test_the_last_moment_in_which_a_grant_is_cleaned_up(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """News for the log are told after the last vote, in Python code: a handler may run there."""
    with closed_port() as port:
        client = make_client([*masters, f"redis://127.0.0.1:{port}"], warm=False)
        heard: list[list[list[bytes]]] = []

        def tell(self: Any, *args: Any, **more: Any) -> None:
            heard.append(keys_of(masters))
            signal.raise_signal(signal.SIGALRM)

        monkeypatch.setattr("logging.Logger.warning", tell)
        alarm.armed = True
        with pytest.raises(Rung):
            client.acquire("res", HOUR)

    assert heard == [[[b"res"]] * 3]
    eventually(lambda: are_clean(masters))


def test_a_handler_closes_the_client_while_a_try_fails(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm
) -> None:
    """Answers come during the close, one for us and two against; ours is deleted before the end."""
    client = make_client(masters, retries=3, master_timeout=2000)
    occupy([masters[0], masters[1]], "res")

    def close() -> None:
        for master in (masters[2], masters[0], masters[1]):
            master.resume()
            time.sleep(0.02)
        client.close()

    alarm.action = close
    alarm.armed = True
    for master in masters:
        master.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(ClosedError):
            client.acquire("res", HOUR)
    finally:
        for master in masters:
            master.resume()
    assert keys_of(masters) == [[b"res"], [b"res"], []]


def _reconnected(client: Redlock) -> bool:
    client.connect()
    return all(state_of(client, i)["state"] == "ready" for i in range(3))


@pytest.mark.case("C84")
@pytest.mark.parametrize("cycles", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_c84_signals_without_an_exception_change_nothing(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm, cycles: int
) -> None:
    client = make_client(masters)
    refresh_stats(masters)
    heard: list[None] = []
    alarm.action = lambda: heard.append(None)
    signal.siginterrupt(signal.SIGALRM, True)

    def work() -> None:
        for i in range(cycles):
            _pair(client, f"res:{i}")
            if i % 100 == 50:
                eventually(lambda: all(state_of(client, j)["owed"] == 0 for j in range(3)))
                for master in masters:
                    master.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                eventually(lambda: _reconnected(client))

    alarm.after(0.001, work, every=0.001)

    assert len(heard) > cycles / 10
    eventually(lambda: are_clean(masters))
    for master in masters:
        calls = calls_of(master)
        assert calls["set"] == calls["evalsha"] + calls.get("eval", 0) == cycles


# -- waiting -----------------------------------------------------------------------------------


def _in_a_round(masters: LocalMasters) -> None:
    masters.pause(0)
    masters.pause(1)


def _in_a_sleep(masters: LocalMasters) -> None:
    occupy(masters, "res")


@pytest.mark.case("C101")
@pytest.mark.parametrize("to_another", [False, True])
@pytest.mark.parametrize("where", [_in_a_round, _in_a_sleep])
def test_c101_a_waiting_thread_wakes_for_signals(
    masters: LocalMasters,
    make_client: MakeClient,
    alarm: Alarm,
    where: Callable[[LocalMasters], None],
    to_another: bool,
) -> None:
    """Also when the system had another thread take the signal: no call is interrupted then."""
    client = make_client(masters, master_timeout=20_000, retry_delay=20_000)
    where(masters)
    sent: list[float] = []
    caller = threading.get_ident()

    def send() -> None:
        sent.append(time.monotonic())
        signal.pthread_kill(threading.get_ident() if to_another else caller, _OTHER)

    sender = threading.Timer(0.3, send)
    sender.start()
    alarm.armed = True
    with pytest.raises(Rung):
        client.acquire("res", HOUR, wait=math.inf)
    assert time.monotonic() - sent[0] <= in_time(TICK_MS)
    sender.join()

    for i in range(2):
        masters.resume(i)
    vacate(masters, "res")
    eventually(lambda: are_clean(masters))
    lock = client.acquire("other", HOUR)
    assert lock
    all_have(masters, "other", lock.token)


_VICTIM = """
import sys
from redlock_fast import Redlock
client = Redlock(sys.argv[1:], retry_delay=60_000)
client.connect()
try:
    print("waiting", flush=True)
    client.acquire("res", 60_000, wait=3_600_000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
with client.lock("other", 60_000):
    print("works", flush=True)
client.close()
"""


@pytest.mark.case("C101")
def test_c101_ctrl_c(masters: LocalMasters) -> None:
    occupy(masters, "res")
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, *masters.urls],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert victim.stdout
        assert victim.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        victim.send_signal(signal.SIGINT)
        with Stopwatch() as watch:
            out, errors = victim.communicate(timeout=20)
        assert watch.ms <= 2 * SLACK_MS  # its end included
        assert (victim.returncode, out, errors) == (0, "interrupted\nworks\n", "")
    finally:
        if victim.poll() is None:
            victim.kill()
            victim.communicate()
    assert values_of(masters, "res") == [b"rival"] * 3
    eventually(lambda: keys_of(masters) == [[b"res"]] * 3)


def test_an_interrupted_reader_hands_its_role_on(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm
) -> None:
    """The main thread reads for a second one when it is interrupted."""
    client = make_client(masters, master_timeout=20_000)
    _in_a_round(masters)
    got: list[Lock | None] = []
    other = threading.Thread(target=lambda: got.append(client.acquire("other", HOUR)))

    def start() -> None:
        other.start()
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, _OTHER)

    starter = threading.Timer(0.2, start)
    starter.start()
    alarm.armed = True
    with pytest.raises(Rung):
        client.acquire("res", HOUR)
    starter.join()
    assert not got
    masters.resume(0)
    with Stopwatch() as watch:
        other.join(30)
    assert watch.ms <= SLACK_MS
    assert got[0]
    masters.resume(1)
    eventually(lambda: keys_of(masters) == [[b"other"]] * 3)


# -- handlers that use the client --------------------------------------------------------------


def test_a_handler_locks_and_unlocks_anywhere(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm
) -> None:
    """In the middle of rounds and of sleeps, and sleeping itself."""
    client = make_client(masters, retry_delay=2)
    occupy(masters, "rival")
    turns: list[int] = []

    def use() -> None:
        alarm.armed = False
        turns.append(len(turns))
        _with_extends(client, f"handler:{len(turns)}")
        assert client.acquire("rival", HOUR, wait=2) is None
        alarm.armed = True

    alarm.action = use

    def work() -> None:
        for i in range(60):
            _with_extends(client, f"res:{i}")
            assert client.acquire("rival", HOUR, wait=8) is None

    with _busy(client):
        alarm.after(0.001, work, every=0.003)
    assert len(turns) > 10
    eventually(lambda: keys_of(masters) == [[b"rival"]] * 3)


def test_a_handler_sleeps_in_the_middle_of_a_sleep(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm
) -> None:
    """Nothing that a sleep holds can be waited for by another one, at any of many moments."""
    client = make_client(masters, retry_delay=0)  # which pauses 5 ms all the same
    occupy(masters, "rival")
    turns: list[None] = []

    def use() -> None:
        alarm.armed = False
        assert client.acquire("rival", HOUR, wait=1) is None
        turns.append(None)
        alarm.armed = True

    alarm.action = use
    alarm.after(0.0005, lambda: client.acquire("rival", HOUR, wait=1200), every=0.0005)
    assert len(turns) > 100


def _heal(masters: LocalMasters) -> None:
    for i in range(3):
        masters.resume(i)


def _ring_in_a_round(alarm: Alarm, masters: LocalMasters, call: Callable[[], Any]) -> Any:
    """Have the handler run while `call` waits for masters, which go on a little later."""
    _in_a_round(masters)
    healer = threading.Timer(0.5, _heal, (masters,))
    healer.start()
    try:
        return alarm.after(0.2, call)
    finally:
        healer.join()


def test_a_handler_cannot_extend_what_it_has_interrupted(
    client: Redlock, masters: LocalMasters, alarm: Alarm
) -> None:
    lock = client.acquire("res", HOUR)
    assert lock
    seen: list[BaseException] = []

    def extend() -> None:
        for again in (lock.extend, lambda: client.extend_many([lock])):
            with pytest.raises(RuntimeError, match="within an extension") as caught:
                again()
            seen.append(caught.value)

    alarm.action = extend
    assert _ring_in_a_round(alarm, masters, lock.extend) is True
    assert len(seen) == 2
    assert lock.extend()
    assert client.release(lock)


def test_a_handler_releases_what_is_being_extended(
    client: Redlock, masters: LocalMasters, alarm: Alarm
) -> None:
    lock = client.acquire("res", HOUR)
    assert lock
    results: list[bool] = []
    alarm.action = lambda: results.append(client.release(lock))
    assert _ring_in_a_round(alarm, masters, lock.extend) is False
    assert results == [True]
    assert not lock.held
    eventually(lambda: are_clean(masters))


def test_a_handler_closes_the_client_under_a_call(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm
) -> None:
    """The call ends, and what it had sent is cleaned up on the same connections."""
    client = make_client(masters, master_timeout=300)
    alarm.action = client.close
    occupy([masters[0]], "res")
    masters.pause(1)
    masters.pause(2)
    healer = threading.Timer(0.5, _heal, (masters,))
    healer.start()
    with pytest.raises(ClosedError):
        alarm.after(0.1, lambda: client.acquire("res", HOUR))
    healer.join()
    eventually(lambda: keys_of(masters) == [[b"res"], [], []])
    with pytest.raises(ClosedError):
        client.acquire("res", HOUR)


def test_a_handler_closes_the_client_under_a_sleep(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm
) -> None:
    client = make_client(masters, retry_delay=20_000)
    occupy(masters, "res")
    alarm.action = client.close
    with Stopwatch() as watch, pytest.raises(ClosedError):
        alarm.after(0.2, lambda: client.acquire("res", HOUR, wait=math.inf))
    assert watch.ms <= 200 + SLACK_MS
    assert keys_of(masters) == [[b"res"]] * 3


# -- interrupted between steps -----------------------------------------------------------------


def test_an_interrupted_batch_of_extends_frees_its_locks(
    client: Redlock, masters: LocalMasters, alarm: Alarm
) -> None:
    """It was interrupted while it waited for another thread's extension of one of them."""
    locks = [lock for lock in client.acquire_many(["a", "b"], HOUR) if lock]
    locks.sort(key=id)
    _in_a_round(masters)
    other = threading.Thread(target=locks[1].extend)
    other.start()
    time.sleep(0.1)

    alarm.after(0.2, lambda: client.extend_many(locks))
    assert alarm.rung

    masters.resume(0)
    masters.resume(1)
    other.join(20)
    done: list[list[bool]] = []
    third = threading.Thread(
        target=lambda: done.append(client.extend_many(locks)), daemon=True
    )  # one that hangs must not hang pytest
    third.start()
    third.join(10)
    assert done == [[True, True]]
    assert client.release_many(locks) == [True, True]


def test_an_interrupted_release_can_be_repeated(
    client: Redlock, masters: LocalMasters, alarm: Alarm
) -> None:
    lock = client.acquire("res", HOUR)
    assert lock
    all_have(masters, "res", lock.token)
    _in_a_round(masters)
    alarm.after(0.2, lambda: client.release(lock))
    assert alarm.rung
    assert not lock.held
    masters.resume(0)
    masters.resume(1)
    # The first one was sent, and does its work by itself.
    eventually(lambda: are_clean(masters))
    assert client.release(lock) is False


def test_an_interrupted_close_closes(
    masters: LocalMasters, make_client: MakeClient, alarm: Alarm
) -> None:
    client = make_client(masters, master_timeout=3000)
    lock = client.acquire("res", HOUR)
    assert lock
    masters.pause(2)
    client.release(lock)
    alarm.after(0.2, client.close)
    assert alarm.rung
    masters.resume(2)
    # The clean-up had been sent; and the connections are gone: see the guard against leaks.
    eventually(lambda: are_clean(masters))
    client.close()
