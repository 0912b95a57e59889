"""Tests that quantized projectors keep their metadata and what must stay a float, and give nearly the same rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.llama.vision import LlamaVision
from llmrun.base.errors import DoesNotFit, ModelFileError, UnsupportedModel, UsageError
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.quants.registry import BY_NAME
from llmrun.hub.local import safe_writes
from llmrun.jobs.file_types import file_type_named
from llmrun.jobs.quantizing_projectors import plan_of_projector, quantize_projector
from llmrun.model.vision.encoders.registry import encoder_of
from llmrun.model.vision.projector import read_projector
from llmrun.model.vision.reference import encode_exactly
from tests.support.models.tiny_models import changed_copy
from tests.support.vision.encoder_cases import least_cosine
from tests.support.vision.opened import SMALL, encode
from tests.support.vision.projectors import TINY_PROJECTORS, tiny_projector, tiny_text_model
from tests.support.vision.prompts import tiles_of

Q8_0 = file_type_named("Q8_0")


def small(folder: Path, name: str, weight_type: str = "F16", **fields: Any) -> Path:
    return tiny_projector(folder, name, weight_type, **(SMALL.get(name, {}) | fields))


def quantized(path: Path) -> Path:
    shares: list[float] = []
    out = path.with_name(f"mmproj-new-{path.name}")
    with open_gguf(path) as file:
        plan = plan_of_projector(file, Q8_0)
        size = quantize_projector(file, out, Q8_0, plan, shares.append)
    assert plan.n_bytes == size == out.stat().st_size
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert list(path.parent.glob(".*")) == []
    return out


@pytest.mark.parametrize("name", TINY_PROJECTORS)
@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16"])
def test_only_matrices_of_whole_blocks_are_quantized(tmp_path: Path, name: str, weight_type: str) -> None:
    path = small(tmp_path, name, weight_type)
    with open_gguf(path) as old, open_gguf(quantized(path)) as new:
        assert list(new.tensors) == list(old.tensors)
        for tensor in old.tensors.values():
            made = new.tensors[tensor.name]
            assert made.shape == tensor.shape
            stays = len(tensor.shape) != 2 or tensor.name.startswith(("v.position_embd", "v.patch_embd"))
            stays |= name == "gemma3" and tensor.name.startswith("mm.input_projection")
            stays |= tensor.name == "mm.patch_merger.weight"
            assert made.type is (tensor.type if stays else BY_NAME[Q8_0.name])
            if stays:
                assert bytes(new.read(made)) == bytes(old.read(tensor))


def test_rows_of_other_lengths_stay_floats(tmp_path: Path) -> None:
    """Gemma 3's feed-forward network has 4304 features, which are no multiple of 32."""

    def change(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        for layer in range(2):
            block = f"v.blk.{layer}.ffn"
            tensors[f"{block}_up.weight"] = ("F16", np.ones((72, 64), np.float32))
            tensors[f"{block}_up.bias"] = ("F32", np.ones(72, np.float32))
            tensors[f"{block}_down.weight"] = ("F16", np.ones((64, 72), np.float32))

    changed = changed_copy(small(tmp_path, "gemma3"), tmp_path / "mmproj-odd.gguf", change)
    with open_gguf(quantized(changed)) as file:
        types = {name: file.tensors[f"v.blk.0.{name}.weight"].type.name for name in ("ffn_up", "ffn_down", "attn_q")}
    assert types == {"ffn_up": "Q8_0", "ffn_down": "F16", "attn_q": "Q8_0"}


def test_metadata_keep_their_types(tmp_path: Path) -> None:
    extra = {
        "general.file_type": 1,
        "general.alignment": 32,
        "test.flag": True,
        "test.texts": ["a", "ü"],
        "test.numbers": np.array([1, 2], np.int16),
    }
    path = small(tmp_path, "lfm2", extra=extra)
    with open_gguf(path) as old, open_gguf(quantized(path)) as new:
        changed = {"general.file_type": "u32", "general.quantization_version": "u32"}
        assert new.types == {k: v for k, v in old.types.items() if k != "general.alignment"} | changed
        assert (new.integer("general.file_type"), new.integer("general.quantization_version")) == (7, 2)
        for key in set(old.metadata) - {"general.file_type", "general.alignment"}:
            np.testing.assert_array_equal(list_of(new.metadata[key]), list_of(old.metadata[key]))


def list_of(value: Any) -> Any:
    return value if isinstance(value, str | bool | int | float) else list(value)


@pytest.mark.parametrize("name", TINY_PROJECTORS)
def test_rows_are_nearly_those_of_the_source(tmp_path: Path, name: str) -> None:
    path, rows = small(tmp_path, name), []
    for made in (path, quantized(path)):
        projector = read_projector(made)
        with open_gguf(made) as file:
            tile = tiles_of(projector.layout(70, 50, "low"))[0]
            rows.append(encode_exactly(encoder_of(file, projector), tile))
    assert 0.999 < least_cosine(*rows) < 1


@pytest.mark.push
@pytest.mark.parametrize("name", TINY_PROJECTORS)
def test_libmtmd_reads_quantized_projectors(tmp_path: Path, name: str) -> None:
    path, model = small(tmp_path, name), tiny_text_model(tmp_path, name)
    rows = []
    for made in (path, quantized(path)):
        vision = LlamaVision(model, read_projector(made), 1)
        try:
            layout = vision.projector.layout(70, 50, "low")
            rows.append(encode(vision, tiles_of(layout), layout))
        finally:
            vision.close()
    assert 0.999 < least_cosine(*rows) < 1


@pytest.mark.parametrize("name", ["Q4_K_M", "F16", "COPY"])
def test_other_types_are_refused(tmp_path: Path, name: str) -> None:
    with open_gguf(small(tmp_path, "lfm2")) as file, pytest.raises(UsageError) as caught:
        plan_of_projector(file, file_type_named(name))
    kind = file_type_named(name).name
    assert str(caught.value) == f"{kind}: {file.path} is a vision projector, which can only become Q8_0"


def test_quantized_projectors_are_refused(tmp_path: Path) -> None:
    with open_gguf(small(tmp_path, "lfm2", "Q8_0")) as file, pytest.raises(UsageError) as caught:
        plan_of_projector(file, Q8_0)
    assert "tensors are quantized already, such as mm.1.weight (Q8_0)" in str(caught.value)


def test_unknown_projectors_are_refused(tmp_path: Path) -> None:
    path = small(tmp_path, "lfm2", extra={"clip.projector_type": "glm4v"})
    with open_gguf(path) as file, pytest.raises(UnsupportedModel, match="projector not supported"):
        plan_of_projector(file, Q8_0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 6e9])
def test_weights_without_a_scale_are_refused(tmp_path: Path, value: float) -> None:
    def change(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["mm.2.weight"] = ("F32", np.full((96, 160), value, np.float32))

    path = changed_copy(small(tmp_path, "lfm2"), tmp_path / "mmproj-nan.gguf", change)
    with pytest.raises(ModelFileError) as caught:
        quantized(path)
    assert "mm.2.weight has weights that Q8_0 cannot store" in str(caught.value)
    assert Counter(file.suffix for file in tmp_path.iterdir()) == {".gguf": 2}


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_writes, "SPARE", 1 << 60)
    path = small(tmp_path, "lfm2")
    with pytest.raises(DoesNotFit, match="disk"):
        quantized(path)
    assert list(tmp_path.iterdir()) == [path]
