"""Chats for tests: the real process on the scripted backend, or a session in this process with listed turns."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmrun.backends.scripted import ScriptedBackend, echo
from llmrun.backends.scripted_vision import open_vision
from llmrun.base.errors import BadGGUF, DoesNotFit, LlmrunError, ModelNotFound
from llmrun.cli.answers.answering import OpenModel
from llmrun.cli.chatting.commands import run_command
from llmrun.cli.chatting.context import ConversationState, Prompting
from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.draft_images import DraftImages
from llmrun.cli.chatting.model_in_use import ModelInUse
from llmrun.cli.chatting.plain import Meter, Turns
from llmrun.cli.chatting.saying import ConversationRecord
from llmrun.cli.chatting.session import Chat
from llmrun.cli.chatting.signals import Signals
from llmrun.cli.chatting.store import Store
from llmrun.engine.engine import Engine
from llmrun.engine.tools.toolbox import Toolbox
from llmrun.options.sampling_params import SamplingParams
from llmrun.options.settings import Settings
from tests.support.cli.commands import LLMRUN, ROOT, llmrun
from tests.support.engine.pictures import PlainDecoder


def environment(data: Path, **more: str) -> dict[str, str]:
    return os.environ | {"LLMRUN_DATA_DIR": str(data)} | more


def chat(data: Path, *arguments: str, turns: str | bytes = "", **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run `llmrun chat` on the scripted backend, with turns from a pipe and conversations under `data`."""
    stdin = turns.encode() if isinstance(turns, str) else turns
    return llmrun("chat", "--backend", "scripted", *arguments, stdin=stdin, env=environment(data, **more))


@contextmanager
def open_chat(data: Path, *arguments: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the same chat while the block runs, then kill it."""
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
    """Return the conversations' files, least recently written first."""
    return sorted((data / "conversations").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)


def answering_files(data: Path) -> list[Path]:
    """Return the files of unfinished answers."""
    return sorted((data / "conversations").glob("*.answering"))


def events_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@dataclass
class ListedTurns(Turns):
    """Turns from a list. A function in the list is called when its turn comes, and its text, if any, is the turn."""

    turns: list[str | Callable[[], str | None]]
    interactive: bool = True
    drafts: list[str] = field(default_factory=list)  # the draft passed to each `read`
    meters: list[Meter] = field(default_factory=list)
    lent_count: int = 0  # how often the terminal was lent

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
    def lent(self) -> Iterator[None]:
        self.lent_count += 1
        yield


@dataclass
class ListedView:
    """A view that collects answers in a list. `on_text` is called after every piece."""

    answers: list[str] = field(default_factory=list)
    on_text: Callable[[str], None] = lambda piece: None
    open: bool = False

    def text(self, piece: str) -> None:
        if not self.open:
            self.open = True
            self.answers.append("")
        self.answers[-1] += piece
        self.on_text(piece)

    def end(self) -> None:
        if not self.open:
            self.answers.append("")
        self.open = False


@dataclass
class ScriptedOpener:
    """A ModelOpener with scripted models by name, or the errors that opening them raises. `opened` lists every attempt.

    templates         True if models other than "scripted" have a chat template
    lose_after_first  True if a model can be opened only once
    largest_context   the size of the largest context that fits
    projectors        the projectors of the models that can read images, by name
    """

    models: Mapping[str, ScriptedBackend | LlmrunError]
    opened: list[str] = field(default_factory=list)
    templates: bool = True
    lose_after_first: bool = False
    largest_context: int = 10_000
    projectors: Mapping[str, Path] = field(default_factory=dict)

    def fetch(self, name: str, *, images: bool) -> str:
        if images and name not in self.projectors:
            raise ModelNotFound(f"{name}: no projector (mmproj) found, so this model cannot read images")
        if name not in self.models:
            raise ModelNotFound(f"model: {name!r}: neither a model in the catalogue nor a file")
        return name

    @contextmanager
    def open(self, name: str, context_size: int | None, *, images: bool) -> Iterator[OpenModel]:
        if self.lose_after_first and name in self.opened:
            raise BadGGUF(f"{name} is gone")
        self.opened.append(name)
        backend = self.models[name]
        if isinstance(backend, LlmrunError):
            raise backend
        path = self.projectors.get(name)
        if images:
            backend = ScriptedBackend(echo, projector=path)
        if context_size is not None and context_size > self.largest_context:
            raise DoesNotFit("no memory for this context")
        if context_size is not None:
            backend.info = replace(backend.info, context_size=context_size)
            backend.kv.capacity = context_size
        backend._closed = False
        for sequence in backend.kv.sequences:
            sequence.clear()
        with Engine(backend) as engine:
            if engine.image_encoder is not None:
                vars(engine.image_encoder)["_decoder"] = PlainDecoder()
            if not (self.templates or name == "scripted"):
                engine._prompts.template = None
            yield OpenModel(
                engine,
                name,
                SamplingParams(),
                projector=lambda: None if path is None else open_vision(path, None).projector,
            )


@dataclass
class Session:
    """A chat in this process, ready to run."""

    chat: Chat
    turns: ListedTurns
    view: ListedView
    backend: ScriptedBackend
    opener: ScriptedOpener

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
    others: Mapping[str, ScriptedBackend | LlmrunError] | None = None,
    toolbox: Toolbox | None = None,
    saves_state: bool = False,
    projectors: Mapping[str, Path] | None = None,
) -> Iterator[Session]:
    """Yield a session on a scripted backend that echoes (or on `backend`), with conversations under `data`.

    `others` are the models that /model finds, or errors for those that cannot be opened. `projectors` are those of
    models that read images.
    """
    backend = backend or ScriptedBackend(echo)
    state = ConversationState(data / "conversations", 1 << 30) if saves_state else None
    store = Store(data / "conversations")
    record = record or ConversationRecord(store, new_conversation("scripted"))
    turns, view = ListedTurns([], interactive=interactive), ListedView()
    opener = ScriptedOpener({"scripted": backend, **(others or {})}, projectors=projectors or {})
    with closing(ModelInUse(opener, "scripted", state)) as models, Signals(models.cancel, turns.restore) as signals:
        chat = Chat(
            models,
            store=store,
            record=record,
            settings_for=lambda name: settings or Settings(),
            prompting=Prompting({}, toolbox),
            turns=turns,
            view=view,
            signals=signals,
            run_command=run_command,
            images=DraftImages(),
        )
        try:
            yield Session(chat, turns, view, backend, opener)
        finally:
            chat.record.close()


def words(turns: Sequence[str]) -> str:
    """Return the turns as they would arrive from a pipe."""
    return "".join(f"{turn}\n" for turn in turns)
