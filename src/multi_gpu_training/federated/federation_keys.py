"""Keys and certificates for a federation: a CA, the server's certificate, a key pair per client."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.federated.federation_settings import require_flower
from multi_gpu_training.run_places import name_problem
from multi_gpu_training.safe_files import make_private, write_atomically

DAYS = 365


def make_keys(folder: Path, host: str, clients: Sequence[str]) -> Iterator[str]:
    """Write ca.pem, server.pem, server.key, and NAME.key and clients/NAME.pub of each client."""
    require_flower()  # which brings cryptography
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    problems = [
        f"--client {name!r}: {name_problem(name)}" for name in clients if name_problem(name)
    ]
    if problems:
        raise ConfigError(problems)
    if (folder / "ca.pem").exists():
        raise ConfigError(f"{folder} already holds keys; choose another folder", code="MGT106")
    make_private(folder)
    make_private(folder / "clients")
    now = datetime.datetime.now(datetime.UTC)

    def private(name: str) -> Any:
        key = ec.generate_private_key(ec.SECP384R1())
        text = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        if name == "server":  # grpc and TLS want the traditional form
            text = key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        if name != "ca":  # nobody signs with it again
            write_atomically(folder / f"{name}.key", text)
        return key

    def certificate(name: str, key: Any, issuer: str, signed_by: Any, alt: Any = None) -> None:
        built = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca=alt is None, path_length=None), critical=True)
        )
        if alt is not None:
            built = built.add_extension(x509.SubjectAlternativeName(alt), critical=False)
        text = built.sign(signed_by, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
        write_atomically(folder / f"{name}.pem", text)

    ca = private("ca")
    certificate("ca", ca, "ca", ca)
    # The server's own programs reach it at 127.0.0.1.
    reached = [_named(name) for name in ("localhost", "127.0.0.1", host)]
    certificate("server", private("server"), "ca", ca, reached)
    yield f"{folder}/ca.pem: for the server and every client"
    yield f"{folder}/server.pem, server.key, clients/: for the server alone"
    for name in clients:
        public = private(name).public_key()
        text = public.public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        write_atomically(folder / "clients" / f"{name}.pub", text + b"\n")
        yield f"{folder}/{name}.key: for the client {name} alone"


def _named(host: str) -> Any:
    """A host as a certificate names it."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
