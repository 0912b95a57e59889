"""Kills `llmrun batch` with SIGKILL at random moments, and compares its output with that of an uninterrupted run."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.soak.driver import Broken, Case, Soak
from tests.support.batching.batch_runs import LOGGED, random_lines, write_lines
from tests.support.batching.batch_runs import batch as run_batch
from tests.support.batching.logged_batch import LOG_VARIABLE
from tests.support.cli.commands import ROOT

_LINES = 80
_PARALLEL = 4
_SLOTS = 2 * _PARALLEL  # calls that a worker has at a time
_MOST_KILLS = 6  # of one run


def batch(soak: Soak) -> Iterator[Case]:
    """Start the same command until it is complete. A kill may repeat only the calls that were running."""
    model = model_arguments(soak)
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
        _Killing(command, output, soak.counts).until_complete(chance, whole_s)
        if output.read_bytes() != expected.read_bytes():
            raise Broken(f"{output} differs from {expected}")
        if left := [path.name for path in soak.folder.glob(f"*{output.name}?*")]:
            raise Broken(f"left behind: {left}")
        return "runs"

    yield case


def model_arguments(soak: Soak, step_seconds: float = 0.0) -> Sequence[str]:
    """Return the arguments of `llmrun batch` that name the model, which is scripted by default."""
    if soak.model:
        return ["-m", soak.model]
    script = soak.folder / "script.json"
    script.write_text(f'{{"step_seconds": {step_seconds}}}')
    return ["-m", str(script), "--backend", "scripted", "--speculate", "off"]


class _Killing:
    """Runs one command until it is complete, and checks its journal and the log of its calls after each kill."""

    def __init__(self, command: Sequence[str], output: Path, counts: Counter[str]) -> None:
        self._command, self._output, self._counts = command, output, counts
        self._journal, self._log = output.with_name(f"{output.name}.partial"), output.with_suffix(".log")
        self._recorded = self._repeated = 0

    def until_complete(self, chance: random.Random, whole_s: float) -> None:
        environment = {**os.environ, LOG_VARIABLE: str(self._log)}
        kills = chance.randint(1, _MOST_KILLS)
        for left in range(kills, -1, -1):
            code = self._run(environment, chance.uniform(0.0, whole_s) if left else None)
            self._check_calls()
            if code is not None:
                if code != 1:
                    raise Broken(f"a run ended with {code}")
                return
            if self._output.exists() and not self._journal.exists():
                self._counts["kills after the end"] += 1
                return
            self._check_journal()

    def _run(self, environment: Mapping[str, str], seconds: float | None) -> int | None:
        """Run the command, and kill it after some seconds. Returns its exit code, or None if it was killed."""
        quiet = subprocess.DEVNULL
        with subprocess.Popen(self._command, cwd=ROOT, env=environment, stdin=quiet, stderr=quiet) as process:
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return None

    def _check_calls(self) -> None:
        calls = self._log.read_text().splitlines() if self._log.exists() else []
        again = len(calls) - len(set(calls)) - self._repeated
        self._repeated += again
        self._counts["repeated calls"] += again
        if again > _SLOTS:
            raise Broken(f"a kill made {again} calls begin again, and only {_SLOTS} ran at a time")

    def _check_journal(self) -> None:
        now = self._journal.read_bytes().count(b"\n") if self._journal.exists() else 0
        if now < self._recorded:
            raise Broken(f"the journal had {self._recorded} lines, and then {now}")
        self._recorded = now
        self._counts["kills before the first answer" if now <= 1 else "kills in the middle"] += 1
