"""Records a run, and repeats a recorded run to compare every token, the recorded logits and the ops of one step.

A run is recorded by a backend that passes every call on to the CPU engine and stores digests of the logits and images.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import structs

from llmrun import __version__
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import O_BINARY, O_NOFOLLOW
from llmrun.base.machine.processor import processor_name
from llmrun.base.machine.system import installed_version
from llmrun.base.types import IMAGE_ROW, LOGITS
from llmrun.engine.requests import Failed, Finished, RecordedChat, Request, TextDelta, TokenPrompt
from llmrun.formats.layouts.records import NUMERICS
from llmrun.hub.local.model_records import known_digest
from llmrun.hub.local.safe_writes import digest, put_in_place, writing
from llmrun.hub.names import shards_of
from llmrun.hub.upkeep.model_copies import file_digests
from llmrun.jobs.recording import (
    ModelFile,
    Opening,
    Output,
    RecordedAdapter,
    RecordedImage,
    RecordedProjector,
    Recording,
    first_tokens,
    images_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend, DraftHead, Encoding, KVCache, Vision
    from llmrun.backends.cpu.backend import CpuBackend
    from llmrun.base.types import Adapter, Batch, ModelInfo, Outputs
    from llmrun.engine.engine import Engine
    from llmrun.hub.progress_reporter import Reporter
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer
    from llmrun.model.vision.layout import ImageLayout, Projector

_DIGITS = 16  # hexadecimal digits of a digest


class _WatchedEncoding:
    """A wrapper around an encoding, which adds the digests of the rows and of the tiles to `encoded`."""

    def __init__(self, encoding: Encoding, pixels: str, encoded: dict[str, str]) -> None:
        self._encoding, self._pixels, self._encoded = encoding, pixels, encoded

    def advance(self, seconds: float) -> NDArray[np.float32] | None:
        rows = self._encoding.advance(seconds)
        if rows is not None:
            self._encoded[_digest_of_rows(map(_digest_of_row, rows))] = self._pixels
        return rows

    @property
    def progress(self) -> float:
        return self._encoding.progress

    def cancel(self) -> None:
        self._encoding.cancel()


class WatchedVision:
    """A wrapper around the encoder of images.

    encoded  maps the digest of an image's rows to the digest of its tiles
    """

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self.encoded: dict[str, str] = {}

    @property
    def projector(self) -> Projector:
        return self._vision.projector

    @property
    def runs_apart(self) -> bool:
        return self._vision.runs_apart

    def expected_seconds(self, layout: ImageLayout) -> float | None:
        return self._vision.expected_seconds(layout)

    def begin(self, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> Encoding:
        hashed = hashlib.sha256()
        for tile in tiles:
            hashed.update(np.array(tile.shape, "<i4").tobytes())
            hashed.update(np.ascontiguousarray(tile).data)
        return _WatchedEncoding(self._vision.begin(tiles, layout), hashed.hexdigest(), self.encoded)

    def close(self) -> None:
        self._vision.close()


def _digest_of_row(row: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(row, "<f4").data).digest()


def _digest_of_rows(rows: Iterable[bytes]) -> str:
    """Return the digest of an image's rows, given the digest of each row."""
    return hashlib.sha256(b"".join(rows)).hexdigest()


