"""Tests of images in the process that runs an engine, with the process that decodes images."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec import structs

from llmrun.backends.base import OpenOptions
from llmrun.backends.scripted import ScriptedBackend
from llmrun.backends.scripted_vision import ScriptedVision
from llmrun.base.errors import UsageError
from llmrun.engine.child.messages import (
    Ask,
    Beat,
    Begun,
    Close,
    CountPrompt,
    Embed,
    FromChild,
    Open,
    PromptCounted,
    Rejected,
    Stepped,
    Taken,
)
from llmrun.engine.child.opening import describe, open_engine
from llmrun.engine.child.serving import EngineServing, Heart
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Failed, Finished, PrefixCause, Request, TextDelta, TextPrompt
from tests.support.engine.pictures import BLUE, GREEN, RED, ask, plain, png

pytestmark = pytest.mark.push

M = TypeVar("M")
FILES = [png(plain(64, 64, color)) for color in (RED, GREEN, BLUE)]


class Server:
    """The server's side of an engine with images."""

    def __init__(self, folder: Path) -> None:
        (folder / "model.json").write_text("{}")
        asked = Open(str(folder / "model.json"), options={"backend": "scripted", "mmproj": "mmproj.gguf"})
        self.engine = open_engine(asked, lambda message: None, lambda ids: self.serving.report_begun(ids))
        self.facts = describe(self.engine, asked)
        self.messages: queue.Queue[FromChild] = queue.Queue()
        self.beats: list[Beat] = []
        self.heart = Heart(self.beats.append)
        self.serving = EngineServing(self.engine, self.messages.put, self.heart, None, explains_prefixes=True)
        self._thread = threading.Thread(target=self.serving.run, daemon=True)
        self._thread.start()

    def ask(self, number: int, request: Request) -> None:
        self.serving.take(Ask(number, request, time.perf_counter()))

    def next(self, kind: type[M]) -> M:
        while True:
            message = self.messages.get(timeout=30)
            if isinstance(message, kind):
                return message

    def answer(self, number: int, request: Request) -> tuple[Taken, str, Finished]:
        self.ask(number, request)
        taken, text = self.next(Taken), ""
        while True:
            for event in self.next(Stepped).events:
                text += event.text if isinstance(event, TextDelta) else ""
                if isinstance(event, Finished):
                    return taken, text, event

    def close(self) -> None:
        self.serving.take(Close())
        self._thread.join(30)
        self.engine.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def test_the_process_answers_about_images(server: Server) -> None:
    taken, text, finished = server.answer(1, ask(["see ", FILES[0], FILES[1], "?"]))
    assert text == "You said: see [4 rows of #ff0000][4 rows of #00ff00]?"
    assert finished.timings.encoded_images == 2
    assert taken.prompt_tokens == finished.timings.prompt_tokens
    server.serving.take(CountPrompt(7, ask(["see ", FILES[0], FILES[1], "?"])))
    assert server.next(PromptCounted).tokens == taken.prompt_tokens


def ask_slowly(server: Server) -> ScriptedVision:
    """Ask about an image whose encoding takes a minute, and before which no row can run."""
    server.answer(1, ask([FILES[0], "?"]))  # leaves everything before the image in the cache
    assert server.engine.image_encoder is not None
    vision = server.engine.image_encoder._vision
    assert isinstance(vision, ScriptedVision)
    vision.projector = structs.replace(vision.projector, encode_seconds=60.0)
    while not server.messages.empty():
        server.messages.get()
    server.ask(2, ask([FILES[1], "?"]))
    return vision


def test_requests_begin_before_their_images_are_encoded(server: Server) -> None:
    vision = ask_slowly(server)
    assert server.next(Begun).ids == (2,)
    assert len(vision.encoded) == 1


def test_long_encodings_are_no_hangs(server: Server) -> None:
    """The server ends a process whose steps do not grow while it is busy."""
    vision = ask_slowly(server)
    server.next(Begun)
    beats: list[Beat] = []
    while len(beats) < 3:
        beats += filter(None, [server.next(Stepped).beat])
    assert all(beat.busy and beat.patience == 1.0 for beat in beats)
    assert beats[0].steps < beats[1].steps < beats[2].steps
    assert len(vision.encoded) == 1


def test_misses_name_the_image_that_differs(server: Server) -> None:
    words = "some words before the pictures, which both prompts share. "
    server.answer(1, ask([words, FILES[0], FILES[1], words, "one"]))
    taken, _, _ = server.answer(2, ask([words, FILES[0], FILES[2], words, "one"]))
    assert taken.prefix is not None
    assert (taken.prefix.cause, taken.prefix.where) == (PrefixCause.DIFFERS, "image 2")
    taken, _, _ = server.answer(3, ask([words, words, "one"]))
    assert taken.prefix is not None
    assert taken.prefix.where == "message 1 (user)"


def test_facts_say_whether_the_model_reads_images(server: Server) -> None:
    without = Engine(ScriptedBackend(path=Path("model.json")))
    facts = describe(without, Open("model.json", options=OpenOptions(backend="scripted").portable()))
    without.close()
    assert (server.facts.sees_images, facts.sees_images) == (True, False)


def test_texts_to_embed_have_no_images(server: Server) -> None:
    server.serving.take(Embed([TextPrompt("a <__media__>", (FILES[0],))], id=5))
    error = server.next(Rejected).error
    assert isinstance(error, UsageError)
    assert str(error) == "images are not supported in texts to embed"


def test_files_that_break_while_decoding_end_only_their_request(server: Server) -> None:
    """The header is valid, so the file is decoded before the error is found."""
    broken = FILES[0].replace(FILES[0][60:64], b"\0\0\0\0")
    server.ask(1, ask([broken, "?"]))
    while not (failed := [event for event in server.next(Stepped).events if isinstance(event, Failed)]):
        pass
    assert "image 1" in str(failed[0].error)
    assert server.answer(2, ask("hello"))[1] == "You said: hello"
