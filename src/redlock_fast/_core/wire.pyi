from typing import final

from redlock_fast.scripts import Script

@final
class Replies:
    integer: int
    text: str

def error_kind(text: str) -> str: ...
def build_set(key: bytes, token: bytes, ttl_ms: int) -> bytes: ...
def build_script(
    script: Script, full: bool, key: bytes, token: bytes, arg_ms: int = ...
) -> bytes: ...
