"""What the tests of `options` and `tls` have in common."""

from __future__ import annotations

import importlib
import os
import traceback
from typing import Any
from urllib.parse import quote

import pytest

import redlock_fast
from redlock_fast.errors import ConfigurationError
from redlock_fast.options import MasterOptions, parse_masters

PACKAGE = os.path.dirname(redlock_fast.__file__)
# Typed as anything: what is done with them is what their stubs forbid.
LIBRARIES: list[Any] = [
    importlib.import_module(name) for name in ("redis", "redis.asyncio", "valkey", "valkey.asyncio")
]
CLIENTS = pytest.mark.parametrize(
    ("module", "name"),
    [*zip(LIBRARIES, ("Redis", "Redis", "Valkey", "Valkey"), strict=True)],
    ids=[module.__name__ for module in LIBRARIES],
)


def one(master: Any) -> MasterOptions:
    (options,) = parse_masters([master])
    return options


def refused(masters: Any, *secrets: str) -> str:
    """The message of the refusal, after a look into all that hangs on it."""
    with pytest.raises(ConfigurationError) as info:
        parse_masters(masters)
    error = info.value
    assert error.__cause__ is None
    assert error.__context__ is None
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith(PACKAGE)
    ]
    assert len(frames) == 1  # only `parse_masters` itself
    shown = [str(error), repr(error), repr(error.args)]
    shown += traceback.StackSummary.extract(iter(frames), capture_locals=True).format()
    for frame, _ in frames:
        assert "masters" not in frame.f_locals
        shown += map(repr, frame.f_locals.values())
    for secret in secrets:
        for form in (secret, quote(secret), quote(secret, safe="")):
            assert not any(form in text for text in shown), shown
    return str(error)
