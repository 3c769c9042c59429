"""Compare Redlock clients on the same masters in the same run.

    python bench/compare.py                  # all contestants, 5 masters, 9 rounds
    python bench/compare.py --contestants floor,redlock-py --rounds 3
    python bench/compare.py --fault pause    # one of the masters stopped, against all healthy
    python bench/compare.py --unix --json out.json

Starts its own masters on loopback (`redlock_fast.testing.LocalMasters`) and prints one table.
Ratios are medians of per-round ratios with their range: rates of different runs do not compare,
and a difference under 10 % is noise.

Exit status 1 if redlock_fast failed a call or left a key.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
from harness import CLIENTS, CONTESTANTS, DROP_INS, FLOOR, OURS, Contestant, Result, Spread

DETECTION = 0.2
"""Seconds after a fault that count for the slowest call only, not for p50 and p99."""
FAULT_LIMIT = 5.0
"""Seconds after which a fault is lifted whatever happens: a client may wait for ever."""
RECOVERY = 20.0
"""Seconds within which a client has to be healthy again."""
PATIENCE = 1.0
"""Seconds to wait for the last deletes before keys are counted as left."""


# ------------------------------------------------------------------------------ faults


class Fault:
    """One master stopped (`pause`) or killed (`kill`), lifted after FAULT_LIMIT at the latest."""

    def __init__(self, master: Any, kind: str) -> None:
        self.master = master
        self.kind = kind
        self.expired = False
        """It had to be lifted while a client was still inside a call."""
        self._over = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(FAULT_LIMIT, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self.master.pause() if self.kind == "pause" else self.master.kill()
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._lift()

    def _expire(self) -> None:
        self.expired = True
        self._lift()

    def _lift(self) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self.master.resume() if self.kind == "pause" else self.master.restart()


def recover(contestant: Contestant, master: Any, calls: int = 50) -> float:
    """Make pairs until the client is healthy again; in how many ms from the master's first answer.

    Healthy: `calls` good pairs in a row, and, where the client counts replies, answers to them from
    every master, and no more owed than the last pair's (they are read by the next call).
    """
    limit = time.monotonic() + RECOVERY
    while True:
        try:
            master.command("PING")
            break
        except Exception as error:
            if time.monotonic() > limit:
                raise RuntimeError("the master does not answer after the fault") from error
            time.sleep(0.01)
    start = time.monotonic()
    row, before = 0, contestant.replies()
    while time.monotonic() < limit:
        try:
            good = contestant.pair(next(contestant.names))
        except contestant.errors:
            good = False
        if good:
            row += 1
        else:
            row, before = 0, contestant.replies()
        if row < calls:
            continue
        time.sleep(0.005)
        after = contestant.replies()
        if before is None or after is None:
            return (time.monotonic() - start) * 1e3
        answered = all(b - a >= 2 * calls for a, b in zip(before, after, strict=True))
        if answered and (contestant.owed() or 0) <= 2 * len(after):
            return (time.monotonic() - start) * 1e3
        if row >= 3 * calls:  # some master took no part: count anew
            row, before = 0, after
    raise RuntimeError(f"{contestant.name} is not healthy {RECOVERY:.0f} s after the fault")


@dataclasses.dataclass(frozen=True)
class FaultRound:
    """One healthy and one faulty phase of one contestant."""

    healthy: Result
    detecting: Result
    """The first DETECTION seconds after the fault."""
    faulty: Result
    blocked: bool
    """A call was still waiting when the fault had to be lifted."""
    recovered_ms: float
    keys_left: int

    @property
    def slowest_ms(self) -> float:
        """The slowest call while there was a fault, detection included."""
        return max(self.detecting.max_ms or 0, self.faulty.max_ms or 0)

    @property
    def failed(self) -> int:
        """Failed calls while there was a fault."""
        later = 0 if self.faulty is self.detecting else self.faulty.failed
        return self.detecting.failed + later


def fault_round(
    contestant: Contestant, masters: Any, which: int, kind: str, seconds: float
) -> FaultRound:
    """Healthy, fault, detection, faulty, back, until the client is healthy again."""
    time.sleep(harness.SETTLE)
    healthy = contestant.run(seconds, rate_too=False)
    fault = Fault(masters[which], kind)
    with fault:
        detecting = contestant.run(DETECTION, warm_up=0, rate_too=False)
        faulty = detecting if fault.expired else contestant.run(seconds, warm_up=0, rate_too=False)
        blocked = fault.expired
    recovered = recover(contestant, masters[which])
    prefix = {contestant.name: contestant.names.prefix}
    left = harness.keys_left(masters, prefix, PATIENCE)[contestant.name]
    return FaultRound(healthy, detecting, faulty, blocked, recovered, left)


# ------------------------------------------------------------------------------ tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their heads, the first to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def span(spread: Spread | None) -> str:
    """Median and range."""
    if spread is None:
        return "-"
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def number(value: float | None, digits: int = 0) -> str:
    """Fixed digits, or a dash for what there is not."""
    return "-" if value is None else f"{value:.{digits}f}"


# ------------------------------------------------------------------------------ the two modes


def compare(
    args: argparse.Namespace, masters: Any, clients: Sequence[Contestant], with_floor: bool
) -> tuple[str, dict[str, Any], bool]:
    """All contestants, healthy masters: the table, the data for --json, and if ours did well."""
    urls = list(masters.urls)
    runs: dict[str, harness.Run] = {}
    if with_floor:
        harness.build_floor()
        runs[FLOOR] = lambda seconds: harness.run_floor(urls, seconds)
    runs |= {client.name: client.run for client in clients}
    outcome = harness.interleave(runs, args.seconds, args.rounds, progress(args.rounds))
    prefixes = {client.name: client.names.prefix for client in clients}
    left = harness.keys_left(masters, prefixes, PATIENCE)

    rows, data, good = [], {}, True
    for name, results in outcome.results.items():
        to_floor = outcome.to_floor(name)
        peer = name not in (FLOOR, OURS) and OURS in runs
        ours = outcome.to_peer(OURS, name) if peer else None
        over = outcome.cpu_over_floor(name)
        failed = sum(result.failed for result in results)
        owed = [result.owed for result in results if result.owed is not None]
        if name == OURS and (failed or left[name]):
            good = False
        rows.append(
            [
                name,
                number(outcome.median(name, "pairs_per_s")),
                span(to_floor),
                span(ours),
                number(outcome.median(name, "p50_us")),
                number(outcome.median(name, "p99_us")),
                number(outcome.median(name, "cpu_us"), 1),
                number(over, 1),
                str(failed),
                str(max(owed)) if owed else "-",
                str(left[name]) if name in left else "-",
            ]
        )
        data[name] = {
            "to_floor": to_floor and dataclasses.asdict(to_floor),
            "redlock_fast_to_it": ours and dataclasses.asdict(ours),
            "cpu_over_floor_us": over,
            "keys_left": left.get(name),
            "rounds": [dataclasses.asdict(result) for result in results],
        }
    head = ["", "pairs/s", "/ floor", f"{OURS} / it", "p50 us", "p99 us", "cpu us", "- floor"]
    head += ["failed", "owed", "keys left"]
    text = table(head, rows)
    if with_floor and clients:
        text += "\nfloor's own ratio: each floor run over the one before it, this machine's noise"
    for drop_in, original in DROP_INS.items():
        if drop_in in runs and original in runs:
            text += f"\n{drop_in} / {original}: {span(outcome.to_peer(drop_in, original))}"
            good &= not (left[drop_in] or any(result.failed for result in outcome.results[drop_in]))
    return text, data, good


def compare_faults(
    args: argparse.Namespace, masters: Any, clients: Sequence[Contestant]
) -> tuple[str, dict[str, Any], bool]:
    """Each client with one master at fault against all healthy, phases alternating."""
    rounds: dict[str, list[FaultRound]] = {client.name: [] for client in clients}
    tell = progress(args.rounds)
    for turn in range(args.rounds):
        tell(turn)
        for client in clients:
            which = turn % len(masters)
            rounds[client.name].append(
                fault_round(client, masters, which, args.fault, args.seconds)
            )

    rows, data, good = [], {}, True
    for name, done in rounds.items():
        p50 = Spread.of(r.faulty.p50_us / r.healthy.p50_us for r in done)
        p99 = Spread.of(r.faulty.p99_us / r.healthy.p99_us for r in done)
        failed = [sum(r.healthy.failed for r in done), sum(r.failed for r in done)]
        left = max(r.keys_left for r in done)
        blocked = sum(r.blocked for r in done)
        slowest = max(r.slowest_ms for r in done)
        if name == OURS and (any(failed) or left):
            good = False
        rows.append(
            [
                name,
                number(statistics.median(r.healthy.p50_us for r in done)),
                span(p50),
                number(statistics.median(r.healthy.p99_us for r in done)),
                span(p99),
                number(max(r.healthy.max_ms or 0 for r in done), 1),
                number(slowest, 1) + (f" ({blocked} blocked)" if blocked else ""),
                "/".join(map(str, failed)),
                number(max(r.recovered_ms for r in done)),
                str(left),
            ]
        )
        data[name] = {
            "p50_ratio": dataclasses.asdict(p50),
            "p99_ratio": dataclasses.asdict(p99),
            "slowest_ms": slowest,
            "rounds": [dataclasses.asdict(r) for r in done],
        }
    head = ["", "p50 us", "faulty / healthy", "p99 us", "faulty / healthy", "slowest ms"]
    head += ["slowest ms, fault", "failed", "healthy after ms", "keys left"]
    back = "resumed (SIGCONT)" if args.fault == "pause" else "restarted, empty, on its old port"
    text = table(head, rows) + (
        f"\np50, p99: healthy, then the ratio without the first {DETECTION * 1e3:.0f} ms of a fault"
        f"\nslowest ms, fault: with them; failed: healthy/faulty"
        f"\nthe fault goes round the masters; after each phase the master is {back};"
        f"\nhealthy after: longest time from its first answer until all masters answer this client"
        f" again, the next healthy phase comes after that"
    )
    if any(r.blocked for done in rounds.values() for r in done):
        text += (
            f"\nblocked: rounds in which a call still waited {FAULT_LIMIT:.0f} s after the fault,"
            f" which was lifted then; their ratios are of the calls until then"
        )
    return text, data, good


def progress(rounds: int) -> Callable[[int], None]:
    """Says which round begins, on a terminal's stderr."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda number: harness.note(f"round {number + 1} of {rounds}")


