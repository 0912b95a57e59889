"""Runs the configurations of a benchmark, including cold starts of `llmrun generate`.

Each configuration warms up until its times are stable. After warm-up, all configurations are measured round-robin until
the confidence intervals are narrow or the time limit is reached. The order alternates (A B, B A, A B, ...), so changes
in the machine's speed affect all configurations equally.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from llmrun.backends.base import RPC_OFF
from llmrun.base.amounts import format_seconds_briefly
from llmrun.base.errors import BackendCrashed, LlmrunError, shown
from llmrun.base.machine.cpu_count import default_threads
from llmrun.base.machine.memory import free_memory
from llmrun.base.processes import commands
from llmrun.jobs.bench.measuring.asking import Sample, joined
from llmrun.jobs.bench.measuring.pool import BenchReporter, OpenedFacts, Pool, Start, WorkerProcess
from llmrun.jobs.bench.measuring.workload import BenchTarget, Configuration
from llmrun.jobs.bench.statistics import is_stable

_PROMPT = "Why is the sky blue?"
_LAST_WORDS = 400
# The error classes to choose from. The exit code of `llmrun generate` determines which class is raised.
_ALL: tuple[type[LlmrunError], ...] = (BackendCrashed, *LlmrunError.__subclasses__())
_KINDS = {kind.exit_code: kind for kind in _ALL}


def cold_start(target: BenchTarget) -> Sample:
    """Run `llmrun generate` once and return its timing. Raises the command's error if the command fails."""
    arguments = ["generate", "--model", target.path, "--backend", target.backend]
    arguments += ["--gpu-layers", str(target.gpu_layers), "--max-tokens", "1", "--temp", "0", "--quiet"]
    arguments += ["--speculate", target.draft or target.speculate, "--rpc", RPC_OFF]
    arguments += [part for adapter in target.adapters for part in ("--lora", adapter)]
    if target.threads is not None:
        arguments += ["--threads", str(target.threads)]
    if target.kv_type is not None:
        arguments += ["--kv-type", target.kv_type]
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            commands.command("", *arguments, _PROMPT),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            **commands.in_own_group(),
            env=commands.environment(),
        )
        try:
            first = os.read(process.stdout.fileno(), 1) if process.stdout is not None else b""
            cold = time.perf_counter() - started
            process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - started
        if process.returncode or not first:
            errors.seek(0)
            raise _failure(process.returncode, errors.read().decode(errors="replace"))
    return Sample((), seconds, cold=cold)


def _failure(status: int, written: str) -> LlmrunError:
    said = [line.removeprefix("error: ") for line in written.splitlines() if line.startswith("error: ")]
    words = shown(said[-1] if said else f"llmrun generate exited with status {status}", _LAST_WORDS)
    return _KINDS.get(status, LlmrunError)(words)


# The minimum length of a turn. Shorter workloads are repeated, because clock resolution and thread wake-ups would
# dominate their times. Longer turns would reduce accuracy, because configurations should be measured close together in
# time, under the same conditions.
_TURN_S = 0.1
_LIMITS_EVERY_S = 2.0
_MOST_LIMITS_BYTES = 1 << 30  # The maximum size of the bandwidth test, which is larger than any CPU cache.
_LEAST_LIMITS_BYTES = 1 << 28
_WARM_UP_SHARE = 0.2  # Warm-up may take at most this share of a configuration's time, and measuring takes the rest.
_WELL_OVER = 1.5  # If a run exceeds the time limit by this factor, a note explains why.


@dataclass(slots=True)
class Trial:
    """The state of one configuration, with a sample for each completed round."""

    configuration: Configuration
    samples: list[Sample] = field(default_factory=list)
    failure: LlmrunError | None = None


@dataclass(slots=True)
class Outcome:
    """All measurements of a run.

    bandwidths      the machine's memory bandwidth in bytes per second, measured every few seconds
    multiply_rates  the machine's int8 multiply-adds per second, measured at the same times
    """

    trials: list[Trial]
    opened: dict[BenchTarget, OpenedFacts]
    bandwidths: list[float] = field(default_factory=list)
    multiply_rates: list[float] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Effort:
    """The limits on the duration of a measurement.

    A round does not start if it would probably exceed the limit, judging by the previous round. The first round always
    runs to completion, because a result requires complete answers.

    seconds      the time per configuration, including warm-up but not loading
    repetitions  the number of rounds; None to continue until `enough` returns True
    enough       returns whether the intervals of all trials are narrow; considers only the widths, never the values
    """

    seconds: float
    repetitions: int | None
    enough: Callable[[Sequence[Trial]], bool]


