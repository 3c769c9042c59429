# cython: annotation_typing=False
"""Drives plans for threads: rounds through the shared pump, sleeps, and the janitor.

Given a plan, runs it to its end in the calling thread. All threads of a client share one `Driver`
and its pump. While debts exist and nobody may come along to pay them, and only then, a daemon
thread (the janitor) looks after the connections.
"""

from __future__ import annotations

import logging
import threading
from typing import TypeVar

from redlock_fast._core.fleet import Fleet
from redlock_fast._core.io import Pump, now_ns
from redlock_fast._core.op import Op
from redlock_fast.errors import ClosedError
from redlock_fast.plan import Plan

log = logging.getLogger("redlock_fast")

T = TypeVar("T")

# A sleeping thread wakes so often for signals that were delivered to another thread.
_TICK_S = 0.1
# The janitor looks so often; debts are paid at once when a connection is there.
_JANITOR_S = 0.02


class Driver:
    """Runs the plans of one client.

    Args:
        fleet: the client's masters.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.pump = Pump(fleet)
        self._closed = threading.Event()
        self._janitor: threading.Thread | None = None

    def drive(self, plan: Plan[T]) -> T:
        """Run a plan to its end; its result is ours, and so is what it raises.

        Raises:
            ClosedError: the client is closed, or was closed meanwhile.
        """
        pump = self.pump
        try:
            step = next(plan)
            while True:
                if type(step) is Op:
                    now = pump.run(step)
                elif step is None:
                    now = now_ns()
                else:
                    now = self._sleep(step)
                step = plan.send(now)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            # Does nothing after a regular end; else lets the plan clean up what it has sent.
            plan.close()
            if pump.settle():
                self._settle()

    def _sleep(self, pause_ns: int) -> int:
        """Sleep, interruptible by signals and by `close`. Returns the time."""
        self.pump.settle()
        until = now_ns() + pause_ns
        left = pause_ns / 1e9
        while True:
            if self._closed.wait(min(left, _TICK_S)):
                raise ClosedError("the client was closed while the call waited")
            now = now_ns()
            if now >= until:
                return now
            left = (until - now) / 1e9

    def _settle(self) -> None:
        """There is news for the log, or debts that nobody may be there to pay."""
        news, self.fleet.news[:] = self.fleet.news[:], []
        for address, word, cause in news:
            if word == "well":
                log.info("master %s answers again", address)
            else:
                log.warning("master %s fails: %s%s", address, word, cause and f": {cause}")
        if self.fleet.indebted and not self._closed.is_set():
            janitor = self._janitor
            if janitor is None or not janitor.is_alive():
                janitor = threading.Thread(
                    target=self._pay, name="redlock_fast-janitor", daemon=True
                )
                self._janitor = janitor
                janitor.start()

    def _pay(self) -> None:
        try:
            while self.fleet.indebted and not self._closed.wait(_JANITOR_S):
                self.pump.idle(0)
        except ClosedError:
            pass

    def connect(self, limit_ns: int) -> None:
        """Open the connections; returns when each is ready or has failed, or after `limit_ns`."""
        until = now_ns() + limit_ns
        self.pump.idle(0)
        while self.fleet.connecting and now_ns() < until:
            self.pump.idle(min(until - now_ns(), 10_000_000))
        if self.pump.settle():
            self._settle()

    def close(self, limit_ns: int) -> None:
        """End waiting callers with ClosedError, pay debts for `limit_ns` at most, disconnect."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.pump.shut()
        until = now_ns() + limit_ns
        while now_ns() < until and (self.pump.callers or self.fleet.unsettled):
            self.pump.last_call(min(until - now_ns(), 5_000_000))
        self.pump.tear_down()