# ------------------------------------------------------------------------------ command line


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="compare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--masters", type=int, default=5, metavar="N", help="default 5")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each run; default 0.5")
    parser.add_argument("--rounds", type=int, default=9, help="default 9")
    parser.add_argument(
        "--contestants",
        metavar="A,B,...",
        help=f"of {','.join(CONTESTANTS)}; default all, with --fault {OURS} only",
    )
    parser.add_argument("--unix", action="store_true", help="unix sockets instead of TCP")
    parser.add_argument("--fault", choices=("pause", "kill"), help="one master stopped or killed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers, every round")
    args = parser.parse_args(argv)
    named = args.contestants or (OURS if args.fault else ",".join(CONTESTANTS))
    args.contestants = list(dict.fromkeys(named.split(",")))
    unknown = [name for name in args.contestants if name not in CONTESTANTS]
    if unknown:
        parser.error(f"unknown contestant {unknown[0]!r}; there are {', '.join(CONTESTANTS)}")
    if args.rounds < 1 or args.seconds <= 0 or args.masters < 1:
        parser.error("--rounds, --seconds and --masters must be positive")
    if args.fault and FLOOR in args.contestants:
        parser.error("the floor cannot take part with --fault: it does not survive one")
    if args.fault and args.masters < 3:
        parser.error("--fault needs 3 masters: with fewer, one at fault leaves no quorum")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start masters, run, print; the exit status."""
    args = arguments(argv)
    logging.getLogger().addHandler(logging.NullHandler())  # peers log a traceback for each failure

    from redlock_fast.testing import LocalMasters

    with ExitStack() as stack:
        masters = stack.enter_context(LocalMasters(args.masters, unix=args.unix))
        clients = []
        for name in args.contestants:
            if name != FLOOR:
                clients.append(CLIENTS[name](masters.urls))
                stack.callback(clients[-1].close)
        way = "unix sockets" if args.unix else "loopback TCP"
        server = harness.server_version(masters[0])
        lines = [
            f"{args.masters} masters ({server}) over {way}, one thread",
            f"{args.rounds} rounds, {args.seconds:g} s for each run",
            f"machine: {harness.machine()}",
        ]
        lines += [f"{client.name} {client.version()}: {client.built}" for client in clients]
        if any(client.name != OURS for client in clients):
            lines.append(f"peers stand on {harness.library_versions()}")
        if args.fault:
            lines.append(f"fault: one master {'stopped' if args.fault == 'pause' else 'killed'}")
            text, data, good = compare_faults(args, masters, clients)
        else:
            text, data, good = compare(args, masters, clients, FLOOR in args.contestants)

    print("\n".join(lines), text, sep="\n\n")
    if args.json:
        settings = {
            key: value for key, value in vars(args).items() if key not in ("json", "contestants")
        }
        args.json.write_text(
            json.dumps({"settings": settings, "about": lines, "contestants": data}, indent=1) + "\n"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
