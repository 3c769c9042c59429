from typing import TypeVar, final

from redlock_fast._core.fleet import Fleet
from redlock_fast._core.pump import Pump
from redlock_fast.plan import Plan

_T = TypeVar("_T")

@final
class Driver:
    fleet: Fleet
    pump: Pump
    def __init__(self, fleet: Fleet) -> None: ...
    def drive(self, plan: Plan[_T]) -> _T: ...
    def hand_over(self, locks: object) -> None: ...
    def connect(self, limit_ns: int) -> None: ...
    def close(self, limit_ns: int) -> None: ...
