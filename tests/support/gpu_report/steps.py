"""The steps of scripts/check-gpu that measure speed and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.gpu_check import try_llama
from llmrun.backends.llama.placement import _MARGIN as MARGIN
from llmrun.backends.llama.placement import bytes_needed, layer_sizes
from llmrun.backends.llama.probe import usable_gpus
from llmrun.base.amounts import format_bytes, format_mebibytes
from llmrun.base.machine.gpus import gpus
from llmrun.formats.gguf.reader import open_gguf
from llmrun.jobs.bench.statistics import paired_ratio, typical
from tests.support.backends.offloading import gpu_buffers
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.gpu_report.setup import Setup
from tests.support.gpu_report.table import Row, StepFailed

ENOUGH_SPEED = 0.97  # of llama-bench's
ENOUGH_MEMORY = 0.05  # how far the memory may be from the forecast
_CONTEXT, _ROWS = 4096, 512


def machine(setup: Setup) -> Iterator[Row]:
    """Say which GPU and which llama.cpp this is, and whether llama.cpp can multiply on it."""
    for gpu in gpus():
        yield Row("GPU", gpu.name, f"{gpu.driver or 'no driver'}, {format_bytes(gpu.memory)}")
    trial = try_llama()
    if trial is None:
        raise StepFailed("llama-cpp-python is not installed")
    names = " and ".join(str(gpu["description"]) for gpu in trial.gpus)
    words = trial.failure or f"multiplies on {names}"
    yield Row("llama.cpp", f"llama-cpp-python {trial.version}", words, "no failure", not trial.failure)


def offload(setup: Setup) -> Iterator[Row]:
    """Measure the speed without the GPU, with half of the layers on it, and with all."""
    wanted = (0, setup.layers // 2, setup.layers)
    page = setup.folder / "bench.html"
    found = setup.bench(",".join(map(str, wanted)), "--seconds", f"{setup.seconds:.0f}", "--html", str(page))
    decoding = {row["n_gpu_layers"]: row for row in found if row["phase"] == "decode"}
    prefill = {row["n_gpu_layers"]: row["avg_ts"] for row in found if row["phase"] == "prefill"}
    for layers in wanted:
        words = f"prefill {prefill[layers]:,.0f} tok/s, decode {decoding[layers]['avg_ts']:,.1f} tok/s"
        yield Row("speed by layers", f"{layers} of {setup.layers} layers", words)
    yield Row("bench --html", page.name, format_bytes(page.stat().st_size))


def speed(setup: Setup) -> Iterator[Row]:
    """Compare the speed with llama-bench's in alternating rounds. Stops early if the time is short."""
    ours: dict[str, list[float]] = {"prefill": [], "decode": []}
    theirs: dict[str, list[float]] = {"prefill": [], "decode": []}

    def llmrun() -> None:
        for row in setup.bench(str(setup.layers), "-r", "3"):
            ours[row["phase"]].append(row["avg_ts"])

    def llama_bench() -> None:
        speed = setup.llama_bench_speed
        theirs["prefill"].append(speed(prompt=setup.prompt, tokens=0, depth=0))
        theirs["decode"].append(speed(prompt=0, tokens=setup.tokens, depth=setup.prompt))

    for number in range(setup.rounds):
        started = setup.clock.left()
        for run in (llmrun, llama_bench) if number % 2 == 0 else (llama_bench, llmrun):
            run()
        if setup.clock.left() < 1.5 * (started - setup.clock.left()):
            break
    for phase in ("decode", "prefill"):
        yield _compared(phase, ours[phase], theirs[phase], setup.layers)


def _compared(phase: str, ours: Sequence[float], theirs: Sequence[float], layers: int) -> Row:
    ratio = paired_ratio(ours, theirs, is_speed=True, level=0.95)
    reach = f" ({ratio.low:.1%} to {ratio.high:.1%})" if len(ours) > 3 else ""
    words = (
        f"{typical(ours).ratio:,.1f} tok/s; llama-bench {typical(theirs).ratio:,.1f}; "
        f"{ratio.ratio:.1%}{reach} in {len(ours)} rounds"
    )
    setting = f"{phase}, {layers} of {layers} layers"
    return Row("speed and llama-bench", setting, words, f">= {ENOUGH_SPEED:.0%}", ratio.ratio >= ENOUGH_SPEED)


def memory(setup: Setup) -> Iterator[Row]:
    """Compare the memory that llama.cpp takes on the first GPU with the forecast that `fit` uses."""
    for layers in (setup.layers // 2, setup.layers):
        with open_gguf(setup.model) as file:
            sizes = layer_sizes(file, _CONTEXT)
            options = OpenOptions(context_size=_CONTEXT, gpu_layers=layers, main_gpu=0, split_mode="none")
            before = _free()
            backend = LlamaBackend(file, options)
        try:
            backend.forward(batch_of(rows(0, 0, [n % backend.info.vocabulary_size for n in range(_ROWS)])))
            taken = before - _free()
        finally:
            backend.close()
        held = sum(size for (_, purpose), size in gpu_buffers(backend.log).items() if purpose != "compute")
        forecast = sum([*sizes.layers, sizes.output][setup.layers - layers :])
        setting = f"{layers} of {setup.layers} layers, {_CONTEXT:,} tokens"
        words = f"{format_mebibytes(held)}, forecast {format_mebibytes(forecast)} ({held / forecast - 1:+.1%})"
        passed = abs(held / forecast - 1) < ENOUGH_MEMORY
        yield Row("weights and KV cache", setting, words, f"within {ENOUGH_MEMORY:.0%}", passed)
        [needed] = bytes_needed(sizes, [1.0], layers)
        words = f"{format_mebibytes(taken)}, forecast {format_mebibytes(needed)} plus {format_mebibytes(MARGIN)}"
        yield Row("all GPU memory", setting, words, "below the sum", taken < needed + MARGIN)


def _free() -> int:
    found = usable_gpus()
    if not found:
        raise StepFailed("llama.cpp no longer finds a GPU")
    return int(found[0]["free"])
