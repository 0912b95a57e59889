"""Tests of draft heads on the CPU: against their NumPy twins, in passes of any size, and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.cpu.draft_head import CpuDraftHead
from llmrun.backends.cpu.kind import CpuKind
from llmrun.backends.cpu.weights import packed_bytes
from llmrun.base.errors import Cancelled, KVFull
from llmrun.base.types import HIDDEN, LOGITS, Batch
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.architecture import draft_plan_of_header, plan_of_header
from llmrun.model.plan import reference
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.models.fidelity import head_plan_of
from tests.support.models.tiny_architectures import tiny_architecture

DENSE = "qwen35 layers by name, with a layer ahead"
HEADS = (DENSE, "qwen35moe fused, with a layer ahead", "glm4moe", "deepseek2 GLM-4.7-Flash, fused, with a layer ahead")
TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 290, 90)]
STATES = np.random.default_rng(1).standard_normal((len(TOKENS), 64)).astype(np.float32)


@contextmanager
def opened(path: Path, *, threads: int = 2, max_sequences: int = 1, draft_head: bool = True) -> Iterator[CpuBackend]:
    options = OpenOptions(context_size=256, threads=threads, max_sequences=max_sequences, draft_head=draft_head)
    with open_gguf(path) as file:
        backend = CpuBackend(file, options)
    try:
        yield backend
    finally:
        backend.close()


def head_of(backend: CpuBackend) -> CpuDraftHead:
    assert backend.draft_head is not None
    return backend.draft_head


def step(first: int, n: int, seq: int = 0) -> Batch:
    """Return the rows of n tokens, with logits and hidden states."""
    batch = batch_of(rows(seq, first, TOKENS[first : first + n]))
    return replace(batch, want=np.full(n, LOGITS | HIDDEN, np.uint8))


def in_passes(head: CpuDraftHead, sizes: list[int], seq: int = 0) -> NDArray[np.float32]:
    """Return logits and hidden states side by side, float32[tokens, vocabulary + hidden size]."""
    parts, first = [], 0
    for n in sizes:
        parts.append(np.concatenate(head.forward(step(first, n, seq), STATES[first : first + n]), axis=1))
        first += n
    return np.concatenate(parts)


@pytest.mark.push
@pytest.mark.parametrize("name", HEADS)
def test_the_kernels_compute_what_the_twin_defines(tmp_path: Path, name: str) -> None:
    """Allow 1e-3 of the range, because the cache is float16."""
    path, tokens = tiny_architecture(tmp_path, name), np.array(TOKENS, np.int32)
    plan = head_plan_of(path)
    assert plan is not None
    twins = reference.exact(plan, tokens, given=STATES), reference.exact_hidden(plan, tokens, given=STATES)
    expected = np.concatenate(twins, axis=1)
    with opened(path) as backend:
        found = in_passes(head_of(backend), [len(TOKENS)])
    assert np.abs(found - expected).max() <= 1e-3 * np.ptp(expected)


@pytest.mark.push
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", HEADS[:2])
@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_passes_of_any_size_compute_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, name: str, threads: int, sizes: list[int]
) -> None:
    total = sum(sizes)
    sizes = [*sizes, len(TOKENS) - total] if total < len(TOKENS) else [len(TOKENS)]
    path = tiny_architecture(tmp_path_factory.mktemp("head"), name)
    with opened(path, threads=threads, max_sequences=2) as backend:
        head = head_of(backend)
        np.testing.assert_array_equal(in_passes(head, sizes, seq=1), in_passes(head, [len(TOKENS)]))


@pytest.mark.push
@pytest.mark.parametrize("weight_type", ["F32", "Q8_0"])
@pytest.mark.parametrize("drafted", [100, 128])
def test_trimmed_heads_compute_the_first_logits(
    tmp_path: Path, weight_type: str, drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_architecture(tmp_path, DENSE, weight_type)
    with opened(path) as backend:
        expected = head_of(backend).forward(step(0, 60), STATES[:60])
    monkeypatch.setattr("llmrun.model.archs.parts.draft_head.DRAFTED_TOKENS", drafted)
    with opened(path) as backend:
        assert head_of(backend).drafted_tokens == drafted
        found = head_of(backend).forward(step(0, 60), STATES[:60])
    np.testing.assert_array_equal(found.logits, expected.logits[:, :drafted])
    np.testing.assert_array_equal(found.hidden, expected.hidden)


@pytest.mark.push
def test_a_head_changes_no_bit_of_its_model(tmp_path: Path) -> None:
    path = tiny_architecture(tmp_path, DENSE)
    with opened(path, draft_head=False) as backend:
        assert backend.draft_head is None
        expected = backend.forward(step(0, 60))
    with opened(path) as backend:
        found = [backend.forward(step(0, 30))]
        in_passes(head_of(backend), [60])
        found.append(backend.forward(step(30, 30)))
    for kind in (0, 1):
        np.testing.assert_array_equal(np.concatenate([outputs[kind] for outputs in found]), expected[kind])


@pytest.mark.push
def test_cancelled_and_refused_passes_leave_the_cache_alone(tmp_path: Path) -> None:
    with opened(tiny_architecture(tmp_path, DENSE), max_sequences=2) as backend:
        head = head_of(backend)
        expected = in_passes(head, [50, 40])
        head.kv.free(0)
        in_passes(head, [50])
        head.cancel()
        with pytest.raises(Cancelled):
            head.forward(step(50, 40), STATES[50:])
        assert head.kv.lengths == [50, 0]
        with pytest.raises(ValueError, match="continues at position 50"):
            head.forward(step(49, 1), STATES[49:50])
        outputs = head.forward(step(50, 40), STATES[50:])
        np.testing.assert_array_equal(np.concatenate(outputs, axis=1), expected[50:])


@pytest.mark.push
def test_a_full_cache_is_reported_before_the_pass(tmp_path: Path) -> None:
    options = OpenOptions(context_size=256, threads=1, max_sequences=3, kv_tokens=256, draft_head=True)
    with open_gguf(tiny_architecture(tmp_path, "glm4moe")) as file:
        backend = CpuBackend(file, options)
    try:
        head = head_of(backend)
        assert head.kv.capacity == backend.kv.capacity == 256
        for seq in (0, 1):
            head.forward(step(0, 90, seq), STATES)
        with pytest.raises(KVFull):
            head.forward(step(0, 90, 2), STATES)
        assert head.kv.lengths == [90, 90, 0]
    finally:
        backend.close()


def test_the_model_and_its_head_share_matrices(tmp_path: Path) -> None:
    with open_gguf(tiny_architecture(tmp_path, "glm4moe")) as file:
        plan, head = plan_of_header(file), draft_plan_of_header(file)
        assert head is not None
        both = [matrix.name for matrix in plan.matrices_with(head)]
        assert len(set(both)) == len(both)
        shared = {matrix.name for matrix in plan.matrices} & {matrix.name for matrix in head.matrices}
        assert shared == {"token_embd.weight", "output.weight"}
        with_head, without = (
            CpuKind().footprint(file, OpenOptions(context_size=256, threads=1, draft_head=one)) for one in (True, False)
        )
    own = [matrix for matrix in head.matrices if matrix.name not in shared]
    assert with_head.weights - without.weights == packed_bytes(own)
    assert with_head.cache.token - without.cache.token == 2 * 2 * 2 * 32  # keys and values, float16, 2 heads
    assert with_head.scratch > without.scratch
