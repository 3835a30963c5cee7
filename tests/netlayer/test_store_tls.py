"""RedisStore over TLS, against a real server with certificates made on the spot."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netlayer.errors import ConfigError, StoreUnreachable
from netlayer.store.redis_store import RedisStore

pytest.importorskip("cryptography", reason="needs the cryptography package")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

LONG = datetime.timedelta(seconds=60)


@pytest.fixture
def tls_options(short_dir: Path) -> list[str]:
    """Options of a server that only speaks TLS; its authority is `ca.pem` in the folder."""
    certify(short_dir)
    files = {"cert": "server.pem", "key": "server.key", "ca-cert": "ca.pem"}
    options = [word for option, name in files.items() for word in (f"--tls-{option}-file", str(short_dir / name))]
    return [*options, "--tls-auth-clients", "no", "--requirepass", "s3cret"]


@pytest.fixture
def tls_port(tls_options: list[str], start_redis: Callable[..., int]) -> int:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    # A server built with TLS complains of the port, one without it already of the first option.
    probe = [str(binary), *tls_options, "--port", "none"]
    if binary is None or b"'port" not in subprocess.run(probe, capture_output=True, check=False).stderr:
        pytest.skip("needs a redis-server with TLS on the PATH")
    return start_redis(Path(binary), *tls_options, port_option="--tls-port")


def test_with_the_right_authority(tls_port: int, short_dir: Path, run_id: str) -> None:
    with RedisStore(f"rediss://:s3cret@localhost:{tls_port}/1?ssl_ca_certs={short_dir}/ca.pem", run_id, LONG) as store:
        store.set("a", b"\x00v")
        assert store.get("a") == b"\x00v"
        assert store.multi_get(["a"] * 100) == [b"\x00v"] * 100
        with pytest.raises(RuntimeError, match="wait timeout"):
            store.wait(["no"], datetime.timedelta(milliseconds=20))
        assert repr(store) == f"RedisStore('rediss://localhost:{tls_port}/1', {run_id!r})"


def test_without_the_authority(tls_port: int, run_id: str) -> None:
    with pytest.raises(ConfigError, match=r"certificate must be valid \(.*\); give its authority as \?ssl_ca_certs"):
        RedisStore(f"rediss://:s3cret@localhost:{tls_port}", run_id, LONG)


def test_without_tls(tls_port: int, run_id: str) -> None:
    with pytest.raises(StoreUnreachable, match="no store answers at redis://localhost"):
        RedisStore(f"redis://:s3cret@localhost:{tls_port}", run_id, datetime.timedelta(milliseconds=100))


def certify(folder: Path) -> None:
    """An authority, and a server certificate of its for localhost."""
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    alone = x509.BasicConstraints(ca=True, path_length=None)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (folder / "ca.pem").write_bytes(certificate("test authority", ca_key, ca_key, alone))
    (folder / "server.pem").write_bytes(certificate("localhost", server_key, ca_key, names))
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.key").write_bytes(server_key.private_bytes(*encoding))


def certificate(subject: str, key: Any, ca_key: Any, extension: x509.ExtensionType) -> bytes:
    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    key_id, ca_key_id = x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier
    return (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name("test authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        .add_extension(key_id.from_public_key(key.public_key()), critical=False)
        .add_extension(ca_key_id.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
