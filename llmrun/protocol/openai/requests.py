"""Converts the bodies of chat completions and completions into requests for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import ChatPrompt, Request, TextPrompt
from llmrun.gguf.problems import shown
from llmrun.protocol.errors import InvalidField, unsupported
from llmrun.protocol.fields import Fields
from llmrun.protocol.openai.formats import read_format
from llmrun.protocol.openai.messages import read_messages
from llmrun.protocol.openai.options import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    Options,
    read_options,
    refuse_in_chats,
    refuse_in_completions,
)
from llmrun.protocol.openai.prompts import read_prompts
from llmrun.protocol.openai.sampling import choice_seed
from llmrun.protocol.openai.thinking import read_thinking
from llmrun.protocol.openai.tools import ToolOptions, read_tools

_MOST_IGNORED: Final = 32  # names in the header
_LONGEST_NAME: Final = 60


@dataclass(frozen=True, slots=True)
class Parsed:
    """The requests of one call.

    requests  one for each choice: those of the first prompt, then those of the second one, and so on
    n         the number of choices for each prompt
    seed      the seed of the first choice of each prompt; random if the client did not set one
    model     the name that the client used; may be empty
    ignored   the names of fields that have no effect, with their places
    echoed    the texts that precede the answers to each prompt; () if they are not wanted
    """

    requests: tuple[Request, ...]
    n: int
    seed: int
    stream: bool
    include_usage: bool
    model: str
    ignored: tuple[str, ...]
    echoed: tuple[str, ...] = ()

    @property
    def ignored_header(self) -> str:
        """The ignored names as the value of the header x-llmrun-ignored; "" if there are none.

        The names come from the client, so everything but printable ASCII is escaped.
        """
        names = [
            ascii(shown(name, _LONGEST_NAME))[1:-1][:_LONGEST_NAME] for name in islice(self.ignored, _MOST_IGNORED)
        ]
        more = len(self.ignored) - len(names)
        return ", ".join([*names, f"and {more} more"] if more else names)


def parse_chat(body: dict[str, Any], facts: ModelFacts) -> Parsed:
    """Convert the body of a chat completion. Raises InvalidField and ModelNotFound."""
    fields = Fields(body)
    options = read_options(fields, facts)
    if not facts.takes_chats:
        hint = "send a prompt to /v1/completions instead"
        raise unsupported("messages", "this model has no chat template", hint=hint)
    refuse_in_chats(fields)
    messages = read_messages(fields)
    tools = read_tools(fields, facts)
    thinking = read_thinking(fields, facts)
    wanted = read_format(fields)
    if wanted is not None and tools.may_be_called:
        raise unsupported(wanted.origin, "cannot be combined with tools", hint='set tool_choice to "none"')
    prompt = ChatPrompt(
        messages,
        tools.tools,
        tools.choice,
        tools.parallel,
        not _continues(fields, messages, tools),
        thinking.variables,
    )
    request = Request(
        prompt,
        options.max_tokens,
        options.stop,
        options.sampling,
        _chat_logprobs(fields),
        thinking.think,
        thinking.budget,
        wanted,
    )
    ignored = (*thinking.without_effect, *fields.unread())
    return _parsed([request], fields, options, ignored)


def parse_completion(body: dict[str, Any], facts: ModelFacts) -> Parsed:
    """Convert the body of a completion. Raises InvalidField, ContextExceeded and ModelNotFound."""
    fields = Fields(body)
    options = read_options(fields, facts)
    refuse_in_completions(fields)
    prompts = read_prompts(fields, facts)
    if len(prompts) * options.n > MOST_CHOICES:
        raise InvalidField("prompt", f"{len(prompts):,} prompts with n={options.n} exceed {MOST_CHOICES} choices")
    best_of = fields.integer("best_of", 1, MOST_CHOICES)
    if best_of not in (None, options.n):
        raise unsupported("best_of", "supported only if it equals n")
    logprobs = fields.integer("logprobs", 0, MOST_LOGPROBS)
    wanted = read_format(fields)
    echoed: tuple[str, ...] = ()
    if fields.boolean("echo"):
        if logprobs is not None:
            raise unsupported("echo", "cannot be combined with logprobs", hint="prompts have no log-probabilities")
        echoed = tuple(prompt.text for prompt in prompts if isinstance(prompt, TextPrompt))
        if len(echoed) < len(prompts):
            raise unsupported("echo", "supported only for prompts that are text")
    requests = [
        Request(prompt, options.max_tokens, options.stop, options.sampling, logprobs, response_format=wanted)
        for prompt in prompts
    ]
    return _parsed(requests, fields, options, fields.unread(), echoed)


def _parsed(
    requests: Sequence[Request],
    fields: Fields,
    options: Options,
    ignored: tuple[str, ...],
    echoed: tuple[str, ...] = (),
) -> Parsed:
    choices = tuple(choice for request in requests for choice in _choices(request, options))
    stream, usage = options.stream, options.include_usage
    return Parsed(choices, options.n, options.seed, stream, usage, fields.text("model") or "", ignored, echoed)


def _choices(request: Request, options: Options) -> Iterator[Request]:
    """Yield a request for each choice. They differ only in their seeds."""
    for choice in range(options.n):
        seed = choice_seed(options.seed, choice)
        yield replace(request, sampling=replace(request.sampling, seed=seed))


def _chat_logprobs(fields: Fields) -> int | None:
    """Return how many of the likeliest tokens are wanted at each position, or None."""
    wanted = fields.boolean("logprobs")
    most = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if most and not wanted:
        raise InvalidField("top_logprobs", "needs logprobs to be true")
    return most or 0 if wanted else None


def _continues(fields: Fields, messages: Sequence[Mapping[str, Any]], tools: ToolOptions) -> bool:
    """Return whether the model should continue the last message. The fields are vLLM's."""
    name = "continue_final_message"
    continues = bool(fields.boolean(name))
    if fields.boolean("add_generation_prompt") not in (None, not continues):
        raise InvalidField("add_generation_prompt", f"expected the opposite of {name}")
    if continues and messages[-1]["role"] != "assistant":
        raise InvalidField(name, 'the last message must have the role "assistant"')
    if continues and tools.may_be_called:
        raise unsupported(name, "cannot be combined with tools")
    return continues
