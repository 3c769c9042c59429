"""Show redlock_fast at work on five real masters, and check what it does.

    make demo
    python demo/demo.py

Contract: starts five servers on loopback, takes each step below in turn and prints what really
happened. Nothing that is printed as a result is written down here beforehand. Each result is
compared with what the library promises; a difference is marked UNEXPECTED, the later steps are
still taken, and the exit status is 1. Times are shown as they are. Only two kinds are checked: a
try ends within `master_timeout`, with an allowance for a busy machine (`ALLOWANCE`), and
redlock_fast is faster than the pure Python clients.

The servers are stopped at the end, on Ctrl-C (exit status 130) and after an error. Takes some
12 s. Colour only on a terminal, and not if NO_COLOR is set. redlock-py, pottery and a C compiler
are used for the comparison if they are there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import compare
import harness

from redlock_fast import Lock, LockLost, NoQuorum, NotAcquired, Redlock, RedlockError, Report
from redlock_fast.testing import LocalMasters

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

MASTERS = 5
QUORUM = MASTERS // 2 + 1
TTL = 10_000
"""Milliseconds, of all locks here but the one that is extended."""
MASTER_TIMEOUT = 50
"""Milliseconds; the library's default."""
ALLOWANCE = 100
"""Milliseconds that a call may take longer, for a slow or busy machine."""
BATCH = 1000
LONG_WAIT = 3000
"""Milliseconds; for what takes some 100, but on any machine."""
STRETCH = 0.3
"""Seconds of pairs one after another: enough for a hung master to be noticed."""
ROUNDS = 5
RUN = 0.2
"""Seconds of each run of the comparison."""
SHARES = {"redlock-py": (1.0, 5), "pottery": (0.5, 3)}
"""For slow clients: which share of RUN, after how many pairs to warm up."""


# ------------------------------------------------------------------------------ printing


class UnexpectedError(Exception):
    """A step cannot go on: what it needs did not happen."""


class Screen:
    """Prints steps and results, and remembers what was not as promised."""

    def __init__(self) -> None:
        dumb = os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR")
        self._colour = sys.stdout.isatty() and not dumb
        self._steps = itertools.count(1)
        self._step = ""
        self.checked = 0
        self.failures: list[str] = []

    def line(self, text: str = "", style: str = "") -> None:
        """One line, at once; `style` is an SGR code for terminals."""
        if style and self._colour:
            text = f"\x1b[{style}m{text}\x1b[0m"
        sys.stdout.write(f"{text}\n")  # whole: the library may log from another thread
        sys.stdout.flush()

    def step(self, title: str, *about: str) -> None:
        """The head of a step, and what it shows."""
        self._step = f"{next(self._steps)}. {title}"
        self.line()
        self.line(self._step, "1")
        for text in about:
            self.line(f"   {text}")

    def result(self, what: str, value: object, ms: float | None = None, *, ok: bool) -> None:
        """What was called, what came of it, in how many ms, and if that is as promised."""
        shown = value if isinstance(value, str) else repr(value)
        when = "" if ms is None else f"{ms:9.2f} ms"
        self.line(f"     {what:<47} {shown:<33}{when}".rstrip())
        self._count(ok, f"{what}: {shown}")

    def check(self, ok: bool, claim: str) -> None:
        """Say so if a claim does not hold."""
        self._count(ok, f"it is not so that {claim}")

    def _count(self, ok: bool, failure: str) -> None:
        self.checked += 1
        if not ok:
            self.failed(failure)

    def failed(self, what: str) -> None:
        """Something is not as promised."""
        self.failures.append(f"step {self._step}: {what}")
        self.line(f"     UNEXPECTED: {what}", "31;1")

    def reports(self, reports: tuple[Report, ...]) -> None:
        """What each master did in a round that failed."""
        self.line(f"       {'master':<17}{'outcome':<12}{'cause':<35}{'ms':>10}", "2")
        for report in reports:
            ms = "-" if report.ms is None else f"{report.ms:.2f}"
            cause = report.cause or "-"
            self.line(f"       {report.address:<17}{report.outcome:<12}{cause:<35}{ms:>10}")


