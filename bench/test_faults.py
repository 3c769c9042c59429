"""pytest-benchmark benches: one of 5 masters slow, hung or dead. Who is measured can finish.

Absent is redlock-py: with a dead master it raises at every lock and leaves its keys, for a hung one
it waits. `compare.py --fault` and `make bench` show what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import compare
import harness
import pytest
from conftest import USUAL, Make, bench_pairs
from harness import OURS, Pottery
from relay import Relay

DELAY_MS = 5

short = pytest.mark.benchmark(max_time=0.5)


@pytest.fixture
def slow_urls(masters: Any) -> Iterator[list[str]]:
    """The usual masters, the answers of the first DELAY_MS late."""
    with Relay(masters.urls[0], DELAY_MS) as relay:
        yield [relay.url, *masters.urls[1:USUAL]]


@short
@pytest.mark.parametrize("name", harness.CLIENTS)
def test_slow(
    benchmark: Any,
    contestant: Make,
    masters: Any,
    slow_urls: list[str],
    no_key_left: Any,
    name: str,
) -> None:
    """One master's answers come late."""
    client = contestant(name, slow_urls)
    benchmark.group = f"pair, {USUAL} masters, one answers {DELAY_MS} ms late"
    bench_pairs(benchmark, client)
    no_key_left(benchmark, client, masters)


@short
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("pause", "kill") for name in (OURS, Pottery.name)]
)
def test_fault(
    benchmark: Any, contestant: Make, masters: Any, no_key_left: Any, kind: str, name: str
) -> None:
    """One master is stopped or killed; the first calls after that are not timed."""
    client = contestant(name, masters.urls[:USUAL])
    client.run(0.05)
    benchmark.group = f"pair, {USUAL} masters, one {'hung' if kind == 'pause' else 'dead'}"
    fault = compare.Fault(masters[0], kind)
    with fault:
        client.run(compare.DETECTION, warm_up=0, rate_too=False)
        bench_pairs(benchmark, client)
        assert not fault.expired
    benchmark.extra_info["recovered_ms"] = compare.recover(client, masters[0])
    no_key_left(benchmark, client, masters)
