"""What the library costs beside time: import, an idle client, a held lock.

    python bench/costs.py [--json FILE]

Every figure comes from fresh interpreters, the median of some. Memory is what the kernel counts as
the process's own (`Private` of smaps_rollup), so C buffers are in it and shared pages are not.
Import is processor time, with files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMPORTS = 9
"""Interpreters per module."""
RUNS = 3
"""Interpreters per figure of memory."""
CLIENTS = 40
LOCKS = 20_000
TTL = 600_000
LIMIT_S = 60.0
MODULES = ("redlock_fast", "redlock", "pottery", "redis")

IMPORT = """
import time
start = time.process_time()
import {module}
print((time.process_time() - start) * 1e3)
"""

PRIVATE = """
import gc, sys
import redlock_fast

def private():
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))

urls = sys.argv[1:]
def client():
    made = redlock_fast.Redlock(urls, master_timeout=2000)
    made.connect()
    made.release(made.acquire("warm", 10_000))
    return made

first = client()
"""

IDLE = f"""{PRIVATE}
before = private()
kept = [client() for _ in range({CLIENTS})]
print((private() - before) / {CLIENTS})
for one in kept:
    one.close()
first.close()
"""

HELD = f"""{PRIVATE}
names = [f"held:{{i:07d}}" for i in range({LOCKS})]
first.release_many(first.acquire_many(names[:1000], {TTL}))
before = private()
kept = first.acquire_many(names, {TTL})
assert all(kept)
print((private() - before) / {LOCKS})
first.release_many(kept)
first.close()
"""


def run(code: str, args: Sequence[str] = ()) -> float:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return float(done.stdout)


def all_costs(urls: Sequence[str], runs: int = RUNS) -> dict[str, Any]:
    """Import times in ms; bytes of an idle client with a connection to each url, and of a lock."""
    imports: dict[str, list[float]] = {module: [] for module in MODULES}
    for module in MODULES:  # once for the disk
        run(IMPORT.format(module=module))
    for _ in range(IMPORTS if runs > 1 else 3):
        for module, times in imports.items():
            times.append(run(IMPORT.format(module=module)))
    return {
        "masters": len(urls),
        "import_ms": {module: statistics.median(times) for module, times in imports.items()},
        "idle_client_bytes": statistics.median(run(IDLE, urls) for _ in range(runs)),
        "held_lock_bytes": statistics.median(run(HELD, urls) for _ in range(runs)),
    }


def text_of(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"import {name}: {took:.0f} ms of processor time"
        for name, took in result["import_ms"].items()
    ]
    lines.append(
        f"an idle client with {result['masters']} connections: "
        f"{result['idle_client_bytes'] / 1024:.0f} KiB"
    )
    lines.append(f"a held lock: {result['held_lock_bytes']:.0f} bytes")
    return "\n".join(lines)


def main() -> int:
    """Start masters, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    from redlock_fast.testing import LocalMasters

    with LocalMasters(5) as masters:
        result = all_costs(masters.urls)
    print(text_of(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
