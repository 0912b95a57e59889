"""Tests of scripts/check-gpu without a GPU: its commands, and the GPUs that it sees, are fakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.llama import probe
from llmrun.backends.llama.placement import layer_sizes
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.fake_gpus import GIB
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.gpu_report import process_steps, steps
from tests.support.gpu_report.large_model import write_large_model
from tests.support.gpu_report.setup import Setup
from tests.support.gpu_report.table import Clock, Row, StepFailed, markdown, rows_of

ROOT = Path(__file__).resolve().parent.parent
ANSWER = {
    "choices": [{"text": "a"}],
    "timings": {"decode_per_second": 100.0},
    "run": {"gpu_layers": "2/3"},
}


@dataclass(frozen=True)
class PretendSetup(Setup):
    """Runs lines of Python instead of llmrun, and makes up what llama-bench measures."""

    program: str = "pass"
    asked: list[tuple[str, ...]] = field(default_factory=list)
    llama_bench_speeds: Mapping[str, float] = field(default_factory=dict)

    def command(self, *arguments: str) -> list[str]:
        self.asked.append(arguments)
        return [sys.executable, "-c", self.program]

    def llama_bench_speed(self, *, prompt: int, tokens: int, depth: int) -> float:
        assert (prompt > 0) != (tokens > 0)
        return self.llama_bench_speeds["prefill" if prompt else "decode"]


@pytest.fixture
def setup(tmp_path: Path) -> PretendSetup:
    return PretendSetup(tiny_llama(tmp_path / "tiny.gguf"), 3, tmp_path, Clock(60), None)


def prints(answer: object) -> str:
    return f"print({json.dumps(answer)!r})"


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_is_markdown() -> None:
    rows = [Row("speed", "a|b", "1 tok/s", ">= 2", passed=False), Row("GPU", "x", "y"), Row("z", "", "", "", True)]
    assert list(markdown(rows)) == [
        "| check | setting | result | wanted | passed |",
        "| --- | --- | --- | --- | --- |",
        "| speed | a&#124;b | 1 tok/s | >= 2 | **no** |",
        "| GPU | x | y |  |  |",
        "| z |  |  |  | yes |",
    ]


def test_a_failed_step_does_not_stop_the_others() -> None:
    def first(state: int) -> Iterator[Row]:
        yield Row("first", "", str(state))
        raise KeyError("n_gpu_layers")

    def second(state: int) -> Iterator[Row]:
        raise StepFailed("error: no such\nmodel")

    found = list(rows_of({"first": first, "second": second, "third": lambda state: [Row("third", "", "")]}, 7))
    assert found == [
        Row("first", "", "7"),
        Row("first", "", "failed: KeyError: 'n_gpu_layers'", passed=False),
        Row("second", "", "failed: error: no such model", passed=False),
        Row("third", "", ""),
    ]


def test_time_limits_shrink_with_the_time_left() -> None:
    now = [0.0]
    clock = Clock(60, lambda: now[0])
    assert (clock.limit(50), clock.limit(300)) == (50, 60)
    now[0] = 40
    assert clock.limit(300) == 20
    now[0] = 59.5
    with pytest.raises(StepFailed, match="no time is left"):
        clock.limit(300)


@pytest.mark.push
def test_commands_that_fail_say_why(setup: PretendSetup) -> None:
    failing = replace(setup, program="import sys; sys.exit('note: a\\nerror: no model')")
    with pytest.raises(StepFailed, match=r"^error: no model \(exit code 1\)$"):
        failing.llmrun("bench")
    slow = replace(setup, program="import time; time.sleep(60)")
    with pytest.raises(StepFailed, match="did not end within 1 s"):
        slow.llmrun("bench", most=1)


# --- speed and memory -------------------------------------------------------------------------------------------------


def bench_rows(wanted: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of `llmrun bench` for these numbers of layers. The speed is 10 times the number of layers."""
    return [
        {"n_gpu_layers": layers, "phase": phase, "avg_ts": 10.0 * layers + 1}
        for layers in wanted
        for phase in ("prefill", "decode")
    ]


def test_offload_has_each_number_of_layers(setup: PretendSetup) -> None:
    (setup.folder / "bench.html").write_text("a page")
    found = list(steps.offload(replace(setup, program=prints(bench_rows([0, 1, 3])))))
    assert [(row.check, row.setting) for row in found] == [
        *(("speed by layers", f"{layers} of 3 layers") for layers in (0, 1, 3)),
        ("bench --html", "bench.html"),
    ]
    assert found[2].result == "prefill 31 tok/s, decode 31.0 tok/s"
    assert [row.passed for row in found] == [None] * 4
    [asked] = setup.asked
    assert asked[asked.index("--gpu-layers") + 1] == "0,1,3"


