"""`with client.lock(...)`, the decorator, and `with lock`: who is told what, and when."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from integration.helpers import (
    HOUR,
    NT,
    MakeClient,
    all_have,
    are_clean,
    eventually,
    occupy,
    outcomes,
    vacate,
    values_of,
)

from redlock_fast import ClosedError, LockLost, NoQuorum, NotAcquired, Redlock, RedlockError
from redlock_fast.testing import LocalMasters

NOTES = sys.version_info >= (3, 11)


def _notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_the_body_runs_with_the_lock(client: Redlock, masters: LocalMasters) -> None:
    with client.lock("res", HOUR) as lock:
        assert lock.held
        all_have(masters, "res", lock.token)
        assert client.acquire("res", HOUR) is None
    assert not lock.held
    eventually(lambda: are_clean(masters))


def test_a_lock_is_a_context_of_its_own(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock
    with lock as same:
        assert same is lock
    assert not lock
    eventually(lambda: are_clean(masters))


def test_releasing_in_the_body_is_fine(client: Redlock) -> None:
    with client.lock("res", HOUR) as lock:
        assert lock.release()
    assert client.acquire("res", HOUR)


def test_the_context_may_be_entered_again(client: Redlock) -> None:
    context = client.lock("res", HOUR)
    with context as one:
        pass
    with context as two:
        pass
    assert one is not two
    assert one.token != two.token


@pytest.mark.case("C31")
def test_the_context_is_not_entered_twice_at_once(client: Redlock) -> None:
    context = client.lock("res", HOUR)
    with context as lock:
        with pytest.raises(RuntimeError, match="in use"), context:
            pytest.fail("the body ran")
        assert lock.held
    assert not lock.held


@pytest.mark.case("C30")
def test_c30_nor_by_a_second_thread_while_the_first_one_waits(
    client: Redlock, masters: LocalMasters
) -> None:
    """It would leave with the lock of the one that came later."""
    occupy(masters, "res")
    context = client.lock("res", HOUR, wait=20_000)
    tokens: list[str] = []

    def enter() -> None:
        with context as lock:
            tokens.append(lock.token)

    waiter = threading.Thread(target=enter)
    waiter.start()
    eventually(lambda: client.stats()["masters"][0]["replies"] > 2)
    with pytest.raises(RuntimeError, match="in use"), context:
        pytest.fail("the body ran")
    vacate(masters, "res")
    waiter.join(20)
    assert len(tokens) == 1
    with context as lock:  # free again
        assert lock.held
    occupy(masters, "res")
    context = client.lock("res", HOUR, wait=0)
    for _ in range(2):  # also after it was not entered
        with pytest.raises(NotAcquired), context:
            pytest.fail("the body ran")


@pytest.mark.case("C30")
def test_c30_an_expired_lock_does_not_release_the_next_one_of_its_client(
    client: Redlock, masters: LocalMasters
) -> None:
    first = client.acquire("res", 200)
    assert first
    second = client.acquire("res", HOUR, wait=5000)
    assert second
    all_have(masters, "res", second.token)

    assert first.release() is False
    assert first.extend(HOUR) is False

    assert client.owned(second)
    assert values_of(masters, "res") == [second.token.encode()] * 3
    assert second.release() is True


def test_lock_does_no_io_before_enter(client: Redlock, masters: LocalMasters) -> None:
    client.lock("res", HOUR)
    assert are_clean(masters)


def test_extending_in_the_body(client: Redlock) -> None:
    with client.lock("res", 5000) as lock:
        assert lock.extend(60_000)
        assert lock.remaining() > 5000


# -- the decorator -----------------------------------------------------------------------------


def test_every_call_of_a_decorated_function_locks_anew(
    client: Redlock, masters: LocalMasters
) -> None:
    seen = []

    @client.lock("res", HOUR, wait=5000)
    def work(a: int, *, b: int) -> int:
        """Work hard."""
        seen.append([m.command("GET", "res") for m in masters][:2])
        return a + b

    assert work.__name__ == "work"
    assert work.__doc__ == "Work hard."
    assert work(1, b=2) == 3
    assert work(3, b=4) == 7
    eventually(lambda: are_clean(masters))
    assert seen[0] != seen[1]


def test_a_decorated_function_runs_one_at_a_time(client: Redlock) -> None:
    inside: list[int] = []
    most = []

    @client.lock("res", HOUR, wait=20_000)
    def work() -> None:
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1] * 8


def test_a_decorated_function_raises_its_own(client: Redlock, masters: LocalMasters) -> None:
    @client.lock("res", HOUR)
    def work() -> None:
        raise ValueError("body")

    with pytest.raises(ValueError, match="body"):
        work()
    eventually(lambda: are_clean(masters))


def test_a_coroutine_function_is_refused(client: Redlock) -> None:
    with pytest.raises(TypeError, match="coroutine"):

        @client.lock("res", HOUR)
        async def work() -> None: ...


# -- not acquired ------------------------------------------------------------------------------


@pytest.mark.case("C162")
def test_c162_the_body_never_runs_when_it_is_taken(client: Redlock, masters: LocalMasters) -> None:
    occupy(masters, "res")
    ran = []

    with pytest.raises(NotAcquired, match="somebody else") as caught, client.lock("res", HOUR):
        ran.append(1)
    assert isinstance(caught.value, RedlockError)
    assert len(caught.value.reports) == 3
    assert outcomes(caught.value).count("taken") >= 2
    assert [report.address for report in caught.value.reports] == masters.addresses

    @client.lock("res", HOUR)
    def work() -> None:
        ran.append(1)

    with pytest.raises(NotAcquired):
        work()
    assert not ran
    assert not client.acquire("res", HOUR)


@pytest.mark.case("C162")
def test_c162_the_body_never_runs_without_a_quorum(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters)
    for i in range(3):
        masters.kill(i)
    ran = []

    with pytest.raises(NoQuorum) as caught, client.lock("res", HOUR):
        ran.append(1)
    assert isinstance(caught.value, RedlockError)
    assert not isinstance(caught.value, NotAcquired)

    @client.lock("res", HOUR)
    def work() -> None:
        ran.append(1)

    with pytest.raises(NoQuorum):
        work()
    assert not ran


@pytest.mark.case("C162")
def test_c162_a_lock_that_is_not_held_is_false(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert bool(lock) is True
    assert lock
    all_have(masters, "res", lock.token)
    vacate(masters, "res")
    assert client.extend(lock) is False
    assert bool(lock) is False
    lock = client.acquire("res", 200)
    assert lock is not None
    eventually(lambda: bool(lock) is False)
    lock = client.acquire("res", HOUR, wait=5000)
    assert lock
    assert lock.release()
    assert bool(lock) is False


def test_wait_and_settings_reach_acquire(client: Redlock, masters: LocalMasters) -> None:
    occupy(masters, "res", 200)
    with client.lock("res", HOUR, wait=5000) as lock:
        assert lock.held


# -- the body raises ---------------------------------------------------------------------------


@pytest.mark.case("C109")
@pytest.mark.parametrize(
    "error", [ValueError("body"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
)
@pytest.mark.parametrize("of_lock", [False, True])
def test_c109_the_key_is_gone_and_the_error_comes_out(
    client: Redlock, masters: LocalMasters, error: BaseException, of_lock: bool
) -> None:
    context: Any = client.acquire("res", HOUR) if of_lock else client.lock("res", HOUR)
    with pytest.raises(type(error)) as caught, context as lock:
        all_have(masters, "res", lock.token)
        raise error
    assert caught.value is error
    assert error.__context__ is None
    assert _notes(error) == ""
    assert not lock.held
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C110")
@pytest.mark.parametrize("error", [ValueError("body"), SystemExit(3)])
def test_c110_a_loss_does_not_hide_the_bodys_error(
    client: Redlock, masters: LocalMasters, error: BaseException
) -> None:
    with pytest.raises(type(error)) as caught, client.lock("res", HOUR) as lock:
        all_have(masters, "res", lock.token)
        vacate(masters, "res")
        raise error
    assert caught.value is error
    if NOTES:
        assert "LockLost" in _notes(error)
    else:
        assert isinstance(error.__context__, LockLost)


@pytest.mark.case("C110")
def test_c110_no_quorum_does_not_hide_the_bodys_error(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, master_timeout=NT)
    with pytest.raises(ValueError, match="body") as caught, client.lock("res", HOUR, wait=5000):
        for i in range(3):
            masters.kill(i)
        raise ValueError("body")
    if NOTES:
        assert "NoQuorum" in _notes(caught.value)
    else:
        assert isinstance(caught.value.__context__, NoQuorum)


@pytest.mark.case("C110")
@pytest.mark.parametrize("of_lock", [False, True])
def test_c110_a_closed_client_does_not_hide_the_bodys_error(
    client: Redlock, masters: LocalMasters, of_lock: bool
) -> None:
    context: Any = client.acquire("res", HOUR) if of_lock else client.lock("res", HOUR)
    with pytest.raises(ValueError, match="body") as caught, context:
        client.close()
        raise ValueError("body")
    if NOTES:
        assert "ClosedError" in _notes(caught.value)
    else:
        assert isinstance(caught.value.__context__, ClosedError)


@pytest.mark.case("C110")
def test_c110_without_an_error_the_loss_is_raised(client: Redlock, masters: LocalMasters) -> None:
    with pytest.raises(LockLost, match="res") as caught, client.lock("res", HOUR) as lock:
        all_have(masters, "res", lock.token)
        vacate(masters, "res")
    assert caught.value.reason == "foreign"
    assert lock.token not in str(caught.value)


@pytest.mark.case("C110")
@pytest.mark.parametrize("hung", [False, True])
def test_c110_without_an_error_no_quorum_is_raised(
    masters: LocalMasters, make_client: MakeClient, hung: bool
) -> None:
    client = make_client(masters, master_timeout=NT)
    with pytest.raises(NoQuorum) as caught, client.lock("res", HOUR, wait=5000):
        for i in range(3):
            if hung:
                masters.pause(i)
            else:
                masters.kill(i)
    assert len(caught.value.reports) == 3
    for i in range(3):
        masters.resume(i)


def test_a_loss_found_by_extend_is_raised_on_exit(client: Redlock, masters: LocalMasters) -> None:
    with pytest.raises(LockLost) as caught, client.lock("res", HOUR) as lock:
        all_have(masters, "res", lock.token)
        vacate(masters, "res")
        assert lock.extend() is False
    assert caught.value.reason == "foreign"


def test_a_lock_that_expired_is_lost_on_exit(client: Redlock, masters: LocalMasters) -> None:
    with pytest.raises(LockLost), client.lock("res", 200, wait=5000) as lock:
        eventually(lambda: not lock.held and are_clean(masters))
        with pytest.raises(LockLost) as inside:
            lock.raise_if_lost()
        assert inside.value.reason == "expired"


def test_a_body_that_overran_the_validity_is_told_on_exit(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    client = make_client(masters, clock_drift_factor=0.999)  # a minute, held for 58 ms
    with pytest.raises(LockLost) as caught, client.lock("res", 60_000, wait=5000) as lock:
        eventually(lambda: not lock.held)
        with pytest.raises(LockLost):
            lock.raise_if_lost()
    assert caught.value.reason == "expired"


def test_a_lock_taken_over_by_another_is_lost_on_exit(
    client: Redlock, masters: LocalMasters
) -> None:
    with pytest.raises(LockLost), client.lock("res", HOUR) as lock:
        all_have(masters, "res", lock.token)
        vacate(masters, "res")
        other = client.acquire("res", HOUR)
    assert other
    assert client.owned(other)


def test_nested_locks(client: Redlock, masters: LocalMasters) -> None:
    with client.lock("outer", HOUR) as outer, client.lock("inner", HOUR) as inner:
        assert outer.held
        assert inner.held
        with pytest.raises(NotAcquired), client.lock("outer", HOUR):
            pytest.fail("not reentrant")
        assert outer.held
    eventually(lambda: are_clean(masters))


def test_a_lock_entered_by_hand_and_lost(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)
    with pytest.raises(LockLost), lock:
        vacate(masters, "res")
