"""Records a run, and repeats a recorded run to compare every token, the recorded logits and the ops of one step.

A run is recorded by a backend that passes every call on to the CPU engine and stores digests of the logits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llmrun import __version__
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import O_BINARY, O_NOFOLLOW
from llmrun.base.machine.processor import processor_name
from llmrun.base.machine.system import installed_version
from llmrun.base.types import LOGITS
from llmrun.engine.requests import Failed, Finished, Request, TextDelta, TokenPrompt
from llmrun.formats.layouts.records import NUMERICS
from llmrun.hub.local.model_records import known_digest
from llmrun.hub.local.safe_writes import digest, put_in_place, writing
from llmrun.hub.names import shards_of
from llmrun.hub.upkeep.model_copies import file_digests
from llmrun.jobs.recording import ModelFile, Opening, Output, RecordedAdapter, Recording, first_tokens

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, DraftHead, KVCache, Vision
    from llmrun.backends.cpu.backend import CpuBackend
    from llmrun.base.types import Adapter, Batch, ModelInfo, Outputs
    from llmrun.engine.engine import Engine
    from llmrun.hub.progress_reporter import Reporter
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

_DIGITS = 16  # hexadecimal digits of a digest


class WatchedBackend:
    """A wrapper around the CPU engine's backend, which records tokens and digests of logits.

    Hashing the logits of a step takes 0.1 ms for 49,152 tokens.

    tokens  the most recent token that was run at each position
    logits  the digests of all logits computed at each position, oldest first, including the rows of rejected drafts
    """

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        self.clear()

    def clear(self) -> None:
        """Forget all tokens and digests."""
        self.tokens: dict[int, int] = {}
        self.logits: dict[int, list[str]] = {}

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
    def vision(self) -> Vision | None:
        return self._backend.vision

    @property
    def tokenizer(self) -> Tokenizer:
        return self._backend.tokenizer

    @property
    def kv(self) -> KVCache:
        return self._backend.kv

    def forward(self, batch: Batch) -> Outputs:
        outputs = self._backend.forward(batch)
        self.tokens.update(zip(batch.pos.tolist(), batch.tokens.tolist(), strict=True))
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


def record(
    engine: Engine,
    watched: WatchedBackend,
    request: Request,
    tokens: Sequence[int],
    finished: Finished,
    *,
    model: str,
    opening: Opening,
    reporter: Reporter,
) -> Recording:
    """Return the recording of the engine's only request so far. The engine's cache is empty afterwards.

    Hashing the model's files takes a second for each GB or two, unless llmrun already knows the digests. Raises
    LlmrunError if a file cannot be read.
    """
    n_prompt = finished.timings.prompt_tokens
    prompt = tuple(watched.tokens[position] for position in range(n_prompt))
    logits = {
        index: watched.logits[n_prompt - 1 + index][-1]
        for index in _spread([index for index in range(len(tokens) + 1) if n_prompt - 1 + index in watched.logits])
    }
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
            **{name: version for name in _LIBRARIES if (version := installed_version(name))},
        },
        adapters=tuple(_recorded(adapter, reporter) for adapter in engine.info.adapters),
    )


def _recorded(adapter: Adapter, reporter: Reporter) -> RecordedAdapter:
    path = Path(adapter.path).absolute()
    return RecordedAdapter(adapter.name, str(path), adapter_digest(path, reporter), adapter.scale)


def adapter_digest(path: Path, reporter: Reporter) -> str:
    """Return the sha256 of an adapter. Raises LlmrunError if the adapter cannot be read."""
    try:
        return known_digest(path) or digest(path, reporter, f"hashing {path.name}")
    except OSError as error:
        raise LlmrunError(f"adapter: {path}: cannot be read: {error.strerror or error}") from error


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
class Result:
    """The result of a replay.

    n_tokens  the number of generated tokens
    finish    the recorded and the new reason why the answer ended, if the reasons differ
    logits    the index of the first token with different logits, among the recorded logits, or None
    """

    n_tokens: int
    token: OtherToken | None
    finish: tuple[str, str] | None
    logits: int | None
    op: OtherOp | None

    @property
    def is_same(self) -> bool:
        return all(other is None for other in (self.token, self.finish, self.logits, self.op))

    def as_json(self) -> dict[str, Any]:
        token, op = self.token, self.op
        return {
            "same": self.is_same,
            "tokens": self.n_tokens,
            "first_other_token": token and {"index": token.index, "expected": token.expected, "got": token.got},
            "first_other_logits": self.logits,
            "first_other_op": op and {"index": op.index, "count": op.count, "name": op.name},
            "finish": self.finish and {"expected": self.finish[0], "got": self.finish[1]},
        }


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
    return Result(
        n_tokens=len(tokens),
        token=other,
        finish=None if other is not None or finish == expected.finish else (expected.finish, finish),
        logits=_first_other_logits(engine, watched, recording, len(tokens) if other is None else other.index),
        op=_first_other_op(recording, ops),
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
    prompt, tokens = recording.prompt_tokens, recording.output.tokens
    for index, expected in sorted(recording.output.logits.items()):
        if index > n_same:
            break
        position = len(prompt) - 1 + index
        if position not in watched.logits:
            _answer(engine, Request(TokenPrompt([*prompt, *tokens[:index]]), max_tokens=1), ())
        if expected not in watched.logits[position]:
            return index
    return None


def _first_other_op(recording: Recording, ops: Sequence[tuple[str, str]]) -> OtherOp | None:
    for index, (here, there) in enumerate(zip_longest(ops, recording.ops)):
        if here != there:
            return OtherOp(index, len(ops), (here or there)[0])
    return None
