"""Runs one request: chooses its seed, streams the answer, checks its format, handles Ctrl-C and prints statistics."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from msgspec import structs

from llmrun.base.errors import InvalidAnswer, LlmrunError
from llmrun.base.processes.commands import TERMINATING
from llmrun.base.types import FinishReason
from llmrun.cli.answers.report import (
    AnsweredRequest,
    completion_body,
    explain_length,
    logprob_fields,
    show_statistics,
    waiting_words,
)
from llmrun.cli.answers.thinking import CertainAnswer, ThinkingView
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import discard_typed_input, is_terminal, keep_output_at_ctrl_c
from llmrun.engine.requests import Finished, PrefillProgress, Request, TextDelta, TokenLogprobs, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from llmrun.engine.base import Answering
    from llmrun.options.settings import Settings


_RANDOM_SEEDS = 1_000_000  # the seeds are short enough to retype, yet repeats are rare among a thousand samples


def sent_sampling(engine: Answering, settings: Settings) -> frozenset[str] | None:
    """Return the names of the sampling parameters to send to the server, or None for local models.

    Only parameters that the user has set are sent (with a flag, in the environment, in config.toml or in a
    conversation). The server chooses the other parameters, because it may have the best defaults for its model, and
    because some OpenAI models reject every temperature.
    """
    if not is_remote(engine):
        return None
    return frozenset(settings.sampling) | ({"seed"} if settings.seed is not None else set())


def next_seed(engine: Answering, settings: Settings) -> int | None:
    """Return the user's seed, or a random seed by default. Return None if the server chooses the seed."""
    if settings.seed is not None or is_remote(engine):
        return settings.seed
    return secrets.randbelow(_RANDOM_SEEDS)


def is_remote(engine: Answering) -> bool:
    """Return whether the model runs on a server."""
    return engine.info.backend == "remote"


@dataclass(slots=True)
class CollectedAnswer:
    """The text, thinking, log probabilities and token ids of an answer so far."""

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def take(self, delta: TextDelta) -> None:
        """Add the next piece of the answer."""
        if delta.unopened:
            self.thoughts += self.pieces
            self.pieces = []
        self.thoughts.append(delta.reasoning)
        self.pieces.append(delta.text)
        self.logprobs += delta.logprobs
        self.tokens += delta.tokens

    def answered(self, engine: Answering, model: str, request: Request, finished: Finished) -> AnsweredRequest:
        """Return the finished request with its answer. `model` is the display name."""
        text, thoughts = "".join(self.pieces), "".join(self.thoughts)
        return AnsweredRequest(
            model, engine.info, request, text, tuple(self.logprobs), finished, thoughts, tuple(self.tokens)
        )


