"""The Python in docs/*.md runs as it stands there, but for where the masters are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from integration.helpers import are_clean, eventually

from redlock_fast.testing import LocalMasters

DOCS = Path(__file__).resolve().parents[2] / "docs"
# The ports that examples name.
PORTS = ("6379", "6380", "6381")
# A stalled test machine is no defect of an example.
PATIENT = """
import redlock_fast
from redlock_fast.compat import redlock_py

class Patient(redlock_fast.Redlock):
    def __init__(self, masters, **settings):
        super().__init__(masters, **{"master_timeout": 1000, **settings})

redlock_fast.Redlock = Patient
redlock_py.Redlock.master_timeout = 1000
del Patient, redlock_fast, redlock_py
"""


def _examples() -> list[tuple[str, str]]:
    return [
        (f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}", match[1])
        for page in sorted(DOCS.glob("*.md"))
        for match in re.finditer(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.M)
    ]


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in _examples()])
def test_examples_of_the_documents_run(masters: LocalMasters, code: str) -> None:
    real = dict(zip(PORTS, map(str, masters.ports), strict=True))
    code = PATIENT + re.sub(r"\b\d{4}\b", lambda m: real.get(m[0], m[0]), code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    # Nothing failed on the way, which an example would say.
    assert done.stdout == ""
    eventually(lambda: are_clean(masters))
