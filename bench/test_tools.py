"""That `make bench` works: its sections in miniature, its page, and how it reads callgrind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import instructions
import page
import pytest
import suite

TINY = suite.Effort(0.02, 1)
WHERE = {"command": "make bench", "date": "today", "took_s": 1.0, "cores": 2, "processor": "one"}
WHERE |= {"kernel": "Linux", "python": "CPython", "load_before": 0.0, "server": "valkey"}
WHERE["modules"] = "plain"
WHERE |= {"libraries": "redis", "rounds": 1, "seconds": 0.02}


def about(made: dict[str, str]) -> dict[str, Any]:
    return {**WHERE, "quick": True, "skipped": [], "built": made}


def test_sections_and_page(masters: Any, tmp_path: Path) -> None:
    """One run of some sections: every row has its figures, nothing failed, the page has them."""
    made: dict[str, str] = {}
    chosen = [s for s in suite.SECTIONS if s.key in ("one", "busy", "batch100", "slow")]
    sections = [suite.run_section(section, masters, TINY, made) for section in chosen]
    faults = {"pause": suite.run_fault("pause", masters, TINY, [harness.OURS])}
    data = {"about": about(made), "sections": sections, "faults": faults}
    for section in sections:
        for row in section["rows"]:
            assert suite.good_row(row), row
            assert row["pairs_per_s"]["median"] > 0
            if row["client"] == harness.OURS:
                assert row["sends"] > 0
                assert row["looks"] > 0
    assert suite.good_row(faults["pause"][0])
    assert page.row_of(data, "one", harness.OURS)["sends"] == pytest.approx(10, abs=1)

    text = page.text(data)
    page.write(data, tmp_path)
    written = (tmp_path / "benchmarks.md").read_text()
    for row in sections[0]["rows"]:
        assert row["name"] in text
        assert f"| {row['name']} |" in written
    pictures = sorted(path.name for path in (tmp_path / "benchmarks").iterdir())
    assert pictures == ["batches.svg", "faults.svg", "one-thread.svg"]
    assert all(f"benchmarks/{name}" in written for name in pictures)


def test_a_section_with_threads(masters: Any) -> None:
    """All threads count, none is left out."""
    row = suite.threads(harness.OURS, 4)
    section = suite.Section("threads", "", (row,))
    done = suite.run_section(section, masters, TINY, {})["rows"][1]
    assert suite.good_row(done)
    assert done["slowest"]["median"] > 0
    assert 0 < done["sends"] < 10


@pytest.mark.parametrize(
    ("value", "target", "verdict"),
    [
        (0.8, {}, "met"),
        (0.796, {}, "**missed**"),  # though shown as 0.80
        ({"median": 0.9, "low": 0.1, "high": 1}, {}, "met"),
        (0.9, {"most": True}, "**missed**"),
        (0.8, {"most": True}, "met"),
        (0.84, {"most": True, "slack": 0.05}, "met"),
        (None, {}, "not measured"),
    ],
)
def test_verdicts(value: Any, target: dict[str, Any], verdict: str) -> None:
    """The median counts, as it was measured."""
    assert page.Target("", lambda _: value, 0.8, **target).found({})[1] == verdict


def test_verdict_of_what_is_absent() -> None:
    """A section that was left out gives no figure, and no error."""
    empty: dict[str, Any] = {"sections": [], "faults": {}}
    assert {target.found(empty) for target in page.TARGETS} == {("-", "not measured")}


CALLGRIND = """\
version: 1
events: Ir

ob=(1) /usr/lib/libpython3.11.so.1.0
fl=(1) ceval.c
fn=(1) eval
10 100
+2 20
cob=(2) /src/pump.cpython-311-x86_64-linux-gnu.so
cfi=(2) pump.c
cfn=(2) run
calls=3 7
* 9999

ob=(2)
fl=(2)
fn=(2)
5 30
cob=(1)
cfi=(1)
cfn=(3) PyEval_SaveThread
calls=4 9
+1 8888
fe=(3) other.c
-1 7

totals: 157
"""


def test_callgrind_is_read(tmp_path: Path) -> None:
    """Own costs by object file, without those of calls; hand-offs of the GIL."""
    file = tmp_path / "out"
    file.write_text(CALLGRIND)
    profile = instructions.read_profile(file)
    assert profile.total == 157
    assert profile.by_object["libpython3.11.so.1.0"] == 120
    assert profile.hand_offs == 4
    assert {instructions.short(name) for name in profile.by_object} == {
        "the interpreter",
        "redlock_fast._core.pump",
    }
