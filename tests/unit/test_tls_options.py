"""TLS settings: what redis-py's keywords make of a context, tried by a handshake in memory."""

from __future__ import annotations

import contextlib
import inspect
import os
import ssl
import sys
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from integration.certs import KEY_PASSWORD, Certs, Identity
from unit.settings import CLIENTS, one, refused

from redlock_fast.options import MAX_MASTERS, MasterOptions, parse_masters
from redlock_fast.tls import TlsOptions

case = pytest.mark.case
LEAKY = "S3cr3t!"


@pytest.fixture(autouse=True)
def _few_authorities(monkeypatch: pytest.MonkeyPatch, certs: Certs) -> None:
    """Those of the system take long to read, and may be any."""
    monkeypatch.setenv("SSL_CERT_FILE", certs.client.cert)  # which signs nothing
    monkeypatch.setenv("SSL_CERT_DIR", os.path.dirname(certs.ca))


def tls_of(options: MasterOptions) -> TlsOptions:
    assert options.tls is not None
    return options.tls


def context_of(**keywords: Any) -> ssl.SSLContext:
    return tls_of(one({"ssl": True, **keywords})).context


def shake(options: MasterOptions, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """A whole handshake in memory: the client's end and the server's."""
    tls = tls_of(options)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        tls.context.wrap_bio(back, there, server_hostname=tls.server_hostname),
        server.wrap_bio(there, back, server_side=True),
    )
    for _ in range(3):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    with contextlib.suppress(ssl.SSLWantReadError):
        ends[0].read(1)  # in TLS 1.3, what the server says to the client's certificate
    return ends


def accepted(options: MasterOptions, server: ssl.SSLContext) -> bool:
    try:
        shake(options, server)
    except ssl.SSLCertVerificationError:
        return False
    return True


# ---- what is checked -------------------------------------------------------------------------


@case("C64")
@pytest.mark.parametrize(
    ("who", "host", "good"),
    [
        ("server", "127.0.0.1", True),
        ("server", "::1", True),
        ("server", "localhost", True),
        ("server", "LOCALHOST.", True),
        ("server", "::ffff:127.0.0.1", True),
        ("server", "127.0.0.2", False),
        ("server", "redis.example", False),
        ("names", "redis.example", True),
        ("names", "Redis.Example.", True),
        ("names", "a.wild.example", True),
        ("names", "a.b.wild.example", False),
        ("names", "127.0.0.1", False),
        ("other", "localhost", False),
        ("other", "other.example", True),
        ("expired", "localhost", False),
        ("stranger", "localhost", False),
    ],
)
def test_certificate_and_name_are_checked(certs: Certs, who: str, host: str, good: bool) -> None:
    server = certs.server_context(getattr(certs, who))
    place = f"[{host}]" if ":" in host else host
    query = f"ssl_ca_certs={quote(certs.ca)}"
    for master in (
        f"rediss://{place}?{query}",
        f"valkeys://{place}?{query}&ssl=true",
        f"redis://{place}?ssl=1&{query}",
        {"host": host, "ssl": True, "ssl_ca_certs": certs.ca},
        {"host": host, "ssl": "yes", "ssl_ca_certs": certs.ca, "ssl_cert_reqs": "required"},
        {"host": host, "ssl": True, "ssl_ca_certs": certs.ca, "ssl_check_hostname": "true"},
    ):
        assert accepted(one(master), server) is good


@case("C64")
def test_an_authority_that_is_not_known(certs: Certs) -> None:
    assert not accepted(one("rediss://localhost"), certs.server_context())


@case("C64", "C129")
@pytest.mark.parametrize("value", ["false", "False", "0", "no", "NO", "n", "f", "off"])
def test_no_check_of_the_host_name_as_text(certs: Certs, value: str) -> None:
    url = certs.url(6379, "redis.example", ssl_check_hostname=value)
    keywords = {"host": "redis.example", "ssl_ca_certs": certs.ca, "ssl_check_hostname": value}
    for master in (url, {"ssl": True, **keywords}):
        assert accepted(one(master), certs.server_context(certs.other))
        assert not accepted(one(master), certs.server_context(certs.stranger))
        assert not accepted(one(master), certs.server_context(certs.expired))


