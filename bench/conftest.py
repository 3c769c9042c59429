"""Masters and clients for the benches; `pytest bench/` needs nothing else to run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # whatever the import mode

import harness

MOST = 5
"""Masters started once for all benches; a bench with fewer takes the first of them."""


@pytest.fixture(scope="session")
def masters() -> Iterator[Any]:
    """MOST running masters."""
    from redlock_fast.testing import LocalMasters

    with LocalMasters(MOST) as started:
        yield started


@pytest.fixture
def contestant(masters: Any) -> Iterator[Callable[[str, int], harness.Contestant]]:
    """`contestant(name, n)`: that client on the first n masters, closed after the bench."""
    with ExitStack() as stack:

        def make(name: str, n: int) -> harness.Contestant:
            client = harness.CLIENTS[name](masters.urls[:n])
            stack.callback(client.close)
            return client

        yield make
