"""Acquire: the quorum, the validity, the key on the masters, and clean-up after a refusal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest
from integration.fakes import PASS, MakeFake, MakeProxy
from integration.helpers import (
    HOUR,
    NT,
    SLACK_MS,
    MakeClient,
    Monitor,
    Stopwatch,
    all_have,
    are_clean,
    closed_port,
    eventually,
    keys_of,
    occupy,
    outcomes,
    pttls_of,
    state_of,
    taught,
    vacate,
    values_of,
)
from unit.world import acquire

from redlock_fast import NoQuorum, NotAcquired, Redlock, plan
from redlock_fast._core.fleet import Fleet
from redlock_fast._core.io import draw_tokens, now_ns
from redlock_fast._core.op import Op
from redlock_fast.client import Lock
from redlock_fast.options import parse_masters
from redlock_fast.testing import LocalMasters, MakeLocalMasters

NS_PER_MS = 1_000_000


def test_a_lock_stands_on_every_master(client: Redlock, masters: LocalMasters) -> None:
    lock = client.acquire("res", 60_000)

    assert lock is not None
    assert re.fullmatch("[0-9a-f]{40}", lock.token)
    assert (lock.resource, lock.ttl) == ("res", 60_000)
    assert 60_000 - 602 - SLACK_MS < lock.remaining() <= lock.validity < 60_000 - 602
    all_have(masters, "res", lock.token)
    assert all(60_000 - SLACK_MS < pttl <= 60_000 for pttl in pttls_of(masters, "res"))

    assert client.release(lock)
    eventually(lambda: are_clean(masters))


@pytest.mark.case("C34")
@pytest.mark.parametrize("verb", ["acquire", "extend", "many", "adopt"])
def test_c34_a_ttl_is_milliseconds(client: Redlock, masters: LocalMasters, verb: str) -> None:
    lock = client.acquire("res", 30_000 if verb != "acquire" else 15_000)
    assert lock
    all_have(masters, "res", lock.token)
    if verb == "extend":
        assert lock.extend(15_000)
    elif verb == "many":
        assert lock.release()
        (again,) = client.acquire_many(["res"], 30_000)
        assert again
        all_have(masters, "res", again.token)
        assert client.extend_many([again], 15_000) == [True]
    elif verb == "adopt":
        assert client.adopt("res", lock.token, 15_000)
    eventually(lambda: max(pttls_of(masters, "res")) <= 15_000)
    assert min(pttls_of(masters, "res")) > 15_000 - 100 - SLACK_MS


def test_every_try_has_a_fresh_token(make_fake: MakeFake, make_client: MakeClient) -> None:
    fake = make_fake(lambda command, _: b"$-1\r\n" if command[0] == b"SET" else PASS)
    client = make_client([fake], retries=9, retry_delay=0)

    assert client.acquire("res", HOUR) is None

    tokens = [command[2] for command in fake.named("SET")]
    assert len(tokens) == len(set(tokens)) == 10


def test_a_second_client_is_refused_until_the_release(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    one, other = make_client(masters), make_client(masters)
    lock = one.acquire("res", HOUR)
    assert lock is not None
    all_have(masters, "res", lock.token)

    assert other.acquire("res", HOUR) is None
    assert values_of(masters, "res") == [lock.token.encode()] * 3

    assert one.release(lock)
    assert other.acquire("res", HOUR, wait=2000)


def test_a_lock_ends_with_its_ttl(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters)
    lock = client.acquire("res", 300)
    assert lock is not None

    assert client.acquire("res", HOUR, wait=5000)
    assert not lock
    assert lock.remaining() == 0.0


# -- the quorum --------------------------------------------------------------------------------


@pytest.mark.case("C01")
@pytest.mark.parametrize("down_before", [True, False])
def test_c01_the_quorum_counts_configured_masters(
    make_local_masters: MakeLocalMasters, make_client: MakeClient, down_before: bool
) -> None:
    masters = taught(make_local_masters(5))
    occupy([masters[2]], "res", 60_000)
    if down_before:
        masters.kill(3)
        masters.kill(4)
    client = make_client(masters)
    if not down_before:
        masters.kill(3)
        masters.kill(4)

    assert client.acquire("res", 5000) is None
    with pytest.raises(NotAcquired) as caught, client.lock("res", 5000):
        pytest.fail("the body ran")

    words = outcomes(caught.value)
    assert words[2] == "taken"
    assert set(words[3:]) <= {"refused", "closed"}
    for i in (3, 4):
        assert state_of(client, i)["errors"]
    eventually(lambda: keys_of(masters) == [[], [], [b"res"], [], []])
    assert values_of([masters[2]], "res") == [b"rival"]
    assert 0 < pttls_of([masters[2]], "res")[0] <= 60_000


@pytest.mark.case("C02")
def test_c02_more_than_half_for_every_n(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = taught(make_local_masters(7))
    for n in range(1, 8):
        client = make_client(masters.urls[:n])
        for k in range(n + 1):
            occupy([masters[i] for i in range(k, n)], "res")

            lock = client.acquire("res", HOUR)

            assert (lock is not None) == (k >= n // 2 + 1), (n, k)
            if lock is not None:
                assert client.release(lock)
            free = [masters[i] for i in range(k)]
            eventually(lambda free=free: are_clean(free))  # type: ignore[misc]
            vacate(masters, "res")


@pytest.mark.case("C03")
@pytest.mark.parametrize(("n", "up", "acquired"), [(2, 1, False), (4, 2, False), (4, 3, True)])
def test_c03_an_even_number_of_masters(
    make_local_masters: MakeLocalMasters,
    make_client: MakeClient,
    n: int,
    up: int,
    acquired: bool,
) -> None:
    masters = taught(make_local_masters(n))
    for i in range(up, n):
        masters.kill(i)
    client = make_client(masters)

    if acquired:
        lock = client.acquire("res", HOUR)
        assert lock is not None
        assert client.release(lock)
    else:
        with pytest.raises(NoQuorum) as caught:
            client.acquire("res", HOUR)
        assert outcomes(caught.value)[up:] == ["refused"] * (n - up)
    eventually(lambda: are_clean(masters))


def test_a_key_of_another_type_is_taken(client: Redlock, masters: LocalMasters) -> None:
    for master in masters:
        master.command("LPUSH", "res", "x")

    assert client.acquire("res", HOUR) is None
    assert [master.command("TYPE", "res") for master in masters] == [b"list"] * 3


# -- the validity ------------------------------------------------------------------------------


@pytest.mark.case("C04")
def test_c04_validity_is_ttl_less_elapsed_less_drift(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies)
    for proxy in proxies:
        proxy.down.delay_ms = 300

    lock = client.acquire("res", 10_000)

    assert lock is not None
    most = 10_000 - 300 - 102
    assert most - SLACK_MS <= lock.validity <= most
    for proxy in proxies:
        proxy.heal()
    assert client.release(lock)


@pytest.mark.case("C04")
def test_c04_the_drift_of_a_short_ttl(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies, retries=20)
    for proxy in proxies:
        proxy.down.delay_ms = 20

    lock = client.acquire("res", 100)

    assert lock is not None
    assert 0 < lock.validity <= 97 - 20


@pytest.mark.case("C05")
def test_c05_a_grant_that_comes_after_its_ttl_is_none(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies)
    for proxy in proxies:
        proxy.down.delay_ms = 400

    with Monitor(masters[0]) as first, Monitor(masters[1]) as second, Monitor(masters[2]) as third:
        with pytest.raises(NoQuorum, match="too late"):
            client.acquire("res", 300)
        for monitor in (first, second, third):
            eventually(lambda m=monitor: m.commands("EVAL", "EVALSHA"))  # type: ignore[misc]
            assert len(monitor.commands("SET")) == 1
            assert monitor.commands("EVAL", "EVALSHA")[0][3] == b"res"
    stats = client.stats()
    assert (stats["too_late"], stats["acquired"]) == (1, 0)
    assert are_clean(masters)


@pytest.mark.case("C05")
def test_c05_is_tried_again_inside_the_wait_only(
    masters: LocalMasters, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    proxies = [make_proxy(master) for master in masters]
    client = make_client(proxies, retries=1000, retry_delay=10)
    for proxy in proxies:
        proxy.down.delay_ms = 400

    with Monitor(masters[0]) as monitor:
        with Stopwatch() as watch, pytest.raises(NoQuorum, match="too late"):
            client.acquire("res", 300, wait=500)
        tries = len(monitor.commands("SET"))
    assert 2 <= tries <= 3
    assert watch.ms <= 500 + 400 + SLACK_MS
    for proxy in proxies:
        proxy.heal()
    assert client.acquire("res", HOUR, wait=2000)


def _driven_by_hand(n: int = 3) -> tuple[Fleet, plan.Settings]:
    """A fleet whose clock and masters are the test's, with connections that are ready."""
    ports = range(1, n + 1)
    options = parse_masters([f"redis://127.0.0.1:{port}" for port in ports])
    fleet = Fleet(options, 2000 * NS_PER_MS, 2000 * NS_PER_MS, lambda: 0.5)
    settings = plan.Settings(
        retries=0,
        retry_delay_ns=0,
        drift_factor=0.01,
        draw=draw_tokens,
        jitter=lambda: 0.5,
        lock_type=Lock,
    )
    for i in range(n):
        fleet.dialing(i, 1)
        fleet.connected(i, 1)
        while greeting := fleet.take(i):
            # Any answer proves life.
            fleet.receive(i, b"-ERR unknown command\r\n" * greeting.count(b"*"), 1)
    assert [row["state"] for row in fleet.stats()["masters"]] == ["ready"] * n
    return fleet, settings


