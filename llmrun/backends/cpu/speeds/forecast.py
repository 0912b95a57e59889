"""How fast a model will be on this machine, from its plan alone: the time of each op, by what it has to read and to
multiply (needs.py) and what ops of its kind were measured at (ops.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering.needs import StepShape, needs_of
from llmrun.backends.cpu.speeds.ops import WIDTHS
from llmrun.layouts.tile_shapes import MANY_ROWS
from llmrun.plan import ops
from llmrun.plan.kv_shapes import AttentionShape

if TYPE_CHECKING:
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.cpu.speeds.ops import AttentionSpeed
    from llmrun.plan.plan import Plan

# Seconds of a step in Python: batch, block tables, the engine's bookkeeping. SmolLM2: 0.45 to 0.5 ms of a token's 5.6
# are outside the team of threads.
_STEP_PYTHON = 450e-6
_REQUEST = 2e-3  # seconds of a request before its first step: template and tokenizing


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected. Decode is at the depth of the prompt; TTFT as bench has it: the model is open."""

    decode_per_second: float
    prefill_per_second: float
    ttft_s: float


def forecast_on_cpu(
    plan: Plan, speeds: Speeds, *, vocabulary_size: int, prompt: int, kv_type: str, max_rows: int
) -> Forecast:
    """Of our own engine: a prompt of so many tokens, and the answer after it."""
    begun = range(0, prompt, max_rows)
    shapes = [StepShape(min(max_rows, prompt - at), at, int(at + max_rows >= prompt)) for at in begun]
    prefill = sum(step_seconds(plan, speeds, kv_type, shape) for shape in shapes)
    drawing = drawing_seconds(vocabulary_size)
    token = step_seconds(plan, speeds, kv_type, StepShape(1, prompt)) + drawing
    return Forecast(1 / token, prompt / prefill, _REQUEST + prefill + drawing)


def step_seconds(plan: Plan, speeds: Speeds, kv_type: str, step: StepShape) -> float:
    """Of all ops, and of what a step takes besides."""
    total = _STEP_PYTHON + max(
        (_attention_speed(op, speeds, kv_type).step for op in plan.ops if isinstance(op, ops.Attention)), default=0.0
    )
    quantized: set[ops.Value] = set()
    for op in plan.ops:
        total += _op_seconds(op, speeds, kv_type, step)
        if isinstance(op, ops.Product) and op.weight.is_integer and op.x not in quantized:
            quantized.add(op.x)
            total += _row_seconds("quantize", op.x, speeds, step)
        if (changed := ops.sum_of(op)) is not None:
            quantized.discard(changed)
    return total


def _op_seconds(op: ops.Op, speeds: Speeds, kv_type: str, step: StepShape) -> float:
    match op:
        case ops.Embed():
            return 0.0  # in what a step takes besides
        case ops.RmsNorm() | ops.LayerNorm() | ops.HeadNorm() | ops.Bias() | ops.Add() | ops.AddGated():
            return _row_seconds("rmsnorm", op.out, speeds, step)
        case ops.ExpertBias() | ops.Convolve() | ops.Columns() | ops.Join():
            return _row_seconds("rmsnorm", op.out, speeds, step)
        case ops.Scale():
            return _row_seconds("rmsnorm", op.x, speeds, step)
        case ops.Combine():
            return _row_seconds("rmsnorm", op.y, speeds, step)
        case ops.Gated() | ops.Activate():
            return _row_seconds("swiglu", op.out, speeds, step)
        case ops.SoftCap():
            return _shared_row_seconds("swiglu", op.x, speeds, step)
        case ops.Route():
            return _row_seconds("swiglu", op.logits, speeds, step)
        case ops.ExpertLinear():
            return _expert_linear_seconds(op, speeds, kv_type, step)
        case ops.Linear() | ops.HeadLinear():
            return _linear_seconds(op, speeds, kv_type, step)
        case ops.RopeStore() | ops.Rotate():
            speed = _attention_speed(op, speeds, kv_type)
            features = sum(value.width for value in ops.inputs_of(op))
            return step.rows * features * (speed.rope_one if step.rows == 1 else speed.rope_many)
        case ops.Attention():
            return _attention_seconds(op, speeds, kv_type, step)


def _row_seconds(name: str, value: ops.Value, speeds: Speeds, step: StepShape) -> float:
    rows = step.of(value)
    return speeds.rows(name).seconds(rows, value.width) if rows else 0.0


def _shared_row_seconds(name: str, value: ops.Value, speeds: Speeds, step: StepShape) -> float:
    """Of rows so wide that the threads share even one: a feature takes what it takes in many rows."""
    return step.of(value) * value.width * speeds.rows(name).many[-1] / WIDTHS[-1]


def _linear_seconds(op: ops.Linear | ops.HeadLinear, speeds: Speeds, kv_type: str, step: StepShape) -> float:
    needs = needs_of(op, kv_type, step)
    if not needs.weight_bytes:
        return 0.0
    speed = speeds.linear(op.weight.packed)
    reading = needs.weight_bytes / speed.read
    multiplying = (needs.products + needs.float_products) / speed.products(op.weight.columns)
    return speed.op + (max(reading, multiplying) if step.of(op.x) >= MANY_ROWS else reading)


def _expert_linear_seconds(op: ops.ExpertLinear, speeds: Speeds, kv_type: str, step: StepShape) -> float:
    """Few rows are at each expert, and work on them does not hide the reading: 719 MB of experts for 64, 128, 256
    and 512 rows took 23, 35, 58 and 100 ms where the sum is 29, 38, 56 and 92."""
    needs = needs_of(op, kv_type, step)
    speed = speeds.linear(op.weight.packed)
    multiplying = (needs.products + needs.float_products) / speed.products(op.weight.columns)
    return speed.op + needs.weight_bytes / speed.read + (multiplying if step.rows > 1 else 0.0)


def _attention_seconds(op: ops.Attention, speeds: Speeds, kv_type: str, step: StepShape) -> float:
    """In a small trial keys and values are in a cache, of a whole model they are not: they come as weights do."""
    needs = needs_of(op, kv_type, step)
    speed = _attention_speed(op, speeds, kv_type)
    if step.rows >= MANY_ROWS:
        return needs.float_products / speed.multiply
    return speed.op + step.rows * needs.kv_bytes / min(speed.read, speeds.read_bandwidth())


def _attention_speed(op: ops.RopeStore | ops.Rotate | ops.Attention, speeds: Speeds, kv_type: str) -> AttentionSpeed:
    """Of its shape, were there no window: that bounds the work, not its speed."""
    assert isinstance(op.place.shape, AttentionShape)
    return speeds.attention(replace(op.place.shape, window=0), kv_type)


def drawing_seconds(vocabulary_size: int) -> float:
    """Of choosing a token among so many: what sampling does with all of them, done here."""
    logits = np.linspace(-1, 1, vocabulary_size, dtype=np.float32)
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        changed = logits.copy()
        np.argmax(changed)
        changed.max()
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken))
