"""Reads the attention heads of a model file, as the catalogue describes them."""

from __future__ import annotations

from llmrun.backends.cpu.ops.attention import attention_shape
from llmrun.formats.gguf.reader import GGUFFile
from llmrun.hub.catalog import Heads
from llmrun.model.archs.parts.architecture import plan_of_header
from llmrun.model.plan.ops.attention import Attention


def heads_in(file: GGUFFile) -> set[Heads]:
    attention = [op for op in plan_of_header(file).ops if isinstance(op, Attention)]
    shapes = [(attention_shape(op.kv), op.soft_cap != 0) for op in attention]
    return {Heads(s.heads, s.kv_heads, s.head_size, s.value_size, capped) for s, capped in shapes}
