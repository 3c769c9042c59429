"""The Lua scripts are constants, and their hashes are right. (Integration tests run them.)"""

from __future__ import annotations

import hashlib
import re

import pytest

from redlock_fast import scripts

ALL = {"release": scripts.RELEASE, "extend": scripts.EXTEND, "look": scripts.LOOK}
each = pytest.mark.parametrize("script", ALL.values(), ids=ALL)


@each
def test_the_hash_is_the_sha1_of_the_text(script: scripts.Script) -> None:
    assert type(script.text) is bytes
    assert type(script.sha) is bytes
    assert script.sha == hashlib.sha1(script.text).hexdigest().encode()
    assert re.fullmatch(rb"[0-9a-f]{40}", script.sha)


@pytest.mark.case("C157")
def test_c157_texts_are_constants() -> None:
    """Pinned, so that a change is meant: every text stays in the masters' caches for ever."""
    assert {name: script.sha.decode() for name, script in ALL.items()} == {
        "release": "cd4d41cc936df6deb6be1aaa7979150b317b0b9e",
        "extend": "82d3eb59e55c7cce63c5badbe8ac3d0e7ba6a15a",
        "look": "126feaa2e3f8c4ce3aef26f107d0efd86612c398",
    }


@pytest.mark.case("C58")
@each
def test_c58_only_keys_1_is_touched(script: scripts.Script) -> None:
    text = script.text.decode("ascii")
    calls = re.findall(r"redis\.p?call\((.*?)\)", text)
    assert calls
    for call in calls:
        assert call.split(", ")[1] == "KEYS[1]"
    assert set(re.findall(r"KEYS\[.\]", text)) == {"KEYS[1]"}


@pytest.mark.case("C81")
@each
def test_c81_the_comparison_is_done_on_the_server(script: scripts.Script) -> None:
    lines = script.text.decode("ascii").split("\n")
    returned = {
        line.rpartition("return ")[2].removesuffix(" end") for line in lines if "return" in line
    }
    assert "held == ARGV[1]" in script.text.decode()
    assert returned <= {
        "-1",
        "0",
        "1",
        "held",  # an error, checked to be a table
        "redis.call('del', KEYS[1])",
        "redis.call('pexpire', KEYS[1], ARGV[2])",
    }


@each
def test_least_permission(script: scripts.Script) -> None:
    """Rule 10: +get +del +pexpire, and nothing else from within scripts."""
    commands = set(re.findall(r"redis\.p?call\('(\w+)'", script.text.decode()))
    assert commands <= {"get", "del", "pexpire"}
    if script is scripts.LOOK:
        assert commands == {"get"}


def test_scripts_are_three_and_differ() -> None:
    assert len({script.sha for script in ALL.values()}) == 3
    found = {name for name, value in vars(scripts).items() if isinstance(value, scripts.Script)}
    assert found == {"RELEASE", "EXTEND", "LOOK"}
