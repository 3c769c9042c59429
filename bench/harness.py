"""Measure Redlock clients beside a bare C client, in one run and on the same masters.

A *pair* is one acquire and one release of a lock nobody else wants, under a name never used
before. Absolute rates drift with the machine, so what counts are ratios of runs that lie next to
each other: `interleave` runs the contestants round-robin, with the C floor before and after each
client, and its result gives the median and range of the per-round ratios.

`suite.py` (`make bench`) and `compare.py` are the command lines, `test_*.py` the pytest-benchmark
side; `loads.py` drives a client in other ways than one thread. Units: rates in pairs per second,
p50, p99 and CPU in microseconds, the slowest call in milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.metadata
import itertools
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TTL = 10_000
"""Milliseconds; long enough that no key of a run expires within its run."""
WARM_UP = 30
"""Pairs before every measurement, as many as the floor makes."""
SETTLE = 0.02
"""Seconds between two runs, so that one's stragglers do not slow the other."""


# ------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Result:
    """One run of one contestant."""

    pairs: int
    """Calls that were granted and released."""
    failed: int
    """Calls that were not, or raised; their time is in the latencies, not in the rate."""
    pairs_per_s: float
    p50_us: float
    p99_us: float
    max_ms: float | None
    """The slowest call; None for the floor."""
    cpu_us: float
    """User and system time of the whole client process per call, threads included."""
    owed: int | None = None
    """Replies still to come when the clock stopped; None where the client does not say."""
    sends: float | None = None
    """System calls that sent something, per pair; None where the client does not count them."""
    looks: float | None = None
    """Waits without the GIL (each ends with a look at what came) per round of one command, of which
    a pair has two; None where the client does not count them."""
    slowest: float | None = None
    """Of several callers: the pairs of the slowest over the mean."""


@dataclass(frozen=True)
class Spread:
    """Median and range of one number over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of one value per round."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value at `share` of an ascending sequence, picked as floor.c does."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


# ------------------------------------------------------------------------------ measuring


BLOCK = 32
"""Pairs between two looks at the clock, where the rate is measured."""


class Names:
    """Lock names never used before: tag, pid, counter; 18 characters, like the floor's keys."""

    def __init__(self, tag: str) -> None:
        self.prefix = f"{tag}:{os.getpid() % 10_000_000:07d}:"
        # As cheap as can be: what a name costs is not the client's.
        self.all = (f"{self.prefix}{i}" for i in itertools.count(1_000_000))
        self.next: Callable[[], str] = functools.partial(next, self.all)

    def __next__(self) -> str:
        return self.next()

    def take(self, count: int) -> list[str]:
        """The next `count` names."""
        return [next(self) for _ in range(count)]


