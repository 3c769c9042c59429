"""redlock_fast: Redlock locks on N independent Redis or Valkey masters, at high rates.

    from redlock_fast import Redlock

    client = Redlock(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"])
    with client.lock("invoice:17", ttl=10_000):
        ...

Durations are whole milliseconds. See `Redlock` for every verb, `redlock_fast.errors` for what is
raised.
"""

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

__version__ = "0.1.0.dev0"

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
