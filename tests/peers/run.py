"""Run another package's own test suite with its module swapped for our drop-in.

    python tests/peers/run.py redlock_py               # against redlock_fast.compat.redlock_py
    python tests/peers/run.py redlock_py --original    # against the package: is this harness right?

The suite comes from the package's source distribution: of one version, its hash checked, into a
folder that goes away again. Such suites want a server at localhost:6379. It is started here, where
the system allows it in a network namespace (so it meets nothing else that is there), else on the
machine's own port, if that is free. Exit status 0 only if exactly the expected tests passed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from redlock_fast import compat
from redlock_fast.testing import LocalMasters

PORT = 6379
LIMIT_S = 120


@dataclass(frozen=True)
class Suite:
    """Where a drop-in's acceptance tests come from."""

    package: str
    version: str
    sha256: str
    """Of the source distribution."""
    module: str
    """What the suite imports."""
    passed: int
    """How many tests there are; all have to pass."""


SUITES = {
    "redlock_py": Suite(
        package="redlock-py",
        version="1.0.8",
        sha256="0b8722c4843ddeabc2fc1dd37c05859e0da29fbce3bd1f6ecc73c98396f139ac",
        module="redlock",
        passed=6,
    ),
}


def fetch(suite: Suite, folder: Path) -> None:
    """Download the source distribution, and unpack its tests only: nothing of it is imported."""
    wanted = folder / "wanted"
    wanted.write_text(f"{suite.package}=={suite.version} --hash=sha256:{suite.sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    pip += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
    subprocess.run([*pip, "-r", wanted, "-d", folder], check=True, timeout=LIMIT_S)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(member.name)
            if member.isfile() and path.parts[1:2] == ("tests",) and ".." not in path.parts:
                target = folder.joinpath(*path.parts[1:])
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())


def apart() -> list[str]:
    """What to put before a command to run it in a network namespace; [] if that cannot be done."""
    prefix = ["unshare", "--map-root-user", "--net"]
    if shutil.which(prefix[0]):
        probe = subprocess.run([*prefix, "true"], capture_output=True, check=False, timeout=10)
        if probe.returncode == 0:
            return prefix
    return []


def raise_loopback() -> None:
    """Switch on the loopback interface of a fresh network namespace."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = fcntl.ioctl(sock, get_flags, struct.pack("16sh14x", b"lo", 0))
        _, flags = struct.unpack("16sh14x", request)
        fcntl.ioctl(sock, set_flags, struct.pack("16sh14x", b"lo", flags | up))


class Counts:
    """A pytest plugin that counts how tests ended."""

    def __init__(self) -> None:
        self.passed = 0
        self.other = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count; set-up and tear-down count when they fail."""
        if report.when == "call" and report.passed:
            self.passed += 1
        elif not report.passed:
            self.other += 1


def run(name: str, suite: Suite, folder: Path, *, original: bool) -> int:
    """Run the suite in this process, with a server at PORT."""
    if not original:
        compat.install(name)
    if not hasattr(unittest.TestCase, "assertEquals"):  # gone in 3.12, used by older suites
        setattr(unittest.TestCase, "assertEquals", unittest.TestCase.assertEqual)  # noqa: B010
    counts = Counts()
    # The unix socket is for LocalMasters, to see when the server is ready.
    args = ["--port", str(PORT), "--bind", "127.0.0.1"]
    with LocalMasters(1, unix=True, args=args):
        os.chdir(folder)
        options = ["-v", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
        pytest.main([*options, "tests"], plugins=[counts])
    tested = sys.modules[suite.module]
    print(f"{counts.passed} of {suite.passed} passed; {suite.module} is {tested.__file__}")
    swapped = tested.__name__ == f"{compat.__name__}.{name}"
    if swapped == original:
        print("the wrong module was tested")
        return 1
    return 0 if (counts.passed, counts.other) == (suite.passed, 0) else 1


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=SUITES, help="the drop-in")
    parser.add_argument("--original", action="store_true", help="test the package itself")
    parser.add_argument("--inside", nargs=2, metavar=("FOLDER", "APART"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    suite = SUITES[args.name]
    if args.inside:
        folder, is_apart = args.inside
        if is_apart == "yes":
            raise_loopback()
        return run(args.name, suite, Path(folder), original=args.original)
    with tempfile.TemporaryDirectory(prefix="redlock_fast-peers-") as folder:
        fetch(suite, Path(folder))
        prefix = apart()
        if not prefix:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    sock.bind(("127.0.0.1", PORT))
                except OSError as error:
                    print(f"port {PORT} is needed, and no network namespace allowed: {error}")
                    return 1
        again = [sys.executable, *sys.argv, "--inside", folder, "yes" if prefix else "no"]
        return subprocess.run([*prefix, *again], check=False, timeout=LIMIT_S).returncode


if __name__ == "__main__":
    sys.exit(main())