@dataclass(slots=True)
class CollectedCalls:
    """The tool calls of an answer so far.

    Some servers give several calls the same index, and some repeat the id and the name in every piece. Therefore, only
    a piece with both a name and a different id begins a new call. A new id alone does not begin a new call, because
    some servers send a new id with every piece.

    problem  the reason why the most recently dropped call is invalid, or "" if no call was dropped
    """

    problem: str = ""
    _calls: dict[tuple[int, int], ToolCall] = field(default_factory=dict)  # keyed by index and occurrence
    _counts: dict[int, int] = field(default_factory=dict)  # the number of earlier calls with the same index

    def take(self, deltas: Iterable[ToolCallDelta]) -> None:
        """Add the next pieces of tool calls. Calls with a problem are dropped."""
        for delta in deltas:
            self.problem = delta.problem or self.problem
            key = delta.index, self._counts.get(delta.index, 0)
            before = self._calls.get(key, ToolCall("", "", ""))
            if before.id and before.name and delta.id not in ("", before.id) and delta.name:
                self._counts[delta.index] = key[1] + 1
                key, before = (delta.index, key[1] + 1), ToolCall("", "", "")
            if delta.problem:
                self._calls.pop(key, None)
            else:
                name = before.name if delta.name == before.name else before.name + delta.name
                self._calls[key] = ToolCall(before.id or delta.id, name, before.arguments + delta.arguments)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that have a name, in the order in which they began.

        Calls with missing or repeated ids receive new ids, because every result needs the id of its call.
        """
        ordered = [call for call in self._calls.values() if call.name]
        known = {""}
        numbers = itertools.count()
        for place, call in enumerate(ordered):
            if call.id in known:
                unused = next(name for name in (f"call_{number}" for number in numbers) if name not in known)
                ordered[place] = structs.replace(call, id=unused)
            known.add(ordered[place].id)
        return ordered


def check_format(done: AnsweredRequest) -> None:
    """Raise InvalidAnswer if an answer is truncated or otherwise does not match the requested format.

    Print a note if the answer could not be validated. Answers that the user cancelled are not checked.
    """
    wanted, finished = done.request.response_format, done.finished
    if wanted is None or finished.reason is FinishReason.CANCELLED:
        return
    if finished.reason is FinishReason.LENGTH:
        raise InvalidAnswer(
            f"the answer is incomplete: it was cut off after {finished.timings.generated_tokens} tokens, "
            f"before it matched {wanted.origin}",
            hint="raise --max-tokens or --ctx-size, or let the format limit the length of its parts",
        )
    if finished.stop is not None:
        raise InvalidAnswer(f"the answer is incomplete: a stop string cut it off before it matched {wanted.origin}")
    if wanted.schema is None:
        return
    from llmrun.engine.constraint.process import validate

    verdict = validate(done.text, wanted.schema)
    if verdict.kind == "invalid":
        raise InvalidAnswer(f"the answer does not match {wanted.origin}: {verdict.reason}")
    if verdict.kind == "not validated":
        out.note(f"the answer was not validated: {verdict.reason}")


def answer(
    engine: Answering,
    request: Request,
    *,
    model: str,
    as_json: bool,
    hide_thinking: bool = False,
    stream: bool = True,
    log: Callable[[AnsweredRequest], None] | None = None,
) -> int:
    """Run a request, print the answer and its statistics, call `log` if it is given, and return the exit code.

    If `stream` is false, the answer is printed when it is complete. Ctrl-C or SIGTERM stops the answer. The text
    generated so far is still printed, with the usual statistics. Raises LlmrunError at the end if the answer does not
    match the requested format.
    """
    collected = CollectedAnswer()
    thinking = ThinkingView(hidden=hide_thinking or as_json, stream=stream)
    finished: Finished | None = None
    certain = CertainAnswer(stream=stream)
    with cancelling(engine.cancel_current) as signals, _rest_written(certain, thinking, as_json=as_json):
        for event in engine.generate(request):
            if isinstance(event, PrefillProgress):
                out.progress(waiting_words(event))
            elif isinstance(event, TextDelta):
                collected.take(event)
                if event.unopened:
                    if held := certain.rest():
                        thinking.text(held)
                    elif not as_json:
                        out.answer_was_thinking()
                if event.reasoning:
                    thinking.text(event.reasoning)
                if not as_json:
                    out.answer(certain.passed(event))
            elif isinstance(event, Finished):
                finished = event
    if finished is None:
        raise LlmrunError("the engine stopped without finishing the request")
    done = collected.answered(engine, model, request, finished)
    if as_json:
        out.json(completion_body(done))
    else:
        out.end_answer()
        for token in done.logprobs:
            out.fields(logprob_fields(token))
    explain_length(
        done,
        thinking="--think-budget N limits the thinking",
        limit="--max-tokens sets the limit" if is_terminal(sys.stderr) and not as_json else "",
        context="--ctx-size sets its size",
    )
    show_statistics(done)
    if log is not None:
        log(done)
    check_format(done)
    return 128 + signals[0] if signals else 0


@contextmanager
def _rest_written(certain: CertainAnswer, thinking: ThinkingView, *, as_json: bool) -> Iterator[None]:
    """Flush the buffered text on every exit path."""
    try:
        yield
    finally:
        thinking.end()
        if not as_json:
            out.answer(certain.rest())


@contextmanager
def cancelling(cancel: Callable[[], None]) -> Iterator[list[int]]:
    """On the first Ctrl-C or SIGTERM, call `cancel` instead of ending the process. A second signal ends the process.

    Yields the list of signals received. Signals that were already ignored (because of `nohup`, or `&` in a
    script) stay ignored.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        restore_terminal()  # a second signal ends the process without cleaning up
        if number == signal.SIGINT:
            discard_typed_input()
        cancel()

    heeded = [number for number in (signal.SIGINT, *TERMINATING) if signal.getsignal(number) != signal.SIG_IGN]
    restore_terminal = keep_output_at_ctrl_c()
    before = {number: signal.signal(number, on_signal) for number in heeded}
    try:
        yield received
    finally:
        restore_terminal()
        for number, handler in before.items():
            signal.signal(number, handler)
