from collections import deque
from collections.abc import Callable
from typing import Any, final

from redlock_fast._core.op import Op
from redlock_fast._core.seal import Seal
from redlock_fast._core.wire import Replies
from redlock_fast.options import MasterOptions
from redlock_fast.resolve import Answer

@final
class Link:
    index: int
    options: MasterOptions
    state: int
    suspect: bool
    unsent: int
    stuck: bool
    patience_ns: int
    retry_ns: int
    dial_limit_ns: int
    answer: Answer | None
    between: bool
    seal: Seal | None
    outcome: str
    cause: str
    debts: deque[tuple[Op, int, int]]
    client_id: int | None
    run_id: str
    local: str
    leftovers: deque[tuple[int, str, str]]
    answers: int
    reconnects: int
    errors: dict[str, int]
    took_ns: int
    def __new__(
        cls,
        index: int,
        options: MasterOptions,
        replies: Replies,
        patience_ns: int,
        jitter: Callable[[], float],
        news: list[tuple[str, str, str]] | None,
    ) -> Link: ...
    @property
    def address(self) -> str: ...
    @property
    def owed(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
