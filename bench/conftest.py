"""Masters and clients for the benches; `pytest bench/` needs nothing else to run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # whatever the import mode

import harness

MOST = 7
"""Masters started once for all benches; a bench with fewer takes the first of them."""
USUAL = 5
PATIENCE = 2.0
"""Seconds within which the last deletes have arrived everywhere."""

Make: TypeAlias = Callable[[str, Sequence[str]], harness.Contestant]

about: dict[str, str] = {}
"""What took part, and how it was made: for the summary and for the JSON files."""


def note_server(masters: Any) -> None:
    about["server"] = harness.server_version(masters[0])


@pytest.fixture(scope="session")
def masters() -> Iterator[Any]:
    """MOST running masters."""
    from redlock_fast.testing import LocalMasters

    with LocalMasters(MOST) as started:
        note_server(started)
        yield started


@pytest.fixture(scope="session")
def unix_masters() -> Iterator[Any]:
    """USUAL running masters that listen on unix sockets only."""
    from redlock_fast.testing import LocalMasters

    with LocalMasters(USUAL, unix=True) as started:
        note_server(started)
        yield started


@pytest.fixture
def contestant() -> Iterator[Make]:
    """`contestant(name, urls)`: that client on these masters, closed after the bench."""
    with ExitStack() as stack:

        def make(name: str, urls: Sequence[str]) -> harness.Contestant:
            client = harness.EVERYBODY[name](urls)
            stack.callback(client.close)
            about[name] = f"{client.version()}: {client.built}"
            return client

        yield make


class CurrentFloor:
    """The floor's clock for pytest-benchmark, which wants to know its timer beforehand."""

    clock: harness.FloorClock

    def __call__(self) -> float:
        return self.clock.now()


floor_timer = CurrentFloor()
floor_timed = pytest.mark.benchmark(timer=floor_timer)
"""For benches that take the fixture `floor`: their time is what the C client says."""


@pytest.fixture
def floor() -> Iterator[Callable[..., harness.FloorClock]]:
    """`floor(urls, batch=1)`: the C client; `.pair` is what to time."""
    with ExitStack() as stack:

        def make(urls: Sequence[str], batch: int = 1) -> harness.FloorClock:
            floor_timer.clock = clock = harness.FloorClock(urls, batch)
            stack.callback(clock.close)
            about[harness.FLOOR] = "bench/floor.c, quorum mode; timed by itself"
            return clock

        yield make


def checked(benchmark: Any, client: harness.Contestant) -> Callable[[str], None]:
    """A pair that must be granted and released.

    Pottery's failures are only counted: now and then it does not get a free lock.
    """
    strict = client.name != harness.Pottery.name
    benchmark.extra_info["failed"] = 0

    def pair(resource: str) -> None:
        try:
            good = client.pair(resource)
        except client.errors:
            if strict:
                raise
            good = False
        if not good:
            assert not strict
            benchmark.extra_info["failed"] += 1

    return pair


def bench_pairs(benchmark: Any, client: harness.Contestant) -> None:
    """Time pairs, one by one."""
    pair, next_name = checked(benchmark, client), client.names.next
    benchmark(lambda: pair(next_name()))


@pytest.fixture
def no_key_left() -> Callable[[Any, harness.Contestant, Any], None]:
    """`no_key_left(benchmark, client, masters)`, after the last call, asserts it.

    Pottery's are only counted: its SETs may arrive after their own release.
    """

    def check(benchmark: Any, client: harness.Contestant, masters: Any) -> None:
        benchmark.extra_info["owed"] = client.owed()
        strict = client.name != harness.Pottery.name
        prefix = {client.name: client.names.prefix}
        left = harness.keys_left(masters, prefix, PATIENCE if strict else 0)[client.name]
        benchmark.extra_info["keys_left"] = left
        assert left == 0 or not strict

    return check


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    # Not in machine_info, which --benchmark-compare wants to be the same.
    output_json["redlock_fast"] = dict(about)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if about:
        terminalreporter.section("who took part")
        terminalreporter.write_line(harness.machine())
        terminalreporter.write_line(harness.library_versions())
        for name, text in about.items():
            terminalreporter.write_line(f"{name} {text}")
