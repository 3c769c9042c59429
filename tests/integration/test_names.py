"""Host names and credential providers: what is asked for before a connection, and may take long."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from integration.fakes import MakeFake, Talk
from integration.helpers import (
    HOUR,
    NT,
    SLACK_MS,
    MakeClient,
    Stopwatch,
    are_clean,
    black_hole,
    closed_port,
    eventually,
    fails_with,
    in_child,
    outcomes,
    pair,
    ready,
    run_script,
    state_of,
)

from redlock_fast import NoQuorum, Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

Place = tuple[Any, ...]


def v4(port: int, host: str = "127.0.0.1") -> Place:
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))


def v6(port: int) -> Place:
    return (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))


class Names:
    """Stands in for the system's resolver, for names that end in `.test`."""

    def __init__(self) -> None:
        self.places: dict[str, list[Place]] = {}
        self.asked: list[str] = []
        self.hanging = False
        self.over = threading.Event()
        self._real = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *args: Any, **keywords: Any) -> Any:
        if not str(host).endswith(".test"):
            return self._real(host, port, *args, **keywords)
        self.asked.append(host)
        if self.hanging:
            assert self.over.wait(60)
        if host not in self.places:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.places[host]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    yield names
    names.over.set()


# -- names -------------------------------------------------------------------------------------


def test_masters_are_reached_by_name(
    masters: LocalMasters, make_client: MakeClient, resolver: Names
) -> None:
    for i, master in enumerate(masters):
        resolver.places[f"m{i}.test"] = [v4(master.port)]
    client = make_client(
        [f"redis://m{i}.test:{master.port}" for i, master in enumerate(masters)], warm=False
    )
    assert resolver.asked == []  # not in the constructor
    pair(client)
    assert {f"m{i}.test" for i in range(len(masters))} == set(resolver.asked)
    assert state_of(client, 0)["address"] == f"m0.test:{masters[0].port}"
    for _ in range(20):
        pair(client)
    assert len(resolver.asked) == len(masters)


def test_the_system_resolver_is_asked(masters: LocalMasters, make_client: MakeClient) -> None:
    client = make_client(
        [*masters.urls[:2], "redis://no-such-host.invalid"], warm=False, connect_timeout=60_000
    )
    eventually(lambda: fails_with(client, 2, "unresolved"), 40)
    assert "no-such-host.invalid" in state_of(client, 2)["cause"]


@pytest.mark.case("C66")
def test_c66_a_name_that_is_not_found(
    masters: LocalMasters, make_client: MakeClient, resolver: Names
) -> None:
    places = [*masters.urls[:2], f"redis://gone.test:{masters[2].port}"]
    client = make_client(places, warm=False, master_timeout=NT)
    with Stopwatch() as watch:
        pair(client)
    assert watch.ms < 2 * NT + SLACK_MS
    eventually(lambda: state_of(client, 2)["errors"].get("unresolved"))
    cause = state_of(client, 2)["cause"]
    assert cause.startswith("unresolved: host name gone.test cannot be looked up: ")
    assert "not known" in cause

    alone = make_client(places[2:], warm=False)
    with pytest.raises(NoQuorum) as caught:
        alone.acquire("res", HOUR, wait=0)
    assert outcomes(caught.value) == ["unresolved"]
    assert "gone.test" in str(caught.value)

    resolver.places["gone.test"] = [v4(masters[2].port)]
    eventually(lambda: ready(client, 2))


class _Forbidden(BaseException):
    """What is raised by libraries that keep tests off the network, say."""


@pytest.mark.case("C66")
def test_c66_a_look_up_that_raises_anything(
    masters: LocalMasters, make_client: MakeClient, resolver: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*args: Any, **keywords: Any) -> Any:
        raise _Forbidden

    resolver.places["m.test"] = [v4(masters[0].port)]
    client = make_client(["redis://m.test:1"], warm=False, connect_timeout=300)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", forbid)
        with pytest.raises(NoQuorum, match="cannot be looked up: _Forbidden"):
            client.acquire("res", HOUR, wait=1500)
        # More often than there may be threads.
        eventually(lambda: state_of(client, 0)["errors"]["unresolved"] > 8 or _fails(client))
    pair(client, wait=5000)