class WatchedBackend:
    """A wrapper around the CPU engine's backend, which records tokens and digests of logits and images.

    Hashing the logits of a step takes 0.1 ms for 49,152 tokens.

    vision  the encoder of images, or None
    tokens  the most recent token that was run at each position
    rows    the digest of the most recent image row that was run at each position
    logits  the digests of all logits computed at each position, oldest first, including the rows of rejected drafts
    """

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        self.vision = None if backend.vision is None else WatchedVision(backend.vision)
        self.clear()

    def clear(self) -> None:
        """Forget all tokens and digests."""
        self.tokens: dict[int, int] = {}
        self.rows: dict[int, bytes] = {}
        self.logits: dict[int, list[str]] = {}
        if self.vision is not None:
            self.vision.encoded.clear()

    def op_digests(self, tokens: Sequence[int]) -> list[tuple[str, str]]:
        """Return digests of all ops in a step, as `CpuBackend.op_digests` does."""
        return self._backend.op_digests(tokens)

    @property
    def info(self) -> ModelInfo:
        return self._backend.info

    @property
    def draft_head(self) -> DraftHead | None:
        return self._backend.draft_head

    @property
    def tokenizer(self) -> Tokenizer:
        return self._backend.tokenizer

    @property
    def kv(self) -> KVCache:
        return self._backend.kv

    def forward(self, batch: Batch) -> Outputs:
        outputs = self._backend.forward(batch)
        self.tokens.update(zip(batch.pos.tolist(), batch.tokens.tolist(), strict=True))
        if batch.embeds is not None:
            images = batch.pos[batch.tokens == IMAGE_ROW].tolist()
            self.rows.update(zip(images, map(_digest_of_row, batch.embeds), strict=True))
        for position, row in zip(batch.pos[batch.want & LOGITS != 0].tolist(), outputs.logits, strict=True):
            digest = hashlib.sha256(np.ascontiguousarray(row, "<f4").tobytes()).hexdigest()[:_DIGITS]
            self.logits.setdefault(position, []).append(digest)
        return outputs

    def cancel(self) -> None:
        self._backend.cancel()

    def close(self) -> None:
        self._backend.close()


class Watcher:
    """A callable to pass to `Engine.open` as `watch`. `backend` is set once the model is open."""

    backend: WatchedBackend

    def __call__(self, backend: Backend) -> Backend:
        """Wrap the backend. Raises UsageError unless the backend is the CPU engine's."""
        from llmrun.backends.cpu.backend import CpuBackend

        if not isinstance(backend, CpuBackend):
            raise UsageError(
                f"only the CPU engine can repeat a run bit for bit, and this model runs on {backend.info.backend}",
                hint="add --backend cpu",
            )
        self.backend = WatchedBackend(backend)
        return self.backend


_LOGITS: Final = 4  # the number of rows of logits to digest
_LIBRARIES: Final = ("numpy", "llvmlite", "numba", "llguidance")  # packages that are not installed are left out
DECODER: Final = "pillow"
ENCODER: Final = "llama-cpp-python"


def record(
    engine: Engine,
    watched: WatchedBackend,
    request: Request,
    tokens: Sequence[int],
    finished: Finished,
    *,
    model: str,
    opening: Opening,
    image_limits: tuple[int | None, int | None] = (None, None),
    reporter: Reporter,
) -> Recording:
    """Return the recording of the engine's only request so far. The engine's cache is empty afterwards.

    Hashing the model's files takes a second for each GB or two, unless llmrun already knows the digests. Raises
    LlmrunError if a file cannot be read, or if an image of the request is not in the prompt.

    image_limits  the settings for the fewest and the most tokens of an image
    """
    n_prompt = finished.timings.prompt_tokens
    prompt = tuple(watched.tokens[position] for position in range(n_prompt))
    logits = {
        index: watched.logits[n_prompt - 1 + index][-1]
        for index in _spread([index for index in range(len(tokens) + 1) if n_prompt - 1 + index in watched.logits])
    }
    images = _recorded_images(watched, request, prompt)
    projector = None
    if images and watched.vision is not None:
        projector = _recorded_projector(watched.vision.projector, image_limits, reporter)
    libraries = (*_LIBRARIES, DECODER, ENCODER) if images else _LIBRARIES
    engine.forget()
    return Recording(
        numerics=NUMERICS,
        llmrun=__version__,
        model=model,
        files=model_files(Path(engine.info.path), reporter),
        opening=opening,
        prompt_tokens=prompt,
        request=request,
        output=Output(tuple(tokens), str(finished.reason), logits),
        ops=tuple(watched.op_digests(first_tokens(prompt))),
        machine={
            "device": engine.info.device,
            "processor": processor_name(),
            "system": f"{platform.system()} {platform.machine()}",
            **{name: version for name in libraries if (version := installed_version(name))},
        },
        adapters=tuple(_recorded(adapter, reporter) for adapter in engine.info.adapters),
        projector=projector,
        images=images,
    )


