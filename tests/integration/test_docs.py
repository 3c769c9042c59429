"""What README.md and docs/*.md show runs as it stands there, but for where the masters are.

A page is one session: its Python blocks run in one process, one after the other, so a block may use
what an earlier one made. Each must print just what the `text` block behind it says (`...` stands
for anything), or nothing; no warning, nothing on stderr; and no key may be left. An HTML comment
right before a block, which nobody sees on the page, says what else is meant:

    <!-- commands -->     for a server: each line is sent to each master before the session
    <!-- server -->       a server's configuration: a server starts with it
    <!-- file: NAME -->   goes to a file of that name, for the next shell block
    <!-- shell -->        a shell block that runs; others are for the reader
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration.certs import Certs
from integration.helpers import are_clean, eventually
from integration.tls_front import MakeTlsFront

from redlock_fast.testing import LocalMasters, MakeLocalMasters

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTE = re.compile(r"|commands|server|shell|file: \S+")
BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Masters are 10.0.0.1 to 10.0.0.5; or 127.0.0.1 with these ports; or redis-1.example.org and so on,
# with TLS on port 6380.
PORTS = ("6379", "6380", "6381")
ELSEWHERE = re.compile(
    r"""(?:10\.0\.0\.([1-5])|127\.0\.0\.1)(?!\d)((?:["'], ["']?port["']?(?:: |=)|:)?)(\d{4})?"""
)

# Runs a page: on stdin [file, names, [[line, code, output], ...]]; names: {"host:port": port here}.
# A stalled test machine is no defect of an example, so clients are patient.
SESSION = """
import contextlib, doctest, io, json, logging, socket, sys, warnings

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

file, names, blocks = json.load(sys.stdin)
resolve = socket.getaddrinfo
socket.getaddrinfo = lambda host, port, *args, **keywords: resolve(
    *(("127.0.0.1", names[f"{host}:{port}"]) if str(host).endswith(".org") else (host, port)),
    *args, **keywords
)
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
        if match[1]:
            return f"127.0.0.1{match[2] or ':'}{masters.ports[int(match[1]) - 1]}"
        if match[3] in PORTS:
            return f"127.0.0.1{match[2]}{masters.ports[PORTS.index(match[3])]}"
        return match[0]

    return ELSEWHERE.sub(place, text)


# README in every run, the others in CI: each is a process of its own, and takes seconds.
@pytest.fixture(
    params=[
        pytest.param(page, marks=[] if page.name == "README.md" else pytest.mark.extra)
        for page in PAGES
    ],
    ids=lambda page: page.name,
)
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture
def files(page: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """Files that the page names, by what stands for them here."""
    if "/etc/locks/" not in page.read_text():
        return {}
    certs: Certs = request.getfixturevalue("certs")
    return {
        "/etc/locks/ca.pem": certs.ca,
        "/etc/locks/client.pem": certs.client.cert,
        "/etc/locks/client.key": certs.client.key,
    }


@pytest.fixture
def masters(make_local_masters: MakeLocalMasters) -> LocalMasters:
    return make_local_masters(5)


@pytest.fixture
def names(page: Path, masters: LocalMasters, request: pytest.FixtureRequest) -> dict[str, int]:
    """Where the names of the page are here; the third one's TLS asks for a certificate."""
    found = {}
    if "example.org" in page.read_text():
        certs: Certs = request.getfixturevalue("certs")
        make_tls_front: MakeTlsFront = request.getfixturevalue("make_tls_front")
        for i, master in enumerate(masters, 1):
            front = make_tls_front(master, identity=certs.docs, client_certs=i == 3)
            found[f"redis-{i}.example.org:6379"] = master.port
            found[f"redis-{i}.example.org:6380"] = front.port
    return found


def test_pages_run(
    page: Path,
    masters: LocalMasters,
    names: dict[str, int],
    files: dict[str, str],
    make_local_masters: MakeLocalMasters,
    tmp_path: Path,
) -> None:
    session = []
    for block in _all(page):
        where = f"{page}:{block.line}"
        code = _placed(block.text, masters)
        for theirs, ours in files.items():
            code = code.replace(theirs, ours)
        assert NOTE.fullmatch(block.note), where
        if block.note == "commands":
            for words in map(shlex.split, code.splitlines()):
                assert [master.command(*words) for master in masters] == [b"OK"] * 5, where
        elif block.note == "server":
            settings = [shlex.split(line) for line in code.splitlines() if line.strip("# ")]
            args = [f"--{name}" if not i else name for s in settings for i, name in enumerate(s)]
            make_local_masters(1, args=args)[0].command("PING")
        elif block.note.startswith("file: "):
            (tmp_path / block.note.removeprefix("file: ")).write_text(code)
        elif block.note == "shell":
            # Plugins of ours would take most of the time.
            alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            _run("sh", "-ec", code, where=where, cwd=tmp_path, env=alone)
        elif block.language == "python":
            assert not block.note, where
            session.append((block.line, code, _placed(block.prints, masters)))
        else:
            assert not block.note, where
    done = _run(
        *(sys.executable, "-W", "error", "-c", SESSION),
        where=str(page),
        given=json.dumps([str(page), names, session]),
        # The system's authorities, as far as a page can know.
        env={"SSL_CERT_FILE": files["/etc/locks/ca.pem"]} if files else {},
    )
    assert done.stderr == ""
    eventually(lambda: are_clean(masters))


def _run(
    *command: str,
    where: str,
    given: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        input=given,
        cwd=cwd,
        env={**os.environ, "PATH": path, **(env or {})},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
    return done
