"""The bytes that ops read and the products they compute, with which profiles and rooflines compare their time."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmrun.layouts.kv_blocks import BLOCK
from llmrun.plan.kv_shapes import KVShape
from llmrun.plan.values import Rows, Value

FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """The work of one op or of many.

    weight_bytes      of weights, as they are packed; read from memory once in a step, however many rows it has
    kv_bytes          of keys and values read, or by rope_store written; each once in a step
    activation_bytes  read and written; they pass from op to op in caches, so memory's speed does not bound them
    products          multiply-adds of int8
    float_products    multiply-adds of float32: of float weights, and attention's
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
    """A step of one sequence: `rows` tokens from position `start` on, `wanted` of which have their logits asked for."""

    rows: int
    start: int = 0
    wanted: int = 1

    def of(self, value: Value) -> int:
        """The rows that a value has."""
        return self.wanted if value.rows is Rows.WANTED else self.rows * value.copies

    def float_bytes(self, *values: Value) -> int:
        """Bytes of values, as float32."""
        return sum(self.of(value) * value.width * FLOAT for value in values)


def kv_position_bytes(shape: KVShape, kv_type: str) -> int:
    """Bytes of what one layer keeps of a position."""
    return shape.block_bytes(kv_type) // BLOCK
