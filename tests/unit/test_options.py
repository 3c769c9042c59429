"""Settings from URLs, dicts and redis-py clients, and that no secret leaves by another door."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import ipaddress
import json
import os
import pickle
import socket
import subprocess
import sys
import types
from collections import UserDict, UserList
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.settings import CLIENTS, LIBRARIES, one, refused

from redlock_fast._settings import keywords as keywords_module
from redlock_fast._settings import urls as urls_module
from redlock_fast.errors import ConfigurationError, RedlockError
from redlock_fast.options import MAX_MASTERS, MasterOptions, Secret, parse_masters

redis, redis_asyncio, valkey, _ = LIBRARIES

case = pytest.mark.case
PASSWORD = "p@ss:w/rd#?%25$ é"  # C91's


def place(options: MasterOptions) -> tuple[socket.AddressFamily, Any]:
    """The only place of a master that needs no look-up."""
    assert (options.host, options.port) == (None, 0)
    (only,) = options.places
    return only


def revealed(options: MasterOptions) -> bytes | None:
    return None if options.password is None else options.password.reveal()


# ---- the sequence ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "masters",
    [
        "redis://127.0.0.1",
        b"redis://127.0.0.1",
        bytearray(b"redis://127.0.0.1"),
        {"host": "127.0.0.1"},
        {"redis://127.0.0.1"},
        iter(["redis://127.0.0.1"]),
        None,
        5,
        redis.Redis(),
    ],
)
def test_masters_must_be_a_sequence(masters: Any) -> None:
    assert "list or tuple" in refused(masters)


def test_any_sequence_will_do() -> None:
    want = parse_masters(["redis://127.0.0.1:1", {"host": "127.0.0.1", "port": 2}])
    assert [master.address for master in want] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert parse_masters(("redis://127.0.0.1:1", UserDict(host="127.0.0.1", port=2))) == want
    assert parse_masters(UserList(["redis://127.0.0.1:1", "redis://127.0.0.1:2"])) == want


def test_number_of_masters() -> None:
    urls = [f"redis://127.0.0.1:{port}" for port in range(1, MAX_MASTERS + 2)]
    assert MAX_MASTERS == 32
    assert len(parse_masters(urls[:-1])) == MAX_MASTERS
    assert "1 to 32, not 33" in refused(urls)
    assert "1 to 32, not 0" in refused([])


@pytest.mark.parametrize("master", [None, 5, b"redis://127.0.0.1", ["127.0.0.1", 6379], object()])
def test_a_master_of_another_type(master: Any) -> None:
    message = refused([master])
    assert message.startswith("masters[0]: expected a redis://, rediss:// or unix:// URL, a dict")
    assert message.endswith(f"not {type(master).__name__}")


def test_the_message_names_the_master() -> None:
    assert refused(["redis://127.0.0.1", {"port": 0}]).startswith("masters[1]: port must be")


def test_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError):
        parse_masters([])
    with pytest.raises(RedlockError):
        parse_masters([])


# ---- twice the same --------------------------------------------------------------------------


@case("C28")
@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("redis://127.0.0.1:7", "redis://127.0.0.1:7/0", "127.0.0.1:7 db 0"),
        ("redis://localhost:7", "redis://127.0.0.1:7", "127.0.0.1:7 db 0"),
        ("redis://127.0.0.1", {"host": "LOCALHOST"}, "localhost:6379 db 0"),
        ("redis://127.0.0.1:7/3", {"host": "127.0.0.1", "port": 7, "db": 3}, "127.0.0.1:7 db 3"),
        ("redis://u:p@127.0.0.1:7", "redis://127.0.0.1:7", "127.0.0.1:7 db 0"),
        ("redis://[::1]:7", "redis://[0:0::0001]:7", "[::1]:7 db 0"),
        ("redis://[FD00::A]", {"host": "fd00:0::a"}, "[fd00::a]:6379 db 0"),
        ("redis://[::ffff:127.0.0.1]", "redis://", "localhost:6379 db 0"),
        ("redis://[::ffff:7f00:1]", {}, "localhost:6379 db 0"),
        ("redis://[fe80::1%25lo]", "redis://[fe80::1%lo]", "[fe80::1%lo]:6379 db 0"),
        ("redis://[fe80::1%lo]", {"host": "fe80::1%1"}, "[fe80::1%1]:6379 db 0"),
        ("unix:///tmp/x", {"unix_socket_path": "/tmp/../tmp/./x"}, "unix:/tmp/../tmp/./x db 0"),
        ("unix:///tmp/x", "unix:////tmp//x", "unix:/tmp/x db 0"),
        ("unix:///tmp/x?db=2", redis.Redis(unix_socket_path="/tmp/x", db=2), "unix:/tmp/x db 2"),
        ("redis://127.0.0.1", redis_asyncio.Redis(), "localhost:6379 db 0"),
        ("redis://127.0.0.1", valkey.Valkey(), "localhost:6379 db 0"),
        ("redis://[::1]", "redis://localhost", "localhost:6379 db 0"),
        ("redis://localhost", "redis://[::1]", "[::1]:6379 db 0"),
        ("redis://localhost", "valkey://localhost.", "localhost:6379 db 0"),
        ("redis://r.example:7", {"host": "R.Example", "port": 7}, "r.example:7 db 0"),
        ("redis://r.example", "rediss://r.example.", "r.example.:6379 db 0"),
        ("redis://käse.example.", "redis://xn--kse-qla.example", "xn--kse-qla.example:6379 db 0"),
        ("redis://KÄSE.example", "redis://käse。example", "xn--kse-qla.example:6379 db 0"),
    ],
)
def test_the_same_master_twice(first: Any, second: Any, shown: str) -> None:
    message = refused([first, "redis://192.0.2.1", second])
    assert message == f"masters[2]: {shown} is masters[0] already: each has one vote"


@case("C28")
def test_relative_and_absolute_path_of_one_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = {"unix_socket_path": "r.sock"}
    assert "already" in refused([spec, f"unix://{quote(str(tmp_path))}/r.sock"])


@case("C28")
def test_what_is_not_the_same() -> None:
    urls = ["redis://127.0.0.1/0", "redis://127.0.0.1/1", "redis://127.0.0.1:6380", "redis://[::1]"]
    urls += ["redis://r.example", "redis://r.example/1", "redis://r.example:7", "redis://r"]
    urls += ["redis://localhost:7", "redis://localhost:8"]
    urls += ["unix:///tmp/a", "unix:///tmp/b", "unix:///tmp/a?db=1"]
    assert len(parse_masters(urls)) == len(urls)


# ---- URLs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address", "db"),
    [
        ("redis://", "localhost:6379", 0),
        ("redis:///", "localhost:6379", 0),
        ("redis:///5", "localhost:6379", 5),
        ("redis://localhost", "localhost:6379", 0),
        ("redis://LocalHost:6380", "localhost:6380", 0),
        ("redis://10.0.0.7:/0", "10.0.0.7:6379", 0),
        ("redis://10.0.0.7/3/", "10.0.0.7:6379", 3),
        ("redis://10.0.0.7/%33", "10.0.0.7:6379", 3),
        ("redis://10.0.0.7?db=4", "10.0.0.7:6379", 4),
        ("redis://10.0.0.7/3?db=4", "10.0.0.7:6379", 4),
        ("redis://10.0.0.7/3?db=4&db=5", "10.0.0.7:6379", 4),
        ("redis://10.0.0.7/3?db=", "10.0.0.7:6379", 3),
        ("redis://10.0.0.7/00", "10.0.0.7:6379", 0),
        ("redis://?host=10.0.0.7&port=7", "10.0.0.7:7", 0),
        ("redis://10.0.0.8:8?host=10.0.0.7&port=7", "10.0.0.8:8", 0),
        ("redis://10%2E0.0.8:65535", "10.0.0.8:65535", 0),
        ("redis://@:1/2", "localhost:1", 2),
        ("redis://u:p@10.0.0.7:1/2", "10.0.0.7:1", 2),
        ("unix:///run/r.sock", "unix:/run/r.sock", 0),
        ("unix:///run/r.sock?db=2", "unix:/run/r.sock", 2),
        ("unix://u:p@/run/r.sock?db=2", "unix:/run/r.sock", 2),
        ("unix://?path=/run/r.sock", "unix:/run/r.sock", 0),
        ("unix:///a?path=/b", "unix:/a", 0),
        ("unix:///run/a@b;c=1,d", "unix:/run/a@b;c=1,d", 0),
    ],
)
def test_url_forms(url: str, address: str, db: int) -> None:
    options = one(url)
    assert (options.address, options.db) == (address, db)
    parsed = redis.connection.parse_url(url)  # redis-py sees the same
    family, sockaddr = options.places[0]
    if family == socket.AF_UNIX:
        assert address == f"unix:{parsed['path']}"
        assert sockaddr == parsed["path"].encode()
    else:
        host = parsed.get("host", "localhost").replace("localhost", "127.0.0.1")
        assert sockaddr == (host, int(parsed.get("port", 6379)))
    assert db == parsed.get("db", 0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "not a URL"),
        (" redis://127.0.0.1", "not a URL"),
        ("localhost", "not a URL"),
        ("127.0.0.1:6379", "not a URL"),
        ("[::1]:6379", "not a URL"),
        ("/run/redis.sock", "not a URL"),
        ("redis:127.0.0.1", "not a URL"),
        ("redis:/127.0.0.1", "not a URL"),
        ("unix:/run/redis.sock", "not a URL"),
        ("REDIS://127.0.0.1", "not a URL"),
        ("http://127.0.0.1", "not a URL"),
        ("redis+socket:///x", "not a URL"),
        ("://127.0.0.1", "not a URL"),
        ("redis://127.0.0.1\n", "control characters"),
        ("redis://127.0.\t0.1", "control characters"),
        ("redis://:\udc80@127.0.0.1", "control characters"),
        ("redis://127.0.0.1:0", "port must be an integer from 1 to 65535"),
        ("redis://127.0.0.1:65536", "port must be"),
        ("redis://127.0.0.1:99999999999999999999999", "port must be"),
        ("redis://127.0.0.1:-1", "malformed"),
        ("redis://127.0.0.1:+1", "malformed"),
        ("redis://127.0.0.1:x", "malformed"),
        ("redis://127.0.0.1: 1", "malformed"),
        ("redis://127.0.0.1:٣", "malformed"),
        ("redis://127.0.0.1:1:2", "malformed"),
        ("redis://[::1", "malformed"),
        ("redis://::1]", "malformed"),
        ("redis://::1:6379", "malformed"),
        ("redis://::1", "malformed"),
        ("redis://[::1]6379", "malformed"),
        ("redis://x[::1]:6379", "malformed"),
        ("redis://[[::1]]", "malformed"),
        ("redis://[]", "neither an IP address nor"),
        ("redis://[127.0.0.1]", "neither an IP address nor"),
        ("redis://[localhost]", "neither an IP address nor"),
        ("redis://[redis.example]", "neither an IP address nor"),
        ("redis://127.1", "ends in a number"),
        ("redis://2130706433", "ends in a number"),
        ("redis://127.0.0.01", "ends in a number"),
        ("redis://10.0.0.256", "ends in a number"),
        ("redis://127.0.0.1/x", "number of a database"),
        ("redis://127.0.0.1/-1", "number of a database"),
        ("redis://127.0.0.1/1/2", "number of a database"),
        ("redis://127.0.0.1//1", "number of a database"),
        ("redis://127.0.0.1/1_0", "number of a database"),
        ("redis://127.0.0.1/2147483648", "db must be an integer from 0 to 2147483647"),
        ("redis://127.0.0.1/0#x", "no fragment"),
        ("redis://127.0.0.1?db=x", "db must be"),
        ("redis://127.0.0.1?db=-1", "db must be"),
        ("redis://127.0.0.1?path=/x", "unknown option 'path'"),
        ("redis://127.0.0.1?unix_socket_path=/x", "unknown option 'unix_socket_path'"),
        ("redis://127.0.0.1?connection_class=x", "unknown option 'connection_class'"),
        ("redis://127.0.0.1?connection_pool=x", "connection_pool is not supported"),
        ("redis://127.0.0.1?credential_provider=x", "credential_provider must be an object"),
        ("redis://127.0.0.1?redis_connect_func=x", "redis_connect_func is not supported"),
        ("redis://127.0.0.1?%FF=x", "not shown"),
        ("redis://%ff:p@127.0.0.1", "username is not valid UTF-8"),
        ("redis://127.0.0.1?client_name=a%20b", "client_name must be"),
        ("unix://", "needs a path"),
        ("unix://?db=1", "needs a path"),
        ("unix://run/redis.sock", "three slashes"),
        ("unix://redis.sock", "three slashes"),
        ("unix://localhost/run/redis.sock", "three slashes"),
        ("unix://u:p@h/run/redis.sock", "three slashes"),
        ("unix:///run/redis.sock?host=127.0.0.1", "unknown option 'host'"),
        ("unix:///run/redis.sock#1", "no fragment"),
        ("unix:///run/%00", "without NUL"),
    ],
)
def test_urls_that_are_refused(url: str, why: str) -> None:
    assert why in refused([url])


@case("C129")
def test_unknown_options_of_a_url_are_named() -> None:
    url = "redis://:S3cr3t!@127.0.0.1/0?socket_timeout=0.2&ssl_check_hostname=false&{}unknown=1"
    assert refused([url.format("retry_count=0&")], "S3cr3t!").endswith(
        "unknown option 'retry_count', 'unknown'"
    )
    assert "unknown option 'unknown'" in refused([url.format("")], "S3cr3t!")
    assert "'unknown'" in refused(["redis://127.0.0.1?unknown="])
    assert "'unknown'" in refused([{"unknown": "S3cr3t!"}], "S3cr3t!")
    assert "'unknown'" in refused([redis.Redis.from_url("redis://127.0.0.1?unknown=1")])


@case("C129")
def test_values_of_a_url_are_typed() -> None:
    options = one(
        "redis://127.0.0.1/1?socket_timeout=0.2&ssl_check_hostname=false&socket_keepalive=no"
        "&health_check_interval=3&protocol=3&retry_on_timeout=0&max_connections=4&timeout=1e3"
    )
    assert options == one("redis://127.0.0.1/1")
    for name in sorted(urls_module.NUMBERS):
        assert f"option '{name}' is not a number" in refused([f"redis://127.0.0.1?{name}=x1"])


@case("C129")
@pytest.mark.parametrize("value", ["false", "False", "0", "no", "N", "f", "", "off", "disabled"])
def test_false_texts(value: str) -> None:
    assert one(f"redis://127.0.0.1?ssl={value}").address == "127.0.0.1:6379"
    assert one({"ssl": value}).address == "localhost:6379"
    assert one(f"redis://127.0.0.1?ssl={value}").tls is one({"ssl": value}).tls is None


@case("C129")
@pytest.mark.parametrize("value", ["true", "1", "yes", "x"])
def test_true_texts(value: str) -> None:
    assert one(f"redis://127.0.0.1?ssl={value}").tls is not None
    assert one({"ssl": value}).tls is not None


def test_urls_of_valkey() -> None:
    for rest in ("", "u:p@10.0.0.7:7/3?client_name=n", "[::1]", "r.example?db=2"):
        assert one(f"valkey://{rest}") == one(f"redis://{rest}")
        parsed = valkey.ConnectionPool.from_url(f"valkey://{rest}").connection_kwargs
        assert parsed == redis.connection.parse_url(f"redis://{rest}")
    secure = one("valkeys://u:p@r.example:7/3")
    assert secure.tls is not None
    assert dataclasses.replace(secure, tls=None) == one("redis://u:p@r.example:7/3")


PIECES = ["redis://", "unix://", "127.0.0.1", "10.0.0.7", "[::1]", "localhost", ":", "6379", "/"]
PIECES += ["?", "db=", "&", "port=", "host=", "password=", "username=", "#", "@", "[", "]", "%"]
PIECES += ["%25", "1", "0", "00", "+", " ", "a", "::1", "ü", ";", "=", "path=/x", "-"]


@given(st.sampled_from(PIECES[:2]), st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_where_it_is_accepted_redis_py_means_the_same(scheme: str, rest: str) -> None:
    try:
        options = one(scheme + rest)
    except ConfigurationError:
        return
    try:
        parsed = redis.connection.parse_url(scheme + rest)
    except ValueError:  # of urllib: a bracket in a password
        assert "[" in rest or "]" in rest
        return
    # Not the same on purpose: it replaces bytes that are no UTF-8, and before 8.1 decodes twice.
    if "\ufffd" in str(parsed) or "%" in rest.partition("?")[2]:
        return
    assert options.db == int(parsed.get("db", 0))
    assert options.username == parsed.get("username")
    assert (revealed(options) or b"").decode() == parsed.get("password", "")
    host, port = parsed.get("host", "localhost"), int(parsed.get("port", 6379))
    if options.host is not None:
        assert (options.host, options.port) == (host.encode("idna").decode(), port)
        return
    family, sockaddr = options.places[0]
    if family == socket.AF_UNIX:
        path = parsed["path"]
        assert sockaddr == os.fsencode(os.path.abspath(path)).replace(b"//", b"/")
    else:
        assert sockaddr[:2] == (host.replace("localhost", "127.0.0.1"), port)


# ---- credentials -----------------------------------------------------------------------------


@case("C91")
def test_special_characters_in_credentials() -> None:
    escaped = quote(PASSWORD, safe="")
    want = PASSWORD.encode()
    for master in (
        f"redis://:{escaped}@127.0.0.1",
        f"redis://u%3As%2F@r:{escaped}@127.0.0.1",
        f"redis://127.0.0.1?password={escaped}",
        f"redis://127.0.0.1?password={escaped.replace('%20', '+')}",
        f"unix://:{escaped}@/tmp/x",
        f"unix:///tmp/x?password={escaped}",
        {"password": PASSWORD},
        {"password": want},
        {"password": Secret(want)},
        redis.Redis(password=PASSWORD),
        redis_asyncio.Redis(password=PASSWORD),
        redis.Redis.from_url(f"redis://:{escaped}@127.0.0.1"),
    ):
        assert revealed(one(master)) == want
    assert one(f"redis://u%3As%2F@r:{escaped}@127.0.0.1").username == "u:s/@r"
    # Not escaped where it need not be, and raw beyond ASCII (also what NFKC makes a ':' or '/').
    assert revealed(one("redis://:a:b@c é$!&;=+：／@127.0.0.1")) == "a:b@c é$!&;=+：／".encode()
    # Bytes that are no UTF-8 stay what they are.
    assert revealed(one("redis://:%ff%00%0d%0a@127.0.0.1")) == b"\xff\0\r\n"
    assert revealed(one("redis://127.0.0.1?password=%ff%2520")) == b"\xff%20"


@case("C91")
@given(
    password=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    username=st.text(st.characters(exclude_categories=["Cs"])),
    safe=st.sampled_from(["", "!$&'()*+,;=", ":"]),
)
def test_password_round_trip(password: str, username: str, safe: str) -> None:
    escaped = quote(password, safe=safe)
    url = f"redis://{quote(username, safe='')}:{escaped}@10.0.0.7:7/1"
    options = one(url)
    assert revealed(options) == password.encode()
    assert options.username == (username or None)
    assert (options.address, options.db) == ("10.0.0.7:7", 1)
    parsed = redis.connection.parse_url(url)
    assert parsed["password"] == password
    assert parsed.get("username") == options.username
    for other in (f"redis://10.0.0.7:7/1?password={quote(password, safe='')}",):
        assert revealed(one(other)) == password.encode()
    keywords = {"host": "10.0.0.7", "port": 7, "db": 1}
    assert one({**keywords, "password": password, "username": username}) == options
    assert repr(options) == repr(one({**keywords, "password": "x"}))


@case("C91")
@given(password=st.binary(min_size=1))
def test_password_round_trip_of_bytes(password: bytes) -> None:
    escaped = quote(password, safe="")
    for master in (
        f"redis://:{escaped}@127.0.0.1",
        f"redis://127.0.0.1?password={escaped}",
        {"password": password},
    ):
        assert revealed(one(master)) == password


@case("C91")
@pytest.mark.parametrize(
    ("master", "username", "password"),
    [
        ("redis://u@127.0.0.1", "u", None),
        ("redis://u:@127.0.0.1", "u", None),
        ("redis://:p@127.0.0.1", None, b"p"),
        ("redis://:@127.0.0.1", None, None),
        ("redis://@127.0.0.1", None, None),
        ("redis://127.0.0.1?username=u&password=p", "u", b"p"),
        ("redis://v:q@127.0.0.1?username=u&password=p", "v", b"q"),
        ("redis://v@127.0.0.1?password=p", "v", b"p"),
        ("redis://:q@127.0.0.1?username=u", "u", b"q"),
        ("redis://u:a:b@127.0.0.1", "u", b"a:b"),
        ({"username": "", "password": ""}, None, None),
        ({"username": None, "password": None}, None, None),
        ({"username": "u", "password": b""}, "u", None),
        ({"username": b"u", "password": Secret(b"")}, "u", None),
    ],
)
def test_missing_and_empty_credentials(
    master: Any, username: str | None, password: bytes | None
) -> None:
    options = one(master)
    assert (options.username, revealed(options)) == (username, password)


@pytest.mark.parametrize("value", [1234, True, 1.5, ["S3cr3t!"], bytearray(b"S3cr3t!"), object()])
def test_credentials_of_another_type(value: Any) -> None:
    for name in ("password", "username", "client_name"):
        message = refused([{name: value}], "S3cr3t!", "1234")
        assert message == f"masters[0]: {name} must be str or bytes, not {type(value).__name__}"


def test_credentials_that_are_no_text() -> None:
    for name in ("password", "username", "client_name"):
        assert f"{name} is not valid UTF-8" in refused([{name: "S3cr3t!\ud800"}], "S3cr3t!")
    for name in ("username", "client_name"):
        assert f"{name} is not valid UTF-8" in refused([{name: b"S3cr3t!\xff"}], "S3cr3t!")


def test_client_name() -> None:
    assert one("redis://127.0.0.1?client_name=worker").client_name == "worker"
    assert one({"client_name": "a-b:c"}).client_name == "a-b:c"
    assert one({"client_name": ""}).client_name is None
    for name in ("a b", "a\nb", "é", "\x7f"):
        assert "client_name must be printable" in refused([{"client_name": name}])


# ---- credential providers --------------------------------------------------------------------


class Provider:
    """One of ours, which needs no base class."""

    def get_credentials(self) -> tuple[str, str]:
        return "u5er", "S3cr3t!"

    def __repr__(self) -> str:
        return "S3cr3t!"


class Unhashable(Provider):
    __hash__ = None  # type: ignore[assignment]


class Async:
    async def get_credentials(self) -> tuple[str, str]:
        return "u5er", "S3cr3t!"


@CLIENTS
def test_credential_providers(module: Any, name: str) -> None:
    make = getattr(module, name)
    library = importlib.import_module(f"{name.lower()}.credentials")
    of_the_library = library.UsernamePasswordCredentialProvider("u5er", "S3cr3t!")
    for provider in (Provider(), Unhashable(), of_the_library):
        for master in (
            {"credential_provider": provider},
            {"credential_provider": provider, "username": None, "password": ""},
            {"credential_provider": provider, "unix_socket_path": "/tmp/x"},
            make(credential_provider=provider),
            make(credential_provider=provider, ssl=True),
            make.from_url("redis://localhost", credential_provider=provider),
        ):
            options = one(master)
            assert options.credential_provider is provider
            assert (options.username, options.password) == (None, None)
            assert "S3cr3t!" not in repr(options)
            assert "credential_provider" not in repr(options)
            assert hash(options) == hash(dataclasses.replace(options, credential_provider=None))
            assert options != dataclasses.replace(options, credential_provider=Provider())


@case("C151")
@pytest.mark.parametrize(
    "provider",
    ["S3cr3t!", b"S3cr3t!", ("u5er", "S3cr3t!"), 5, object(), lambda: "S3cr3t!", Provider, True],
)
def test_what_is_no_credential_provider(provider: Any) -> None:
    message = refused([{"credential_provider": provider}], "S3cr3t!", "u5er")
    assert message.endswith("credential_provider must be an object with a get_credentials method")


@case("C151")
def test_a_credential_provider_for_asyncio_only() -> None:
    message = refused([{"credential_provider": Async()}], "S3cr3t!", "u5er")
    assert message.endswith("get_credentials must be no coroutine function")


@case("C151")
@CLIENTS
def test_a_credential_provider_beside_a_password(module: Any, name: str) -> None:
    for more in ({"username": "u5er"}, {"password": "S3cr3t!"}, {"password": b"S3cr3t!"}):
        keywords = {"credential_provider": Provider(), **more}
        for master in (keywords, getattr(module, name)(**keywords)):
            message = refused([master], "S3cr3t!", "u5er")
            assert message.endswith("cannot be given together with username or password")


# ---- no secret gets out ----------------------------------------------------------------------

LEAKY = "S3cr3t!"
KWARGS = {"password": LEAKY, "username": "u5er"}


@case("C151", "C54")
@pytest.mark.parametrize(
    "master",
    [
        *(
            f"redis://u5er:{secret}@{rest}"
            for secret in (LEAKY, quote(LEAKY, safe=""))
            for rest in (
                "127.0.0.1:0",
                "127.0.0.1:x",
                "[::1",
                "::1:6379",
                "redis..example",
                "127.0.0.1/x",
                "127.0.0.1/0#x",
                "127.0.0.1?unknown=1",
                "127.0.0.1?db=x",
                "127.0.0.1?socket_timeout=x",
                "127.0.0.1?client_name=%00",
                "127.0.0.1\n",
                "127.0.0.1?ssl_ca_certs=x",
                "127.0.0.1?password=\ud800",
                "[fe80::1%nosuchif]",
            )
        ),
        *(
            f"{scheme}u5er:{LEAKY}@127.0.0.1"
            for scheme in ("", "http://", "redis:", "redis:/", "unix://", " redis://")
        ),
        # Not escaped: what comes before and behind ends in other parts of the URL.
        *(
            f"{scheme}{user}:{LEAKY}{mark}{LEAKY}@{rest}"
            for scheme, rest in (("redis://", "127.0.0.1:6379/0"), ("unix://", "/tmp/x"))
            for user in ("u5er", "")
            for mark in ("/", "?", "#", "/?", "%zz/", "?a=b&")
        ),
        f"redis://{LEAKY}/{LEAKY}@127.0.0.1",
        f"redis://:1234/{LEAKY}@127.0.0.1",
        f"redis://:1234?{LEAKY}@127.0.0.1",
        f"redis://:1234?{LEAKY}={LEAKY}@127.0.0.1",
        f"redis://:{LEAKY}",
        f"redis://{LEAKY}",
        {**KWARGS, "port": 0},
        {**KWARGS, "host": f"redis://:{LEAKY}@127.0.0.1"},
        {**KWARGS, "host": f":{LEAKY}@127.0.0.1"},
        {**KWARGS, "port": f":{LEAKY}@127.0.0.1"},
        {**KWARGS, "db": LEAKY},
        {**KWARGS, "host": f"{LEAKY}.example"},
        {**KWARGS, f"redis://:{LEAKY}@127.0.0.1": 1},
        {**KWARGS, "credential_provider": LEAKY},
        {**KWARGS, "ssl": True, "ssl_ca_certs": LEAKY},
        {**KWARGS, "ssl": True, "ssl_certfile": LEAKY, "ssl_password": LEAKY},
        {**KWARGS, "ssl": True, "ssl_ca_data": LEAKY},
        f"rediss://u5er:{LEAKY}@127.0.0.1?ssl_cert_reqs={LEAKY}",
        f"rediss://u5er:{LEAKY}@127.0.0.1?ssl_ca_certs={LEAKY}",
        f"valkeys://u5er:{LEAKY}@127.0.0.1?ssl_ciphers={LEAKY}",
        {**KWARGS, "client_name": f"{LEAKY} x"},
        {**KWARGS, "unix_socket_path": "x" * 200},
        redis.Redis(password=LEAKY, username="u5er", host="redis..example"),
        redis.ConnectionPool(password=LEAKY),
        LEAKY,
        LEAKY.encode(),
        [LEAKY],
        Secret(LEAKY.encode()),
    ],
)
def test_refusals_keep_the_secret(master: Any) -> None:
    for masters in ([master], ["redis://192.0.2.1", master], [*[master] * (MAX_MASTERS + 1)]):
        message = refused(masters, LEAKY, "u5er", "1234")
        assert "redis://u5er" not in message


@case("C151")
def test_a_duplicate_keeps_the_secret() -> None:
    urls = [f"redis://u5er:{LEAKY}@127.0.0.1", f"redis://u5er:{LEAKY}@127.0.0.1/0"]
    assert "127.0.0.1:6379" in refused(urls, LEAKY, "u5er")


@case("C151")
@given(secret=st.text(min_size=6), scheme=st.sampled_from(["redis", "rediss", "unix", "http"]))
def test_a_raw_secret_of_any_kind_stays_inside(secret: str, scheme: str) -> None:
    secret = f"\u2620{secret}"  # so that it is not by chance part of a message
    for url in (f"{scheme}://:{secret}@nowhere:x/y", f"{scheme}://{secret}:0/y", secret):
        refused([url], *([secret] if secret.isprintable() else []))


@case("C151")
def test_a_refusal_does_not_pass_on_what_was_handled() -> None:
    with pytest.raises(ConfigurationError) as info:
        try:
            raise KeyError("before")
        except KeyError:
            parse_masters(["x"])
    assert isinstance(info.value.__context__, KeyError)  # the caller's own, none of ours
    assert info.value.__context__.__context__ is None


@case("C151", "C54")
def test_settings_show_no_secret() -> None:
    options = one(f"redis://u5er:{LEAKY}@127.0.0.1:6379/2?client_name=w1")
    for text in (repr(options), str(options), f"{options}", f"{[options]!r:>9}", options.address):
        assert LEAKY not in text
        assert "u5er" not in text  # may be a password in the wrong place
        assert "127.0.0.1:6379" in text
    assert "w1" in repr(options)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(options)
    with pytest.raises(TypeError, match="cannot be pickled"):
        dataclasses.asdict(options)
    assert dataclasses.replace(options, db=3).password is options.password


@case("C151")
def test_secret() -> None:
    secret = Secret(b"S3cr3t!")
    assert secret.reveal() == b"S3cr3t!"
    assert {repr(secret), str(secret), f"{secret}", f"{secret:>40}", f"{secret!s}"} == {
        "Secret('***')"
    }
    assert "%s %r" % (secret, secret) == "Secret('***') Secret('***')"  # noqa: UP031
    assert secret == Secret(b"S3cr3t!")
    assert secret != Secret(b"S3cr3t?")
    assert secret != b"S3cr3t!"
    assert secret != "S3cr3t!"
    assert hash(secret) == hash(Secret(b"other"))
    assert len({secret, Secret(b"S3cr3t!"), Secret(b"other")}) == 2
    assert not hasattr(secret, "__dict__")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(secret, protocol)
    for copier in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="copied"):
            copier(secret)
    with pytest.raises(TypeError):
        bytes(secret)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        json.dumps(secret)
    for value in ("S3cr3t!", None, 5, bytearray(b"S3cr3t!")):
        with pytest.raises(TypeError) as info:
            Secret(value)  # type: ignore[arg-type]
        assert "S3cr3t!" not in str(info.value)


def test_settings_are_frozen() -> None:
    options = one("redis://:p@127.0.0.1")
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.db = 1  # type: ignore[misc]
    assert not hasattr(options, "__dict__")
    assert options == one("redis://:p@127.0.0.1")
    assert options != one("redis://:q@127.0.0.1")
    assert hash(options) == hash(one("redis://:p@127.0.0.1"))


# ---- dicts of keywords -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "address", "db"),
    [
        ({}, "localhost:6379", 0),
        ({"host": "localhost"}, "localhost:6379", 0),
        ({"host": "10.0.0.7", "port": "7", "db": "2"}, "10.0.0.7:7", 2),
        ({"host": "10.0.0.7", "db": None}, "10.0.0.7:6379", 0),
        ({"unix_socket_path": "/tmp/x", "db": 3}, "unix:/tmp/x", 3),
        ({"unix_socket_path": b"/tmp/x", "host": "10.0.0.7"}, "unix:/tmp/x", 0),
        ({"unix_socket_path": Path("/tmp/x")}, "unix:/tmp/x", 0),
        ({"unix_socket_path": None, "credential_provider": None, "ssl": None}, "localhost:6379", 0),
        ({"redis_connect_func": None, "connection_pool": None}, "localhost:6379", 0),
    ],
)
def test_keywords(keywords: dict[str, Any], address: str, db: int) -> None:
    before = dict(keywords)
    options = one(keywords)
    assert (options.address, options.db) == (address, db)
    assert keywords == before
    assert one(types.MappingProxyType(keywords)) == options


class Index:
    def __index__(self) -> int:
        return 7


def test_integers_like_other_libraries_have_them() -> None:
    assert one({"port": Index(), "db": Index()}).address == "localhost:7"


@pytest.mark.parametrize(
    "port",
    [
        "x",
        "",
        "-1",
        " 7",
        "7.0",
        "0x7",
        "٣",
        0,
        -1,
        65536,
        pytest.param(10**5000, id="huge"),
        7.0,
        True,
        None,
        [7],
    ],
)
def test_ports_that_are_refused(port: Any) -> None:
    message = "masters[0]: port must be an integer from 1 to 65535"
    assert refused([{"port": port}]) == message


@pytest.mark.parametrize("db", ["x", "", "-1", -1, 2**31, 1.0, False, [0], b"1"])
def test_dbs_that_are_refused(db: Any) -> None:
    assert refused([{"db": db}]) == "masters[0]: db must be an integer from 0 to 2147483647"


@pytest.mark.parametrize(
    ("keywords", "why"),
    [
        ({"host": None}, "host must be str, not NoneType"),
        ({"host": b"127.0.0.1"}, "host must be str, not bytes"),
        ({"host": 5}, "host must be str, not int"),
        ({"host": ipaddress.ip_address("127.0.0.1")}, "host must be str, not IPv4Address"),
        ({"ssl": 1, "unix_socket_path": "/tmp/x"}, "TLS over a unix socket is not supported"),
        ({"redis_connect_func": print}, "redis_connect_func is not supported"),
        ({"valkey_connect_func": print}, "valkey_connect_func is not supported"),
        ({"connection_pool": redis.ConnectionPool()}, "pass redis.Redis(connection_pool=...)"),
        ({"url": "redis://127.0.0.1"}, "unknown option 'url'"),
        ({"path": "/tmp/x"}, "unknown option 'path'"),  # not a keyword of redis.Redis either
        ({"Host": "127.0.0.1"}, "unknown option 'Host'"),
        ({5: 1}, "unknown option 5"),
        ({"unix_socket_path": ""}, "needs a path"),
        ({"unix_socket_path": "\0abstract"}, "no abstract names"),
        ({"unix_socket_path": 5}, "must be str, not int"),
        ({"unix_socket_path": "/tmp/\ud800"}, "cannot be used"),
    ],
)
def test_keywords_that_are_refused(keywords: Any, why: str) -> None:
    assert why in refused([keywords])


def test_options_without_effect() -> None:
    names = keywords_module.NO_EFFECT | keywords_module.TLS_OPTIONS
    assert one(dict.fromkeys(names, object())) == one({})
    assert one({"ssl": False, "ssl_cert_reqs": "required"}) == one({})


@pytest.mark.parametrize("library", ["redis", "valkey"])
def test_the_lists_of_options_are_complete(library: str) -> None:
    """Each keyword of the libraries that are installed has a place in one of them."""
    lists = [
        keywords_module.HONOURED,
        keywords_module.UNSUPPORTED.keys(),
        keywords_module.TLS_OPTIONS,
        keywords_module.NO_EFFECT,
    ]
    assert sum(map(len, lists)) == len(keywords_module.KNOWN)
    callables = [
        each
        for module in (sys.modules[library], sys.modules[f"{library}.asyncio"])
        for each in (
            getattr(module, library.title()),
            module.connection.Connection,
            module.connection.SSLConnection,
            module.connection.UnixDomainSocketConnection,
            module.connection.AbstractConnection,
            module.ConnectionPool,
            module.BlockingConnectionPool,
        )
    ]
    names = {name for each in callables for name in inspect.signature(each).parameters}
    expected_elsewhere = {"path", "connection_class", "kwargs", "connection_kwargs"}
    assert names - keywords_module.KNOWN <= expected_elsewhere


# ---- addresses -------------------------------------------------------------------------------


@case("C90")
@pytest.mark.parametrize(
    ("master", "sockaddr", "address"),
    [
        ("redis://[::1]:6379/0", ("::1", 6379, 0, 0), "[::1]:6379"),
        ("redis://[::1]", ("::1", 6379, 0, 0), "[::1]:6379"),
        ("redis://[::1]:", ("::1", 6379, 0, 0), "[::1]:6379"),
        ("redis://:p@[::1]:7/1", ("::1", 7, 0, 0), "[::1]:7"),
        ("redis://[2001:DB8:0::1]", ("2001:db8::1", 6379, 0, 0), "[2001:db8::1]:6379"),
        ({"host": "::1", "port": 7}, ("::1", 7, 0, 0), "[::1]:7"),
        ({"host": "::1"}, ("::1", 6379, 0, 0), "[::1]:6379"),
        ({"host": "[::1]"}, ("::1", 6379, 0, 0), "[::1]:6379"),
        (redis.Redis(host="::1", port=7), ("::1", 7, 0, 0), "[::1]:7"),
    ],
)
def test_ipv6(master: Any, sockaddr: Any, address: str) -> None:
    options = one(master)
    assert place(options) == (socket.AF_INET6, sockaddr)
    assert options.address == address


@case("C90")
@pytest.mark.parametrize("host", ["fe80::1%lo", "fe80::1%25lo", "fe80::1%1"])
def test_ipv6_scope(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nametoindex", {"lo": 1}.__getitem__)
    monkeypatch.setattr(socket, "if_indextoname", {1: "lo"}.__getitem__)
    for master in (f"redis://[{host}]:7", {"host": host.replace("%25", "%"), "port": 7}):
        options = one(master)
        assert place(options) == (socket.AF_INET6, ("fe80::1", 7, 0, 1))
        assert options.address == f"[{host.replace('%25', '%')}]:7"


@case("C90")
@pytest.mark.parametrize(
    "host", ["fe80::1%", "fe80::1%nosuchif", "fe80::1%999999", "fe80::1%0", "::1%lo", "fe80::1%a%b"]
)
def test_ipv6_scopes_that_are_refused(host: str) -> None:
    assert "scope id" in refused([{"host": host}])
    assert "scope id" in refused([f"redis://[{host.replace('%', '%25')}]"])


@case("C90")
@pytest.mark.parametrize("host", ["::1:6379", "1::2::3", "[::1", "::1]", "[[::1]]", ":", "::g"])
def test_ipv6_that_is_refused(host: str) -> None:
    """A port in the address would be one more group of it: '::1:6379' is an address, alas."""
    if host == "::1:6379":
        assert place(one({"host": host}))[1] == ("::1:6379", 6379, 0, 0)
    else:
        assert "neither an IP address nor a possible host name" in refused([{"host": host}])


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("redis.example", "redis.example"),
        ("Redis.EXAMPLE", "redis.example"),
        ("redis.example.", "redis.example."),
        ("redis", "redis"),
        ("redis-0.redis_svc.ns", "redis-0.redis_svc.ns"),
        ("_r", "_r"),
        ("1.2.3.4.example", "1.2.3.4.example"),
        ("0x7f.example", "0x7f.example"),
        ("localhost.localdomain", "localhost.localdomain"),
        ("xn--kse-qla.example", "xn--kse-qla.example"),
        ("käse.example", "xn--kse-qla.example"),
        ("KÄSE。example.", "xn--kse-qla.example."),
        ("例え.テスト", "xn--r8jz45g.xn--zckzah"),
        (f"{'a' * 63}.{'b' * 63}.{'c' * 63}.{'d' * 61}", None),
        (f"{'a' * 63}.{'b' * 63}.{'c' * 63}.{'d' * 61}.", None),
    ],
)
def test_host_names(given: str, host: str | None) -> None:
    host = host or given
    for master in (
        f"redis://{given}:7/1",
        f"redis://{quote(given)}:7/1",
        f"redis://?host={quote(given)}&port=7&db=1",
        {"host": given, "port": 7, "db": 1},
        redis.Redis(host=given, port=7, db=1),
    ):
        options = one(master)
        assert (options.places, options.host, options.port) == ((), host, 7)
        assert (options.address, options.db) == (f"{host}:7", 1)
    assert one({"host": given}).port == 6379


@pytest.mark.parametrize("given", ["localhost", "LocalHost", "localhost.", "ｌocalhost"])
def test_localhost_needs_no_look_up(given: str) -> None:
    options = one({"host": given, "port": 7})
    assert options.places == (
        (socket.AF_INET, ("127.0.0.1", 7)),
        (socket.AF_INET6, ("::1", 7, 0, 0)),
    )
    assert (options.address, options.host, options.port) == ("localhost:7", None, 0)


@case("C151")
@pytest.mark.parametrize(
    "host",
    [
        "",
        ".",
        "..",
        ".r",
        "r..example",
        "r.example..",
        "-r",
        "r-",
        "r.-r",
        "r example",
        " r.example",
        "r.example ",
        "r.example\n",
        "r\0",
        "r.example:6379",
        "r.example/0",
        "u:p@r.example",
        "p@r.example",
        "redis://r.example",
        "redis://:S3cr3t!@r.example:6379/0",
        "r%lo",
        "r%41",
        "[r]",
        "[localhost]",
        "[127.0.0.1]",
        "127.0.0.1%lo",
        "127.0.0.1:6379",
        "127.0.0.1/32",
        "r*",
        "*.r",
        "a" * 64,
        f"{'a' * 63}.{'b' * 63}.{'c' * 63}.{'d' * 62}",
        "ä" * 60,
        "ä" * 10**6,
        "a" * 10**6,
        "r／example",
        "u：p＠r",
        "r\u200b.\ud800",
        "ß.\u200f",
    ],
)
def test_host_names_that_are_refused(host: str) -> None:
    message = refused([{"host": host, "password": "S3cr3t!"}], "S3cr3t!")
    assert message.startswith("masters[0]: host ")
    assert message.isascii()
    if len(host) > 9:
        assert host not in message


@pytest.mark.parametrize(
    "host", ["127.1", "0", "2130706433", "0x7f.1", "0x7f000001", "10.0.0.256", "127.0.0.01", "1.2."]
)
def test_what_a_resolver_would_take_for_an_address(host: str) -> None:
    """As getaddrinfo reads it: 127.1 is 127.0.0.1, and 010.0.0.1 is 8.0.0.1."""
    assert "host ends in a number, but is no IPv4 address" in refused([{"host": host}])


@pytest.mark.parametrize("host", ["straße.example", "ς.example", "a\u200db", "a\u200cb"])
def test_names_that_two_standards_encode_differently(host: str) -> None:
    assert "use xn--" in refused([{"host": host}])


@given(st.text(max_size=30))
def test_any_text_as_a_host(host: str) -> None:
    try:
        options = one({"host": host})
    except ConfigurationError:
        return
    assert options.address.isascii()
    assert options.address.isprintable()
    assert options.places or options.host
    if options.host is not None:
        assert host.encode("idna").decode().lower() == options.host


def test_ipv4_mapped_ipv6() -> None:
    options = one("redis://[::ffff:10.0.0.7]:7")
    assert place(options) == (socket.AF_INET, ("10.0.0.7", 7))
    assert options.address == "10.0.0.7:7"


@given(packed=st.binary(min_size=16, max_size=16), port=st.integers(1, 65535))
@case("C90")
def test_ipv6_in_general(packed: bytes, port: int) -> None:
    host = socket.inet_ntop(socket.AF_INET6, packed)
    options = one(f"redis://[{host}]:{port}")
    assert options == one({"host": host, "port": port})
    family, sockaddr = place(options)
    if family == socket.AF_INET6:
        assert socket.inet_pton(socket.AF_INET6, str(sockaddr[0])) == packed
    else:
        assert packed[:12] == bytes(10) + b"\xff\xff"
        assert socket.inet_aton(str(sockaddr[0])) == packed[12:]
    assert sockaddr[1] == port


@case("C89")
@pytest.mark.parametrize("length", [107, 108, 200])
def test_length_of_a_unix_path(length: int) -> None:
    path = "/tmp/" + "x" * (length - 5)
    for master in ({"unix_socket_path": path}, f"unix://{path}", f"unix://:S3cr3t!@{path}"):
        if length <= 107:
            assert place(one(master)) == (socket.AF_UNIX, path.encode())
        else:
            message = refused([master], "S3cr3t!")
            assert f"at most 107 bytes: {path} has {length}" in message


@case("C89")
def test_length_counts_bytes() -> None:
    assert "has 109" in refused([{"unix_socket_path": "/tmp/" + "é" * 52}])


@case("C89")
def test_relative_unix_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("r.sock", "./r.sock", "d//r.sock"):
        options = one({"unix_socket_path": path})
        assert place(options)[1] == os.fsencode(os.path.abspath(path))
        assert options.address == f"unix:{os.path.abspath(path)}"
    assert one("unix://?path=r.sock").address == f"unix:{tmp_path}/r.sock"
    # '..' behind a symbolic link is the kernel's business: not resolved by text.
    assert one({"unix_socket_path": "link/../r"}).address == f"unix:{tmp_path}/link/../r"


@case("C89")
@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("unix:///tmp/a%2Fb%20c", "/tmp/a/b c"),
        ("unix:///tmp/a b", "/tmp/a b"),
        ("unix:///tmp/a+b", "/tmp/a+b"),
        ("unix://?path=%2Ftmp%2Fa+b", "/tmp/a b"),
        ("unix:///tmp/k%C3%A4se", "/tmp/käse"),
        ("unix:///tmp/käse", "/tmp/käse"),
        ("unix:///tmp/%ff", os.fsdecode(b"/tmp/\xff")),
        ("unix:///tmp/%3F%23%25", "/tmp/?#%"),
        ("unix://u%3A:p%2F@/tmp/x?db=1", "/tmp/x"),
    ],
)
def test_unix_urls(url: str, path: str) -> None:
    options = one(url)
    assert place(options) == (socket.AF_UNIX, os.fsencode(path))


@case("C89", "C153")
def test_address_of_a_unix_socket_is_printable() -> None:
    assert one("unix:///tmp/%0d%0aä%ff").address == "unix:/tmp/\\r\\nä\\udcff"


@case("C89")
def test_a_working_directory_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", mock.Mock(side_effect=FileNotFoundError("gone")))
    assert "cannot be used" in refused([{"unix_socket_path": "x"}])


@case("C89")
def test_the_socket_takes_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the absolute path would be too long for some tmp_path
    path = tmp_path / "ü"
    if len(os.fsencode(path)) > 107:
        pytest.skip("tmp_path is too long for a unix socket")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(path))
        server.listen()
        client.connect(place(one({"unix_socket_path": "ü"}))[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        family, sockaddr = one(f"redis://localhost:{server.getsockname()[1]}").places[0]
        with socket.socket(family) as client:
            client.connect(sockaddr)


# ---- clients --------------------------------------------------------------------------------


@CLIENTS
def test_clients(module: Any, name: str) -> None:
    make = getattr(module, name)
    client = make(
        host="10.0.0.7", port=7, db=2, username="u", password="p", client_name="n", socket_timeout=1
    )
    before = dict(client.connection_pool.connection_kwargs)
    options = one(client)
    assert place(options) == (socket.AF_INET, ("10.0.0.7", 7))
    assert (options.db, options.username, options.client_name) == (2, "u", "n")
    assert (options.tls, options.credential_provider) == (None, None)
    assert revealed(options) == b"p"
    assert client.connection_pool.connection_kwargs == before
    assert one(make()).address == "localhost:6379"
    assert one(make(decode_responses=True, encoding="latin-1")) == one({})
    assert one(make(host="Redis.example")).host == "redis.example"
    # With a unix socket, these libraries have no TLS, whatever they are told.
    assert one(make(unix_socket_path="/tmp/x", db=1, ssl=True)).address == "unix:/tmp/x"
    assert one(make.from_url("unix://:p@/tmp/x?db=3")).db == 3
    assert one(make.from_url("redis://10.0.0.7/4")).db == 4
    pool = module.BlockingConnectionPool(host="10.0.0.7", timeout=3)
    assert one(make(connection_pool=pool)).address == "10.0.0.7:6379"
    secure = one(make(ssl=True, host="10.0.0.7", password="p", db=5))
    assert secure.tls is not None
    assert (secure.tls.server_hostname, secure.db, revealed(secure)) == ("10.0.0.7", 5, b"p")
    assert one(make.from_url("rediss://10.0.0.7")).tls is not None


class MyRedis(redis.Redis):  # type: ignore[misc, name-defined]
    pass


class MyConnection(redis.Connection):  # type: ignore[misc, name-defined]
    pass


def test_a_client_class_of_ones_own() -> None:
    assert one(MyRedis(host="10.0.0.7")).address == "10.0.0.7:6379"
    pool = redis.ConnectionPool(connection_class=MyConnection)
    message = refused([redis.Redis(connection_pool=pool)])
    assert "MyConnection are not supported" in message


def test_what_a_newer_client_gives_its_connections() -> None:
    """A parameter of redis-py's own connection class is known, whatever its name."""
    client = redis.Redis(host="10.0.0.7")
    base = type("Base", (redis.connection.Connection,), {"__module__": "redis.connection"})
    base.__init__ = lambda self, *, some_new_thing=None, **kwargs: None  # type: ignore[misc]
    client.connection_pool.connection_class = base
    client.connection_pool.connection_kwargs["some_new_thing"] = 1
    assert one(client).address == "10.0.0.7:6379"
    client.connection_pool.connection_kwargs["some_other_thing"] = 1
    assert "unknown option 'some_other_thing'" in refused([client])