class LogLines(logging.Handler):
    """Prints what the library logs among the results."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.INFO)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        with contextlib.suppress(BrokenPipeError):
            self._screen.line(f"     log: {record.levelname.lower()}: {record.getMessage()}", "2")


# ------------------------------------------------------------------------------ helpers


@dataclass
class Stage:
    """What all steps share."""

    screen: Screen
    masters: LocalMasters
    client: Redlock
    other: Redlock
    """A second client, as another process would have."""
    names: harness.Names = field(default_factory=lambda: harness.Names("de"))
    """For locks that nobody looks at."""
    _jobs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def job(self) -> str:
        """A short name never used before."""
        return f"job:{next(self._jobs)}"

    def states(self) -> list[str]:
        """What the client thinks of each master."""
        return [master["state"] for master in self.client.stats()["masters"]]

    def pair(self, name: str) -> bool:
        """Acquire and release."""
        lock = self.client.acquire(name, TTL)
        return lock is not None and self.client.release(lock)

    def first_pair(self, when: str) -> None:
        """One pair, acquire and release apart."""
        lock, ms = timed(self.client.acquire, self.job(), TTL)
        self.screen.result(f"{when}: first acquire", lock, ms, ok=lock is not None)
        good, ms = timed(self.client.release, granted(lock))
        self.screen.result(f"{when}: its release", good, ms, ok=good)

    def stretch(self, when: str) -> None:
        """Pairs one after another for a while: how many, how long, how many failed."""
        done = harness.measure(self.pair, STRETCH, self.names, errors=(RedlockError,), warm_up=0)
        self.screen.result(
            f"{when}: pairs for {STRETCH:g} s",
            f"{done.pairs} good, {done.failed} failed",
            ok=done.failed == 0,
        )
        self.screen.line(
            f"       half of them took at most {done.p50_us / 1e3:.2f} ms, "
            f"the slowest {compare.number(done.max_ms, 2)} ms"
        )

    def no_quorum(self, what: str) -> NoQuorum:
        """One try that must end in `NoQuorum`, and in time; its report is printed."""
        error, ms = caught(NoQuorum, self.client.acquire, self.job(), TTL, wait=0)
        self.screen.result(what, "NoQuorum" if error else "no error", ms, ok=error is not None)
        if error is None:
            raise UnexpectedError("acquire did not raise NoQuorum")
        self.screen.reports(error.reports)
        self.screen.check(len(error.reports) == MASTERS, "there is one report for each master")
        self.screen.check(
            ms <= MASTER_TIMEOUT + ALLOWANCE,
            f"the call ended within {MASTER_TIMEOUT} ms and an allowance of {ALLOWANCE} ms",
        )
        return error

    def until_ready(self, what: str) -> None:
        """Make pairs until the client has all masters back."""
        start = time.perf_counter()
        while True:
            good = self.pair(next(self.names))
            ready = self.states().count("ready")
            ms = (time.perf_counter() - start) * 1e3
            if not good or ready == MASTERS or ms > LONG_WAIT:
                break
            time.sleep(0.005)
        self.screen.result(what, f"{ready} of {MASTERS}", ms, ok=good and ready == MASTERS)

    def no_keys(self, what: str = "keys left on the masters") -> None:
        """Nothing may stay behind; clean-ups get a moment to arrive."""
        deadline = time.monotonic() + 1
        while True:
            left = sum(len(master.keys()) for master in self.masters if master.running)
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self.screen.result(what, left, ok=left == 0)


def timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """The result of a call, and its time in ms."""
    start = time.perf_counter()
    value = call(*args, **kwargs)
    return value, (time.perf_counter() - start) * 1e3


def caught(
    kind: type[E], call: Callable[P, object], *args: P.args, **kwargs: P.kwargs
) -> tuple[E | None, float]:
    """The error of this kind that a call raised, or None, and its time in ms."""
    start = time.perf_counter()
    error = None
    try:
        call(*args, **kwargs)
    except kind as raised:
        error = raised
    return error, (time.perf_counter() - start) * 1e3


def granted(lock: Lock | None) -> Lock:
    """The lock, or the end of the step."""
    if lock is None:
        raise UnexpectedError("acquire returned None for a lock that nobody holds")
    return lock


# ------------------------------------------------------------------------------ the steps


def life(stage: Stage) -> None:
    """One lock from acquire to release."""
    screen, client = stage.screen, stage.client
    screen.step(
        "A lock's life",
        f"Acquire on {MASTERS} masters at once, ask, extend, release. Right: each call's time.",
        "The validity is the ttl less the time taken and 1 % + 2 ms for drifting clocks.",
    )
    _, ms = timed(client.connect)
    ready = stage.states().count("ready")
    what = f"{ready} of {MASTERS} masters ready"
    screen.result("client.connect()", what, ms, ok=ready == MASTERS)
    maybe, ms = timed(client.acquire, "invoice:17", TTL)
    screen.result('lock = client.acquire("invoice:17", 10_000)', maybe, ms, ok=maybe is not None)
    lock = granted(maybe)
    most = TTL * 0.99 - 2
    good = most - ALLOWANCE <= lock.validity <= most
    screen.result("lock.validity", f"{lock.validity:.2f} ms", ok=good)
    owned, ms = timed(client.owned, lock)
    screen.result("client.owned(lock)", owned, ms, ok=owned)
    locked, ms = timed(client.locked, "invoice:17")
    screen.result('client.locked("invoice:17")', locked, ms, ok=locked)
    time.sleep(0.1)
    left = lock.remaining()
    screen.result(
        "100 ms later: lock.remaining()", f"{left:.2f} ms", ok=0 < left <= lock.validity - 100
    )
    extended, ms = timed(lock.extend, 2 * TTL)
    screen.result("lock.extend(20_000)", extended, ms, ok=extended)
    left = lock.remaining()
    screen.result("lock.remaining()", f"{left:.2f} ms", ok=TTL < left < 2 * TTL)
    released, ms = timed(lock.release)
    screen.result("lock.release()", released, ms, ok=released)
    again, ms = timed(lock.release)
    screen.result("lock.release() a second time", again, ms, ok=not again)
    locked, ms = timed(client.locked, "invoice:17")
    screen.result('client.locked("invoice:17")', locked, ms, ok=not locked)


def contention(stage: Stage) -> None:
    """Two clients want the same lock."""
    screen, client, other = stage.screen, stage.client, stage.other
    screen.step(
        "Contention",
        "A second client wants a lock that the first one holds.",
    )
    other.connect()
    first, ms = timed(client.acquire, "stock:7", TTL)
    screen.result('client.acquire("stock:7", 10_000)', first, ms, ok=first is not None)
    second, ms = timed(other.acquire, "stock:7", TTL, wait=0)
    screen.result('other.acquire("stock:7", 10_000, wait=0)', second, ms, ok=second is None)

    entered = False

    def enter() -> None:
        nonlocal entered
        with other.lock("stock:7", TTL, wait=0):
            entered = True

    error, ms = caught(NotAcquired, enter)
    what = "NotAcquired" if error else "no error"
    screen.result('with other.lock("stock:7", 10_000, wait=0):', what, ms, ok=error is not None)
    screen.check(not entered, "the body of the with-block did not run")
    if error is not None:
        screen.reports(error.reports)
        taken = sum(report.outcome == "taken" for report in error.reports)
        screen.check(taken >= QUORUM, "a quorum of masters reports taken")

    screen.line(
        f"   It waits up to {LONG_WAIT} ms in a thread. The first client releases after 150 ms."
    )

    def wait() -> tuple[Lock | None, float]:
        return other.acquire("stock:7", TTL, wait=LONG_WAIT), time.perf_counter()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        time.sleep(0.15)
        screen.check(not waiting.done(), "the second client still waits")
        start = time.perf_counter()
        released, ms = timed(client.release, granted(first))
        screen.result("client.release(lock)", released, ms, ok=released)
        second, end = waiting.result()
    screen.result(
        f'other.acquire("stock:7", 10_000, wait={LONG_WAIT})', second, ok=second is not None
    )
    screen.line(
        f"       it came {(end - start) * 1e3:.0f} ms after the release began; "
        "between tries it pauses at random, up to 200 ms"
    )
    released, ms = timed(other.release, granted(second))
    screen.result("other.release(lock)", released, ms, ok=released)


def batch(stage: Stage) -> None:
    """Many locks in one call."""
    screen, client = stage.screen, stage.client
    screen.step(
        f"{BATCH} locks in one call",
        "All commands are pipelined to all masters.",
    )
    locks, ms = timed(client.acquire_many, stage.names.take(BATCH), TTL)
    held = [lock for lock in locks if lock]
    text = f"{len(held)} granted"
    screen.result(f"client.acquire_many({BATCH} names, 10_000)", text, ms, ok=len(held) == BATCH)
    released, ms = timed(client.release_many, held)
    text = f"{sum(released)} released"
    screen.result("client.release_many(locks)", text, ms, ok=sum(released) == BATCH)
    stage.no_keys()


def two_dead(stage: Stage) -> None:
    """A minority of masters dies."""
    stage.screen.step(
        "One master killed, then a second",
        f"SIGKILL. {QUORUM} of {MASTERS} are a quorum, so the locks go on.",
    )
    stage.stretch("none dead")
    for i in range(MASTERS - QUORUM):
        stage.masters.kill(i)
        stage.first_pair(f"{i + 1} dead")
        stage.stretch(f"{i + 1} dead")


def three_dead(stage: Stage) -> None:
    """A majority of masters is dead."""
    screen, masters = stage.screen, stage.masters
    screen.step(
        "A third master killed",
        "Two masters are no quorum. NoQuorum is raised and says what each master did.",
        f"One try (wait=0) ends within master_timeout, {MASTER_TIMEOUT} ms.",
    )
    for i in range(QUORUM):
        masters.kill(i)
    error = stage.no_quorum("client.acquire(name, 10_000, wait=0)")
    answered = {report.address for report in error.reports if report.outcome == "granted"}
    alive = set(masters.addresses[QUORUM:])
    screen.check(answered <= alive, "only living masters granted")
    stage.no_keys("keys left on the two living masters")


def back(stage: Stage) -> None:
    """The dead masters come back."""
    screen, masters = stage.screen, stage.masters
    screen.step(
        "The masters come back",
        "Started again on their ports, empty. The client notices by itself: it dials dead masters",
        "again after a back-off of at most about half a second.",
    )
    for master in masters:
        if not master.running:
            master.restart()
    lock, ms = timed(stage.client.acquire, stage.job(), TTL, wait=LONG_WAIT)
    screen.result(f"client.acquire(name, 10_000, wait={LONG_WAIT})", lock, ms, ok=lock is not None)
    released, ms = timed(stage.client.release, granted(lock))
    screen.result("client.release(lock)", released, ms, ok=released)
    stage.until_ready("masters that answer the client")


def hung(stage: Stage) -> None:
    """Masters hang: their connections stay open, nothing is answered."""
    screen, masters = stage.screen, stage.masters
    last = MASTERS - 1
    screen.step(
        "One master hangs, then three",
        "SIGSTOP: its connections stay open, but it answers nothing. The others are a quorum,",
        f"so no call waits for it. After {MASTER_TIMEOUT} ms it is suspect, and sent no new locks.",
    )
    try:
        stage.stretch("none hung")
        masters.pause(last)
        stage.first_pair("1 hung")
        stage.stretch("1 hung")
        state = stage.states()[last]
        screen.result("state of the hung master", state, ok=state == "suspect")
        screen.line("   With three hung there is no quorum, and silence is the only sign of it.")
        screen.line(f"   One try still ends within {MASTER_TIMEOUT} ms.")
        for i in range(last - QUORUM + 1, last):
            masters.pause(i)
        error = stage.no_quorum("3 hung: client.acquire(name, 10_000, wait=0)")
        answered = sum(report.outcome == "granted" for report in error.reports)
        screen.check(answered < QUORUM, "fewer than a quorum granted")
    finally:
        for master in masters:
            master.resume()
    screen.line("   All go on (SIGCONT). They answer what they were sent while they hung.")
    lock, ms = timed(stage.client.acquire, stage.job(), TTL, wait=LONG_WAIT)
    screen.result(f"client.acquire(name, 10_000, wait={LONG_WAIT})", lock, ms, ok=lock is not None)
    released, ms = timed(stage.client.release, granted(lock))
    screen.result("client.release(lock)", released, ms, ok=released)
    stage.until_ready("masters that answer the client")
    stage.no_keys()


def lost(stage: Stage) -> None:
    """A lock disappears while it is held."""
    screen, client = stage.screen, stage.client
    screen.step(
        "A lock lost behind the client's back",
        f"While the lock is held, {QUORUM} masters lose all their keys (FLUSHALL).",
        "lock.held asks nobody and cannot know. client.owned asks. Leaving the with-block tells.",
    )

    def body() -> None:
        with client.lock("report:3", TTL) as lock:
            screen.result('with client.lock("report:3", 10_000) as lock:', lock, ok=lock.held)
            for i in range(QUORUM):
                stage.masters.flush(i)
            screen.result("lock.held", lock.held, ok=lock.held)
            owned, ms = timed(client.owned, lock)
            screen.result("client.owned(lock)", owned, ms, ok=not owned)

    error, _ = caught(LockLost, body)
    screen.result("leaving the with-block", "LockLost" if error else "no error", ok=bool(error))
    if error is not None:
        screen.line(f"       {error}")
        screen.result("its reason", error.reason, ok=error.reason == "foreign")
    stage.no_keys()


def speed(stage: Stage) -> None:
    """A short comparison with other clients."""
    screen, masters = stage.screen, stage.masters
    screen.step(
        "Speed",
        "A pair is one acquire and one release of a lock nobody else wants; one thread.",
        f"In {ROUNDS} rounds the clients take turns for {RUN:g} s each (pottery: half), so that",
        "all meet the same machine. Floor: a C program without Python and parsing (bench/floor.c).",
    )
    screen.line(f"   {harness.server_version(masters[0])}; {harness.machine()}")
    runs: dict[str, harness.Run] = {}
    if with_floor(screen):
        runs[harness.FLOOR] = lambda seconds: harness.run_floor(masters.urls, seconds)
    with contextlib.ExitStack() as stack:
        clients: dict[str, harness.Contestant] = {}
        for name, make in harness.CLIENTS.items():
            if name in harness.DROP_INS:
                continue  # ours, under another name
            try:
                clients[name] = client = make(masters.urls)
            except ImportError as error:
                screen.line(f"   {name} is left out: {error}")
                continue
            stack.callback(client.close)
            share, warm_up = SHARES.get(name, (1.0, harness.WARM_UP))
            runs[name] = functools.partial(run_share, client, share, warm_up)
        turns = len(clients) * 2 + 1 if harness.FLOOR in runs else len(clients)
        screen.line(f"   This takes about {ROUNDS * turns * (RUN + harness.SETTLE):.0f} s.")
        outcome = harness.interleave(runs, RUN, ROUNDS)
        ours = clients[harness.OURS]
        left = harness.keys_left(masters, {ours.name: ours.names.prefix}, 1)[ours.name]
    screen.line()
    for line in speed_table(outcome).splitlines():
        screen.line(f"     {line}")
    screen.line("     medians of the rounds, in brackets the range")
    screen.line()
    failed = sum(result.failed for result in outcome.results[harness.OURS])
    pairs = sum(result.pairs for result in outcome.results[harness.OURS])
    screen.result("redlock_fast's pairs", f"{pairs} good, {failed} failed", ok=failed == 0)
    screen.result("keys left by redlock_fast", left, ok=left == 0)
    for name in outcome.results:
        if name not in (harness.FLOOR, harness.OURS):
            ratio = outcome.to_peer(harness.OURS, name)
            screen.check(ratio is not None, f"{name} made pairs in every round")
            if ratio is not None:
                screen.check(ratio.median > 1, f"redlock_fast is faster than {name}")


def run_share(
    client: harness.Contestant, share: float, warm_up: int, seconds: float
) -> harness.Result:
    """A run that takes a share of the time."""
    return client.run(seconds * share, warm_up)


def with_floor(screen: Screen) -> bool:
    """Build the C client, if that is possible here."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        screen.line(f"   The floor is left out: there is no C compiler {compiler!r}.")
        return False
    try:
        harness.build_floor()
    except (OSError, subprocess.CalledProcessError) as error:
        screen.line(f"   The floor is left out: {error}")
        return False
    return True


