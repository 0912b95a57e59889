"""Counts the tokens that a conversation takes up in the context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmrun.base.errors import TemplateRefused, UsageError
from llmrun.engine.requests import Request

if TYPE_CHECKING:
    from llmrun.cli.chatting.context.prompting import Prompting
    from llmrun.cli.chatting.conversation import Conversation
    from llmrun.engine.base import Answering


@dataclass(slots=True)
class ContextUsed:
    """Counts a conversation's tokens and caches the last count.

    prompting  turns messages into a prompt
    """

    prompting: Prompting
    _counted: tuple[object, int | None] | None = field(default=None, init=False)  # the cache key and the token count

    def tokens(self, engine: Answering, conversation: Conversation) -> int | None:
        """Return the number of tokens that a conversation takes up, or None if only the next answer will report it.

        The count is normally recorded at the end of each answer. If the process died during the last answer, or if the
        model has changed since then, this method renders the conversation and counts the tokens, but only once.
        """
        if conversation.is_counted:
            return conversation.context_used
        # Lengths and ids are not enough: tool calls, results and a change of the model add no exchange.
        counted_for = (conversation.model, conversation.unanswered, conversation.all_messages)
        if self._counted is None or self._counted[0] != counted_for:
            self._counted = counted_for, self._count(engine, conversation)
        return self._counted[1]

    def _count(self, engine: Answering, conversation: Conversation) -> int | None:
        messages = conversation.all_messages
        if conversation.unanswered is not None:
            messages = messages[:-1]
        prompt = self.prompting.prompt(messages, add_generation_prompt=False)
        try:
            return engine.prompt_tokens(Request(prompt=prompt))
        except (TemplateRefused, UsageError):  # some templates refuse answers at the end, others refuse tool calls
            return None