def _op(step: Op | int | None) -> Op:
    assert isinstance(step, Op)
    return step


def _finish(steps: plan.Plan[plan.T], now: int) -> plan.T:
    with pytest.raises(StopIteration) as end:
        steps.send(now)
    result: plan.T = end.value.value
    return result


@pytest.mark.case("C06")
@pytest.mark.parametrize("left_ms", [-1, 0, 1])
def test_c06_a_validity_of_zero_is_no_lock(left_ms: int) -> None:
    fleet, settings = _driven_by_hand()
    start = now_ns()
    steps = acquire(fleet, settings, b"res", 1000, 0)
    fleet.start(_op(next(steps)), start)
    decided = start + (1000 - 12 - left_ms) * NS_PER_MS
    for i in range(3):
        fleet.receive(i, b"+OK\r\n", decided)

    if left_ms > 0:
        lock, _ = _finish(steps, decided)
        assert lock is not None
        assert lock.validity == left_ms
        assert fleet.stats()["acquired"] == 1
    else:
        with pytest.raises(NoQuorum, match="too late"):
            steps.send(decided)
        assert all(b"EVAL" in fleet.take(i) for i in range(3))
        assert fleet.stats()["too_late"] == 1


@pytest.mark.case("C06")
@pytest.mark.parametrize("left_ms", [-1, 0, 1])
@pytest.mark.parametrize("new_ttl", [1000, 500])
def test_c06_an_extension_with_nothing_left_is_a_loss(left_ms: int, new_ttl: int) -> None:
    fleet, settings = _driven_by_hand()
    start = now_ns()
    steps = acquire(fleet, settings, b"res", 1000, 0)
    fleet.start(_op(next(steps)), start)
    for i in range(3):
        fleet.receive(i, b"+OK\r\n", start)
    lock, _ = _finish(steps, start)
    assert isinstance(lock, Lock)
    lock.claim("res", None, sys.modules["redlock_fast.holds"]._process)

    extending = plan.extend(fleet, settings, [lock], new_ttl)
    assert next(extending) is None
    fleet.start(_op(extending.send(start)), start)
    assert lock.deadline_ns == start + (new_ttl - new_ttl // 100 - 2) * NS_PER_MS
    decided = lock.deadline_ns - left_ms * NS_PER_MS
    for i in range(3):
        fleet.receive(i, b":1\r\n", decided)
    results, _ = _finish(extending, decided)

    if left_ms > 0:
        assert results == [True]
        assert lock.deadline_ns == decided + left_ms * NS_PER_MS
    else:
        assert results == [False]
        assert lock.remaining() == 0.0
        assert not lock.held


@pytest.mark.case("C35")
@pytest.mark.parametrize("ttl", [2**31, 30 * 24 * HOUR, 365 * 24 * HOUR, 2**42])
def test_c35_a_ttl_beyond_32_bits(client: Redlock, masters: LocalMasters, ttl: int) -> None:
    lock = client.acquire("res", ttl)

    assert lock is not None
    assert ttl - ttl / 100 - 2 - 1000 < lock.validity <= ttl - ttl / 100 - 2
    all_have(masters, "res", lock.token)
    assert all(ttl - 10_000 < pttl <= ttl for pttl in pttls_of(masters, "res"))
    assert client.extend(lock)
    assert lock.remaining() > ttl - ttl / 100 - 2 - 10_000
    assert all(ttl - 10_000 < pttl <= ttl for pttl in pttls_of(masters, "res"))


# -- what is sent ------------------------------------------------------------------------------


@pytest.mark.case("C33")
def test_c33_one_command_sets_token_and_expiry(client: Redlock, masters: LocalMasters) -> None:
    with Monitor(masters[0]) as one, Monitor(masters[1]) as two, Monitor(masters[2]) as three:
        lock = client.acquire("res", 60_000)
        assert lock is not None
        all_have(masters, "res", lock.token)
        assert client.extend(lock, 70_000)
        eventually(lambda: min(pttls_of(masters, "res")) > 60_000)
        assert client.release(lock)
        eventually(lambda: are_clean(masters))

        token = lock.token.encode()
        for monitor in (one, two, three):
            assert monitor.commands("SET") == [
                [b"SET", b"res", token, b"NX", b"PX", b"60000"],
            ]
            writes = monitor.inner("SET", "PEXPIRE", "DEL", "EXPIRE", "SETEX")
            assert writes == [[b"PEXPIRE", b"res", b"70000"], [b"DEL", b"res"]]
            ours = {command[0] for command in monitor.commands()}
            allowed = {b"SET", b"EVAL", b"EVALSHA", b"CLIENT", b"INFO"}
            assert ours - {b"GET", b"PTTL", b"KEYS", b"ECHO"} <= allowed


_VICTIM = """
import sys
from redlock_fast import Redlock
client = Redlock(sys.argv[1:], master_timeout=2000)
turn = 0
print("go", flush=True)
while True:
    turn += 1
    lock = client.acquire(f"res:{turn % 7}", 60_000)
    if lock and turn % 3 == 0:
        lock.extend(50_000)
    if lock and turn % 5:
        lock.release()
"""


def _kill_at_random_points(masters: LocalMasters, times: int) -> None:
    for turn in range(times):
        victim = subprocess.Popen(
            [sys.executable, "-c", _VICTIM, *masters.urls], stdout=subprocess.PIPE
        )
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"go\n"
            time.sleep(turn * 7919 % 101 / 2000)  # 0 to 50 ms, each time another one
        finally:
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
        for master in masters:
            for key in keys_of([master])[0]:
                assert master.command("PTTL", key) != -1
        masters.flush_all()


@pytest.mark.case("C33")
def test_c33_a_killed_client_leaves_no_key_without_expiry(masters: LocalMasters) -> None:
    _kill_at_random_points(masters, 3)


@pytest.mark.slow
@pytest.mark.case("C33")
def test_c33_a_client_killed_200_times(masters: LocalMasters) -> None:
    _kill_at_random_points(masters, 200)


# -- after a refusal ---------------------------------------------------------------------------


def test_a_refused_try_leaves_no_key(masters: LocalMasters, make_client: MakeClient) -> None:
    occupy([masters[0], masters[1]], "res")
    client = make_client(masters, retries=3, retry_delay=1)

    assert client.acquire("res", HOUR) is None

    eventually(lambda: keys_of(masters) == [[b"res"], [b"res"], []])
    assert client.stats()["contended"] == 1


def test_a_rejected_argument_sends_nothing(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(masters, warm=False)
    with pytest.raises(ValueError):
        client.acquire("", 1000)
    assert [row["state"] for row in client.stats()["masters"]] == ["down"] * 3


def test_the_constructor_does_no_io(make_client: MakeClient) -> None:
    with closed_port() as port:
        client = make_client([f"redis://127.0.0.1:{port}"], master_timeout=NT, warm=False)
        assert state_of(client, 0)["errors"] == {}
        with pytest.raises(NoQuorum):
            client.acquire("res", HOUR)
        assert state_of(client, 0)["errors"]


def test_no_memory_for_a_lock_that_was_granted(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    """What could not be returned is deleted at once, not with the next call."""

    class Unmade(Lock):
        def __new__(cls) -> Unmade:
            raise MemoryError("no room for a lock")

    client = make_client(masters)
    client._settings.lock_type = Unmade
    with pytest.raises(MemoryError, match="no room"):
        client.acquire("res", HOUR)
    assert client.stats()["acquired"] == 1
    eventually(lambda: are_clean(masters))
