"""Count the instructions of one pair with callgrind, a figure that no other load disturbs.

    python bench/instructions.py                # redlock_fast, 5 masters
    python bench/instructions.py --client redlock-py --json out.json
    python bench/instructions.py --asyncio 100  # redlock_fast.asyncio, 100 tasks on one client

A pair is one acquire and one release, by one thread or by one of so many tasks. The client runs
twice under valgrind, with few and with many pairs; the difference is divided by the pairs, so
imports, connections and the way out do not count. Nor does the janitor, whose work goes with the
time, not with the pairs. The masters run as always.

Counted too: how often the thread gives the GIL up (calls of PyEval_SaveThread), whoever does; with
tasks these are the turns of the loop. Valgrind slows the client alone, so there is more to read in
a turn than there would be otherwise.

Without valgrind it says so, and exits with status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aio
import harness

FEW, MANY = 200, 1200
HAND_OFF = "PyEval_SaveThread"
LIMIT_S = 300.0
PATIENCE_MS = 5000
"""Valgrind makes all of the client slow; it must not take that for the masters' silence."""
MISSING = (
    "valgrind is not installed: no instructions were counted (on Debian: apt install valgrind)"
)


@dataclass
class Profile:
    """What callgrind saw of one thread."""

    total: int = 0
    hand_offs: int = 0
    by_object: collections.Counter[str] = field(default_factory=collections.Counter)


def read_profile(path: Path) -> Profile:
    """Read a callgrind file: instructions of each object file, calls of HAND_OFF."""
    profile = Profile()
    names: dict[str, str] = {}
    of = re.compile(r"(c?)(fn|ob)=(?:\((\d+)\))? ?(.*)")
    where = callee = ""
    inclusive = False  # the next cost is that of a call, which the callee's own lines have too
    for line in path.read_text(errors="replace").splitlines():
        if match := of.match(line):
            called, kind, number, name = match.groups()
            if number:
                name = names.setdefault(kind + number, name) if name else names[kind + number]
            if kind == "ob" and not called:
                where = Path(name).name
            elif kind == "fn" and called:
                callee = name
        elif line.startswith("calls="):
            inclusive = True
            if callee.split("'")[0] == HAND_OFF:
                profile.hand_offs += int(line[6:].split()[0])
        elif line[:1] in "0123456789+-*" and line:
            if not inclusive and len(cost := line.split()) > 1:
                profile.by_object[where] += int(cost[1])
            inclusive = False
    profile.total = sum(profile.by_object.values())
    return profile


def short(name: str) -> str:
    """What an object file's instructions are counted under."""
    if re.match(r"(lib)?python3", name):
        return "the interpreter"
    if name.startswith("libc"):
        return "libc"
    if name.startswith("hiredis"):
        return "hiredis"
    if re.match(r"(asyncio|client|holds|plan|rules|arguments|drive_\w+)\.", name):
        return f"redlock_fast.{name.split('.')[0]}"
    if re.match(r"(fleet|io|link|op|pump|wire)\.", name):
        return f"redlock_fast._core.{name.split('.')[0]}"
    return "other"


# ------------------------------------------------------------------------------ the counted process


def child(name: str, pairs: int, urls: Sequence[str], tasks: int) -> None:
    """Make so many pairs, and end."""
    if tasks:
        child_of_tasks(name, pairs, urls, tasks)
        return
    client: Any = harness.EVERYBODY[name](urls)
    if name == harness.OURS:
        import redlock_fast

        client.client = redlock_fast.Redlock(
            urls, master_timeout=PATIENCE_MS, connect_timeout=PATIENCE_MS
        )
        client.acquire, client.release = client.client.acquire, client.client.release
        client.client.connect()
        # As if the janitor ran, as it does in a client under load: it never starts, and does not
        # compete for the GIL, which valgrind makes dear.
        client.client._driver.pump.paying = True
    for _ in range(harness.WARM_UP + pairs):
        assert client.pair(next(client.names))
    client.close()


