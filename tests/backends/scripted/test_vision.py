"""Tests of the scripted vision encoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.scripted import ScriptedBackend, ScriptedStandIn, SeamError
from llmrun.backends.scripted_vision import describe_rows
from llmrun.base.errors import Cancelled, UsageError
from llmrun.base.types import IMAGE_ROW, Batch

RED = (255, 0, 0)


def picture(width: int, height: int, color: tuple[int, int, int] = RED) -> np.ndarray:
    return np.full((height, width, 3), color, np.uint8)


def batch(n: int, embeds: np.ndarray | None = None, **fields: np.ndarray) -> Batch:
    tokens, seq, pos = np.full(n, IMAGE_ROW, np.int32), np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
    return Batch(tokens, seq, pos, np.zeros(n, np.uint8), embeds=embeds, **fields)


def scripted(tmp_path: Path, **fields: object) -> ScriptedBackend:
    (tmp_path / "mmproj.json").write_text(json.dumps(fields))
    return ScriptedBackend(projector=tmp_path / "mmproj.json")


def test_echo_describes_what_the_model_saw(tmp_path: Path) -> None:
    backend = scripted(tmp_path)
    assert backend.vision is not None
    layout = backend.vision.projector.layout(70, 40)
    rows = backend.vision.begin([picture(96, 64)], layout).advance(0)
    assert rows is not None
    assert rows.shape == (layout.rows, backend.vision.projector.row_width) == (6, 8)
    backend.forward(batch(6, rows))
    history = "".join(chr(number & 0x3FFFFF) for number in backend.kv.sequences[0])
    assert describe_rows(f"a {history} b") == "a [6 rows of #ff0000] b"


def test_different_pictures_have_different_rows(tmp_path: Path) -> None:
    backend = scripted(tmp_path)
    assert backend.vision is not None
    layout = backend.vision.projector.layout(64, 32)
    other = picture(64, 32)
    other[0, 40] = 0
    one, two = (backend.vision.begin([pixels], layout).advance(0) for pixels in (picture(64, 32), other))
    assert one is not None
    assert two is not None
    assert (one != two).any(1).all()


def test_rows_of_images_follow_the_rules_of_the_seam(tmp_path: Path) -> None:
    rows = np.zeros((2, 8), np.float32)
    with pytest.raises(SeamError, match="need embeddings"):
        scripted(tmp_path).forward(batch(2, rows[:1]))
    with pytest.raises(SeamError, match="rope_pos is missing"):
        scripted(tmp_path, uses_mrope=True).forward(batch(2, rows))
    with pytest.raises(SeamError, match="looks 1 rows ahead"):
        scripted(tmp_path, is_causal=False).forward(batch(2, rows, ahead=np.array([1, 1], np.int32)))
    with pytest.raises(SeamError, match="without a projector"):
        ScriptedBackend().forward(batch(2, rows))


def test_cancel_stops_an_encoding(tmp_path: Path) -> None:
    vision = scripted(tmp_path, encode_seconds=60.0).vision
    assert vision is not None
    layout = vision.projector.layout(1, 1)
    encoding = vision.begin([picture(32, 32)], layout)
    assert encoding.advance(0.01) is None
    with pytest.raises(AssertionError, match="an image is being encoded"):
        vision.begin([picture(32, 32)], layout)
    encoding.cancel()
    with pytest.raises(Cancelled):
        encoding.advance(0.01)
    vision.begin([picture(32, 32)], layout)
    assert vision.encoded == []


def test_encodings_take_as_many_looks_as_asked(tmp_path: Path) -> None:
    vision = scripted(tmp_path, encode_looks=2).vision
    assert vision is not None
    layout = vision.projector.layout(1, 1)
    encoding = vision.begin([picture(32, 32)], layout)
    assert [encoding.advance(0) is None for _ in range(3)] == [True, True, False]
    assert vision.encoded == [layout]


def test_scripted_models_open_with_a_projector(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    (tmp_path / "wrong.json").write_text('{"lines": "many"}')
    opened = ScriptedStandIn().open(tmp_path / "model.json", OpenOptions(mmproj="any.gguf", image_max_tokens=4))
    assert opened.vision is not None
    assert opened.vision.projector.layout(900, 900).rows == 4
    with pytest.raises(UsageError, match="invalid script for the scripted projector"):
        ScriptedStandIn().open(tmp_path / "model.json", OpenOptions(mmproj=str(tmp_path / "wrong.json")))
