"""A simulated user who chats at a terminal and checks the results. tests/soak/chat.py has the actions.

Questions and answers are known from two sources: what the user typed, and the journal that the chat writes. After each
action, the two must agree, no journal may have lost a byte, the process must be alive, and the screen must show no
signs of a bug.
"""

from __future__ import annotations

import random
import re
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmrun.cli.chatting.conversation import Conversation, new_conversation
from llmrun.cli.chatting.store import Store, read_conversation
from tests.support.cli.shells import READY, Shell

PROMPT = rb"\x1b\[\?2004h(?:\x1b\[\?1l)?\x1b\[\?25l"  # a prompt is drawn; bracketed paste is enabled before that, too
PATIENCE_S = 180  # for any single step: a busy machine is not a bug, a chat that hangs is
ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_BUGS = re.compile(
    r"Traceback \(most recent call last\)|internal error: \w|Unhandled exception|Press ENTER to continue|"
    r"your terminal doesn't support|Exception ignored in|was never awaited|Segmentation fault|Aborted"
)
_SIZE = re.compile(r"rows \d+; columns \d+;")
CTRL_C, CTRL_D, CTRL_R, CTRL_Z, TAB, ENTER = "\x03", "\x04", "\x12", "\x1a", "\t", "\r"


_LETTERS = ("b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "t", "v")
_WORDS = [f"{a}a{b}e{c}" for a in _LETTERS for b in _LETTERS for c in ("l", "n", "r", "s")]


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(_WORDS, k=count))


def text_of(chance: random.Random, characters: int) -> str:
    """Return lines of words with exactly this many characters in total."""
    lines = []
    left = characters
    while left > 0:
        line = words(chance, 12)[: min(left, 79)].strip()
        lines.append(line)
        left -= len(line) + 1
    return "\n".join(lines)


class Trouble(AssertionError):
    """A failed check of the chat's behavior."""


@dataclass
class Findings:
    """The observations of a soak.

    stops       seconds from Ctrl-C to the prompt, by where the chat was
    memory      (second, bytes) samples of each process
    after_kill  how often the terminal's modes were right or wrong after kill -9
    """

    actions: Counter[str] = field(default_factory=Counter)
    stops: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    after_kill: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def interrupts(self) -> int:
        return sum(map(len, self.stops.values()))

    def growth(self, after: float) -> int:
        """Return by how many bytes the process with the most samples grew after this many seconds."""
        samples = max(self.memory.values(), key=len, default=[])
        warm = [used for moment, used in samples if moment >= after]
        return max(warm) - warm[0] if warm else 0

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.started:9.3f}  {text}")