def cpu_seconds() -> float:
    """User and system time of this process, all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Counts:
    """What a client has done so far."""

    sends: int
    looks: int | None = None

    def since(self, before: Counts, calls: int, pairs: int = 1) -> dict[str, float]:
        """The fields of a Result, from the counts before `calls` calls of `pairs` pairs each."""
        fields = {"sends": (self.sends - before.sends) / (calls * pairs)}
        if self.looks is not None and before.looks is not None:
            fields["looks"] = (self.looks - before.looks) / (calls * 2)
        return fields


def no_counts() -> Counts | None:
    """For clients that do not count."""
    return None


def measure(
    pair: Callable[[str], bool],
    seconds: float,
    names: Names,
    *,
    owed: Callable[[], int | None] = lambda: None,
    errors: tuple[type[Exception], ...] = (),
    warm_up: int = WARM_UP,
    rate_too: bool = True,
    counts: Callable[[], Counts | None] = no_counts,
) -> Result:
    """Call `pair(name)` for about `seconds`, at least once.

    A call is timed from the end of the one before to its own, the making of its name included. One
    that returns False or raises one of `errors` has failed; any other exception comes out.

    With `rate_too`, rate and CPU time come from another loop of as long before that, which reads
    no clock between calls: what timing a call costs in Python is not the client's either.
    """
    for _ in range(warm_up):
        with contextlib.suppress(*errors):
            pair(next(names))
    gc.collect()
    clock = time.perf_counter
    next_name = names.next
    rate = None
    failed = 0
    if rate_too:
        good = 0
        cpu = cpu_seconds()
        start = clock()
        while not good or clock() - start < seconds:
            for name in itertools.islice(names.all, BLOCK):
                try:
                    good += pair(name)
                except errors:
                    failed += 1
            if failed > BLOCK:
                break
        rate = good / (clock() - start), (cpu_seconds() - cpu) / (good + failed) * 1e6
        seconds /= 2
    took: list[float] = []
    missed = 0
    before = counts()
    cpu = cpu_seconds()
    start = end = clock()
    while end - start < seconds or not took:
        began = end
        try:
            good = pair(next_name())
        except errors:
            good = False
        end = clock()
        took.append(end - began)
        if not good:
            missed += 1
    cpu = cpu_seconds() - cpu
    left = owed()
    after = counts()
    took.sort()
    if rate is None:
        rate = (len(took) - missed) / (end - start), cpu / len(took) * 1e6
    return Result(
        pairs=len(took) - missed,
        failed=failed + missed,
        pairs_per_s=rate[0],
        p50_us=quantile(took, 0.5) * 1e6,
        p99_us=quantile(took, 0.99) * 1e6,
        max_ms=took[-1] * 1e3,
        cpu_us=rate[1],
        owed=left,
        **(after.since(before, len(took)) if before and after else {}),
    )


# ------------------------------------------------------------------------------ the floor


@functools.cache
def build_floor(over_tls: bool = False) -> Path:
    """Compile floor.c, once per process, into a directory that goes away with it.

    Raises:
        subprocess.CalledProcessError: with TLS, where OpenSSL's headers are not installed.
    """
    directory = Path(tempfile.mkdtemp(prefix="redlock_fast-floor-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    binary = directory / "floor"
    source = Path(__file__).with_name("floor.c")
    more = ["-DOVER_TLS", "-lssl", "-lcrypto"] if over_tls else []
    command = [os.environ.get("CC", "cc"), "-O2", "-o", str(binary), str(source), *more]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL if over_tls else None)
    return binary


def floor_address(url: str) -> str:
    """What floor.c dials for this URL: a port of 127.0.0.1 or the path of a unix socket."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return unquote(parts.path)
    if parts.scheme == "redis" and parts.hostname in ("127.0.0.1", "localhost") and parts.port:
        return str(parts.port)
    raise ValueError(f"the floor can only dial loopback ports and unix sockets, not {url}")


