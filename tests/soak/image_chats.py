"""Compares answers about images: alone, in company, from caches and saved states, in replays and after kills.

Each case has a model and eight random conversations with up to four images, some of which differ in one pixel. The
answers of an engine without any cache are expected of all others. tests/engine/images/test_pairs.py names the reports
of answers about the wrong image.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs
from PIL import Image

from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.types import FinishReason
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.engine import Engine
from llmrun.engine.image_encoder import ImageEncoder
from llmrun.engine.requests import ChatPrompt, Event, Request, StatePlace
from llmrun.engine.saved_state.budget import Budget
from llmrun.engine.saved_state.chunks import SavedChunks
from llmrun.formats.images.decoding import Decoded, ImageDecoder
from llmrun.formats.images.scaling import Scaled
from llmrun.hub.progress_reporter import Silent
from llmrun.jobs.recording import parse_recording
from llmrun.jobs.replay import WatchedBackend, opening_of, record, replay
from llmrun.options.sampling_params import SamplingParams
from tests.soak.driver import Broken, Case, Soak
from tests.soak.serving.clients import Asked, Clients
from tests.soak.serving.disturbed import killed_wave
from tests.support.batching.batch_runs import CHAT
from tests.support.engine.answers import Gathered, run_to_the_end
from tests.support.engine.drafts import assert_same, drafting_engine
from tests.support.engine.pictures import Piece, ask
from tests.support.serving.restartable import Restartable
from tests.support.templates.template_runs import PROCESS
from tests.support.vision.seeing import SEEING, Seeing

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

_CHATS = 8  # conversations per case
_MOST_IMAGES = 4  # per conversation
_AT_ONCE = 8
_WORDS = ("red", "blue", "left", "right", "above", "a", "the", "of", "is", "and", "what", "where", "how many", "cats")
_FEW_ROWS = (8, 64, 512)
_MIXED = 0.3  # the share of the requests in company that are also sent a second time, and cancelled
_STOPPED = 0.2  # the share of the steps that are stopped, as Ctrl-C does, and repeated


@dataclass
class _Chat:
    """A conversation.

    asked    the user's messages
    request  the last request without its prompt
    """

    asked: list[list[Piece]]
    request: Request
    answers: list[str] = field(default_factory=list)

    def turn(self, number: int, question: Sequence[Piece] | None = None) -> Request:
        """Return the request for an answer, optionally to another question."""
        before: list[Any] = [each for pair in zip(self.asked, self.answers, strict=False) for each in pair]
        prompt = ask(*before[: 2 * number], question or self.asked[number]).prompt
        return structs.replace(self.request, prompt=prompt)


@dataclass
class _Expected:
    """A request, its answer by an engine that has just forgotten everything, and the number of its conversation."""

    chat: int
    request: Request
    answer: Gathered


class _Decoder(ImageDecoder):
    """A decoder that remembers pictures, because most requests of a case have new engines, but the same pictures."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[bytes, tuple[Scaled, ...]], Decoded] = {}

    def tiles(self, data: bytes, scaled: Sequence[Scaled], place: str) -> Decoded:
        key = data, tuple(scaled)
        if key not in self._known:
            self._known[key] = super().tiles(data, scaled, place)
        return self._known[key]


