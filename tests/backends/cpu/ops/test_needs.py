"""Tests of each op's cost (bytes read, floats, products) against counts by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.cpu.lower import kv_shapes
from llmrun.backends.cpu.lowering import Needs, StepShape, kv_position_bytes
from llmrun.backends.cpu.ops.linear import quantizing_needs
from llmrun.backends.cpu.ops.registry import needs_of
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.kv import BLOCK, KV_CHOICES
from llmrun.model.archs import llama
from llmrun.model.plan.ops.activations import Activation, Gated
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.embedding import Embed
from llmrun.model.plan.ops.experts import Combine, ExpertLinear
from llmrun.model.plan.ops.linear import HeadLinear, Linear
from llmrun.model.plan.ops.norms import RmsNorm
from llmrun.model.plan.ops.rope import RopeStore, Rotate
from llmrun.model.plan.ops.rows import Concat, Scale, Slice
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape, LayerKV
from llmrun.model.plan.twin import Routing, Rows, Value
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.kernels.runs import random_matrix

SHAPE = AttentionShape(heads=6, kv_heads=2, head_size=48)
KV = LayerKV(SHAPE, 0, 0)
X, WANTED = Value(64), Value(64, Rows.WANTED)
# Bytes of 32 weights of a row: 16 + 2 for Q4_0, 32 + 2 for Q8_0.
Q4_0, Q8_0, F32 = (random_matrix(kind, 48, 64, name=kind) for kind in ("q4_0", "q8_0", "f32"))
ACTIVATIONS = 2 * 48  # 64 columns are two blocks of 48 bytes (layouts/linear.py)


def needs(op: object, rows: int = 1, start: int = 0, wanted: int = 1, kv_type: str = "f16") -> Needs:
    return needs_of(op, kv_type, StepShape(rows, start, wanted))  # type: ignore[arg-type]


def test_a_matrix_is_read_once_and_multiplied_by_each_row() -> None:
    op = Linear(X, Q4_0, Value(48), adds=False)
    assert needs(op) == Needs(48 * 2 * 18, 0, ACTIVATIONS + 48 * 4, products=48 * 64)
    assert needs(op, rows=10) == Needs(48 * 2 * 18, 0, 10 * (ACTIVATIONS + 48 * 4), products=10 * 48 * 64)


def test_what_is_added_to_is_read_and_written() -> None:
    op = Linear(X, Q8_0, Value(48), adds=True)
    assert needs(op) == Needs(48 * 2 * 34, 0, ACTIVATIONS + 2 * 48 * 4, products=48 * 64)


def test_products_with_floats_are_told_apart() -> None:
    op = Linear(X, F32, Value(48), adds=False)
    assert needs(op, rows=3) == Needs(48 * 64 * 4, 0, 3 * (64 + 48) * 4, float_products=3 * 48 * 64)


def test_padding_is_read_too() -> None:
    op = Linear(X, random_matrix("q8_0", 33, 64), Value(33), adds=False)
    assert needs(op).weight_bytes == 48 * 2 * 34  # whole groups of 16 rows
    assert needs(op).products == 33 * 64


def test_of_experts_one_row_reads_those_it_is_sent_to() -> None:
    """One row reads 3 of 12 experts. With uniform routing, a second row reads three quarters of 3 more."""
    matrix, routing = random_matrix("q4_0", 12 * 48, 64), Routing(12, 3)
    expert, out = 48 * 2 * 18, Value(48, Rows.CHOSEN, 3)
    written = 48 * 4
    op = ExpertLinear(X, matrix, routing, out)
    assert needs(op) == Needs(3 * expert, 0, 3 * (ACTIVATIONS + written), products=3 * 48 * 64)
    assert needs(op, rows=2) == Needs(round((3 + 9 / 4) * expert), 0, 6 * (ACTIVATIONS + written), products=6 * 48 * 64)
    assert needs(op, rows=200).weight_bytes == 12 * expert
    assert quantizing_needs(op, StepShape(2)) == Needs(activation_bytes=2 * (64 * 4 + ACTIVATIONS))
    of_chosen = ExpertLinear(Value(64, Rows.CHOSEN, 3), matrix, routing, out)
    assert quantizing_needs(of_chosen, StepShape(2)) == Needs(activation_bytes=6 * (64 * 4 + ACTIVATIONS))
    added = Combine(out, routing, Value(48), adds=True)
    assert needs(added, rows=2) == Needs(activation_bytes=(6 + 2 * 2) * written)
    alone = Combine(out, routing, Value(48), adds=False)
    assert needs(alone, rows=2) == Needs(activation_bytes=(6 + 2) * written)


def test_only_wanted_rows_have_logits_and_none_reads_no_weights() -> None:
    output = Linear(WANTED, Q4_0, Value(48, Rows.WANTED), adds=False)
    assert needs(output, rows=200, wanted=1) == needs(output)
    assert needs(output, rows=200, wanted=0) == Needs()
    norm = RmsNorm(X, np.ones(64, np.float32), 1e-5, WANTED)
    assert needs(norm, rows=200, wanted=2) == Needs(64 * 4, activation_bytes=2 * 2 * 64 * 4)


def test_ops_on_rows_need_what_they_read_and_write() -> None:
    norm = RmsNorm(X, np.ones(64, np.float32), 1e-5, Value(64))
    assert needs(norm, rows=3) == Needs(64 * 4, activation_bytes=3 * 2 * 64 * 4)
    assert needs(Gated(X, Value(64), Activation.SILU, Value(64)), rows=3) == Needs(activation_bytes=3 * 3 * 64 * 4)
    assert needs(Embed(Q8_0, 1.0, by_position=False, out=X), rows=3) == Needs(3 * 2 * 34, activation_bytes=3 * 64 * 4)
    linear = Linear(X, Q4_0, Value(48), adds=False)
    assert quantizing_needs(linear, StepShape(3)) == Needs(activation_bytes=3 * (64 * 4 + ACTIVATIONS))


def test_parts_of_rows_need_what_is_copied() -> None:
    part, joined = Value(8), Value(2 * 8 + 64)
    assert needs(Slice(X, 2, 4, part), rows=3) == Needs(activation_bytes=3 * 2 * 8 * 4)
    assert needs(Concat(part, X, 2, joined), rows=3) == Needs(activation_bytes=3 * (8 + 64 + 80) * 4)
    assert needs(Scale(X, 0.5), rows=3) == Needs(activation_bytes=3 * 2 * 64 * 4)


def test_a_matrix_for_each_head_is_read_once() -> None:
    """Uses three heads of 64 columns and 16 outputs."""
    op = HeadLinear(Value(3 * 64), Q4_0, 3, Value(48))
    assert needs(op, rows=10) == Needs(48 * 2 * 18, 0, 10 * (3 * ACTIVATIONS + 48 * 4), products=10 * 48 * 64)
    assert quantizing_needs(op, StepShape(2)) == Needs(activation_bytes=2 * 3 * (64 * 4 + ACTIVATIONS))


@pytest.mark.parametrize(
    ("kv_type", "position"),
    [
        ("f16", 2 * 2 * 48 * 2),
        ("q8_0", 2 * 2 * (48 + 2 * 2)),
        ("q4_0", 2 * 2 * (24 + 2 * 2)),
        ("q8_0:q4_0", 2 * (48 + 24 + 2 * 2 * 2)),
    ],
)
def test_attention_reads_all_positions_once(kv_type: str, position: int) -> None:
    assert kv_position_bytes(SHAPE, kv_type) == position
    q, out = Value(6 * 48), Value(6 * 48)
    attention = Attention(q, KV, 0.1, 0.0, None, out)
    floats = 2 * 6 * 48 * 4
    keys_and_values = [kind == "q8_0" for kind in (kv_type.split(":") * 2)[:2]]
    integers, others = keys_and_values.count(True) * 6 * 48, keys_and_values.count(False) * 6 * 48
    one = Needs(0, 100 * position, floats, integers * 100, others * 100)
    assert needs(attention, 1, 99, kv_type=kv_type) == one
    attended = 6 + 7 + 8  # positions that each row attends to
    three = Needs(0, 8 * position, 3 * floats, integers * attended, others * attended)
    assert needs(attention, 3, 5, kv_type=kv_type) == three
    rope = RopeStore(q, Value(96), Value(96), KV, None, None, out)
    written = 3 * (2 * 288 + 2 * 96) * 4
    assert needs(rope, 3, 5, kv_type=kv_type) == Needs(0, 3 * position, written)


@pytest.mark.parametrize(
    ("kv_type", "position", "integers"),
    [
        ("f16", 2 * (576 + 512), 0),
        ("q8_0", 576 + 512 + 2 * (18 + 16), 576 + 512),
        ("q8_0:f16", 576 + 2 * 18 + 2 * 512, 576),
    ],
)
def test_values_of_another_size_than_keys_count_as_what_they_are(kv_type: str, position: int, integers: int) -> None:
    kv = LayerKV(AttentionShape(16, 1, 576, value_size=512), 0, 0)
    assert kv_position_bytes(kv.shape, kv_type) == position
    q, out = Value(16 * 576), Value(16 * 512)
    attention = Attention(q, kv, 0.1, 0.0, None, out)
    floats = 16 * (576 + 512)
    products = 1600 * integers, 100 * floats - 1600 * integers
    assert needs(attention, 1, 99, kv_type=kv_type) == Needs(0, 100 * position, 4 * floats, *products)
    assert needs(Rotate(q, kv, None, Value(16 * 576)), 3, kv_type=kv_type) == Needs(0, 0, 3 * 2 * 4 * q.width)


@pytest.mark.parametrize("kv_type", KV_CHOICES)
def test_a_position_is_a_part_of_a_block_of_the_cache(kv_type: str) -> None:
    plan = Plan()
    for _ in range(2):
        plan.attention(Value(288), Value(96), Value(96), SHAPE, None)
    assert kv_shapes(plan, [3], kv_type) == [(2, 3, BLOCK * kv_position_bytes(SHAPE, kv_type))]


def test_a_step_is_the_sum_of_its_ops(tmp_path: Path) -> None:
    """Uses width 64, feed-forward 96, and 4 heads of 16 with 2 KV heads, in F32."""
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf", weight_type="F32")) as file:
        config = llama.read_config(file)
        plan = llama.plan(file, config)
    layers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    vocabulary = config.vocabulary_size
    weights = layers + -(-vocabulary // 16) * 16 * 64 + 64 + 5 * 64  # the output, a row of the table, the norms
    step = sum((needs_of(op, "f16", StepShape(1, start=9)) for op in plan.ops), Needs())
    assert step.weight_bytes == 4 * weights
    assert step.kv_bytes == 2 * (10 + 1) * 2 * 32 * 2  # 10 positions read and one written, keys and values, float16
    assert step.products == 0
    assert step.float_products == layers + vocabulary * 64 + 2 * 2 * 64 * 10
