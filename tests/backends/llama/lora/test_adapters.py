"""Tests of LoRA adapters on the llama.cpp backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.lora import in_order, passes_of
from llmrun.base.errors import UnsupportedModel
from llmrun.base.types import HIDDEN, LOGITS, Batch, Outputs
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.models.tiny_adapters import AdaptedOracle, scales_of, tiny_adapter
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.push

TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 290, 40)]


@contextmanager
def opened(model: Path, adapters: Sequence[Path], sequences: int = 1) -> Iterator[LlamaBackend]:
    options = OpenOptions(
        context_size=128, threads=1, gpu_layers=0, max_sequences=sequences, adapters=[*map(str, adapters)]
    )
    with open_gguf(model) as file:
        backend = LlamaBackend(file, options)
    try:
        yield backend
    finally:
        backend.close()


def distance(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(actual - expected).max() / np.ptp(expected))


def test_sequences_with_different_adapters_share_a_batch(tmp_path: Path) -> None:
    """Allow half a percent of the logits' range, because llama.cpp's results depend on the batch. The last sequence is
    activated in the middle."""
    model = tiny_model(tmp_path, "F32")
    adapters = [tiny_adapter(tmp_path / f"{n}.gguf", model, rank=n + 3, seed=n) for n in range(2)]
    combinations = [(0.5, 0.0), (0.0, 0.0), (0.0, 1.0), (0.5, 1.0)]
    expected = []
    for scales in combinations:
        used = [pair for pair in zip(adapters, scales, strict=True) if pair[1]]
        with AdaptedOracle(model, used) as oracle:
            expected.append(oracle.logits(TOKENS))
    with opened(model, adapters, sequences=5) as backend:
        triples = [each for seq in range(5) for each in rows(seq, 0, TOKENS)]
        of_rows = np.repeat(np.array([*combinations, (0, 1)], np.float32), 40, axis=0)
        of_rows[160:175] = 0
        logits = backend.forward(replace(batch_of(triples), scales=of_rows)).logits.reshape(5, 40, -1)
        plain = backend.forward(batch_of(rows(1, 40, [5]))).logits
        assert plain.shape == (1, logits.shape[-1])
    for seq in range(4):
        assert distance(logits[seq], expected[seq]) <= 5e-3
    assert distance(logits[4][:15], expected[1][:15]) <= 5e-3
    assert distance(logits[4][15:], expected[1][15:]) > 0.02
    assert min(distance(one, expected[1]) for one in (logits[0], logits[2], logits[3])) > 0.02


def test_adapters_of_experts_are_applied(tmp_path: Path) -> None:
    model = tiny_architecture(tmp_path, "llama Mixtral")
    adapter = tiny_adapter(tmp_path / "a.gguf", model, names=[], experts=["blk.0.ffn_up_exps.weight"], alpha=16.0)
    with AdaptedOracle(model, [(adapter, 1.0)]) as oracle, opened(model, [adapter]) as backend:
        expected = oracle.logits(TOKENS)
        logits = backend.forward(replace(batch_of(rows(0, 0, TOKENS)), scales=scales_of(40, 1.0))).logits
        assert distance(logits, expected) <= 5e-3
        backend.kv.free(0)
        assert distance(backend.forward(batch_of(rows(0, 0, TOKENS))).logits, expected) > 0.02


def test_parts_that_llama_cpp_ignores_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_architecture(tmp_path, "deepseek2")
    for name in ("blk.0.attn_kv_a_mqa.weight", "output.weight"):
        adapter = tiny_adapter(tmp_path / "a.gguf", model, names=[name])
        with pytest.raises(UnsupportedModel, match=rf"{name}: llama\.cpp does not apply"), opened(model, [adapter]):
            pass


@pytest.mark.parametrize("most", [2, 7, 100])
def test_passes_keep_the_order_of_rows_and_outputs(most: int) -> None:
    """Rows of one sequence stay in order, and the outputs come in the order of the batch."""
    seq = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3], np.int32)
    pos = np.array([0, 1, 2, 0, 1, 0, 1, 2, 3, 0], np.int32)
    want = np.array([0, 1, 3, 2, 1, 0, 1, 1, 2, 3], np.uint8)
    scales = np.array([[0, 1], [0, 1], [0, 1], [0, 0], [1, 1], [0, 0], [0, 1], [0, 1], [0, 1], [1, 0]], np.float32)
    batch = Batch(np.arange(10, dtype=np.int32), seq, pos, want, scales)
    found = list(passes_of(batch, np.arange(len(batch.tokens)), 2, most, most))
    parts, reached = [], [0, 0, 0, 0]
    for used, own in found:
        assert 0 < len(own) <= most
        assert (scales[own] == used).all()
        for row in own:
            assert pos[row] == reached[seq[row]]
            reached[seq[row]] += 1
        logits, hidden = (own[want[own] & kind != 0].reshape(-1, 1).astype(np.float32) for kind in (LOGITS, HIDDEN))
        parts.append(Outputs(logits, hidden))
    assert reached == [3, 2, 4, 1]
    outputs = in_order(batch, [own for _, own in found], parts)
    np.testing.assert_array_equal(outputs.logits[:, 0], np.flatnonzero(want & LOGITS))
    np.testing.assert_array_equal(outputs.hidden[:, 0], np.flatnonzero(want & HIDDEN))
