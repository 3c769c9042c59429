"""A user who may use the lock's keys and the six commands, and nothing else (rule 10)."""

from __future__ import annotations

from typing import Any

import pytest
from integration.helpers import (
    HOUR,
    NT,
    MakeClient,
    Monitor,
    all_have,
    are_clean,
    eventually,
    occupy,
    outcomes,
    state_of,
    vacate,
)

from redlock_fast import LockLost, NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

RULES = ["~lock:*", "+set", "+get", "+del", "+pexpire", "+eval", "+evalsha"]


def _let_in(masters: LocalMasters, *rules: str) -> list[str]:
    """Make the user, and say how to log in as that user."""
    for master in masters:
        master.command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules)
    return [f"redis://app:secret@127.0.0.1:{port}/0" for port in masters.ports]


@pytest.fixture
def fresh(make_local_masters: MakeLocalMasters) -> LocalMasters:
    """Three masters that have never seen a script."""
    return make_local_masters(3)


@pytest.fixture
def modest(fresh: LocalMasters, make_client: MakeClient) -> Redlock:
    """A client of that user."""
    return make_client(_let_in(fresh, *RULES), retries=3, retry_delay=5)


@pytest.mark.case("C56")
def test_c56_a_full_life(
    modest: Redlock, fresh: LocalMasters, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        lock = modest.acquire("lock:a", HOUR)
        assert lock
        all_have(fresh, "lock:a", lock.token)
        assert modest.extend(lock, 2 * HOUR)
        assert modest.owned(lock)
        assert modest.locked("lock:a")
        assert modest.acquire("lock:a", HOUR, wait=20) is None
        adopted = modest.adopt("lock:a", lock.token, HOUR)
        assert adopted
        assert modest.release(adopted)
        assert modest.release(lock) is False
        assert modest.release_token("lock:a", lock.token) is False
        eventually(lambda: not modest.locked("lock:b") and are_clean(fresh))
    many = modest.acquire_many([f"lock:{i}" for i in range(300)], HOUR)
    assert all(many)
    held = [lock for lock in many if lock]
    assert modest.extend_many(held) == [True] * 300
    assert modest.release_many(held) == [True] * 300
    eventually(lambda: not modest.locked("lock:b") and are_clean(fresh))
    with modest.lock("lock:a", HOUR) as lock:
        assert lock.held
    # What it may not do degrades silently.
    assert caplog.records == []
    assert all(row["errors"] == {} for row in modest.stats()["masters"])


@pytest.mark.case("C56")
def test_c56_losses_are_noticed(modest: Redlock, fresh: LocalMasters) -> None:
    lock = modest.acquire("lock:a", HOUR)
    assert lock
    all_have(fresh, "lock:a", lock.token)
    vacate(fresh, "lock:a")
    assert modest.extend(lock) is False
    with pytest.raises(LockLost), modest.lock("lock:b", HOUR) as lock:
        all_have(fresh, "lock:b", lock.token)
        vacate(fresh, "lock:b")
    for master in fresh:
        master.command("LPUSH", "lock:list", "x")
    assert modest.acquire("lock:list", HOUR) is None
    assert modest.locked("lock:list")


@pytest.mark.case("C56")
def test_c56_it_works_after_a_reconnection(modest: Redlock, fresh: LocalMasters) -> None:
    lock = modest.acquire("lock:a", HOUR)
    assert lock
    all_have(fresh, "lock:a", lock.token)
    for master in fresh:
        master.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        master.command("SCRIPT", "FLUSH")
    eventually(lambda: _works(modest, lock))
    eventually(lambda: not modest.locked("lock:b") and are_clean(fresh))


def _works(client: Redlock, lock: Any) -> bool:
    try:
        return client.release(lock)
    except NoQuorum:
        return False


@pytest.mark.case("C58")
def test_c58_only_the_locks_own_key_is_touched(
    fresh: LocalMasters, make_client: MakeClient
) -> None:
    places = _let_in(fresh, *RULES)
    with Monitor(fresh[0]) as monitor:
        client = make_client(places, retry_delay=5)
        occupy(fresh, "lock:a", 100)
        lock = client.acquire("lock:a", HOUR, wait=5000)
        assert lock
        assert client.extend(lock)
        assert client.owned(lock)
        assert client.locked("lock:a")
        assert client.release(lock)
        assert client.locked("lock:a") is False
        client.close()

        inner = monitor.inner()
        assert {command[0] for command in inner} <= {b"GET", b"DEL", b"PEXPIRE"}
        assert {command[1] for command in inner} == {b"lock:a"}
        scripts = monitor.commands("EVAL", "EVALSHA")
        assert scripts
        assert {(command[2], command[3]) for command in scripts} == {(b"1", b"lock:a")}
        assert {command[1] for command in monitor.commands("SET")} == {b"lock:a"}
        # Of the others, none has a key.
        names = {command[0] for command in monitor.commands()}
        assert names - {b"SET", b"EVAL", b"EVALSHA", b"ECHO", b"ACL"} <= {
            b"AUTH",
            b"CLIENT",
            b"INFO",
            b"PING",
        }


@pytest.mark.case("C58")
def test_c58_another_key_is_refused(modest: Redlock, fresh: LocalMasters) -> None:
    with pytest.raises(NoQuorum) as caught:
        modest.acquire("other:a", HOUR)
    assert set(outcomes(caught.value)) <= {"NOPERM", "unanswered"}
    assert outcomes(caught.value).count("NOPERM") >= 2
    assert are_clean(fresh)
    # It is no reason to give the masters up.
    lock = modest.acquire("lock:a", HOUR, wait=2000)
    assert lock
    assert modest.release(lock)


@pytest.mark.parametrize("missing", ["+set", "+evalsha", "+eval"])
def test_one_right_less(fresh: LocalMasters, make_client: MakeClient, missing: str) -> None:
    """It is said which, per master; nothing hangs."""
    rules = [rule for rule in RULES if rule != missing]
    client = make_client(_let_in(fresh, *rules), master_timeout=NT)
    if missing == "+set":
        with pytest.raises(NoQuorum) as caught:
            client.acquire("lock:a", HOUR)
    else:
        lock = client.acquire("lock:a", HOUR, wait=5000)
        assert lock
        with pytest.raises(NoQuorum) as caught:
            for _ in range(3):
                client.extend(lock)
    assert "NOPERM" in outcomes(caught.value)
    assert set(outcomes(caught.value)) <= {"NOPERM", "unanswered"}
    assert any(missing[1:] in report.cause for report in caught.value.reports)


@pytest.mark.parametrize("missing", ["+get", "+del", "+pexpire"])
def test_one_right_less_inside_a_script(
    fresh: LocalMasters, make_client: MakeClient, missing: str
) -> None:
    """It is never taken for a loss, nor for success."""
    rules = [rule for rule in RULES if rule != missing]
    client = make_client(_let_in(fresh, *rules), master_timeout=NT)
    lock = client.acquire("lock:a", HOUR, wait=5000)
    assert lock
    all_have(fresh, "lock:a", lock.token)
    if missing != "+del":
        with pytest.raises(NoQuorum):
            client.extend(lock)
        assert lock.held
    if missing != "+pexpire":
        with pytest.raises(NoQuorum):
            client.release(lock)
        all_have(fresh, "lock:a", lock.token)
    assert state_of(client, 0)["state"] == "ready"


@pytest.mark.case("C55")
def test_c55_without_scripts_a_hundred_times(fresh: LocalMasters, make_client: MakeClient) -> None:
    """Locks are granted, and end with their ttl; no call asks twice for what is forbidden."""
    rules = [rule for rule in RULES if "eval" not in rule]
    client = make_client([*_let_in(fresh, *rules)], master_timeout=NT)
    locks = []
    with Monitor(fresh[0]) as monitor:
        for i in range(100):
            lock = client.acquire(f"lock:{i}", 3000, wait=5000)
            assert lock
            locks.append(lock)
            with pytest.raises(NoQuorum, match="NOPERM") as caught:
                client.release(lock)
            assert set(outcomes(caught.value)) <= {"NOPERM", "unanswered"}
        assert monitor.commands("DEL") == []
        assert len(monitor.commands("SET")) == 100
    # A refusal is counted as an error of its own, and asked for once a call.
    refused = [row["errors"]["NOPERM"] for row in client.stats()["masters"]]
    assert max(refused) <= 100
    last = client.acquire("lock:last", 3000, wait=5000)
    assert last
    with pytest.raises(NoQuorum, match="NOPERM"):
        client.extend(last)
    eventually(lambda: are_clean(fresh), 10)


@pytest.mark.parametrize("renamed", ["CLIENT", "INFO", "SCRIPT"])
def test_commands_that_were_renamed_away(
    make_local_masters: MakeLocalMasters, make_client: MakeClient, renamed: str
) -> None:
    """What is optional degrades silently."""
    masters = make_local_masters(3, args=["--rename-command", renamed, ""])
    client = make_client(masters)
    for _ in range(3):
        lock = client.acquire("res", HOUR)
        assert lock
        assert client.extend(lock)
        assert client.owned(lock)
        assert client.release(lock)
    assert all(row["errors"] == {} for row in client.stats()["masters"])


def test_a_set_that_was_renamed_away(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    client = make_client(make_local_masters(3, args=["--rename-command", "SET", "HIDDEN"]))
    with pytest.raises(NoQuorum, match="unknown command") as caught:
        client.acquire("res", HOUR)
    assert "ERR" in outcomes(caught.value)