def child_of_tasks(name: str, pairs: int, urls: Sequence[str], tasks: int) -> None:
    """The same, each task one after another."""
    client: Any = aio.CLIENTS[name](urls)
    each, next_name = pairs // tasks, client.names.next

    async def work() -> None:
        for _ in range(each):
            assert await client.pair(next_name())

    async def main() -> None:
        if name == aio.OURS:
            import redlock_fast.asyncio

            await client.client.aclose()
            client.client = redlock_fast.asyncio.Redlock(
                urls, master_timeout=PATIENCE_MS, connect_timeout=PATIENCE_MS
            )
            client.acquire, client.release = client.client.acquire, client.client.release
            await client.client.connect()
        await asyncio.gather(*[work() for _ in range(tasks)])

    client.loop.run_until_complete(main())
    client.close()


def count(name: str, pairs: int, urls: Sequence[str], tasks: int) -> Profile:
    """Run the child under callgrind."""
    with tempfile.TemporaryDirectory(prefix="redlock_fast-callgrind-") as directory:
        out = Path(directory) / "out"
        command = ["valgrind", "--tool=callgrind", "--separate-threads=yes", "--error-exitcode=0"]
        command += [f"--callgrind-out-file={out}", sys.executable, __file__]
        command += ["--child", str(pairs), "--client", name, "--asyncio", str(tasks), *urls]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        if done.returncode:
            raise RuntimeError(f"under valgrind: {done.stderr.strip()[-2000:]}")
        return read_profile(out.with_name("out-01"))


# ------------------------------------------------------------------------------ per pair


def per_pair(name: str, urls: Sequence[str], tasks: int = 0) -> dict[str, Any]:
    """Instructions of one pair, all and of each part, and hand-offs of the GIL per round.

    A pair has two rounds. `{"missing": why}` where there is no valgrind. `tasks`: 0 for a thread.
    """
    if not shutil.which("valgrind"):
        return {"missing": MISSING}
    few_pairs, many_pairs = FEW, MANY
    if tasks:
        few_pairs, many_pairs = (max(tasks, pairs // tasks * tasks) for pairs in (FEW, MANY))
        many_pairs = max(many_pairs, 4 * tasks)
    few = count(name, few_pairs, urls, tasks)
    many = count(name, many_pairs, urls, tasks)
    parts: collections.Counter[str] = collections.Counter()
    for where in many.by_object:
        parts[short(where)] += many.by_object[where] - few.by_object[where]
    pairs = many_pairs - few_pairs
    return {
        "client": f"{name}, {tasks} tasks" if tasks else name,
        "instructions": (many.total - few.total) / pairs,
        "parts": {part: cost / pairs for part, cost in parts.most_common()},
        "hand_offs_per_round": (many.hand_offs - few.hand_offs) / pairs / 2,
    }


def text_of(result: dict[str, Any]) -> str:
    """For people."""
    if "missing" in result:
        return str(result["missing"])
    lines = [f"{result['client']}: {result['instructions']:,.0f} instructions per pair"]
    lines += [f"  {cost:10,.0f}  {part}" for part, cost in result["parts"].items()]
    lines.append(f"GIL given up {result['hand_offs_per_round']:.3f} times per round")
    return "\n".join(lines)


def main() -> int:
    """Start masters, count, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", choices=[*harness.EVERYBODY, *aio.CLIENTS])
    parser.add_argument(
        "--asyncio", type=int, default=0, metavar="N", help="N tasks; default: one thread"
    )
    parser.add_argument("--masters", type=int, default=5, metavar="N", help="default 5")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("urls", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    everybody: Mapping[str, object] = aio.CLIENTS if args.asyncio else harness.EVERYBODY
    args.client = args.client or (aio.OURS if args.asyncio else harness.OURS)
    if args.client not in everybody:
        parser.error(f"expected one of {', '.join(everybody)}, not {args.client}")
    if args.child is not None:  # the counted process
        child(args.client, args.child, args.urls, args.asyncio)
        return 0

    from redlock_fast.testing import LocalMasters

    with LocalMasters(args.masters) as masters:
        result = per_pair(args.client, masters.urls, args.asyncio)
    print(text_of(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
