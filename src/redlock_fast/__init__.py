"""redlock_fast: Redlock locks on N independent Redis or Valkey masters, at high rates.

    from redlock_fast import Redlock

    client = Redlock(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"])
    with client.lock("invoice:17", ttl=10_000):
        ...

Durations are whole milliseconds. See `Redlock` for every verb, `redlock_fast.errors` for what is
raised.
"""

import sys
import warnings

from redlock_fast.client import Lock, Redlock
from redlock_fast.errors import (
    ClosedError,
    ConfigurationError,
    LockLost,
    NoQuorum,
    NotAcquired,
    RedlockError,
    Report,
)

__version__ = "0.1.0"

__all__ = [
    "ClosedError",
    "ConfigurationError",
    "Lock",
    "LockLost",
    "NoQuorum",
    "NotAcquired",
    "Redlock",
    "RedlockError",
    "Report",
    "__version__",
]


def _is_patched() -> bool:
    """Has gevent or eventlet replaced this process's sockets or threads? Neither is imported."""
    for module, question in (
        ("gevent.monkey", "is_module_patched"),
        ("eventlet.patcher", "is_monkey_patched"),
    ):
        replaces = getattr(sys.modules.get(module), question, None)
        if replaces and any(map(replaces, ("socket", "thread", "_thread", "threading"))):
            return True
    return False


if _is_patched():
    warnings.warn(
        "redlock_fast waits in C, where gevent and eventlet cannot switch: "
        "a call stops all greenlets of its thread until it returns",
        RuntimeWarning,
        stacklevel=2,
    )
