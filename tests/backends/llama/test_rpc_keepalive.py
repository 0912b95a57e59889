"""Tests that the connections of llama.cpp's process are watched by the system."""

from __future__ import annotations

import os
import socket
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("only Linux has all of these options", allow_module_level=True)

from llmrun.backends.llama.rpc_devices import keep_connections_alive


def test_open_connections_are_checked() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        before = set(os.listdir("/dev/fd"))  # noqa: PTH208
        keep_connections_alive()
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, option))
            for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert idle + interval * count == 35
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 35_000
        assert set(os.listdir("/dev/fd")) == before  # noqa: PTH208


def test_other_descriptors_are_left_alone() -> None:
    """Neither pipes nor sockets of the same machine have these options."""
    reading, writing = os.pipe()
    one, other = socket.socketpair()
    with one, other:
        keep_connections_alive()
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    os.write(writing, b"x")
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    os.close(writing)
