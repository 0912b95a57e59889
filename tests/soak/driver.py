"""Runs the profiles of `scripts/soak`: numbered random cases until the time is over, and then a one-line summary.

A profile is a generator function. It prepares what its cases need, yields a function that runs the case with a given
number, and cleans up. The function returns the outcome in a few words, or raises an exception if a promise is broken.
Checks that need all cases follow the `yield`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llmrun.hub.progress_reporter import Silent
from llmrun.hub.resolve.model_file import resolve
from tests.soak.profiles import PROFILES
from tests.support.models.downloads import smollm2

PROGRESS_S = 10.0
CASE_S = 900.0  # cases that take longer count as hanging
MOST_BROKEN = 5  # a profile ends after this many broken promises

Case = Callable[[int], str]


class Broken(AssertionError):
    """Raised when a promise is broken."""


@dataclass
class Soak:
    """Settings and helpers that the driver gives to a profile.

    folder  an empty folder, which is kept if a promise is broken
    model   the model of --model, or "" for the profile's own choice
    say     prints a line
    counts  how often each outcome occurred; profiles may add more figures
    """

    seed: int
    folder: Path
    model: str
    say: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter)

    def random(self, *key: object) -> random.Random:
        """Return random numbers that depend only on the seed and the key, such as the number of a case."""
        return random.Random(" ".join(map(str, (self.seed, *key))))

    def seed_of(self, number: int) -> int:
        """Return a seed for one case."""
        return self.random("seed", number).randrange(1 << 31)

    def path(self) -> Path:
        """Return the file of the model, which is SmolLM2 by default."""
        return resolve(self.model, offline=False, reporter=Silent()).path if self.model else smollm2()

    def model_arguments(self, step_seconds: float = 0.0) -> list[str]:
        """Return command-line arguments that name the model, which is scripted by default."""
        if self.model:
            return ["-m", str(self.path())]
        script = self.folder / "script.json"
        script.write_text(json.dumps({"step_seconds": step_seconds}))
        return ["-m", str(script), "--backend", "scripted", "--speculate", "off"]


@dataclass
class Result:
    """The result of a profile."""

    name: str
    counts: Counter[str]
    cases: int = 0
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)
    is_interrupted: bool = False

    def summary(self, seed: int) -> str:
        """Return the last line of the output."""
        how = "FAILED" if self.broken else "interrupted" if self.is_interrupted else "passed"
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in self.counts.most_common())
        return f"{self.name}: {how}, {self.cases:,} cases of seed {seed} in {self.seconds:.0f} s: {counts or 'nothing'}"


def run_profile(
    name: str,
    *,
    seconds: float = float("inf"),
    seed: int = 1,
    model: str = "",
    first: int = 0,
    count: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run the cases of a profile, at least one, until the time is over or `count` of them have run."""
    soak = Soak(seed, Path(tempfile.mkdtemp(prefix=f"soak-{name}-")), model, say)
    result = Result(name, soak.counts)
    started = time.monotonic()
    numbers = itertools.count(first) if count is None else iter(range(first, first + count))
    try:
        with contextmanager(_profile(name))(soak) as case:
            _run_cases(case, numbers, result, soak, started + seconds)
    except KeyboardInterrupt:
        result.is_interrupted = True
    except Exception as error:  # noqa: BLE001 - whatever a profile raises is a finding
        _report(result, "before or after the cases", error, say)
    result.seconds = time.monotonic() - started
    if result.broken:
        say(f"files are kept in {soak.folder}")
    else:
        shutil.rmtree(soak.folder, ignore_errors=True)
    return result


def _profile(name: str) -> Callable[[Soak], Iterator[Case]]:
    module, _, function = PROFILES[name].code.partition(":")
    found: Callable[[Soak], Iterator[Case]] = getattr(importlib.import_module(module), function)
    return found


def _run_cases(case: Case, numbers: Iterator[int], result: Result, soak: Soak, deadline: float) -> None:
    started = told = time.monotonic()
    for number in numbers:
        try:
            with _limited(CASE_S):
                soak.counts[case(number)] += 1
        except Exception as error:  # noqa: BLE001 - whatever a case raises is a finding
            _report(result, f"case {number}", error, soak.say)
            model = f" --model {soak.model}" if soak.model else ""
            soak.say(f"  to repeat: scripts/soak {result.name}{model} --seed {soak.seed} --first {number} --count 1")
        result.cases += 1
        now = time.monotonic()
        if now > deadline or len(result.broken) == MOST_BROKEN:
            return
        if now > told + PROGRESS_S:
            told = now
            soak.say(f"{result.name}: {result.cases:,} cases in {now - started:.0f} s")


def _report(result: Result, where: str, error: Exception, say: Callable[[str], None]) -> None:
    result.broken.append(f"{where}: {type(error).__name__}: {error}")
    trace = "" if isinstance(error, Broken) else f"\n{''.join(traceback.format_exception(error)).rstrip()}"
    say(f"{result.name}, {result.broken[-1]:.3000}{trace}")


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise Broken in the block after some seconds. Windows has no such timer."""
    if sys.platform == "win32":
        yield
        return

    def hang(*_: object) -> None:
        raise Broken(f"still running after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `scripts/soak`. Returns the exit code: 1 if a promise was broken, and 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    if options.list or not options.profile:
        _say(_listed())
        return 0
    seconds = options.seconds or (60.0 if options.count is None else float("inf"))
    is_broken = is_interrupted = False
    for name in PROFILES if options.profile == "all" else [options.profile]:
        result = run_profile(
            name,
            seconds=seconds,
            seed=options.seed,
            model=options.model,
            first=options.first,
            count=options.count,
            say=_say,
        )
        _say(result.summary(options.seed))
        is_broken |= bool(result.broken)
        if is_interrupted := result.is_interrupted:
            break
    return 1 if is_broken else 130 if is_interrupted else 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _listed() -> str:
    return "\n".join(f"{name:<16} {profile.promise}" for name, profile in PROFILES.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description="Check llmrun's promises with random cases. The exit code is 1 if a promise is broken.",
        epilog=f"profiles:\n{_listed()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "profile",
        nargs="?",
        choices=["all", *PROFILES],
        metavar="PROFILE",
        help="a profile from the list below, or all",
    )
    parser.add_argument("--list", action="store_true", help="list the profiles")
    parser.add_argument("--seconds", type=float, help="time limit per profile [default: 60; none with --count]")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices [default: 1]")
    parser.add_argument("--model", default="", help="a model [default: scripted, tiny or SmolLM2]")
    parser.add_argument("--first", type=int, default=0, help="number of the first case [default: 0]")
    parser.add_argument("--count", type=int, help="number of cases [default: until the time is over]")
    return parser