class _Case:
    """The conversations of a case with one model, and the ways to answer them."""

    def __init__(self, seeing: Seeing, folder: Path, chance: random.Random, counts: Counter[str]) -> None:
        self._seeing, self._folder, self._chance, self._counts = seeing, folder, chance, counts
        self._decoder = _Decoder()
        self._pictures = _pictures(seeing, chance)
        self._chats = [self._chat() for _ in range(_CHATS)]
        self.expected: list[_Expected] = []

    def close(self) -> None:
        self._decoder.close()

    # --- conversations

    def _chat(self) -> _Chat:
        chance = self._chance
        asked: list[list[Piece]] = [[self._text()] for _ in range(chance.randint(1, 3))]
        for _ in range(chance.randint(0, _MOST_IMAGES)):
            content = chance.choice(asked)
            content.insert(chance.randint(0, len(content)), self._image())
            self._counts["images"] += 1
        never = {} if chance.random() < 0.5 else dict.fromkeys(self._seeing.ends, -math.inf)
        sampling = SamplingParams(
            temperature=chance.choice((0.0, 0.9)),
            seed=chance.randrange(1 << 30),
            repeat_penalty=chance.choice((1.0, 1.0, 1.3)),
            logit_bias=never,
        )
        request = Request(
            ChatPrompt([]),
            chance.choice((2, 8, 16, 60)),
            stop=chance.choice(((), (), ("e", "a"))),
            sampling=sampling,
            logprobs=chance.choice((None, 1, 8)),
        )
        self._counts["conversations"] += 1
        return _Chat(asked, request)

    def _text(self) -> str:
        words = " ".join(self._chance.choices(_WORDS, k=self._chance.randint(1, 12)))
        return " ".join([words] * self._chance.choice((1, 1, 3)))

    def _image(self) -> Piece:
        file = self._chance.choice(self._pictures)
        return file if self._chance.random() < 0.8 else (file, self._chance.choice(("low", "high")))

    def _edited(self, content: Sequence[Piece]) -> list[Piece]:
        """Return a message with one piece replaced by another of its kind, left out or repeated."""
        edited, at = list(content), self._chance.randrange(len(content))
        piece = edited[at]
        new = self._text() if isinstance(piece, str) else self._image()
        edited[at : at + 1] = self._chance.choice(([new], [new], [piece, piece], [] if len(content) > 1 else [new]))
        return edited

    # --- ways to answer

    def alone(self) -> None:
        """Answer every turn, an edited turn, and the last turn once more. The engine forgets everything in between."""
        backend = self._seeing.open(threads=1)
        engine = self._engine(backend)
        try:
            for number, chat in enumerate(self._chats):
                for turn in range(len(chat.asked)):
                    self._learn(engine, number, chat.turn(turn))
                    chat.answers.append(self.expected[-1].answer.text)
                last = self.expected[-1]
                turn = self._chance.randrange(len(chat.asked))
                self._learn(engine, number, chat.turn(turn, self._edited(chat.asked[turn])))
                self.expected.append(last)
        finally:
            backend.close()

    def _learn(self, engine: Engine, chat: int, request: Request) -> None:
        engine.forget()
        [answer] = run_to_the_end(engine, [engine.submit(request)])
        self.expected.append(_Expected(chat, request, answer))

    def in_company(self) -> None:
        """Submit all requests at random steps, some of them twice, and cancel the second ones at random steps.

        Some steps are stopped. In half of the cases, the KV cache becomes full, and requests are preempted.
        """
        chance = self._chance
        is_full = chance.random() < 0.5
        backend = self._seeing.open(threads=chance.randint(1, 3), sequences=_AT_ONCE, is_full=is_full)
        try:
            engine = self._random_engine(backend, overcommit=is_full)
            vars(_encoder(engine))["_decoder"] = ImageDecoder()
            events: list[Event] = []
            ids, cancelled = [], []
            order = chance.sample(self.expected, len(self.expected))
            for each in order:
                ids.append(engine.submit(each.request))
                if chance.random() < _MIXED:
                    cancelled.append((each, engine.submit(each.request)))
                for _ in range(chance.choice((0, 0, 1, 2, 8))):
                    if chance.random() < _STOPPED:
                        backend.cancel()
                    events += engine.step()
                if cancelled and chance.random() < 0.5:
                    engine.cancel(chance.choice(cancelled)[1])
            for _, number in cancelled:
                engine.cancel(number)
            answers = run_to_the_end(engine, [*ids, *(number for _, number in cancelled)], events=events)
            for each, answer in zip(order, answers, strict=False):
                self._compare("in company", each, answer)
            for (each, _), answer in zip(cancelled, answers[len(ids) :], strict=True):
                self._compare_beginning(each, answer)
            self._counts["preemptions"] += engine.status().preemptions
            _encoder(engine).close()
        finally:
            backend.close()

    def after_prefix_hits(self) -> None:
        """Answer the turns of all conversations in their order, but the conversations take random turns."""
        backend = self._seeing.open(threads=self._chance.randint(1, 3), sequences=self._chance.choice((2, 5, 9)))
        try:
            self._answer_in_turn("after prefix hits", self._random_engine(backend), self._mixed_turns())
        finally:
            backend.close()

    def after_reopening(self) -> None:
        """Save prefixes in a folder, open the model again, and answer the other requests."""
        folder, turns = self._folder / "saved", self._mixed_turns()
        middle = len(turns) // 2
        for part in (turns[:middle], turns[middle:], turns[:middle]):
            backend = self._seeing.open(threads=self._chance.randint(1, 3), sequences=2)
            try:
                engine = self._random_engine(backend)
                engine.use_saved(SavedChunks(folder, engine.state_key, Budget([folder], 1 << 30), _fail))
                self._answer_in_turn("after reopening", engine, part)
                while engine.save_prefix():
                    pass
            finally:
                backend.close()

    def from_state_files(self) -> None:
        """Answer each turn with a new engine, which loads what the one before has saved."""
        for each in self._mixed_turns()[: 2 * _CHATS]:
            place = StatePlace(str(self._folder / f"{each.chat}.kv"))
            backend = self._seeing.open(threads=self._chance.randint(1, 3), sequences=1)
            try:
                engine = self._random_engine(backend)
                engine.use_state(place, _fail)
                self._answer_in_turn("from state files", engine, [each])
                engine.save_state()
            finally:
                backend.close()

    def after_kills(self) -> None:
        """Kill the engine of a server, whose caches are empty, while it answers all requests at once."""
        clients = Clients([Asked(CHAT, _body(each.request)) for each in self.expected])
        arguments = [*self._seeing.arguments(self._folder), "--parallel", str(_AT_ONCE), "--max-wait", "600"]
        server = Restartable(arguments, self._folder / "killed.log")
        try:
            asyncio.run(clients.learn(server.port))
            server.restart()
            self._counts["kills"] += asyncio.run(killed_wave(server.server, clients, self._chance, self._counts))
            self._counts["answers after kills"] += len(self.expected)
        finally:
            server.close()

    def after_replays(self) -> None:
        """Record the answer to a request about images on the CPU engine, and repeat the run beside other requests."""
        seeing = [each for each in self.expected if _has_images(each.request)] or self.expected
        each, others = self._chance.choice(seeing), self._chance.sample(self.expected, _AT_ONCE - 1)
        with self._watched(threads=1, sequences=1) as (engine, watched):
            if watched is None:
                return
            [answer] = run_to_the_end(engine, [engine.submit(each.request)])
            self._compare("recorded", each, answer)
            opening = opening_of(engine, chat_template=None, thinking_tags=None, raw=False)
            recording = record(
                *(engine, watched, each.request, answer.tokens, answer.finished),
                model=self._seeing.name,
                opening=opening,
                reporter=Silent(),
            )
        recording = parse_recording(json.dumps(recording.as_json()).encode())
        with self._watched(threads=3, sequences=_AT_ONCE) as (engine, watched):
            assert watched is not None, "it is the same backend"
            result = replay(engine, watched, recording, [other.request for other in others])
        if not result.is_same:
            raise Broken(f"{self._seeing.name} replayed: {_shown(each.request)}: {result}")
        self._counts["replays"] += 1

    @contextmanager
    def _watched(self, threads: int, sequences: int) -> Iterator[tuple[Engine, WatchedBackend | None]]:
        """Open an engine whose logits are recorded, which only the CPU engine supports."""
        backend = self._seeing.open(threads=threads, sequences=sequences)
        watched = WatchedBackend(backend) if isinstance(backend, CpuBackend) else None
        try:
            yield self._engine(watched or backend), watched
        finally:
            backend.close()

    def _mixed_turns(self) -> list[_Expected]:
        """Return the requests of the conversations in a random order that preserves the order of each one."""
        queues = [[each for each in self.expected if each.chat == number] for number in range(_CHATS)]
        order = [each.chat for each in self.expected]
        self._chance.shuffle(order)
        return [queues[number].pop(0) for number in order]

    def _answer_in_turn(self, way: str, engine: Engine, expected: Sequence[_Expected]) -> None:
        for each in expected:
            [answer] = run_to_the_end(engine, [engine.submit(each.request)])
            self._compare(way, each, answer)

    # --- engines

    def _engine(self, backend: Backend, **options: Any) -> Engine:
        engine = Engine(backend, templates=PROCESS, **options)
        vars(_encoder(engine))["_decoder"] = self._decoder
        return engine

    def _random_engine(self, backend: Backend, **options: Any) -> Engine:
        options["rows_per_step"] = self._chance.choice(_FEW_ROWS)
        if self._chance.random() < 0.5:
            return self._engine(backend, **options)
        engine = drafting_engine(backend, LookupSource(), templates=PROCESS, **options)
        vars(_encoder(engine))["_decoder"] = self._decoder
        return engine

    # --- comparisons

    def _compare(self, way: str, each: _Expected, answer: Gathered) -> None:
        timings = answer.finished.timings
        self._counts[f"answers {way}"] += 1
        self._counts[f"cached tokens {way}"] += timings.cached_tokens
        self._counts["accepted draft tokens"] += timings.accepted_tokens
        self._counts[f"images encoded {way}"] += timings.encoded_images
        try:
            assert_same(answer, each.answer)
        except AssertionError as error:
            raise Broken(f"{self._seeing.name} {way}: {_shown(each.request)}: {error}") from error

    def _compare_beginning(self, each: _Expected, answer: Gathered) -> None:
        """Compare the beginning of an answer that may have been cancelled."""
        n = len(answer.tokens)
        if answer.tokens != each.answer.tokens[:n] or answer.logprobs != each.answer.logprobs[:n]:
            raise Broken(f"{self._seeing.name} before it was cancelled: {_shown(each.request)}: {answer.tokens}")
        self._counts["cancelled answers"] += answer.finished.reason is FinishReason.CANCELLED


