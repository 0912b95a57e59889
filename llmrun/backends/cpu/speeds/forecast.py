"""Forecasts how fast a model will run on this machine, from its plan alone.

The time of each op is estimated from its cost in bytes and multiply-adds (cpu/lowering.py) and from the measured speed
of that kind of op (machine.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering import StepShape
from llmrun.backends.cpu.ops.attention import attention_speed
from llmrun.backends.cpu.ops.base import row_seconds
from llmrun.backends.cpu.ops.registry import cpu_op
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.linear import Product

if TYPE_CHECKING:
    from llmrun.backends.cpu.speeds.measured import SpeedTable
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value

# Seconds that Python spends per step on the batch, block tables and the engine's bookkeeping. For SmolLM2, 0.45 to
# 0.5 ms of a token's 5.6 ms are spent outside the team of threads.
_STEP_PYTHON = 450e-6
# Seconds per step besides reading the weights, if only the size of a model is known. The second term is an estimate for
# about 200 ops, each with a barrier.
_STEP_BESIDES = _STEP_PYTHON + 1e-3
REQUEST_S = 2e-3  # seconds spent on the template and on tokenization before the first step of a request


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected speed of a model. The decode speed assumes a context as long as the prompt. TTFT excludes loading.

    Encoders have no decode speed, and their TTFT is the time for one text. The prefill speed and the TTFT are None if
    only the decode speed is known, from runs on a backend without a forecast.
    """

    decode_per_second: float | None
    prefill_per_second: float | None
    ttft_s: float | None


def forecast_on_cpu(
    plan: Plan, speeds: SpeedTable, *, vocabulary_size: int, prompt: int, kv_type: str, max_rows: int
) -> Forecast:
    """Forecast the speed of our own engine for a prompt of `prompt` tokens and the answer that follows."""
    if not plan.is_causal:
        text = step_seconds(plan, speeds, kv_type, StepShape(prompt))
        return Forecast(None, prompt / text, REQUEST_S + text)
    begun = range(0, prompt, max_rows)
    shapes = [StepShape(min(max_rows, prompt - at), at, int(at + max_rows >= prompt)) for at in begun]
    prefill = sum(step_seconds(plan, speeds, kv_type, shape) for shape in shapes)
    drawing = drawing_seconds(vocabulary_size)
    token = step_seconds(plan, speeds, kv_type, StepShape(1, prompt)) + drawing
    return Forecast(1 / token, prompt / prefill, REQUEST_S + prefill + drawing)


def rough_decode_speed(read_bytes: float, bytes_per_second: float) -> float:
    """Estimate the decode speed of a model whose plan is unknown, in tokens per second.

    For models with 270 million and 1.5 billion weights, the estimate differs from the forecast by at most 13 % if 10 to
    60 GB/s are read.

    read_bytes        bytes of weights that a token reads
    bytes_per_second  `Speeds.weights_read`
    """
    return 1 / (read_bytes / bytes_per_second + _STEP_BESIDES)


def step_seconds(plan: Plan, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    """Return the expected time of a step in seconds, including the overhead outside its ops."""
    attention = [attention_speed(op.kv, speeds, kv_type).step for op in plan.ops if isinstance(op, Attention)]
    total = _STEP_PYTHON + max(attention, default=0.0)
    quantized: set[Value] = set()
    for op in plan.ops:
        total += cpu_op(type(op)).seconds(op, speeds, kv_type, step)
        if isinstance(op, Product) and op.weight.is_integer and op.x not in quantized:
            quantized.add(op.x)
            total += row_seconds("quantize", op.x, speeds, step)
        if op.changes is not None:
            quantized.discard(op.changes)
    return total


def drawing_seconds(vocabulary_size: int) -> float:
    """Measure how many seconds sampling takes per token, by running the operations that it applies to all logits."""
    logits = np.linspace(-1, 1, vocabulary_size, dtype=np.float32)
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        changed = logits.copy()
        np.argmax(changed)
        changed.max()
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken))
