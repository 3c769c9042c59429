"""Does the installed package work? Run by an interpreter that has it, from any folder.

    REDLOCK_SERVER=/path/to/redis-server python -I smoke.py

Imports every module, and takes one lock each with the sync client, the asyncio client and the
drop-in, on real masters.
"""

import asyncio
import importlib
import importlib.metadata
import pkgutil
import platform
import sys

import redlock_fast
import redlock_fast.asyncio
from redlock_fast.compat import redlock_py
from redlock_fast.testing import LocalMasters


def modules() -> tuple[int, int]:
    """Import every module; how many there are, and how many of them are compiled."""
    names = [found.name for found in pkgutil.walk_packages(redlock_fast.__path__, "redlock_fast.")]
    paths = [importlib.import_module(name).__file__ or "" for name in ["redlock_fast", *names]]
    assert all(path.startswith(sys.prefix) for path in paths), paths
    compiled = [path for path in paths if path.endswith(".so")]
    assert compiled
    return len(paths), len(compiled)


def main() -> None:
    """Raise if anything is wrong."""
    version = importlib.metadata.version("redlock-fast")
    assert version == redlock_fast.__version__, version
    found = modules()
    # A stalled machine is no defect of the package.
    with LocalMasters(3) as masters:
        with redlock_fast.Redlock(masters.urls, master_timeout=5000) as client:
            with client.lock("name", ttl=60_000) as lock:
                assert client.acquire("name", 60_000) is None
                assert lock.extend()
            assert lock not in client.acquire_many(["name", "other"], 60_000)

        async def locks() -> None:
            async with (
                redlock_fast.asyncio.Redlock(masters.urls, master_timeout=5000) as client,
                client.lock("third", ttl=60_000) as lock,
            ):
                assert await client.acquire("third", 60_000) is None
                assert await lock.extend()

        asyncio.run(locks())
        with redlock_py.Redlock(masters.urls, retry_count=0) as peer:
            assert not peer.lock("name", 60_000)
        assert {len(master.command("KEYS", "*")) for master in masters} == {2}
    print(
        f"{platform.python_implementation()} {platform.python_version()}: "
        f"{version}, {found[0]} modules, {found[1]} of them compiled; locks taken"
    )


if __name__ == "__main__":
    main()
