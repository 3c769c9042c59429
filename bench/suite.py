"""`make bench`: every figure of the clients, beside the floor, its peers and its target.

    python bench/suite.py                    # all, some ten minutes; writes docs/benchmarks.md
    python bench/suite.py --quick            # the same, short and coarse; writes build/bench
    python bench/suite.py --only one,threads --out /tmp/page
    python bench/suite.py --from build/bench/results.json --out docs    # only the page, anew

Starts its own masters. Sections run one after another, each interleaves its rows with the floor, so
ratios are of runs side by side: medians of the rounds, with their range.

To add a row: a contestant in `harness.EVERYBODY` or `aio.CLIENTS`, a load (`loads`, `aio`), a `Row`
in `THREADS` or `TASKS`; to add its target: a line in `page.TARGETS`.

Exit status 1 if redlock_fast failed a call or left a key, or if time ran out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aio
import compare
import costs
import harness
import instructions
import page
from harness import FLOOR, OURS, Contestant, Pottery, RedisLock, RedlockPy, Result
from loads import Batch, Load, Threads, one_thread
from relay import Relay

ROOT = Path(__file__).resolve().parent.parent
MOST = 7
"""Masters started for the sections over TCP."""
SLOW_MS = 5
MOST_OF_PEERS = 100
"""Tasks for the peers, which open a connection per task and master."""
BUDGET_S = 720.0
"""A section that would begin later is left out, and the run has failed."""
PATIENCE = 1.0
"""Seconds to wait for the last deletes before keys are counted as left."""
PEER_ROUNDS = 1
"""Rounds of faults for the peers, of which some wait as long as they are let."""


# ------------------------------------------------------------------------------ what is run


@dataclass(frozen=True)
class Row:
    """One line of a table: a client under a load."""

    name: str
    client: str
    load: Load = one_thread
    against: str | None = None
    """The row of ours in the same section whose rate is divided by this one's."""


@dataclass(frozen=True)
class Section:
    """One table. All its rows meet the same masters, and the floor with `batch`."""

    key: str
    title: str
    rows: tuple[Row, ...]
    masters: int = 5
    batch: int | None = 1
    """Pairs that the floor makes at a time; None: no floor."""
    unix: bool = False
    slow: bool = False
    """The first master's answers come SLOW_MS late."""
    longer: float = 1.0
    """Times the usual seconds."""


def peers(*names: str, against: str = OURS) -> tuple[Row, ...]:
    """Rows of peers, one thread."""
    return tuple(Row(name, name, against=against) for name in names)


def threads(name: str, count: int, against: str | None = None) -> Row:
    """A row of threads that share one client."""
    return Row(threads_of(name, count), name, Threads(count), against)


def threads_of(name: str, count: int) -> str:
    return f"{name}, {count} thread{'s' if count > 1 else ''}"


PY, PO, RL = RedlockPy.name, Pottery.name, RedisLock.name
THREADS = (
    Section("one", "One thread, 5 masters", (Row(OURS, OURS), *peers(PY, PO))),
    Section("n1", "One thread, 1 master", (Row(OURS, OURS), *peers(PY, PO, RL)), masters=1),
    Section("n3", "One thread, 3 masters", (Row(OURS, OURS), *peers(PY)), masters=3),
    Section("n7", "One thread, 7 masters", (Row(OURS, OURS), *peers(PY)), masters=7),
    Section(
        "unix", "One thread, 5 masters, unix sockets", (Row(OURS, OURS), *peers(PY)), unix=True
    ),
    Section(
        "slow",
        f"One thread, 5 masters, one of them answers {SLOW_MS} ms late",
        (Row(OURS, OURS), *peers(PY)),
        slow=True,
    ),
    Section(
        "threads",
        "Threads that share one client, 5 masters; the floor has one thread",
        (
            *(threads(OURS, count) for count in (1, 2, 4, 8, 16, 64)),
            *(threads(PY, count, threads_of(OURS, count)) for count in (8, 64)),
        ),
    ),
    Section(
        "busy",
        "8 threads beside one that computes in Python, 5 masters",
        (Row(OURS, OURS, Threads(8, busy=True)),),
        batch=None,
        longer=2,
    ),
    *(
        Section(
            f"batch{count}",
            f"Batches of {count}, 5 masters; p50 and p99 are of a batch",
            (Row(OURS, OURS, Batch(count)), *(peers(PY) if count == 1000 else ())),
            batch=count,
        )
        for count in (1, 100, 1000)
    ),
)
TASKS = tuple(
    Section(
        f"tasks{count}",
        f"asyncio, {count} task{'s' if count > 1 else ''} on one client, 5 masters; the floor in "
        f"batches of {count}; redis.asyncio's Lock asks 1 master",
        tuple(
            Row(name, name, aio.Tasks(count), aio.OURS if name in aio.PEERS else None)
            for name in aio.CLIENTS
            if count <= MOST_OF_PEERS or name not in aio.PEERS
        ),
        batch=count,
    )
    for count in (1, 10, 100, 1000)
    if aio.CLIENTS
)
SECTIONS = (*THREADS, *TASKS)
CLIENTS = {**harness.EVERYBODY, **aio.CLIENTS}
FAULTS = {"pause": "hung (SIGSTOP)", "kill": "dead (killed)"}
EXTRAS = ("costs", "instructions")