def run_floor(
    urls: Sequence[str],
    seconds: float,
    *,
    mode: str = "quorum",
    batch: int = 1,
    over_tls: bool = False,
) -> Result:
    """Run the C client as a process of its own; its p50 and p99 are those of a whole batch."""
    binary = str(build_floor(over_tls))
    command = [binary, mode, str(seconds), str(batch), *map(floor_address, urls)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    if done.returncode:
        raise RuntimeError(f"floor: {done.stderr.strip()}")
    rate, p50, p99, cpu = map(float, done.stdout.split())
    return Result(
        pairs=round(rate * seconds),
        failed=0,
        pairs_per_s=rate,
        p50_us=p50,
        p99_us=p99,
        max_ms=None,
        cpu_us=cpu,
        owed=int(done.stderr.split()[-1]),
    )


class FloorClock:
    """The C client as something that pytest-benchmark can time: its pairs, by its own clock.

    Give `now` as the timer and `pair` as what is timed: a call moves the clock on by what one batch
    took in C, so the pipe to the process costs nothing.
    """

    BLOCK = 500
    """Batches are made so many at a time: what the pipe costs must not let the masters rest."""

    def __init__(self, urls: Sequence[str], batch: int = 1) -> None:
        command = [str(build_floor()), "quorum", "-", str(batch), *map(floor_address, urls)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.block = max(1, self.BLOCK // batch)
        self.seconds = 0.0
        self.took: list[float] = []

    def now(self) -> float:
        """Seconds that the batches have taken so far."""
        return self.seconds

    def pair(self) -> None:
        """One more batch."""
        if not self.took:
            assert self.process.stdin and self.process.stdout  # noqa: PT018
            self.process.stdin.write(f"{self.block}\n")
            self.took = [float(self.process.stdout.readline()) for _ in range(self.block)]
        self.seconds += self.took.pop()

    def close(self) -> None:
        """End the process, which takes up its last replies first."""
        assert self.process.stdin and self.process.stdout  # noqa: PT018
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.stdout.close()


# ------------------------------------------------------------------------------ contestants


class Contestant:
    """A client that makes pairs. Made once, used in every round, closed at the end."""

    name: str
    tag: str
    """Two letters that its lock names start with."""
    built: str
    """How it was made, for the report."""
    errors: tuple[type[Exception], ...] = ()
    """What a call may raise when masters fail; counted as a failed call."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self.names = Names(self.tag)
        self.why = ""

    def pair(self, name: str) -> bool:
        """Acquire and release the lock `name`; True if it was granted and released."""
        raise NotImplementedError

    def blame(self, error: Exception) -> None:
        """Keep what the first failed call raised."""
        self.why = self.why or f"{type(error).__name__}: {error}"

    def owed(self) -> int | None:
        """Replies still to come, where the client says so."""
        return None

    def replies(self) -> list[int] | None:
        """Replies so far from each master, where the client says so."""
        return None

    def counts(self) -> Counts | None:
        """System calls and waits so far, where the client counts them."""
        return None

    def version(self) -> str:
        """Of the package."""
        raise NotImplementedError

    def close(self) -> None:
        """Close its connections."""
        raise NotImplementedError

    def run(self, seconds: float, warm_up: int = WARM_UP, *, rate_too: bool = True) -> Result:
        """One run of about `seconds`."""
        return measure(
            self.pair,
            seconds,
            self.names,
            owed=self.owed,
            errors=self.errors,
            warm_up=warm_up,
            rate_too=rate_too,
            counts=self.counts,
        )


class RedlockFast(Contestant):
    """This project."""

    name = "redlock_fast"
    tag = "rf"
    built = "redlock_fast.Redlock([url, ...])"

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls)
        import redlock_fast

        self.errors = (redlock_fast.RedlockError,)
        self.client = redlock_fast.Redlock(self.urls)
        self.acquire, self.release = self.client.acquire, self.client.release

    def pair(self, name: str) -> bool:
        lock = self.acquire(name, TTL)
        return lock is not None and self.release(lock)

    def batch(self, names: Sequence[str]) -> int:
        """Acquire and release these locks together; how many were granted and released."""
        locks = self.client.acquire_many(names, TTL)
        return sum(self.client.release_many([lock for lock in locks if lock is not None]))

    def owed(self) -> int:
        return sum(master["owed"] for master in self.client.stats()["masters"])

    def replies(self) -> list[int]:
        return [master["replies"] for master in self.client.stats()["masters"]]

    def counts(self) -> Counts:
        pump = self.client._driver.pump
        return Counts(pump.sends, pump.looks)

    def version(self) -> str:
        try:
            return importlib.metadata.version("redlock_fast")
        except importlib.metadata.PackageNotFoundError:
            return "(not installed, imported from a tree)"

    def close(self) -> None:
        self.client.close()


class RedlockPy(Contestant):
    """The sequential client of PyPI's redlock-py; `unlock` cannot say whether it released."""

    name = "redlock-py"
    tag = "py"
    built = "redlock.Redlock([url, ...])"

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls)
        import redis
        import redlock

        self.errors = (redlock.MultipleRedlockException, redis.RedisError)
        self.client = redlock.Redlock(self.urls)
        self.built += f" ({redis_settings(self.client.servers[0])})"

    def pair(self, name: str) -> bool:
        lock = self.client.lock(name, TTL)
        if not lock:
            return False
        self.client.unlock(lock)
        return True

    def version(self) -> str:
        return importlib.metadata.version("redlock-py")

    def close(self) -> None:
        for server in self.client.servers:
            server.close()


class CompatRedlockPy(RedlockPy):
    """This project's drop-in for it; by the original's interface, so it cannot say more either."""

    name = "compat-redlock-py"
    tag = "cp"
    built = "redlock_fast.compat.redlock_py.Redlock([url, ...])"

    def __init__(self, urls: Sequence[str]) -> None:
        Contestant.__init__(self, urls)
        from redlock_fast.compat import redlock_py

        self.errors = (redlock_py.MultipleRedlockException,)
        self.client = redlock_py.Redlock(self.urls)

    def version(self) -> str:
        return importlib.metadata.version("redlock_fast")

    def close(self) -> None:
        self.client.close()


class Pottery(Contestant):
    """pottery's client; leaves a key now and then, a SET that arrives after its release."""

    name = "pottery"
    tag = "po"
    built = "pottery.Redlock(key=..., masters={redis.Redis.from_url(url), ...}) for each lock"

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls)
        import pottery
        import redis

        self.errors = (pottery.PrimitiveError, redis.RedisError)
        self.factory = pottery.Redlock
        self.masters = frozenset(redis.Redis.from_url(url) for url in self.urls)
        self.built += f" ({redis_settings(next(iter(self.masters)))})"

    def pair(self, name: str) -> bool:
        lock = self.factory(key=name, masters=self.masters, auto_release_time=TTL / 1000)
        if not lock.acquire(blocking=False):
            return False
        lock.release()  # raises unless a majority still had it
        return True

    def version(self) -> str:
        return importlib.metadata.version("pottery")

    def close(self) -> None:
        for master in self.masters:
            master.close()


class RedisLock(Contestant):
    """redis-py's own `Lock`: on one master, with no quorum. It uses the first of the masters."""

    name = "redis-py Lock"
    tag = "rp"
    built = "redis.Redis.from_url(url).lock(name, timeout=10, blocking=False) for each lock"

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls)
        import redis
        import redis.exceptions

        self.errors = (redis.RedisError,)  # LockError is one
        self.client = redis.Redis.from_url(self.urls[0])
        self.built += f" ({redis_settings(self.client)})"

    def pair(self, name: str) -> bool:
        lock = self.client.lock(name, timeout=TTL / 1000, blocking=False)
        if not lock.acquire():
            return False
        lock.release()  # raises unless the key was still ours
        return True

    def version(self) -> str:
        return importlib.metadata.version("redis")

    def close(self) -> None:
        self.client.close()


