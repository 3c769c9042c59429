"""What `import redlock_fast` does by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _import_after(code: str) -> str:
    """What an interpreter writes to stderr when it runs `code`, then imports the package twice."""
    code += "\nimport redlock_fast.asyncio, redlock_fast"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def _stub(module: str, question: str, replaced: tuple[str, ...]) -> str:
    """A module that answers `question` as those of gevent and eventlet do."""
    return (
        "import sys, types\n"
        f"stub = types.ModuleType({module!r})\n"
        f"stub.{question} = lambda name: name in {replaced!r}\n"
        f"sys.modules[{module!r}] = stub\n"
    )


GEVENT = ("gevent.monkey", "is_module_patched")
EVENTLET = ("eventlet.patcher", "is_monkey_patched")


@pytest.mark.case("C112")
@pytest.mark.parametrize(
    ("stub", "replaced"),
    [
        pytest.param(GEVENT, ("socket",), id="gevent, sockets"),
        pytest.param(GEVENT, ("_thread", "threading"), id="gevent, threads"),
        pytest.param(EVENTLET, ("socket",), id="eventlet, sockets"),
        pytest.param(EVENTLET, ("thread",), id="eventlet, threads"),
    ],
)
def test_monkey_patching_is_warned_of_once(
    stub: tuple[str, str], replaced: tuple[str, ...]
) -> None:
    said = _import_after(_stub(*stub, replaced))
    assert said.count("RuntimeWarning: redlock_fast waits in C") == 1
    assert said.startswith("<string>:")  # the import is blamed, not a line of ours


@pytest.mark.case("C112")
@pytest.mark.parametrize("stub", [GEVENT, EVENTLET], ids=["gevent", "eventlet"])
def test_what_patches_nothing_of_ours_is_not_warned_of(stub: tuple[str, str]) -> None:
    assert _import_after(_stub(*stub, ("time",))) == ""


def test_the_import_is_silent_and_brings_no_greenlets() -> None:
    code = """
import atexit, sys
def tell():
    print(*{"gevent", "eventlet"} & sys.modules.keys(), end="", file=sys.stderr)
atexit.register(tell)
"""
    assert _import_after(code) == ""