def speed_table(outcome: harness.Interleaved) -> str:
    """One line per client."""
    rows = []
    for name in outcome.results:
        peer = name not in (harness.FLOOR, harness.OURS)
        rows.append(
            [
                name,
                compare.number(outcome.median(name, "pairs_per_s")),
                compare.number(outcome.median(name, "p50_us")),
                compare.span(outcome.to_floor(name) if name != harness.FLOOR else None),
                compare.span(outcome.to_peer(harness.OURS, name) if peer else None),
            ]
        )
    return compare.table(["", "pairs/s", "p50 us", "rate / floor", "redlock_fast / it"], rows)


STEPS = (life, contention, batch, two_dead, three_dead, back, hung, lost, speed)


# ------------------------------------------------------------------------------ all of it


@contextlib.contextmanager
def logged(screen: Screen) -> Iterator[None]:
    """Print what the library logs; be quiet about what others log."""
    logging.getLogger().addHandler(logging.NullHandler())
    logger, handler = logging.getLogger("redlock_fast"), LogLines(screen)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def exists(pid: int) -> bool:
    """Is there such a process?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def show(screen: Screen) -> None:
    """Start masters, take all steps, stop the masters."""
    screen.line("redlock_fast: locks on independent Redis or Valkey masters (Redlock)", "1")
    screen.step(
        f"{MASTERS} masters start",
        "Real servers on this machine, without persistence and without any link between them.",
    )
    masters = LocalMasters(MASTERS)
    try:
        _, ms = timed(masters.start)
        running = [master.address for master in masters if master.running]
        version = harness.server_version(masters[0])
        text = f"{len(running)} x {version}"
        screen.result(f"LocalMasters({MASTERS}).start()", text, ms, ok=len(running) == MASTERS)
        screen.line(f"     {' '.join(running)}")
        with (
            logged(screen),
            Redlock(masters.urls, master_timeout=MASTER_TIMEOUT) as client,
            Redlock(masters.urls, master_timeout=MASTER_TIMEOUT) as other,
        ):
            stage = Stage(screen, masters, client, other)
            for step in STEPS:
                try:
                    step(stage)
                except (RedlockError, UnexpectedError) as error:
                    screen.failed(f"the step ended early: {type(error).__name__}: {error}")
        pids = [master.pid for master in masters]
    finally:
        masters.stop()
    screen.step("The end", "The masters are stopped.")
    left = sum(map(exists, pids))
    screen.result("server processes left", left, ok=left == 0)


def main() -> int:
    """Run the demonstration; the exit status."""
    screen = Screen()
    start = time.monotonic()
    try:
        show(screen)
    except KeyboardInterrupt:
        screen.line()
        screen.line("Interrupted. The masters are stopped.")
        return 130
    except FileNotFoundError as error:  # there is no server program
        screen.line()
        screen.line(f"Cannot start masters: {error}", "31;1")
        return 1
    except BrokenPipeError:  # `demo.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    screen.line()
    took = f"{time.monotonic() - start:.1f} s"
    if not screen.failures:
        screen.line(f"All {screen.checked} checks were as promised, in {took}.", "32;1")
        return 0
    count = len(screen.failures)
    screen.line(f"{count} results were not as promised ({screen.checked} checks, {took}):", "31;1")
    for failure in screen.failures:
        screen.line(f"  {failure}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