@case("C64")
def test_no_check_of_the_host_name_as_a_bool(certs: Certs) -> None:
    for value, good in (
        (False, True),
        (0, True),
        (True, False),
        (1, False),
        (None, False),
        ("", False),
    ):
        keywords = {"host": "localhost", "ssl_ca_certs": certs.ca, "ssl_check_hostname": value}
        options = one({"ssl": True, **keywords})
        assert accepted(options, certs.server_context(certs.other)) is good


@case("C64")
@pytest.mark.parametrize(
    "value", ["none", "NONE", "None", "CERT_NONE", "cert_none", "0", 0, ssl.CERT_NONE, None]
)
@pytest.mark.parametrize("check", [{}, {"ssl_check_hostname": True}, {"ssl_check_hostname": None}])
def test_no_check_at_all(certs: Certs, value: Any, check: dict[str, Any]) -> None:
    options = [one({"ssl": True, "ssl_cert_reqs": value, **check})]
    if isinstance(value, str):
        options.append(one(f"rediss://localhost?ssl_cert_reqs={value}&ssl_check_hostname=true"))
    for each in options:
        assert tls_of(each).context.check_hostname is False
        for who in (certs.other, certs.stranger, certs.expired):
            assert accepted(each, certs.server_context(who))


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("required", ssl.CERT_REQUIRED),
        ("CERT_REQUIRED", ssl.CERT_REQUIRED),
        ("2", ssl.CERT_REQUIRED),
        (2, ssl.CERT_REQUIRED),
        (ssl.CERT_REQUIRED, ssl.CERT_REQUIRED),
        ("optional", ssl.CERT_OPTIONAL),
        (1, ssl.CERT_OPTIONAL),
    ],
)
def test_levels_of_verification(value: Any, mode: ssl.VerifyMode) -> None:
    context = context_of(ssl_cert_reqs=value)
    assert (context.verify_mode, context.check_hostname) == (mode, True)


@pytest.mark.parametrize("value", ["", "nope", "3", -1, 3, True, False, 1.0, b"none", [], object()])
def test_other_levels_of_verification(value: Any) -> None:
    message = refused([{"ssl": True, "ssl_cert_reqs": value}])
    assert message == "masters[0]: ssl_cert_reqs must be 'none', 'optional' or 'required'"


def test_the_name_for_the_server(certs: Certs) -> None:
    seen: list[str | None] = []
    server = certs.server_context()
    server.sni_callback = lambda tls, name, context: seen.append(name)
    for host in ("redis.example", "Käse.example.", "localhost.", "127.0.0.1", "fe80::1%1"):
        with mock.patch("socket.if_indextoname", {1: "lo"}.__getitem__):
            shake(one({"host": host, "ssl": True, "ssl_cert_reqs": "none"}), server)
    assert seen == ["redis.example", "xn--kse-qla.example", "localhost", None, None]


# ---- clients ---------------------------------------------------------------------------------


@case("C64")
@CLIENTS
def test_tls_of_clients(module: Any, name: str, certs: Certs) -> None:
    make = getattr(module, name)
    url = certs.url(7, "localhost")
    good, wrong = certs.server_context(), certs.server_context(certs.other)
    for client in (
        make(host="localhost", ssl=True, ssl_ca_certs=certs.ca),
        make(host="localhost", ssl=True, ssl_ca_certs=certs.ca, ssl_check_hostname=True),
        make.from_url(url),
        make.from_url(url, ssl_check_hostname=True),
        make.from_url(url, ssl_check_hostname=None),
    ):
        before = dict(client.connection_pool.connection_kwargs)
        assert accepted(one(client), good)
        assert not accepted(one(client), wrong)
        assert client.connection_pool.connection_kwargs == before
    for client in (
        make.from_url(f"{url}&ssl_check_hostname=false"),
        make.from_url(url, ssl_check_hostname=False),
        make(host="localhost", ssl=True, ssl_cert_reqs="none"),
        make(host="localhost", ssl=True, ssl_cert_reqs=None, ssl_check_hostname=False),
        make(host="localhost", ssl=True, ssl_cert_reqs=ssl.CERT_NONE, ssl_check_hostname=False),
        make.from_url("rediss://localhost?ssl_cert_reqs=none"),
    ):
        assert accepted(one(client), wrong)


