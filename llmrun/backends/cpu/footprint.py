"""Computes how much memory our own engine needs for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.base import ROWS_PER_ANSWER
from llmrun.backends.cpu.kv_pool import blocks_of_window
from llmrun.backends.cpu.lowering.lower import scratch_needed
from llmrun.backends.cpu.lowering.needs import kv_position_bytes
from llmrun.backends.cpu.recurrent_states import (
    CHECKPOINT_DISTANCE,
    checkpoint_bytes,
    n_checkpoints,
    state_bytes,
)
from llmrun.backends.cpu.weights.packed import packed_bytes
from llmrun.backends.sizing.footprint import ENGINE_PROCESS, Footprint, header_bytes, vocabulary_bytes
from llmrun.backends.sizing.kv_bytes import KVBytes
from llmrun.formats.layouts.kv_blocks import BLOCK

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def footprint_on_cpu(
    file: GGUFFile,
    plan: Plan,
    head: Plan | None = None,
    *,
    max_sequences: int,
    kv_type: str,
    max_rows: int,
    n_threads: int,
) -> Footprint:
    """Return the footprint of a model. `plan`, and that of its draft head, must be built from `file`."""
    plans = [plan] if head is None else [plan, head]
    layers = [
        (window and BLOCK * blocks_of_window(window, max_rows), max_sequences * group.layers * position_bytes)
        for part in plans
        for group in part.groups
        for window, position_bytes in [(group.shape.window, kv_position_bytes(group.shape, kv_type))]
    ]
    states, checkpoints = _recurrent_bytes(plan, max_sequences)
    width = 0 if plan.logits is None else plan.logits.width
    logits = width * np.dtype(np.float32).itemsize * min(max_rows, max_sequences * ROWS_PER_ANSWER)
    return Footprint(
        weights=packed_bytes(plan.matrices if head is None else plan.matrices_with(head)),
        cache=KVBytes.of_layers([*layers, checkpoints], states),
        scratch=logits
        + sum(scratch_needed(part, kv_type=kv_type, max_rows=max_rows, n_threads=n_threads) for part in plans),
        vocabulary=vocabulary_bytes(file),
        header=header_bytes(file),
        programs=ENGINE_PROCESS,
    )


def _recurrent_bytes(plan: Plan, max_sequences: int) -> tuple[int, tuple[int, int]]:
    """Return (bytes of recurrent states, size of checkpoints as an entry of KVBytes.windows).

    Each sequence has a checkpoint near the end of its prompt, which is counted with the states. The others, which are
    made at regular distances until the memory for checkpoints is full, grow with the context like a window.
    """
    each = checkpoint_bytes(plan.states)
    others = max(0, n_checkpoints(plan.states, max_sequences) // max_sequences - 1)
    states = max_sequences * (state_bytes(plan.states) + each)
    return states, (CHECKPOINT_DISTANCE * others, max_sequences * each // CHECKPOINT_DISTANCE)