@CLIENTS
def test_clients_that_are_refused(module: Any, name: str) -> None:
    make = getattr(module, name)
    cluster = getattr(module, f"{name}Cluster")
    sentinel = module.sentinel.Sentinel([("127.0.0.1", 26379)])
    connect_func = {f"{name.lower()}_connect_func": print}
    for client, why in (
        (make(host="redis..example"), "neither an IP address nor a possible host name"),
        (make(**connect_func), "_connect_func is not supported"),
        (make(port=0), "port must be"),
        (sentinel, "Sentinel is not supported"),
        (sentinel.master_for("m"), "Sentinel is not supported"),
        (sentinel.slave_for("m"), "Sentinel is not supported"),
        (sentinel.master_for("m", ssl=True), "Sentinel is not supported"),
        (cluster.__new__(cluster), "Cluster is not supported"),
        (module.ConnectionPool(), "expected"),
        (module.Connection(), "expected"),
        (make, "expected"),
        (mock.MagicMock(spec=make), "expected"),
        (types.SimpleNamespace(connection_pool=module.ConnectionPool()), "expected"),
        (make.from_url("redis://:S3cr3t!@127.0.0.1?unknown=1"), "unknown option 'unknown'"),
        (make.from_url("redis://:S3cr3t!@127.0.0.1?ssl=true&x=1"), "unknown option 'x'"),
    ):
        assert why in refused([client], "S3cr3t!")


