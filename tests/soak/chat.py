"""Chats in a terminal, with every feature in random order: questions, pastes, resizes, Ctrl-C, Ctrl-Z, kill -9.

chat_actions.py has the actions, each with a check of its result.
"""

from __future__ import annotations

import random
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

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
    soak.say("the chats run in tmux" if shutil.which("tmux") else "tmux is missing: pseudo-terminals are used")
    findings = Findings()
    with ExitStack() as stack:
        people: list[Person] = []

        def case(number: int) -> str:
            rest = (number + 1) % _ASIDE_EVERY
            if rest < 2:
                return _aside(soak, number, _fill if rest else _kill)
            if not people:
                people.append(stack.enter_context(_chatting(soak, number, _CONTEXT, findings)))
                paste(people[0], _FILLING)
            try:
                return _act(people[0], soak.random(number))
            except BaseException:
                people.clear()  # the next case has a new chat
                raise

        yield case
        for person in people:
            person.leave()
            person.begin("--continue")
            person.ask()
            person.leave()
    _check(findings, soak)


def _act(person: Person, chance: random.Random) -> str:
    """Do something in the long chat, in which there is always room."""
    person.chance = chance
    action = chance.choice(ACTIONS)
    action(person)
    if person.conversation().context_used > 0.6 * _CONTEXT:
        person.clear()
    if chance.random() < _RESIZE_SHARE:
        person.resize()
        person.settle()
    return action.__name__.replace("_", " ")


def _aside(soak: Soak, number: int, act: Callable[[Person], str]) -> str:
    with _chatting(soak, number, _SMALL_CONTEXT if act is _fill else _CONTEXT, Findings()) as person:
        outcome = act(person)
        person.leave()
    return outcome


def _kill(person: Person) -> str:
    for _ in range(2):
        person.ask()
        kill(person)
    return "kills with -9 and --continue"


def _fill(person: Person) -> str:
    fill(person, _SMALL_CONTEXT)
    return "full contexts"


@contextmanager
def _chatting(soak: Soak, number: int, context: int, findings: Findings) -> Iterator[Person]:
    """Run a chat in a folder of its own while the block runs. What it showed and what was done is written down."""
    folder = soak.folder / f"chat-{number}"
    folder.mkdir()
    (folder / "config.toml").touch()
    if soak.model:
        model = ["-m", soak.model, "-n", "400"]
    else:  # with speculation, a repeated answer would end before anyone could stop it
        script = script_file(folder, [("assistant\n", _ANSWER)], step_seconds=0.002)
        model = ["--backend", "scripted", script, "--speculate", "off"]
    words = shlex.join([*LLMRUN, "chat", *model, "-c", str(context)])
    environment = {"LLMRUN_DATA_DIR": str(folder), "LLMRUN_CONFIG": str(folder / "config.toml")}
    shell = (TmuxShell if shutil.which("tmux") else PtyShell)(folder, environment)
    seconds = 1.5 if soak.model else 0.4
    person = Person(shell, folder, words, findings, soak.random(number), answer_seconds=seconds)
    try:
        person.begin()
        yield person
    finally:
        (folder / "terminal.raw").write_bytes(shell.stream.since(0))
        (folder / "actions.log").write_text("\n".join(findings.log))
        shell.close()


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
