"""Tests that the sums of squared inputs are those of the NumPy twins, whatever the threads and the steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.errors import Cancelled
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan.ops.linear import Product
from llmrun.model.plan.twin import Run, dequantized
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.push

TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 290, 70)]
# Dense, fused and per-head matrices; experts with one and two matrices per tensor, and a shared expert; recurrent
# layers; values that a later op changes in place.
NAMES = [
    "qwen2",
    "fused with one bias",
    "deepseek2",
    "llama Mixtral",
    "qwen2moe",
    "gemma4 experts of two matrices, one dense layer",
    "granitehybrid",
    "qwen35moe",
]
Sums = dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]]


def opened(path: Path, threads: int) -> CpuBackend:
    with open_gguf(path) as file:
        return CpuBackend(file, OpenOptions(context_size=128, threads=threads))


def sums_of(path: Path, threads: int, *lengths: int, with_output: bool = False) -> Sums:
    """Run the tokens in steps of these lengths. The logits of all rows are wanted."""
    backend = opened(path, threads)
    with backend.summing(with_output=with_output) as team:
        done = 0
        for length in lengths:
            backend.forward(batch_of(rows(0, done, TOKENS[done : done + length])))
            done += length
        found = {name: (sums.sums, sums.counts) for sums in team.found for name in sums.names}
    backend.close()
    return found


def twin_sums(path: Path) -> Sums:
    """Return the sums from the twins, which round keys and values as the engine does, but no other activations."""
    plan, found = plan_of(path), {}
    run = Run(plan.ropes, np.array(TOKENS, np.int32), lambda matrix, x: x @ dequantized(matrix).T, "f16")
    for op in plan.ops:
        if isinstance(op, Product) and op.weight.name.startswith("blk."):
            x = run.values[op.x].astype(np.float64)
            chosen = run.routed[op.routed_by][0] if op.routed_by else np.zeros((len(x), 1), np.int64)
            each = x if len(x) == chosen.size else np.repeat(x, chosen.shape[1], axis=0)
            experts = op.routed_by.experts if op.routed_by else 1
            sums = np.zeros((experts, op.x.width))
            np.add.at(sums, chosen.reshape(-1), np.square(each))
            counts = np.bincount(chosen.reshape(-1), minlength=experts)
            found[op.weight.name.partition("[")[0]] = sums, counts
        op.twin(run)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_those_of_the_twins(tmp_path: Path, name: str) -> None:
    """The worst of these is measured at 2e-4, from values that tip to another float16 in the KV cache."""
    path = tiny_architecture(tmp_path, name)
    ours, theirs = sums_of(path, 2, 40, 30), twin_sums(path)
    assert ours.keys() == theirs.keys()
    for tensor, (sums, counts) in ours.items():
        assert (counts == theirs[tensor][1]).all(), tensor
        np.testing.assert_allclose(sums, theirs[tensor][0], rtol=1e-3, atol=1e-6, err_msg=tensor)


@pytest.mark.parametrize("name", ["llama Mixtral", "deepseek2", "granitehybrid"])
def test_threads_change_no_bit(tmp_path: Path, name: str) -> None:
    path = tiny_architecture(tmp_path, name)
    one, three = sums_of(path, 1, 69, 1), sums_of(path, 3, 69, 1)
    assert one.keys() == three.keys()
    for tensor in one:
        assert (one[tensor][0] == three[tensor][0]).all()
        assert (one[tensor][1] == three[tensor][1]).all()


def test_quantized_weights_read_the_inputs_before_rounding(tmp_path: Path) -> None:
    """The input of the first matrix is the norm of the embedding, which is exact in both."""
    path = tiny_model(tmp_path, "Q8_0 one KV head")
    ours, theirs = sums_of(path, 2, 70)["blk.0.attn_q.weight"], twin_sums(path)["blk.0.attn_q.weight"]
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)


def test_the_output_matrix_is_optional(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "Q4_0 untied")
    assert "output.weight" not in sums_of(path, 1, 70)
    assert sums_of(path, 1, 70, with_output=True)["output.weight"][1].tolist() == [70]


def test_cleared_sums_begin_again(tmp_path: Path) -> None:
    backend = opened(tiny_model(tmp_path, "Q8_0 one KV head"), 1)
    with backend.summing() as team:
        backend.forward(batch_of(rows(0, 0, TOKENS)))
        first = [found.sums.copy() for found in team.found]
        backend.kv.free(0)
        team.clear()
        backend.forward(batch_of(rows(0, 0, TOKENS)))
        assert all((found.sums == sums).all() for found, sums in zip(team.found, first, strict=True))
        backend.cancel()
        with pytest.raises(Cancelled):
            backend.forward(batch_of(rows(0, len(TOKENS), [5])))
    logits = backend.forward(batch_of(rows(0, len(TOKENS), [5]))).logits
    assert np.isfinite(logits).all()
    backend.close()