@case("C64")
@CLIENTS
def test_a_default_is_no_wish(module: Any, name: str, certs: Certs) -> None:
    """False may be what the library says by itself: only where it does not is it followed."""
    client = getattr(module, name)(
        host="localhost", ssl=True, ssl_ca_certs=certs.ca, ssl_check_hostname=False
    )
    kind = client.connection_pool.connection_class
    # Of redis-py since 6.0.
    checks_by_default = inspect.signature(kind).parameters["ssl_check_hostname"].default
    options = one(client)
    assert tls_of(options).context.check_hostname is not checks_by_default
    assert accepted(options, certs.server_context(certs.other)) is checks_by_default


@CLIENTS
def test_tls_options_of_a_newer_client(module: Any, name: str) -> None:
    """One that is not known is refused, unless it is as if it were not there."""
    client = getattr(module, name)(ssl=True)
    kind = client.connection_pool.connection_class
    newer = type("SSLConnection", (kind,), {"__module__": kind.__module__})
    newer.__init__ = lambda self, *, ssl_pins=None, pin=None, **kwargs: None  # type: ignore[misc]
    client.connection_pool.connection_class = newer
    client.connection_pool.connection_kwargs.update(ssl_pins=None, pin=1)
    assert one(client).tls is not None
    client.connection_pool.connection_kwargs["ssl_pins"] = "S3cr3t!"
    assert "unknown option 'ssl_pins'" in refused([client], LEAKY)


# ---- whose certificates count ----------------------------------------------------------------


def test_authorities(certs: Certs) -> None:
    pem = Path(certs.other_ca).read_text()
    for keywords, good in (
        ({"ssl_ca_certs": certs.ca}, True),
        ({"ssl_ca_certs": Path(certs.ca)}, True),
        ({"ssl_ca_certs": os.fsencode(certs.ca)}, True),
        ({"ssl_ca_path": certs.ca_folder}, True),
        ({"ssl_ca_path": os.path.dirname(certs.ca_folder)}, False),
        ({"ssl_ca_data": certs.ca_pem}, True),
        ({"ssl_ca_data": pem}, False),
        ({"ssl_ca_data": pem + certs.ca_pem}, True),
        ({"ssl_ca_data": certs.ca_der}, True),
        ({"ssl_ca_certs": certs.other_ca}, False),
        ({"ssl_ca_certs": certs.other_ca, "ssl_ca_data": certs.ca_pem}, True),
        ({"ssl_ca_certs": "", "ssl_ca_path": None, "ssl_ca_data": ""}, False),
    ):
        assert accepted(one({"ssl": True, **keywords}), certs.server_context()) is good, keywords
    url = f"rediss://localhost?ssl_ca_data={quote(certs.ca_pem)}"
    assert accepted(one(url), certs.server_context())


@pytest.mark.skipif(sys.platform == "darwin", reason="file names of macOS are UTF-8")
def test_file_names_of_any_bytes(certs: Certs, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff \xc3\xa9%2F.pem"
    with open(path, "wb") as file:
        file.write(certs.ca_pem.encode())
    for master in (
        {"ssl": True, "ssl_ca_certs": path},
        {"ssl": True, "ssl_ca_certs": os.fsdecode(path)},
        f"rediss://localhost?ssl_ca_certs={quote(path)}",
    ):
        assert accepted(one(master), certs.server_context())


def test_the_systems_authorities_count_too(monkeypatch: pytest.MonkeyPatch, certs: Certs) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certs.ca)
    for keywords in ({}, {"ssl_ca_certs": certs.other_ca}):
        assert accepted(one({"ssl": True, **keywords}), certs.server_context())