# ------------------------------------------------------------------------------ running it


@dataclass(frozen=True)
class Effort:
    """How long and how often."""

    seconds: float
    rounds: int


FULL, QUICK = Effort(0.35, 9), Effort(0.12, 3)


def spread(values: Sequence[float]) -> dict[str, float]:
    return dataclasses.asdict(harness.Spread.of(values))


def given(results: Sequence[Result], what: str) -> list[float]:
    """A field of the Results, where it is not None."""
    return [value for result in results if (value := getattr(result, what)) is not None]


def run_section(
    section: Section, masters: Any, effort: Effort, made: dict[str, str]
) -> dict[str, Any]:
    """Measure one section. `made` gets how each client was made."""
    seconds = effort.seconds * section.longer
    with ExitStack() as stack:
        urls = masters.urls[: section.masters]
        if section.slow:
            urls = [stack.enter_context(Relay(urls[0], SLOW_MS)).url, *urls[1:]]
        clients: dict[str, Contestant] = {}
        runs: dict[str, harness.Run] = {}
        if section.batch is not None:
            runs[FLOOR] = floor_run(urls, section.batch)
        for row in section.rows:
            if row.client not in clients:
                client = clients[row.client] = CLIENTS[row.client](urls)
                stack.callback(client.close)
                made[row.client] = f"{client.version()}: {client.built}"
            runs[row.name] = row_run(row, clients[row.client])
        outcome = harness.interleave(runs, seconds, effort.rounds)
        prefixes = {name: client.names.prefix for name, client in clients.items()}
        left = harness.keys_left(masters, prefixes, PATIENCE)
        for name, client in clients.items():
            if client.why and name.startswith(OURS):
                harness.note(f"       {name} failed at first with {client.why}")

    against = {row.name: row.against for row in section.rows}
    client_of = {row.name: row.client for row in section.rows}
    rows = []
    for name, results in outcome.results.items():
        other = against.get(name)
        ratio = outcome.to_peer(other, name) if other else None
        to_floor = outcome.to_floor(name) if section.batch is not None else None
        over = outcome.cpu_over_floor(name) if section.batch is not None else None
        owed, sends, looks, slowest = (
            given(results, what) for what in ("owed", "sends", "looks", "slowest")
        )
        rows.append(
            {
                "name": name,
                "client": client_of.get(name, FLOOR),
                "pairs_per_s": spread([result.pairs_per_s for result in results]),
                "to_floor": to_floor and dataclasses.asdict(to_floor),
                "ours_to_it": ratio and dataclasses.asdict(ratio),
                "p50_us": outcome.median(name, "p50_us"),
                "p99_us": outcome.median(name, "p99_us"),
                "cpu_us": outcome.median(name, "cpu_us"),
                "cpu_over_floor_us": over,
                "sends": statistics.median(sends) if sends else None,
                "looks": statistics.median(looks) if looks else None,
                "slowest": spread(slowest) if slowest else None,
                "owed": max(owed) if owed else None,
                "failed": sum(result.failed for result in results),
                "keys_left": left.get(client_of.get(name, FLOOR)),
            }
        )
    return {
        "key": section.key,
        "title": section.title,
        "masters": section.masters,
        "seconds": seconds,
        "rounds": effort.rounds,
        "rows": rows,
    }


def floor_run(urls: Sequence[str], batch: int) -> harness.Run:
    return lambda seconds: harness.run_floor(urls, seconds, batch=batch)


def row_run(row: Row, client: Contestant) -> harness.Run:
    return lambda seconds: row.load(client, seconds)


