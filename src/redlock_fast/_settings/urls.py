"""URLs of masters, turned into redis-py keywords.

    redis://[[user]:[password]@][host][:port][/db][?options]     also rediss, valkey, valkeys
    unix://[[user]:[password]@]/path[?options]

The conventions are redis-py's (`redis.connection.parse_url`, 5.0 to 8.1) and valkey-py's. Stricter
where they would go on to another server, with another password or with less protection than was
meant: the path of a redis:// URL is a number, a unix:// URL has no host, no URL has a fragment or
control characters, TLS options need TLS; escaped bytes of a password stay what they are; a query
value is decoded once (as in redis-py 8.1; before, and in valkey-py, twice).
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

from redlock_fast._settings.keywords import ESCAPE, KNOWN, TLS_OPTIONS, check_names
from redlock_fast._settings.values import FALSE, Refused, is_true

__all__ = ["keywords_of_url"]

# Scheme: whether it means TLS.
_SCHEMES = {"redis": False, "rediss": True, "valkey": False, "valkeys": True, "unix": False}
# Values that must be numbers, whether they have an effect or not (redis-py's
# URL_QUERY_ARGUMENT_PARSERS; `db`, `port` and `ssl` are read like those of a dict).
NUMBERS: dict[str, type[int | float]] = {
    **dict.fromkeys(["socket_timeout", "socket_connect_timeout", "timeout"], float),
    **dict.fromkeys(["socket_read_size", "max_connections", "health_check_interval"], int),
    **dict.fromkeys(["ssl_min_version", "protocol"], int),
}


def keywords_of_url(url: str) -> dict[str, object]:
    """What `redis.Redis` would have to be given for the same master.

    Split by hand: the functions of urllib.parse drop control characters, put the text into their
    errors and keep it in a cache.
    """
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", url):
        raise Refused("a URL cannot hold line ends and other control characters")
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in _SCHEMES:
        raise Refused(
            "this text is not a URL of a master: expected redis://127.0.0.1:6379/0, "
            "rediss://name.example or unix:///run/redis.sock"
        )
    rest, hash_sign, _ = rest.partition("#")
    if hash_sign:
        raise Refused(f"a master's URL has no fragment: {ESCAPE}")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    userinfo, _, place = authority.rpartition("@")
    username, _, password = userinfo.partition(":")

    if scheme == "unix":
        if place:
            raise Refused(f"unix:// takes three slashes and an absolute path, no host; {ESCAPE}")
        known = (KNOWN | {"path"}) - {"unix_socket_path", "host", "port"}
    else:
        known = KNOWN - {"unix_socket_path"}
    given = _query(query, known)
    _check_tls(given, scheme)
    if username:
        given["username"] = unquote_to_bytes(username)
    if password:
        given["password"] = unquote_to_bytes(password)
    if scheme == "unix":
        given["unix_socket_path"] = given.pop("path", "")
        if path:
            given["unix_socket_path"] = unquote_to_bytes(slash + path)
    else:
        _set_place(given, place, path)
    return given


def _set_place(given: dict[str, object], place: str, path: str) -> None:
    """Put host, port and db of a redis:// URL into `given`."""
    db = re.fullmatch(r"([0-9]*)/?", unquote(path))
    if db is None:
        raise Refused(f"the path of a redis:// URL is the number of a database; {ESCAPE}")
    if db[1]:
        given.setdefault("db", db[1])  # `?db=` goes first, as in redis-py
    match = re.fullmatch(r"(\[[^][]*\]|[^][:]*)(?::([0-9]*))?", place)
    if match is None:
        raise Refused(
            f"host and port are malformed: expected host:port or [IPv6 address]:port; {ESCAPE}"
        )
    host, port = match.groups()
    if host:
        # A bare '%' begins a scope id, RFC 6874 writes it '%25'.
        given["host"] = unquote(host) if "%25" in host or host[0] != "[" else host
    if port:
        given["port"] = port


def _query(query: str, known: frozenset[str]) -> dict[str, object]:
    """The options behind the '?': the first one of a name counts, empty ones do not."""
    # surrogateescape: bytes that are no UTF-8 come through to passwords and file names.
    pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    check_names((name for name, _ in pairs), known)
    given: dict[str, object] = {}
    for name, value in pairs:
        if value:
            given.setdefault(name, value)
    for name in given.keys() & NUMBERS.keys():
        try:
            NUMBERS[name](str(given[name]))
        except ValueError:
            raise Refused(f"the value of option {name!r} is not a number") from None
    for name in given.keys() & {"username", "password", "client_name", "path", "ssl_password"}:
        given[name] = str(given[name]).encode("utf-8", "surrogateescape")
    return given


def _check_tls(given: dict[str, object], scheme: str) -> None:
    """Set `ssl` by the scheme, and refuse a URL that may or may not have meant TLS."""
    if _SCHEMES[scheme]:
        if not is_true(given.get("ssl", True)):
            raise Refused(f"{scheme}:// means TLS, and its option ssl says the opposite")
        given["ssl"] = True
    elif "ssl" not in given:
        for name in sorted(given.keys() & TLS_OPTIONS):
            if str(given[name]).upper() not in FALSE | {"NONE"}:
                raise Refused(f"{name} needs TLS: rediss://, valkeys:// or the option ssl=true")
