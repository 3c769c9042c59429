"""What a user passes as `masters`, turned into plain typed settings.

Given: a sequence of URLs, dicts of redis-py keywords and redis-py client objects. Returns: one
frozen `MasterOptions` for each. Driven by the constructors of both facades, once. A leaf: it opens
no socket, resolves no name, sends nothing, imports no redis-py, and keeps nothing of what it was
given. Every complaint is a `ConfigurationError`, raised from a frame that holds neither password
nor URL, with no other exception chained to it.

All forms become a dict of redis-py keywords, which `_options` turns into settings. The conventions
are redis-py's (`redis.connection.parse_url`, `Redis.__init__`; 5.0 to 8.1). Stricter where redis-py
would go on to another server or with another password than the one meant: the path of a redis://
URL is a number, a unix:// URL has no host, no URL has a fragment or control characters; escaped
bytes of a password stay what they are; a query value is decoded once (as in 8.1; before, twice).
"""

from __future__ import annotations

import contextlib
import hmac
import inspect
import ipaddress
import operator
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, final
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

from redlock_fast.errors import ConfigurationError

__all__ = ["MAX_MASTERS", "MasterOptions", "MasterSpec", "Secret", "SockAddr", "parse_masters"]

# Ours: nobody runs more independent masters than this; it bounds the arrays of the core.
MAX_MASTERS = 32
# redis-py's defaults (`Redis.__init__`).
DEFAULT_HOST = "localhost"
DEFAULT_PORT = 6379
# SELECT takes a C int; how many databases there are is the server's business.
MAX_DB = 2**31 - 1
# unix(7): sun_path is 108 bytes on Linux, one of them for the end of the string.
MAX_UNIX_PATH = 107


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# redis-py keywords that are honoured (a `path` of a URL or client becomes `unix_socket_path`).
HONOURED = _names("host port unix_socket_path db username password client_name ssl")
# Refused unless None. TODO when there is a credential provider: honour it in `_options`.
UNSUPPORTED = {
    "credential_provider": "credential_provider is not supported yet",
    "redis_connect_func": "redis_connect_func is not supported: it would replace the handshake",
    "connection_pool": "connection_pool is not supported: pass redis.Redis(connection_pool=...)",
}
# TLS: accepted as long as `ssl` is false, as `Redis.__init__` does.
TLS_OPTIONS = _names(
    """ssl_ca_certs ssl_ca_data ssl_ca_path ssl_cert_reqs ssl_certfile ssl_check_hostname
    ssl_ciphers ssl_exclude_verify_flags ssl_include_verify_flags ssl_keyfile ssl_min_version
    ssl_ocsp_context ssl_ocsp_expected_cert ssl_password ssl_validate_ocsp
    ssl_validate_ocsp_stapled"""
)
# Accepted without effect: pool, retry, timeout, protocol, decoding and identification options.
# All other parameters of `Redis`, the connection classes and the pools, sync and asyncio, in
# redis-py 5.0 to 8.1.
NO_EFFECT = _names(
    """auto_close_connection_pool cache cache_config cache_factory charset command_packer
    decode_responses driver_info encoder_class encoding encoding_errors errors event_dispatcher
    health_check_interval himport_registry legacy_responses lib_name lib_version
    maint_notifications_config maint_notifications_pool_handler maintenance_notification_hash
    maintenance_state max_connections orig_host_address orig_socket_connect_timeout
    orig_socket_timeout oss_cluster_maint_notifications_handler parser_class protocol queue_class
    retry retry_on_error retry_on_timeout single_connection_client socket_connect_timeout
    socket_keepalive socket_keepalive_options socket_read_size socket_timeout socket_type
    timeout"""
)
KNOWN = HONOURED.union(UNSUPPORTED, TLS_OPTIONS, NO_EFFECT)
# Values in a URL that must be numbers, whether they have an effect or not (redis-py's
# URL_QUERY_ARGUMENT_PARSERS; `db`, `port` and `ssl` are read like those of a dict).
_URL_NUMBERS: dict[str, type[int | float]] = {
    **dict.fromkeys(["socket_timeout", "socket_connect_timeout", "timeout"], float),
    **dict.fromkeys(["socket_read_size", "max_connections", "health_check_interval"], int),
    **dict.fromkeys(["ssl_min_version", "protocol"], int),
}
# redis-py's FALSE_STRINGS, compared in upper case.
_FALSE = frozenset(["", "0", "F", "FALSE", "N", "NO"])

