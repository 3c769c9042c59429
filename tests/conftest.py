"""What all tests have in common: fixtures, a guard against leaks, the report's first lines.

`from conftest import eventually, keys_of`, or the whole of `integration.helpers`.
"""

from __future__ import annotations

import gc
import importlib
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from integration.bridge import Bridge, Runner
from integration.helpers import (
    PATIENT,
    MakeClient,
    descriptors,
    eventually,
    keys_of,
    names,
    taught,
)

from redlock_fast import Redlock
from redlock_fast.testing import LocalMasters, MakeLocalMasters

__all__ = ["eventually", "keys_of"]

pytest_plugins = [
    "redlock_fast.testing",
    "integration.fakes",
    "integration.certs",
    "integration.tls_front",
]

SOURCES = Path(__file__).resolve().parents[1] / "src" / "redlock_fast"
# A compiled module has a .pxd beside its source.
COMPILED = [
    ".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in SOURCES.rglob("*.pxd")
]


def pytest_configure(config: pytest.Config) -> None:
    # pyproject.toml says the same; this is for runs with another configuration.
    config.addinivalue_line("markers", "case(number): number of the case in the catalogue")
    config.addinivalue_line("markers", "extra: takes long; in CI and make test-all")
    config.addinivalue_line("markers", "slow: runs in make test-all only")
    config.addinivalue_line("markers", "twin: on another facade or loop; in CI and make test-all")


def pytest_report_header() -> list[str]:
    return [
        f"redlock_fast: {_describe_modules()}; server: {_describe_server()}; "
        f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores"
    ]


def _describe_modules() -> str:
    odd = []
    for name in sorted(COMPILED):
        file = Path(importlib.import_module(f"redlock_fast.{name}").__file__ or "")
        source = next(SOURCES.glob(f"{name.replace('.', '/')}.py*"), None)
        if not file.resolve().is_relative_to(SOURCES):
            odd.append(f"{name} from {file}")
        elif file.suffix != ".so":
            odd.append(f"{name} not compiled")
        elif source is not None and source.stat().st_mtime > file.stat().st_mtime:
            odd.append(f"{name} older than its source")
    return "in-tree modules" + (f", BUT {', '.join(odd)}" if odd else "")


def _describe_server() -> str:
    try:
        with LocalMasters(1) as masters:
            info = masters[0].command("INFO", "server").decode()
    except (OSError, RuntimeError) as error:
        return f"none ({error})"
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    if "valkey_version" in facts:
        return f"Valkey {facts['valkey_version']}"
    return f"Redis {facts['redis_version']}"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A test leaves no thread and no descriptor behind (a second is allowed for the last ends)."""
    threads = set(threading.enumerate())
    before = descriptors()
    yield

    def left() -> list[str]:
        names = [t.name for t in threading.enumerate() if t not in threads]
        return names + [
            f"{name} {ends}" for name, ends in descriptors().items() if name not in before
        ]

    deadline = time.monotonic() + 1.0
    while found := left():
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(found)}")
        gc.collect()
        time.sleep(0.01)


# Tests of these modules that take a client run once for each facade.
FOR_BOTH = names(
    """test_acquire test_calls test_context test_debts test_errors test_extend test_facade
    test_least_permission test_many test_masters_down test_names test_release
    test_over_tls test_second_connections test_unix_and_ipv6 test_waiting"""
)
# But for these, which are about the sync one.
FOR_THREADS = names(
    """test_a_coroutine_function_is_refused
    test_the_janitor_pays_when_the_master_can_be_reached_again
    test_a_dead_master_keeps_one_janitor_only
    test_a_forked_child_looks_up_for_itself
    test_interrupted_calls_leave_no_key
    test_forked_children_shake_hands_for_themselves
    test_a_fork_in_the_middle_of_a_handshake"""
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if (
        "facade" in metafunc.fixturenames
        and module in FOR_BOTH
        and metafunc.function.__name__ not in FOR_THREADS
    ):
        asyncio = pytest.param("asyncio", marks=pytest.mark.twin)
        uvloop = pytest.param("uvloop", marks=pytest.mark.slow)
        metafunc.parametrize("facade", ["threads", asyncio, uvloop], indirect=True)


@pytest.fixture
def facade(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The type of client: `redlock_fast.Redlock`, or the asyncio one behind the same verbs."""
    kind = getattr(request, "param", "threads")
    if kind == "threads":
        yield Redlock
        return
    bridge = Bridge(kind)
    yield bridge.client
    bridge.close()


@pytest.fixture(params=["asyncio", pytest.param("uvloop", marks=pytest.mark.twin)])
def run(request: pytest.FixtureRequest, make_local_masters: Any, net: Any) -> Iterator[Runner]:
    """Runs a coroutine on a fresh loop, of each kind in turn; nothing may fail there unseen."""
    runner = Runner(request.param)
    yield runner
    runner.check()


@pytest.fixture
def make_client(
    make_local_masters: MakeLocalMasters, net: Any, facade: Any
) -> Iterator[MakeClient]:
    """A function that makes a client, closed after the test.

    Takes masters, fakes, proxies, and what `Redlock` takes; settings are `Redlock`'s, but for
    `retries=0` and a patient `master_timeout` where the test does not say otherwise. The client
    has tried to connect, unless `warm=False`: a cold one may be granted its first lock by a quorum
    before the other connections are there, so the others never get it. (The fixture needs the
    other ones so that clients are closed before servers.)
    """
    with ExitStack() as stack:

        def make(masters: Any, *, warm: bool = True, **settings: Any) -> Redlock:
            places = [getattr(master, "url", master) for master in masters]
            settings = {"retries": 0, "master_timeout": PATIENT, **settings}
            client: Redlock = facade(places, **settings)
            stack.callback(client.close)
            if warm:
                client.connect()
            return client

        yield make


@pytest.fixture
def masters(make_local_masters: MakeLocalMasters) -> LocalMasters:
    """Three fresh masters that know the scripts."""
    return taught(make_local_masters(3))


@pytest.fixture
def client(masters: LocalMasters, make_client: MakeClient) -> Redlock:
    """A client of these three: connected, patient, one try per acquire."""
    return make_client(masters)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads change places as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
