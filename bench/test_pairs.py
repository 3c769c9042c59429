"""pytest-benchmark benches: acquire + release of free locks, one thread, peers beside.

    pytest bench/                         # times; compare within one run only
    pytest bench/ --benchmark-disable     # each once, as tests

Every call checks that its lock was granted and released; afterwards no key may be left.
`compare.py` interleaves the clients and has the C floor: use it for ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
from harness import TTL, Contestant

Make = Callable[[str, int], Contestant]

PATIENCE = 2.0
"""Seconds within which the last deletes have arrived everywhere."""


def no_key_left(benchmark: Any, client: Contestant, masters: Any) -> None:
    """Assert it; pottery's are only counted: its SETs may arrive after their own release."""
    left = harness.keys_left(masters, {client.name: client.names.prefix}, PATIENCE)[client.name]
    benchmark.extra_info["keys_left"] = left
    if client.name != harness.Pottery.name:
        assert left == 0


@pytest.mark.benchmark(max_time=0.5, warmup=True, warmup_iterations=harness.WARM_UP)
@pytest.mark.parametrize("name", harness.CLIENTS)
@pytest.mark.parametrize("n", [1, 3, 5])
def test_pair(benchmark: Any, contestant: Make, masters: Any, name: str, n: int) -> None:
    """Acquire and release one lock on n masters."""
    client = contestant(name, n)
    benchmark.group = f"pair, {n} master{'s' if n > 1 else ''}"

    def pair() -> None:
        assert client.pair(next(client.names))

    benchmark(pair)
    benchmark.extra_info["owed"] = client.owed()
    no_key_left(benchmark, client, masters)


@pytest.mark.parametrize(("count", "rounds"), [(100, 50), (1000, 20)])
def test_batch(benchmark: Any, contestant: Make, masters: Any, count: int, rounds: int) -> None:
    """acquire_many and release_many on 5 masters."""
    client: Any = contestant(harness.OURS, 5)
    benchmark.group = f"batch of {count}, 5 masters"
    benchmark.extra_info["pairs"] = count

    def batch(names: list[str]) -> None:
        locks = client.client.acquire_many(names, TTL)
        assert len(locks) == count
        assert all(locks)
        released = client.client.release_many(locks)
        assert len(released) == count
        assert all(released)

    benchmark.pedantic(
        batch, setup=lambda: ((client.names.take(count),), {}), rounds=rounds, warmup_rounds=3
    )
    benchmark.extra_info["owed"] = client.owed()
    no_key_left(benchmark, client, masters)


@pytest.mark.parametrize("name", [harness.RedlockPy.name, harness.Pottery.name])
def test_loop(benchmark: Any, contestant: Make, masters: Any, name: str) -> None:
    """The peers have no batches: what their users write instead, 100 pairs one by one.

    Beside a batch of 1000 take ten times as long.
    """
    client = contestant(name, 5)
    benchmark.group = "batch of 100, 5 masters"
    benchmark.extra_info["pairs"] = 100

    def loop(names: list[str]) -> None:
        for resource in names:
            assert client.pair(resource)

    benchmark.pedantic(
        loop, setup=lambda: ((client.names.take(100),), {}), rounds=5, warmup_rounds=1
    )
    no_key_left(benchmark, client, masters)
