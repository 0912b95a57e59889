"""Converts the bodies of chat completions and completions into requests for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmrun.engine.requests import ChatPrompt, FillPrompt, ModelFacts, Request, TextPrompt
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields
from llmrun.serving.protocol.openai.messages import ToolOptions, read_messages, read_prompts, read_tools
from llmrun.serving.protocol.openai.options import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    Options,
    ThinkingOptions,
    choice_seed,
    read_format,
    read_options,
    read_thinking,
    refuse_values,
    require_chats,
)
from llmrun.serving.protocol.parsed import Parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion(Parsed):
    """The requests of one chat completion or completion, in the order of their prompts.

    n       the number of choices for each prompt
    seed    the seed of the first choice of each prompt
    echoed  the text that precedes the answers to each prompt, or () if the answers do not repeat prompts
    """

    n: int
    include_usage: bool
    echoed: tuple[str, ...] = ()


def parse_chat(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of a chat completion. `seed` is the default seed. Raises InvalidField."""
    fields = Fields(body)
    options = read_options(fields, facts, seed)
    require_chats(facts)
    refuse_values(fields, REFUSED_IN_CHATS)
    messages = read_messages(fields)
    tools = read_tools(fields, facts)
    thinking = read_thinking(fields, facts)
    options = replace(options, response_format=read_format(fields), logprobs=read_chat_logprobs(fields))
    request = chat_request(messages, tools, thinking, options, continues=_continues(fields, messages, tools))
    return parsed_completion([request], options, (*thinking.without_effect, *fields.unread()))


def chat_request(
    messages: Sequence[Mapping[str, Any]],
    tools: ToolOptions,
    thinking: ThinkingOptions,
    options: Options,
    *,
    continues: bool = False,
) -> Request:
    """Return the request for one choice of a chat. Raises InvalidField if a format is combined with tools.

    continues  True if the model should continue the last message
    """
    wanted = options.response_format
    if wanted is not None and tools.may_be_called:
        raise unsupported(wanted.origin, "cannot be combined with tools", hint='set tool_choice to "none"')
    prompt = ChatPrompt(messages, tools.tools, tools.choice, tools.parallel, not continues, thinking.variables)
    return options.request(prompt, thinking)


def parse_completion(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of a completion. Raises InvalidField and ContextExceeded.

    `seed` is the default seed.
    """
    fields = Fields(body)
    options = read_options(fields, facts, seed)
    refuse_values(fields, REFUSED_IN_COMPLETIONS)
    prompts = read_prompts(fields, facts)
    if len(prompts) * options.n > MOST_CHOICES:
        raise InvalidField("prompt", f"{len(prompts):,} prompts with n={options.n} exceed {MOST_CHOICES} choices")
    best_of = fields.integer("best_of", 1, MOST_CHOICES)
    if best_of not in (None, options.n):
        raise unsupported("best_of", "supported only if it equals n")
    logprobs = fields.integer("logprobs", 0, MOST_LOGPROBS)
    options = replace(options, logprobs=logprobs, response_format=read_format(fields))
    echoed: tuple[str, ...] = ()
    if fields.boolean("echo"):
        if logprobs is not None:
            raise unsupported("echo", "cannot be combined with logprobs", hint="prompts have no log-probabilities")
        if isinstance(prompts[0], FillPrompt):
            raise unsupported("echo", "cannot be combined with suffix")
        echoed = tuple(prompt.text for prompt in prompts if isinstance(prompt, TextPrompt))
        if len(echoed) < len(prompts):
            raise unsupported("echo", "supported only for prompts that are text")
    return parsed_completion([*map(options.request, prompts)], options, fields.unread(), echoed)


def parsed_completion(
    requests: Sequence[Request], options: Options, ignored: tuple[str, ...], echoed: tuple[str, ...] = ()
) -> ParsedCompletion:
    """Return the parsed call for `requests`, which contain one request for each prompt."""
    return ParsedCompletion(
        requests=tuple(choice for request in requests for choice in choices_of(request, options)),
        stream=options.stream,
        ignored=ignored,
        n=options.n,
        seed=options.seed,
        include_usage=options.include_usage,
        echoed=echoed,
    )


def choices_of(request: Request, options: Options) -> Iterator[Request]:
    """Yield a request for each choice. The requests differ only in their seeds."""
    for choice in range(options.n):
        seed = choice_seed(options.seed, choice)
        yield replace(request, sampling=replace(request.sampling, seed=seed))


def read_chat_logprobs(fields: Fields) -> int | None:
    """Return the requested number of likeliest tokens at each position, or None without log-probabilities."""
    wanted = fields.boolean("logprobs")
    most = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if most and not wanted:
        raise InvalidField("top_logprobs", "needs logprobs to be true")
    return most or 0 if wanted else None


def _continues(fields: Fields, messages: Sequence[Mapping[str, Any]], tools: ToolOptions) -> bool:
    """Return whether the model should continue the last message, according to vLLM's fields."""
    name = "continue_final_message"
    continues = bool(fields.boolean(name))
    if fields.boolean("add_generation_prompt") not in (None, not continues):
        raise InvalidField("add_generation_prompt", f"expected the opposite of {name}")
    if continues and messages[-1]["role"] != "assistant":
        raise InvalidField(name, 'the last message must have the role "assistant"')
    if continues and tools.may_be_called:
        raise unsupported(name, "cannot be combined with tools")
    return continues