@pytest.mark.parametrize(("theirs", "passed"), [(31.0, True), (31.9, True), (33.0, False)])
def test_speed_is_compared_in_alternating_rounds(theirs: float, passed: bool, setup: PretendSetup) -> None:
    order: list[str] = []

    class Noting(PretendSetup):
        def llmrun(self, *arguments: str, most: float = 0) -> str:
            order.append("llmrun")
            return json.dumps(bench_rows([3]))

        def llama_bench_speed(self, *, prompt: int, tokens: int, depth: int) -> float:
            order.append("llama-bench")
            assert depth == (0 if prompt else self.prompt)
            return theirs

    decode, prefill = steps.speed(Noting(setup.model, 3, setup.folder, setup.clock, None, rounds=3))
    both = ["llama-bench"] * 2
    assert order == ["llmrun", *both, *both, "llmrun", "llmrun", *both]
    assert (decode.passed, prefill.passed) == (passed, passed)
    assert decode.result.startswith(f"31.0 tok/s; llama-bench {theirs}; {31 / theirs:.1%}")


def test_without_llama_bench_the_comparison_fails(setup: PretendSetup) -> None:
    plain = Setup(setup.model, 3, setup.folder, setup.clock, None)
    with pytest.raises(StepFailed, match="--llama-bench"):
        plain.llama_bench_speed(prompt=1, tokens=0, depth=0)


def test_llama_bench_uses_the_libraries_of_llmrun(setup: PretendSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = setup.folder / "llama-bench"
    bench.write_text('#!/bin/sh\necho "[{\\"avg_ts\\": ${LD_LIBRARY_PATH%%:*}, \\"arguments\\": \\"$*\\"}]"\n')
    bench.chmod(0o700)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "12.5")  # a folder, for this test
    plain = Setup(setup.model, 3, setup.folder, setup.clock, bench)
    assert plain.llama_bench_speed(prompt=0, tokens=16, depth=8) == 12.5


