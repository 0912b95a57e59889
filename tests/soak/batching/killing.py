"""Kills `llmrun batch` with SIGKILL at random moments, and compares its output with that of an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.batching.batch_runs import LOGGED, batch, random_lines, write_lines
from tests.support.batching.logged_batch import LOG_VARIABLE
from tests.support.cli.commands import ROOT

END_S = 600.0


@dataclass
class Kills:
    """The results of a soak.

    killed     how often the process was killed
    in_time    how many of these kills came before the first answer, while calls ran, and after the last answer
    runs       complete runs, each of which was killed several times
    repeated   calls that began more than once
    most_repeated  the most calls that one kill made begin again
    problems   what must not happen
    """

    killed: int = 0
    in_time: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    repeated: int = 0
    most_repeated: int = 0
    problems: list[str] = field(default_factory=list)


def kill_runs(
    folder: Path, model: Sequence[str], *, kills: int, lines: int, seed: int, slots: int, say: Callable[[str], None]
) -> Kills:
    """Run the same batch again and again until it has been killed so many times.

    model  the arguments that choose the model
    slots  the number of calls that a worker has at a time
    """
    draw, found = random.Random(seed), Kills()
    source = write_lines(folder / "in.jsonl", random_lines(seed, lines))
    expected = folder / "expected.jsonl"
    began = time.monotonic()
    done = batch(source, "-o", expected, *model)
    whole_s = time.monotonic() - began
    if done.returncode != 1:  # some lines are errors
        found.problems.append(f"the first run ended with {done.returncode}: {done.stderr.decode()[-500:]}")
        return found
    while found.killed < kills and not found.problems:
        output = folder / f"out-{found.runs}.jsonl"
        _one_run(source, output, model, kills, slots, whole_s, draw, found)
        if not found.problems and output.read_bytes() != expected.read_bytes():
            found.problems.append(f"{output}: differs from {expected}")
        if left := [path.name for path in folder.glob(f"*{output.name}?*")]:
            found.problems.append(f"left behind: {left}")
        say(f"{found.killed} kills, {found.runs} runs, {found.repeated} calls repeated, {dict(found.in_time)}")
    return found


def _one_run(
    source: Path,
    output: Path,
    model: Sequence[str],
    kills: int,
    slots: int,
    whole_s: float,
    draw: random.Random,
    found: Kills,
) -> None:
    """Start the batch until it is complete, and kill it as often as it is not."""
    if sys.platform == "win32":
        raise NotImplementedError("needs POSIX signals")
    journal, log = output.with_name(output.name + ".partial"), output.with_suffix(".log")
    environment = {**os.environ, LOG_VARIABLE: str(log)}
    begun: Counter[str] = Counter()
    recorded = 0
    while True:
        command = [*LOGGED, "batch", str(source), "-o", str(output), *model]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                process.wait(draw.uniform(0.0, whole_s) if found.killed < kills else END_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                found.killed += 1
        calls = Counter(log.read_text().splitlines()) if log.exists() else Counter()
        again = sum((calls - Counter(set(calls))).values()) - sum((begun - Counter(set(begun))).values())
        begun = calls
        found.repeated += again
        found.most_repeated = max(found.most_repeated, again)
        if again > slots:
            found.problems.append(f"a kill made {again} calls begin again, and only {slots} ran at a time")
        if process.returncode != -signal.SIGKILL:
            found.runs += 1
            if process.returncode != 1:
                found.problems.append(f"a run ended with {process.returncode}")
            return
        if output.exists() and not journal.exists():  # it was killed after its work was done
            found.runs += 1
            found.in_time["after"] += 1
            return
        now = journal.read_bytes().count(b"\n") if journal.exists() else 0
        if now < recorded:
            found.problems.append(f"the journal had {recorded} lines, and then {now}")
        found.in_time["before" if now <= 1 else "running" if not output.exists() else "after"] += 1
        recorded = now


def described(found: Kills) -> str:
    return json.dumps({"killed": found.killed, "runs": found.runs, "repeated": found.repeated, **found.in_time})