# ---- the client's own certificate ------------------------------------------------------------


def test_client_certificate(certs: Certs) -> None:
    server = certs.server_context(client_certs=True)
    trust = {"ssl": True, "ssl_ca_certs": certs.ca}
    with pytest.raises(ssl.SSLError):
        shake(one(trust), server)
    key = {"ssl_certfile": certs.client.cert, "ssl_keyfile": certs.client.key}
    locked = {"ssl_certfile": certs.client.cert, "ssl_keyfile": certs.locked_key}
    query = f"ssl_certfile={quote(certs.client.cert)}&ssl_keyfile={quote(certs.locked_key)}"
    for master in (
        {**trust, **key},
        {**trust, **key, "ssl_password": "not needed"},
        {**trust, "ssl_certfile": certs.client.both},
        {**trust, **locked, "ssl_password": KEY_PASSWORD},
        {**trust, **locked, "ssl_password": KEY_PASSWORD.encode()},
        f"{certs.url(1, 'localhost')}&{query}&ssl_password={quote(KEY_PASSWORD)}",
    ):
        _, end = shake(one(master), server)
        assert end.getpeercert()["subjectAltName"]  # type: ignore[index]


def keypair(identity: Identity, **changes: Any) -> dict[str, Any]:
    return {"ssl_certfile": identity.cert, "ssl_keyfile": identity.key, **changes}


@case("C151")
def test_files_that_are_refused(certs: Certs, tmp_path: Path) -> None:
    missing = str(tmp_path / LEAKY)
    half = tmp_path / "half.pem"
    half.write_text(certs.ca_pem[:200])
    broken = tmp_path / "broken.pem"
    broken.write_text(certs.ca_pem.replace("MII", "AAA", 1))
    broken_key = tmp_path / "broken_key.pem"
    broken_key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    client, locked = certs.client, {"ssl_keyfile": certs.locked_key}
    pem = Path(client.key).read_text() + LEAKY
    for keywords, why in (
        ({"ssl_ca_certs": missing}, "ssl_ca_certs cannot be read: No such file or directory"),
        ({"ssl_ca_certs": str(tmp_path)}, "ssl_ca_certs cannot be read: Is a directory"),
        ({"ssl_ca_certs": certs.junk}, "ssl_ca_certs holds no certificates in PEM"),
        ({"ssl_ca_certs": client.key}, "ssl_ca_certs holds no certificates in PEM"),
        ({"ssl_ca_certs": half}, "ssl_ca_certs holds no certificates in PEM"),
        ({"ssl_ca_certs": "a\0b"}, "ssl_ca_certs must be the path of a file"),
        ({"ssl_ca_certs": "\ud800"}, "ssl_ca_certs must be the path of a file"),
        ({"ssl_ca_certs": 5}, "ssl_ca_certs must be the path of a file, not int"),
        ({"ssl_ca_path": missing}, "ssl_ca_path is not a directory"),
        ({"ssl_ca_path": certs.ca}, "ssl_ca_path is not a directory"),
        ({"ssl_ca_data": LEAKY}, "ssl_ca_data is malformed: no certificates in PEM (as str)"),
        ({"ssl_ca_data": "é"}, "it is not ASCII"),
        ({"ssl_ca_data": certs.ca_pem.encode()}, "no certificates in DER (as bytes)"),
        ({"ssl_ca_data": [LEAKY]}, "ssl_ca_data must be str (PEM) or bytes (DER), not list"),
        (keypair(client, ssl_certfile=missing), "ssl_certfile cannot be read: No such file"),
        (keypair(client, ssl_keyfile=missing), "ssl_keyfile cannot be read: No such file"),
        (keypair(client, ssl_certfile=certs.junk), "ssl_certfile holds no certificate in PEM"),
        (keypair(client, ssl_keyfile=certs.junk), "ssl_keyfile holds no private key in PEM"),
        (keypair(client, ssl_keyfile=client.cert), "ssl_keyfile holds no private key in PEM"),
        (keypair(client, ssl_keyfile=None), "ssl_certfile holds no private key in PEM; name its"),
        (keypair(client, ssl_keyfile=certs.server.key), "ssl_keyfile: the key is not the one"),
        (keypair(client, ssl_certfile=broken), "ssl_certfile or ssl_keyfile is malformed"),
        (keypair(client, ssl_keyfile=broken_key), "ssl_certfile or ssl_keyfile is malformed"),
        (keypair(client, ssl_keyfile=pem), "ssl_keyfile cannot be read"),
        ({"ssl_keyfile": client.key}, "ssl_keyfile needs ssl_certfile"),
        (keypair(client, **locked), "ssl_password is needed: the key in ssl_keyfile is encrypted"),
        (keypair(client, **locked, ssl_password=LEAKY), "ssl_password is wrong: the key in"),
        (keypair(client, **locked, ssl_password=LEAKY * 200), "ssl_password is too long"),
        (keypair(client, **locked, ssl_password=5), "ssl_password must be str or bytes, not int"),
        (keypair(client, **locked, ssl_password=print), "ssl_password must be str or bytes"),
        ({"ssl_ciphers": LEAKY}, "ssl_ciphers names no cipher"),
        ({"ssl_ciphers": "a\0b"}, "ssl_ciphers names no cipher"),
        ({"ssl_ciphers": "é"}, "ssl_ciphers names no cipher"),
        ({"ssl_ciphers": 5}, "ssl_ciphers must be str or bytes, not int"),
    ):
        message = refused([{"ssl": True, **keywords}], LEAKY, KEY_PASSWORD, "BEGIN")
        assert message.startswith("masters[0]: ")
        assert why in message, keywords
        assert "_ssl.c" not in message


