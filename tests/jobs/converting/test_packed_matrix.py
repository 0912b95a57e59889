"""Tests that repacked matrices dequantize to the last bit of what the libraries of AWQ and GPTQ compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.base.errors import ModelFileError, UnsupportedModel
from llmrun.jobs.converting import convert as tensors_module
from llmrun.jobs.converting.checkpoint import SafetensorsFile
from llmrun.jobs.converting.convert import PackedMatrix, Packing, Quantization, open_matrix
from tests.support.converting.checkpoints import save_safetensors
from tests.support.converting.packing import Quantized, Tensors, awq_weights, gptq_weights

OUTPUTS, INPUTS, GROUP = 64, 128, 32
GPTQ = Quantization(Packing.GPTQ, GROUP, 1, False)
AWQ = Quantization(Packing.AWQ, GROUP, 0, False)


def opened(folder: Path, tensors: Tensors, quantization: Quantization, shape: tuple[int, int]) -> PackedMatrix:
    file = SafetensorsFile(save_safetensors(folder / "m.safetensors", tensors))
    return open_matrix(file.tensors, "m", *shape, quantization)


def halves(matrix: PackedMatrix, rows: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return the bits of the weights in float16, uint16[rows, inputs]."""
    assert matrix.type.dequantize is not None
    raw = np.concatenate(list(matrix.blocks(rows)))
    with np.errstate(over="ignore"):
        return matrix.type.dequantize(raw).reshape(len(rows), -1).astype(np.float16).view(np.uint16)


