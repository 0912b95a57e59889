"""Tests that broken projectors end in rows or in one clear line on the CPU engine.

`scripts/soak projectors` tries thousands of others.
The sizes of heads are at most 16, because the kernels of attention are compiled for each size, rounded up to 16.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.backends.cpu.vision import CpuVision
from llmrun.base.errors import DoesNotFit, ModelFileError
from llmrun.model.vision.projector import read_projector
from tests.support.gguf.gguf_files import Tensor
from tests.support.models.tiny_models import changed_copy
from tests.support.tiers import examples
from tests.support.vision.opened import SMALL, encode
from tests.support.vision.projectors import TINY_PROJECTORS, tiny_projector
from tests.support.vision.prompts import tiles_of

pytestmark = pytest.mark.push

NAN, INF = float("nan"), float("inf")
NUMBERS = st.sampled_from((0.0, 1.0, -1.0, 1e-45, 1e-30, 1e6, -3e38, 3e38, INF, NAN))


def outcome(path: Path) -> str:
    """Encode two pictures without any warning. Returns "rows", "no numbers", or the error, which must be one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = _encoded(path)
    except (ModelFileError, DoesNotFit) as error:
        found = str(error)
    assert "\n" not in found
    return found


def _encoded(path: Path) -> str:
    vision = CpuVision.loaded(read_projector(path), 1)
    try:
        for size in ((70, 50), (1, 1)):
            layout = vision.projector.layout(*size, "low")
            rows = encode(vision, tiles_of(layout), layout)
            assert rows.shape == (layout.rows, vision.projector.row_width)
        return "rows" if np.isfinite(rows).all() else "no numbers"
    finally:
        vision.close()


def small(folder: Path, name: str, weight_type: str = "F32", **fields: Any) -> Path:
    return tiny_projector(folder, name, weight_type, **(SMALL.get(name, {}) | fields))


@settings(max_examples=examples(120))
@given(st.data())
def test_any_sizes_end_in_rows_or_one_line(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TINY_PROJECTORS)))
    heads = data.draw(st.integers(1, 5))
    sizes: dict[str, Any] = {
        "heads": heads,
        "width": data.draw(st.sampled_from([heads * size for size in (1, 2, 3, 4, 7, 12, 16)])),
        "feed_forward": data.draw(st.sampled_from((1, 2, 3, 7, 31, 32, 160))),
    }
    if name != "gemma4uv" and data.draw(st.booleans()):
        sizes |= {"layers": data.draw(st.integers(0, 1)), "deepstack": (), "others": {}}
    extra: dict[str, Any] = {}
    if data.draw(st.booleans()):
        extra["clip.vision.attention.layer_norm_epsilon"] = data.draw(NUMBERS)
    for key in ("mean", "std"):
        if data.draw(st.integers(0, 3)) == 0:
            extra[f"clip.vision.image_{key}"] = data.draw(st.lists(NUMBERS, min_size=3, max_size=3))
    weight_type, text_width = data.draw(st.sampled_from(("F32", "F16", "BF16"))), data.draw(st.sampled_from((1, 3, 96)))
    with tempfile.TemporaryDirectory() as folder:
        outcome(small(Path(folder), name, weight_type, text_width=text_width, extra=extra, **sizes))


@pytest.mark.parametrize("name", TINY_PROJECTORS)
@pytest.mark.parametrize("value", [NAN, INF, 3e38, 0.0])
def test_extreme_weights_warn_of_nothing(tmp_path: Path, name: str, value: float) -> None:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for tensor, (kind, _data, *shape) in list(tensors.items()):
            if tensor.startswith(("v.position_embd", "v.blk.0.ln1", "v.patch_embd")):
                tensors[tensor] = (kind, np.full(shape[0], min(value, 60_000) if kind == "F16" else value, np.float32))

    found = outcome(changed_copy(small(tmp_path, name), tmp_path / "mmproj.gguf", change))
    assert found in ("rows", "no numbers") or "v.position_embd.weight: must be numbers of at most 1e+30" in found


def replaced(name: str, kind: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    """Return a change that replaces or adds a tensor."""

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = (kind, np.ones(shape, np.float32))

    return change


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gemma3", replaced("v.blk.0.attn_q.weight", "F32", (64, 68)), "the shape must be 64 x 64, not 68 x 64"),
        ("gemma3", replaced("v.blk.0.attn_q.bias", "F32", (3,)), "the shape must be 64, not 3"),
        ("gemma3", replaced("v.blk.0.evil\x1b[2J.weight", "F32", (3,)), "evil"),
        ("gemma3", replaced("v.blk.7.attn_q.weight", "F32", (64, 64)), "v.blk.7.attn_q.weight"),
        ("gemma3", replaced("mm.input_projection.weight", "Q8_0", (64, 96)), "must be F32 or F16 or BF16, not Q8_0"),
        ("idefics3", replaced("mm.model.fc.weight", "F32", (96, 1028)), "the shape must be 1024 x 96, not 1028 x 96"),
        ("internvl", replaced("v.class_embd", "F32", (65,)), "the shape must be 64, not 65"),
        (
            "pixtral",
            replaced("v.token_embd.img_break", "F32", (95,)),
            "mm.2.weight: the shape must be 96 x 95, not 96 x 96",
        ),
    ],
)
def test_contradictory_tensors_are_refused(
    tmp_path: Path, name: str, change: Callable[[dict[str, Any], dict[str, Tensor]], None], words: str
) -> None:
    found = outcome(changed_copy(small(tmp_path, name), tmp_path / "mmproj.gguf", change))
    assert words in found
    assert "\x1b" not in found


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q5_1", "Q8_0"])
def test_matrices_of_other_types_are_read(tmp_path: Path, weight_type: str) -> None:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        block = np.zeros((64, 64), np.float32)
        tensors["v.blk.0.attn_out.weight"] = (weight_type, block)

    assert outcome(changed_copy(small(tmp_path, "idefics3"), tmp_path / "mmproj.gguf", change)) == "rows"
