"""Chats in a terminal, with every feature in random order: questions, pastes, resizes, Ctrl-C, Ctrl-Z, kill -9.

chat_actions.py has the actions, each with a check of its result.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.soak.chat_actions import ACTIONS, fill, kill, paste
from tests.soak.driver import Broken, Case, Soak
from tests.support.cli.chat_person import Findings, Person
from tests.support.cli.commands import LLMRUN, script_file
from tests.support.cli.shells import PtyShell, TmuxShell

_CONTEXT = 8192
_SMALL_CONTEXT = 1000
_FILLING = 5_000  # characters at the beginning, so that the KV cache soon has all its memory
_ASIDE_EVERY = 25  # of so many cases, the last two are chats of their own
_RESIZE_SHARE = 0.1
_ENOUGH = 50  # cases, or Ctrl-Cs, before a p99 or the growth of memory says anything
_STOP_S = 0.2  # the limit for the p99 of Ctrl-C in decode
_MOST_GROWTH = 50e6  # bytes, after the first sixth of the time
_ANSWER = "a long answer of *many* words, " * 5


def chat(soak: Soak) -> Iterator[Case]:
    """Use one long chat, in tmux if it is installed, and a chat of its own for kills and for a full context."""
    findings, chats = Findings(), _Chats(soak)
    people: list[Person] = []
    soak.say("the chats run in tmux" if shutil.which("tmux") else "tmux is missing: pseudo-terminals are used")

    def case(number: int) -> str:
        rest = (number + 1) % _ASIDE_EVERY
        if rest < 2:
            with chats.open(f"aside-{number}", Findings(), _SMALL_CONTEXT if rest else _CONTEXT, number) as aside:
                _fill(aside) if rest else _kill(aside)
                aside.leave()
            return "full contexts" if rest else "kills with -9 and --continue"
        if not people:
            people.append(chats.begin(f"main-{number}", findings, _CONTEXT, number))
            paste(people[0], _FILLING)
        action = soak.random(number).choice(ACTIONS)
        try:
            _act(people[0], soak, number)
        except BaseException:
            chats.close(people.pop())  # the next case has a new one
            raise
        return action.__name__.replace("_", " ")

    yield case
    for person in people:
        person.leave()
        person.begin("--continue")
        person.ask()
        person.leave()
        chats.close(person)
    _check(findings, soak)


def _act(person: Person, soak: Soak, number: int) -> None:
    person.chance = soak.random(number)
    person.chance.choice(ACTIONS)(person)
    if person.conversation().context_used > 0.6 * _CONTEXT:
        person.clear()
    if person.chance.random() < _RESIZE_SHARE:
        person.resize()
        person.settle()


def _kill(person: Person) -> None:
    for _ in range(2):
        person.ask()
        kill(person)


def _fill(person: Person) -> None:
    fill(person, _SMALL_CONTEXT)


class _Chats:
    """Starts chats in folders of their own."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak

    @contextmanager
    def open(self, name: str, findings: Findings, context: int, number: int) -> Iterator[Person]:
        """Run a chat while the block runs."""
        person = self.begin(name, findings, context, number)
        try:
            yield person
        finally:
            self.close(person)

    def begin(self, name: str, findings: Findings, context: int, number: int) -> Person:
        """Start a chat."""
        folder = self._soak.folder / name
        folder.mkdir()
        (folder / "config.toml").touch()
        model = ["-m", self._soak.model, "-n", "400"] if self._soak.model else self._scripted(folder)
        words = shlex.join([*LLMRUN, "chat", *model, "-c", str(context)])
        shell = (TmuxShell if shutil.which("tmux") else PtyShell)(
            folder, {"LLMRUN_DATA_DIR": str(folder), "LLMRUN_CONFIG": str(folder / "config.toml")}
        )
        seconds = 1.5 if self._soak.model else 0.4
        person = Person(shell, folder, words, findings, self._soak.random(number), answer_seconds=seconds)
        person.begin()
        return person

    def close(self, person: Person) -> None:
        """End the shell, and write down what it showed and what was done."""
        (person.data / "terminal.raw").write_bytes(person.shell.stream.since(0))
        (person.data / "actions.log").write_text("\n".join(person.findings.log))
        person.shell.close()

    def _scripted(self, folder: Path) -> list[str]:
        script = script_file(folder, [("assistant\n", _ANSWER)], step_seconds=0.002)
        # With speculation, a repeated answer would end before anyone could stop it.
        return ["--backend", "scripted", script, "--speculate", "off"]


def _check(findings: Findings, soak: Soak) -> None:
    """Check how quickly Ctrl-C stopped answers and whether the memory grew, if there was enough of both."""
    for place, seconds in findings.stops.items():
        soak.counts[f"Ctrl-C {place}"] += len(seconds)
    stops = sorted(findings.stops.get("in decode", []))
    if len(stops) >= _ENOUGH and (p99 := stops[int(0.99 * len(stops))]) >= _STOP_S:
        raise Broken(f"the p99 of Ctrl-C in decode is {p99:.3f} s")
    samples = max(findings.memory.values(), key=len, default=[])
    if len(samples) >= _ENOUGH and (grown := findings.growth(samples[-1][0] / 6)) > _MOST_GROWTH:
        raise Broken(f"the memory grew by {grown / 1e6:.1f} MB")
