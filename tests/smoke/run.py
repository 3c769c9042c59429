"""Build the sdist and from it a wheel, install that where nothing else is, and try it.

    python tests/smoke/run.py                          # with this interpreter
    python tests/smoke/run.py python3.10 python3.13    # with these
    python tests/smoke/run.py --all                    # with every CPython from 3.10 on found here

What git holds must be in the sdist, all sources but C files and .pyx in the wheel, with a .pxd and
types for each compiled module. In the empty environment of each interpreter `smoke.py` must
pass, and mypy and pyright must find the types of `usage.py`. `--output FOLDER` keeps what was
built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from redlock_fast.testing import find_server

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600
# What setuptools adds to an sdist.
MADE = ("PKG-INFO", "setup.cfg")
PIP = ("-m", "pip", "-qq", "--disable-pip-version-check")
FACTS = (
    "import sys; v = sys.version_info; print(sys.implementation.name, v[0], v[1], sys.executable)"
)


def run(*command: str | Path, cwd: Path | None = None, **env: str) -> str:
    """Run to the end and return what it wrote; what it wrote is shown if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed with {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def tracked() -> set[str]:
    """The names of all files that git holds here, or would."""
    listed = run("git", "ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT)
    return {name for name in listed.split("\0") if (ROOT / name).is_file()}


def compare(what: str, held: set[str], wanted: set[str]) -> None:
    """End with a message if an archive lacks a file, or has one that it should not."""
    lost, stray = sorted(wanted - held), sorted(held - wanted)
    if lost or stray:
        sys.exit(f"{what}: lacks {lost}, should not have {stray}")
    print(f"{what}: {len(held)} files")


def build_sdist(folder: Path) -> Path:
    """Build from a copy: setuptools would take the list of files from a former build."""
    copy = folder / "copy"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    code = "import sys, setuptools.build_meta as meta; meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, folder, cwd=copy)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        held = {member.name.partition("/")[2] for member in tar if member.isfile()}
    held = {name for name in held if ".egg-info/" not in name and name not in MADE}
    compare(sdist.name, held, {name for name in tracked() if not name.startswith(".")})
    return sdist


def check_wheel(wheel: Path) -> None:
    """Every source but C files and .pyx, and for each compiled module .pxd, types and binary."""
    with zipfile.ZipFile(wheel) as archive:
        names = [PurePosixPath(name) for name in archive.namelist()]
    held = {str(name) for name in names if not name.parts[0].endswith(".dist-info")}
    sources = {PurePosixPath(name) for name in tracked()}
    sources = {name.relative_to("src") for name in sources if name.parts[0] == "src"}
    wanted = {str(name) for name in sources if name.suffix != ".pyx"}
    wanted |= {"redlock_fast/py.typed"}
    for name in sources:
        if name.suffix == ".pyx":
            wanted |= {str(name.with_suffix(".pxd")), str(name.with_suffix(".pyi"))}
        if name.suffix == ".pxd":
            binary = [
                other for other in held if other.startswith(f"{name.with_suffix('')}.cpython")
            ]
            wanted.add(binary[0] if binary else f"{name.with_suffix('')}.*.so")
    compare(wheel.name, held, wanted)


def try_package(python: str, sdist: Path, folder: Path) -> Path:
    """Build and install the wheel in an environment of its own, and try it there."""
    run(python, "-m", "venv", folder / "venv")
    own = folder / "venv" / "bin" / "python"
    run(own, *PIP, "wheel", "--no-deps", "-w", folder, sdist)
    (wheel,) = folder.glob("*.whl")
    check_wheel(wheel)
    run(own, *PIP, "install", wheel)
    for name in ("smoke.py", "usage.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    smoke = run(own, "-I", "-W", "error", "smoke.py", cwd=folder, REDLOCK_SERVER=find_server())
    print(smoke, end="")
    tools = Path(sysconfig.get_path("scripts"))
    run(tools / "mypy", "--strict", "--python-executable", own, "usage.py", cwd=folder)
    run(tools / "pyright", "--pythonpath", own, "--warnings", "usage.py", cwd=folder)
    print("mypy and pyright find the types of the installed package")
    return wheel


def interpreters() -> list[str]:
    """Every CPython from 3.10 on, one of each minor version: from PATH, else from pyenv."""
    places = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[tuple[str, ...], str] = {}
    for place in [
        sys.executable,
        *filter(None, places),
        *map(str, sorted(pyenv.glob("3.*/bin/python"))),
    ]:
        asked = subprocess.run(
            [place, "-c", FACTS], capture_output=True, text=True, timeout=60, check=False
        )
        kind, *version, path = asked.stdout.strip().split(" ", 3) if asked.stdout else ("",) * 4
        if kind == "cpython" and int(version[1]) >= 10:
            found.setdefault(tuple(version), path)
    return [found[version] for version in sorted(found, key=lambda v: int(v[1]))]


def main() -> None:
    """Exit status 0 if all is well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", nargs="*", default=[sys.executable], help="interpreters")
    parser.add_argument("--all", action="store_true", help="every CPython that is found here")
    parser.add_argument("--output", type=Path, help="keep sdist and wheels there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="redlock_fast-smoke-") as name:
        folder = Path(name)
        sdist = build_sdist(folder)
        built = [sdist]
        for i, python in enumerate(interpreters() if args.all else args.python):
            built.append(try_package(python, sdist, folder / str(i)))
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
            for path in built:
                shutil.copy(path, args.output)


if __name__ == "__main__":
    main()
