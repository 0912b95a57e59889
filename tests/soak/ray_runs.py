"""Batches on a Ray cluster whose parts are killed, and how much faster two workers are than one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
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
_LEAST_FACTOR = 1.7  # of the speed of two workers over that of one

Run = subprocess.Popen[str]


def _remove_node(_: Run, running: TestCluster) -> None:
    running.remove_node(0)
    running.add_node()


def _below(process: psutil.Process, name: str) -> psutil.Process:
    return next(child for child in process.children(recursive=True) if any(name in word for word in child.cmdline()))


# What a case kills, in turn.
_DEATHS: dict[str, Callable[[Run, TestCluster], None]] = {
    "nothing killed": lambda run, running: None,
    "worker killed": lambda run, running: running.actors()[0].kill(),
    "engine killed": lambda run, running: _below(running.actors()[0], "engine.child.main").kill(),
    "node removed": _remove_node,
    "process that talks to Ray killed": lambda run, running: _below(psutil.Process(run.pid), "ray_driver").kill(),
    "batch killed": lambda run, running: run.kill(),
    "head killed": lambda run, running: running.kill_head(),
}


def ray(soak: Soak) -> Iterator[Case]:
    """Kill one thing per case, and compare the output with that of one process. Every eighth case measures speeds."""
    model = model_arguments(soak, _STEP_S)
    # A run continues for 20 seconds after the head has died, and must not end before.
    source = write_lines(soak.folder / "in.jsonl", random_lines(soak.seed, 4 * _LINES))
    batch(source, "-o", soak.folder / "expected.jsonl", *model)
    expected = (soak.folder / "expected.jsonl").read_bytes()

    def begun(output: Path, on: TestCluster) -> Run:
        words = [*LLMRUN, "batch", str(source), "-o", str(output), *model, "--workers", f"ray:{on.address}"]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    def case(number: int) -> str:
        index = number % (len(_DEATHS) + 1)
        if index == len(_DEATHS):
            return _measure(source, soak, *model)
        name, output = [*_DEATHS][index], soak.folder / f"{number}.jsonl"
        with cluster(_NODES) as running:
            run = begun(output, running)
            _wait_for(_LINES, run, output)
            _DEATHS[name](run, running)
            if name == "batch killed":
                run.wait()
                run = begun(output, running)
            _, told = run.communicate(timeout=_PATIENCE_S)
        if name == "head killed":
            if run.returncode != 5 or "run the same command again to continue" not in told:
                raise Broken(f"{name}: exit code {run.returncode}, {told}")
            with cluster(_NODES) as another:
                run = begun(output, another)
                _, told = run.communicate(timeout=_PATIENCE_S)
        if run.returncode not in (0, 1) or output.read_bytes() != expected:
            raise Broken(f"{name}: other bytes than those of one process, or exit code {run.returncode}: {told}")
        return name

    yield case


def _wait_for(lines: int, run: Run, output: Path) -> None:
    """Wait until the journal has this many lines."""
    journal, deadline = output.with_name(f"{output.name}.partial"), time.monotonic() + _PATIENCE_S
    while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
        if time.monotonic() > deadline or run.poll() is not None:
            raise Broken(f"the run ended or was stuck before {lines} lines: exit code {run.returncode}")
        time.sleep(0.02)


def _measure(source: Path, soak: Soak, *model: str) -> str:
    """Compare the speeds of one and two workers with one thread each. The machine must be idle."""
    seconds = []
    for nodes in (1, 2):
        with cluster(nodes) as running:
            words = ["-t", "1", "--parallel", "16", "--force", "--json", "--workers", f"ray:{running.address}"]
            done = batch(source, "-o", soak.folder / "timed.jsonl", *model, *words)
            seconds.append(json.loads(done.stdout)["seconds"])
    if seconds[0] < _LEAST_FACTOR * seconds[1]:
        raise Broken(f"one worker takes {seconds[0]:.1f} s, and two take {seconds[1]:.1f} s")
    return "speeds"
