"""Tests of the messages between an isolated process and its parent."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.engine.isolated_worker import FrameTooLong, decoded, encoded, read_frame, write_frame


def test_frames_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    values = [{}, ["é\ud800", 2**70], "x" * 100_000]
    with path.open("wb") as stream:
        for value in values:
            write_frame(stream, encoded(value))
    with path.open("rb") as stream:
        assert [decoded(read_frame(stream) or b"") for _ in values] == values
        assert read_frame(stream) is None
    with path.open("rb") as stream:
        assert read_frame(stream, 2) == b"{}"
        with pytest.raises(FrameTooLong):
            read_frame(stream, 10)
    path.write_bytes(path.read_bytes()[:-1])
    with path.open("rb") as stream:
        assert [read_frame(stream) is None for _ in values] == [False, False, True]
