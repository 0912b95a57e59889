"""Tests of listening sockets and TLS."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from pathlib import Path

import pytest

from llmrun.base.errors import UsageError
from llmrun.serving.http_server import bound_socket, tls_context
from llmrun.serving.options import Limits, ServingOptions
from tests.support.serving.fake_model import TIMEOUT_S
from tests.support.serving.servers import serving

SUPPORT = Path(__file__).resolve().parents[1] / "support" / "serving"
CERTIFICATE, KEY = SUPPORT / "localhost.pem", SUPPORT / "localhost.key"


def test_a_port_in_use_is_named() -> None:
    with bound_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port: {port} is in use on 127.0.0.1"):
            bound_socket("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "300.1.1.1", "\0", "203.0.113.1"])
def test_addresses_of_other_machines_are_refused(host: str) -> None:
    with pytest.raises(UsageError, match="--host: "):
        bound_socket(host, 0)


def test_https_answers_with_the_certificate() -> None:
    with serving(tls=tls_context(CERTIFICATE, KEY)) as server:
        line = http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=TIMEOUT_S, context=ssl.create_default_context(cafile=str(CERTIFICATE))
        )
        line.request("GET", "/health")
        assert line.getresponse().read() == b'{"status":"ok"}'
        line.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"])
def test_clients_that_never_finish_the_handshake_are_dropped(sent: bytes) -> None:
    with serving(tls=tls_context(CERTIFICATE, KEY), options=ServingOptions(limits=Limits(header_s=0.2))) as server:
        with server.connect() as line, contextlib.suppress(ConnectionResetError):
            line.sendall(sent)
            while line.recv(1000):
                pass
        assert server.log == []


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        (Path("/nothing/here.pem"), KEY, "--tls-cert: /nothing/here.pem: No such file"),
        (CERTIFICATE, Path("/nothing/here.key"), "--tls-key: /nothing/here.key: No such file"),
        (KEY, KEY, "not a valid certificate with its private key"),
        (CERTIFICATE, CERTIFICATE, "not a valid certificate with its private key"),
    ],
)
def test_bad_certificates_are_refused(certificate: Path, key: Path, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tls_context(certificate, key)


def test_ipv6_addresses_can_be_bound() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        made = bound_socket("::1", 0)
    except UsageError:
        pytest.skip("no IPv6")
    made.close()
