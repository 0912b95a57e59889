"""Tests of reading projectors: what the file says, and that each wrong file is refused in one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import LlmrunError, ModelFileError, UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.projector import FAMILY_NAMES, ProjectorFile, check_projector, read_projector
from tests.support.gguf.gguf_files import Tensor, tiny_llama
from tests.support.models.tiny_models import changed_copy
from tests.support.vision.projectors import TINY_PROJECTORS, WIDTH, tiny_projector, tiny_text_model

NO_IMAGES = {"image_size": 224}  # a size that makes files of families with a fixed size small


def small(folder: Path, name: str, weight_type: str = "F32", **fields: Any) -> Path:
    fixed = NO_IMAGES if name in ("gemma3", "internvl") else {}
    return tiny_projector(folder, name, weight_type, **(fixed | fields))


def refusal(path: Path) -> LlmrunError:
    """Return the error with which a file is refused."""
    with pytest.raises(ModelFileError) as caught:
        read_projector(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return caught.value


def unfit(projector: ProjectorFile, model: Path) -> str:
    with open_gguf(model) as file, pytest.raises(ModelFileError) as caught:
        check_projector(projector, file)
    assert str(projector.path) in str(caught.value)
    assert caught.value.hint == "Use the projector from the model's repository."
    return str(caught.value)


@pytest.mark.parametrize("name", TINY_PROJECTORS)
@pytest.mark.parametrize("weight_type", ["F32", "F16", "Q8_0"])
def test_every_family_is_read(tmp_path: Path, name: str, weight_type: str) -> None:
    row = TINY_PROJECTORS[name]
    path = tiny_projector(tmp_path, name, weight_type)
    projector = read_projector(path)
    assert (projector.path, projector.family) == (path, row.family)
    assert row.placeholder in projector.placeholders
    assert set(projector.markers) <= set(row.markers)
    assert projector.row_width == 96 * (1 + len(row.deepstack))
    assert projector.uses_mrope == row.family.startswith("qwen")
    assert projector.is_causal == (not row.family.startswith("gemma"))
    assert 0.5 < projector.weight_bytes / path.stat().st_size < 1.0
    assert projector.working_bytes(projector.most_rows) > projector.most_rows * 4 * WIDTH
    assert projector.layout(1024, 768).rows > 50


@pytest.mark.parametrize("name", TINY_PROJECTORS)
def test_projectors_fit_their_models(tmp_path: Path, name: str) -> None:
    projector = read_projector(small(tmp_path, name))
    with open_gguf(tiny_text_model(tmp_path, name)) as model:
        check_projector(projector, model)


def test_rows_with_deepstack_fit_a_model_without_more_width(tmp_path: Path) -> None:
    """Correct projectors were refused for their width: ggml-org/llama.cpp#20899."""
    projector = read_projector(tiny_projector(tmp_path, "qwen3vl_merger"))
    assert (projector.deepstack, projector.row_width) == (1, 192)
    model = tiny_text_model(tmp_path, "qwen3vl_merger qwen35")
    assert "embeddings have 192 numbers, but the model's have 96" in unfit(projector, model)


def test_projectors_of_other_models_are_refused(tmp_path: Path) -> None:
    """Other programs take the projector of another model: gpustack/gpustack#2261."""
    wide = read_projector(small(tmp_path, "gemma3", text_width=128))
    assert "embeddings have 128 numbers, but the model's have 96" in unfit(wide, tiny_text_model(tmp_path, "gemma3"))
    same_width = read_projector(small(tmp_path, "gemma3"))
    model = tiny_text_model(tmp_path, "internvl")
    assert "the vocabulary of the model lacks <start_of_image>" in unfit(same_width, model)


