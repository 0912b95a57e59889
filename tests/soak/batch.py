"""Kills `llmrun batch`, or parts of its Ray cluster, and compares the output with that of an uninterrupted run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.soak.driver import Broken, Case, Soak
from tests.support.batching.batch_runs import LOGGED, random_lines, write_lines
from tests.support.batching.batch_runs import batch as run_batch
from tests.support.batching.logged_batch import LOG_VARIABLE
from tests.support.batching.ray_clusters import TestCluster, cluster
from tests.support.cli.commands import LLMRUN, ROOT

_LINES = 80
_PARALLEL = 4
_SLOTS = 2 * _PARALLEL  # calls that a worker has at a time
_MOST_KILLS = 6  # per run


def batch(soak: Soak) -> Iterator[Case]:
    """Kill a run at random moments, and start the same command again until the output is complete.

    After a kill, only the calls that were running may be repeated.
    """
    model = soak.model_arguments()
    source = write_lines(soak.folder / "in.jsonl", random_lines(soak.seed, _LINES))
    expected = soak.folder / "expected.jsonl"
    began = time.monotonic()
    done = run_batch(source, "-o", expected, *model, "--parallel", str(_PARALLEL))
    whole_s = time.monotonic() - began
    if done.returncode != 1:  # some lines are errors
        raise Broken(f"the first run ended with {done.returncode}: {done.stderr.decode()[-500:]}")

    def case(number: int) -> str:
        output, chance = soak.folder / f"out-{number}.jsonl", soak.random(number)
        command = [*LOGGED, "batch", str(source), "-o", str(output), *model, "--parallel", str(_PARALLEL)]
        moments = [chance.uniform(0.0, whole_s) for _ in range(chance.randint(1, _MOST_KILLS))]
        soak.counts["kills"] += _run_until_complete(command, output, moments)
        if output.read_bytes() != expected.read_bytes():
            raise Broken(f"{output} differs from {expected}")
        if left := [path.name for path in soak.folder.glob(f"*{output.name}?*")]:
            raise Broken(f"left behind: {left}")
        return "runs"

    yield case


def _run_until_complete(command: Sequence[str], output: Path, moments: Sequence[float]) -> int:
    """Run the command, kill it after each number of seconds, and then let it end. Returns the number of kills.

    After each run, the journal and the log of calls are checked.
    """
    journal, log = output.with_name(f"{output.name}.partial"), output.with_suffix(".log")
    environment, quiet = {**os.environ, LOG_VARIABLE: str(log)}, subprocess.DEVNULL
    lines = repeated = 0
    for kills, seconds in enumerate([*moments, None]):
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=quiet, stderr=quiet) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            process.kill()
        calls = log.read_text().splitlines() if log.exists() else []
        again, repeated = len(calls) - len(set(calls)) - repeated, len(calls) - len(set(calls))
        if again > _SLOTS:
            raise Broken(f"{again} calls began again after a kill, and at most {_SLOTS} were running")
        if process.returncode == 1 or (output.exists() and not journal.exists()):  # or killed after its work was done
            return kills
        if process.returncode != -9:  # SIGKILL
            raise Broken(f"a run ended with {process.returncode}")
        before, lines = lines, journal.read_bytes().count(b"\n") if journal.exists() else 0
        if lines < before:
            raise Broken(f"the journal had {before} lines, and then {lines}")
    raise Broken("the last run did not complete the output")


# --- Ray clusters

_NODES = 3
_RAY_LINES = 240
_STEP_S = 0.02

Run = subprocess.Popen[str]


def _remove_node(_: Run, running: TestCluster) -> None:
    running.remove_node(0)
    running.add_node()


def _below(process: psutil.Process, name: str) -> psutil.Process:
    return next(child for child in process.children(recursive=True) if any(name in word for word in child.cmdline()))


# Each case kills one of these, in turn.
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
    """Kill one thing per case, and compare the output with that of a batch without Ray."""
    model = soak.model_arguments(_STEP_S)
    # Without its head, a run continues for 20 seconds. It must not complete the output in that time.
    source = write_lines(soak.folder / "in.jsonl", random_lines(soak.seed, 4 * _RAY_LINES))
    run_batch(source, "-o", soak.folder / "expected.jsonl", *model)
    expected = (soak.folder / "expected.jsonl").read_bytes()

    def begun(output: Path, on: TestCluster) -> Run:
        words = [*LLMRUN, "batch", str(source), "-o", str(output), *model, "--workers", f"ray:{on.address}"]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    def case(number: int) -> str:
        name, output = [*_DEATHS][number % len(_DEATHS)], soak.folder / f"{number}.jsonl"
        with cluster(_NODES) as running:
            run = begun(output, running)
            _wait_for(_RAY_LINES, run, output)
            _DEATHS[name](run, running)
            if name == "batch killed":
                run.wait()
                run = begun(output, running)
            _, told = run.communicate()
        if name == "head killed":
            if run.returncode != 5 or "run the same command again to continue" not in told:
                raise Broken(f"{name}: exit code {run.returncode}, {told}")
            with cluster(_NODES) as another:
                run = begun(output, another)
                _, told = run.communicate()
        if run.returncode not in (0, 1) or output.read_bytes() != expected:
            raise Broken(
                f"{name}: the output differs from that of one process, or the exit code is {run.returncode}: {told}"
            )
        return name

    yield case


def _wait_for(lines: int, run: Run, output: Path) -> None:
    """Wait until the journal has this many lines. Raises Broken if the run ends first."""
    journal = output.with_name(f"{output.name}.partial")
    while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
        if run.poll() is not None:
            raise Broken(f"the run ended before {lines} lines: exit code {run.returncode}")
        time.sleep(0.02)
