"""Tests of plans whose layers have different windows and ropes, against the twin, with steps of any size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.lower import kv_shapes, lower
from llmrun.backends.cpu.ops.attention import _n_slots
from llmrun.backends.cpu.ops.rope import Rotation, rotation_words
from llmrun.backends.cpu.team import Team
from llmrun.backends.cpu.weights import reserve
from llmrun.formats.layouts.arena import address_of, allocate
from llmrun.formats.layouts.kv import BLOCK, CHUNK, SPLIT_ROWS
from llmrun.model.plan import reference
from llmrun.model.plan.elementary import Pairing, Rope, rotations_of
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape
from tests.support.backends.filled_weights import fill
from tests.support.kernels.races import word_of
from tests.support.kernels.runs import LEVELS_HERE, at_level, random_matrix

HEADS, SIZE = 6, 48
POSITIONS = 330
WINDOWS = (40, 0, 150)


def layered_plan() -> Plan:
    """Return a plan with one layer per entry of WINDOWS, plus one that repeats the first window.

    The layers have interleaved RoPE with sinks, no rope, and NeoX RoPE on a few features with a logit cap. The last
    stored layer repeats the first window with a growing query rope, and one more layer reuses the keys and values that
    layer has stored.
    """
    plan, width = Plan(), HEADS * SIZE
    adjacent = Rope(10_000.0 ** -(np.arange(SIZE // 2) / (SIZE // 2)))
    halves = Rope(500.0 ** -(np.arange(17) / 17), Pairing.NEOX, magnitude=1.1)
    growing = replace(halves, growth=(0.3, 100))
    sinks = np.linspace(-2, 3, HEADS, dtype=np.float32)
    x = plan.embed(random_matrix("f32", 50, width, 1, "embedding"))
    norm = np.ones(width, np.float32)
    for layer, (window, rope) in enumerate(zip((*WINDOWS, WINDOWS[0]), (adjacent, None, halves, halves), strict=True)):
        h = plan.rmsnorm(x, norm, 1e-5)
        q, k, v = (plan.linear(h, random_matrix("f32", width, width, 9 + layer, f"{layer}.{name}")) for name in "qkv")
        shape = AttentionShape(HEADS, HEADS, SIZE, window)
        cap, of_heads, of_queries = (2.0 if layer == 2 else 0.0), (sinks if layer == 0 else None), None
        if layer == len(WINDOWS):
            of_queries = growing
        seen = plan.attention(q, k, v, shape, rope, query_rope=of_queries, scale=0.004, soft_cap=cap, sinks=of_heads)
        plan.linear_add(seen, random_matrix("f32", width, width, 20 + layer, f"{layer}.o"), to=x)
    q = plan.linear(plan.rmsnorm(x, norm, 1e-5), random_matrix("f32", width, width, 30, "again.q"))
    seen = plan.attention_again(q, AttentionShape(HEADS, HEADS, SIZE, WINDOWS[0]), growing, scale=0.004)
    plan.linear_add(seen, random_matrix("f32", width, width, 31, "again.o"), to=x)
    plan.output(plan.rmsnorm(x, norm, 1e-5), random_matrix("f32", 50, width, 5, "output"))
    return plan


def table_of(window: int, blocks: int) -> NDArray[np.int32]:
    """Return a block table that reuses blocks: new positions overwrite those that have left the window."""
    count = -(-POSITIONS // BLOCK)
    return (np.arange(count) % blocks if window else np.random.default_rng(3).permutation(count)).astype(np.int32)


def logits_of(
    plan: Plan, tokens: NDArray[np.int32], steps: Iterable[int], *, level: str, threads: int, largest: int
) -> NDArray[np.float32]:
    """Return the logits of all positions, run in steps of the given row counts, each at most `largest`."""
    blocks = [-(-(window + largest) // BLOCK) + 1 if window else -(-POSITIONS // BLOCK) for window in plan.windows]
    tables = [table_of(window, count) for window, count in zip(plan.windows, blocks, strict=True)]
    # Fill the cache with NaN, so that reading an unwritten position is noticed.
    kv = [allocate(prod(shape), "a test's cache").reshape(shape) for shape in kv_shapes(plan, blocks, "f16")]
    for group in kv:
        group[:] = 0xFF
    with at_level(level):
        packed = reserve(plan.matrices)
        fill(packed, threads)
        lowered = lower(plan, packed, kv, kv_type="f16", max_rows=largest, n_threads=threads)
        lowered.link()
        team = Team(lowered, threads)
    logits = np.full((len(tokens), lowered.logits_width), np.nan, np.float32)
    try:
        start = 0
        for rows in steps:
            positions = np.arange(start, start + rows, dtype=np.int32)
            of_rows = np.repeat([address_of(table) for table in tables], rows).astype(np.int64)
            wanted, rotations = np.arange(rows, dtype=np.int32), rotations_of(plan.ropes, positions)
            part = slice(start, start + rows)
            team.run(tokens[part].copy(), positions, of_rows, wanted, rotations, logits[part])
            start += rows
    finally:
        team.close()
    return logits[:, : plan.logits.width] if plan.logits else logits


@pytest.mark.push
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_layers_of_several_windows_and_ropes_are_as_the_twin_says(level: str) -> None:
    """For any step sizes and thread counts, including decoding, every row must also be bit-identical."""
    plan = layered_plan()
    tokens = np.random.default_rng(2).integers(0, 50, POSITIONS).astype(np.int32)
    whole = logits_of(plan, tokens, [POSITIONS], level=level, threads=1, largest=POSITIONS)
    expected = reference.quantizing(plan, tokens, "f16")
    assert np.abs(expected).max() > 10
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-3 * np.abs(expected).max())  # float16 rounding differs
    for steps, threads in (([64] * 5 + [10], 2), ([33] * 9 + [1] * 33, 3), ([64, 7, 1, 1, *[16] * 16, 1], 1)):
        np.testing.assert_array_equal(logits_of(plan, tokens, steps, level=level, threads=threads, largest=64), whole)


def test_partial_results_of_a_window_are_of_as_many_chunks_as_it_touches() -> None:
    """The size of the cache does not matter."""
    sizes = {}
    for window in (1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1, 0):
        plan = Plan()
        q = plan.embed(random_matrix("f32", 4, 16, name="embedding"))
        plan.output(plan.attention(q, q, q, AttentionShape(1, 1, 16, window), None), random_matrix("f32", 4, 16))
        [shape] = kv_shapes(plan, [64], "f16")
        kv = [np.zeros(shape, np.uint8)]
        lowered = lower(plan, reserve(plan.matrices), kv, kv_type="f16", max_rows=1, n_threads=1)
        [index] = [index for index, name in enumerate(lowered.kernels) if name.function == "attention"]
        stride, address = (word_of(lowered, index, word) for word in ("partial_stride", "partials"))
        memory = {address_of(part): part.nbytes for part in lowered.keep if isinstance(part, np.ndarray)}
        sizes[window] = memory[address] // stride
    assert sizes == {1: 1, 2: 2, CHUNK: 2, CHUNK + 1: 2, CHUNK + 2: 3, 2 * CHUNK + 1: 3, 0: 64 * BLOCK // CHUNK}


def test_partial_results_of_many_rows_have_limited_memory() -> None:
    """There are always enough for one row, whatever the context."""
    few, many = 10, 10_000  # chunks
    assert [_n_slots(few, rows, 1000) for rows in (1, 2, SPLIT_ROWS, 256)] == [few, 2 * few, 320, 320]
    assert [_n_slots(many, rows, 1 << 16) for rows in (1, 2, 256)] == [many] * 3
    assert _n_slots(100, 256, 1 << 16) == 512


def test_an_op_is_told_where_its_ropes_rotations_are() -> None:
    ropes = [Rope(np.ones(3)), Rope(np.ones(8), Pairing.NEOX), Rope(np.ones(5))]
    assert rotation_words(ropes, 0) == Rotation(3, 0, 128, pair_step=8, pair_gap=4)
    assert rotation_words(ropes, 1) == Rotation(8, 24, 128, pair_step=4, pair_gap=32)
    assert rotation_words(ropes, 2) == Rotation(5, 88, 128, pair_step=8, pair_gap=4)
    assert rotation_words(ropes, None) == Rotation(0, 0, 0, pair_step=0, pair_gap=0)
