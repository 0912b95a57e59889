"""Tests of whether a model fits, judged by its header, and which variant is the best choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from llmrun.backends.base import TRAINED_CONTEXT, OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.cpu.kind import CpuKind
from llmrun.backends.cpu.speeds.forecast import Forecast
from llmrun.backends.experience import PREDICTED, RUNS, Experience
from llmrun.backends.fitting import DEFAULT_CONTEXT, FLUENT, Fit, Resources, best_of, fit_of
from llmrun.backends.run_speeds import Run, run_key
from llmrun.backends.sizing import Footprint, KVBytes
from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from tests.support.backends.fake_gpus import GIB, pretend_gpus
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.downloads import smollm2

if TYPE_CHECKING:
    from llmrun.backends.cpu.speeds.machine import Speeds


@pytest.fixture
def file(tmp_path: Path) -> GGUFFile:
    return open_gguf(tiny_llama(tmp_path / "tiny.gguf", context=2048))


def gpus(*free: int) -> list[dict[str, Any]]:
    return [{"description": f"card {number}", "free": one, "total": 80 * GIB} for number, one in enumerate(free)]


@pytest.mark.push
@pytest.mark.parametrize("context", [512, 131_072])
def test_the_sum_is_the_one_that_the_engine_opens_it_by(file: GGUFFile, context: int) -> None:
    found = fit_of(file, Resources(1 << 40, threads=1), context=context)
    backend = CpuBackend(file, OpenOptions(context_size=context, threads=1))
    try:
        assert found.footprint.cache.of(found.context) == backend.info.kv_bytes
        assert found.parameters == backend.info.parameters
        assert found.file_type == backend.info.file_type
    finally:
        backend.close()


def test_the_context_is_the_default_or_what_was_trained_for_or_what_was_asked(file: GGUFFile, tmp_path: Path) -> None:
    assert fit_of(file, Resources(None)).context == 2048
    assert fit_of(file, Resources(None), context=9000).context == 9000
    assert fit_of(file, Resources(None), context=TRAINED_CONTEXT).context == 2048
    with open_gguf(tiny_llama(tmp_path / "long.gguf", context=1 << 17)) as long:
        found = fit_of(long, Resources(None))
        assert fit_of(long, Resources(None), context=TRAINED_CONTEXT).context == 1 << 17
    assert (found.context, found.trained_context) == (DEFAULT_CONTEXT, 1 << 17)


def test_it_fits_exactly_when_the_sum_is_free(file: GGUFFile) -> None:
    needed = fit_of(file, Resources(None)).needed
    assert fit_of(file, Resources(needed)).fits
    assert not fit_of(file, Resources(needed - 1)).fits
    assert fit_of(file, Resources(None)).fits


@pytest.mark.push
def test_smaller_types_take_53_and_28_percent_of_the_memory() -> None:
    sizes = {}
    with open_gguf(smollm2()) as file:
        for kind in ("f16", "q8_0", "q4_0", "q8_0:q4_0"):
            sizes[kind] = fit_of(file, Resources(None), kv_type=kind).footprint.cache.token
    assert sizes["q8_0"] / sizes["f16"] == 17 / 32
    assert sizes["q4_0"] / sizes["f16"] == 9 / 32
    assert sizes["q8_0:q4_0"] == (sizes["q8_0"] + sizes["q4_0"]) / 2


def test_what_our_engine_does_not_run_is_llama_cpps(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "other.gguf", extra={"tokenizer.ggml.model": "plamo2"})
    with open_gguf(path) as other:
        found = fit_of(other, Resources(1 << 40))
        mapped = fit_of(other, Resources(found.needed - 1))
    assert (found.backend, found.forecast) == ("llama", None)
    assert found.needed > found.file_bytes
    assert found.in_memory
    assert (mapped.fits, mapped.in_memory) == (True, False)  # mapped weights can be read from disk


def test_layers_on_a_gpu_need_no_memory(file: GGUFFile) -> None:
    found = fit_of(file, Resources(1 << 40, gpus(60 * GIB)))
    assert (found.backend, found.gpu_layers, found.layers) == ("llama", 3, 3)
    assert found.needed == found.footprint.scratch + found.footprint.vocabulary
    none = fit_of(file, Resources(1 << 40, gpus(1)))
    assert (none.backend, none.gpu_layers, none.layers) == ("cpu", 0, 3)


class Measured:
    """Speeds that were measured while other programs were running."""

    disturbance = "other programs used 1.0 of 2 CPUs"


@pytest.mark.parametrize(("free", "backend", "on_gpu"), [(60 * GIB, "llama", "3/3"), (1, "cpu", "")])
def test_real_runs_say_how_fast_a_file_is(
    file: GGUFFile, monkeypatch: pytest.MonkeyPatch, free: int, backend: str, on_gpu: str
) -> None:
    monkeypatch.setattr(CpuKind, "forecast", lambda *_: Forecast(9.0, 100.0, 1.0))
    speeds = cast("Speeds", Measured())
    run = Run(*run_key(file.path, file.file_bytes, backend, on_gpu, 2), decode=87.0, prefill=512.0)
    seen = Experience(2, speeds, {run.key: run})
    found = fit_of(file, Resources(1 << 40, gpus(free), 2, speeds, seen))
    assert found.forecast is not None
    assert found.forecast.decode_per_second == 87.0
    assert (found.decode_origin, found.prefill_origin, found.disturbance) == (RUNS, RUNS, "")
    other = fit_of(file, Resources(1 << 40, gpus(free), 1, speeds, Experience(1, speeds, {}, (1.0, 1.0))))
    predicted = (PREDICTED, Measured.disturbance) if backend == "cpu" else ("", "")
    assert (other.decode_origin, other.disturbance) == predicted


def test_this_machine_has_memory() -> None:
    found = Resources.of_this_machine(threads=3)
    assert found.memory is not None
    assert found.threads == 3


@pytest.mark.push
@pytest.mark.parametrize(("name", "expected"), [("GPU", 1), ("llvmpipe", 0)])
def test_software_drivers_do_not_count_as_gpus(name: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 9 * GIB, name=name)
    assert len(Resources.of_this_machine().gpus) == expected


# --- the best choice --------------------------------------------------------------------------------------------------


def made(bits: float, speed: float | None = 50.0, *, fits: bool = True, layers: int = 0) -> Fit:
    forecast = Forecast(speed, 100.0, 1.0) if speed is not None else None
    parameters = 8_000_000
    size = round(bits * parameters / 8)
    memory = size if fits else size - 1
    return Fit(
        "a", "t", size, parameters, bits, "cpu", 1, 1, Footprint(size, KVBytes(0)), memory, layers, layers, forecast
    )


@pytest.mark.parametrize(
    ("fits", "best"),
    [
        ([made(4.5), made(6.5), made(8.5), made(16)], 2),  # the most bits that are still useful
        ([made(4.5), made(6.5), made(8.5, fits=False)], 1),
        ([made(4.5, 20), made(6.5, FLUENT), made(8.5, FLUENT - 0.1)], 1),
        ([made(2.5, 9), made(4.5, 6), made(8.5, 3)], 1),  # all are slow, but quality comes first
        ([made(2.5, 9), made(3.5, 6)], 1),
        ([made(2.5, None), made(4.5, None), made(8.5, None)], 1),  # unknown speeds, so the most common choice
        ([made(4.5, None, layers=4), made(8.5, None, layers=4)], 1),  # a GPU holds every layer
        ([made(16)], None),
        ([made(4.5, fits=False)], None),
        ([], None),
    ],
)
def test_the_best_choice(fits: Sequence[Fit], best: int | None) -> None:
    assert best_of(fits) == best


def test_the_best_encoder_has_the_most_bits() -> None:
    encoders = [replace(made(bits, speed), generates=False) for bits, speed in ((4.5, 9.0), (8.5, None), (16, None))]
    assert best_of(encoders) == 1


def test_a_share_on_the_gpu_leaves_its_share_of_the_memory() -> None:
    one = replace(made(8), gpu_layers=3, layers=4)
    assert one.needed == one.footprint.weights // 4