def test_the_password_of_a_key_is_not_asked_for(certs: Certs) -> None:
    """Without one, OpenSSL would wait for somebody to type it."""
    for password in (None, "", b""):
        keywords = keypair(certs.client, ssl_keyfile=certs.locked_key, ssl_password=password)
        with mock.patch.object(ssl.SSLContext, "load_cert_chain", autospec=True) as load:
            one({"ssl": True, **keywords})
        assert load.call_args.args[-1] == b""


# ---- versions, ciphers, flags ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "lowest"),
    [
        (None, "TLSv1_2"),
        (ssl.TLSVersion.TLSv1_2, "TLSv1_2"),
        (ssl.TLSVersion.TLSv1_3, "TLSv1_3"),
        (772, "TLSv1_3"),
        ("771", "TLSv1_2"),
        ("772", "TLSv1_3"),
    ],
)
def test_lowest_version(certs: Certs, value: Any, lowest: str) -> None:
    options = one({"ssl": True, "ssl_ca_certs": certs.ca, "ssl_min_version": value})
    assert tls_of(options).context.minimum_version == ssl.TLSVersion[lowest]
    old = certs.server_context(version=ssl.TLSVersion.TLSv1_2)
    if lowest == "TLSv1_2":
        assert shake(options, old)[0].version() == "TLSv1.2"
    else:
        with pytest.raises(ssl.SSLError):
            shake(options, old)
    assert shake(options, certs.server_context())[0].version() == "TLSv1.3"


@pytest.mark.parametrize(
    "value", [0, 1, 770, 773, True, "TLSv1_2", "", ssl.TLSVersion.MINIMUM_SUPPORTED, 771.5, b"771"]
)
def test_versions_that_are_refused(value: Any) -> None:
    message = refused([{"ssl": True, "ssl_min_version": value}])
    assert message.endswith("ssl_min_version must be 771 (TLSv1_2) or 772 (TLSv1_3)")


def test_a_version_in_a_url() -> None:
    tls = tls_of(one("rediss://localhost?ssl_min_version=772"))
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_3
    for text in ("770", "3"):
        assert "must be 771" in refused([f"rediss://localhost?ssl_min_version={text}"])
    assert "is not a number" in refused(["rediss://localhost?ssl_min_version=x"])