def _fails(client: Redlock) -> bool:
    with pytest.raises(NoQuorum):
        client.acquire("res", HOUR, wait=500)
    return False


@pytest.mark.case("C68")
def test_c68_a_name_that_moves(
    make_local_masters: MakeLocalMasters, make_client: MakeClient, resolver: Names
) -> None:
    first, second = make_local_masters(2)
    resolver.places["m.test"] = [v4(first.port)]
    client = make_client(["redis://m.test:1"], warm=False)
    pair(client)
    first.kill()
    resolver.places["m.test"] = [v4(second.port)]
    pair(client, wait=5000)
    assert second.command("INFO", "commandstats").count(b"cmdstat_set:calls=1") == 1


@pytest.mark.case("C69")
def test_c69_the_first_of_several_addresses_is_a_black_hole(
    masters: LocalMasters, make_client: MakeClient, resolver: Names
) -> None:
    with black_hole(socket.AF_INET6, "::1") as hole, closed_port() as closed:
        resolver.places["m.test"] = [v6(hole.getsockname()[1]), v4(closed), v4(masters[0].port)]
        client = make_client(["redis://m.test:1"], warm=False, master_timeout=300)
        with Stopwatch() as watch:
            pair(client, wait=0)  # one try: connected within its time
        assert watch.ms < 300 + SLACK_MS
        assert state_of(client, 0)["errors"] == {}  # none of this is a failure of the master's

        # Next time the one that worked comes first.
        masters[0].command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with Stopwatch() as watch:
            pair(client, wait=5000)
        asked = len(resolver.asked)
        assert asked == 2
        assert state_of(client, 0)["reconnects"] == 1


def test_all_addresses_are_bad(make_client: MakeClient, resolver: Names) -> None:
    with black_hole() as hole, closed_port() as closed:
        resolver.places["m.test"] = [v4(closed), v4(hole.getsockname()[1]), v4(closed, "127.0.0.2")]
        client = make_client(
            ["redis://m.test:1"], warm=False, master_timeout=NT, connect_timeout=400
        )
        with pytest.raises(NoQuorum) as caught:
            client.acquire("res", HOUR, wait=2000)
        assert outcomes(caught.value)[0] in ("connecting", "refused", "timeout")
        errors = state_of(client, 0)["errors"]
        assert set(errors) <= {"refused", "timeout"}
        assert 1 <= sum(errors.values()) <= 2000 / 10  # a dial of all three is one failure


def test_an_address_that_only_accepts_is_not_tried_first_again(
    masters: LocalMasters, make_client: MakeClient, make_fake: MakeFake, resolver: Names
) -> None:
    mute = make_fake(lambda command, talk: b"")
    resolver.places["m.test"] = [v4(mute.port), v4(masters[0].port)]
    client = make_client(["redis://m.test:1"], warm=False, connect_timeout=300)
    pair(client, wait=10_000)
    assert len(mute.talks) == 1


def test_localhost_is_ipv6_too(make_client: MakeClient, make_fake: MakeFake) -> None:
    fake = make_fake()
    with socket.socket(socket.AF_INET6) as only:
        try:
            only.bind(("::1", 0))
        except OSError:
            pytest.skip("there is no IPv6 here")
        only.listen()
        fake.take_over(only.dup())
        client = make_client([f"redis://localhost:{only.getsockname()[1]}"], warm=False)
        pair(client, wait=5000)


# -- look-ups that hang ------------------------------------------------------------------------