def _recorded(adapter: Adapter, reporter: Reporter) -> RecordedAdapter:
    path = Path(adapter.path).absolute()
    return RecordedAdapter(adapter.name, str(path), adapter_digest(path, reporter), adapter.scale)


def _recorded_images(watched: WatchedBackend, request: Request, prompt: Sequence[int]) -> tuple[RecordedImage, ...]:
    """Return the digests of the request's images. Raises LlmrunError if they are not in the prompt."""
    from llmrun.engine.image_rows import PromptImage  # most runs do not need this module

    vision, found = watched.vision, []
    places = iter([position for position, token in enumerate(prompt) if token == IMAGE_ROW])
    for number, image in enumerate(images_of(request.prompt), start=1):
        assert vision is not None, "the model has read images"
        count = PromptImage.of(f"image {number}", image.data, image.detail, vision.projector).layout.rows
        rows = _digest_of_rows(watched.rows[place] for place in islice(places, count))
        if rows not in vision.encoded:
            raise LlmrunError(f"image {number} is not in the prompt, so the run cannot be recorded")
        found.append(RecordedImage(image.sha256, vision.encoded[rows], rows))
    return tuple(found)


def _recorded_projector(
    projector: Projector, limits: tuple[int | None, int | None], reporter: Reporter
) -> RecordedProjector:
    from llmrun.model.vision.projector import ProjectorFile

    assert isinstance(projector, ProjectorFile), "only llmrun's own engine can be recorded"
    path = projector.path.absolute()
    return RecordedProjector(path.name, projector_digest(path, reporter), str(path), *limits)


def adapter_digest(path: Path, reporter: Reporter) -> str:
    """Return the sha256 of an adapter. Raises LlmrunError if the adapter cannot be read."""
    return _file_digest("adapter", path, reporter)


def projector_digest(path: Path, reporter: Reporter) -> str:
    """Return the sha256 of a projector. Raises LlmrunError if the projector cannot be read."""
    return _file_digest("projector", path, reporter)


def _file_digest(kind: str, path: Path, reporter: Reporter) -> str:
    try:
        return known_digest(path) or digest(path, reporter, f"hashing {path.name}")
    except OSError as error:
        raise LlmrunError(f"{kind}: {path}: cannot be read: {error.strerror or error}") from error


def opening_of(engine: Engine, *, chat_template: str | None, thinking_tags: Sequence[str] | None, raw: bool) -> Opening:
    """Describe how the model was opened. `chat_template` is the source of the user's custom template."""
    template = None if raw else template_digest(engine)
    tags = None if thinking_tags is None else tuple(thinking_tags)
    return Opening(engine.info.kv_type, engine.info.context_size, template, chat_template, tags)


def template_digest(engine: Engine) -> str | None:
    """Return the sha256 of the source of the engine's chat template, or None if the engine has no template."""
    template = engine.template
    return None if template is None else hashlib.sha256(template.source.encode()).hexdigest()


def model_files(path: Path, reporter: Reporter) -> tuple[ModelFile, ...]:
    """Return the names and digests of a model's files. Unchanged files are hashed only once.

    Raises LlmrunError if a file cannot be read.
    """
    files = [path.with_name(name) for name in shards_of(path.name)]
    try:
        digests = file_digests(files, reporter, "hashing")
    except OSError as error:
        raise LlmrunError(f"model: {error.filename or path}: cannot be read: {error.strerror or error}") from error
    return tuple(ModelFile(file.name, sha256) for file, sha256 in zip(files, digests, strict=True))


