# cython: annotation_typing=True
# (Not where C types stand in the .pxd: an annotation `int` would be a Python int.)
"""What a lock does next: try, judge, clean up, retry, extend, as generators.

A plan is driven by a facade's driver and never waits itself. It yields

    an Op          run this round to its end
    an int >= 0    sleep so many nanoseconds
    None           just tell the time

and is sent the time, in nanoseconds of the clock of all deadlines, when that is done. It returns
its result, or raises. A driver that stops early closes the generator; whatever a plan has sent by
then and nobody owns is cleaned up in its `finally`: the compare-and-deletes are queued, and go out
when the driver next sends.

Never: I/O, clocks, threads, arguments of users (the facades check them).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, TypeVar

import cython

from redlock_fast import rules
from redlock_fast._core.fleet import COUNTERS, Fleet
from redlock_fast._core.op import Op, new_op, single_op
from redlock_fast.errors import NoQuorum, Report
from redlock_fast.rules import NO, NO_QUORUM, YES, drift_ns, ns_of

log = logging.getLogger("redlock_fast")

T = TypeVar("T")
Plan = Generator["Op | int | None", int, T]

# Kinds of rounds, as `_core.op` numbers them.
ACQUIRE: Final = 1
EXTEND: Final = 2
RELEASE: Final = 3
OWNED: Final = 4
LOCKED: Final = 5

_ACQUIRED, _CONTENDED, _NO_QUORUM, _TOO_LATE, _RELEASED, _EXTENDED, _LOST = range(len(COUNTERS))

# States of a hold.
HELD: Final = 0
RELEASED: Final = 1
UNCONFIRMED: Final = 2  # a release had no quorum of answers; may be tried again
LOST: Final = 3

EVERYBODY: Final = 0xFFFFFFFF
FOREVER: Final = 1 << 62  # wait_ns of an open-ended wait

# Other threads, or tasks, get a turn after so many items of a batch: compiled loops keep the GIL.
TURN: Final = 4096

# An open-ended wait without a quorum warns once in so long.
_WARN_EVERY_NS = 60_000_000_000


class Settings:
    """What the plans of one client have in common.

    Args:
        retries: tries after the first.
        retry_delay_ns: upper bound of the random pause between two tries.
        drift_factor: share of a ttl that the clocks may be wrong by.
        draw: gives so many fresh tokens.
        jitter: draws from [0, 1).
        lock_type: the facade's subclass of `Hold`.
    """

    def __init__(
        self,
        retries: int,
        retry_delay_ns: int,
        drift_factor: float,
        draw: Callable[[int], list[bytes]],
        jitter: Callable[[], float],
        lock_type: type[Hold],
    ) -> None:
        self.retries = retries
        self.retry_delay_ns = retry_delay_ns
        self.drift_factor = drift_factor
        self.draw = draw
        self.jitter = jitter
        self.lock_type = lock_type
        self.warned_ns = -_WARN_EVERY_NS

    @cython.annotation_typing(False)
    def lasting_ns(self, ttl_ms: int) -> int:
        """What a ttl leaves after the drift: the validity before any time has passed."""
        ttl_ns = ns_of(ttl_ms)
        return ttl_ns - drift_ns(ttl_ns, self.drift_factor)


@cython.freelist(1024)  # or many that are held at a time make the garbage collector run
@cython.cclass
class Hold:
    """A lock as the plans see it; the facades' `Lock` objects add the verbs.

    Attributes:
        key: the resource, as bytes.
        secret: the token, as bytes.
        ttl_ms: what the key's expiry was last set to.
        reached: bits of the masters that the SET went to.
        deadline_ns: until when the lock is ours.
        validity_ns: what was left until then when the lock was granted.
        state: HELD, RELEASED, UNCONFIRMED or LOST.
        reason: why it is LOST: "foreign" or "expired".
        origin, item: the round and the item that it was granted by; None for an adopted lock.
        resource: the resource as the user named it (set by the facade, as the next three).
        owner: the client.
        process: stands for the process that took the lock.
        guard: serialises the extensions, made when it is needed.
    """

    # For type checkers; plan.pxd makes them fields of a C struct.
    key: bytes
    secret: bytes
    ttl_ms: int
    reached: int
    deadline_ns: int
    validity_ns: int
    state: int
    reason: str
    origin: Op | None
    item: int
    resource: str | bytes
    owner: Any
    process: Any
    guard: Any

    def claim(self, resource: str | bytes, owner: Any, process: Any) -> None:
        """The facade takes the lock over."""
        self.resource = resource
        self.owner = owner
        self.process = process

    @cython.annotation_typing(False)
    def voters(self) -> int:
        """Bits of the masters that may hold our key.

        Not those that answered "taken": if one of them has our token all the same, it is the same
        server as another one, and must not count twice.
        """
        if self.origin is None:
            return self.reached
        return self.reached & ~self.origin.refused(self.item)

    def lose(self, reason: str) -> None:
        """The lock is lost, for good."""
        self.state = LOST
        self.reason = reason


@cython.annotation_typing(False)
def _grant(
    settings: Settings,
    op: Op,
    item: int,
    reached: int,
    ttl_ms: int,
    deadline_ns: int,
    now_ns: int,
) -> Any:
    lock_type = settings.lock_type
    hold: Hold = lock_type.__new__(lock_type)
    hold.key = op.key_of(item)
    hold.secret = op.token_of(item)
    hold.ttl_ms = ttl_ms
    hold.reached = reached
    hold.deadline_ns = deadline_ns
    hold.validity_ns = deadline_ns - now_ns
    hold.state = HELD
    hold.reason = ""
    hold.origin = op if op.kind == ACQUIRE else None
    hold.item = item
    return hold


def reports(fleet: Fleet, op: Op) -> list[Report]:
    """What each master did in this round, in the order of the configuration."""
    rows = []
    for link, (outcome, cause, ms) in zip(fleet.links, op.outcomes(), strict=True):
        if outcome is None:
            outcome, cause = "unanswered", "not waited for"
        rows.append(Report(link.address, outcome, cause, ms))
    return rows


def no_quorum(fleet: Fleet, op: Op, what: str, results: Any = None) -> NoQuorum:
    """The error of a round that had no quorum of answers."""
    fleet.count(_NO_QUORUM)
    return NoQuorum(f"{what}: no quorum of answers", reports(fleet, op), results)


def tell(fleet: Fleet) -> None:
    """Log what has become of masters since the last time."""
    news, fleet.news[:] = fleet.news[:], []
    for address, word, cause in news:
        if word == "well":
            log.info("master %s answers again", address)
        elif word == "akin":
            log.warning("master %s %s", address, cause)
        else:
            log.warning("master %s fails: %s%s", address, word, cause and f": {cause}")


# -- acquire -------------------------------------------------------------------------------------


@cython.annotation_typing(False)
def attempt(fleet: Fleet, settings: Settings, key: bytes, ttl_ms: int) -> Op:
    """One try to acquire one lock: the round.

    Most locks are granted at once, so the first try is run without a plan. When it has ended,
    `granted` says what came of it, and `again` is the plan of what follows. Who stops before cleans
    the round up.
    """
    return single_op(ACQUIRE, fleet.n, key, settings.draw(1)[0], ttl_ms, EVERYBODY)


@cython.annotation_typing(False)
def granted(fleet: Fleet, settings: Settings, op: Op, now: int) -> Any:
    """The lock of a try that has ended; None: not granted, or too late, and it is cleaned up.

    Args:
        now: when it ended.
    """
    try:
        if op.verdict(0) == YES:
            deadline = op.start_ns + settings.lasting_ns(op.ttl_ms)
            if now < deadline:
                fleet.count(_ACQUIRED)
                return _grant(settings, op, 0, op.reached(0), op.ttl_ms, deadline, now)
    except BaseException:  # no memory, say
        fleet.clean_up(op)
        raise
    fleet.clean_up(op)
    return None


def again(
    fleet: Fleet, settings: Settings, op: Op, now: int, wait_ns: int | None
) -> Plan[tuple[Any, Op]]:
    """What follows the first try when it was not granted: pauses, and other tries.

    Args:
        op: the first try; `granted` has seen it.
        now: when it ended.
        wait_ns: None: `retries` decides; 0: that was it; else: keep trying that long from its start
            on (or FOREVER).

    Returns:
        The lock, or None when somebody else holds the lock; and the last round.

    Raises:
        NoQuorum: the last try had no quorum of usable answers, or had it too late.
    """
    pauses = _Pauses(settings, wait_ns)
    while True:
        word = op.verdict(0)
        # (Who had to wait for its turn began to wait then.)
        pause = pauses.after(op.asked_ns or op.start_ns, now)
        if pause < 0:
            break
        if word != NO and wait_ns == FOREVER:
            _warn(fleet, settings, op, now)
        yield pause
        op = attempt(fleet, settings, op.key_of(0), op.ttl_ms)
        try:
            now = yield op
        except BaseException:
            fleet.clean_up(op)
            raise
        hold = granted(fleet, settings, op, now)
        if hold is not None:
            return hold, op
    if word == NO:
        fleet.count(_CONTENDED)
        return None, op
    raise _failed(fleet, op, word)


def acquire_many(
    fleet: Fleet, settings: Settings, keys: list[bytes], ttl_ms: int, wait_ns: int | None
) -> Plan[list[Any]]:
    """Acquire many locks, each on its own; None for each that somebody else holds.

    What is undecided or taken is tried again as `wait_ns` says, while everything that was granted
    keeps half its validity. If any item ends without a quorum, what was granted is released.

    Raises:
        NoQuorum: some item ended without a quorum of usable answers.
    """
    lasting_ns = settings.lasting_ns(ttl_ms)
    pauses = _Pauses(settings, wait_ns)
    grants: list[Any] = [None] * len(keys)
    owned: list[tuple[Op, list[int]]] = []  # what to clean up unless all ends well
    left = list(range(len(keys)))
    failed: Op | None = None
    why = YES
    done = False
    hold: Hold
    item: cython.Py_ssize_t
    turn: cython.Py_ssize_t = TURN
    try:
        while left:
            names = [keys[j] for j in left]
            op = new_op(ACQUIRE, fleet.n, names, settings.draw(len(left)), ttl_ms, EVERYBODY)
            owned.append((op, list(range(len(left)))))
            now = yield op
            words = op.verdicts()
            deadline = op.start_ns + lasting_ns
            won: list[int] = []
            rest: list[int] = []
            failed = None
            for item, word in enumerate(words):
                if word == YES and now < deadline:
                    won.append(item)
                    grants[left[item]] = _grant(
                        settings, op, item, op.reached(item), ttl_ms, deadline, now
                    )
                else:
                    rest.append(item)
                    if word != NO:
                        failed = op
                        why = NO_QUORUM if NO_QUORUM in words else YES
                if item % turn == turn - 1:
                    now = yield 0
            owned[-1] = (op, won)
            if rest:
                fleet.clean_up(op, rest)
            left = [left[item] for item in rest]
            if not left:
                break
            pause = pauses.after(op.asked_ns or op.start_ns, now)
            oldest = min((grant.deadline_ns for grant in grants if grant is not None), default=None)
            if pause < 0 or (oldest is not None and oldest - now - pause < lasting_ns // 2):
                break
            yield pause
        if failed is None:
            for grant in grants:
                if grant is not None:
                    hold = grant
                    if now >= hold.deadline_ns:
                        failed = owned[0][0]  # granted early, and the later rounds took too long
                        why = YES
                        break
        done = failed is None
    finally:
        if not done:
            for op, items in owned:
                fleet.clean_up(op, items)
    if failed is not None:
        raise _failed(fleet, failed, why)
    for grant in grants:
        fleet.count(_CONTENDED if grant is None else _ACQUIRED)
    return grants


def _failed(fleet: Fleet, op: Op, word: int) -> NoQuorum:
    if word == YES:
        fleet.count(_TOO_LATE)
        return NoQuorum(
            "cannot acquire: a quorum granted too late, nothing of the validity is left",
            reports(fleet, op),
        )
    return no_quorum(fleet, op, "cannot acquire")


class _Pauses:
    """How long to pause after each try, from `retries` or from `wait`."""

    __slots__ = ("give_up_ns", "last", "settings", "tries", "wait_ns")

    def __init__(self, settings: Settings, wait_ns: int | None) -> None:
        self.settings = settings
        self.wait_ns = wait_ns
        self.tries = 0
        self.last = wait_ns == 0
        self.give_up_ns = -1

    def after(self, start_ns: int, now_ns: int) -> int:
        """The pause after a try that started at `start_ns`; -1: that was the last one."""
        settings = self.settings
        self.tries += 1
        if self.last:
            return -1
        left = -1
        if self.wait_ns is None:
            if self.tries > settings.retries:
                return -1
        else:
            if self.give_up_ns < 0:
                self.give_up_ns = start_ns + self.wait_ns
            left = max(self.give_up_ns - now_ns, 0)
        pause: int
        pause, self.last = rules.pause_ns(left, settings.retry_delay_ns, settings.jitter())
        return pause


def _warn(fleet: Fleet, settings: Settings, op: Op, now: int) -> None:
    if now - settings.warned_ns >= _WARN_EVERY_NS:
        settings.warned_ns = now
        rows = "; ".join(map(str, reports(fleet, op)))
        log.warning("waiting for a lock without a limit while there is no quorum: %s", rows)


def disown(fleet: Fleet, result: Any) -> None:
    """Nobody will get this result of a plan: have the locks deleted that were granted in it."""
    rows: dict[Op, list[int]] = {}
    for hold in result if isinstance(result, (tuple, list)) else [result]:
        if isinstance(hold, Hold) and hold.origin is not None:
            rows.setdefault(hold.origin, []).append(hold.item)
    for op, items in rows.items():
        fleet.clean_up(op, items)


# -- what is held --------------------------------------------------------------------------------


def release(fleet: Fleet, hold: Hold) -> Plan[tuple[bool | None, Op]]:
    """Release one lock; see `release_many`."""
    op = deletion(fleet, hold)
    yield op
    return deleted(fleet, hold, op), op


@cython.annotation_typing(False)
def deletion(fleet: Fleet, hold: Hold) -> Op:
    """The round of `release`, for a driver that runs it without a plan; then `deleted`."""
    # If this is interrupted from here on, the lock may be released again.
    hold.state = UNCONFIRMED
    op = single_op(RELEASE, fleet.n, hold.key, hold.secret, -1, hold.reached)
    op.lasts_ms = hold.ttl_ms
    return op


@cython.annotation_typing(False)
def deleted(fleet: Fleet, hold: Hold, op: Op) -> bool | None:
    """What came of the round of `release`, which has ended."""
    return _released(fleet, hold, op.verdict(0))  # type: ignore[no-any-return]


def release_many(fleet: Fleet, holds: Sequence[Hold]) -> Plan[tuple[list[bool | None], Op]]:
    """Release locks, in one round.

    Returns:
        Per lock: True, it was ours on a quorum until now; False, it was not; None, no quorum of
        answers. And the round. The holds' states are set.
    """
    hold: Hold
    item: cython.Py_ssize_t
    turn: cython.Py_ssize_t = TURN
    asked: cython.uint = 0
    lasts_ms: cython.longlong = 0
    keys: list[bytes] = []
    secrets: list[bytes] = []
    for hold in holds:
        asked |= hold.reached
        lasts_ms = max(lasts_ms, hold.ttl_ms)
        keys.append(hold.key)
        secrets.append(hold.secret)
        hold.state = UNCONFIRMED
    op = new_op(RELEASE, fleet.n, keys, secrets, -1, asked)
    op.lasts_ms = lasts_ms
    yield op
    results: list[bool | None] = []
    for item, word in enumerate(op.verdicts()):
        hold = holds[item]
        results.append(_released(fleet, hold, word))
        if item % turn == turn - 1:
            yield 0
    return results, op


@cython.annotation_typing(False)
def _released(fleet: Fleet, hold: Hold, word: int) -> bool | None:
    if word == YES:
        hold.state = RELEASED
        fleet.count(_RELEASED)
        return True
    if word == NO:
        hold.lose("foreign")
        fleet.count(_LOST)
        return False
    return None


def release_token(fleet: Fleet, key: bytes, secret: bytes) -> Plan[bool]:
    """Release by token alone.

    Raises:
        NoQuorum: no quorum of answers.
    """
    op = single_op(RELEASE, fleet.n, key, secret, -1, EVERYBODY)
    yield op
    if op.verdict(0) == NO_QUORUM:
        raise no_quorum(fleet, op, "cannot release")
    if op.verdict(0) == YES:
        fleet.count(_RELEASED)
    return bool(op.verdict(0) == YES)


def extend(
    fleet: Fleet, settings: Settings, holds: Sequence[Hold], ttl_ms: int
) -> Plan[tuple[list[bool | None], Op | None]]:
    """Extend locks to `ttl_ms` from now on, in one round (or one for each set of voters).

    Before it is sent, a deadline becomes the earlier of the old and the new one; it rises only on
    success. Answers that come after the old deadline do not count, however many.

    Returns:
        Per lock: True; False, it is lost; None, no quorum of answers (held until its deadline).
        And the round, None when there was none.
    """
    lasting_ns = settings.lasting_ns(ttl_ms)
    now = yield None
    results: list[bool | None] = [False] * len(holds)
    # By who may vote: a master that refused one lock of a batch may well hold another.
    todo: dict[int, list[tuple[int, Hold, int]]] = {}
    expired: list[Hold] = []
    foreign: list[Hold] = []
    for i, hold in enumerate(holds):
        if hold.state != HELD:
            continue
        if now >= hold.deadline_ns:
            expired.append(hold)
            continue
        todo.setdefault(hold.voters(), []).append((i, hold, hold.deadline_ns))
        hold.deadline_ns = min(hold.deadline_ns, now + lasting_ns)
        if i % TURN == TURN - 1:
            now = yield 0
    op = failed = None
    for voters, rows in todo.items():
        op = new_op(
            EXTEND,
            fleet.n,
            [hold.key for _, hold, _ in rows],
            [hold.secret for _, hold, _ in rows],
            ttl_ms,
            voters,
        )
        now = yield op
        deadline = op.start_ns + lasting_ns
        for item, word in enumerate(op.verdicts()):
            i, hold, old = rows[item]
            if item % TURN == TURN - 1:
                yield 0
            if hold.state != HELD:
                continue  # released meanwhile, by another thread
            if word == NO:
                foreign.append(hold)
            elif now >= min(old, deadline):
                expired.append(hold)
            elif word == YES:
                hold.deadline_ns = deadline
                hold.ttl_ms = ttl_ms
                fleet.count(_EXTENDED)
                results[i] = True
            else:
                results[i] = None
                failed = op
    # A minority may have set the new expiry.
    _lose(fleet, foreign, "foreign", ttl_ms)
    _lose(fleet, expired, "expired", ttl_ms)
    return results, failed or op


def _lose(fleet: Fleet, holds: Iterable[Hold], reason: str, ttl_ms: int) -> None:
    """These are lost: never revived, and what is left of them is deleted."""
    holds = list(holds)
    if not holds:
        return
    asked = 0
    for hold in holds:
        hold.lose(reason)
        fleet.count(_LOST)
        asked |= hold.reached
    ttl_ms = max(ttl_ms, *(hold.ttl_ms for hold in holds))
    lost = new_op(EXTEND, fleet.n, [h.key for h in holds], [h.secret for h in holds], ttl_ms, asked)
    fleet.clean_up(lost)


def adopt(fleet: Fleet, settings: Settings, key: bytes, secret: bytes, ttl_ms: int) -> Plan[Any]:
    """Take over a lock by its token: one extension on every master.

    Raises:
        NoQuorum: no quorum of answers.
    """
    op = single_op(EXTEND, fleet.n, key, secret, ttl_ms, EVERYBODY)
    now = yield op
    deadline = op.start_ns + settings.lasting_ns(ttl_ms)
    if op.verdict(0) == NO_QUORUM:
        raise no_quorum(fleet, op, "cannot adopt")
    if op.verdict(0) == YES and now < deadline:
        fleet.count(_EXTENDED)
        return _grant(settings, op, 0, EVERYBODY, ttl_ms, deadline, now)
    fleet.count(_LOST)
    fleet.clean_up(op)
    return None


def look(fleet: Fleet, kind: int, key: bytes, secret: bytes, asked: int) -> Plan[bool]:
    """Ask the masters: OWNED, does a quorum hold our token; LOCKED, does a quorum hold anything.

    Raises:
        NoQuorum: no quorum of answers.
    """
    op = single_op(kind, fleet.n, key, secret, -1, asked)
    yield op
    if op.verdict(0) == NO_QUORUM:
        raise no_quorum(fleet, op, "cannot tell who holds the lock")
    return bool(op.verdict(0) == YES)
