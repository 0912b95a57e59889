"""Chats in a terminal with actions in random order: questions, pastes, /undo, resizes, Ctrl-C, Ctrl-Z, kill -9.

tests/cli/chatting tests the rest: questions of several lines, history search, completion, typing ahead, other commands.
"""

from __future__ import annotations

import random
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil

from tests.soak.driver import Broken, Case, Soak
from tests.support.cli.chat_person import CTRL_C, CTRL_Z, ENTER, PROMPT, Findings, Person, Trouble, text_of, words
from tests.support.cli.commands import LLMRUN, script_file
from tests.support.cli.shells import READY, PtyShell, Shell, TmuxShell

_CONTEXT = 8192  # tokens; the scripted model, whose tokens are bytes, gets four times as many
_FILLING = 5_000  # characters of the first question, so that the KV cache soon has all its memory
_KILL_EVERY = 25  # every 25th case kills chats
_RESIZE_SHARE = 0.1
_ENOUGH = 50  # the fewest samples for a p99 and for the growth of the memory
_STOP_S = 0.2  # limit of the p99 of the time until Ctrl-C stops decoding
_MOST_GROWTH = 50e6  # bytes, after the first sixth of the time
_ANSWER = "a long answer of *many* words, " * 5


def chat(soak: Soak) -> Iterator[Case]:
    """Use one long chat, in tmux if it is installed, and separate chats for kills."""
    soak.say("the chats run in tmux" if shutil.which("tmux") else "tmux is missing: pseudo-terminals are used")
    findings = Findings()
    with ExitStack() as stack:
        people: list[Person] = []

        def case(number: int) -> str:
            if (number + 1) % _KILL_EVERY == 0:
                return _kill(soak, number)
            if not people:
                people.append(stack.enter_context(_chatting(soak, number, findings)))
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
    """Perform a random action in the long chat, and clear the chat before its context is full."""
    person.chance = chance
    action = chance.choice(ACTIONS)
    action(person)
    if person.conversation().context_used > 0.6 * _CONTEXT:
        person.clear()
    if chance.random() < _RESIZE_SHARE:
        person.resize()
        person.settle()
    return action.__name__.replace("_", " ")


def _kill(soak: Soak, number: int) -> str:
    """Kill a chat in the middle of answers."""
    with _chatting(soak, number, Findings()) as person:
        for _ in range(2):
            person.ask()
            kill(person)
        person.leave()
    return "kills with -9 and --continue"


@contextmanager
def _chatting(soak: Soak, number: int, findings: Findings) -> Iterator[Person]:
    """Run a chat in a folder of its own while the block runs. Its output and the actions are saved there."""
    folder = soak.folder / f"chat-{number}"
    folder.mkdir()
    (folder / "config.toml").touch()
    if soak.model:
        model = ["-m", soak.model, "-n", "400"]
    else:  # with speculation, a repeated answer would end before anyone could stop it
        script = script_file(folder, [("assistant\n", _ANSWER)], step_seconds=0.002)
        model = ["--backend", "scripted", script, "--speculate", "off"]
    words = shlex.join([*LLMRUN, "chat", *model, "-c", str(_CONTEXT if soak.model else 4 * _CONTEXT)])
    environment = {"LLMRUN_DATA_DIR": str(folder), "LLMRUN_CONFIG": str(folder / "config.toml"), "LLMRUN_WARM": "0"}
    shell: Shell = (TmuxShell if shutil.which("tmux") else PtyShell)(folder, environment)
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
    """Check how quickly Ctrl-C stopped answers and whether the memory grew, if there are enough samples."""
    for place, seconds in findings.stops.items():
        soak.counts[f"Ctrl-C {place}"] += len(seconds)
    stops = sorted(findings.stops.get("in decode", []))
    if len(stops) >= _ENOUGH and (p99 := stops[int(0.99 * len(stops))]) >= _STOP_S:
        raise Broken(f"Ctrl-C took {p99:.3f} s to stop decoding (p99)")
    samples = max(findings.memory.values(), key=len, default=[])
    if len(samples) >= _ENOUGH and (grown := findings.growth(samples[-1][0] / 6)) > _MOST_GROWTH:
        raise Broken(f"the memory grew by {grown / 1e6:.1f} MB")


# --- actions, each with a check of its result

# Moments for Ctrl-C, and how often each is chosen. Whether the prefill has ended then depends on the machine.
MOMENTS = {"answer": 60, "prefill": 15, "prompt": 8, "typing": 12, "at once": 5}


def paste(person: Person, characters: int = 10_000) -> None:
    """Paste text into an empty conversation, so that it fits."""
    person.clear()
    text = text_of(person.chance, characters)
    person.mark = len(person.shell.stream)
    person.findings.note(f"paste of {len(text)} characters")
    person.shell.paste(text)
    person.settle()
    person.act("paste", " What is it about?" + ENTER)
    person.answered(text + " What is it about?")


def undo(person: Person) -> None:
    """Undo one or two questions, then drop the last one or ask it again."""
    if not person.said:
        return
    question, _ = person.said.pop()
    person.run_command("/undo", b"undone")
    if person.said and person.chance.random() < 0.3:  # typed over the question that /undo put back
        question, _ = person.said.pop()
        person.run_command("/undo", b"undone")
    person.agree()
    if person.chance.random() < 0.5:
        person.act("undo", CTRL_C)
    else:
        person.act("undo", ENTER)
        person.answered(question)