def write_recording(path: Path, recording: Recording) -> None:
    """Write a recording atomically. Only the owner can read the file, which contains the prompt. Raises LlmrunError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    text = json.dumps(recording.as_json(), ensure_ascii=False, allow_nan=False)
    try:
        with writing(path):
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_BINARY | O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
        put_in_place(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _spread(indexes: Sequence[int]) -> list[int]:
    """Return the first, the last and evenly spaced indexes in between, at most _LOGITS in total."""
    if not indexes:
        return []
    places = {round(number * (len(indexes) - 1) / (_LOGITS - 1)) for number in range(_LOGITS)}
    return [indexes[place] for place in sorted(places)]


class Incomparable(LlmrunError):
    """The recorded run cannot be repeated on this machine, because something that affects the answer is different."""


@dataclass(frozen=True, slots=True)
class OtherToken:
    """The first different token, by its index in the answer. A token is None if the answer has ended."""

    index: int
    expected: int | None
    got: int | None


@dataclass(frozen=True, slots=True)
class OtherOp:
    """The first op with a different output, by its index in the plan, and the number of ops."""

    index: int
    count: int
    name: str


@dataclass(frozen=True, slots=True)
class OtherImage:
    """An image that differs, by its index in the prompt.

    pixels  True if its decoded pixels differ, or False if only the encoder's rows differ
    """

    index: int
    pixels: bool


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a replay.

    n_tokens  the number of generated tokens
    images    the images that differ, which explain all differences but those of `op`
    finish    the recorded and the new reason why the answer ended, if the reasons differ
    logits    the index of the first token with different logits, among the recorded logits, or None
    """

    n_tokens: int
    token: OtherToken | None
    finish: tuple[str, str] | None
    logits: int | None
    op: OtherOp | None
    images: tuple[OtherImage, ...] = ()

    @property
    def is_same(self) -> bool:
        return not self.images and all(other is None for other in (self.token, self.finish, self.logits, self.op))

    def as_json(self) -> dict[str, Any]:
        token, op = self.token, self.op
        return {
            "same": self.is_same,
            "tokens": self.n_tokens,
            "first_other_token": token and {"index": token.index, "expected": token.expected, "got": token.got},
            "first_other_logits": self.logits,
            "first_other_op": op and {"index": op.index, "count": op.count, "name": op.name},
            "finish": self.finish and {"expected": self.finish[0], "got": self.finish[1]},
            "other_images": [{"index": each.index, "differs": _PARTS[not each.pixels]} for each in self.images],
        }


_PARTS: Final = ("pixels", "rows")


def check_numerics(recording: Recording) -> None:
    """Raise Incomparable if the run was recorded by another version of the engine's numerics."""
    if recording.numerics != NUMERICS:
        raise Incomparable(
            f"recorded by llmrun {recording.llmrun} with numerics version {recording.numerics}, "
            f"but this llmrun has version {NUMERICS}, which computes different bits",
            hint="replay the run with the version that recorded it",
        )


def check_files(recording: Recording, files: Sequence[ModelFile]) -> None:
    """Raise Incomparable if the contents of a model's files differ from the recorded files. Names are ignored."""
    if len(files) != len(recording.files):
        raise Incomparable(f"the model has {len(files)} files, but the recorded model has {len(recording.files)}")
    for here, there in zip(files, recording.files, strict=True):
        if here.sha256 != there.sha256:
            raise Incomparable(
                f"another model: {here.name} has sha256 {here.sha256[:16]}..., the recorded one {there.sha256[:16]}...",
                hint="name the recorded model: llmrun replay RECORDING MODEL",
            )


def check_adapters(recording: Recording, digest_of: Callable[[Path], str]) -> None:
    """Raise Incomparable if the contents of an adapter's file differ from the recorded file."""
    for adapter in recording.adapters:
        if digest_of(Path(adapter.path)) != adapter.sha256:
            raise Incomparable(
                f"another adapter: {adapter.path} does not have the recorded sha256, {adapter.sha256[:16]}...",
                hint="restore the recorded file at this path",
            )


def check_projector(recording: Recording, sha256: str) -> None:
    """Raise Incomparable if the contents of the projector's file differ from the recorded file."""
    expected = recording.projector
    if expected is not None and expected.sha256 != sha256:
        raise Incomparable(
            f"another projector: it has sha256 {sha256[:16]}..., the recorded one {expected.sha256[:16]}...",
            hint=f"name the recorded projector, {expected.name}, with --mmproj FILE",
        )


