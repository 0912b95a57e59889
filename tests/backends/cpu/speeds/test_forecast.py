"""Tests that a forecast is the sum of its ops' times: by hand, and as speeds and prompts change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from llmrun.backends.cpu.lowering import StepShape
from llmrun.backends.cpu.ops.registry import needs_of
from llmrun.backends.cpu.speeds import forecast
from llmrun.backends.cpu.speeds.forecast import Forecast, drawing_seconds, forecast_on_cpu, step_seconds
from llmrun.backends.cpu.speeds.machine import Speeds
from llmrun.backends.cpu.speeds.measured import AttentionSpeed, LinearSpeed, RowSpeed
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.architecture import plan_of_header
from llmrun.model.plan.plan import Plan
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.tiny_encoders import TINY_ENCODERS, tiny_encoder

NOTHING = 1e-30
FAST = 1e30


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf", weight_type="Q8_0", layers=3)) as file:
        return plan_of_header(file)


def changed(name: str, **values: Any) -> Speeds:
    """Return the speeds of a machine on which everything but `name` takes no time."""
    linear = LinearSpeed(read=FAST, op=NOTHING, multiply=(FAST,) * 3)
    row = RowSpeed((NOTHING,) * 3, (NOTHING,) * 3)
    attention = AttentionSpeed(NOTHING, FAST, FAST, NOTHING, NOTHING, NOTHING)
    known = {f"rows {one}": structs.asdict(row) for one in ("rmsnorm", "swiglu", "quantize")}
    known |= {"linear q8_0": structs.asdict(linear), "attention 4 2 16 16 f16": structs.asdict(attention)}
    known["limits"] = {"read": FAST}
    known[name] |= values
    return Speeds(1, known)


def seconds(plan: Plan, speeds: Speeds, rows: int, start: int = 0) -> float:
    return step_seconds(plan, speeds, "f16", StepShape(rows, start)) - forecast._STEP_PYTHON


def test_decoding_reads_every_weight_once(plan: Plan) -> None:
    read = sum(needs_of(op, "f16", StepShape(1)).weight_bytes for op in plan.ops if type(op).__name__ == "Linear")
    assert seconds(plan, changed("linear q8_0", read=1e9), 1) == pytest.approx(read / 1e9)
    assert seconds(plan, changed("linear q8_0", op=1.0), 1) == pytest.approx(3 * 7 + 1)


def test_a_prompt_is_multiplied_or_read_whichever_takes_longer(plan: Plan) -> None:
    products = 100 * 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    one_row = seconds(plan, changed("linear q8_0", read=1e9), 1)
    by_products = seconds(plan, changed("linear q8_0", multiply=(1e9,) * 3), 100)
    assert by_products == pytest.approx(products / 1e9)  # the one row of logits is read, not multiplied
    assert seconds(plan, changed("linear q8_0", read=1e9), 100) == pytest.approx(one_row)


@pytest.mark.parametrize(
    ("name", "values", "rows", "count"),
    [
        ("rows rmsnorm", {"one": (1.0,) * 3}, 1, 3 * 2 + 1),
        ("rows rmsnorm", {"many": (1.0,) * 3}, 50, 50 * 3 * 2),
        ("rows swiglu", {"one": (1.0,) * 3}, 1, 3),
        ("rows quantize", {"one": (1.0,) * 3}, 1, 3 * 4 + 1),
        ("attention 4 2 16 16 f16", {"op": 1.0}, 1, 3),
        ("attention 4 2 16 16 f16", {"step": 1.0}, 1, 1),
        ("attention 4 2 16 16 f16", {"rope_one": 1.0}, 1, 3 * 128),
        ("attention 4 2 16 16 f16", {"rope_many": 1.0}, 50, 50 * 3 * 128),
        ("attention 4 2 16 16 f16", {"read": 1.0}, 8, 8 * 3 * 2 * 2 * 16 * 2),
        ("attention 4 2 16 16 f16", {"multiply": 1.0}, 8, 3 * 2 * 64 * 8 * 9 / 2),
        ("attention 4 2 16 16 f16", {"multiply": 1.0}, 50, 3 * 2 * 64 * 50 * 51 / 2),
        ("limits", {"read": 1.0}, 1, 3 * 2 * 2 * 16 * 2),
    ],
)
def test_each_op_counts(plan: Plan, name: str, values: dict[str, Any], rows: int, count: float) -> None:
    assert seconds(plan, changed(name, **values), rows) == pytest.approx(count)


def test_the_cap_on_logits_takes_as_long_as_they_are_wide(plan: Plan) -> None:
    """The row is wider than any measured width, and the threads share it."""
    speeds = changed("rows swiglu", many=(NOTHING, NOTHING, 8192.0))
    without = seconds(plan, speeds, 1)
    plan.soft_cap_logits(30.0)
    assert plan.logits is not None
    assert seconds(plan, speeds, 1) - without == pytest.approx(plan.logits.width)


def test_a_sum_is_made_integers_anew_once_something_was_added(plan: Plan) -> None:
    table, square = plan.matrices[0], next(one for one in plan.matrices if one.rows == one.columns)
    sums = Plan()
    x = sums.embed(table)
    y = sums.linear(x, square)
    sums.linear(x, square)
    sums.add(y, to=x)
    sums.output(x, table)
    assert seconds(sums, changed("rows quantize", one=(1.0,) * 3), 1) == pytest.approx(2)


def test_matrices_of_heads_are_read_once_and_their_input_made_integers_once(plan: Plan) -> None:
    table, square = plan.matrices[0], next(one for one in plan.matrices if one.rows == one.columns)
    heads = Plan()
    x = heads.concat_to_each(heads.embed(table), heads.embed(table), groups=1)
    heads.scale(x, 2.0)
    heads.head_linear(x, square, heads=2)
    heads.output(heads.slice(heads.head_linear(x, square, heads=2), 0, 64), table)
    [whole] = {needs_of(op, "f16", StepShape(1)).weight_bytes for op in heads.ops[4:6]}
    logits = needs_of(heads.ops[-1], "f16", StepShape(1)).weight_bytes
    read = seconds(heads, changed("linear q8_0", read=1e9), 1)
    assert read == pytest.approx((2 * whole + logits) / 1e9)
    assert seconds(heads, changed("rows quantize", one=(1.0,) * 3), 1) == pytest.approx(2)
    assert seconds(heads, changed("rows rmsnorm", one=(1.0,) * 3), 1) == pytest.approx(3)  # concat, scale, slice


def forecast_of(plan: Plan, speeds: Speeds, prompt: int) -> Forecast:
    return forecast_on_cpu(plan, speeds, vocabulary_size=300, prompt=prompt, kv_type="f16", max_rows=64)


@pytest.mark.parametrize("prompt", [50, 64, 150])
def test_the_steps_of_a_prompt_have_all_its_rows_at_their_depths(plan: Plan, prompt: int) -> None:
    for name, key, count in (
        ("rows swiglu", "many", 3 * prompt),
        ("attention 4 2 16 16 f16", "multiply", 3 * 2 * 64 * prompt * (prompt + 1) / 2),
    ):
        speeds = changed(name, **{key: (1.0,) * 3 if key == "many" else 1.0})
        found = forecast_of(plan, speeds, prompt)
        overhead = -(-prompt // 64) * forecast._STEP_PYTHON
        assert prompt / (found.prefill_per_second or 0) == pytest.approx(count + overhead, rel=1e-9)


def test_a_longer_prompt_takes_longer_and_what_follows_is_slower(plan: Plan) -> None:
    speeds = changed("attention 4 2 16 16 f16", read=1e6, multiply=1e6)
    short, long = (forecast_of(plan, speeds, prompt) for prompt in (40, 400))
    assert (short.ttft_s or 0) < (long.ttft_s or 0)
    assert (short.decode_per_second or 0) > (long.decode_per_second or 0)
    assert (short.prefill_per_second or 0) > (long.prefill_per_second or 0)


def test_the_first_token_comes_after_all_steps_of_the_prompt(plan: Plan) -> None:
    expected = forecast_of(plan, changed("attention 4 2 16 16 f16", step=1.0), 150)
    assert expected.ttft_s == pytest.approx(3.0, rel=0.01)
    assert expected.prefill_per_second == pytest.approx(50, rel=0.01)
    assert expected.decode_per_second == pytest.approx(1, rel=0.01)


def test_encoders_read_whole_texts_and_generate_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "step_seconds", lambda plan, speeds, kv_type, step: step.rows / 100 + step.start)
    with open_gguf(tiny_encoder(tmp_path, TINY_ENCODERS["bert"])) as file:
        expected = forecast_of(plan_of_header(file), changed("limits"), 150)
    assert expected.decode_per_second is None
    assert expected.ttft_s == pytest.approx(1.5, rel=0.01)
    assert expected.prefill_per_second == pytest.approx(100)


def test_drawing_from_a_larger_vocabulary_takes_longer() -> None:
    assert 0 < drawing_seconds(1000) < drawing_seconds(2_000_000) < 1
