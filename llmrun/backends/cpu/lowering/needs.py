"""The cost of ops in bytes read and multiply-adds computed. Profiles and rooflines compare measured times with it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmrun.formats.layouts.kv_blocks import BLOCK
from llmrun.model.plan.kv_shapes import KVShape
from llmrun.model.plan.values import Rows, Value

FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """The cost of one or more ops.

    weight_bytes      bytes of packed weights, which are read from memory once per step, however many rows it has
    kv_bytes          bytes that ops read from or write to the KV cache, once per step
    activation_bytes  bytes of activations read and written; they stay in the CPU caches, so memory bandwidth does not
                      limit them
    products          number of int8 multiply-adds
    float_products    number of float32 multiply-adds, from float weights and attention
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    products: int = 0
    float_products: int = 0

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Needs)))


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step that runs `rows` tokens of one sequence from position `start`, and returns logits for `wanted` of them.

    Hidden states are returned for the same rows.
    """

    rows: int
    start: int = 0
    wanted: int = 1

    def of(self, value: Value) -> int:
        """Return the number of rows that a value has in this step."""
        return self.wanted if value.rows in (Rows.WANTED, Rows.SCORED) else self.rows * value.copies

    def float_bytes(self, *values: Value) -> int:
        """Return the size in bytes of values stored as float32."""
        return sum(self.of(value) * value.width * FLOAT for value in values)


def kv_position_bytes(shape: KVShape, kv_type: str) -> int:
    """Return the number of bytes that one layer's KV cache uses per position."""
    return shape.block_bytes(kv_type) // BLOCK