def test_a_look_up_that_hangs_delays_nobody(
    masters: LocalMasters, make_client: MakeClient, resolver: Names
) -> None:
    resolver.hanging = True
    client = make_client(
        [*masters.urls[:2], "redis://m.test:1"],
        warm=False,
        master_timeout=NT,
        connect_timeout=200,
    )
    with Stopwatch() as watch:
        pair(client)
        for _ in range(20):
            pair(client)
    assert watch.ms < 3 * NT + SLACK_MS
    eventually(lambda: fails_with(client, 2, "timeout"))
    assert "look-up" in state_of(client, 2)["cause"]
    assert len(resolver.asked) == 1  # however often it is dialled
    resolver.places["m.test"] = [v4(masters[2].port)]
    resolver.over.set()
    eventually(lambda: ready(client, 2))


def test_look_ups_have_few_threads(make_client: MakeClient, resolver: Names) -> None:
    resolver.hanging = True
    threads = len(os.listdir("/proc/self/task"))
    clients = [
        make_client([f"redis://m{i}-{j}.test:1" for j in range(3)], warm=False, master_timeout=NT)
        for i in range(8)
    ]
    for client in clients:
        with pytest.raises(NoQuorum):
            client.acquire("res", HOUR, wait=0)
    assert len(os.listdir("/proc/self/task")) <= threads + 8
    resolver.over.set()
    eventually(lambda: len(set(resolver.asked)) == 24)
    eventually(lambda: len(os.listdir("/proc/self/task")) <= threads)


def test_a_hanging_look_up_does_not_hold_up_close(make_client: MakeClient, resolver: Names) -> None:
    resolver.hanging = True
    client = make_client(["redis://m.test:1"], warm=False, master_timeout=NT)
    with pytest.raises(NoQuorum):
        client.acquire("res", HOUR, wait=0)
    with Stopwatch() as watch:
        client.close()
    assert watch.ms < SLACK_MS


