"""Certificates for tests, made with trustme: one authority, and who it vouches for.

The fixture `certs` makes them once for all tests, as PEM files in a temporary folder. What needs a
context of a server asks `Certs.server_context` for a new one.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

KEY_PASSWORD = "S3cr3t! k\u00e9y"  # of `Certs.locked_key`


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key.

    Attributes:
        cert: PEM file of the certificate.
        key: PEM file of the key.
        both: PEM file with the two of them.
    """

    cert: str
    key: str
    both: str


class Certs:
    """Files in PEM.

    Attributes:
        ca: the authority's own certificate; `ca_pem` and `ca_der` are its content.
        ca_folder: a folder with it, under the name that OpenSSL looks for.
        other_ca: of an authority that signed `stranger` only.
        server: for 127.0.0.1, ::1 and localhost.
        names: for localhost, redis.example and *.wild.example, but for no address.
        other: for other.example.
        docs: for *.example.org, which the documents name.
        expired: for all that `server` is for, until yesterday.
        stranger: for all that `server` is for, signed by the other authority.
        client: for a client.
        locked_key: the client's key, encrypted with `KEY_PASSWORD`.
        junk: a text file that is neither.
    """

    def __init__(self, folder: Path) -> None:
        import trustme  # slow, and most runs of single tests need none of this
        from cryptography.hazmat.primitives import serialization

        self._folder = folder
        authority, other_authority = trustme.CA(), trustme.CA(organization_name="another")
        self.ca_pem = authority.cert_pem.bytes().decode()
        self.ca_der = ssl.PEM_cert_to_DER_cert(self.ca_pem)
        self.ca = self._file("ca.pem", authority)
        self.other_ca = self._file("other_ca.pem", other_authority)
        self.ca_folder = str(folder / "authorities")
        here = ("127.0.0.1", "::1", "localhost")
        yesterday = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
        self.server = self._identity("server", authority.issue_cert(*here))
        self.names = self._identity(
            "names", authority.issue_cert("localhost", "redis.example", "*.wild.example")
        )
        self.other = self._identity("other", authority.issue_cert("other.example"))
        self.docs = self._identity("docs", authority.issue_cert("*.example.org"))
        self.expired = self._identity(
            "expired",
            authority.issue_cert(
                *here, not_before=yesterday - datetime.timedelta(days=9), not_after=yesterday
            ),
        )
        self.stranger = self._identity("stranger", other_authority.issue_cert(*here))
        client = authority.issue_cert("client@redis.example")
        self.client = self._identity("client", client)
        key = serialization.load_pem_private_key(client.private_key_pem.bytes(), None)
        locked = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(KEY_PASSWORD.encode()),
        )
        self.locked_key = self._write("locked_key.pem", locked)
        self.junk = self._write("junk.pem", b"S3cr3t! is no certificate\n")
        (folder / "authorities").mkdir()
        self._file(f"authorities/{self._hashed_name(authority)}", authority)

    def server_context(
        self,
        identity: Identity | None = None,
        *,
        version: ssl.TLSVersion | None = None,
        client_certs: bool = False,
        tickets: int | None = None,
    ) -> ssl.SSLContext:
        """The TLS side of a server.

        Args:
            identity: who it is; `server` by default.
            version: the only version of TLS that it speaks; 1.2 and 1.3 by default.
            client_certs: whether clients must have a certificate of the authority.
            tickets: how many session tickets it sends after a handshake of TLS 1.3.
        """
        identity = identity or self.server
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity.cert, identity.key)
        if version is not None:
            context.minimum_version = context.maximum_version = version
        if client_certs:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.ca)
        if tickets is not None:
            context.num_tickets = tickets
        return context

    def url(self, port: int, host: str = "127.0.0.1", **options: str) -> str:
        """The URL of a master whose certificate the authority has signed."""
        query = "&".join(f"{k}={quote(v)}" for k, v in {"ssl_ca_certs": self.ca, **options}.items())
        return f"rediss://{host}:{port}/0?{query}"

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / name
        path.write_bytes(content)
        return str(path)

    def _file(self, name: str, authority: Any) -> str:
        return self._write(name, authority.cert_pem.bytes())

    def _identity(self, name: str, cert: Any) -> Identity:
        chain = b"".join(blob.bytes() for blob in cert.cert_chain_pems)
        key = cert.private_key_pem.bytes()
        return Identity(
            self._write(f"{name}.pem", chain),
            self._write(f"{name}_key.pem", key),
            self._write(f"{name}_both.pem", key + chain),
        )

    def _hashed_name(self, authority: Any) -> str:
        """The name under which OpenSSL looks for the certificate of an authority in a folder.

        That of X509_NAME_hash(3): SHA-1 of the canonical form of the subject, which is UTF-8, in
        lower case and without the head of the outermost sequence; its first four bytes as a
        little-endian number.
        """
        from cryptography import x509

        def der(tag: int, content: bytes) -> bytes:
            assert len(content) < 128
            return bytes([tag, len(content)]) + content

        subject = x509.load_pem_x509_certificate(authority.cert_pem.bytes()).subject
        canonical = b""
        for attribute in subject:
            *_, arc = attribute.oid.dotted_string.split(".")  # all are 2.5.4.x
            kind = der(6, bytes([0x55, 4, int(arc)]))
            value = der(12, " ".join(str(attribute.value).lower().split()).encode())
            canonical += der(0x31, der(0x30, kind + value))
        number = int.from_bytes(hashlib.sha1(canonical).digest()[:4], "little")
        return f"{number:08x}.0"


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """Certificates of one authority, and what may be wrong with some."""
    return Certs(tmp_path_factory.mktemp("certs"))
