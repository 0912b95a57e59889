"""Batches on a Ray cluster whose parts are killed, and how much faster two workers are than one."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.soak.batch import model_arguments
from tests.soak.driver import Broken, Case, Soak
from tests.support.batching.batch_runs import batch, random_lines, write_lines
from tests.support.batching.ray_clusters import TestCluster, cluster
from tests.support.cli.commands import LLMRUN, ROOT

_PATIENCE_S = 600.0
_NODES = 3
_LINES = 240
_STEP_S = 0.02
_SCALING_LINES = 1000  # the second worker is opened in the first two seconds, which must not matter
_SCALING_TOKENS = 48
_LEAST_FACTOR = 1.7


@dataclass(slots=True)
class _Run:
    """A running `llmrun batch` on a cluster."""

    process: subprocess.Popen[str]
    output: Path

    def wait_for(self, lines: int) -> None:
        """Wait until the journal has this many lines after its first one."""
        journal, deadline = self.output.with_name(f"{self.output.name}.partial"), time.monotonic() + _PATIENCE_S
        while not journal.exists() or journal.read_bytes().count(b"\n") <= lines:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise Broken(f"the run ended or was stuck before {lines} lines: exit code {self.process.returncode}")
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return the exit code and the text on stderr."""
        _, told = self.process.communicate(timeout=_PATIENCE_S)
        return self.process.returncode, told


def _remove_node(_: _Run, running: TestCluster) -> None:
    running.remove_node(0)
    running.add_node()


def _below(process: psutil.Process, name: str) -> psutil.Process:
    return next(child for child in process.children(recursive=True) if any(name in word for word in child.cmdline()))


# What a case kills, in turn.
_DEATHS: dict[str, Callable[[_Run, TestCluster], None]] = {
    "nothing killed": lambda run, running: None,
    "worker killed": lambda run, running: running.actors()[0].kill(),
    "engine killed": lambda run, running: _below(running.actors()[0], "engine.child.main").kill(),
    "node removed": _remove_node,
    "process that talks to Ray killed": lambda run, _: _below(psutil.Process(run.process.pid), "ray_driver").kill(),
    "batch killed": lambda run, running: run.process.kill(),
    "head killed": lambda run, running: running.kill_head(),
}


def ray(soak: Soak) -> Iterator[Case]:
    """Kill one thing per case. If the head dies, the run ends with a sentence and continues on a new cluster."""
    model = model_arguments(soak, _STEP_S)
    # A run continues for 20 seconds after the head has died, and must not end before.
    sources = {factor: _source(soak, _LINES * factor) for factor in (1, 4)}
    expected: dict[int, bytes] = {}

    def begun(source: Path, output: Path, on: TestCluster) -> _Run:
        words = [*LLMRUN, "batch", str(source), "-o", str(output), *model, "--workers", f"ray:{on.address}"]
        quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
        return _Run(subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=pipe, text=True, cwd=ROOT), output)

    def case(number: int) -> str:
        name = [*_DEATHS][number % len(_DEATHS)]
        factor = 4 if name == "head killed" else 1
        source, output = sources[factor], soak.folder / f"{number}.jsonl"
        if factor not in expected:
            batch(source, "-o", soak.folder / f"expected-{factor}.jsonl", *model)
            expected[factor] = (soak.folder / f"expected-{factor}.jsonl").read_bytes()
        with cluster(_NODES) as running:
            run = begun(source, output, running)
            run.wait_for(_LINES // 4)
            _DEATHS[name](run, running)
            if name == "batch killed":
                run.process.wait()
                run = begun(source, output, running)
            code, told = run.end()
        if name == "head killed":
            if code != 5 or "run the same command again to continue" not in told:
                raise Broken(f"{name}: exit code {code}, {told}")
            with cluster(_NODES) as another:
                code, told = begun(source, output, another).end()
        if code not in (0, 1) or output.read_bytes() != expected[factor]:
            raise Broken(f"{name}: other bytes than those of one process, or exit code {code}: {told}")
        return name

    yield case


def _source(soak: Soak, lines: int) -> Path:
    return write_lines(soak.folder / f"in-{lines}.jsonl", random_lines(soak.seed, lines))


def scaling(soak: Soak) -> Iterator[Case]:
    """Measure one and two workers with one thread each, in alternating rounds."""
    model = model_arguments(soak, _STEP_S)
    messages = [[{"role": "user", "content": f"{n}: tell me a story about a robot."}] for n in range(_SCALING_LINES)]
    lines = [{"messages": each, "max_tokens": _SCALING_TOKENS} for each in messages]
    source = write_lines(soak.folder / "in.jsonl", lines)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with cluster(1) as one, cluster(2) as two:

        def measure(count: int, running: TestCluster) -> bytes:
            output = soak.folder / f"{count}.jsonl"
            words = ["-t", "1", "--parallel", "16", "--force", "--json", "--workers", f"ray:{running.address}"]
            seconds[count].append(json.loads(batch(source, "-o", output, *model, *words).stdout)["seconds"])
            soak.say(f"{count} workers: {seconds[count][-1]:.1f} s, load {psutil.getloadavg()[0]:.2f}")
            return output.read_bytes()

        def case(number: int) -> str:
            order: Sequence[tuple[int, TestCluster]] = ((1, one), (2, two))
            if len({measure(*each) for each in (order if number % 2 == 0 else order[::-1])}) != 1:
                raise Broken("one and two workers write different bytes")
            return "rounds"

        yield case
    factor = statistics.median(seconds[1]) / statistics.median(seconds[2])
    soak.say(f"two workers are {factor:.3f} times as fast as one, by medians")
    if factor < _LEAST_FACTOR:
        raise Broken(f"the factor is {factor:.3f}, and must be {_LEAST_FACTOR}")