class Person:
    """One chat in one shell. `command` starts the chat, without --continue."""

    def __init__(
        self,
        shell: Shell,
        data: Path,
        command: str,
        findings: Findings,
        chance: random.Random,
        *,
        answer_seconds: float = 1.5,
    ) -> None:
        """`answer_seconds` is roughly how long a long answer takes. Interruptions happen within that time."""
        self.shell, self.data, self.command, self.answer_seconds = shell, data, command, answer_seconds
        self.findings, self.chance = findings, chance
        self.store = Store(data / "conversations")
        self.said: list[tuple[str, str]] = []  # questions and answers, as in the journal
        self.sent: list[str] = []  # single-line questions, to find in the history search
        self.copies: dict[str, list[tuple[str, str]]] = {}
        self.pid = 0
        self._left: Path | None = None  # the conversation before /clear, until the new one has a file
        self._journals: dict[Path, bytes] = {}
        self._scanned = 0
        self._number = 0
        self.mark = 0
        self.shell.send(f"cd {shlex.quote(str(Path(__file__).resolve().parents[3]))}; echo begun{ENTER}")
        self.wait_for(rb"\nbegun", "the shell")
        self.modes = self.terminal_modes()

    # Basic interaction

    def wait_for(self, pattern: bytes, what: str, seconds: float = PATIENCE_S) -> int:
        """Wait for a pattern in the output since the last `act`. Returns the position of its end in the stream."""
        found = self.shell.stream.wait(pattern, self.mark, seconds)
        if found is None:
            raise Trouble(f"{what}: nothing like {pattern!r} within {seconds:.0f} s")
        return self.mark + found.end()

    def act(self, name: str, keys: str) -> float:
        """Type something and return the time just before."""
        self.mark = len(self.shell.stream)
        moment = time.monotonic()
        self.findings.note(f"{name}: {keys[:200]!r}")
        self.shell.send(keys)
        return moment

    def prompt(self, what: str) -> float:
        """Wait for the prompt and return when it appeared. Meanwhile, the window is resized now and then."""
        deadline = time.monotonic() + PATIENCE_S
        resized = False
        while (found := self.shell.stream.wait(PROMPT, self.mark, self.chance.uniform(0.05, 1.0))) is None:
            if time.monotonic() > deadline:
                raise Trouble(f"{what}: no prompt within {PATIENCE_S} s")
            if resized := self.chance.random() < 0.15:
                self.resize()
        moment = self.shell.stream.moment_of(self.mark + found.end() - 1)
        if resized:
            self.settle()
        return moment

    def resize(self) -> None:
        columns, lines = self.chance.randint(20, 200), self.chance.randint(8, 60)
        self.findings.actions["resize"] += 1
        self.findings.note(f"resize {columns}x{lines}")
        self.shell.resize(columns, lines)

    def settle(self) -> None:
        """Wait until the output stops, because a resize redraws the prompt, including its start."""
        seen = -1
        while seen != len(self.shell.stream):
            seen = len(self.shell.stream)
            time.sleep(0.2)

    def check(self) -> None:
        """Check that the screen shows no signs of a bug, the process is alive and journals have only grown."""
        data = self.shell.stream.since(self._scanned)
        self._scanned += len(data)
        if bug := _BUGS.search(ESCAPES.sub(b"", data).decode("utf-8", "replace")):
            raise Trouble(f"on the screen: {bug[0]}")
        if self.pid and not Path(f"/proc/{self.pid}").exists():
            raise Trouble("the chat is gone")
        for path in self.store.journals():
            before, now = self._journals.get(path, b""), path.read_bytes()
            if not now.startswith(before[: before.rfind(b"\n") + 1]):
                raise Trouble(f"{path}: what was written in it is not there any more")
            self._journals[path] = now
        self._journals = {path: data for path, data in self._journals.items() if path.exists()}
        if self.pid:
            used = (time.monotonic() - self.findings.started, _resident(self.pid))
            self.findings.memory.setdefault(self.pid, []).append(used)

    def conversation(self) -> Conversation:
        """Return the conversation from the journal, or an empty one before the first question."""
        newest = next(iter(self.store.journals()), None)
        return new_conversation("none") if newest in (None, self._left) else read_conversation(newest).conversation

    def clear(self) -> None:
        """Start a new conversation and check that the old one is unchanged."""
        before = self.said
        self.run_command("/clear", b"cleared")
        self.said = []
        latest = self.store.latest()
        if before and latest is not None:
            kept = [(one.question, one.answer) for one in read_conversation(latest).conversation.exchanges]
            if kept != before:
                raise Trouble(f"/clear lost a conversation: {len(before)} exchanges were held, {len(kept)} are kept")
        self._left = next(iter(self.store.journals()), None)

    def agree(self) -> None:
        """Check that the journal holds exactly the conversation so far."""
        found = [(one.question, one.answer) for one in self.conversation().exchanges]
        if found != self.said:
            differ = next((i for i, pair in enumerate(zip(found, self.said, strict=False)) if pair[0] != pair[1]), None)
            place = min(len(found), len(self.said)) - 1 if differ is None else differ
            raise Trouble(
                f"the journal has {len(found)} exchanges, {len(self.said)} were held; at {place}: "
                f"{found[place : place + 1]!r:.300} is not {self.said[place : place + 1]!r:.300}"
            )
        self.check()

    # Start and exit

    def begin(self, more: str = "") -> None:
        if more == "--continue":
            self._left = None
            latest = self.store.latest()
            if not self.said and latest is not None:  # resumes the conversation before /clear
                exchanges = read_conversation(latest).conversation.exchanges
                self.said = [(one.question, one.answer) for one in exchanges if one.began is not None]
        self.act("begin", f"{self.command} {more}{ENTER}")
        self.prompt("begin")
        self.pid = self._child()
        self.agree()

    def leave(self) -> None:
        """Leave with /exit or Ctrl-D and check that the terminal's modes are restored."""
        self.act("leave", self.chance.choice([f"/exit{ENTER}", CTRL_D]))
        self.wait_for(re.escape(READY.encode()), "leaving")
        self.pid = 0
        self.check()
        if (modes := self.terminal_modes()) != self.modes:
            raise Trouble(f"the terminal's modes after the end:\n{modes}\nbefore:\n{self.modes}")
        self.findings.actions["leave"] += 1

    def terminal_modes(self) -> str:
        target = self.data / "modes"
        target.unlink(missing_ok=True)
        self.act("modes", f"stty -a > {shlex.quote(str(target))}; echo noted{ENTER}")
        self.wait_for(rb"\nnoted", "stty")
        return _SIZE.sub("", target.read_text())

    def _child(self) -> int:
        """Return the id of the shell's child process."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    status = (entry / "stat").read_text()
                except OSError:  # exited after it was listed
                    continue
                if int(status.rpartition(")")[2].split()[1]) == self.shell.pid:
                    return int(entry.name)
        raise Trouble("the chat did not begin")

    # Questions

    def question(self, long: bool = False) -> str:
        self._number += 1
        topic = words(self.chance, 3)
        if long:
            return f"Question {self._number}: write a long story about {topic}."
        return f"Question {self._number}: what is {topic}?"

    def ask(self) -> None:
        question = self.question()
        self.act("ask", question + ENTER)
        self.answered(question)
        self.sent.append(question)

    def answered(self, question: str) -> None:
        """Wait for the answer and check that the journal holds the exact question with a finished answer."""
        self.prompt("an answer")
        last = self.conversation().exchanges[-1:]
        if not last or last[0].question != question:
            raise Trouble(f"asked {question!r:.200}, the journal has {last!r:.400}")
        if last[0].ended is None:
            raise Trouble(f"no end of the answer to {question!r:.200}")
        self.said.append((question, last[0].answer))
        self.agree()

    def run_command(self, line: str, answer: bytes) -> None:
        self.act("command", line + ENTER)
        self.wait_for(answer.replace(b" ", rb"\s+"), line)  # the text may wrap in a narrow window
        self.prompt(line)


def _resident(pid: int) -> int:
    """Return the resident memory of a process and its children in bytes."""
    total = 0
    for entry in [Path(f"/proc/{pid}"), *_children(pid)]:
        try:
            total += int(re.search(r"VmRSS:\s+(\d+)", (entry / "status").read_text())[1]) * 1024  # type: ignore[index]
        except (OSError, TypeError):  # exited after it was listed, or a zombie
            continue
    return total


def _children(pid: int) -> Sequence[Path]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [Path(f"/proc/{child}") for child in listed.split()]
