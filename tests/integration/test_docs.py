"""What README.md and docs/*.md show runs as it stands there, but for where the masters are.

A page is one session: its Python blocks run in one process, one after the other, so a block may use
what an earlier one made. Each must print just what the `text` block behind it says (`...` stands
for anything), or nothing; no warning, nothing on stderr; and no key may be left. An HTML comment
right before a block, which nobody sees on the page, says what else is meant:

    <!-- commands -->     for a server: each line is sent to each master before the session
    <!-- server -->       a server's configuration: a server starts with it
    <!-- file: NAME -->   goes to a file of that name, for the next shell block
    <!-- shell -->        a shell block that runs; others are for the reader
    <!-- needs: THING --> has no THING here (see `MISSING`): is only compiled
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration.helpers import are_clean, eventually

from redlock_fast.testing import LocalMasters, MakeLocalMasters

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What some examples need and these tests do not have.
MISSING: frozenset[str] = frozenset({"tls", "names", "credentials"})

BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Masters are 10.0.0.1 to 10.0.0.5, or 127.0.0.1 with these ports.
PORTS = ("6379", "6380", "6381")
ELSEWHERE = re.compile(r"""10\.0\.0\.([1-5])(?!\d)((?:["'], ["']?port["']?(?:: |=)|:)?)(?:6379)?""")

# Runs a page: on stdin [file, [[line, code, output or null], ...]].
# A stalled test machine is no defect of an example, so clients are patient.
SESSION = """
import contextlib, doctest, io, json, logging, sys, warnings

import redlock_fast, redlock_fast.asyncio
from redlock_fast.compat import redlock_py

for module in redlock_fast, redlock_fast.asyncio:
    class Redlock(module.Redlock):
        def __init__(self, masters, **settings):
            super().__init__(masters, **{"master_timeout": 1000, **settings})
    module.Redlock = Redlock
redlock_py.Redlock.master_timeout = 1000
# From CPython 3.12 on; the client is made for it.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
# Pages that kill masters get warnings.
logging.getLogger("redlock_fast").addHandler(logging.NullHandler())

file, blocks = json.load(sys.stdin)
session = {"__name__": "__main__"}
for line, code, expected in blocks:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\\n" * line + code, file, "exec"), session)
    same = doctest.OutputChecker().check_output(expected, out.getvalue(), doctest.ELLIPSIS)
    if not same:
        sys.exit(f"{file}:{line}: expected\\n{expected}\\ngot\\n{out.getvalue()}")
"""


@dataclass
class Block:
    """One fenced block of a page."""

    line: int  # of its first line, from 0
    note: str
    language: str
    text: str
    prints: str = ""


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    last = None
    for match in BLOCK.finditer(text):
        note, language, body = match.groups(default="")
        block = Block(text[: match.start(3)].count("\n"), note, language, body)
        if language == "text" and not note and last and last.language == "python":
            last.prints = body
        else:
            yield block
        last = block


def _all(page: Path) -> list[Block]:
    return list(_blocks(page))


def _placed(text: str, masters: LocalMasters) -> str:
    """The same, with the addresses of these masters."""

    def place(match: re.Match[str]) -> str:
        return f"127.0.0.1{match[2] or ':'}{masters.ports[int(match[1]) - 1]}"

    text = ELSEWHERE.sub(place, text)
    real = dict(zip(PORTS, map(str, masters.ports), strict=False))
    return re.sub(r"(?<![\d.])\d{4}(?![\d.])", lambda m: real.get(m[0], m[0]), text)


def _is_missing(block: Block) -> bool:
    kind, _, thing = block.note.partition(": ")
    return kind == "needs" and thing in MISSING


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_run(page: Path, make_local_masters: MakeLocalMasters, tmp_path: Path) -> None:
    masters = make_local_masters(5)
    session = []
    for block in _all(page):
        where = f"{page}:{block.line}"
        code = _placed(block.text, masters)
        if _is_missing(block):
            compile(block.text, where, "exec")
        elif block.note == "commands":
            for words in map(shlex.split, code.splitlines()):
                assert [master.command(*words) for master in masters] == [b"OK"] * 5, where
        elif block.note == "server":
            settings = [shlex.split(line) for line in code.splitlines() if line.strip("# ")]
            args = [f"--{name}" if not i else name for s in settings for i, name in enumerate(s)]
            make_local_masters(1, args=args)[0].command("PING")
        elif block.note.startswith("file: "):
            (tmp_path / block.note.removeprefix("file: ")).write_text(code)
        elif block.note == "shell":
            _run("sh", "-ec", code, where=where, cwd=tmp_path)
        elif block.language == "python":
            assert not block.note or block.note.startswith("needs: "), where
            session.append((block.line, code, _placed(block.prints, masters)))
        else:
            assert not block.note, where
    done = _run(
        *(sys.executable, "-W", "error", "-c", SESSION),
        where=str(page),
        given=json.dumps([str(page), session]),
    )
    assert done.stderr == ""
    eventually(lambda: are_clean(masters))


def _run(
    *command: str, where: str, given: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        input=given,
        cwd=cwd,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
    return done


def test_every_note_of_a_block_means_something() -> None:
    known = re.compile(r"|commands|server|shell|file: \S+|needs: (\w+)")
    for page in PAGES:
        for block in _all(page):
            match = known.fullmatch(block.note)
            assert match, f"{page}:{block.line}: {block.note}"
            # What is missing nowhere any more needs no note.
            assert match[1] is None or match[1] in MISSING, f"{page}:{block.line}: {block.note}"