def test_mrope_must_match(tmp_path: Path) -> None:
    qwen = read_projector(small(tmp_path, "qwen2vl_merger"))
    without = changed_copy(
        tiny_text_model(tmp_path, "qwen2vl_merger"),
        tmp_path / "no-mrope.gguf",
        lambda metadata, _: metadata.pop("qwen2vl.rope.dimension_sections"),
    )
    assert "qwen2vl_merger is for models with M-RoPE, but the model has none" in unfit(qwen, without)
    other = read_projector(small(tmp_path, "internvl"))
    model = changed_copy(
        tiny_text_model(tmp_path, "internvl"),
        tmp_path / "mrope.gguf",
        lambda metadata, _: metadata.update({"qwen3.rope.dimension_sections": np.array([4, 6, 6, 0], np.int32)}),
    )
    assert "internvl is for models without M-RoPE, but the model has it" in unfit(other, model)


@pytest.mark.parametrize(("width", "is_causal"), [(96, False), (1536, True), (2560, True), (3840, False)])
def test_small_gemma_4_models_read_images_causally(tmp_path: Path, width: int, is_causal: bool) -> None:
    """A wrong mask for Gemma 4: ggml-org/llama.cpp#28318."""
    path = tiny_projector(tmp_path, "gemma4v", layers=0, others={}, text_width=width)
    assert read_projector(path).is_causal is is_causal


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_missing_tensors_are_named(tmp_path: Path, name: str) -> None:
    """Missing tensors ended in a generic error: ggml-org/llama.cpp#14237."""
    projection = {"internvl": "mm.model.mlp.3.weight", "idefics3": "mm.model.fc.weight", "lfm2": "mm.2.weight"}
    projection |= dict.fromkeys(("gemma3", "gemma4v", "gemma4uv"), "mm.input_projection.weight")
    missing = projection.get(name, "mm.2.weight")
    error = refusal(small(tmp_path, name, without=[missing]))
    assert f"the tensor {missing} is missing" in str(error)
    assert "more" not in str(error)
    assert error.hint.startswith("Download the file again")


def test_several_missing_tensors_are_counted(tmp_path: Path) -> None:
    without = ["v.blk.1.attn_q.weight", "v.blk.1.ln2.weight", "v.patch_embd.weight"]
    message = str(refusal(small(tmp_path, "lfm2", without=without)))
    assert "is missing, and 2 more" in message


