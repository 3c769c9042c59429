"""How Sphinx makes the site: `make docs`. Nothing is fetched while it runs."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "redlock_fast"
author = "redlock_fast contributors"
copyright = author  # noqa: A001 - Sphinx's name for it
release = version = importlib.metadata.version("redlock-fast")

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_docstring_signature = False  # Cython's first line has `self` in it

smartquotes = False  # quotes are part of what is said
nitpicky = True
# Types of other packages, of which no list is at hand.
nitpick_ignore_regex = [
    (r"py:class", r"Milliseconds"),  # newer versions of Sphinx find it
    (r"py:.*", r"(Any|Iterable|Iterator|ModuleType|Path|Protocol|Self|Sequence|SupportsIndex)"),
    (r"py:.*", r"(collections\.abc|os|redis|types)\..*"),
    (r"py:.*", r"(timedelta|TracebackType|Callable|Awaitable|NamedTuple|math\.inf)"),
]

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_sphinx = False
