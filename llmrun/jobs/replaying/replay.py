"""Runs a recording again and compares every token, the recorded logits and the ops of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import LlmrunError
from llmrun.engine.requests import Failed, Finished, Request, TextDelta, TokenPrompt
from llmrun.formats.layouts.numerics import NUMERICS
from llmrun.jobs.replaying.recorder import template_digest

if TYPE_CHECKING:
    from llmrun.engine.engine import Engine
    from llmrun.jobs.replaying.recording import ModelFile, Recording
    from llmrun.jobs.replaying.watching import WatchedBackend


class Incomparable(LlmrunError):
    """The recorded run cannot be repeated here, because something that decides its answer is different."""


@dataclass(frozen=True, slots=True)
class OtherToken:
    """The first token that differs, by its index in the answer. A token is None if the answer has ended."""

    index: int
    expected: int | None
    got: int | None


@dataclass(frozen=True, slots=True)
class OtherOp:
    """The first op whose output differs, by its index in the plan, and the number of ops."""

    index: int
    count: int
    name: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a replay.

    n_tokens  number of generated tokens
    finish    (recorded, new) reasons why the answer ended, if they differ
    logits    the index of the first token whose logits differ, among the recorded ones, or None
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
    """Raise Incomparable if another version of the engine's numerics recorded the run."""
    if recording.numerics != NUMERICS:
        raise Incomparable(
            f"recorded by llmrun {recording.llmrun} with numerics version {recording.numerics}, "
            f"but this llmrun has version {NUMERICS}, which computes different bits",
            hint="replay it with the version that recorded it",
        )


def check_files(recording: Recording, files: Sequence[ModelFile]) -> None:
    """Raise Incomparable if a model's files have other contents than the recorded ones. Names do not matter."""
    if len(files) != len(recording.files):
        raise Incomparable(f"the model has {len(files)} files, but the recorded one has {len(recording.files)}")
    for here, there in zip(files, recording.files, strict=True):
        if here.sha256 != there.sha256:
            raise Incomparable(
                f"another model: {here.name} has sha256 {here.sha256[:16]}..., the recorded one {there.sha256[:16]}...",
                hint="name the recorded model: llmrun replay RECORDING MODEL",
            )


def check_adapters(recording: Recording, digest_of: Callable[[Path], str]) -> None:
    """Raise Incomparable if an adapter's file has other contents than the recorded one."""
    for adapter in recording.adapters:
        if digest_of(Path(adapter.path)) != adapter.sha256:
            raise Incomparable(
                f"another adapter: {adapter.path} does not have the recorded sha256, {adapter.sha256[:16]}...",
                hint="put the recorded file there",
            )


def check_template(recording: Recording, engine: Engine) -> None:
    """Raise Incomparable if the chat template differs from the recorded one."""
    expected = recording.opening.template
    if expected is not None and template_digest(engine) != expected:
        raise Incomparable("the chat template differs from the recorded one")


def replay(engine: Engine, watched: WatchedBackend, recording: Recording, beside: Sequence[Request] = ()) -> Result:
    """Run a recording on an engine that runs no other requests, and compare. `beside` are requests to run with it.

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
    """Run a request, with others beside it, and return its tokens and its last event."""
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
    """Return the index of the first recorded token whose logits differ, before tokens differ, or None.

    Rows of wrong drafts are at the same positions, so any row at the position may have the expected digest. Logits that
    the run did not need, because a token was forced or the prompt was cached, are computed now.
    """
    prompt, tokens = recording.prompt_tokens, recording.output.tokens
    for index, digest in sorted(recording.output.logits.items()):
        if index > n_same:
            break
        position = len(prompt) - 1 + index
        if position not in watched.logits:
            _answer(engine, Request(TokenPrompt([*prompt, *tokens[:index]]), max_tokens=1), ())
        if digest not in watched.logits[position]:
            return index
    return None


def _first_other_op(recording: Recording, ops: Sequence[tuple[str, str]]) -> OtherOp | None:
    for index, (here, there) in enumerate(zip_longest(ops, recording.ops)):
        if here != there:
            return OtherOp(index, len(ops), (here or there)[0])
    return None
