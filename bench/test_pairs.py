"""pytest-benchmark benches: acquire + release of free locks, one thread, peers and floor beside.

    pytest bench/                           # times; compare within one run only
    pytest bench/ --benchmark-disable       # each once, as tests
    pytest bench/ --benchmark-autosave      # for --benchmark-compare, later
    pytest bench/ --benchmark-histogram     # an SVG for each group

Every call checks that its lock was granted and released; afterwards no key may be left. `make
bench` interleaves the clients with the floor: use it for ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
from conftest import USUAL, Make, bench_pairs, checked, floor_timed
from harness import FLOOR, OURS, Pottery, RedisLock, RedlockPy

SIZES = (1, 3, 5, 7)
CLIENTS = [(n, name) for n in SIZES for name in harness.CLIENTS] + [(1, RedisLock.name)]
FLOOR_ROUNDS = 4000

short = pytest.mark.benchmark(max_time=0.5, warmup=True, warmup_iterations=harness.WARM_UP)


def group_of(n: int) -> str:
    return f"pair, {n} master{'s' if n > 1 else ''}"


@short
@pytest.mark.parametrize(("n", "name"), CLIENTS)
def test_pair(
    benchmark: Any, contestant: Make, masters: Any, no_key_left: Any, n: int, name: str
) -> None:
    """Acquire and release one lock on n masters."""
    client = contestant(name, masters.urls[:n])
    benchmark.group = group_of(n)
    bench_pairs(benchmark, client)
    no_key_left(benchmark, client, masters)


@floor_timed
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", [FLOOR])
def test_pair_floor(
    benchmark: Any, floor: Callable[..., Any], masters: Any, n: int, name: str
) -> None:
    """The same by the C client."""
    benchmark.group = group_of(n)
    benchmark.pedantic(floor(masters.urls[:n]).pair, rounds=FLOOR_ROUNDS)


@short
@pytest.mark.parametrize("name", harness.CLIENTS)
def test_unix(
    benchmark: Any, contestant: Make, unix_masters: Any, no_key_left: Any, name: str
) -> None:
    """Acquire and release one lock over unix sockets."""
    client = contestant(name, unix_masters.urls)
    benchmark.group = f"pair, {USUAL} masters, unix sockets"
    bench_pairs(benchmark, client)
    no_key_left(benchmark, client, unix_masters)


@floor_timed
@pytest.mark.parametrize("name", [FLOOR])
def test_unix_floor(
    benchmark: Any, floor: Callable[..., Any], unix_masters: Any, name: str
) -> None:
    """The same by the C client."""
    benchmark.group = f"pair, {USUAL} masters, unix sockets"
    benchmark.pedantic(floor(unix_masters.urls).pair, rounds=FLOOR_ROUNDS)


# ------------------------------------------------------------------------------ batches

BATCHES = [(1, 1000), (100, 50), (1000, 20)]


@pytest.mark.parametrize(("count", "rounds"), BATCHES)
@pytest.mark.parametrize("name", [OURS])
def test_batch(
    benchmark: Any,
    contestant: Make,
    masters: Any,
    no_key_left: Any,
    name: str,
    count: int,
    rounds: int,
) -> None:
    """acquire_many and release_many on 5 masters."""
    client: Any = contestant(name, masters.urls[:USUAL])
    benchmark.group = f"batch of {count}, {USUAL} masters"
    benchmark.extra_info["pairs"] = count

    def batch(names: list[str]) -> None:
        assert client.batch(names) == count

    benchmark.pedantic(
        batch, setup=lambda: ((client.names.take(count),), {}), rounds=rounds, warmup_rounds=3
    )
    no_key_left(benchmark, client, masters)


@floor_timed
@pytest.mark.parametrize(("count", "rounds"), BATCHES)
@pytest.mark.parametrize("name", [FLOOR])
def test_batch_floor(
    benchmark: Any, floor: Callable[..., Any], masters: Any, name: str, count: int, rounds: int
) -> None:
    """The same by the C client."""
    benchmark.group = f"batch of {count}, {USUAL} masters"
    benchmark.extra_info["pairs"] = count
    benchmark.pedantic(floor(masters.urls[:USUAL], count).pair, rounds=rounds)


@pytest.mark.parametrize("name", [RedlockPy.name, Pottery.name])
def test_batch_loop(
    benchmark: Any, contestant: Make, masters: Any, no_key_left: Any, name: str
) -> None:
    """The peers have no batches: what their users write instead, 100 pairs one by one.

    Beside a batch of 1000 take ten times as long.
    """
    client = contestant(name, masters.urls[:USUAL])
    benchmark.group = f"batch of 100, {USUAL} masters"
    benchmark.extra_info["pairs"] = 100

    pair = checked(benchmark, client)

    def loop(names: list[str]) -> None:
        for resource in names:
            pair(resource)

    benchmark.pedantic(
        loop, setup=lambda: ((client.names.take(100),), {}), rounds=5, warmup_rounds=1
    )
    no_key_left(benchmark, client, masters)