def test_never_less_than_the_system_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    make = ssl.create_default_context

    def strict() -> ssl.SSLContext:
        context = make()
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    for value in (None, 771):
        context = context_of(ssl_min_version=value)
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_ciphers(certs: Certs) -> None:
    wanted = "ECDHE-ECDSA-AES256-GCM-SHA384"
    server = certs.server_context(version=ssl.TLSVersion.TLSv1_2)
    for text in (wanted, f"nonesuch:{wanted}", wanted.encode()):
        options = one({"ssl": True, "ssl_ca_certs": certs.ca, "ssl_ciphers": text})
        assert shake(options, server)[0].cipher()[0] == wanted  # type: ignore[index]
    assert context_of(ssl_ciphers="").get_ciphers() == context_of().get_ciphers()


@pytest.mark.parametrize(
    "value",
    [
        [ssl.VERIFY_CRL_CHECK_LEAF, ssl.VERIFY_X509_STRICT],
        (ssl.VERIFY_CRL_CHECK_LEAF, "VERIFY_X509_STRICT"),
        {int(ssl.VERIFY_CRL_CHECK_LEAF), int(ssl.VERIFY_X509_STRICT)},
        ssl.VERIFY_CRL_CHECK_LEAF | ssl.VERIFY_X509_STRICT,
        "VERIFY_CRL_CHECK_LEAF,VERIFY_X509_STRICT",
        "[VERIFY_CRL_CHECK_LEAF, VERIFY_X509_STRICT]",
    ],
)
def test_flags(value: Any) -> None:
    flags = ssl.VERIFY_CRL_CHECK_LEAF | ssl.VERIFY_X509_STRICT
    plain = context_of().verify_flags
    assert context_of(ssl_include_verify_flags=value).verify_flags == plain | flags
    assert context_of(ssl_exclude_verify_flags=value).verify_flags == plain & ~flags
    both = {"ssl_include_verify_flags": value, "ssl_exclude_verify_flags": value}
    assert context_of(**both).verify_flags == plain & ~flags
    if isinstance(value, str):
        options = one(f"rediss://localhost?ssl_include_verify_flags={quote(value)}")
        assert tls_of(options).context.verify_flags == plain | flags


@pytest.mark.parametrize("value", [None, [], "", "[]"])
def test_no_flags(value: Any) -> None:
    assert context_of(ssl_exclude_verify_flags=value).verify_flags == context_of().verify_flags


@pytest.mark.parametrize(
    "value",
    ["S3cr3t!", "VERIFY_X509_STRICT,x", ["x"], [None], [-1], [2**31], [1.0], 5, b"x", {1: 2}],
)
def test_flags_that_are_refused(value: Any) -> None:
    for name in ("ssl_include_verify_flags", "ssl_exclude_verify_flags"):
        assert name in refused([{"ssl": True, name: value}], LEAKY)


# ---- what is not supported -------------------------------------------------------------------

OCSP = [
    "ssl_validate_ocsp",
    "ssl_validate_ocsp_stapled",
    "ssl_ocsp_context",
    "ssl_ocsp_expected_cert",
]


@pytest.mark.parametrize("name", OCSP)
def test_ocsp(name: str) -> None:
    for value in (True, 1, "true", object()):
        message = refused([{"ssl": True, name: value}])
        assert message == f"masters[0]: {name} is not supported: no OCSP responses are looked at"
        one({"ssl": False, name: value})
    for off in (False, None, 0, "false", ""):
        assert context_of(**{name: off}).check_hostname
    assert name in refused([f"rediss://localhost?{name}=true"])
    one(f"rediss://localhost?{name}=false")


def test_a_unix_socket() -> None:
    for master in (
        {"ssl": True, "unix_socket_path": "/tmp/x"},
        "unix:///tmp/x?ssl=true",
    ):
        assert "TLS over a unix socket is not supported" in refused([master])


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_a_scheme_and_its_opposite(scheme: str) -> None:
    for value in ("false", "0", "no"):
        message = refused([f"{scheme}://localhost?ssl={value}"])
        assert message.endswith(f"{scheme}:// means TLS, and its option ssl says the opposite")
    assert tls_of(one(f"{scheme}://localhost?ssl=")).server_hostname == "localhost"


