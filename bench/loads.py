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
        return joined(rate, times)

    def stretch(
        self, contestant: Contestant, seconds: float, spinner: threading.Thread, *, timed: bool
    ) -> Result:
        """One stretch; p50, p99 and the slowest call are 0 unless `timed`."""
        tally = Tally(contestant, self.count, spinner)
        pair, errors, next_name = contestant.pair, contestant.errors, contestant.names.next

        def work(index: int) -> None:
            good = calls = 0
            clock, note = time.perf_counter, tally.took[index].append
            end = clock()
            while not tally.over:
                calls += 1
                try:
                    good += pair(next_name())
                except errors as error:
                    contestant.blame(error)
                tally.done[index] = good
                if timed:
                    began, end = end, clock()
                    note(end - began)
            tally.failed[index] = calls - good

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(self.count)]
        gc.collect()
        for thread in threads:
            thread.start()
        try:
            time.sleep(START_S)
            tally.begin()
            time.sleep(seconds)
            while tally.lacking():
                time.sleep(seconds)
            tally.end()
        finally:
            tally.over = True
            for thread in threads:
                thread.join(JOIN_S)
        if any(thread.is_alive() for thread in threads):
            raise RuntimeError(f"{contestant.name}: a thread does not come back from a pair")
        return tally.result()


class Tally:
    """What several callers have done between two moments."""

    def __init__(
        self, contestant: Contestant, count: int, spinner: threading.Thread | None = None
    ) -> None:
        self.contestant = contestant
        self.spinner = spinner
        self.done, self.failed = [0] * count, [0] * count
        self.took: list[list[float]] = [[] for _ in range(count)]
        self.over = False
        """The callers stop."""

    def begin(self) -> None:
        """From here on it counts."""
        self.before, self.counts = list(self.done), self.contestant.counts()
        self.start, self.cpu = time.perf_counter(), cpu_without(self.spinner)

    def lacking(self) -> bool:
        """Too few pairs to say anything, and there is time."""
        few = sum(self.done) - sum(self.before) < len(self.done)
        return few and time.perf_counter() - self.start < SLOW_S

    def end(self) -> None:
        """Up to here it counts."""
        self.elapsed = time.perf_counter() - self.start
        self.cpu = cpu_without(self.spinner) - self.cpu
        self.each = [b - a for a, b in zip(self.before, self.done, strict=True)]
        self.counted, self.owed = self.contestant.counts(), self.contestant.owed()

    def result(self) -> Result:
        """When all have stopped."""
        pairs = sum(self.each)
        calls = max(pairs, 1)
        flat = sorted(value for one in self.took for value in one) or [0.0]
        counts = self.counted.since(self.counts, calls) if self.counts and self.counted else {}
        return Result(
            pairs=pairs,
            failed=sum(self.failed),
            pairs_per_s=pairs / self.elapsed,
            p50_us=harness.quantile(flat, 0.5) * 1e6,
            p99_us=harness.quantile(flat, 0.99) * 1e6,
            max_ms=flat[-1] * 1e3,
            cpu_us=self.cpu / calls * 1e6,
            owed=self.owed,
            slowest=min(self.each) * len(self.each) / calls,
            **counts,
        )


def joined(rate: Result, times: Result) -> Result:
    """One result of a stretch for the rate and one for the times."""
    return dataclasses.replace(
        rate,
        failed=rate.failed + times.failed,
        p50_us=times.p50_us,
        p99_us=times.p99_us,
        max_ms=times.max_ms,
        owed=times.owed,
    )


def cpu_without(spinner: threading.Thread | None) -> float:
    """Seconds of processor time of this process, less those of the busy thread."""
    if spinner is None or not spinner.is_alive() or spinner.ident is None:
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
            except contestant.errors as error:
                contestant.blame(error)
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
