"""One thread's pairs over TLS and without, on the same masters, in turns.

    python bench/tls.py --server PATH    # of a redis-server that was built with TLS

Five masters, each with a port of either kind. Prints the medians of both (us), and the median and
range of the ratios of runs that lie next to each other; and the same of the bare C client, whose
ratio is what TLS costs here, masters' share included, before any Python. `make bench-tls` fetches a
server.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import trustme

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness

from redlock_fast import Redlock
from redlock_fast.testing import LocalMasters

MASTERS = 5
ROUNDS = 15
PAIRS = 400
TTL = 10_000
FLOOR_S = 0.15
"""Of one of the C client's runs."""


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


def floor_us(ports: Sequence[int], over_tls: bool) -> float:
    """The C client's median, in us."""
    urls = [f"redis://127.0.0.1:{port}" for port in ports]
    return harness.run_floor(urls, FLOOR_S, over_tls=over_tls).p50_us


def has_floor() -> bool:
    """Can the C client be built for TLS?"""
    try:
        harness.build_floor(True)
    except subprocess.CalledProcessError:
        print("no C client over TLS: OpenSSL's headers are missing (on Debian: libssl-dev)")
        return False
    return True


def measure(server: str, rounds: int) -> dict[str, list[float]]:
    """Medians of each round, by who made the pairs and how; the first two are ours."""
    with tempfile.TemporaryDirectory() as folder:
        ca, cert, key = certificate(Path(folder))
        files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca]
        args = [*files, "--tls-auth-clients", "no"]
        with LocalMasters(MASTERS, server=server, args=args) as masters:
            ports = open_tls_ports(masters)
            secure = [f"rediss://127.0.0.1:{port}?ssl_ca_certs={ca}" for port in ports]
            with Redlock(masters.urls) as plain, Redlock(secure, master_timeout=1000) as tls:
                runs: dict[str, Callable[[int], float]] = {
                    "plain": partial(pair_us, plain),
                    "TLS": partial(pair_us, tls),
                }
                if has_floor():
                    bare = [master.port for master in masters]
                    runs["C, plain"] = lambda _: floor_us(bare, False)
                    runs["C, TLS"] = lambda _: floor_us(ports, True)
                rows: dict[str, list[float]] = {name: [] for name in runs}
                for serial in range(rounds + 1):
                    for name, run in runs.items():
                        rows[name].append(run(serial))
                return {name: row[1:] for name, row in rows.items()}  # the first one warms up


def text_of(who: str, plain: Sequence[float], tls: Sequence[float]) -> str:
    """For people."""
    ratios = sorted(b / a for a, b in zip(plain, tls, strict=True))
    times = f"{statistics.median(plain):.0f} us a pair, over TLS {statistics.median(tls):.0f} us"
    return (
        f"{who}: {times}; ratio of p50: median {statistics.median(ratios):.2f} "
        f"of {len(ratios)} rounds, {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", required=True, help="a redis-server that was built with TLS")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(argv)
    rows = list(measure(options.server, options.rounds).values())
    print(text_of("redlock_fast", *rows[:2]))
    if rows[2:]:
        print(text_of("the C client", *rows[2:]))


if __name__ == "__main__":
    main()