@pytest.mark.night
@pytest.mark.parametrize(("held", "passed"), [(1.04, True), (1.06, False), (0.94, False)])
def test_memory_is_compared_with_the_forecast(
    held: float, passed: bool, setup: PretendSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp opens the model on the processor, and its buffers are those of the forecast times a factor."""
    with open_gguf(setup.model) as file:
        sizes = layer_sizes(file, 4096)
    forecasts = iter([sizes.output, sum(sizes.layers) + sizes.output])  # for one layer, and for all three
    monkeypatch.setattr(
        steps, "gpu_buffers", lambda log: {("CUDA0", "model"): held * next(forecasts), ("CUDA0", "compute"): 9e9}
    )
    monkeypatch.setattr(steps, "usable_gpus", lambda: [{"free": 8 * GIB}])
    found = list(steps.memory(setup))
    assert [row.passed for row in found] == [passed, True, passed, True]


# --- processes --------------------------------------------------------------------------------------------------------


def test_two_processes_must_agree(setup: PretendSetup) -> None:
    [row] = process_steps.two_processes(replace(setup, program=prints(ANSWER)))
    assert (row.result, row.passed) == ("100.0 and 100.0 tok/s, 100.0 alone; the same text", True)
    differing = 'import json, os; print(json.dumps({**%r, "choices": [{"text": str(os.getpid())}]}))' % (ANSWER,)  # noqa: UP031
    [row] = process_steps.two_processes(replace(setup, program=differing))
    assert row.passed is False


STOPS = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit({code}))
print("loaded in 1 s", file=sys.stderr, flush=True)
print("text", flush=True)
time.sleep(30)
"""


@pytest.mark.push
@pytest.mark.parametrize(("code", "passed"), [(130, True), (1, False)])
def test_the_time_after_ctrl_c_is_measured(code: int, passed: bool, setup: PretendSetup) -> None:
    found = list(process_steps.ctrl_c(replace(setup, program=STOPS.format(code=code))))
    assert [(row.check, row.setting, row.passed) for row in found] == [
        ("Ctrl-C", "an answer", passed),
        ("Ctrl-C", "a long prompt", passed),
    ]
    assert found[0].result.endswith(f" ms, exit code {code}")


def test_an_answer_that_ends_before_ctrl_c_does_not_count(setup: PretendSetup) -> None:
    found = list(process_steps.ctrl_c(setup))
    assert [(row.result, row.passed) for row in found] == [("it was over before the signal", None)] * 2


# --- models larger than the memory ------------------------------------------------------------------------------------


def test_large_models_are_mostly_holes(setup: PretendSetup) -> None:
    if sys.platform == "win32":
        pytest.skip("needs sparse files")
    path = setup.folder / "large.gguf"
    n_layers = write_large_model(path, setup.model, 40 << 20, width=1024)
    status = path.stat()
    assert status.st_size >= 40 << 20
    assert status.st_blocks * 512 < status.st_size / 2
    with open_gguf(path) as file:
        assert file.integer("llama.block_count") == n_layers
        random, hole = (file.read(file.tensors[f"blk.{layer}.ffn_up.weight"]) for layer in (0, n_layers - 1))
    assert random.any()
    assert not hole.any()


@pytest.mark.push
def test_large_models_run_on_llama_cpp(setup: PretendSetup) -> None:
    path = setup.folder / "large.gguf"
    write_large_model(path, setup.model, 20 << 20, width=256)
    plain = Setup(path, 3, setup.folder, Clock(120), None)
    answer = plain.generate(path, "0", 2)
    assert answer["usage"]["completion_tokens"] > 0


def test_more_layers_than_llama_cpp_has_are_refused(setup: PretendSetup) -> None:
    with pytest.raises(ValueError, match="more than 500"):
        write_large_model(setup.folder / "large.gguf", setup.model, 1 << 40)


def test_some_layers_of_a_large_model_must_run_on_the_gpu(setup: PretendSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_steps, "usable_gpus", lambda: [{"free": 1000}, {"free": 1000}])
    sizes: list[int] = []

    def write(path: Path, vocabulary: Path, n_bytes: int) -> int:
        path.write_bytes(bytes(n_bytes))
        sizes.append(n_bytes)
        return 2

    monkeypatch.setattr(process_steps, "write_large_model", write)
    program = f"import sys\n{prints(ANSWER)}\nsys.stderr.write('error: it does not fit\\n')\n"
    auto, every = process_steps.larger_than_the_memory(replace(setup, program=program))
    assert sizes == [2300]
    assert (auto.setting, auto.result, auto.passed) == ("2.30 kB, 3 layers; auto", "2 of 3 layers, 100.00 tok/s", True)
    assert (every.result, every.passed) == ("exit code 0: error: it does not fit", False)
    assert not (setup.folder / "large.gguf").exists()


# --- the script -------------------------------------------------------------------------------------------------------


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "check-gpu", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.mark.push
def test_without_a_gpu_the_script_says_so(tmp_path: Path) -> None:
    assert not probe.gpus().names, "run the tests with a build of llama.cpp without GPUs"
    done = run("--output", tmp_path / "out", LLMRUN_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {probe.gpus().reason}; `llmrun doctor` says what to do\n"


@pytest.mark.push
def test_unknown_steps_are_refused() -> None:
    done = run("--only", "speed,sped")
    assert done.returncode == 2
    assert "no such step: sped; choose from machine, offload, speed" in done.stderr


@pytest.mark.night
def test_a_source_is_built_for_the_gpus_of_this_machine(tmp_path: Path) -> None:
    """CMake and nvcc are stand-ins. CMake records its arguments and fails the second time."""
    tools, source = tmp_path / "tools", tmp_path / "source"
    (source / "vendor" / "llama.cpp").mkdir(parents=True)
    tools.mkdir()
    for name, does in {"nvcc": "exit 0", "cmake": f'echo "$@" >>{tmp_path}/asked; [ "$1" = -S ]'}.items():
        done = run("--source", source, PATH=str(tools))
        assert done.returncode == 1
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o700)
    assert done.stderr == "error: --source needs CMake, which was not found on PATH\n"
    done = run("--source", source, PATH=str(tools))
    assert done.stderr.splitlines()[-1].startswith("error: llama.cpp cannot be built; see ")
    configure, compile_ = (tmp_path / "asked").read_text().splitlines()
    assert configure.startswith(f"-S {source}/vendor/llama.cpp -B {source}/build-gpu ")
    for flag in ("-DGGML_CUDA=on", "-DGGML_CUDA_NO_VMM=on", "-DCMAKE_CUDA_ARCHITECTURES=native"):
        assert flag in configure
    assert compile_.endswith("--target llama llama-bench")
