"""Chooses which turns of a conversation go into the prompt, and leaves out the oldest ones if necessary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmrun.base.errors import ContextExceeded
from llmrun.cli.chatting.context.left_out import turns_to_leave_out
from llmrun.cli.chatting.preferences import FORGET, ON_FULL
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.cli.chatting.context.prompting import Prompting
    from llmrun.cli.chatting.conversation import Conversation
    from llmrun.engine.base import Answering
    from llmrun.engine.requests import ChatPrompt, Request

UNDO_OR_CLEAR = "/undo removes the last turn, /clear starts over"
FORGET_HINT = f"/set {ON_FULL} {FORGET} continues without the oldest turns"


@dataclass(slots=True)
class PromptWindow:
    """The turns of a conversation that are part of the prompt.

    prompting  turns messages into a prompt
    left_out   how many of the oldest turns are left out. This number grows in large steps, because each step changes
               the beginning of the prompt and forces a new prefill
    """

    prompting: Prompting
    left_out: int = 0

    def prompt(self, conversation: Conversation, first: int = 0) -> ChatPrompt:
        """Return the prompt, starting at the turn with index `first`. The system prompt is always included."""
        return self.prompting.prompt(conversation.messages_from(first))

    def fitted(self, engine: Answering, conversation: Conversation, request: Request) -> Request:
        """Return the request without the oldest turns that do not fit in the context.

        If not even the question fits, no more turns are left out, and the engine will refuse the request.
        """
        turns, size = len(conversation.exchanges), engine.info.context_size
        count = min(self.left_out, turns - 1)
        alone = self._tokens(engine, conversation, request, turns - 1)
        if alone is not None and alone < size:
            count = turns_to_leave_out(
                turns,
                self.left_out,
                lambda first: self._tokens(engine, conversation, request, first) or 0,
                context=size,
                max_tokens=request.max_tokens,
            )
        return self._without(count, conversation, request)

    def fitted_better(self, engine: Answering, conversation: Conversation, request: Request) -> Request | None:
        """Return the request with half of its turns. Call this after a server has reported that its context is full.

        Returns None if no more turns can be left out, or if tokens are counted locally, because `fitted` has then
        already removed enough turns.
        """
        last = len(conversation.exchanges) - 1
        if self.left_out >= last or self._tokens(engine, conversation, request, last) is not None:
            return None
        return self._without((self.left_out + last + 1) // 2, conversation, request)

    def refusal(
        self, engine: Answering, conversation: Conversation, request: Request, error: ContextExceeded
    ) -> ContextExceeded:
        """Return the error to raise if a question does not fit, with a hint on what to do."""
        info, before = engine.info, len(conversation.exchanges) - 1
        alone = self._tokens(engine, conversation, request, before)
        too_long = alone is not None and alone >= info.context_size > 0
        sentence = str(error)
        called = bool(conversation.exchanges[-1].rounds)
        if too_long:
            what = "the question and the results of its tool calls do" if called else "the question alone does"
            sentence = (
                f"{what} not fit in the context: {alone:,} tokens plus one for the answer "
                f"exceed the limit of {info.context_size:,}"
            )
        shorter = "/undo removes them" if called else "shorten the question"
        hint = shorter if too_long or not before else f"{FORGET_HINT}; {UNDO_OR_CLEAR}"
        if info.context_size < info.train_context:
            hint += f"; llmrun chat --continue --ctx-size N gives it more room (trained for {info.train_context:,})"
        return ContextExceeded(sentence, hint=hint)

    def _tokens(self, engine: Answering, conversation: Conversation, request: Request, first: int) -> int | None:
        """Count the tokens of the prompt that starts at turn `first`. Returns None if only a server can count them."""
        return engine.prompt_tokens(replace(request, prompt=self.prompt(conversation, first)))

    def _without(self, count: int, conversation: Conversation, request: Request) -> Request:
        """Leave out the `count` oldest turns from now on. Print a note if this is more than before."""
        if count > self.left_out:
            before = len(conversation.exchanges) - 1
            turns = "turn" if count == 1 else "turns"
            out.note(
                f"the context is full: the model no longer sees the oldest {count} {turns} (of {before}); "
                "they stay in the saved conversation"
            )
        self.left_out = count
        return replace(request, prompt=self.prompt(conversation, count))
