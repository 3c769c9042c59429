"""How a client is driven: one thread, several, beside a busy one, batches.

A *load* takes a contestant and a time and gives a `Result`, as `Contestant.run` does for one thread
that makes one pair after another. Anything with that shape can stand in a row of `suite.py`.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import harness
from harness import Contestant, Result

Load: TypeAlias = Callable[[Contestant, float], Result]

START_S = 0.05
"""For all threads to be under way, before anything counts."""
SLOW_S = 5.0
"""A stretch lasts longer, up to this, until there were as many pairs as threads."""
JOIN_S = 60.0
"""A thread that does not come back by then fails the run."""


def one_thread(contestant: Contestant, seconds: float) -> Result:
    """One pair after another."""
    return contestant.run(seconds)


@dataclass(frozen=True)
class Threads:
    """`count` threads share one client, each makes one pair after another.

    As with one thread, rates and times come from two stretches: only the second reads a clock for
    each pair. The rate is what all threads have done between two looks of another thread.
    """

    count: int
    busy: bool = False
    """Beside them one more thread, which computes in Python and never waits."""

    def __call__(self, contestant: Contestant, seconds: float) -> Result:
        stop: list[None] = []
        spinner = threading.Thread(target=spin, args=(stop,), daemon=True)
        try:
            if self.busy:
                spinner.start()
            rate = self.stretch(contestant, seconds, spinner, timed=False)
            times = self.stretch(contestant, seconds / 2, spinner, timed=True)
        finally:
            stop.append(None)
        return dataclasses.replace(
            rate,
            failed=rate.failed + times.failed,
            p50_us=times.p50_us,
            p99_us=times.p99_us,
            max_ms=times.max_ms,
            owed=times.owed,
        )

    def stretch(
        self, contestant: Contestant, seconds: float, spinner: threading.Thread, *, timed: bool
    ) -> Result:
        """One stretch; p50, p99 and the slowest call are 0 unless `timed`."""
        done, failed = [0] * self.count, [0] * self.count
        took: list[list[float]] = [[] for _ in range(self.count)]
        over: list[None] = []
        pair, errors, next_name = contestant.pair, contestant.errors, contestant.names.next

        def work(index: int) -> None:
            good = calls = 0
            clock, note = time.perf_counter, took[index].append
            end = clock()
            while not over:
                calls += 1
                try:  # noqa: SIM105 - a context manager would be measured too
                    good += pair(next_name())
                except errors:
                    pass
                done[index] = good
                if timed:
                    began, end = end, clock()
                    note(end - began)
            failed[index] = calls - good

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(self.count)]
        gc.collect()
        for thread in threads:
            thread.start()
        try:
            time.sleep(START_S)
            before, counts = list(done), contestant.counts()
            start, cpu = time.perf_counter(), cpu_without(spinner)
            time.sleep(seconds)
            while sum(done) - sum(before) < self.count and time.perf_counter() - start < SLOW_S:
                time.sleep(seconds)
            elapsed, cpu = time.perf_counter() - start, cpu_without(spinner) - cpu
            after, counted = list(done), contestant.counts()
            owed = contestant.owed()
        finally:
            over.append(None)
            for thread in threads:
                thread.join(JOIN_S)
        if any(thread.is_alive() for thread in threads):
            raise RuntimeError(f"{contestant.name}: a thread does not come back from a pair")
        each = [b - a for a, b in zip(before, after, strict=True)]
        pairs = sum(each)
        flat = sorted(value for one in took for value in one) or [0.0]
        return Result(
            pairs=pairs,
            failed=sum(failed),
            pairs_per_s=pairs / elapsed,
            p50_us=harness.quantile(flat, 0.5) * 1e6,
            p99_us=harness.quantile(flat, 0.99) * 1e6,
            max_ms=flat[-1] * 1e3,
            cpu_us=cpu / max(pairs, 1) * 1e6,
            owed=owed,
            slowest=min(each) / (pairs / self.count) if pairs else 0.0,
            **(counted.since(counts, max(pairs, 1)) if counts and counted else {}),
        )


def cpu_without(spinner: threading.Thread) -> float:
    """Seconds of processor time of this process, less those of the busy thread."""
    if not spinner.is_alive() or spinner.ident is None:
        return harness.cpu_seconds()
    return harness.cpu_seconds() - time.clock_gettime(time.pthread_getcpuclockid(spinner.ident))


def spin(stop: list[None]) -> None:
    """Compute in Python until told to stop."""
    number = 0
    while not stop:
        number += 1


@dataclass(frozen=True)
class Batch:
    """`count` pairs at a time with acquire_many and release_many; p50 and p99 are of a batch.

    Names are made before the clock runs, as the floor's are.
    """

    count: int

    def __call__(self, contestant: Any, seconds: float) -> Result:
        warm_up = max(3, min(harness.WARM_UP, 3000 // self.count))
        for _ in range(warm_up):
            contestant.batch(contestant.names.take(self.count))
        gc.collect()
        took: list[float] = []
        pairs = failed = 0
        used = 0.0
        counts = contestant.counts()
        end = time.perf_counter() + seconds
        while not took or time.perf_counter() < end:
            names = contestant.names.take(self.count)
            cpu, began = harness.cpu_seconds(), time.perf_counter()
            try:
                good = contestant.batch(names)
            except contestant.errors:
                good = 0
            took.append(time.perf_counter() - began)
            used += harness.cpu_seconds() - cpu
            pairs += good
            failed += self.count - good
        owed, counted = contestant.owed(), contestant.counts()
        flat = sorted(took)
        return Result(
            pairs=pairs,
            failed=failed,
            pairs_per_s=pairs / sum(took),
            p50_us=harness.quantile(flat, 0.5) * 1e6,
            p99_us=harness.quantile(flat, 0.99) * 1e6,
            max_ms=flat[-1] * 1e3,
            cpu_us=used / (len(took) * self.count) * 1e6,
            owed=owed,
            **(counted.since(counts, len(took), self.count) if counts and counted else {}),
        )