def check_template(recording: Recording, engine: Engine) -> None:
    """Raise Incomparable if the chat template differs from the recorded template."""
    expected = recording.opening.template
    if expected is not None and template_digest(engine) != expected:
        raise Incomparable("the chat template differs from the recorded template")


def replay(engine: Engine, watched: WatchedBackend, recording: Recording, beside: Sequence[Request] = ()) -> Result:
    """Repeat a recorded run on an idle engine, and compare. `beside` contains requests that run concurrently.

    Raises Incomparable, and the errors of the engine.
    """
    check_template(recording, engine)
    engine.forget()
    watched.clear()
    ops = watched.op_digests(recording.op_tokens)
    watched.clear()
    tokens, finished = _answer(engine, recording.request, beside)
    expected = recording.output
    other = next(
        (
            OtherToken(index, *pair)
            for index, pair in enumerate(zip_longest(expected.tokens, tokens))
            if pair[0] != pair[1]
        ),
        None,
    )
    finish = str(finished.reason)
    images = _other_images(watched, recording)  # before more prompts run
    return Result(
        n_tokens=len(tokens),
        token=other,
        finish=None if other is not None or finish == expected.finish else (expected.finish, finish),
        logits=_first_other_logits(engine, watched, recording, len(tokens) if other is None else other.index),
        op=_first_other_op(recording, ops),
        images=images,
    )


def _answer(engine: Engine, request: Request, beside: Sequence[Request]) -> tuple[list[int], Finished]:
    """Run a request concurrently with other requests, and return the request's tokens and last event."""
    number = engine.submit(request)
    for other in beside:
        engine.submit(other)
    tokens: list[int] = []
    finished: Finished | None = None
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if event.request_id == number and isinstance(event, TextDelta):
                tokens += event.tokens
            elif event.request_id == number and isinstance(event, Finished):
                finished = event
    if finished is None:
        raise LlmrunError("the engine stopped without finishing the request")
    return tokens, finished


def _first_other_logits(engine: Engine, watched: WatchedBackend, recording: Recording, n_same: int) -> int | None:
    """Return the index of the first recorded token whose logits differ while all tokens are equal, or None.

    Rows of rejected drafts have the same positions, so any row at the position may have the expected digest. Logits
    that the run did not compute, because a token was forced or the prompt was cached, are computed in this function.
    """
    for index, expected in sorted(recording.output.logits.items()):
        if index > n_same:
            break
        position = len(recording.prompt_tokens) - 1 + index
        if position not in watched.logits:
            _answer(engine, Request(_prompt_until(recording, index), max_tokens=1), ())
        if expected not in watched.logits[position]:
            return index
    return None


def _prompt_until(recording: Recording, index: int) -> TokenPrompt | RecordedChat:
    """Return the recorded prompt, followed by the tokens of the answer before an index."""
    prompt, tokens = recording.request.prompt, [*recording.prompt_tokens, *recording.output.tokens[:index]]
    if isinstance(prompt, TokenPrompt | RecordedChat) and prompt.images:
        return structs.replace(prompt, tokens=tokens)
    return TokenPrompt(tokens)


def _other_images(watched: WatchedBackend, recording: Recording) -> tuple[OtherImage, ...]:
    """Return the recorded images that were not decoded to the same pixels, or not encoded to the same rows."""
    encoded = {} if watched.vision is None else watched.vision.encoded
    return tuple(
        OtherImage(index, pixels=image.pixels not in encoded.values())
        for index, image in enumerate(recording.images)
        if encoded.get(image.rows) != image.pixels
    )


def _first_other_op(recording: Recording, ops: Sequence[tuple[str, str]]) -> OtherOp | None:
    for index, (here, there) in enumerate(zip_longest(ops, recording.ops)):
        if here != there:
            return OtherOp(index, len(ops), (here or there)[0])
    return None
