"""The memory that our own engine takes for a model."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from llmrun.backends.footprint import ENGINE_PROCESS, Footprint, header_bytes, vocabulary_bytes
from llmrun.kernels.kv_layout import BLOCK
from llmrun.kernels.lowering import kv_shapes, scratch_needed
from llmrun.kernels.weights import packed_bytes

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile
    from llmrun.kernels.plan import Plan


def footprint_on_cpu(
    file: GGUFFile, plan: Plan, *, max_sequences: int, kv_type: str, max_rows: int, n_threads: int
) -> Footprint:
    """Of the model whose `plan` was made from the file."""
    shapes = kv_shapes(plan, [max_sequences] * len(plan.windows), kv_type)
    kv_block = sum(prod(shape) for shape in shapes)
    return Footprint(
        weights=packed_bytes(plan.matrices),
        kv_token=kv_block // BLOCK,
        scratch=scratch_needed(plan, kv_type=kv_type, max_rows=max_rows, n_threads=n_threads),
        vocabulary=vocabulary_bytes(file),
        header=header_bytes(file),
        programs=ENGINE_PROCESS,
    )
