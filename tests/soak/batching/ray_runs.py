"""Batches on a Ray cluster whose parts are killed, and how much faster two workers are than one."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.batching.batch_runs import batch, random_lines, write_lines
from tests.support.batching.ray_clusters import TestCluster, cluster
from tests.support.cli.commands import LLMRUN, ROOT

_PATIENCE_S = 600.0
_DRIVER = "batching.workers.ray_driver"
_ENGINE = "engine.child.main"
_TOKENS = 48  # of an answer when speed is measured

Say = Callable[[str], None]
Kill = Callable[["Run", TestCluster], None]


@dataclass(slots=True)
class Run:
    """A running `llmrun batch`, whose output is compared with that of one process."""

    process: subprocess.Popen[str]
    output: Path

    @property
    def answered(self) -> int:
        """The number of lines in the journal."""
        journal = self.output.with_name(f"{self.output.name}.partial")
        return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0

    def wait_for(self, lines: int) -> None:
        """Wait until this many lines are answered. Raises TimeoutError, and RuntimeError if the run ends before."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.answered < lines:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.answered} of {lines} lines after {_PATIENCE_S:.0f} s")
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended before {lines} lines: {self.process.communicate()[1]}")
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return the exit code and what was printed to stderr."""
        _, told = self.process.communicate(timeout=_PATIENCE_S)
        return self.process.returncode, told


@dataclass(slots=True)
class RaySoak:
    """Runs the same input on one process and on clusters. `problems` has the promises that were broken."""

    folder: Path
    model: Sequence[str]
    lines: int
    seed: int
    say: Say
    problems: list[str] = field(default_factory=list)

    def same(self, nodes: int) -> None:
        """Compare the output of a cluster with that of one process."""
        with cluster(nodes) as running:
            self._compare("nothing killed", self._begun("same", running))

    def deaths(self, nodes: int) -> None:
        """Kill one thing after another, each in a run of its own on one cluster."""
        with cluster(nodes) as running:
            for name, kill in DEATHS.items():
                run = self._begun(name.replace(" ", "-"), running)
                run.wait_for(self.lines // 4)
                kill(run, running)
                if run.process.wait() < 0:
                    self.say(f"{name}: {run.answered} lines are answered, the same command again")
                    run = self._begun(name.replace(" ", "-"), running)
                self._compare(name, run)

    def head(self, nodes: int) -> None:
        """Kill the head. The run must end with a sentence, and continue on a new cluster."""
        with cluster(nodes) as running:
            run = self._begun("head", running)
            run.wait_for(self.lines // 4)
            running.kill_head()
            killed = time.monotonic()
            code, told = run.end()
            answered = run.answered
            self.say(f"head killed: exit code {code} after {time.monotonic() - killed:.0f} s, {answered} lines: {told}")
            if code != 5 or "run the same command again to continue" not in told:
                self.problems.append(f"head killed: exit code {code}, {told}")
        with cluster(nodes) as another:
            self._compare("head killed", self._begun("head", another))

    def _begun(self, name: str, on: TestCluster) -> Run:
        output = self.folder / f"{name}.jsonl"
        words = [*LLMRUN, "batch", str(self._source()), "-o", str(output), *self.model]
        process = subprocess.Popen(
            [*words, "--workers", f"ray:{on.address}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        return Run(process, output)

    def _compare(self, name: str, run: Run) -> None:
        code, told = run.end()
        is_same = code in (0, 1) and run.output.read_bytes() == self._expected().read_bytes()
        self.say(f"{name}: {'the same bytes' if is_same else 'FAILED'}, exit code {code}\n{told}")
        if not is_same:
            self.problems.append(f"{name}: other bytes than one process, or exit code {code}: {told}")

    def _source(self) -> Path:
        source = self.folder / "in.jsonl"
        return source if source.exists() else write_lines(source, random_lines(self.seed, self.lines))

    def _expected(self) -> Path:
        output = self.folder / "expected.jsonl"
        if not output.exists():
            batch(self._source(), "-o", output, *self.model)
        return output


def _kill_actor(_: Run, running: TestCluster) -> None:
    if sys.platform == "win32":
        raise NotImplementedError("needs POSIX signals")
    running.actors()[0].send_signal(signal.SIGKILL)


def _kill_engine(_: Run, running: TestCluster) -> None:
    if sys.platform == "win32":
        raise NotImplementedError("needs POSIX signals")
    _below(running.actors()[0], _ENGINE).send_signal(signal.SIGKILL)


def _remove_node(_: Run, running: TestCluster) -> None:
    running.remove_node(0)
    running.add_node()


def _kill_ray_driver(run: Run, _: TestCluster) -> None:
    if sys.platform == "win32":
        raise NotImplementedError("needs POSIX signals")
    _below(psutil.Process(run.process.pid), _DRIVER).send_signal(signal.SIGKILL)


def _kill_batch(run: Run, _: TestCluster) -> None:
    if sys.platform == "win32":
        raise NotImplementedError("needs POSIX signals")
    run.process.send_signal(signal.SIGKILL)


DEATHS: dict[str, Kill] = {
    "worker killed": _kill_actor,
    "engine killed": _kill_engine,
    "node removed": _remove_node,
    "process that talks to Ray killed": _kill_ray_driver,
    "batch killed": _kill_batch,
}


def _below(process: psutil.Process, name: str) -> psutil.Process:
    return next(child for child in process.children(recursive=True) if any(name in word for word in child.cmdline()))


@dataclass(frozen=True, slots=True)
class Scaling:
    """The speeds of one and of two workers in lines per second, round by round."""

    one: Sequence[float]
    two: Sequence[float]

    @property
    def factor(self) -> float:
        """How much faster two workers are, by medians."""
        return statistics.median(self.two) / statistics.median(self.one)


def measure_scaling(folder: Path, model: Sequence[str], *, lines: int, rounds: int, say: Say) -> Scaling:
    """Measure one and two workers with one thread each, in alternating rounds."""
    messages = [[{"role": "user", "content": f"{n}: tell me a story about a robot."}] for n in range(lines)]
    source = write_lines(folder / "in.jsonl", [{"messages": each, "max_tokens": _TOKENS} for each in messages])
    speeds: dict[int, list[float]] = {1: [], 2: []}
    with cluster(1) as one, cluster(2) as two:
        for number in range(rounds):
            order = ((1, one), (2, two))
            for count, running in order if number % 2 == 0 else reversed(order):
                words = ["-t", "1", "--parallel", "16", "--force", "--json", "--workers", f"ray:{running.address}"]
                done = batch(source, "-o", folder / f"{count}.jsonl", *model, *words)
                told = json.loads(done.stdout)
                speeds[count].append(lines / told["seconds"])
                say(
                    f"round {number + 1}, {count} workers: {told['seconds']:.1f} s, {speeds[count][-1]:.3f} lines/s, "
                    f"{told['generated_tokens'] / told['seconds']:.0f} tok/s, load {psutil.getloadavg()[0]:.2f}"
                )
    if (folder / "1.jsonl").read_bytes() != (folder / "2.jsonl").read_bytes():
        raise RuntimeError("one and two workers write different bytes")
    return Scaling(speeds[1], speeds[2])
