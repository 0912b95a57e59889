"""Tests of the process's end of the socket pair."""

from __future__ import annotations

import socket

from llmrun.engine.child.connection import Connection
from llmrun.engine.child.messages import Cancel, Preparing, encode_to_child
from llmrun.engine.isolation.frames import framed


def test_messages_end_when_the_server_is_killed() -> None:
    """The system resets the connection of a process that ends before it has read everything."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    theirs.sendall(framed(encode_to_child(Cancel((1,)))))
    received = connection.received()
    assert next(received) == Cancel((1,))
    connection.send(Preparing(1))
    theirs.close()
    assert list(received) == []