_WANTED = "expected a redis:// or unix:// URL, a dict of redis-py keywords or a redis.Redis client"
_ESCAPE = "in a user name or password, '/', '?', '#', '@' and '%' must be percent-encoded"

SockAddr = tuple[str, int] | tuple[str, int, int, int] | bytes


class ClientLike(Protocol):
    """A `redis.Redis` or `redis.asyncio.Redis`, as far as it is looked at."""

    connection_pool: Any


MasterSpec = str | Mapping[str, Any] | ClientLike


class _Refused(Exception):
    """Why one master is refused: text only. Never leaves this module (see `parse_masters`)."""


@final
class Secret:
    """The bytes of a password, which no repr, message, log line or pickle shows.

    Equality takes the same time wherever two values of one length differ. Pickling and copying
    raise `TypeError`.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if not isinstance(value, bytes):
            raise TypeError(f"a Secret is made of bytes, not {type(value).__name__}")
        self._value = value

    def reveal(self) -> bytes:
        """The bytes themselves, to be sent and forgotten."""
        return self._value

    def __repr__(self) -> str:
        return "Secret('***')"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(Secret)  # one for all: a hash of the value would say something about it

    def __getstate__(self, protocol: object = None) -> NoReturn:
        raise TypeError("a Secret cannot be pickled or copied")

    __reduce_ex__ = __getstate__


@dataclass(frozen=True, slots=True)
class MasterOptions:
    """How to reach one master and who to be there.

    Attributes:
        family: `socket.AF_INET`, `AF_INET6` or `AF_UNIX`.
        sockaddr: what `socket.connect` takes: (host, port), (host, port, 0, scope id), or the
            absolute path of a unix socket as bytes.
        address: `127.0.0.1:6379`, `[::1]:6379` or `unix:/path`, for errors and stats; printable,
            without db and secrets.
        db: number of the database; SELECT is due when it is not 0.
        username, password: AUTH is due when either is set, and then sends a missing password
            as an empty one (redis-py's `UsernamePasswordCredentialProvider`). None, never empty.
        client_name: for CLIENT SETNAME, or None.
    """

    family: socket.AddressFamily
    sockaddr: SockAddr
    address: str
    db: int = 0
    username: str | None = field(default=None, repr=False)  # may be a secret in the wrong place
    password: Secret | None = None
    client_name: str | None = None
    # To come here, each None by default: TLS settings (`_check_supported`), the host name that
    # resolve.py is to look up (`_inet_place`), the credential provider (`UNSUPPORTED`).


def parse_masters(masters: Sequence[MasterSpec]) -> tuple[MasterOptions, ...]:
    """Settings of all masters, in the given order.

    Parameters:
        masters: 1 to `MAX_MASTERS` of: URL (redis://, unix://), dict of redis-py keywords
            (`HONOURED`; those of `NO_EFFECT` are accepted and have none), client of redis-py 5
            to 8 (sync or asyncio, not Sentinel, Cluster or fake). Nothing of it is changed.

    Raises:
        ConfigurationError: something is not understood, not supported, or there twice. The
            message names the master by its index. A caller that has `masters` in a Python
            frame of its own should drop it before it lets this error pass.
    """
    found: list[MasterOptions] = []
    problem = _maybe_problem(masters, found)
    del masters  # from here on no frame of ours holds a URL or a password
    if problem is not None:
        raise ConfigurationError(problem)
    return tuple(found)


def _maybe_problem(masters: object, found: list[MasterOptions]) -> str | None:
    """Fill `found`; return what is wrong, as text, instead of raising."""
    if not isinstance(masters, Sequence) or isinstance(masters, (str, bytes, bytearray)):
        return f"masters must be a list or tuple of masters, not {type(masters).__name__}"
    if not 1 <= len(masters) <= MAX_MASTERS:
        return f"masters must be 1 to {MAX_MASTERS}, not {len(masters)}"
    seen: dict[object, int] = {}
    for index, master in enumerate(masters):
        try:
            if isinstance(master, str):
                options = _from_url(master)
            elif isinstance(master, Mapping):
                options = _options(master, KNOWN)
            else:
                options = _from_client(master)
        except _Refused as refused:
            return f"masters[{index}]: {refused}"
        where = options.sockaddr
        where = os.path.abspath(where) if isinstance(where, bytes) else where
        first = seen.setdefault((where, options.db), index)
        if first != index:
            which = f"{options.address} db {options.db}"
            return f"masters[{index}]: {which} is masters[{first}] already: each has one vote"
        found.append(options)
    return None


# ---- URLs ------------------------------------------------------------------------------------


def _from_url(url: str) -> MasterOptions:
    """`redis://[[user]:[password]@][host][:port][/db][?options]`, `unix://[...@]/path[?options]`.

    Split by hand: the functions of urllib.parse drop control characters, put the text into their
    errors and keep it in a cache.
    """
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", url):
        raise _Refused("a URL cannot hold line ends and other control characters")
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in ("redis", "rediss", "unix"):
        raise _Refused(
            "this text is not a URL of a master: expected redis://127.0.0.1:6379/0 "
            "or unix:///run/redis.sock"
        )
    if scheme == "rediss":
        raise _Refused("TLS is not supported yet")
    rest, hash_sign, _ = rest.partition("#")
    if hash_sign:
        raise _Refused(f"a master's URL has no fragment: {_ESCAPE}")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    userinfo, _, place = authority.rpartition("@")
    username, _, password = userinfo.partition(":")

    if scheme == "unix":
        if place:
            raise _Refused(f"unix:// takes three slashes and an absolute path, no host; {_ESCAPE}")
        known = (KNOWN | {"path"}) - {"unix_socket_path", "host", "port"}
    else:
        known = KNOWN - {"unix_socket_path"}
    given = _query(query, known)
    if username:
        given["username"] = unquote_to_bytes(username)
    if password:
        given["password"] = unquote_to_bytes(password)
    if scheme == "unix":
        given["unix_socket_path"] = given.pop("path", "")
        if path:
            given["unix_socket_path"] = unquote_to_bytes(slash + path)
    else:
        _place_from_url(given, place, path)
    return _options(given, KNOWN)


def _place_from_url(given: dict[str, object], place: str, path: str) -> None:
    """Put host, port and db of a redis:// URL into `given`."""
    db = re.fullmatch(r"([0-9]*)/?", unquote(path))
    if db is None:
        raise _Refused(f"the path of a redis:// URL is the number of a database; {_ESCAPE}")
    if db[1]:
        given.setdefault("db", db[1])  # `?db=` goes first, as in redis-py
    match = re.fullmatch(r"(\[[^][]*\]|[^][:]*)(?::([0-9]*))?", place)
    if match is None:
        raise _Refused(
            f"host and port are malformed: expected host:port or [IPv6 address]:port; {_ESCAPE}"
        )
    host, port = match.groups()
    if host:
        # A bare '%' begins a scope id, RFC 6874 writes it '%25'.
        given["host"] = unquote(host) if "%25" in host or host[0] != "[" else host
    if port:
        given["port"] = port


def _query(query: str, known: frozenset[str]) -> dict[str, object]:
    """The options behind the '?': the first one of a name counts, empty ones do not."""
    # surrogateescape: bytes that are no UTF-8 come through to the password.
    pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    _check_names((name for name, _ in pairs), known)
    given: dict[str, object] = {}
    for name, value in pairs:
        if value:
            given.setdefault(name, value)
    for name in given.keys() & _URL_NUMBERS.keys():
        try:
            _URL_NUMBERS[name](str(given[name]))
        except ValueError:
            raise _Refused(f"the value of option {name!r} is not a number") from None
    for name in given.keys() & {"username", "password", "client_name", "path"}:
        given[name] = str(given[name]).encode("utf-8", "surrogateescape")
    return given


# ---- clients of redis-py ---------------------------------------------------------------------


def _from_client(client: object) -> MasterOptions:
    """From the keywords that the pool of a redis-py client gives to its connections."""
    _check_module(type(client))
    pool = getattr(client, "connection_pool", None)
    kind = getattr(pool, "connection_class", None)
    keywords = getattr(pool, "connection_kwargs", None)
    if not isinstance(kind, type) or not isinstance(keywords, Mapping):
        raise _Refused(f"{_WANTED}, not {_name(type(client))}")
    _check_module(kind)
    if kind.__module__ not in ("redis.connection", "redis.asyncio.connection"):
        raise _Refused(f"connections of class {_name(kind)} are not supported")
    given = dict(keywords)
    if "SSL" in kind.__name__:
        given["ssl"] = True
    if "Unix" in kind.__name__:
        given["unix_socket_path"] = given.pop("path", "")
    # What this very redis-py takes is known too, so that a newer one's internals do no harm.
    bases = [base for base in kind.__mro__ if base.__module__.startswith("redis.")]
    return _options(given, KNOWN.union(*(inspect.signature(base).parameters for base in bases)))


def _check_module(cls: type) -> None:
    """Refuse what is no class of redis-py, or one for something else than a single master."""
    modules = {base.__module__ for base in cls.__mro__}
    roots = {module.partition(".")[0] for module in modules}
    if "fakeredis" in roots:
        raise _Refused(f"a fake client is not supported: {_name(cls)} has no server")
    for module, what in (("sentinel", "Sentinel"), ("cluster", "Cluster")):
        if modules & {f"redis.{module}", f"redis.asyncio.{module}"}:
            raise _Refused(f"{what} is not supported: {_WANTED} of one independent master")
    if "redis" not in roots:
        raise _Refused(f"{_WANTED}, not {_name(cls)}")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


# ---- keywords --------------------------------------------------------------------------------


def _options(given: Mapping[str, object], known: frozenset[str]) -> MasterOptions:
    """Settings from redis-py keywords; only names in `known` are allowed."""
    _check_names(given, known)
    _check_supported(given)
    path = given.get("unix_socket_path")
    if path is not None:
        family, sockaddr, address = _unix_place(path)
    else:
        port = _integer("port", given.get("port", DEFAULT_PORT), 1, 65535)
        family, sockaddr, address = _inet_place(given.get("host", DEFAULT_HOST), port)
    client_name = _maybe_text("client_name", given.get("client_name"))
    if not re.fullmatch("[!-~]*", client_name or ""):
        raise _Refused("client_name must be printable ASCII without spaces (CLIENT SETNAME)")
    db = given.get("db")
    password = _maybe_bytes("password", given.get("password"))
    return MasterOptions(
        family,
        sockaddr,
        address,
        0 if db is None else _integer("db", db, 0, MAX_DB),
        _maybe_text("username", given.get("username")),
        None if password is None else Secret(password),
        client_name,
    )


def _check_names(names: Iterable[object], known: frozenset[str]) -> None:
    unknown = [name for name in names if name not in known]
    # Only what looks like a name is shown: the rest may be a piece of a mangled URL.
    shown = [repr(name) for name in unknown if re.fullmatch("[A-Za-z0-9_]{1,64}", str(name))]
    if shown:
        raise _Refused(f"unknown option {', '.join(shown)}")
    if unknown:
        raise _Refused(f"unknown option, with a name that is not shown; {_ESCAPE}")


def _check_supported(given: Mapping[str, object]) -> None:
    """The one place that says "not supported yet" about options."""
    ssl = given.get("ssl")
    if ssl.upper() not in _FALSE if isinstance(ssl, str) else ssl:
        raise _Refused("TLS is not supported yet")
    for name, why in UNSUPPORTED.items():
        if given.get(name) is not None:
            raise _Refused(why)


def _integer(name: str, value: object, low: int, high: int) -> int:
    """An int, or a str of digits, from `low` to `high`."""
    number = None
    if isinstance(value, str):
        if re.fullmatch("[0-9]{1,10}", value):
            number = int(value)
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
    if number is None or not low <= number <= high:
        # The value is not shown: out of a URL it may be a piece of a password.
        raise _Refused(f"{name} must be an integer from {low} to {high}")
    return number


def _maybe_bytes(name: str, value: object) -> bytes | None:
    """A str in UTF-8, whatever `encoding` says; None for None and for an empty one (redis-py)."""
    if isinstance(value, Secret):
        value = value.reveal()
    with contextlib.suppress(UnicodeError):
        value = value.encode() if isinstance(value, str) else value
    if value is None or isinstance(value, bytes):
        return value or None
    if isinstance(value, str):
        raise _Refused(f"{name} is not valid UTF-8")
    raise _Refused(f"{name} must be str or bytes, not {type(value).__name__}")


def _maybe_text(name: str, value: object) -> str | None:
    try:
        return (_maybe_bytes(name, value) or b"").decode() or None
    except UnicodeError:
        raise _Refused(f"{name} is not valid UTF-8") from None


# ---- addresses -------------------------------------------------------------------------------


def _unix_place(path: object) -> tuple[socket.AddressFamily, SockAddr, str]:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise _Refused(f"the path of a unix socket must be str, not {type(path).__name__}")
    try:
        name = os.fsdecode(path)
        # Normalising "link/../x" would change which file it is, so that is left to the kernel.
        normal = os.path.abspath(name) if ".." not in name.split("/") else name
        full = re.sub("^//", "/", os.path.join(os.getcwd(), normal))
        sockaddr = os.fsencode(full)
    except (OSError, UnicodeError) as error:
        raise _Refused(f"the path of the unix socket cannot be used: {error}") from None
    if not name or b"\0" in sockaddr:
        raise _Refused("a unix socket needs a path, and one without NUL (no abstract names)")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in full)
    if len(sockaddr) > MAX_UNIX_PATH:
        raise _Refused(
            f"the path of a unix socket is at most {MAX_UNIX_PATH} bytes: "
            f"{shown} has {len(sockaddr)}"
        )
    return socket.AF_UNIX, sockaddr, f"unix:{shown}"


def _inet_place(host: object, port: int) -> tuple[socket.AddressFamily, SockAddr, str]:
    """Address literals and `localhost`. TODO with resolve.py: keep the host name."""
    if not isinstance(host, str):
        raise _Refused(f"host must be str, not {type(host).__name__}")
    bracketed = host[:1] == "[" and host[-1:] == "]"
    text = host[1:-1] if bracketed else host
    if text.lower() == "localhost" and not bracketed:
        text = "127.0.0.1"
    literal, percent, scope = text.partition("%")
    try:
        ip = ipaddress.ip_address(literal)
        if isinstance(ip, ipaddress.IPv4Address) and (bracketed or percent):
            raise ValueError
    except ValueError:
        # A name is shown if it can be one: somebody may have put a whole URL here.
        name = f", not {host!r}" if re.fullmatch(r"[\w.-]{1,253}", host, re.ASCII) else ""
        raise _Refused(f"host names are not supported yet: use an address{name}") from None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None and not percent:
        ip = ip.ipv4_mapped  # the same server, and works where IPv6 is switched off
    if isinstance(ip, ipaddress.IPv4Address):
        return socket.AF_INET, (str(ip), port), f"{ip}:{port}"
    index = _scope_index(ip, scope) if percent else 0
    return socket.AF_INET6, (str(ip), port, 0, index), f"[{ip}{percent}{scope}]:{port}"


def _scope_index(ip: ipaddress.IPv6Address, scope: str) -> int:
    """Number of the network interface `scope`, a name or (as getaddrinfo has it) a number."""
    if not ip.is_link_local:
        raise _Refused("only a link-local IPv6 address (fe80::/10) takes a scope id")
    try:
        if re.fullmatch("[1-9][0-9]{0,8}", scope):
            socket.if_indextoname(int(scope))
            return int(scope)
        return socket.if_nametoindex(scope)
    except (OSError, ValueError):
        raise _Refused("the scope id of the IPv6 address names no network interface") from None
