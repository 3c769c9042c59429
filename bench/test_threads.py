"""pytest-benchmark benches: threads that share one client, on 5 masters.

A round is PAIRS pairs, whatever the number of threads that share them, so all rows compare.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import USUAL, Make, checked
from harness import OURS, Pottery, RedlockPy

PAIRS = 640
WAIT = 60.0
"""Seconds after which a thread that is missing fails the bench."""
ROWS = [
    *((OURS, count) for count in (1, 2, 4, 8, 16, 64)),
    *((RedlockPy.name, count) for count in (1, 8, 64)),
    (Pottery.name, 8),
]


@pytest.mark.parametrize(("name", "count"), ROWS)
def test_threads(
    benchmark: Any, contestant: Make, masters: Any, no_key_left: Any, name: str, count: int
) -> None:
    """So many threads, each takes its share of the pairs."""
    client = contestant(name, masters.urls[:USUAL])
    pair = checked(benchmark, client)
    share = 1 if benchmark.disabled else PAIRS // count
    barrier = threading.Barrier(count)
    benchmark.group = f"{PAIRS} pairs, {USUAL} masters, shared by threads"
    benchmark.extra_info["pairs"] = share * count

    def work(names: list[str]) -> None:
        barrier.wait(WAIT)  # so every thread has one part
        for resource in names:
            pair(resource)

    with ThreadPoolExecutor(count) as pool:

        def parts() -> tuple[tuple[list[list[str]]], dict[str, Any]]:
            return ([client.names.take(share) for _ in range(count)],), {}

        def round_of(names: list[list[str]]) -> None:
            for done in [pool.submit(work, part) for part in names]:
                done.result(WAIT)

        rounds = 20 if name == OURS else 3
        benchmark.pedantic(round_of, setup=parts, rounds=rounds, warmup_rounds=1)
    no_key_left(benchmark, client, masters)