def redis_settings(client: Any) -> str:
    """What a redis.Redis does when a master fails: it depends on the version and on the making."""
    connection = client.connection_pool.make_connection()  # not connected
    retry = connection.retry
    retries = retry.get_retries() if hasattr(retry, "get_retries") else retry._retries
    return f"redis-py: retries {retries}, socket timeout {connection.socket_timeout} s"


CLIENTS: Mapping[str, type[Contestant]] = {
    c.name: c for c in (RedlockFast, CompatRedlockPy, RedlockPy, Pottery)
}
"""Redlock clients, on any number of masters."""
EVERYBODY: Mapping[str, type[Contestant]] = {**CLIENTS, RedisLock.name: RedisLock}
"""And the one that knows a single master only."""
OURS = RedlockFast.name
DROP_INS = {CompatRedlockPy.name: RedlockPy.name}
"""Our drop-ins, and what each replaces."""
FLOOR = "floor"
CONTESTANTS = (FLOOR, *CLIENTS)


# ------------------------------------------------------------------------------ interleaving


Run = Callable[[float], Result]


@dataclass
class Interleaved:
    """What `interleave` measured: per contestant one Result per round, and the floors around."""

    results: dict[str, list[Result]] = field(default_factory=dict)
    around: dict[str, list[tuple[Result, Result]]] = field(default_factory=dict)
    """For each client and round the floor before and after it; empty without a floor."""

    def median(self, name: str, what: str) -> float:
        """Of one field of the Results of `name`."""
        values: list[float] = [getattr(result, what) for result in self.results[name]]
        return statistics.median(values)

    def to_floor(self, name: str) -> Spread | None:
        """Rate over the mean rate of the two floors around it.

        For the floor itself: each run over the one before it, which is the machine's noise.
        """
        if name == FLOOR:
            pairs = [pair for pairs in self.around.values() for pair in pairs]
            if not pairs:
                return None
            return Spread.of(after.pairs_per_s / before.pairs_per_s for before, after in pairs)
        if not self.around[name]:
            return None
        return Spread.of(
            2 * result.pairs_per_s / (before.pairs_per_s + after.pairs_per_s)
            for result, (before, after) in zip(self.results[name], self.around[name], strict=True)
        )

    def to_peer(self, name: str, peer: str) -> Spread | None:
        """Rate of `name` over that of `peer` in the same round.

        None if the peer made no pair in some round.
        """
        rates = [
            (mine.pairs_per_s, theirs.pairs_per_s)
            for mine, theirs in zip(self.results[name], self.results[peer], strict=True)
        ]
        if not all(theirs for _, theirs in rates):
            return None
        return Spread.of(mine / theirs for mine, theirs in rates)

    def cpu_over_floor(self, name: str) -> float | None:
        """CPU per call minus the mean of the two floors around it, median of the rounds."""
        if name == FLOOR or not self.around[name]:
            return None
        return statistics.median(
            result.cpu_us - (before.cpu_us + after.cpu_us) / 2
            for result, (before, after) in zip(self.results[name], self.around[name], strict=True)
        )


