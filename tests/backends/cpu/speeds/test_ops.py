"""Tests that measured op speeds are plausible, and that speeds between measured widths are interpolated."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from llmrun.backends.cpu.speeds import machine
from llmrun.backends.cpu.speeds.machine import OpSpeeds
from llmrun.backends.cpu.speeds.measured import WIDTHS, RowSpeed, between
from llmrun.backends.cpu.weights import PackedMatrix
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> OpSpeeds:
    sizes = {"_REGION": 8 << 20, "_LARGE": 1 << 20, "_SMALL": 1 << 16, "_N_LARGE": 4, "_N_SMALL": 8}
    for name, value in (sizes | {"_WARM_SECONDS": 0.001, "_SECONDS": 0.003, "WIDTHS": (64, 512, 8192)}).items():
        monkeypatch.setattr(machine, name, value)
    return OpSpeeds(1)


@pytest.mark.push
@pytest.mark.parametrize("packed", ["q8_0", "q4_k", "f32"])
def test_a_weight_types_speeds_are_those_of_a_computer(quick: OpSpeeds, packed: str) -> None:
    speed = quick.linear(packed)
    assert 1e8 < speed.read < 1e13
    assert 0 <= speed.op < 1
    assert len(speed.multiply) == 3
    assert all(1e8 < rate < 1e14 for rate in speed.multiply)


@pytest.mark.push
def test_wider_rows_take_longer(quick: OpSpeeds) -> None:
    found = quick.rows()
    assert found.keys() == {"rmsnorm", "swiglu", "quantize"}
    for speed in found.values():
        assert all(0 < seconds < 1 for seconds in speed.one + speed.many)
        assert speed.many[0] < speed.many[2]


@pytest.mark.push
@pytest.mark.parametrize(
    ("shape", "kv_type"),
    [
        (AttentionShape(22, 2, 16), "f16"),
        (AttentionShape(22, 2, 16), "q8_0"),
        (AttentionShape(4, 2, 48, value_size=32), "f16"),
        (AttentionShape(1, 1, 16), "f16"),  # narrower than a group of quantized weights
    ],
)
def test_attentions_speeds_are_those_of_a_computer(quick: OpSpeeds, shape: AttentionShape, kv_type: str) -> None:
    speed = quick.attention(shape, kv_type)
    assert 1e7 < speed.multiply < 1e14
    assert 0 < speed.op < 1
    assert speed.read > 0
    assert 0 < speed.rope_one < 1e-5
    assert 0 < speed.rope_many < 1e-5


@pytest.mark.push
@pytest.mark.parametrize("region", [1 << 16, 1 << 20])
def test_every_matrix_of_a_trial_has_all_of_its_bytes(monkeypatch: pytest.MonkeyPatch, region: int) -> None:
    """Also holds when one head needs more memory than the trial's whole region."""
    whole: list[bool] = []

    def watched(plan: Plan, packed: Mapping[str, PackedMatrix], *rest: object, **more: object) -> None:
        whole.extend(matrix.data.nbytes == matrix.layout.n_bytes for matrix in packed.values())
        raise ZeroDivisionError

    monkeypatch.setattr(machine, "_REGION", region)
    monkeypatch.setattr(machine, "lower", watched)
    with pytest.raises(ZeroDivisionError):
        OpSpeeds(1).attention(AttentionShape(32, 1, 576, value_size=512), "f16")
    assert len(whole) > 16
    assert all(whole)


def test_a_speed_between_two_widths_is_by_the_logarithm() -> None:
    assert [between(width, (1.0, 3.0, 9.0)) for width in WIDTHS] == [1.0, 3.0, 9.0]
    assert between(1024, (1.0, 3.0, 9.0)) == pytest.approx(2.0)
    assert between(64, (1.0, 3.0, 9.0)) == 1.0
    assert between(100_000, (1.0, 3.0, 9.0)) == 9.0


def test_one_row_has_a_time_of_its_own() -> None:
    speed = RowSpeed((1.0, 1.0, 1.0), (0.5, 0.5, 0.5))
    assert (speed.seconds(1, 2048), speed.seconds(10, 2048)) == (1.0, 5.0)
