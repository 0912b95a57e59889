"""Explains why an answer was cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.base.types import FinishReason
from llmrun.cli.chatting.context.prompt_window import FORGET_HINT, UNDO_OR_CLEAR
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.cli.chatting.conversation import Exchange
    from llmrun.engine.base import Answering
    from llmrun.engine.requests import Finished, Request


def explain_length(request: Request, finished: Finished, last: Exchange, engine: Answering, *, forgets: bool) -> None:
    """Print a note that says why the answer was cut off.

    last     the question with its answer
    forgets  whether the next prompt will leave out the oldest turns if the context is full
    """
    if finished.reason is not FinishReason.LENGTH:
        return
    if last.thoughts and not last.answer:
        advice = ": /set think_budget limits its thinking" if engine.thinking else ""
        out.note(f"the answer was cut while the model was thinking{advice}")
    generated = finished.timings.generated_tokens
    # Without a token count from the server, the number of chunks is used, and a chunk may hold several tokens.
    counted = finished.timings.prompt_tokens > 0
    if request.max_tokens is not None and (generated >= request.max_tokens or not counted):
        out.note(f"the answer was cut after {generated} tokens: /set max_tokens changes the limit")
    elif not (size := engine.info.context_size):
        out.note(f"the answer was cut by {engine.info.device}, whose context may be full: {UNDO_OR_CLEAR}")
    else:
        advice = "the next prompt will leave out the oldest turns" if forgets else FORGET_HINT
        out.note(f"the answer was cut because the context of {size:,} tokens is full: {advice}; {UNDO_OR_CLEAR}")
