"""A slow network in front of one master: a process that carries bytes and delays the answers.

    with Relay(url, delay_ms=5) as relay:
        client = Redlock([relay.url, ...])

It is a process of its own, so what it costs is neither the client's GIL nor its processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from urllib.parse import urlsplit

CHUNK = 64 * 1024


class Relay:
    """Stands between clients and the master at `url`, while the `with` lasts."""

    def __init__(self, url: str, delay_ms: float) -> None:
        port = urlsplit(url).port
        if port is None:
            raise ValueError(f"can only stand before a TCP port, not {url}")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(port), str(delay_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.url = f"redis://127.0.0.1:{int(self.process.stdout.readline())}/0"

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin and self.process.stdout  # noqa: PT018
        self.process.stdin.close()  # it ends with its stdin, so also when we are killed
        try:
            self.process.wait(5)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Bytes of one direction, each so much later, in order."""
    loop = asyncio.get_running_loop()
    last = None
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            if delay:
                last = loop.call_later(delay, writer.write, data)
            else:
                writer.write(data)
        if last is not None:
            await asyncio.sleep(max(0.0, last.when() - loop.time()))
    writer.close()


async def serve(port: int, delay: float) -> None:
    """Listen on a free port of loopback, tell it, carry until stdin ends."""

    async def host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            carry(reader, far_writer, 0), carry(far_reader, writer, delay), return_exceptions=True
        )

    server = await asyncio.start_server(host, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
