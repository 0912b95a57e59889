"""Tests of LoRA adapters on the CPU engine: they agree with llama.cpp, and rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.errors import BadGGUF, UnsupportedModel, UsageError
from llmrun.base.types import Batch
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.gguf.gguf_files import Tensor
from tests.support.models.tiny_adapters import AdaptedOracle, scales_of, tiny_adapter
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy, tiny_model

# A dense model, one with experts and a shared one beside the adapted matrices, one with latent attention, and one with
# recurrent layers. Each differs from llama.cpp by at most 4e-4 of the logits' range.
NAMES = ["llama Mistral Nemo", "qwen2moe", "deepseek2", "granitehybrid"]
TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 290, 60)]


@contextmanager
def opened(model: Path, adapters: Sequence[Path] = (), *, threads: int = 2, sequences: int = 1) -> Iterator[CpuBackend]:
    options = OpenOptions(context_size=512, threads=threads, max_sequences=sequences, adapters=[*map(str, adapters)])
    with open_gguf(model) as file:
        backend = CpuBackend(file, options)
    try:
        yield backend
    finally:
        backend.close()


def adapted_batch(triples: Sequence[tuple[int, int, int]], scales: NDArray[np.float32] | None) -> Batch:
    return replace(batch_of(triples), scales=scales)


def in_steps(backend: CpuBackend, scales: Sequence[float] | None, steps: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits of TOKENS in sequence 0, which is emptied first."""
    backend.kv.free(0)
    ends = np.cumsum(steps).tolist()
    parts = []
    for end, step in zip(ends, steps, strict=True):
        each = None if scales is None else scales_of(step, *scales)
        batch = adapted_batch(rows(0, end - step, TOKENS[end - step : end]), each)
        parts.append(backend.forward(batch).logits)
    return np.concatenate(parts)


@pytest.mark.push
@pytest.mark.parametrize("name", NAMES)
def test_logits_agree_with_llama_cpp_in_steps_of_any_size(tmp_path: Path, name: str) -> None:
    """Allow 1e-3 of the logits' range, as without adapters, because the cache is float16."""
    model = tiny_architecture(tmp_path, name)
    adapter = tiny_adapter(tmp_path / "a.gguf", model)
    with opened(model, [adapter]) as backend:
        for scale in (0.5, 1.0):
            with AdaptedOracle(model, [(adapter, scale)]) as oracle:
                expected = oracle.logits(TOKENS)
            at_once = in_steps(backend, [scale], [60])
            assert np.abs(at_once - expected).max() <= 1e-3 * np.ptp(expected)
            np.testing.assert_array_equal(in_steps(backend, [scale], [7, 32, 1, 1, 1, 18]), at_once)
        assert np.abs(in_steps(backend, None, [60]) - expected).max() >= 0.1 * np.ptp(expected)


@pytest.mark.push
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_four_adapters_in_a_batch_equal_each_alone(tmp_path: Path, threads: int) -> None:
    """Another sequence combines two adapters, and one has none, which equals a model without adapters."""
    model = tiny_model(tmp_path, "Q4_0 untied")
    adapters = [
        tiny_adapter(tmp_path / f"{rank}.gguf", model, rank=rank, seed=rank, weight_type=kind)
        for rank, kind in ((4, "F32"), (8, "F16"), (16, "F32"), (64, "F16"))
    ]
    combinations = [*np.eye(4), [0.5, 0, -1, 0], [0, 0, 0, 0]]
    with opened(model) as plain:
        expected_without = in_steps(plain, None, [60])
    with opened(model, adapters, threads=threads, sequences=6) as backend:
        alone = [in_steps(backend, scales, [60]) for scales in combinations]
        np.testing.assert_array_equal(alone[-1], expected_without)
        backend.kv.free(0)
        parts = []
        for start, end in ((0, 40), (40, 41), (41, 60)):
            triples = [each for seq in range(6) for each in rows(seq, start, TOKENS[start:end])]
            scales = np.repeat(np.array(combinations, np.float32), end - start, axis=0)
            parts.append(backend.forward(adapted_batch(triples, scales)).logits.reshape(6, end - start, -1))
        together = np.concatenate(parts, axis=1)
    for seq in range(6):
        np.testing.assert_array_equal(together[seq], alone[seq])
    assert all((together[seq] != together[5]).any() for seq in range(5))


@pytest.mark.push
def test_rows_before_activation_share_the_base(tmp_path: Path) -> None:
    """The scale of a sequence changes inside a step, as it does with activated LoRA."""
    model = tiny_model(tmp_path, "F32")
    adapter = tiny_adapter(tmp_path / "a.gguf", model)
    with opened(model, [adapter]) as backend:
        base = in_steps(backend, None, [60])
        scales = scales_of(60, 1.0)
        scales[:33] = 0
        backend.kv.free(0)
        logits = backend.forward(adapted_batch(rows(0, 0, TOKENS), scales)).logits
        np.testing.assert_array_equal(logits[:33], base[:33])
        assert (logits[33:] != base[33:]).any(axis=1).all()
        backend.kv.truncate(0, 33)
        again = backend.forward(adapted_batch(rows(0, 33, TOKENS[33:]), scales_of(27, 1.0))).logits
        np.testing.assert_array_equal(again, logits[33:])


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_architecture(tmp_path, "llama Mixtral")
    adapter = tiny_adapter(tmp_path / "a.gguf", model, experts=["blk.0.ffn_up_exps.weight"])
    with (
        pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up_exps\.weight.*the CPU engine cannot"),
        opened(model, [adapter]),
    ):
        pass


@pytest.mark.push
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_adapters_with_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    model = tiny_model(tmp_path, "F32")
    name = "blk.0.attn_q.weight.lora_b"

    def damage(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = "F32", np.full((64, 4), value, np.float32)

    whole = tiny_adapter(tmp_path / "whole.gguf", model, names=["blk.0.attn_q.weight"])
    damaged = changed_copy(whole, tmp_path / "damaged.gguf", damage)
    with (
        pytest.raises(BadGGUF, match=rf"damaged\.gguf: {name}: has values that are not finite"),
        opened(model, [damaged]),
    ):
        pass


@pytest.mark.push
def test_adapters_have_different_names(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "F32")
    adapter = tiny_adapter(tmp_path / "a.gguf", model)
    with pytest.raises(UsageError, match="two adapters are called a"), opened(model, [adapter, adapter]):
        pass