def test_optional_tensors_may_be_missing(tmp_path: Path) -> None:
    without = ["mm.input_norm.weight", "mm.input_norm.bias", "v.blk.0.attn_q.bias", "v.post_ln.bias"]
    assert read_projector(small(tmp_path, "lfm2", without=without)).row_width == 96


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5vl_merger", "idefics3"])
def test_older_names_of_the_feed_forward_are_accepted(tmp_path: Path, name: str) -> None:
    row = TINY_PROJECTORS[name]
    up, down = ("ffn_up:w,f", "ffn_down:f,w") if "ffn_up:w,f" in row.layer else ("ffn_up:f,w", "ffn_down:w,f")
    layer = row.layer.replace(up, "ffn_up:" + down[9:]).replace(down, "ffn_down:" + up[7:])
    biases = layer.replace("ffn_up.bias:w", "?").replace("ffn_up.bias:f", "ffn_up.bias:w").replace("?", "ffn_up.bias:f")
    swapped = biases.replace("ffn_down.bias:w", "?").replace("ffn_down.bias:f", "ffn_down.bias:w")
    swapped = swapped.replace("?", "ffn_down.bias:f")
    assert swapped != row.layer
    assert read_projector(small(tmp_path, name, layer=swapped)).family == name


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("gemma3", {"extra": {"clip.projector_type": "mlp"}}, "projector not supported: "),
        ("gemma3", {"without": ["clip.projector_type"]}, "clip.projector_type: the key is missing"),
        ("gemma3", {"without": ["clip.vision.image_size"]}, "clip.vision.image_size: the key is missing"),
        ("gemma3", {"extra": {"clip.has_vision_encoder": False}}, "the projector has no encoder for images"),
        ("gemma3", {"extra": {"clip.vision.image_size": 9000}}, "must be at most 8192, not 9000"),
        ("gemma3", {"extra": {"clip.vision.patch_size": 0}}, "must be at least 1, not 0"),
        ("gemma3", {"extra": {"clip.vision.projector.scale_factor": 5}}, "16 patches cannot be divided into"),
        ("gemma3", {"extra": {"clip.use_silu": True}}, "clip.use_gelu and clip.use_silu are both true"),
        ("gemma3", {"extra": {"clip.vision.image_std": [0.5, 0.0, 0.5]}}, "magnitudes from 1e-06 to 1e+06, not 0"),
        ("gemma3", {"extra": {"clip.vision.image_std": [0.5, 1e-30, 0.5]}}, "to 1e+06, not 1e-30"),
        ("gemma3", {"extra": {"clip.vision.image_mean": [0.5, 0.5, -3e38]}}, "to 1e+06, not -3e+38"),
        ("gemma3", {"extra": {"clip.vision.image_mean": [0.5, float("nan"), 0.5]}}, "to 1e+06, not nan"),
        ("gemma3", {"extra": {"clip.vision.image_mean": [0.5]}}, "clip.vision.image_mean: must have 3 numbers"),
        ("gemma3", {"extra": {"clip.vision.attention.head_count": 7}}, "must divide 64, not be 7"),
        ("gemma3", {"extra": {"clip.vision.block_count": 3}}, "the tensor v.blk.2."),
        ("gemma3", {"extra": {"clip.vision.embedding_length": 32}}, "the shape must be"),
        ("gemma3", {"extra": {"clip.vision.image_size": 112}}, "v.position_embd.weight: the shape must be 64 x 64"),
        ("lfm2", {"extra": {"clip.vision.patch_size": 15}}, "tiles of 512 pixels cannot be divided into rows"),
        ("lfm2", {"image_size": 272, "once": "v.patch_embd:w,3,p,p v.position_embd:q,w mm.1:f,m mm.1.bias:f mm.2:t,f "
          "mm.2.bias:t"}, "the number of positions must be a square, not 192"),
        ("qwen2vl_merger", {"merge_key": "spatial_merge_size", "merge": 3}, "only 2 patches per row are supported"),
        ("idefics3", {"image_size": 112, "extra": {"clip.vision.preproc_image_size": 8000}}, "needs too many tiles"),
        ("internvl", {"extra": {"clip.vision.preproc_min_tiles": 13}}, "13 to 12 tiles are no range"),
        ("gemma4v", {"extra": {"clip.vision.projector.scale_factor": 16}}, "must have at least 17920 positions"),
        ("gemma3", {"extra": {"clip.vision.attention.layer_norm_epsilon": -1.0}}, "must be 0 or more, not -1.0"),
        ("gemma3", {"extra": {"clip.vision.image_min_pixels": 1.5}}, "must be u32, not f32"),
        ("gemma3", {"extra": {"clip.vision.image_max_pixels": [1]}}, "must be u32, not arr[i32]"),
        ("gemma3", {"extra": {"clip.vision.image_mean": [1, 1, 1]}}, "must be arr[f32], not arr[i32]"),
        ("lfm2", {"without": ["clip.vision.projection_dim"]}, "clip.vision.projection_dim: the key is missing"),
        ("qwen2.5vl_merger", {"without": ["clip.vision.n_wa_pattern"]}, "clip.vision.n_wa_pattern: the key is missing"),
        ("qwen2.5vl_merger", {"extra": {"clip.vision.projection_dim": 64}}, "must be 96, the width of the rows"),
        ("qwen2vl_merger", {"without": ["v.blk.1.attn_k.bias"]}, "the tensor v.blk.1.attn_k.bias is missing"),
        ("pixtral", {"merge_key": "", "merge": 2}, "mm.patch_merger.weight: the shape must be 64 x 64, not 256 x 64"),
        ("pixtral", {"without": ["mm.patch_merger.weight"]}, "the tensor mm.patch_merger.weight is missing"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(tmp_path: Path, name: str, fields: dict[str, Any], words: str) -> None:
    assert words in str(refusal(small(tmp_path, name, **fields)))


def test_unknown_projectors_get_a_list_of_ours(tmp_path: Path) -> None:
    error = refusal(small(tmp_path, "gemma3", extra={"clip.projector_type": "glm4v"}))
    assert isinstance(error, UnsupportedModel)
    assert str(error).endswith(": glm4v")
    assert error.hint == f"Supported: {', '.join(FAMILY_NAMES)}."


def test_encoders_for_images_and_audio_are_read(tmp_path: Path) -> None:
    extra = {"clip.has_audio_encoder": True, "clip.vision.projector_type": "gemma4v", "clip.audio.projector_type": "x"}
    path = tiny_projector(tmp_path, "gemma4v", extra=extra, without=["clip.projector_type"])
    assert read_projector(path).family == "gemma4v"


def test_models_are_not_projectors(tmp_path: Path) -> None:
    assert "not a projector" in str(refusal(tiny_llama(tmp_path / "model.gguf")))


def test_encoders_inside_a_model_are_named(tmp_path: Path) -> None:
    def add(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["v.patch_embd.weight"] = ("F32", np.zeros((4, 32), np.float32))

    path = changed_copy(tiny_llama(tmp_path / "model.gguf"), tmp_path / "monolithic.gguf", add)
    error = refusal(path)
    assert "vision encoders inside a model's file are not supported" in str(error)
    assert "(mmproj) as a file of its own" in error.hint


@pytest.mark.parametrize(
    ("name", "kind", "wanted"),
    [
        ("v.patch_embd.weight", "BF16", "F32 or F16"),
        ("v.position_embd.weight", "Q8_0", "F32"),
        ("v.position_embd.weight", "F16", "F32"),
        ("mm.2.bias", "F16", "F32"),
        ("v.blk.0.ln1.weight", "BF16", "F32"),
    ],
)
def test_weight_types_that_crash_libmtmd_are_refused(tmp_path: Path, name: str, kind: str, wanted: str) -> None:
    plain = tiny_projector(tmp_path, "qwen3vl_merger")
    with open_gguf(plain) as file:
        shape = file.tensors[name].shape[::-1]

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = (kind, np.zeros(shape, np.float32))

    error = refusal(changed_copy(plain, tmp_path / "mmproj-changed.gguf", change))
    assert isinstance(error, UnsupportedModel)
    assert f"{name} must be {wanted}, not {kind}" in str(error)


def test_transposed_matrices_must_be_floats(tmp_path: Path) -> None:
    """libmtmd transposes Gemma 3's projection, and writes out of bounds for blocks of weights."""
    plain = tiny_projector(tmp_path, "gemma3", image_size=112)

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["mm.input_projection.weight"] = ("Q8_0", np.zeros((64, 96), np.float32))

    error = refusal(changed_copy(plain, tmp_path / "mmproj-changed.gguf", change))
    assert isinstance(error, UnsupportedModel)
    assert "mm.input_projection.weight must be F32 or F16 or BF16, not Q8_0" in str(error)


def test_the_identity_is_that_of_the_file(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path, "lfm2")
    first = read_projector(path).identity
    assert read_projector(path, most=100).identity == first
    os.utime(path, ns=(1, 1))
    assert read_projector(path).identity != first
    other = tiny_projector(tmp_path, "lfm2", seed=1)
    os.utime(other, ns=(1, 1))
    assert read_projector(other).identity != read_projector(tiny_projector(tmp_path, "lfm2")).identity


@pytest.mark.push
def test_importing_does_not_import_numpy() -> None:
    code = "import sys, llmrun.model.vision.projector; print('numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