@st.composite
def matrices(draw: st.DrawFn) -> Quantized:
    """Generate matrices with any finite scales, also negative, subnormal and large ones."""
    outputs, inputs = 8 * draw(st.integers(1, 6)), 32 * draw(st.integers(1, 6))
    group = draw(st.sampled_from([32, 64, 128, inputs]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    made = Quantized.random(random, outputs, inputs, group, zero=draw(st.sampled_from([None, 8, 3])))
    bits = random.integers(0, 0x7C00, made.scales.shape) | random.integers(0, 2, made.scales.shape) << 15
    return Quantized(made.q, made.zeros, bits.astype(np.uint16).view(np.float16), group)


@pytest.mark.push
@settings(deadline=None)
@given(made=matrices(), version=st.sampled_from([1, 2]), seed=st.integers(0, 2**32))
def test_gptq_is_exact(made: Quantized, version: int, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    tensors = made.gptq("m", version=version)
    order = np.random.default_rng(seed).permutation(len(made.q))
    quantization = Quantization(Packing.GPTQ, made.group, 2 - version, False)
    matrix = opened(tmp_path_factory.mktemp("m"), tensors, quantization, made.q.shape)
    parts: list[Any] = [tensors[f"m.{name}"][1] for name in ("qweight", "qzeros", "scales", "g_idx")]
    with np.errstate(over="ignore"):
        expected = gptq_weights(*parts, version=version).T[order]
    assert (halves(matrix, order) == np.ascontiguousarray(expected).view(np.uint16)).all()
    assert matrix.type.name == ("Q4_0" if (made.zeros == 8).all() else "Q5_0")


@settings(deadline=None)
@given(made=matrices(), seed=st.integers(0, 2**32))
def test_awq_is_exact(made: Quantized, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    if made.q.shape[1] % made.group:
        made = Quantized(made.q, made.zeros[:1], made.scales[:1], made.q.shape[1])  # AutoAWQ has only whole groups
    tensors = made.awq("m")
    order = np.random.default_rng(seed).permutation(len(made.q))
    quantization = Quantization(Packing.AWQ, made.group, 0, False)
    matrix = opened(tmp_path_factory.mktemp("m"), tensors, quantization, made.q.shape)
    qweight, qzeros, scales = (tensors[f"m.{name}"][1] for name in ("qweight", "qzeros", "scales"))
    with np.errstate(over="ignore"):
        expected = awq_weights(qweight, qzeros, scales, made.group).T[order]  # type: ignore[arg-type]
    assert (halves(matrix, order) == np.ascontiguousarray(expected).view(np.uint16)).all()
    assert matrix.type.name == ("Q4_0" if (made.zeros == 8).all() else "Q5_0")


def test_pieces_join_to_the_whole_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Quantized.random(np.random.default_rng(0), OUTPUTS, INPUTS, GROUP)
    whole = halves(opened(tmp_path, made.awq("m"), AWQ, (OUTPUTS, INPUTS)), np.arange(OUTPUTS))
    monkeypatch.setattr(tensors_module, "_PIECE_WEIGHTS", 3 * INPUTS)
    matrix = opened(tmp_path, made.awq("m"), AWQ, (OUTPUTS, INPUTS))
    assert len(list(matrix.blocks(np.arange(OUTPUTS)))) == 22
    assert (halves(matrix, np.arange(OUTPUTS)) == whole).all()


def test_a_group_may_be_a_whole_row(tmp_path: Path) -> None:
    made = Quantized.random(np.random.default_rng(0), OUTPUTS, INPUTS, INPUTS, zero=8)
    matrix = opened(tmp_path, made.gptq("m"), Quantization(Packing.GPTQ, 0, 1, False), (OUTPUTS, INPUTS))
    assert (halves(matrix, np.arange(OUTPUTS)) == made.weights().astype(np.float16).view(np.uint16)).all()


def gptq(**changes: tuple[str, NDArray[np.generic]] | None) -> Tensors:
    """Return the tensors of a matrix, with some of them replaced or, for None, left out."""
    tensors = Quantized.random(np.random.default_rng(0), OUTPUTS, INPUTS, GROUP).gptq("m")
    for name, tensor in changes.items():
        tensors.pop(f"m.{name}")
        if tensor is not None:
            tensors[f"m.{name}"] = tensor
    return tensors


ORDER = np.arange(INPUTS, dtype=np.int32) // GROUP


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (gptq(g_idx=("I32", ORDER[::-1].copy())), "g_idx mixes the inputs of different groups (desc_act)"),
        (gptq(scales=("BF16", np.zeros((4, OUTPUTS), np.uint16))), "m.scales is BF16, but must be F16"),
        (gptq(scales=("F32", np.zeros((4, OUTPUTS), np.float32))), "m.scales is F32, but must be F16"),
        (gptq(qweight=("I64", np.zeros((16, OUTPUTS), np.int64))), "m.qweight is I64, but must be I32"),
        (gptq(qzeros=("I32", np.full((4, 8), -1, np.int32))), "a stored zero point of 15"),
    ],
)
def test_what_gguf_cannot_express_is_refused(tensors: Tensors, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        opened(tmp_path, tensors, GPTQ, (OUTPUTS, INPUTS))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (gptq(scales=None), "needs m.scales, which is missing"),
        (gptq(qzeros=None), "needs m.qzeros, which is missing"),
        (gptq(scales=("F16", np.full((4, OUTPUTS), np.inf, np.float16))), "has a scale that is not finite"),
        (gptq(scales=("F16", np.ones((2, OUTPUTS), np.float16))), "must have the shape (4, 64), not (2, 64)"),
        (gptq(qweight=("I32", np.zeros((INPUTS, 8), np.int32))), "must have the shape (16, 64), not (128, 8)"),
    ],
)
def test_broken_matrices_are_refused(tensors: Tensors, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        opened(tmp_path, tensors, GPTQ, (OUTPUTS, INPUTS))
    assert message in str(caught.value)


def test_desc_act_needs_the_order_of_the_groups(tmp_path: Path) -> None:
    reordered = Quantization(Packing.GPTQ, GROUP, 1, True)
    with pytest.raises(ModelFileError, match=r"needs m\.g_idx, which is missing, because desc_act is true"):
        opened(tmp_path, gptq(g_idx=None), reordered, (OUTPUTS, INPUTS))
    opened(tmp_path, gptq(), reordered, (OUTPUTS, INPUTS))  # groups in order are fine
    opened(tmp_path, gptq(g_idx=None), GPTQ, (OUTPUTS, INPUTS))


@pytest.mark.parametrize("shape", [(60, 128), (64, 120)])
def test_odd_sizes_are_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="must be multiples of 32 and 8"):
        opened(tmp_path, gptq(), GPTQ, shape)
