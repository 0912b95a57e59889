"""Converts the bodies of Anthropic's /v1/messages into requests for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import ChatPrompt, Request
from llmrun.serving.protocol.anthropic.messages import read_conversation
from llmrun.serving.protocol.anthropic.thinking import Thinking, read_format, read_thinking
from llmrun.serving.protocol.anthropic.tools import read_tools
from llmrun.serving.protocol.errors import unsupported
from llmrun.serving.protocol.fields import Fields, missing, seen
from llmrun.serving.protocol.openai.options import read_stop, refuse_values, require_chats
from llmrun.serving.protocol.openai.sampling import read_sampling, read_seed
from llmrun.serving.protocol.openai.tools import ToolOptions
from llmrun.serving.protocol.parsed import Parsed

# Unsupported fields that would change the answer -> the values that are accepted, and advice
REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "container": ((), "run the model's tools in the client"),
    "mcp_servers": (([],), "connect the client to them, and send their tools"),
    "fallbacks": (([],), ""),
    "thread": ((), "send all messages"),
    "compaction": ((), "summarize the conversation in the client"),
}
# Values that ask for nothing special, so they do not count as ignored
_USUAL: Final[Mapping[str, tuple[str, ...]]] = {"service_tier": ("auto", "standard_only"), "speed": ("standard",)}
# It has no effect: the model's template decides whether past thinking is in the prompt.
KNOWN_EDIT: Final = "clear_thinking_20251015"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage(Parsed):
    """The request for one message.

    seed            the seed of the answer
    shows_thinking  whether the answer has the text of the thinking
    """

    seed: int
    shows_thinking: bool

    @property
    def request(self) -> Request:
        return self.requests[0]


@dataclass(frozen=True, slots=True)
class _Question:
    """The part that /v1/messages and /v1/messages/count_tokens have in common."""

    prompt: ChatPrompt
    tools: ToolOptions
    thinking: Thinking
    config: Fields
    ignored: tuple[str, ...]

    @property
    def request(self) -> Request:
        """The request without its options."""
        options = self.thinking.options
        return Request(self.prompt, think=options.think, think_budget=options.budget)


def parse_message(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedMessage:
    """Convert the body of /v1/messages. Raises InvalidField.

    seed  the seed if the body has none
    """
    fields = Fields(body)
    question = _read_question(fields, facts)
    max_tokens = fields.integer("max_tokens", 1)
    if max_tokens is None:
        raise missing("max_tokens")
    wanted = read_format(fields, question.config)
    if wanted is not None and question.tools.may_be_called:
        raise unsupported(wanted.origin, "cannot be combined with tools", hint='set tool_choice to {"type": "none"}')
    seed = read_seed(fields, seed)
    request = replace(
        question.request,
        max_tokens=max_tokens,
        stop=read_stop(fields, "stop_sequences"),
        sampling=replace(read_sampling(fields, facts), seed=seed),
        response_format=wanted,
    )
    stream = bool(fields.boolean("stream"))
    return ParsedMessage(
        requests=(request,),
        stream=stream,
        ignored=(*question.ignored, *fields.unread()),
        seed=seed,
        shows_thinking=question.thinking.shown,
    )


def parse_count(body: dict[str, Any], facts: ModelFacts) -> Parsed:
    """Convert the body of /v1/messages/count_tokens into a request whose prompt is counted. Raises InvalidField."""
    fields = Fields(body)
    question = _read_question(fields, facts)
    read_format(fields, question.config)  # checked only; the format is not part of the prompt
    return Parsed(requests=(question.request,), stream=False, ignored=(*question.ignored, *fields.unread()))


def _read_question(fields: Fields, facts: ModelFacts) -> _Question:
    if not fields.text("model"):
        raise missing("model")
    require_chats(facts)
    _read_extras(fields)
    conversation = read_conversation(fields)
    tools = read_tools(fields, facts)
    if conversation.continues and tools.may_be_called:
        hint = 'end with a message of the role "user", or set tool_choice to {"type": "none"}'
        raise unsupported("messages", "an answer cannot be continued with tools", hint=hint)
    config = fields.fields("output_config") or Fields({}, "output_config")
    thinking = read_thinking(fields, config, facts)
    prompt = ChatPrompt(
        conversation.messages,
        tools.tools,
        tools.choice,
        tools.parallel,
        not conversation.continues,
        thinking.options.variables,
    )
    return _Question(prompt, tools, thinking, config, (*conversation.ignored, *thinking.options.without_effect))


def _read_extras(fields: Fields) -> None:
    """Read the fields that do not change the answer, and refuse unsupported ones that would."""
    refuse_values(fields, REFUSED)
    metadata = fields.fields("metadata")
    if metadata is not None:
        metadata.text("user_id")
    fields.object("cache_control")  # prefixes are cached anyway
    for name, values in _USUAL.items():
        if fields.peek(name) in values:
            fields.value(name)
    management = fields.fields("context_management")
    for edit in (management.item_fields("edits") if management is not None else None) or ():
        if (kind := edit.text("type")) != KNOWN_EDIT:
            words = f"only {KNOWN_EDIT} is supported, got {seen(kind)}"
            raise unsupported(edit.path("type"), words, hint="shorten the conversation in the client")
        if edit.peek("keep") == "all":
            edit.value("keep")