class Runner:
    """Measures configurations. `outcome` always contains all results so far."""

    def __init__(
        self,
        configurations: Sequence[Configuration],
        effort: Effort,
        reporter: BenchReporter,
        start: Start = lambda target, reporter: WorkerProcess(reporter),
    ) -> None:
        self._effort = effort
        self._reporter = reporter
        self._pool = Pool(configurations, reporter, start)
        self._machine = _MachineLimits(reporter)
        self._seed = 0
        self._warming_up_s = 0.0
        self._round_s = 0.0  # the duration of the last round, excluding the measurement of the machine's limits
        self.outcome = Outcome([Trial(one) for one in configurations], self._pool.opened)

    def run(self) -> Outcome:
        """Run the whole benchmark and return its outcome.

        Ctrl-C ends the run early, sets `interrupted` and keeps the results so far. An error ends only the configuration
        that raised the error.
        """
        try:
            self._warm_up()
            self._rounds()
            self._pool.close()
        except KeyboardInterrupt:
            self.outcome.interrupted = True
        finally:
            self._pool.kill()
            self._machine.close()
        return self.outcome

    @property
    def _alive(self) -> list[Trial]:
        return [trial for trial in self.outcome.trials if trial.failure is None]

    def _warm_up(self) -> None:
        for number, trial in enumerate(self.outcome.trials, 1):
            count = len(self.outcome.trials)
            self._reporter.progress(f"warming up {number} of {count}  {_words(trial)}")
            with _failing(trial, self._pool):
                self._warm_one(trial)

    def _warm_one(self, trial: Trial) -> None:
        if trial.configuration.workload.facts.kind == "cold":
            cold_start(trial.configuration.target)  # The first start compiles kernels and reads the file from disk.
            return
        worker, _ = self._pool.worker(trial.configuration.target)
        started = time.perf_counter()
        left = limit = self._effort.seconds * _WARM_UP_SHARE
        taken: list[float] = []
        while not is_stable(taken) and left > 0:
            run = worker.warm(trial.configuration.workload, self._next_seed(), left)
            if run is None:
                break
            taken.append(run)
            left = started + limit - time.perf_counter()
        self._warming_up_s += time.perf_counter() - started

    def _rounds(self) -> None:
        limit = self._effort.seconds * len(self._alive) - self._warming_up_s
        until = time.perf_counter() + limit
        number = 0
        while self._alive and not self._is_enough(number, until):
            number += 1
            seed = self._next_seed()
            turns = self._alive if number % 2 else self._alive[::-1]
            self._round_s = 0.0
            for trial in turns:
                self._tell_round(number, until, trial)
                if self._has_limits(trial):
                    self._machine.measure_now_and_then(self.outcome)
                began = time.perf_counter()
                with _failing(trial, self._pool):
                    trial.samples.append(self._turn(trial, seed))
                self._round_s += time.perf_counter() - began
        if self._effort.repetitions is None and number == 1 and self._round_s > max(limit, 0) * _WELL_OVER:
            self._reporter.note(
                f"one round took {format_seconds_briefly(self._round_s)}, longer than --seconds allows: each figure is "
                "a single measurement"
            )

    def _has_limits(self, trial: Trial) -> bool:
        """Return whether the trial's engine runs on this machine, so that its speed can be compared with limits."""
        opened = self._pool.opened.get(trial.configuration.target)
        return opened is not None and "weight_bytes" in opened.facts

    def _is_enough(self, rounds: int, until: float) -> bool:
        if self._effort.repetitions is not None:
            return rounds >= self._effort.repetitions
        return rounds > 0 and (time.perf_counter() + self._round_s > until or self._effort.enough(self._alive))

    def _turn(self, trial: Trial, seed: int) -> Sample:
        """Run one turn. A target that has just been opened warms up first."""
        configuration = trial.configuration
        if configuration.workload.facts.kind == "cold":
            return cold_start(configuration.target)
        worker, is_new = self._pool.worker(configuration.target)
        if is_new:
            worker.warm(configuration.workload, self._next_seed(), self._effort.seconds * _WARM_UP_SHARE)
        runs = [worker.run(configuration.workload, seed)]
        while sum(run.seconds for run in runs) < _TURN_S:
            runs.append(worker.run(configuration.workload, self._next_seed()))
        return joined(runs)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _tell_round(self, number: int, until: float, trial: Trial) -> None:
        """Report the progress in rounds if their number is fixed, otherwise in time. A run may end early."""
        if self._effort.repetitions is not None:
            done, of_all = (number - 1) / self._effort.repetitions, self._effort.repetitions
            self._reporter.progress(f"round {number} of {of_all}  {_words(trial)}", done)
            return
        whole = self._effort.seconds * len(self._alive)

        def tell() -> tuple[str, float | None]:
            left = min(until - time.perf_counter(), whole)
            if left > 0:
                clock = f"{math.ceil(left) // 60}:{math.ceil(left) % 60:02d}"
                return f"round {number}, at most {clock} left  {_words(trial)}", 1 - left / whole
            which = "the first measurement" if number == 1 else "the last round"
            return f"time is up, but {which} is still running  {_words(trial)}", None

        self._reporter.watch(tell)


class _MachineLimits:
    """Measures the machine's limits between the engines' turns, because the limits change from second to second."""

    def __init__(self, reporter: BenchReporter) -> None:
        self._reporter = reporter
        self._worker: WorkerProcess | None = None
        self._measured = -math.inf
        self._is_given_up = False
        room = (free_memory() or _LEAST_LIMITS_BYTES * 8) // 8
        self._memory_bytes = min(max(room, _LEAST_LIMITS_BYTES), _MOST_LIMITS_BYTES)

    def measure_now_and_then(self, outcome: Outcome) -> None:
        """Measure the limits unless they were measured recently or a measurement failed."""
        if self._is_given_up or time.perf_counter() - self._measured < _LIMITS_EVERY_S:
            return
        try:
            self._worker = self._worker or WorkerProcess(self._reporter)
            bandwidth, multiply_rate = self._worker.limits(default_threads(), self._memory_bytes)
        except LlmrunError as error:
            self._is_given_up = True
            self._reporter.note(f"cannot measure the machine's limits: {error}")
            return
        outcome.bandwidths.append(bandwidth)
        outcome.multiply_rates.append(multiply_rate)
        self._measured = time.perf_counter()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()


@contextmanager
def _failing(trial: Trial, pool: Pool) -> Iterator[None]:
    """Let an LlmrunError end the trial, but not the benchmark."""
    try:
        yield
    except LlmrunError as error:
        trial.failure = error
        pool.drop(trial.configuration.target)


def _words(trial: Trial) -> str:
    configuration = trial.configuration
    return "  ".join(filter(None, (configuration.name, configuration.workload.facts.label)))
