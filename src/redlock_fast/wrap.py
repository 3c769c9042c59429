"""The wrapper of a decorated coroutine function.

Never compiled: `inspect.iscoroutinefunction`, by which frameworks tell how to call a function, only
knows functions of Python.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def wrapped(
    function: Callable[P, Awaitable[R]], context: Callable[[], AbstractAsyncContextManager[Any]]
) -> Callable[P, Awaitable[R]]:
    """Let every call run within a context of its own."""

    @functools.wraps(function)
    async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        async with context():
            return await function(*args, **kwargs)

    return locked