def image_chats(soak: Soak) -> Iterator[Case]:
    """Compare tokens, log-probabilities and finish reasons. The models take turns."""

    def case(number: int) -> str:
        folder = soak.folder / f"case-{number}"
        folder.mkdir()
        name = NAMES[number % len(NAMES)]
        one = _Case(SEEING[name](folder), folder, soak.random(number), soak.counts)
        try:
            one.alone()
            for way in (
                one.in_company,
                one.after_prefix_hits,
                one.after_reopening,
                one.from_state_files,
                one.after_replays,
            ):
                way()
            one.after_kills()
        finally:
            one.close()
        return f"sets with {name}"

    yield case


NAMES = tuple(SEEING)  # the first cases use them in this order, and later cases start over


def _pictures(seeing: Seeing, chance: random.Random) -> list[bytes]:
    """Return files: some with equal sizes, two that differ in one pixel, and two with the same pixels."""
    first, second = (_noise(*chance.choice(seeing.sizes), chance) for _ in range(2))
    changed = first.copy()
    changed[chance.randrange(len(first)), chance.randrange(len(first[0])), chance.randrange(3)] ^= 1
    other = _noise(first.shape[1], first.shape[0], chance)
    return [_file(first), _file(changed), _file(other), _file(first, "BMP"), _file(second, "WEBP", lossless=True)]


