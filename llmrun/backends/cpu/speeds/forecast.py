"""Forecasts how fast a model will run on this machine, from its plan alone.

The time of each op follows from the bytes it reads and the products it computes (needs.py), and from the measured speed
of ops of its kind (ops.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering.needs import StepShape
from llmrun.backends.cpu.ops.attention import attention_speed
from llmrun.backends.cpu.ops.base import row_seconds
from llmrun.backends.cpu.ops.registry import CPU_OPS
from llmrun.plan.ops.attention import Attention
from llmrun.plan.ops.linear import Product

if TYPE_CHECKING:
    from llmrun.backends.cpu.speeds.figures import SpeedTable
    from llmrun.plan.plan import Plan
    from llmrun.plan.values import Value

# Seconds that Python takes per step for the batch, block tables and the engine's bookkeeping. For SmolLM2, 0.45 to
# 0.5 ms of a token's 5.6 ms are spent outside the team of threads.
_STEP_PYTHON = 450e-6
_REQUEST = 2e-3  # seconds before the first step of a request, for its template and tokenizing


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected speed. Decode speed is for the context length of the prompt. As in bench, TTFT excludes loading."""

    decode_per_second: float
    prefill_per_second: float
    ttft_s: float


def forecast_on_cpu(
    plan: Plan, speeds: SpeedTable, *, vocabulary_size: int, prompt: int, kv_type: str, max_rows: int
) -> Forecast:
    """Forecast the speed of our own engine for a prompt of `prompt` tokens and the answer that follows."""
    begun = range(0, prompt, max_rows)
    shapes = [StepShape(min(max_rows, prompt - at), at, int(at + max_rows >= prompt)) for at in begun]
    prefill = sum(step_seconds(plan, speeds, kv_type, shape) for shape in shapes)
    drawing = drawing_seconds(vocabulary_size)
    token = step_seconds(plan, speeds, kv_type, StepShape(1, prompt)) + drawing
    return Forecast(1 / token, prompt / prefill, _REQUEST + prefill + drawing)


def step_seconds(plan: Plan, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    """Return the seconds that a step takes, which are those of its ops and its overhead."""
    attention = [attention_speed(op.kv, speeds, kv_type).step for op in plan.ops if isinstance(op, Attention)]
    total = _STEP_PYTHON + max(attention, default=0.0)
    quantized: set[Value] = set()
    for op in plan.ops:
        total += CPU_OPS[type(op)].seconds(op, speeds, kv_type, step)
        if isinstance(op, Product) and op.weight.is_integer and op.x not in quantized:
            quantized.add(op.x)
            total += row_seconds("quantize", op.x, speeds, step)
        if op.changes is not None:
            quantized.discard(op.changes)
    return total


def drawing_seconds(vocabulary_size: int) -> float:
    """Measure how long it takes to draw a token, by running the operations that sampling applies to all logits."""
    logits = np.linspace(-1, 1, vocabulary_size, dtype=np.float32)
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        changed = logits.copy()
        np.argmax(changed)
        changed.max()
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken))
