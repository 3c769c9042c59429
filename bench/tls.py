"""One thread's pairs over TLS and without, on the same masters, in turns.

    python bench/tls.py --server PATH    # of a redis-server that was built with TLS

Five masters, each with a port of either kind. Prints the medians of both (us), and the median and
range of the ratios of runs that lie next to each other. `make bench-tls` fetches a server.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import trustme

from redlock_fast import Redlock
from redlock_fast.testing import LocalMasters

MASTERS = 5
ROUNDS = 15
PAIRS = 400
TTL = 10_000


def certificate(folder: Path) -> tuple[str, str, str]:
    """Files of an authority, of a certificate for 127.0.0.1, and of its key."""
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    files = [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
    authority.cert_pem.write_to_path(str(files[0]))
    files[1].write_bytes(b"".join(blob.bytes() for blob in server.cert_chain_pems))
    server.private_key_pem.write_to_path(str(files[2]))
    return str(files[0]), str(files[1]), str(files[2])


def open_tls_ports(masters: LocalMasters) -> list[int]:
    """A second port of each master, for TLS."""
    ports = []
    for master in masters:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        assert master.command("CONFIG", "SET", "tls-port", port) == b"OK"
        ports.append(port)
    return ports


def pair_us(client: Redlock, serial: int, pairs: int = PAIRS) -> float:
    """The median of so many pairs, each under a name of its own, in us."""
    times = []
    for i in range(pairs):
        start = time.perf_counter()
        lock = client.acquire(f"tls:{serial}:{i}", TTL)
        assert lock is not None
        assert client.release(lock)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(server: str, rounds: int) -> tuple[list[float], list[float]]:
    """Medians of each round: without TLS, and with it."""
    with tempfile.TemporaryDirectory() as folder:
        ca, cert, key = certificate(Path(folder))
        files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca]
        args = [*files, "--tls-auth-clients", "no"]
        with LocalMasters(MASTERS, server=server, args=args) as masters:
            secure = [
                f"rediss://127.0.0.1:{port}?ssl_ca_certs={ca}" for port in open_tls_ports(masters)
            ]
            with Redlock(masters.urls) as plain, Redlock(secure, master_timeout=1000) as tls:
                rows: tuple[list[float], list[float]] = ([], [])
                for serial in range(rounds + 1):
                    for row, client in zip(rows, (plain, tls), strict=True):
                        row.append(pair_us(client, serial))
                return rows[0][1:], rows[1][1:]  # the first round warms up


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", required=True, help="a redis-server that was built with TLS")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(argv)
    plain, tls = measure(options.server, options.rounds)
    ratios = sorted(b / a for a, b in zip(plain, tls, strict=True))
    print(f"plain {statistics.median(plain):.0f} us, TLS {statistics.median(tls):.0f} us a pair")
    print(
        f"ratio of p50: median {statistics.median(ratios):.2f} of {len(ratios)} rounds, "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    )


if __name__ == "__main__":
    main()