def run_fault(
    kind: str, masters: Any, effort: Effort, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Each client with one master at fault against all healthy."""
    rows: list[dict[str, Any]] = []
    for name in names:
        client = harness.EVERYBODY[name](masters.urls)
        rounds = effort.rounds if name == OURS else min(PEER_ROUNDS, effort.rounds)
        try:
            done = [
                compare.fault_round(client, masters, i % len(masters), kind, effort.seconds)
                for i in range(rounds)
            ]
        except RuntimeError as error:  # a peer that does not recover is a result too
            if name == OURS:
                raise
            rows.append({"name": name, "error": str(error)})
            continue
        finally:
            client.close()
        rows.append(
            {
                "name": name,
                "rounds": rounds,
                "p50_us": statistics.median(r.healthy.p50_us for r in done),
                "p99_us": statistics.median(r.healthy.p99_us for r in done),
                "p50_ratio": spread([r.faulty.p50_us / r.healthy.p50_us for r in done]),
                "p99_ratio": spread([r.faulty.p99_us / r.healthy.p99_us for r in done]),
                "slowest_ms": max(r.slowest_ms for r in done),
                "failed": sum(r.healthy.failed + r.failed for r in done),
                "blocked": sum(r.blocked for r in done),
                "recovered_ms": max(r.recovered_ms for r in done),
                "keys_left": max(r.keys_left for r in done),
            }
        )
    return rows


def about(args: argparse.Namespace, effort: Effort) -> dict[str, Any]:
    """Where and how this was measured."""
    command = ["make bench" + "-quick" * args.quick]
    if args.only:
        command = [f"python bench/suite.py{' --quick' * args.quick} --only {','.join(args.only)}"]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command[0],
        "quick": args.quick,
        "cores": harness.cores(),
        "processor": harness.processor(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": harness.library_versions(),
        "modules": harness.modules(),
        "load_before": os.getloadavg()[0],
        "seconds": effort.seconds,
        "rounds": effort.rounds,
    }


def good_row(row: Mapping[str, Any]) -> bool:
    """Of ours: nothing failed, no key left."""
    ours = row.get("client", row["name"]).startswith(OURS)
    return not ours or not (row.get("failed") or row.get("keys_left"))


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run what was asked for: the data of `page`, and whether all is well."""
    from redlock_fast.testing import LocalMasters

    effort = QUICK if args.quick else FULL
    start = time.monotonic()
    data: dict[str, Any] = {"about": about(args, effort), "sections": [], "faults": {}}
    made: dict[str, str] = {}
    skipped: list[str] = []

    def step(key: str, title: str, run: Callable[[], Any]) -> Any:
        if args.only and key not in args.only:
            return None
        if time.monotonic() - start > BUDGET_S:
            skipped.append(key)
            return None
        harness.note(f"{time.monotonic() - start:5.0f} s  {title}")
        return run()

    with ExitStack() as stack:
        tcp = stack.enter_context(LocalMasters(MOST))
        unix = stack.enter_context(LocalMasters(5, unix=True))
        data["about"]["server"] = harness.server_version(tcp[0])
        if not args.only or set(args.only) - set(EXTRAS):
            harness.build_floor()
        for section in SECTIONS:
            masters = unix if section.unix else tcp
            run = section_run(section, masters, effort, made)
            if (done := step(section.key, section.title, run)) is not None:
                data["sections"].append(done)
    for kind, title in FAULTS.items():

        def run_kind(kind: str = kind) -> Any:
            with LocalMasters(5) as masters:
                names = [OURS] if args.quick else [OURS, PY, PO]
                return run_fault(kind, masters, effort, names)

        if (done := step(kind, f"One master {title}", run_kind)) is not None:
            data["faults"][kind] = done
    with LocalMasters(5) as masters:
        urls = masters.urls
        extras: dict[str, tuple[str, Callable[[], Any]]] = {
            "costs": ("Import and memory", lambda: costs.all_costs(urls, 1 if args.quick else 3)),
            "instructions": ("Instructions", lambda: instructions.per_pair(OURS, urls)),
        }
        for key, (title, run) in extras.items():
            if (done := step(key, title, run)) is not None:
                data[key] = done
    data["about"] |= {"built": made, "took_s": time.monotonic() - start, "skipped": skipped}
    rows = [row for section in data["sections"] for row in section["rows"]]
    rows += [row for fault in data["faults"].values() for row in fault]
    return data, all(map(good_row, rows)) and not skipped


def section_run(
    section: Section, masters: Any, effort: Effort, made: dict[str, str]
) -> Callable[[], dict[str, Any]]:
    return lambda: run_section(section, masters, effort, made)


# ------------------------------------------------------------------------------ command line


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="suite.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keys = [*(section.key for section in SECTIONS), *FAULTS, *EXTRAS]
    parser.add_argument("--quick", action="store_true", help="short and coarse")
    parser.add_argument("--only", metavar="A,B,...", help=f"of {','.join(keys)}; default all")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default docs; with --quick or --only build/bench"
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing")
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else []
    if unknown := [key for key in args.only if key not in keys]:
        parser.error(f"unknown section {unknown[0]!r}; there are {', '.join(keys)}")
    if args.out is None:
        args.out = ROOT / ("build/bench" if args.quick or args.only else "docs")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; the exit status."""
    args = arguments(argv)
    logging.getLogger().addHandler(logging.NullHandler())  # peers log a traceback for each failure
    good = True
    if args.source:
        data = json.loads(args.source.read_text())
    else:
        data, good = measure(args)
        results = ROOT / "build" / "bench" / "results.json"
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(data, indent=1) + "\n")
    page.write(data, args.out)
    print(page.text(data), flush=True)
    harness.note(f"wrote {args.out / 'benchmarks.md'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