@pytest.mark.parametrize("module", ["redlock_fast", "redlock_fast.asyncio"])
def test_a_hanging_look_up_does_not_hold_up_the_exit(module: str) -> None:
    done = run_script(
        f"""
import socket, time
def hang(*args, **keywords):
    time.sleep(3600)
socket.getaddrinfo = hang
from {module} import Redlock
from redlock_fast import NoQuorum
async def use():
    client = Redlock(["redis://m.test:1"], retries=0)
    try:
        found = client.acquire("res", 1000)
        if hasattr(found, "__await__"):
            await found
    except NoQuorum as error:
        print(error.reports[0].outcome)
import asyncio
asyncio.run(use())
""",
        limit_s=20,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("connecting\n", "", 0)


def test_a_forked_child_looks_up_for_itself(
    masters: LocalMasters, make_client: MakeClient, resolver: Names
) -> None:
    for i, master in enumerate(masters):
        resolver.places[f"m{i}.test"] = [v4(master.port)]
    hanging = make_client(["redis://m0.test:1"], warm=False, master_timeout=NT)
    client = make_client(
        [f"redis://m{i}.test:{master.port}" for i, master in enumerate(masters)], warm=False
    )
    resolver.hanging = True
    with pytest.raises(NoQuorum):
        hanging.acquire("res", HOUR, wait=0)
    resolver.hanging = False

    def work() -> None:
        pair(client, wait=5000)
        pair(hanging, wait=5000)

    in_child(work)
    resolver.over.set()
    pair(client, wait=5000)


# -- credential providers ----------------------------------------------------------------------


class Provider:
    """As redis-py's: what it gives is for one connection."""

    def __init__(self, give: Callable[[], Any]) -> None:
        self.give = give
        self.threads: set[int] = set()
        self.calls = 0

    def get_credentials(self) -> Any:
        self.threads.add(threading.get_ident())
        self.calls += 1
        return self.give()


def _with(provider: Any, masters: LocalMasters) -> list[dict[str, Any]]:
    return [
        {"host": "127.0.0.1", "port": master.port, "credential_provider": provider}
        for master in masters
    ]


def test_credentials_are_asked_for_at_each_connection(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = make_local_masters(3, password="first")
    password = "first"
    provider = Provider(lambda: (password,))
    client = make_client(_with(provider, masters), warm=False)
    assert provider.calls == 0
    eventually(lambda: all(ready(client, i) for i in range(3)))
    assert provider.calls == 3
    assert threading.get_ident() not in provider.threads  # it may take its time

    for master in masters:
        master._ask(
            ("CONFIG", "SET", "requirepass", "second"),
            ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"),
            limit_s=5.0,
        )
    password = "second"
    pair(client, wait=5000)
    eventually(lambda: all(ready(client, i) for i in range(3)))
    assert provider.calls == 6


def test_a_provider_may_name_a_user(
    make_local_masters: MakeLocalMasters, make_client: MakeClient
) -> None:
    masters = make_local_masters(3)
    for master in masters:
        master.command("ACL", "SETUSER", "app", "on", ">S3cr3t!", "~*", "+@all")
        master.command("ACL", "SETUSER", "default", "-set")
    client = make_client(_with(Provider(lambda: ("app", "S3cr3t!")), masters), warm=False)
    pair(client, wait=5000)


@pytest.mark.parametrize("form", ["redis.Redis", "redis.asyncio.Redis"])
def test_a_provider_that_a_client_brings(
    make_local_masters: MakeLocalMasters, make_client: MakeClient, form: str
) -> None:
    masters = make_local_masters(3, password="S3cr3t!")
    module, _, name = form.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    provider = Provider(lambda: ("S3cr3t!",))
    clients = [kind(**place) for place in _with(provider, masters)]
    pair(make_client(clients, warm=False), wait=5000)
    assert provider.calls >= 2


@pytest.mark.case("C151")
@pytest.mark.parametrize(
    "give",
    [
        lambda: 1 / 0,
        lambda: ("S3cr3t!", "S3cr3t!", "S3cr3t!"),
        lambda: None,
        lambda: ("S3cr3t!", 7),
        lambda: (_ for _ in ()).throw(SystemExit("S3cr3t!")),
        lambda: ("app", "S3cr3t!wrong"),
    ],
    ids=["raises", "three", "none", "number", "exits", "wrong"],
)
def test_providers_that_fail(
    make_local_masters: MakeLocalMasters,
    make_client: MakeClient,
    give: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    masters = make_local_masters(3)
    client = make_client(_with(Provider(give), masters), warm=False)
    caplog.set_level("DEBUG")
    with pytest.raises(NoQuorum) as caught:
        client.acquire("res", HOUR, wait=500)
    assert "CONFIG" in outcomes(caught.value)
    assert set(outcomes(caught.value)) <= {"CONFIG", "unanswered"}
    assert "S3cr3t" not in f"{caught.value} {caught.value.reports} {caplog.text} {client.stats()}"
    assert are_clean(masters)


def test_a_provider_that_hangs_delays_nobody(
    masters: LocalMasters, make_client: MakeClient
) -> None:
    over = threading.Event()
    hung = Provider(lambda: ((over.wait(60) and "") or "",))
    client = make_client(
        [*masters.urls[:2], *_with(hung, masters)[2:]],
        warm=False,
        master_timeout=NT,
        connect_timeout=200,
    )
    try:
        with Stopwatch() as watch:
            for _ in range(20):
                pair(client)
        assert watch.ms < 3 * NT + SLACK_MS
        eventually(lambda: fails_with(client, 2, "timeout"))
        assert "credential provider" in state_of(client, 2)["cause"]
        assert hung.calls == 1
    finally:
        over.set()
    eventually(lambda: ready(client, 2))


def test_what_a_provider_gave_is_what_the_master_hears(
    make_fake: MakeFake, make_client: MakeClient
) -> None:
    heard = []

    def answer(command: list[bytes], talk: Talk) -> Any:
        if command[0] == b"AUTH":
            heard.append(command[1:])
            return b"+OK\r\n"
        return fake.behave(command)

    fake = make_fake(answer)
    give = ("\xfcser", "p@ss:w/rd#?%25$ \xe9")
    place = {
        "host": "127.0.0.1",
        "port": fake.port,
        "credential_provider": Provider(lambda: give),
    }
    pair(make_client([place], warm=False), wait=5000)
    assert heard == [[part.encode() for part in give]]
