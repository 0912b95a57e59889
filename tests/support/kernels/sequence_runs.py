"""Run a small plan over sequences in steps of any size, on a paged cache whose unused blocks are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from llmrun.backends.cpu.lower import kv_shapes, lower, state_shapes
from llmrun.backends.cpu.recurrent_states import RecurrentStates, checkpoint_shapes
from llmrun.backends.cpu.steps import NO_RUNS, runs_of
from llmrun.backends.cpu.team import Team
from llmrun.backends.cpu.weights import reserve
from llmrun.formats.layouts.arena import address_of, allocate
from llmrun.formats.layouts.kv import BLOCK
from llmrun.model.plan.elementary import rotations_of
from llmrun.model.plan.plan import Plan
from tests.support.backends.filled_weights import fill
from tests.support.kernels.runs import LEVELS_HERE, at_level

Rows = Sequence[tuple[int, int]]  # (sequence, token) of each row in a step


def run_steps(
    plan: Plan, steps: Sequence[Rows], *, level: str = LEVELS_HERE[0], threads: int = 1, kv_type: str = "f16"
) -> dict[int, NDArray[np.float32]]:
    """Return the logits of each sequence, float32[positions, vocabulary].

    The cache and the recurrent states are initialized to NaN, and blocks are assigned in random order. A block that
    lies before the window of every row in a step is removed before that step.
    """
    sequences = sorted({seq for step in steps for seq, _ in step})
    n_blocks = -(-sum(len(step) for step in steps) // BLOCK)
    most = max(len(step) for step in steps)
    shapes = kv_shapes(plan, [n_blocks * len(sequences) + 1] * len(plan.windows), kv_type)
    kv = [allocate(prod(shape), "a test's cache").reshape(shape) for shape in shapes]
    states = [allocate(prod(shape), "states").reshape(shape) for shape in state_shapes(plan, len(sequences))]
    for group in [*kv, *states]:
        group[:] = 0xFF
    saved = [allocate(prod(shape), "checkpoints").reshape(shape) for shape in checkpoint_shapes(plan.states, 1)]
    recurrent = RecurrentStates(plan.states, states, saved) if states else None
    order = 1 + np.random.default_rng(0).permutation(n_blocks * len(sequences)).astype(np.int32)
    blocks = np.repeat(order.reshape(1, len(sequences), n_blocks), max(1, len(plan.windows)), axis=0)
    with at_level(level):
        packed = reserve(plan.matrices)
        fill(packed, threads)
        lowered = lower(plan, packed, kv, states, kv_type=kv_type, max_rows=most, n_threads=threads)
        lowered.link()
        team = Team(lowered, threads)
    assert plan.logits is not None
    found: dict[int, list[NDArray[np.float32]]] = {seq: [] for seq in sequences}
    try:
        for step in steps:
            positions = np.zeros(len(step), np.int32)
            lengths = {seq: len(found[seq]) for seq in sequences}
            for row, (seq, _) in enumerate(step):
                positions[row], lengths[seq] = lengths[seq], lengths[seq] + 1
            for index, window in enumerate(plan.windows):
                for number, seq in enumerate(sequences):
                    gone = max(0, len(found[seq]) + 1 - window) // BLOCK if window else 0
                    blocks[index, number, :gone] = 0  # a block that is never written
            numbers = np.array([sequences.index(seq) for seq, _ in step], np.int64)
            of_windows = np.arange(len(plan.windows), dtype=np.int64)[:, None]
            tables = address_of(blocks) + of_windows * blocks.strides[0] + numbers * blocks.strides[1]
            logits = np.full((len(step), lowered.logits_width), np.nan, np.float32)
            tokens = np.array([token for _, token in step], np.int32)
            wanted = np.arange(len(step), dtype=np.int32)
            runs = NO_RUNS
            if recurrent is not None:
                runs = recurrent.begin(runs_of(numbers.tolist(), positions.tolist(), [True] * len(step)))
            rotations = rotations_of(plan.ropes, positions)
            team.run(tokens, positions, np.ascontiguousarray(tables), wanted, rotations, logits, runs)
            if recurrent is not None:
                recurrent.finish()
            for row, (seq, _) in enumerate(step):
                found[seq].append(logits[row, : plan.logits.width])
    finally:
        team.close()
    return {seq: np.stack(rows) for seq, rows in found.items()}
