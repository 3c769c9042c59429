"""Drop-ins: other lock clients' names over this library, so that moving costs one import.

A module here has the names, units, results and errors of the package that it replaces, and none of
the algorithm's rules: those are `redlock_fast`'s. What differs, and why: docs/migrating.md.

    redlock_py    redlock-py 1.0.8, `from redlock import Redlock`
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__all__ = ["install"]

# Drop-in: the module that it replaces.
_REPLACES = {"redlock_py": "redlock"}


def install(name: str) -> ModuleType:
    """Let imports of another package find the drop-in, in this process: for code that is not yours.

        redlock_fast.compat.install("redlock_py")
        import redlock  # is redlock_fast.compat.redlock_py

    To be called before anything imports the other package. Idempotent.

    Args:
        name: the drop-in: "redlock_py".

    Returns:
        The drop-in module.

    Raises:
        ValueError: there is no such drop-in.
        RuntimeError: the other package is imported already; who has done so would keep it.
    """
    if name not in _REPLACES:
        raise ValueError(f"no drop-in is called {name!r}; there is {', '.join(_REPLACES)}")
    module = importlib.import_module(f"{__name__}.{name}")
    replaced = _REPLACES[name]
    if sys.modules.setdefault(replaced, module) is not module:
        raise RuntimeError(f"cannot replace {replaced}: it is imported already")
    return module