def interleave(
    contestants: Mapping[str, Run],
    seconds: float,
    rounds: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Interleaved:
    """Run every contestant once per round for about `seconds`.

    If there is a floor it runs first and again after each client, so each client has one right
    before and one right after it. The order of the clients turns by one each round.
    """
    outcome = Interleaved()
    clients = {name: run for name, run in contestants.items() if name != FLOOR}
    floor = contestants.get(FLOOR)
    for name in contestants:
        outcome.results[name] = []
    for name in clients:
        outcome.around[name] = []

    def once(name: str) -> Result:
        time.sleep(SETTLE)
        result = contestants[name](seconds)
        outcome.results[name].append(result)
        return result

    for number in range(rounds):
        progress(number)
        turn = number % len(clients) if clients else 0
        order = [*clients][turn:] + [*clients][:turn]
        before = once(FLOOR) if floor else None
        for name in order:
            once(name)
            if before is not None:
                after = once(FLOOR)
                outcome.around[name].append((before, after))
                before = after
    return outcome


# ------------------------------------------------------------------------------ surroundings


def keys_left(
    masters: Iterable[Any], prefixes: Mapping[str, str], patience: float
) -> dict[str, int]:
    """How many keys of each contestant the masters still have, summed over the masters.

    Waits up to `patience` seconds for none. `prefixes` maps a contestant's name to what its lock
    names start with; pottery puts `redlock:` before them.
    """
    masters = list(masters)
    deadline = time.monotonic() + patience
    while True:
        left = dict.fromkeys(prefixes, 0)
        for keys in [master.keys() for master in masters]:
            for key in keys:
                text = key.decode(errors="replace").removeprefix("redlock:")
                for name, prefix in prefixes.items():
                    left[name] += text.startswith(prefix)
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def server_version(master: Any) -> str:
    """For example `valkey 8.1.8`, from INFO."""
    text = master.command("INFO", "server").decode()
    info = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "valkey_version" in info:
        return f"valkey {info['valkey_version']}"
    return f"redis {info['redis_version']}"


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The processor's name as the kernel knows it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """One line: cores, kernel, Python, load."""
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{cores()} cores, {platform.system()} {platform.release()}, {python}, load {load}"


def modules() -> str:
    """How the extension modules that are imported here were built."""
    import redlock_fast

    if "optimised" in Path(redlock_fast.__file__).parts:
        return "guided by a profile, as in wheels (`make optimised`)"
    return "plain, as `make setup` builds them"


def library_versions() -> str:
    """The redis-py and hiredis that the Python clients stand on."""
    names = ("redis", "hiredis")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def note(text: str) -> None:
    """One line of progress, to stderr."""
    print(text, file=sys.stderr, flush=True)
