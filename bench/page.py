"""From what `suite.py` measured to text for a terminal and a page with plots. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aio
import plots
from compare import number, table
from harness import FLOOR, OURS, Pottery, RedlockPy

PY, PO = RedlockPy.name, Pottery.name
Data: TypeAlias = Mapping[str, Any]


# ------------------------------------------------------------------------------ looking things up


def row_of(data: Data, section: str, name: str) -> Data:
    """The row of a section; a KeyError where it was not measured."""
    for found in data["sections"]:
        if found["key"] == section:
            for row in found["rows"]:
                if row["name"] == name:
                    return dict(row)
    raise KeyError(f"{section}: {name}")


def fault_of(data: Data, kind: str) -> Data:
    """Our row of a fault."""
    return next(dict(row) for row in data["faults"][kind] if row["name"] == OURS)


# ------------------------------------------------------------------------------ targets


@dataclass(frozen=True)
class Target:
    """One figure and what it ought to be."""

    what: str
    value: Callable[[Data], Any]
    """A number, or a spread of which the median counts; raises KeyError if not measured."""
    limit: float | None
    """None: tracked only."""
    most: bool = False
    """The value may be at most the limit; else at least."""
    goal: float | None = None
    unit: str = ""
    digits: int = 2
    slack: float = 0
    """For what is counted: so much above the limit is still taken for it."""

    def asked(self) -> str:
        """The target in words."""
        if self.limit is None:
            return "tracked"
        sign = "<=" if self.most else ">="
        goal = f" (goal {self.goal:g})" if self.goal is not None else ""
        return f"{sign} {self.limit:g}{self.unit}{goal}"

    def found(self, data: Data) -> tuple[str, str]:
        """The figure in words, and met, missed or not measured."""
        try:
            value = self.value(data)
        except (KeyError, StopIteration):
            return "-", "not measured"
        if value is None:
            return "-", "not measured"
        middle = value["median"] if isinstance(value, Mapping) else value
        text = f"{middle:,.{self.digits}f}{self.unit}"
        if isinstance(value, Mapping):
            text += f" ({value['low']:,.{self.digits}f}-{value['high']:,.{self.digits}f})"
        if self.limit is None:
            return text, ""
        met = middle <= self.limit + self.slack if self.most else middle >= self.limit
        return text, "met" if met else "**missed**"


def to_floor(section: str, name: str = OURS) -> Callable[[Data], Any]:
    return lambda data: row_of(data, section, name)["to_floor"]


def to_peer(section: str, name: str) -> Callable[[Data], Any]:
    return lambda data: row_of(data, section, name)["ours_to_it"]


def of_row(section: str, what: str, name: str = OURS, per: float = 1) -> Callable[[Data], Any]:
    def value(data: Data) -> Any:
        found = row_of(data, section, name)[what]
        return found if isinstance(found, Mapping) or found is None else found / per

    return value


def of_fault(kind: str, what: str) -> Callable[[Data], Any]:
    return lambda data: fault_of(data, kind)[what]


def of_extra(*path: str, per: float = 1) -> Callable[[Data], Any]:
    def value(data: Data) -> Any:
        found: Any = data
        for key in path:
            found = found[key]
        return found / per

    return value


def with_threads(name: str, count: int) -> str:
    return f"{name}, {count} threads"


def thread_targets(
    count: int, floor: float, goal: float, sends: float, times: float
) -> tuple[Target, ...]:
    ours, theirs = with_threads(OURS, count), with_threads(PY, count)
    of = f"{count} threads,"
    return (
        Target(f"{of} pairs/s / floor", to_floor("threads", ours), floor, goal=goal),
        Target(f"{of} pairs/s / redlock-py's with as many", to_peer("threads", theirs), times),
        Target(f"{of} sends per pair", of_row("threads", "sends", ours), sends, most=True),
        Target(f"{of} slowest / average", of_row("threads", "slowest", ours), 0.5),
    )


def fault_targets(kind: str, name: str) -> tuple[Target, ...]:
    of = f"one master {name},"
    slowest = of_fault(kind, "slowest_ms")
    return (
        Target(f"{of} p50 / healthy", of_fault(kind, "p50_ratio"), 1.1, most=True),
        Target(f"{of} p99 / healthy", of_fault(kind, "p99_ratio"), 1.5, most=True),
        Target(f"{of} slowest call", slowest, 200, most=True, unit=" ms", digits=1),
    )


def busy_target(what: str, limit: float) -> Target:
    value = of_row("busy", f"{what}_us", per=1e3)
    name = f"8 threads beside a busy one, {what}"
    return Target(name, value, limit, most=True, unit=" ms", digits=1)


def task_targets() -> tuple[Target, ...]:
    cpu = of_row("tasks100", "cpu_us", aio.OURS)
    ratio = {count: to_floor(f"tasks{count}", aio.OURS) for count in (1, 100, 1000)}
    on_uvloop = to_floor("tasks1", aio.OURS_ON_UVLOOP)
    peer = to_peer("tasks100", aio.AsyncPottery.name)
    return (
        Target("1 task, pairs/s / floor", ratio[1], 0.5),
        Target("1 task on uvloop, pairs/s / floor", on_uvloop, 0.65),
        Target("100 tasks, pairs/s / floor in batches of 100", ratio[100], 0.6),
        Target("100 tasks, pairs/s / pottery's", peer, 40),
        Target("100 tasks, CPU per pair", cpu, 10, most=True, unit=" us", digits=1),
        Target("1000 tasks, pairs/s / floor in batches of 1000", ratio[1000], 0.6),
    )


ONE, BATCH = "one thread,", "batches of 1000,"
OVER = of_row("one", "cpu_over_floor_us")
HAND_OFFS = of_extra("instructions", "hand_offs_per_round")
LOOKS = of_row("one", "looks")
TARGETS = (
    Target(f"{ONE} pairs/s / floor", to_floor("one"), 0.8, goal=0.9),
    Target(f"{ONE} pairs/s / redlock-py's", to_peer("one", PY), 3.5),
    Target(f"{ONE} pairs/s / pottery's", to_peer("one", PO), 20),
    Target(f"{ONE} CPU per pair above the floor's", OVER, 20, True, 10, unit=" us", digits=0),
    Target(
        f"{ONE} instructions per pair", of_extra("instructions", "instructions"), None, digits=0
    ),
    Target(f"{ONE} GIL given up per round (callgrind)", HAND_OFFS, 1, most=True, slack=0.05),
    Target(f"{ONE} waits per round (the client's count)", LOOKS, 1, most=True, slack=0.05),
    *thread_targets(8, 1.7, 2.2, 3, 12),
    *thread_targets(64, 3.5, 4.5, 1, 15),
    busy_target("p50", 15),
    busy_target("p99", 50),
    Target(f"{BATCH} pairs/s / floor's", to_floor("batch1000"), 0.8, goal=0.95),
    Target(f"{BATCH} pairs/s / redlock-py's one by one", to_peer("batch1000", PY), 30),
    *fault_targets("pause", "hung"),
    *fault_targets("kill", "dead"),
    *task_targets(),
    Target("import", of_extra("costs", "import_ms", OURS), None, unit=" ms of CPU", digits=0),
    Target(
        "memory of an idle client, 5 masters",
        of_extra("costs", "idle_client_bytes", per=1024),
        None,
        unit=" KiB",
        digits=0,
    ),
    Target(
        "memory of a held lock", of_extra("costs", "held_lock_bytes"), None, unit=" B", digits=0
    ),
)


FLOOR_CPU_US = 57
"""What the floor took for a pair where the targets were set (one thread, 5 masters)."""


def this_machine(data: Data) -> list[str]:
    """What puts targets of processor time, and of slow peers, into proportion."""
    try:
        floor, ours = row_of(data, "one", "floor"), row_of(data, "one", OURS)
        pottery = row_of(data, "one", PO)
        own, over = floor["cpu_us"], ours["cpu_over_floor_us"]
        ahead = floor["pairs_per_s"]["median"] / pottery["pairs_per_s"]["median"]
    except (KeyError, TypeError):  # not measured
        return []
    share, aim = over / own, 20 / FLOOR_CPU_US
    return [
        "Targets of processor time are absolute. They were set where the floor took "
        f"{FLOOR_CPU_US} us for a pair; here it took {own:.0f}. In parts of the floor's, one "
        f"thread's {over:.0f} us above it are {share:.2f}, and the target's 20 were {aim:.2f}. "
        f"The floor made {ahead:.1f} times as many pairs as pottery."
    ]


def targets(data: Data) -> tuple[list[str], list[list[str]]]:
    """One row per figure; what a run of some sections left out is not named."""
    head = ["", "measured", "target", ""]
    rows = [[t.what, t.found(data)[0], t.asked(), t.found(data)[1]] for t in TARGETS]
    part = "--only" in data["about"]["command"]
    return head, [row for row in rows if not part or row[-1] != "not measured"]


# ------------------------------------------------------------------------------ tables


HEAD = ["", "pairs/s", "/ floor", f"{OURS} / it", "p50 us", "p99 us", "CPU us", "- floor"]
HEAD += ["sends", "waits", "slowest", "owed", "failed", "keys left"]


def short_span(value: Data | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value['median']:.{digits}f} ({value['low']:.{digits}f}-{value['high']:.{digits}f})"


def section_rows(section: Data) -> list[list[str]]:
    """The lines of one section, under HEAD."""
    return [
        [
            row["name"],
            number(row["pairs_per_s"]["median"]),
            short_span(row["to_floor"]),
            short_span(row["ours_to_it"], 1),
            number(row["p50_us"]),
            number(row["p99_us"]),
            number(row["cpu_us"], 1),
            number(row["cpu_over_floor_us"], 1),
            number(row["sends"], 2),
            number(row["looks"], 2),
            short_span(row["slowest"]),
            number(row["owed"]),
            number(row["failed"]),
            number(row["keys_left"]),
        ]
        for row in section["rows"]
    ]


FAULT_HEAD = ["", "rounds", "p50 us", "faulty / healthy", "p99 us", "faulty / healthy"]
FAULT_HEAD += ["slowest ms", "failed", "blocked", "healthy after ms", "keys left"]
FAULT_NAMES = {"pause": "one master hung (SIGSTOP)", "kill": "one master dead (killed)"}


def fault_rows(kind: str, rows: Sequence[Data]) -> list[list[str]]:
    """The lines of one fault, under FAULT_HEAD."""
    lines = []
    for row in rows:
        name = f"{row['name']}, {FAULT_NAMES[kind]}"
        if "error" in row:
            lines.append([name, row["error"], *["-"] * (len(FAULT_HEAD) - 2)])
            continue
        lines.append(
            [
                name,
                number(row["rounds"]),
                number(row["p50_us"]),
                short_span(row["p50_ratio"]),
                number(row["p99_us"]),
                short_span(row["p99_ratio"]),
                number(row["slowest_ms"], 1),
                number(row["failed"]),
                number(row["blocked"]),
                number(row["recovered_ms"]),
                number(row["keys_left"]),
            ]
        )
    return lines


def cost_lines(data: Data) -> list[str]:
    """Import, memory, instructions."""
    import costs
    import instructions

    lines = []
    if data.get("costs"):
        lines += costs.text_of(data["costs"]).splitlines()
    if data.get("instructions"):
        lines += instructions.text_of(data["instructions"]).splitlines()
    return lines


def about_lines(about: Data) -> list[str]:
    """Where, when and with what."""
    lines = [
        f"{about['date']}, {about['took_s'] / 60:.1f} minutes: `{about['command']}`",
        f"{about['cores']} cores ({about['processor']}), {about['kernel']}, {about['python']}, "
        f"load {about['load_before']:.1f} at the start",
        f"servers on the same machine: {about['server']}",
        f"peers stand on {about['libraries']}",
        f"extension modules: {about['modules']}",
        f"{about['rounds']} rounds of {about['seconds']:g} s for each row",
    ]
    lines += [f"{name} {text}" for name, text in about["built"].items()]
    if about["quick"]:
        lines.append("A QUICK RUN: coarse, and not for comparing")
    if about["load_before"] > about["cores"] / 2:
        lines.append("NOT A QUIET MACHINE: something else ran when this began")
    if about["skipped"]:
        lines.append(f"OUT OF TIME, not measured: {', '.join(about['skipped'])}")
    return lines


KEY = (
    "A pair is one acquire and one release of a free lock; on N masters that is 2 N commands.",
    "/ floor: pairs/s over the mean of the C client's runs before and after; the floor's own line "
    "is each of its runs over the one before, the machine's noise. Medians of rounds (least-most).",
    "CPU us: user and system time of the client's process per pair; - floor: less the floor's.",
    "sends: system calls that send, per pair; waits: stretches without the GIL per round, of which "
    "a pair has two; slowest: pairs of the slowest thread over the average.",
    "owed: replies still to come when the clock stopped, a backlog would flatter; failed: calls; "
    "keys left on the masters, of all rows of that client.",
)
FAULT_KEY = (
    "p50 and p99 are of the healthy phase, then the ratio without the first 200 ms of the fault; "
    "the slowest call is with them. Blocked: rounds in which a call still waited when the fault "
    "was lifted, after 5 s. Failed: calls of all phases; failed ones are in p50 and p99 too."
)


def text(data: Data) -> str:
    """For a terminal: everything in one table, then targets."""
    parts = ["\n".join(about_lines(data["about"]))]
    rows = [section_rows(section) for section in data["sections"]]
    if rows:
        lines = table(HEAD, [row for found in rows for row in found]).splitlines()
        whole, lines = lines[:1], lines[1:]
        for section, found in zip(data["sections"], rows, strict=True):
            whole += ["", f"-- {section['title']}", *lines[: len(found)]]
            lines = lines[len(found) :]
        parts += ["\n".join(whole), "\n".join(KEY)]
    faults = [line for kind, found in data["faults"].items() for line in fault_rows(kind, found)]
    if faults:
        parts += [table(FAULT_HEAD, faults), FAULT_KEY]
    if costs := cost_lines(data):
        parts.append("\n".join(costs))
    head, figures = targets(data)
    parts.append(table(head, [[cell.replace("*", "") for cell in row] for row in figures]))
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------ the page


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


COLOURS = {FLOOR: "floor", OURS: "ours", PY: "py", PO: "other"}
COLOURS |= {aio.OURS: "ours", aio.AsyncPottery.name: "other"}


def bar(row: Data, label: str | None = None, note: str = "pairs/s") -> plots.Bar:
    rate = row["pairs_per_s"]
    colour = COLOURS.get(row["client"], "more")
    return plots.Bar(label or row["name"], rate["median"], colour, rate["low"], rate["high"], note)


def drawn(data: Data) -> dict[str, tuple[str, str]]:
    """File name to what it shows and the SVG; of what was measured only."""
    made: dict[str, tuple[str, str]] = {}
    sections = {section["key"]: section for section in data["sections"]}
    if "one" in sections:
        title = "Pairs per second, one thread, 5 masters"
        made["one-thread.svg"] = title, plots.bars(title, [bar(r) for r in sections["one"]["rows"]])
    if "threads" in sections:
        title = "Pairs per second by threads, 5 masters"
        rows = sections["threads"]["rows"]
        lines: dict[str, tuple[str, list[tuple[float, float]]]] = {}
        level = None
        for row in rows:
            if row["client"] == FLOOR:
                level = "floor, one thread", row["pairs_per_s"]["median"]
                continue
            count = float(row["name"].split(", ")[1].split()[0])
            colour = COLOURS.get(row["client"], "more")
            points = lines.setdefault(row["client"], (colour, []))[1]
            points.append((count, row["pairs_per_s"]["median"]))
        made["threads.svg"] = title, plots.curves(title, "threads", lines, level)
    batches = [sections[key] for key in ("batch1", "batch100", "batch1000") if key in sections]
    if batches:
        title = "Pairs per second in batches, 5 masters"
        batched = [
            bar(row, f"{row['name']}, batch of {section['key'][5:]}")
            for section in batches
            for row in section["rows"]
            if row["client"] in (FLOOR, OURS)
        ]
        made["batches.svg"] = title, plots.bars(title, batched)
    if "tasks100" in sections:
        title = "Pairs per second, asyncio, 100 tasks, 5 masters (floor: batches of 100)"
        rows = sections["tasks100"]["rows"]
        made["tasks.svg"] = title, plots.bars(title, [bar(row) for row in rows])
    if data["faults"]:
        title = "Latency with one master at fault over healthy, redlock_fast"
        ratios = []
        for kind in data["faults"]:
            row = fault_of(data, kind)
            for what, colour in (("p50", "ours"), ("p99", "other")):
                ratio = row[f"{what}_ratio"]
                label = f"{what}, {FAULT_NAMES[kind].split(' (')[0]}"
                ratios.append(
                    plots.Bar(label, ratio["median"], colour, ratio["low"], ratio["high"], "x")
                )
        made["faults.svg"] = title, plots.bars(title, ratios)
    return made


def page(data: Data) -> str:
    """The page as Markdown; its plots lie in `benchmarks/` beside it."""
    parts = ["# Benchmarks"]
    parts.append(
        "Made by `make bench`, not by hand. All clients meet the same servers in the same run, "
        "turn by turn with a bare C client (`bench/floor.c`) that parses nothing and has no rules: "
        "the floor. Rates drift with the machine; ratios of runs side by side are what counts."
    )
    parts.append("\n".join(f"- {line}" for line in about_lines(data["about"])))
    parts.append("## Targets")
    head, found = targets(data)
    parts.append(markdown(head, found))
    parts.append(
        "Ratios are medians of the rounds with their range. Not measured here: that memory and "
        "descriptors stay flat over many pairs and reconnects, which slow tests look after."
    )
    parts += this_machine(data)
    for name, (title, _) in drawn(data).items():
        parts.append(f"![{title}](benchmarks/{name})")
    if data["sections"]:
        parts.append("## All rows")
        parts.append("\n".join(f"- {line}" for line in KEY))
    for section in data["sections"]:
        parts.append(f"### {section['title']}")
        parts.append(markdown(HEAD, section_rows(section)))
    if data["faults"]:
        parts.append("### One of 5 masters at fault")
        faults = [row for kind, rows in data["faults"].items() for row in fault_rows(kind, rows)]
        parts.append(markdown(FAULT_HEAD, faults))
        parts.append(FAULT_KEY)
    if costs := cost_lines(data):
        parts.append("### Costs")
        parts.append("```\n" + "\n".join(costs) + "\n```")
    parts.append("## Commands")
    parts.append(
        "```sh\n"
        "make bench                      # all of this; writes docs/benchmarks.md\n"
        "make bench-quick                # the same, short and coarse; writes build/bench\n"
        "make bench-instructions         # instructions per pair; needs valgrind\n"
        ".venv/bin/python bench/suite.py --only one,threads\n"
        ".venv/bin/python bench/compare.py --fault pause --rounds 7\n"
        ".venv/bin/python -m pytest bench --benchmark-histogram   # with pytest-benchmark\n"
        "```"
    )
    return "\n\n".join(parts) + "\n"


def write(data: Data, directory: Path) -> None:
    """The page and its plots."""
    pictures = directory / "benchmarks"
    pictures.mkdir(parents=True, exist_ok=True)
    for name, (_, svg) in drawn(data).items():
        (pictures / name).write_text(svg)
    (directory / "benchmarks.md").write_text(page(data))
