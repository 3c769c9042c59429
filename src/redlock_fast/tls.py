"""TLS settings: an `ssl.SSLContext` made from redis-py's keywords.

Given: redis-py keywords of one master that is to be spoken to over TLS, and the name that its
certificate has to bear. Returns: `TlsOptions`. Driven by options.py, which imports it only when
somebody wants TLS. It reads the named files of certificates and keys, and the system's CA
certificates; it does no network I/O. Every complaint is a `Refused`, which names the option and
never shows a value, a password or a piece of a key.

The meaning is redis-py's (`redis.connection.SSLConnection`): CA certificates given come on top of
the system's. Other than there, and on purpose:

- Certificate and host name are checked unless an option says otherwise, whatever the version of
  redis-py (before 6.0, and in valkey-py, host names are not checked by default).
- `ssl_cert_reqs` none (or None) needs no `ssl_check_hostname=False` beside it.
- No password for an encrypted key is ever asked for on the terminal.
- TLS 1.2 is the least; OCSP options are refused, since nothing here looks at them.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from redlock_fast._settings.values import Refused, Secret, is_true, maybe_secret, maybe_text

__all__ = ["Contexts", "TlsOptions", "tls_options"]

_VERIFY = {
    "NONE": ssl.CERT_NONE,
    "OPTIONAL": ssl.CERT_OPTIONAL,
    "REQUIRED": ssl.CERT_REQUIRED,
    **{str(mode.value): mode for mode in ssl.VerifyMode},
}
_VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
_OCSP = (
    "ssl_validate_ocsp",
    "ssl_validate_ocsp_stapled",
    "ssl_ocsp_context",
    "ssl_ocsp_expected_cert",
)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How to speak TLS to one master.

    Attributes:
        context: complete; its `wrap_bio` is all that is needed. Masters with the same settings
            share one.
        server_hostname: what SNI and the check of the certificate use, a name or an IP address.
    """

    context: ssl.SSLContext = field(repr=False)
    server_hostname: str | None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """All that a context is made of."""

    verify: ssl.VerifyMode
    check_hostname: bool
    ca_certs: str | None
    ca_path: str | None
    ca_data: str | bytes | None
    certfile: str | None
    keyfile: str | None
    password: Secret | None
    minimum: ssl.TLSVersion
    ciphers: str | None
    include: ssl.VerifyFlags
    exclude: ssl.VerifyFlags


# The contexts made so far, by what they are made of: reading the system's CA certificates takes
# tens of milliseconds.
Contexts = dict[_Wanted, ssl.SSLContext]


def tls_options(
    given: Mapping[str, object], server_hostname: str | None, contexts: Contexts
) -> TlsOptions:
    """TLS settings from redis-py keywords; `contexts` is looked into and added to."""
    for name in _OCSP:
        if is_true(given.get(name)):
            raise Refused(f"{name} is not supported: no OCSP responses are looked at")
    wanted = _wanted(given)
    context = contexts.get(wanted)
    if context is None:
        context = contexts[wanted] = _context(wanted)
    return TlsOptions(context, server_hostname)


def _wanted(given: Mapping[str, object]) -> _Wanted:
    verify = _verify_mode(given.get("ssl_cert_reqs", ssl.CERT_REQUIRED))
    check = given.get("ssl_check_hostname")
    return _Wanted(
        verify,
        # Like None, an empty text says nothing: that must not switch a check off.
        verify != ssl.CERT_NONE and (check in (None, "") or is_true(check)),
        _maybe_file("ssl_ca_certs", given),
        _maybe_file("ssl_ca_path", given),
        _maybe_data("ssl_ca_data", given.get("ssl_ca_data")),
        _maybe_file("ssl_certfile", given),
        _maybe_file("ssl_keyfile", given),
        maybe_secret("ssl_password", given.get("ssl_password")),
        _version(given.get("ssl_min_version")),
        maybe_text("ssl_ciphers", given.get("ssl_ciphers")),
        _flags("ssl_include_verify_flags", given),
        _flags("ssl_exclude_verify_flags", given),
    )


# ---- values ----------------------------------------------------------------------------------


def _verify_mode(value: object) -> ssl.VerifyMode:
    """None is none, as in redis-py."""
    if value is None:
        return ssl.CERT_NONE
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        text = value if isinstance(value, str) else str(int(value))
        mode = _VERIFY.get(text.upper().removeprefix("CERT_"))
        if mode is not None:
            return mode
    raise Refused("ssl_cert_reqs must be 'none', 'optional' or 'required'")


def _version(value: object) -> ssl.TLSVersion:
    if value is None:
        return ssl.TLSVersion.TLSv1_2
    for version in _VERSIONS:
        if value == version or value == str(version.value):
            return version
    numbers = " or ".join(f"{version.value} ({version.name})" for version in _VERSIONS)
    raise Refused(f"ssl_min_version must be {numbers}")


def _maybe_file(name: str, given: Mapping[str, object]) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, (str, bytes, os.PathLike)):
        raise Refused(f"{name} must be the path of a file, not {type(value).__name__}")
    try:
        path = os.fsdecode(value or "")
        usable = b"\0" not in os.fsencode(path)
    except UnicodeError:
        usable = False
    if not usable:
        raise Refused(f"{name} must be the path of a file: no file has such a name")
    return path or None


