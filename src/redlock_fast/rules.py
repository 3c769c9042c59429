"""The arithmetic of the lock: quorum, drift, deadlines, verdicts, pauses.

Pure functions of numbers: no clock, no randomness, no I/O, no state; the caller passes all three.
Times are whole nanoseconds unless a name says `_ms`. Compiled through `rules.pxd`, and importable
as it stands; tests run both.

Source: "Distributed Locks with Redis", sections "The Redlock Algorithm" and "Safety arguments".
"""

from __future__ import annotations

NS_PER_MS = 1_000_000
# The longest duration that is accepted, in ms (139 years): far from any overflow in int64
# nanoseconds here and in the masters' own arithmetic.
MAX_MS = 2**42
# An open-ended wait without a retry delay still leaves the masters this long between two tries.
MIN_PAUSE_NS = 5 * NS_PER_MS
# Back-off of a master that fails, doubling from the first to the second.
BACKOFF_FIRST_NS = 10 * NS_PER_MS
BACKOFF_LAST_NS = 500 * NS_PER_MS

# Verdicts about one lock in one round. YES: granted, ours. NO: taken, lost.
UNDECIDED = 0
YES = 1
NO = 2
NO_QUORUM = 3


def quorum(n: int) -> int:
    """How many of `n` configured masters must agree."""
    return n // 2 + 1


def acquire_verdict(yes: int, no: int, still_open: int, n: int) -> int:
    """The verdict of a try with `yes` grants, `no` refusals ("taken") and `still_open` masters.

    Decided as soon as a quorum granted; or when no grant is possible any more and it is settled
    whether that is contention (a quorum gave a usable answer) or the lack of a quorum.
    """
    q = n // 2 + 1
    if yes >= q:
        return 1
    if yes + still_open >= q:
        return 0
    if yes + no >= q:
        return 2
    if yes + no + still_open < q:
        return 3
    return 0


def holder_verdict(yes: int, no: int, still_open: int, n: int) -> int:
    """The verdict of an extension, a release or a query about a key that should be ours.

    `yes` masters said ours, `no` said foreign or missing. Lost only when "not ours" leaves no
    quorum that could hold the key: more than `n - quorum` masters.
    """
    q = n // 2 + 1
    if yes >= q:
        return 1
    if no > n - q:
        return 2
    if yes + still_open < q and no + still_open <= n - q:
        return 3
    return 0


def drift_ns(ttl_ns: int, factor: float) -> int:
    """What to allow for the error of the client's and of a server's clock over `ttl_ns`.

    `factor` of it, rounded up, and 2 ms: the page's allowance for the resolution of a server's
    expiry (1 ms) and of a client's clock, as the clients in the field have it too.
    """
    share = ttl_ns * factor
    whole = int(share)
    return whole + (whole < share) + 2_000_000


def ns_of(ms: int) -> int:
    """Milliseconds in nanoseconds."""
    return ms * 1_000_000


def deadline_ns(start_ns: int, ttl_ns: int, drift: int) -> int:
    """Until when a lock is ours whose try started at `start_ns`."""
    return start_ns + ttl_ns - drift


def backoff_ns(failures: int, jitter: float) -> int:
    """How long to leave a master alone after `failures` failures in a row; `jitter` in [0, 1)."""
    if failures <= 0:
        return 0
    full = BACKOFF_LAST_NS
    if failures < 7:
        full = min(full, BACKOFF_FIRST_NS << (failures - 1))
    return full - int(full * jitter / 2)


def pause_ns(left_ns: int, retry_delay_ns: int, jitter: float) -> tuple[int, bool]:
    """How long to sleep before the next try, and whether that try is the last one.

    The pause is uniform in [0, retry_delay], `jitter` in [0, 1) being the draw. `left_ns` is what
    is left of a wait, negative when there is no such limit. A pause that would pass the limit is
    clipped, so that one last try starts just before it; at the limit there is none: (-1, True).
    """
    pause = int(retry_delay_ns * jitter)
    if left_ns < 0:
        return pause, False
    if left_ns == 0:
        return -1, True
    pause = max(pause, MIN_PAUSE_NS)
    # A millisecond early: sleeps overshoot, and the try has to start before the limit.
    if pause < left_ns - NS_PER_MS:
        return pause, False
    return max(left_ns - NS_PER_MS, 0), True