def interrupt(person: Person) -> None:
    """Press Ctrl-C at a random moment: at an empty prompt, while typing, in prefill or in decode."""
    [kind] = person.chance.choices([*MOMENTS], [*MOMENTS.values()])
    if kind in ("prompt", "typing"):
        if kind == "typing":
            person.act("interrupt", words(person.chance, person.chance.randint(1, 80)))
            time.sleep(person.chance.uniform(0, 0.1))
        person.act("interrupt", CTRL_C)
        person.findings.stops.setdefault(f"while {kind}", []).append(0.0)
        person.settle()
        person.check()
        return
    question = person.question(long=True)
    if kind == "prefill":
        person.clear()
        question = f"{question}\n{text_of(person.chance, 5000)}"
        person.shell.paste(question)
        person.settle()
    person.act("interrupt", ENTER if kind == "prefill" else question + ENTER)
    if kind != "at once":
        time.sleep(person.chance.uniform(0, person.answer_seconds * (0.4 if kind == "prefill" else 1.0)))
    place = _place(person, question)
    pressed = time.monotonic()
    person.findings.note(f"Ctrl-C {place}")
    person.shell.send(CTRL_C)
    returned = person.prompt("Ctrl-C")
    person.findings.stops.setdefault(place, []).append(max(0.0, returned - pressed))
    _check_stopped(person, question)


def _place(person: Person, question: str) -> str:
    """Return how far the answer to a question has come."""
    if person.shell.stream.wait(PROMPT, person.mark, 0):
        return "after the answer"
    exchanges = person.conversation().exchanges
    began = bool(exchanges) and exchanges[-1].question == question and exchanges[-1].began is not None
    return "in decode" if began else "in prefill"


def _check_stopped(person: Person, question: str) -> None:
    """Check that a stopped question was removed, or kept with the part of the answer that was generated."""
    person.act("clear", CTRL_C)  # clears a removed question, which the prompt offers again
    # The prompt that was found may be the one with the question, before the answer. Only a later prompt runs a command.
    person.run_command("/help", rb"/regen")
    exchanges = person.conversation().exchanges
    if exchanges and exchanges[-1].question == question and len(exchanges) == len(person.said) + 1:
        last = exchanges[-1]
        if last.ended is None:
            raise Trouble(f"a stopped answer has no end in the journal: {last!r:.300}")
        person.said.append((question, last.answer))
    person.agree()


def suspend(person: Person) -> None:
    """Press Ctrl-Z at the prompt or in an answer, and resume. The shell must get its terminal modes back meanwhile."""
    question = person.question(long=True)
    answering = person.chance.random() < 0.6
    if answering:
        person.act("suspend", question + ENTER)
        time.sleep(person.chance.uniform(0.05, 0.5 * person.answer_seconds))
    start = person.mark
    person.act("suspend", CTRL_Z)
    person.wait_for(re.escape(READY.encode()), "Ctrl-Z")
    if (modes := person.terminal_modes()) != person.modes:
        raise Trouble(f"the terminal's modes while stopped:\n{modes}\nbefore:\n{person.modes}")
    is_answered = answering and person.shell.stream.wait(PROMPT, start, 0) is not None
    person.act("fg", f"fg{ENTER}")
    if answering:
        person.mark = start if is_answered else person.mark
        person.answered(question)
    else:
        person.prompt("fg")
        person.agree()


def kill(person: Person) -> None:
    """Send SIGKILL in the middle of an answer, then run --continue. Everything that was shown must still be there."""
    question = person.question(long=True)
    person.shell.resize(100, 30)
    person.act("kill", question + ENTER)
    time.sleep(person.chance.uniform(0.05, person.answer_seconds))
    psutil.Process(person.pid).kill()
    person.pid = 0
    person.wait_for(rb"Killed", "kill -9")
    found = person.conversation().exchanges
    answer = found[-1].answer if len(found) > len(person.said) else ""
    if answer and found[-1].ended is None:
        _all_shown_is_kept(person, question, answer)
    if len(found) == len(person.said) + 1 and found[-1].began is not None:
        person.said.append((question, answer))
    changed = person.terminal_modes() != person.modes
    person.findings.after_kill["stty sane needed" if changed else "modes were right"] += 1
    person.act("sane", f"stty sane{ENTER}")
    person.modes = person.terminal_modes()
    person.begin("--continue")
    person.act("clear", CTRL_C)  # clears an unanswered question, which the chat offers again


def _all_shown_is_kept(person: Person, question: str, answer: str) -> None:
    rows = person.shell.rows()
    begin = max((i for i, row in enumerate(rows) if question[:20] in row), default=None)
    if begin is None:
        return
    shown = _letters(" ".join(rows[begin:]).replace(READY, " ").rpartition("Killed")[0])
    shown = shown.removeprefix(_letters(question))
    if shown[-30:] not in _letters(answer):
        raise Trouble(f"shown, but missing from the journal: {shown[-60:]!r}, the journal has {answer[-200:]!r}")


def _letters(text: str) -> str:
    """Return only the letters, which are unaffected by Markdown and wrapping."""
    return "".join(character for character in text if character.isalpha())


# Actions of the long chat, with their weights.
ACTIONS: Sequence[Callable[[Person], None]] = (
    (Person.ask,) * 28 + (paste,) * 2 + (undo,) * 6 + (suspend,) * 6 + (interrupt,) * 25
)
