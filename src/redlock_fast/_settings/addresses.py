"""Where a master is: what to connect to, or which name to look up, and what to call it.

Given: a host and port, or the path of a unix socket. Returns: a `Where`. Address literals and
`localhost` need no look-up; any other name is only checked here and kept.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from typing import NamedTuple

from redlock_fast._settings.values import Refused

__all__ = ["Place", "SockAddr", "Where", "inet_where", "unix_where"]

# unix(7): sun_path is 108 bytes on Linux, one of them for the end of the string.
MAX_UNIX_PATH = 107
# RFC 1035: a name has 255 bytes on the wire, which are 253 characters without the final dot.
MAX_HOST = 253
# RFC 1123, and the underscores that some private zones have.
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
# What getaddrinfo would take for an IPv4 address, such as 127.1 or 0x7f000001.
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?")
# IDNA 2003, which Python has, makes another name of them than IDNA 2008.
_DEVIATIONS = frozenset("ßς\u200c\u200d")

SockAddr = tuple[str, int] | tuple[str, int, int, int] | bytes
Place = tuple[socket.AddressFamily, SockAddr]


class Where(NamedTuple):
    """Where a master is.

    Attributes:
        address: printable: `127.0.0.1:6379`, `[::1]:6379`, `name.example:6379`, `unix:/path`.
        places: address families and what `socket.connect` takes, in order of preference: (host,
            port), (host, port, 0, scope id), or the absolute path of a unix socket as bytes.
        host: a name to look up, in ASCII and lower case, if there are no places.
        tls_name: what the server's certificate has to name: `host` without a final dot, or an IP
            address; None for a unix socket.
    """

    address: str
    places: tuple[Place, ...] = ()
    host: str | None = None
    tls_name: str | None = None


def unix_where(path: object) -> Where:
    """A unix socket; a relative path is one of the current directory."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise Refused(f"the path of a unix socket must be str, not {type(path).__name__}")
    try:
        name = os.fsdecode(path)
        # Normalising "link/../x" would change which file it is, so that is left to the kernel.
        normal = os.path.abspath(name) if ".." not in name.split("/") else name
        full = re.sub("^//", "/", os.path.join(os.getcwd(), normal))
        sockaddr = os.fsencode(full)
    except (OSError, UnicodeError) as error:
        raise Refused(f"the path of the unix socket cannot be used: {error}") from None
    if not name or b"\0" in sockaddr:
        raise Refused("a unix socket needs a path, and one without NUL (no abstract names)")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in full)
    if len(sockaddr) > MAX_UNIX_PATH:
        raise Refused(
            f"the path of a unix socket is at most {MAX_UNIX_PATH} bytes: "
            f"{shown} has {len(sockaddr)}"
        )
    return Where(f"unix:{shown}", ((socket.AF_UNIX, sockaddr),))


def inet_where(host: object, port: int) -> Where:
    """An IP address (an IPv6 one with or without brackets), `localhost` or another host name."""
    if not isinstance(host, str):
        raise Refused(f"host must be str, not {type(host).__name__}")
    bracketed = host[:1] == "[" and host[-1:] == "]"
    literal, percent, scope = (host[1:-1] if bracketed else host).partition("%")
    try:
        ip = ipaddress.ip_address(literal)
    except ValueError:
        return _named(host, port)
    if isinstance(ip, ipaddress.IPv4Address) and (bracketed or percent):
        return _named(host, port)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None and not percent:
        ip = ip.ipv4_mapped  # the same server, and works where IPv6 is switched off
    if isinstance(ip, ipaddress.IPv4Address):
        return Where(f"{ip}:{port}", (_v4(ip, port),), None, str(ip))
    index = _scope_index(ip, scope) if percent else 0
    return Where(f"[{ip}{percent}{scope}]:{port}", (_v6(ip, port, index),), None, str(ip))


def _v4(ip: object, port: int) -> Place:
    return socket.AF_INET, (str(ip), port)


def _v6(ip: object, port: int, index: int = 0) -> Place:
    return socket.AF_INET6, (str(ip), port, 0, index)


def _named(host: str, port: int) -> Where:
    """A host name. One that cannot be one is not shown: somebody may have put a URL here."""
    name = host.lower()
    if len(host) <= MAX_HOST + 1 and not host.isascii():
        if _DEVIATIONS.intersection(name):
            raise Refused("host has a letter that IDNA 2003 and 2008 encode differently: use xn--")
        try:
            name = host.encode("idna").decode().lower()
        except UnicodeError:
            raise Refused("host cannot be encoded as an international host name (IDNA)") from None
    if _NUMBER.fullmatch(name):
        raise Refused("host ends in a number, but is no IPv4 address such as 192.0.2.1")
    bare = name.removesuffix(".")
    if len(bare) > MAX_HOST or not _HOST.fullmatch(name):
        raise Refused("host is neither an IP address nor a possible host name")
    address = f"{name}:{port}"
    if bare == "localhost":
        return Where(f"{bare}:{port}", (_v4("127.0.0.1", port), _v6("::1", port)), None, bare)
    return Where(address, (), name, bare)


def _scope_index(ip: ipaddress.IPv6Address, scope: str) -> int:
    """Number of the network interface `scope`, a name or (as getaddrinfo has it) a number."""
    if not ip.is_link_local:
        raise Refused("only a link-local IPv6 address (fe80::/10) takes a scope id")
    try:
        if re.fullmatch("[1-9][0-9]{0,8}", scope):
            socket.if_indextoname(int(scope))
            return int(scope)
        return socket.if_nametoindex(scope)
    except (OSError, ValueError):
        raise Refused("the scope id of the IPv6 address names no network interface") from None
