"""A Sphinx extension that renders this project's docstrings, in place of napoleon.

Given what autodoc found, returns it as reStructuredText. Sections (`Args:`, `Returns:`, ...) become
fields: napoleon would take `Returns: True: it was ours` for a type and its description. An indented
block is Python. What stands in backticks becomes a link if it is a name of the public API, seen
from the class or module that the docstring is in, else code. A class that is compiled does not know
the signature of its constructor; that one is read from the source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redlock_fast
from redlock_fast import Report
from redlock_fast.holds import BaseContext, BaseLock
from redlock_fast.testing import LocalMaster, MakeLocalMasters

# Whose names are linked. The first one that has a name is the place of it.
MODULES = (
    "redlock_fast",
    "redlock_fast.asyncio",
    "redlock_fast.testing",
    "redlock_fast.compat",
    "redlock_fast.compat.redlock_py",
)
FIELDS = {
    "Args": "param {}",
    "Parameters": "param {}",
    "Attributes": "ivar {}",
    "Raises": "raises {}",
    "Returns": "returns",
}
# As the source has it.
SHORTER = {
    "~typing.SupportsIndex | ~datetime.timedelta": "Milliseconds",
}
# Nobody but the library makes these, or they say nothing that way.
UNSIGNED = (BaseException, BaseLock, BaseContext, LocalMaster, MakeLocalMasters, Report)


def _public() -> dict[str, str]:
    """Full names of what is documented, by module and name, and by the name alone."""
    names = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            names[f"{module_name}.{name}"] = f"{module_name}.{name}"
            if inspect.isclass(thing):
                for member, value in inspect.getmembers(thing):
                    if not member.startswith("_") and not isinstance(value, (str, int, float)):
                        full = f"{module_name}.{name}.{member}"
                        names[full] = full
    return names


def _linked(text: str, place: str, public: dict[str, str]) -> str:
    """Turn what is in single backticks into links and code."""

    def role(match: re.Match[str]) -> str:
        name = match[1]
        parts = place.split(".")
        for end in range(len(parts), -1, -1):
            full = public.get(".".join([*parts[:end], name]))
            if full == place:
                break  # a page need not lead to itself
            if full:
                return f":py:obj:`{name} <{full}>`{match[2] and chr(92) + match[2]}"
        return f"``{name}``{match[2] and chr(92) + match[2]}"

    # (A letter right behind the markup has to be escaped.)
    return re.sub(r"(?<!`)`([^`\n]+)`(?!`)(\w?)", role, text)


def _blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The paragraphs of a docstring, each with the heading it stands under ("": none)."""
    heading = ""
    block: list[str] = []
    for line in [*lines, ""]:
        if line and not line[0].isspace():
            if block and block[0][:1].isspace():
                yield heading, block
                block = []
            if line.removesuffix(":") in FIELDS and line.endswith(":"):
                if block:
                    yield heading, block
                heading, block = line[:-1], []
                continue
            if not block:
                heading = ""
        if line.strip() or (block and block[0][:1].isspace()):
            block.append(line.rstrip())
        elif block:
            yield heading, block
            block = []
    if block:
        yield heading, block


def _fields(heading: str, block: list[str]) -> Iterator[str]:
    """One section: an item per line that is not indented further."""
    kind = FIELDS[heading]
    for line in textwrap.dedent("\n".join(block)).strip().splitlines():
        if kind == "returns":
            yield f"   {line}"
        elif line[:1].isspace() or not line:
            yield line
        else:
            name, _, text = line.partition(": ")
            if heading != "Raises":
                name = name.replace(", ", "/")  # Sphinx would take the first one for a type
            yield f":{kind.format(name)}: {text}"


def _language(block: list[str]) -> str:
    try:
        ast.parse(textwrap.dedent("\n".join(block)))
    except SyntaxError:
        return "none"
    return "python"


def _render(lines: list[str]) -> Iterator[str]:
    for heading, block in _blocks(lines):
        yield ""
        if heading:
            if FIELDS[heading] == "returns":
                yield ":returns:"
            yield from _fields(heading, block)
        elif block[0][:1].isspace():
            yield f".. code-block:: {_language(block)}"
            yield ""
            yield from block
        else:
            yield from block
    yield ""


def _on_docstring(
    app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    if lines and re.match(r"[\w.]+\(.*\)( -> .+)?$|[\w.]+: [\w. |]+$", lines[0]):
        del lines[0]  # Cython's own: of a function, or of a property
    text = "\n".join(_render(lines))
    lines[:] = _linked(text, name, app.redlock_fast_names).splitlines()


def _constructor() -> str:
    """Signature of both facades' `Redlock`: the one of `BaseClient.__init__` in the source."""
    source = Path(redlock_fast.__file__).with_name("holds.py").read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == "BaseClient":
            made = next(n for n in node.body if getattr(n, "name", "") == "__init__")
            assert isinstance(made, ast.FunctionDef)
            made.args.args.pop(0)
            return f"({ast.unparse(made.args)})"
    raise LookupError("no BaseClient in holds.py")


def _on_signature(
    app: Any, what: str, name: str, obj: Any, options: object, signature: Any, returns: Any
) -> tuple[str | None, str | None]:
    if signature:
        for long, short in SHORTER.items():
            signature = signature.replace(long, short)
            returns = returns and returns.replace(long, short)
    if what == "class" and name in ("redlock_fast.Redlock", "redlock_fast.asyncio.Redlock"):
        return _constructor(), None
    if name.endswith(".__call__"):
        return "(function)", None
    if signature and inspect.isclass(obj) and set(UNSIGNED).intersection(obj.__mro__):
        return "", None
    return signature, returns


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.redlock_fast_names = _public()
    app.connect("autodoc-process-docstring", _on_docstring)
    app.connect("autodoc-process-signature", _on_signature)
    return {"parallel_read_safe": True}