def _noise(width: int, height: int, chance: random.Random) -> np.typing.NDArray[np.uint8]:
    pixels = np.frombuffer(chance.randbytes(height * width * 3), np.uint8)
    return pixels.reshape(height, width, 3)


def _file(pixels: np.typing.NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def _body(request: Request) -> dict[str, Any]:
    """Return a request as OpenAI's API has it."""
    assert isinstance(request.prompt, ChatPrompt)
    files, messages = request.prompt.images, []
    for message in request.prompt.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [_api_part(part, files) for part in content]
        messages.append({"role": message["role"], "content": content})
    sampling = request.sampling
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": request.max_tokens,
        "stop": request.stop,
        "seed": sampling.seed,
    }
    body |= {"temperature": sampling.temperature, "repeat_penalty": sampling.repeat_penalty}
    return body if request.logprobs is None else {**body, "logprobs": True, "top_logprobs": request.logprobs}


def _api_part(part: Any, files: Any) -> dict[str, Any]:
    if part["type"] == "text":
        return dict(part)
    url = f"data:image/png;base64,{base64.b64encode(files[part['image']]).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": part["detail"]}}


def _shown(request: Request) -> str:
    """Return the conversation of a request without the bytes of its images."""
    return repr(structs.replace(request, prompt=structs.replace(request.prompt, images={})))


def _has_images(request: Request) -> bool:
    return isinstance(request.prompt, ChatPrompt) and bool(request.prompt.images)


def _encoder(engine: Engine) -> ImageEncoder:
    assert engine.image_encoder is not None
    return engine.image_encoder


def _fail(note: str) -> None:
    raise Broken(note)
