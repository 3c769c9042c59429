from typing import NoReturn, final

@final
class Op:
    kind: int
    n: int
    k: int
    ttl_ms: int
    keys: list[bytes]
    tokens: list[bytes]
    asked_ns: int
    start_ns: int
    limit_ns: int
    ended: bool
    lasts_ms: int
    asked: int
    hoping: int
    closed: int
    def __init__(
        self,
        kind: int,
        n: int,
        keys: list[bytes],
        tokens: list[bytes],
        ttl_ms: int = ...,
        asked: int = ...,
    ) -> None: ...
    def verdict(self, item: int = ...) -> int: ...
    def verdicts(self) -> bytes: ...
    def reached(self, item: int = ...) -> int: ...
    def refused(self, item: int = ...) -> int: ...
    def votes(self, item: int = ...) -> tuple[int, int, int]: ...
    def outcomes(self) -> list[tuple[str | None, str, float | None]]: ...
    def __reduce__(self) -> NoReturn: ...

def new_op(
    kind: int, n: int, keys: list[bytes], tokens: list[bytes], ttl_ms: int, asked: int
) -> Op: ...
