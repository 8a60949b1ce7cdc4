"""moto's S3 in memory: honours If-Match, which radosgw 16.2 does not; takes any secret.

``moto(tls=True)`` speaks https with a certificate that an authority made on the spot has signed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

from tests.lab import raw
from tests.lab.process import HOST, Crew, need, status_of
from tests.lab.s3 import s3_server
from tests.lab.server import Server

ACCESS_KEY = "AKLAB"
SECRET_KEY = "SKLAB"  # noqa: S105 - moto does not look at it


@contextlib.contextmanager
def moto(*, tls: bool = False) -> Iterator[Server]:
    """An S3 endpoint with one bucket; with ``tls`` its authority is ``server.ca_file``."""
    [program] = need("moto_server")
    with Crew("moto_tls" if tls else "moto") as crew:
        port = crew.port()
        command = [program, "-H", HOST, "-p", str(port)]
        endpoint, ca_file = f"http://{HOST}:{port}", None
        if tls:
            ca_file, certificate, key = make_certificates(crew.run_dir)
            command += ["-s", "-c", certificate, "-k", key]
            endpoint = f"https://{HOST}:{port}"
        crew.start("moto", command, env={"MOTO_S3_CUSTOM_ENDPOINTS": endpoint})
        crew.wait_for(
            lambda: status_of(endpoint, "/moto-api/", ca_file=ca_file) is not None,
            f"{endpoint} answers",
        )
        server = s3_server(
            crew.name,
            endpoint,
            ACCESS_KEY,
            SECRET_KEY,
            run_dir=str(crew.run_dir),
            pids=crew.pids(),
            ca_file=ca_file,
        )
        with contextlib.closing(raw.s3(server)) as client:
            client.create_bucket(Bucket=server.bucket)
        yield server


def make_certificates(directory: Path) -> tuple[str, str, str]:
    """PEM files: an authority, a certificate that it signed for 127.0.0.1, and that one's key.

    Two certificates, not one that signs itself: rustls takes no authority for a server.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    now = dt.datetime.now(dt.UTC)
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def builder(
        subject: str, public: ec.EllipticCurvePublicKey, *, is_authority: bool
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("ckptfs lab"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )

    authority = builder("ckptfs lab", authority_key.public_key(), is_authority=True).sign(
        authority_key, hashes.SHA256()
    )
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
    certificate = (
        builder("localhost", key.public_key(), is_authority=False)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    contents = {
        "ca.pem": authority.public_bytes(pem),
        "server.pem": certificate.public_bytes(pem),
        "server.key": key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }
    for file, content in contents.items():
        (directory / file).write_bytes(content)
    ssl.create_default_context(cafile=str(directory / "ca.pem"))  # raises where it is no authority
    first, second, third = (str(directory / file) for file in contents)
    return first, second, third
