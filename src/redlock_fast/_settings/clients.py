"""Clients of redis-py 5 to 8 and valkey-py 6, turned into redis-py keywords.

Given: a client object, sync or asyncio. Returns: the keywords that its pool gives to connections.
The client is only looked at. Neither library is imported: classes are known by their modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from redlock_fast._settings.keywords import KNOWN
from redlock_fast._settings.values import Refused

__all__ = ["keywords_of_client"]

_WANTED = (
    "expected a redis://, rediss:// or unix:// URL, a dict of redis-py keywords "
    "or a redis.Redis or valkey.Valkey client"
)
_LIBRARIES = ("redis", "valkey")
_CONNECTIONS = {
    f"{library}{flavour}.connection" for library in _LIBRARIES for flavour in ("", ".asyncio")
}


def keywords_of_client(client: object) -> tuple[dict[str, object], frozenset[str]]:
    """The keywords, and the names that are known for this client."""
    _check_class(type(client))
    pool = getattr(client, "connection_pool", None)
    kind = getattr(pool, "connection_class", None)
    keywords = getattr(pool, "connection_kwargs", None)
    if not isinstance(kind, type) or not isinstance(keywords, Mapping):
        raise Refused(f"{_WANTED}, not {_name(type(client))}")
    _check_class(kind)
    if kind.__module__ not in _CONNECTIONS:
        raise Refused(f"connections of class {_name(kind)} are not supported")
    given = dict(keywords)
    parameters = _parameters(kind)
    if "SSL" in kind.__name__:
        given["ssl"] = True
        _forget_default(given, parameters)
    if "Unix" in kind.__name__:
        given["unix_socket_path"] = given.pop("path", "")
    # What this very library takes is known too, so that a newer one's internals do no harm. Not so
    # a TLS option that somebody has set: it may ask for more protection than there would be.
    known = {
        name
        for name, default in parameters.items()
        if not name.startswith("ssl_") or given.get(name, default) is default
    }
    return given, KNOWN | known


def _parameters(kind: type) -> dict[str, object]:
    """All that a connection class takes, and the defaults."""
    found: dict[str, object] = {}
    for base in kind.__mro__:
        if _root(base) in _LIBRARIES:
            for parameter in inspect.signature(base).parameters.values():
                found.setdefault(parameter.name, parameter.default)
    return found


def _forget_default(given: dict[str, object], parameters: dict[str, object]) -> None:
    """Drop `ssl_check_hostname=False` where nobody may have asked for it.

    It is the default of redis-py before 6.0 and of valkey-py. Their constructors hand all TLS
    options to the pool, so that a default and a wish look the same: the safe one is taken then.
    From `from_url`, or a pool that the user made, come only options that somebody has given.
    """
    options = {name for name in parameters if name.startswith("ssl_")}
    name = "ssl_check_hostname"
    if options <= given.keys() and given.get(name) is parameters.get(name) is False:
        del given[name]


def _check_class(cls: type) -> None:
    """Refuse what is no class of these libraries, or one for something else than one master."""
    modules = {base.__module__ for base in cls.__mro__}
    roots = {_root(base) for base in cls.__mro__}
    if "fakeredis" in roots:
        raise Refused(f"a fake client is not supported: {_name(cls)} has no server")
    for module, what in (("sentinel", "Sentinel"), ("cluster", "Cluster")):
        for library in _LIBRARIES:
            if modules & {f"{library}.{module}", f"{library}.asyncio.{module}"}:
                raise Refused(f"{what} is not supported: {_WANTED} of one independent master")
    if not roots.intersection(_LIBRARIES):
        raise Refused(f"{_WANTED}, not {_name(cls)}")


def _root(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
