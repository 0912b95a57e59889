"""Chats for tests: the real process on the scripted backend, or the session alone with its turns from a list."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrun.backends.scripted.backend import ScriptedBackend, echo
from llmrun.cli.answers.open_model import OpenModel
from llmrun.cli.chatting.commands import command_for
from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.record import ConversationRecord
from llmrun.cli.chatting.screen import Meter
from llmrun.cli.chatting.session import Chat
from llmrun.cli.chatting.signals import Signals
from llmrun.cli.chatting.store import Store
from llmrun.engine.engine import Engine
from llmrun.sampling_params import SamplingParams
from llmrun.settings import Settings
from tests.support.cli.commands import LLMRUN, ROOT, llmrun


def environment(data: Path, **more: str) -> dict[str, str]:
    return os.environ | {"LLMRUN_DATA_DIR": str(data)} | more


def chat(data: Path, *arguments: str, turns: str | bytes = "", **more: str) -> subprocess.CompletedProcess[bytes]:
    """`llmrun chat` on the scripted backend, its turns from a pipe, its conversations under `data`."""
    stdin = turns.encode() if isinstance(turns, str) else turns
    return llmrun("chat", "--backend", "scripted", *arguments, stdin=stdin, env=environment(data, **more))


@contextmanager
def open_chat(data: Path, *arguments: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The same, while it runs; killed at the end."""
    process = subprocess.Popen(
        [*LLMRUN, "chat", "--backend", "scripted", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(data, **more),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def say(process: subprocess.Popen[bytes], turn: str) -> None:
    assert process.stdin
    process.stdin.write(turn.encode())
    process.stdin.flush()


def journals(data: Path) -> list[Path]:
    """The files of the conversations, the one written to last at the end."""
    return sorted((data / "conversations").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)


def answering_files(data: Path) -> list[Path]:
    """The files of answers under way."""
    return sorted((data / "conversations").glob("*.answering"))


def events_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@dataclass
class ListedTurns:
    """Turns from a list; a function in it is called for its effect when its turn comes, and may return a text."""

    turns: list[str | Callable[[], str | None]]
    interactive: bool = True
    drafts: list[str] = field(default_factory=list)  # what each `read` was offered
    meters: list[Meter] = field(default_factory=list)

    def read(self, meter: Meter, draft: str = "") -> str | None:
        self.drafts.append(draft)
        self.meters.append(meter)
        while self.turns:
            turn = self.turns.pop(0)
            text = turn if isinstance(turn, str) else turn()
            if text is not None:
                return text
        return None

    @contextmanager
    def answering(self) -> Iterator[None]:
        yield

    def restore(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class ListedView:
    """Answers into a list. `on_text` is called after every piece."""

    answers: list[str] = field(default_factory=list)
    on_text: Callable[[str], None] = lambda piece: None
    open: bool = False

    def begin(self) -> None:
        assert not self.open
        self.open = True
        self.answers.append("")

    def text(self, piece: str) -> None:
        assert self.open
        self.answers[-1] += piece
        self.on_text(piece)

    def end(self) -> None:
        assert self.open
        self.open = False


@dataclass
class Session:
    """A chat in this process, ready to run."""

    chat: Chat
    turns: ListedTurns
    view: ListedView
    backend: ScriptedBackend

    def run(self, *turns: str | Callable[[], str | None]) -> int:
        self.turns.turns = [*turns]
        return self.chat.run()

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(one.question, one.answer) for one in self.chat.conversation.exchanges]


@contextmanager
def session(
    data: Path,
    *,
    backend: ScriptedBackend | None = None,
    record: ConversationRecord | None = None,
    settings: Settings | None = None,
    interactive: bool = True,
) -> Iterator[Session]:
    """A session on a scripted backend that echoes (or on the one given), its conversations under `data`."""
    backend = backend or ScriptedBackend(echo)
    store = Store(data / "conversations")
    record = record or ConversationRecord(store, new_conversation("scripted"))
    turns, view = ListedTurns([], interactive=interactive), ListedView()
    with Engine(backend) as engine, Signals(engine.cancel_current, turns.restore) as signals:
        chat = Chat(
            OpenModel(engine, "scripted", SamplingParams()),
            store=store,
            record=record,
            settings=settings or Settings(),
            variables={},
            turns=turns,
            view=view,
            signals=signals,
            command_for=command_for,
        )
        try:
            yield Session(chat, turns, view, backend)
        finally:
            chat.record.close()


def words(turns: Sequence[str]) -> str:
    """Turns as a pipe brings them."""
    return "".join(f"{turn}\n" for turn in turns)
