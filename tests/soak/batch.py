"""Kills `llmrun batch` with SIGKILL at random moments, and compares its output with that of an uninterrupted run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
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
        moments = [chance.uniform(0.0, whole_s) for _ in range(chance.randint(1, _MOST_KILLS))]
        soak.counts["kills"] += _run_until_complete(command, output, moments)
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


def _run_until_complete(command: Sequence[str], output: Path, moments: Sequence[float]) -> int:
    """Run the command, kill it after so many seconds, again and again, and then let it end. Returns the kills.

    Checks the journal and the log of calls after each run.
    """
    journal, log = output.with_name(f"{output.name}.partial"), output.with_suffix(".log")
    environment, quiet = {**os.environ, LOG_VARIABLE: str(log)}, subprocess.DEVNULL
    lines = repeated = 0
    for kills, seconds in enumerate([*moments, None]):
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=quiet, stderr=quiet) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        calls = log.read_text().splitlines() if log.exists() else []
        again, repeated = len(calls) - len(set(calls)) - repeated, len(calls) - len(set(calls))
        if again > _SLOTS:
            raise Broken(f"a kill made {again} calls begin again, and only {_SLOTS} ran at a time")
        if process.returncode == 1 or (output.exists() and not journal.exists()):  # or killed after its work was done
            return kills
        if process.returncode != -9:  # SIGKILL
            raise Broken(f"a run ended with {process.returncode}")
        before, lines = lines, journal.read_bytes().count(b"\n") if journal.exists() else 0
        if lines < before:
            raise Broken(f"the journal had {before} lines, and then {lines}")
    raise Broken("the last run did not complete the output")
