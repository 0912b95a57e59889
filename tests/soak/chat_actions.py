"""The actions of a simulated user in a chat at a terminal, each with a check of its result."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import psutil

from llmrun.cli.chatting.store import read_conversation
from tests.support.cli.chat_person import (
    CTRL_C,
    CTRL_R,
    CTRL_Z,
    ENTER,
    ESCAPES,
    PROMPT,
    TAB,
    Person,
    Trouble,
    text_of,
    words,
)
from tests.support.cli.shells import READY

# Moments for Ctrl-C, and how often each is chosen. Whether the prefill has ended then depends on the machine.
MOMENTS = {"answer": 60, "prefill": 15, "prompt": 8, "typing": 12, "at once": 5}

# Commands, and what each of them prints.
_COMMANDS = {
    "/set temperature 0.7": rb"temperature 0\.7",
    "/set temperature default": rb"temperature \S+",
    "/show settings": rb"settings",
    "/show": rb"context",
    "/stats": rb"\n",
    "/system Be brief.": rb"system prompt is set",
    "/system default": rb"system prompt is reset",
    "/help": rb"/regen",
    "/nonsense": rb"no such command",
}


def ask_in_lines(person: Person) -> None:
    lines = [person.question(), words(person.chance, 4), "", words(person.chance, 3)]
    if person.chance.random() < 0.5:
        typed = '"""' + ENTER + ENTER.join(lines) + ENTER + '"""' + ENTER
    else:
        typed = "\n".join(lines) + ENTER
    person.act("ask in lines", typed)
    person.answered("\n".join(lines))


def type_ahead(person: Person) -> None:
    """Type the next question while the first is being answered."""
    first, second = person.question(), person.question()
    person.act("type ahead", first + ENTER)
    time.sleep(person.chance.uniform(0.05, 0.3 * person.answer_seconds))
    person.shell.send(second + ENTER)
    person.wait_for(PROMPT + b".*" + PROMPT, "two answers")
    last = person.conversation().exchanges[-2:]
    if [one.question for one in last] != [first, second]:
        raise Trouble(f"asked {first!r} and {second!r}, the journal has {last!r:.400}")
    person.said += [(one.question, one.answer) for one in last]
    person.agree()


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


def search(person: Person) -> None:
    """Find an old question with Ctrl-R and ask it again."""
    if not person.sent:
        return
    question = person.chance.choice(person.sent[-30:])
    person.act("search", CTRL_R + question[: question.index(":") + 1])
    person.settle()
    person.act("search", ENTER)
    person.settle()
    person.act("search", ENTER)
    person.answered(question)


def save(person: Person) -> None:
    if not person.said:
        return
    name = f"copy-{len(person.copies)}"
    person.run_command(f"/save {name}", b"saved as")
    person.copies[name] = list(person.said)
    saved = read_conversation(person.data / "conversations" / "saved" / f"{name}.jsonl").conversation
    if [(one.question, one.answer) for one in saved.exchanges] != person.said:
        raise Trouble(f"/save {name} is not the conversation")
    person.agree()


def load(person: Person) -> None:
    if not person.copies:
        return
    name = person.chance.choice(list(person.copies))
    person.run_command(f"/load {name}", b"loaded")
    person.said = list(person.copies[name])
    # The loaded conversation gets its own journal with the first new question or answer.
    person.chance.choice([Person.ask, regenerate])(person)


def undo(person: Person) -> None:
    """Undo one or two questions, then drop the last one or ask it again."""
    if not person.said:
        return
    question, _ = person.said.pop()
    person.run_command("/undo", b"undone")
    if person.said and person.chance.random() < 0.3:  # typed over the question that was put back
        question, _ = person.said.pop()
        person.run_command("/undo", b"undone")
    person.agree()
    if person.chance.random() < 0.5:
        person.act("undo", CTRL_C)
    else:
        person.act("undo", ENTER)
        person.answered(question)


def regenerate(person: Person) -> None:
    if not person.said:
        return
    question, _ = person.said.pop()
    person.act("regen", f"/regen{ENTER}")
    person.answered(question)


def look_around(person: Person) -> None:
    for line, answer in _COMMANDS.items():
        person.run_command(line, answer)
    person.agree()


def complete(person: Person) -> None:
    """Type /sta and Tab, which completes to /stats."""
    person.act("complete", "/sta" + TAB)
    person.settle()
    person.act("complete", ENTER)  # accepts the completion if a menu is open, otherwise sends the line
    if person.shell.stream.wait(PROMPT, person.mark, 1.0) is None:
        person.act("complete", ENTER)
    person.prompt("/stats")
    person.agree()


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
    """Return where the answer to a question is now."""
    if person.shell.stream.wait(PROMPT, person.mark, 0):
        return "after the answer"
    exchanges = person.conversation().exchanges
    began = bool(exchanges) and exchanges[-1].question == question and exchanges[-1].began is not None
    return "in decode" if began else "in prefill"


def _check_stopped(person: Person, question: str) -> None:
    """Check that a stopped question has an answer, as far as it came, or was removed."""
    person.act("clear", CTRL_C)  # the question that was removed stands at the prompt
    # The prompt that was found may be the one with the question, before the answer. Only a later prompt runs a command.
    person.run_command("/help", rb"/regen")
    exchanges = person.conversation().exchanges
    if exchanges and exchanges[-1].question == question and len(exchanges) == len(person.said) + 1:
        last = exchanges[-1]
        if last.ended is None:
            raise Trouble(f"a stopped answer has no end: {last!r:.300}")
        person.said.append((question, last.answer))
    person.agree()


def suspend(person: Person) -> None:
    """Press Ctrl-Z at the prompt or in an answer, and resume. The shell must get its terminal modes back meanwhile."""
    question = person.question(long=True)
    answering = person.chance.random() < 0.6
    if answering:
        person.act("suspend", question + ENTER)
        time.sleep(person.chance.uniform(0.05, 0.5 * person.answer_seconds))
    prompted = person.shell.stream.wait(PROMPT, person.mark, 0) if answering else None
    mark = person.mark
    person.act("suspend", CTRL_Z)
    person.wait_for(re.escape(READY.encode()), "Ctrl-Z")
    if (modes := person.terminal_modes()) != person.modes:
        raise Trouble(f"the terminal's modes while stopped:\n{modes}\nbefore:\n{person.modes}")
    answered = prompted or (answering and person.shell.stream.wait(PROMPT, mark, 0))
    person.act("fg", f"fg{ENTER}")
    if not answering:
        person.prompt("fg")
        person.agree()
        return
    if answered:
        person.mark = mark
    person.answered(question)


def kill(person: Person) -> None:
    """Send SIGKILL in the middle of an answer and --continue. Everything shown before must still be there."""
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
        raise Trouble(f"shown, but not written down: {shown[-60:]!r}, the journal has {answer[-200:]!r}")


def fill(person: Person, size: int) -> None:
    """Fill the context. The chat must say so, never cut an answer without a message, and have room again after
    /undo."""
    for _ in range(40):
        question = person.question(long=True)
        person.act("fill", question + ENTER)
        person.prompt("an answer")
        found = person.shell.stream.since(person.mark)
        flat = re.sub(rb"\s+", b" ", ESCAPES.sub(b"", found))
        exchanges = person.conversation().exchanges
        if len(exchanges) > len(person.said):
            person.said.append((question, exchanges[-1].answer))
            ended = exchanges[-1].ended
            if ended and ended.context_used >= size and b"is full" not in flat:
                raise Trouble(f"an answer was cut in silence: {flat[-300:]!r}")
        else:
            person.act("clear", CTRL_C)
        if b"does not fit" in flat:
            break
    else:
        raise Trouble("the context was never full")
    person.agree()
    undo(person)
    person.clear()
    person.mark = len(person.shell.stream)
    person.shell.paste(text_of(person.chance, 10_000))
    person.settle()
    person.act("fill", ENTER)
    person.wait_for(rb"does not\s+fit", "a prompt that is too long")
    person.prompt("a prompt that is too long")
    person.act("clear", CTRL_C)
    person.ask()


def _letters(text: str) -> str:
    """Return only the letters, which are unaffected by Markdown and wrapping."""
    return "".join(character for character in text if character.isalpha())


# The actions of a long chat, as often as they are listed.
ACTIONS: Sequence[Callable[[Person], None]] = (
    *((Person.ask,) * 20 + (ask_in_lines,) * 6 + (paste,) * 2 + (search,) * 5 + (complete,) * 4 + (type_ahead,) * 4),
    *((save,) * 4 + (load,) * 3 + (undo,) * 5 + (regenerate,) * 5 + (look_around,) * 3 + (suspend,) * 5),
    *(interrupt,) * 30,
)
