"""Commands, byte by byte, and the kinds of errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.world import QUICK, commands, resp

from redlock_fast import scripts
from redlock_fast._core import wire

TOKEN = b"0123456789abcdef0123456789abcdef01234567"
SCRIPTS = [scripts.RELEASE, scripts.EXTEND, scripts.LOOK]

# C119, and a few more.
HOSTILE = [
    b"a\r\nSET pwn 1\r\n",
    b"a\0b",
    b"a\0c",
    b" ",
    b"%s%n%d%x",
    b"{x}",
    b"*",
    b"*3\r\n$3\r\nSET\r\n$3\r\npwn\r\n$1\r\n1\r\n",
    b"'\"\\",
    b"\r\n",
    b"\n",
    b"\0",
    "\U0001f512".encode(),
    "\ufeff".encode(),
    bytes(range(256)),
    b"x" * 65536,
    b"\r\n" * 32768,
]
hostile = pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:12])[2:-1])


def test_set_is_one_command_with_token_and_expiry() -> None:
    assert wire.build_set(b"lock:a", TOKEN, 5000) == (
        b"*6\r\n$3\r\nSET\r\n$6\r\nlock:a\r\n$40\r\n" + TOKEN + b"\r\n"
        b"$2\r\nNX\r\n$2\r\nPX\r\n$4\r\n5000\r\n"
    )


def test_script_by_its_hash() -> None:
    assert wire.build_script(scripts.RELEASE, False, b"lock:a", TOKEN) == (
        b"*5\r\n$7\r\nEVALSHA\r\n$40\r\n" + scripts.RELEASE.sha + b"\r\n"
        b"$1\r\n1\r\n$6\r\nlock:a\r\n$40\r\n" + TOKEN + b"\r\n"
    )


def test_script_in_full_with_an_argument() -> None:
    text = scripts.EXTEND.text
    assert wire.build_script(scripts.EXTEND, True, b"a", b"t", 70) == (
        b"*6\r\n$4\r\nEVAL\r\n$%d\r\n%s\r\n$1\r\n1\r\n$1\r\na\r\n$1\r\nt\r\n$2\r\n70\r\n"
        % (len(text), text)
    )


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("arg_ms", [-1, 0, 1, 1000, 2**42])
def test_script_words(script: Any, full: bool, arg_ms: int) -> None:
    head = [b"EVAL", script.text] if full else [b"EVALSHA", script.sha]
    tail = [] if arg_ms < 0 else [arg_ms]
    found = wire.build_script(script, full, b"key", TOKEN, arg_ms)
    assert found == resp(*head, 1, b"key", TOKEN, *tail)


def test_the_argument_is_left_out_by_default() -> None:
    assert commands(wire.build_script(scripts.LOOK, False, b"k", b"t"))[0][-1] == b"t"


@pytest.mark.case("C35")
@pytest.mark.case("C125")
@pytest.mark.parametrize(
    "ttl_ms",
    [0, 1, 9, 10, 11, 99, 100, 1000, 2**31 - 1, 2**31, 2**32, 10**12, 2**42, 2**63 - 1],
)
def test_numbers(ttl_ms: int) -> None:
    assert wire.build_set(b"k", b"t", ttl_ms) == resp("SET", "k", "t", "NX", "PX", ttl_ms)
    assert wire.build_script(scripts.EXTEND, False, b"k", b"t", ttl_ms) == resp(
        "EVALSHA", scripts.EXTEND.sha, 1, "k", "t", ttl_ms
    )


@pytest.mark.case("C119")
@hostile
def test_c119_a_name_is_its_exact_bytes(name: bytes) -> None:
    assert wire.build_set(name, TOKEN, 1) == resp("SET", name, TOKEN, "NX", "PX", 1)
    for full in (False, True):
        words = commands(wire.build_script(scripts.RELEASE, full, name, TOKEN))
        assert [command[3] for command in words] == [name]


@pytest.mark.case("C119")
def test_c119_names_that_differ_behind_a_nul_stay_two() -> None:
    assert wire.build_set(b"a\0b", TOKEN, 1) != wire.build_set(b"a\0c", TOKEN, 1)


@given(st.binary(), st.binary(), st.integers(0, 2**63 - 1))
@QUICK
def test_any_words(key: bytes, token: bytes, ttl_ms: int) -> None:
    assert wire.build_set(key, token, ttl_ms) == resp("SET", key, token, "NX", "PX", ttl_ms)
    assert wire.build_script(scripts.EXTEND, True, key, token, ttl_ms) == resp(
        "EVAL", scripts.EXTEND.text, 1, key, token, ttl_ms
    )


@pytest.mark.parametrize("size", [9, 10, 99, 100, 507, 508, 512, 999, 1000, 65535, 65536])
def test_lengths_around_the_edges_of_digits_and_buffers(size: int) -> None:
    name = b"n" * size
    assert wire.build_set(name, name, 7) == resp("SET", name, name, "NX", "PX", 7)


@pytest.mark.parametrize("wrong", [None, "k", 1, bytearray(b"k"), memoryview(b"k")])
def test_only_bytes_are_taken(wrong: Any) -> None:
    with pytest.raises(TypeError):
        wire.build_set(wrong, b"t", 1)
    with pytest.raises(TypeError):
        wire.build_set(b"k", wrong, 1)
    with pytest.raises(TypeError):
        wire.build_script(scripts.LOOK, False, wrong, b"t")


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NOSCRIPT No matching script. Please use EVAL.", "NOSCRIPT"),
        ("NOAUTH Authentication required.", "NOAUTH"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "WRONGPASS"),
        ("NOPERM this user has no permissions to run the 'eval' command", "NOPERM"),
        ("READONLY You can't write against a read only replica.", "READONLY"),
        ("LOADING Redis is loading the dataset in memory", "LOADING"),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL", "BUSY"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "OOM"),
        ("MISCONF Redis is configured to save RDB snapshots", "MISCONF"),
        ("MOVED 15784 10.9.9.9:7003", "MOVED"),
        ("ASK 15784 10.9.9.9:7003", "ASK"),
        ("CROSSSLOT Keys in request don't hash to the same slot", "CROSSSLOT"),
        ("CLUSTERDOWN Hash slot not served", "CLUSTERDOWN"),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is 'no'.", "MASTERDOWN"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "TRYAGAIN"),
        ("NOREPLICAS Not enough good replicas to write.", "NOREPLICAS"),
        ("DENIED Redis is running in protected mode because", "DENIED"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "WRONGTYPE"),
        ("ERR max number of clients reached", "MAXCLIENTS"),
        ("ERR max number of clients + cluster connections reached", "MAXCLIENTS"),
        ("ERR invalid password", "WRONGPASS"),
        ("ERR Client sent AUTH, but no password is set", "WRONGPASS"),
        ("ERR syntax error", "ERR"),
        ("ERR", "ERR"),
        ("", "ERR"),
        ("noscript lower case", "ERR"),
        ("NOSCRIPTS a longer word", "ERR"),
        (" NOSCRIPT behind a blank", "ERR"),
        ("SOMETHING new", "ERR"),
        ("NOSCRIPT", "NOSCRIPT"),
    ],
)
def test_error_kind(text: str, kind: str) -> None:
    assert wire.error_kind(text) == kind


@pytest.mark.case("C49")
def test_c49_error_wrapped_by_the_script_engine() -> None:
    text = (  # redis 6, from `redis.call('del', ...)` on a replica
        "ERR Error running script (call to f_cd4d41cc936df6deb6be1aaa7979150b317b0b9e): "
        "@user_script:2: @user_script: 2: -READONLY You can't write against a read only replica."
    )
    assert wire.error_kind(text) == "READONLY"
