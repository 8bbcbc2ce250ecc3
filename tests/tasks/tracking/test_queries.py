"""Queries to a server over HTTPS."""

import datetime
import ssl
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dml_core.errors import TrackingError
from tasks.tracking.queries import query_server


def self_signed(path: Path) -> Path:
    """Write a certificate of no authority, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    today = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, today, today + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path) -> None:
    """A server of an institute's own authority does answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(tmp_path / "server.pem"))
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"https://localhost:{server.server_port}"
        with pytest.raises(
            TrackingError, match=r"^MLflow at https://localhost:\d+ cannot be used: certificate verify failed: [^\n]+; for an own"
        ):
            list(query_server(address, "experiments/search", "experiments"))
        server.shutdown()
