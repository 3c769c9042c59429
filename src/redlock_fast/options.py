"""What a user passes as `masters`, turned into plain typed settings.

Given: a sequence of URLs, dicts of redis-py keywords and client objects of redis-py or valkey-py.
Returns: one frozen `MasterOptions` for each. Driven by the constructors of both facades, once. A
leaf: it opens no socket, looks up no name, sends nothing, imports no redis-py, and keeps nothing
of what it was given but the credential provider. Every complaint is a `ConfigurationError`, raised
from a frame that holds neither password nor URL, with no other exception chained to it.

All forms become a dict of redis-py keywords (`_settings.urls`, `_settings.clients`), which
`_options` turns into settings by way of `_settings.addresses` and `tls`. The conventions are
redis-py's (`Redis.__init__`; 5.0 to 8.1); where these modules are stricter they say so.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from redlock_fast._settings.addresses import Place, SockAddr, Where, inet_where, unix_where
from redlock_fast._settings.clients import keywords_of_client
from redlock_fast._settings.keywords import KNOWN, UNSUPPORTED, check_names
from redlock_fast._settings.urls import keywords_of_url
from redlock_fast._settings.values import (
    Refused,
    Secret,
    integer,
    is_true,
    maybe_secret,
    maybe_text,
)
from redlock_fast.errors import ConfigurationError

if TYPE_CHECKING:
    from redlock_fast.tls import Contexts, TlsOptions

__all__ = [
    "MAX_MASTERS",
    "MasterOptions",
    "MasterSpec",
    "Place",
    "Secret",
    "SockAddr",
    "parse_masters",
]

# Ours: nobody runs more independent masters than this; it bounds the arrays of the core.
MAX_MASTERS = 32
# redis-py's defaults (`Redis.__init__`).
DEFAULT_HOST = "localhost"
DEFAULT_PORT = 6379
# SELECT takes a C int; how many databases there are is the server's business.
MAX_DB = 2**31 - 1


class ClientLike(Protocol):
    """A client of redis-py or valkey-py, sync or asyncio, as far as it is looked at."""

    connection_pool: Any


MasterSpec = str | Mapping[str, Any] | ClientLike


@dataclass(frozen=True, slots=True)
class MasterOptions:
    """How to reach one master and who to be there.

    Attributes:
        address: `127.0.0.1:6379`, `[::1]:6379`, `name.example:6379` or `unix:/path`, for errors
            and stats; printable, without db and secrets.
        places: what to connect to, in order of preference: address families (`socket.AF_INET`,
            `AF_INET6`, `AF_UNIX`) and what `socket.connect` takes for them: (host, port), (host,
            port, 0, scope id), or the absolute path of a unix socket as bytes. Empty: `host` has
            to be looked up.
        host: a host name, in ASCII, to be looked up at each connect; None when `places` says where.
        port: goes with `host`, else 0.
        db: number of the database; SELECT is due when it is not 0.
        username, password: AUTH is due when either is set, and then sends a missing password
            as an empty one (redis-py's `UsernamePasswordCredentialProvider`). None, never empty.
        client_name: for CLIENT SETNAME, or None.
        tls: TLS is spoken when it is set.
        credential_provider: has `get_credentials() -> (username, password)` or `(password,)`, to
            be asked at each connect; `username` and `password` are None then.
    """

    address: str
    places: tuple[Place, ...] = ()
    host: str | None = None
    port: int = 0
    db: int = 0
    username: str | None = field(default=None, repr=False)  # may be a secret in the wrong place
    password: Secret | None = None
    client_name: str | None = None
    tls: TlsOptions | None = None
    credential_provider: object | None = field(default=None, repr=False, hash=False)


def parse_masters(masters: Sequence[MasterSpec]) -> tuple[MasterOptions, ...]:
    """Settings of all masters, in the given order.

    Parameters:
        masters: 1 to `MAX_MASTERS` of: URL (redis, rediss, valkey, valkeys, unix), dict of
            redis-py keywords (`_settings.keywords`: some have no effect), client of redis-py 5
            to 8 or valkey-py 6 (sync or asyncio, not Sentinel, Cluster or fake). Nothing of it is
            changed. Files of certificates and keys are read now.

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
    seen: dict[Hashable, int] = {}
    contexts: Contexts = {}
    for index, master in enumerate(masters):
        try:
            if isinstance(master, str):
                options = _options(keywords_of_url(master), KNOWN, contexts)
            elif isinstance(master, Mapping):
                options = _options(master, KNOWN, contexts)
            else:
                options = _options(*keywords_of_client(master), contexts)
        except Refused as refused:
            return f"masters[{index}]: {refused}"
        for where in _identities(options):
            first = seen.setdefault((where, options.db), index)
            if first != index:
                which = f"{options.address} db {options.db}"
                return f"masters[{index}]: {which} is masters[{first}] already: each has one vote"
        found.append(options)
    return None


def _identities(options: MasterOptions) -> Iterator[Hashable]:
    """By what it is recognised as the same master; one thing in common is enough."""
    if options.host is not None:
        yield options.host.removesuffix("."), options.port
    for _, sockaddr in options.places:
        yield os.path.abspath(sockaddr) if isinstance(sockaddr, bytes) else sockaddr


def _options(
    given: Mapping[str, object], known: frozenset[str], contexts: Contexts
) -> MasterOptions:
    """Settings from redis-py keywords; only names in `known` are allowed."""
    check_names(given, known)
    for name, why in UNSUPPORTED.items():
        if given.get(name) is not None:
            raise Refused(why)
    path = given.get("unix_socket_path")
    port = 0
    if path is not None:
        where = unix_where(path)
    else:
        port = integer("port", given.get("port", DEFAULT_PORT), 1, 65535)
        where = inet_where(given.get("host", DEFAULT_HOST), port)
    client_name = maybe_text("client_name", given.get("client_name"))
    if not re.fullmatch("[!-~]*", client_name or ""):
        raise Refused("client_name must be printable ASCII without spaces (CLIENT SETNAME)")
    db = given.get("db")
    username = maybe_text("username", given.get("username"))
    password = maybe_secret("password", given.get("password"))
    return MasterOptions(
        address=where.address,
        places=where.places,
        host=where.host,
        port=0 if where.host is None else port,
        db=0 if db is None else integer("db", db, 0, MAX_DB),
        username=username,
        password=password,
        client_name=client_name,
        tls=_maybe_tls(given, where, contexts),
        credential_provider=_maybe_provider(given, username or password),
    )


def _maybe_tls(given: Mapping[str, object], where: Where, contexts: Contexts) -> TlsOptions | None:
    if not is_true(given.get("ssl")):
        return None
    if where.tls_name is None:
        raise Refused("TLS over a unix socket is not supported: leave out either")
    try:
        # Here, since a Python may lack it, and most users do not need it.
        from redlock_fast.tls import tls_options
    except ImportError:
        raise Refused("this Python was built without its ssl module") from None
    return tls_options(given, where.tls_name, contexts)


def _maybe_provider(given: Mapping[str, object], credentials: object) -> object | None:
    provider = given.get("credential_provider")
    if provider is None:
        return None
    ask = getattr(provider, "get_credentials", None)
    if not callable(ask) or isinstance(provider, type):
        raise Refused("credential_provider must be an object with a get_credentials method")
    if inspect.iscoroutinefunction(ask):
        raise Refused("credential_provider: get_credentials must be no coroutine function")
    if credentials:
        raise Refused("credential_provider cannot be given together with username or password")
    return provider