@pytest.mark.parametrize("name", ["FakeRedis", "FakeStrictRedis"])
def test_fake_clients(name: str) -> None:
    fake = type(name, (redis.Redis,), {"__module__": "fakeredis._clients._sync"})
    assert "fake client is not supported" in refused([fake()])
    client = redis.Redis()
    client.connection_pool.connection_class = type(
        "FakeConnection", (redis.Connection,), {"__module__": "fakeredis._connection"}
    )
    assert "fake client is not supported" in refused([client])


def test_a_python_without_ssl() -> None:
    code = (
        "import sys; sys.modules['_ssl'] = None\n"
        "from redlock_fast import ConfigurationError, Redlock\n"
        "import redlock_fast.asyncio\n"
        "Redlock(['redis://127.0.0.1:1']).connect()\n"
        "try: Redlock(['rediss://127.0.0.1:1'])\n"
        "except ConfigurationError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "masters[0]: this Python was built without its ssl module\n"


def test_neither_library_nor_ssl_is_imported() -> None:
    code = (
        "import sys, redlock_fast; from redlock_fast.options import parse_masters\n"
        "before = sys.modules.keys() & {'redis', 'valkey', 'ssl', 'redlock_fast.tls'}\n"
        "parse_masters(['redis://127.0.0.1', {'port': 7}, 'valkey://r.example'])\n"
        "try: parse_masters([object()])\n"
        "except ValueError: pass\n"
        "assert not before, before\n"
        "assert not sys.modules.keys() & {'redis', 'valkey', 'ssl'}\n"
        "assert parse_masters(['valkeys://r.example'])[0].tls\n"
        "assert not sys.modules.keys() & {'redis', 'valkey'}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
