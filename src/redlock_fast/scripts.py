"""The Lua scripts that run on the masters, as constant texts, and their SHA-1.

A leaf. SHA-1 is the protocol's choice, not ours: `EVALSHA` finds a script by it, and a test asks a
real server whether these are right. Texts are constant (names, tokens and times travel as KEYS and
ARGV), so the script cache of a master holds one entry per script for ever.

Every script touches KEYS[1] alone, and compares the token on the server, so a foreign value of any
size never travels. All answer with an integer:

    1   the key held our token (and was deleted, extended, or just looked at)
    0   the key holds something else (also a key of another type: `pcall` and WRONGTYPE)
   -1   there is no such key
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final, NamedTuple


class Script(NamedTuple):
    """One script: what `EVAL` sends, and the hash that `EVALSHA` sends."""

    text: bytes
    sha: bytes


def _script(action: str) -> Script:
    # A reply other than WRONGTYPE that is an error (NOPERM, say) is handed on as that error.
    lines = (
        "local held = redis.pcall('get', KEYS[1])",
        "if held == ARGV[1] then " + action + " end",
        "if type(held) == 'table' and held.err then",
        "  if string.find(held.err, 'WRONGTYPE', 1, true) then return 0 end",
        "  return held",
        "end",
        "if held then return 0 end",
        "return -1",
    )
    text = "\n".join(lines).encode("ascii")
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode("ascii"))


# KEYS[1] resource, ARGV[1] token
RELEASE: Final = _script("return redis.call('del', KEYS[1])")
# KEYS[1] resource, ARGV[1] token, ARGV[2] new ttl in ms; a shorter ttl is set too
EXTEND: Final = _script("return redis.call('pexpire', KEYS[1], ARGV[2])")
# KEYS[1] resource, ARGV[1] token; changes nothing
LOOK: Final = _script("return 1")
