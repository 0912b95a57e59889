"""Tests of the process's end of the pipes."""

from __future__ import annotations

import os
from io import BytesIO

import pytest

from llmrun.base.processes.frames import framed, read_frame
from llmrun.engine.child import main
from llmrun.engine.child.main import Connection
from llmrun.engine.child.messages import FROM_CHILD, LONGEST, TO_CHILD, Cancel, Preparing


def test_messages_pass_in_both_directions() -> None:
    to_server = BytesIO()
    connected = Connection(BytesIO(framed(TO_CHILD.encode(Cancel((1,))))), to_server)
    connected.send(Preparing(1))
    to_server.seek(0)
    frame = read_frame(to_server, LONGEST)
    assert frame is not None
    assert FROM_CHILD.decode(frame) == Preparing(1)
    assert list(connected.received()) == [Cancel((1,))]


def test_messages_end_when_the_server_is_killed() -> None:
    """The last message may be incomplete."""
    whole = framed(TO_CHILD.encode(Cancel((1,))))
    assert list(Connection(BytesIO(whole + whole[:-1]), BytesIO()).received()) == [Cancel((1,))]


def test_sending_to_a_server_that_is_gone_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(main, "end_process", ended.append)
    theirs, ours = os.pipe()
    os.close(theirs)
    stream = os.fdopen(ours, "wb")
    Connection(BytesIO(), stream).send(Preparing(1))
    assert ended == [0]
    with pytest.raises(OSError, match=r"pipe|Invalid"):  # the latter on Windows
        stream.close()