@pytest.mark.parametrize("place", ["redis://localhost", "valkey://localhost", "unix:///tmp/x"])
def test_a_url_with_tls_options_but_without_tls(place: str, certs: Certs) -> None:
    """It would be silently plain; redis-py fails when it connects."""
    for name, value in (
        ("ssl_ca_certs", quote(certs.ca)),
        ("ssl_check_hostname", "true"),
        ("ssl_cert_reqs", "required"),
        ("ssl_password", LEAKY),
    ):
        message = refused([f"{place}?{name}={value}"], LEAKY)
        assert message.endswith(f"{name} needs TLS: rediss://, valkeys:// or the option ssl=true")
        assert one(f"{place}?{name}={value}&ssl=false").tls is None
    assert one(f"{place}?ssl_check_hostname=false&ssl_cert_reqs=none&ssl_password=").tls is None


@case("C151")
def test_an_environment_that_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "nowhere" / "keys"))
    message = refused([{"ssl": True, "password": LEAKY}], LEAKY)
    assert message.endswith("TLS cannot be set up: No such file or directory")


def test_a_python_without_ssl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redlock_fast.tls", None)
    assert "built without its ssl module" in refused([{"ssl": True}])
    assert one({}).tls is None


# ---- one context for all ---------------------------------------------------------------------


def test_equal_settings_share_a_context(certs: Certs) -> None:
    urls = [certs.url(port, "localhost") for port in range(1, MAX_MASTERS)]
    with mock.patch("ssl.create_default_context", wraps=ssl.create_default_context) as make:
        *same, other = parse_masters([*urls, certs.url(1, "redis.example", ssl_min_version="772")])
    assert len({id(tls_of(options).context) for options in same}) == 1
    assert tls_of(other).context is not tls_of(same[0]).context
    assert make.call_count == 2
    again = parse_masters(urls)
    assert tls_of(again[0]).context is not tls_of(same[0]).context  # files may have changed


def test_other_settings_have_another_context(certs: Certs) -> None:
    locked = keypair(certs.client, ssl_keyfile=certs.locked_key, ssl_password=KEY_PASSWORD)
    changes: list[dict[str, Any]] = [
        {},
        {"ssl_check_hostname": False},
        {"ssl_cert_reqs": "none"},
        {"ssl_cert_reqs": "optional"},
        {"ssl_ca_certs": certs.ca},
        {"ssl_ca_path": certs.ca_folder},
        {"ssl_ca_data": certs.ca_pem},
        {"ssl_ca_data": certs.ca_der},
        keypair(certs.client),
        keypair(certs.server),
        locked,
        {"ssl_min_version": 772},
        {"ssl_ciphers": "ECDHE+AESGCM"},
        {"ssl_include_verify_flags": "VERIFY_CRL_CHECK_LEAF"},
        {"ssl_exclude_verify_flags": "VERIFY_CRL_CHECK_LEAF"},
    ]
    masters = [{"ssl": True, "port": 1 + i, **change} for i, change in enumerate(changes)]
    found = parse_masters(masters)
    assert len({id(tls_of(options).context) for options in found}) == len(changes)
    # A key that opened with the right password does not open with a wrong one.
    wrong = {"ssl": True, **locked, "ssl_password": LEAKY}
    assert "masters[15]: ssl_password is wrong" in refused([*masters, wrong], LEAKY)


@case("C151")
def test_settings_show_no_secret(certs: Certs) -> None:
    locked = keypair(certs.client, ssl_keyfile=certs.locked_key, ssl_password=KEY_PASSWORD)
    options = one({"ssl": True, **locked})
    for text in (repr(options), str(options.tls), f"{options.tls}"):
        assert KEY_PASSWORD not in text
        assert certs.locked_key not in text
    assert "tls=TlsOptions(server_hostname='localhost')" in repr(options)
    assert hash(options) is not None