def _maybe_data(name: str, value: object) -> str | bytes | None:
    """Certificates: PEM as str, DER as bytes."""
    if value is None or isinstance(value, (str, bytes)):
        return value or None
    raise Refused(f"{name} must be str (PEM) or bytes (DER), not {type(value).__name__}")


def _flags(name: str, given: Mapping[str, object]) -> ssl.VerifyFlags:
    """A list of `ssl.VerifyFlags` or of their names, or a text such as "[VERIFY_X509_STRICT]"."""
    value = given.get(name)
    if isinstance(value, str):
        value = [word for word in re.split(r"[\s,\[\]]+", value) if word]
    elif value is None or isinstance(value, ssl.VerifyFlags):
        value = [value or 0]
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise Refused(f"{name} must be a list of ssl.VerifyFlags, not {type(value).__name__}")
    found = 0
    for flag in value:
        number = ssl.VerifyFlags.__members__.get(flag) if isinstance(flag, str) else flag
        if not isinstance(number, int) or not 0 <= number < 2**31:
            raise Refused(f"{name} holds something else than ssl.VerifyFlags or their names")
        found |= number
    return ssl.VerifyFlags(found)


# ---- the context -----------------------------------------------------------------------------


def _context(wanted: _Wanted) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context()
    except OSError as error:  # a file that the environment names, such as SSLKEYLOGFILE
        raise Refused(f"TLS cannot be set up: {error.strerror}") from None
    # Never less than what the system's policy demands.
    context.minimum_version = max(context.minimum_version, wanted.minimum)
    context.check_hostname = wanted.check_hostname
    context.verify_mode = wanted.verify
    context.verify_flags = (context.verify_flags | wanted.include) & ~wanted.exclude
    _load_authorities(context, wanted)
    if wanted.certfile is not None:
        _load_own(context, wanted.certfile, wanted.keyfile, wanted.password)
    elif wanted.keyfile is not None:
        raise Refused("ssl_keyfile needs ssl_certfile, the certificate of that key")
    if wanted.ciphers is not None:
        try:
            context.set_ciphers(wanted.ciphers)
        except (ssl.SSLError, ValueError):
            raise Refused("ssl_ciphers names no cipher that this OpenSSL has for TLS 1.2") from None
    return context


def _load_authorities(context: ssl.SSLContext, wanted: _Wanted) -> None:
    if wanted.ca_certs is not None:
        try:
            context.load_verify_locations(cafile=wanted.ca_certs)
        except ssl.SSLError as error:
            raise Refused(f"ssl_ca_certs holds no certificates in PEM: {_why(error)}") from None
        except OSError as error:
            raise Refused(f"ssl_ca_certs cannot be read: {error.strerror}") from None
    if wanted.ca_path is not None:
        # OpenSSL would look into it later, and say nothing if it is not there.
        if not os.path.isdir(wanted.ca_path):
            raise Refused("ssl_ca_path is not a directory")
        context.load_verify_locations(capath=wanted.ca_path)
    if wanted.ca_data is not None:
        try:
            context.load_verify_locations(cadata=wanted.ca_data)
        except (ssl.SSLError, TypeError) as error:
            form = "PEM (as str)" if isinstance(wanted.ca_data, str) else "DER (as bytes)"
            why = _why(error) if isinstance(error, ssl.SSLError) else "it is not ASCII"
            raise Refused(f"ssl_ca_data is malformed: no certificates in {form}: {why}") from None


def _load_own(
    context: ssl.SSLContext, certfile: str, keyfile: str | None, password: Secret | None
) -> None:
    # Without any password OpenSSL would ask for one, on the terminal, and wait.
    secret = b"" if password is None else password.reveal()
    try:
        context.load_cert_chain(certfile, keyfile, secret)
        return
    except ssl.SSLError as error:
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        why = _why(error)
    except ValueError:
        raise Refused("ssl_password is too long (more than 1024 bytes)") from None
    except OSError:
        mismatch, why = False, "it cannot be read"
    # Which file it was, and what is wrong with it, OpenSSL does not tell.
    cert = _content("ssl_certfile", certfile)
    key_option = "ssl_certfile" if keyfile is None else "ssl_keyfile"
    key = cert if keyfile is None else _content(key_option, keyfile)
    if mismatch:
        raise Refused(f"{key_option}: the key is not the one of the certificate in ssl_certfile")
    if b"-----BEGIN CERTIFICATE-----" not in cert:
        raise Refused("ssl_certfile holds no certificate in PEM")
    if b"PRIVATE KEY-----" not in key:
        hint = "; name its file with ssl_keyfile" if keyfile is None else ""
        raise Refused(f"{key_option} holds no private key in PEM{hint}")
    if b"ENCRYPTED" in key:
        said = "is needed" if password is None else "is wrong"
        raise Refused(f"ssl_password {said}: the key in {key_option} is encrypted")
    raise Refused(f"ssl_certfile or {key_option} is malformed: {why}")


def _content(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Refused(f"{name} cannot be read: {error.strerror}") from None


def _why(error: ssl.SSLError) -> str:
    """OpenSSL's words, without the place in the source of Python's ssl module."""
    return re.sub(r" \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
