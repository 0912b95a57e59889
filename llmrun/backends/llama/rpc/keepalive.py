"""Makes lost connections to RPC servers fail, for which llama.cpp would wait without a time limit."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

# Ask after 15 s of silence, four times in 20 s. What was sent must be acknowledged within 35 s.
_OPTIONS = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 35_000}


def keep_connections_alive() -> None:
    """Let the system check all open TCP connections of this process.

    If a machine vanishes, waiting for it then fails after about half a minute. A server that computes for a long time
    is not affected, because its system answers.
    """
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208
    except OSError:  # such as on Windows
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    _keep_alive(connection)


def _keep_alive(connection: socket.socket) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
