"""Runs one request, which includes streaming the answer, handling Ctrl-C and printing the statistics."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from llmrun.base.amounts import counted as in_words
from llmrun.base.ending_signals import TERMINATING
from llmrun.base.errors import LlmrunError
from llmrun.base.types import FinishReason
from llmrun.cli.answers.collected import CollectedAnswer
from llmrun.cli.answers.formatted import check_format
from llmrun.cli.answers.report import (
    AnsweredRequest,
    completion_body,
    logprob_fields,
    show_statistics,
    waiting_words,
)
from llmrun.cli.answers.thinking import CertainAnswer, ThinkingView
from llmrun.cli.console.control_echo import discard_typed_input, keep_output_at_ctrl_c
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.engine.requests import Finished, PrefillProgress, Request, TextDelta

if TYPE_CHECKING:
    from llmrun.engine.base import Answering


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
    have the request's format.
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
    logprobs = tuple(collected.logprobs)
    text, thoughts, tokens = collected.text, collected.reasoning, tuple(collected.tokens)
    done = AnsweredRequest(model, engine.info, request, text, logprobs, finished, thoughts, tokens)
    if as_json:
        out.json(completion_body(done))
    else:
        out.end_answer()
        for token in logprobs:
            out.fields(logprob_fields(token))
    _explain_length(done, as_json=as_json)
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


def _explain_length(done: AnsweredRequest, *, as_json: bool) -> None:
    """Print a note if the answer was truncated. The user's own token limit is mentioned only on a terminal."""
    asked = done.request.max_tokens
    cut = done.finished.reason is FinishReason.LENGTH
    timings = done.finished.timings
    # Without a token count from the server, the number of chunks is used, and a chunk may hold several tokens.
    counted = timings.prompt_tokens > 0
    if cut and done.reasoning and not done.text:
        advice = "" if done.info.backend == "remote" else " (--think-budget N limits the thinking)"
        out.note(f"the answer was cut off while the model was thinking{advice}")
    if not cut:
        return
    if asked is not None and (timings.generated_tokens >= asked or not counted):
        if is_terminal(sys.stderr) and not as_json:
            out.note(f"the answer was cut off after {in_words(asked, 'token')} (--max-tokens sets the limit)")
        return
    if not done.info.context_size:
        out.note(f"the answer was cut off by {done.info.device}: its context or its token limit may be exhausted")
    else:
        out.note(
            f"the answer was cut off: the context of {done.info.context_size} tokens is full (--ctx-size sets its size)"
        )


@contextmanager
def cancelling(cancel: Callable[[], None]) -> Iterator[list[int]]:
    """Make Ctrl-C and SIGTERM call `cancel` instead of ending the process. A second signal ends it immediately.

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
