"""Converts the bodies of chat completions and completions into requests for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from llmrun.engine.requests import ChatPrompt, ModelFacts, Request
from llmrun.serving.protocol.declarations import read
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.images import Images, with_images
from llmrun.serving.protocol.openai.messages import (
    ToolOptions,
    check_lengths,
    filled,
    messages_of,
    prompts_of,
    tools_of,
)
from llmrun.serving.protocol.openai.objects import MOST_CHOICES, ChatRequest, CompletionRequest
from llmrun.serving.protocol.openai.options import (
    Options,
    ThinkingOptions,
    choice_seed,
    format_of,
    options_of,
    require_chats,
    thinking_of,
    token_limit,
)
from llmrun.serving.protocol.parsed import Parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion(Parsed):
    """The requests of one chat completion or completion, in the order of their prompts.

    n       the number of choices for each prompt
    seed    the seed of the first choice of each prompt
    """

    n: int
    include_usage: bool


def parse_chat(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of a chat completion. `seed` is the default seed. Raises InvalidField."""
    given, ignored = read(ChatRequest, body)
    options = options_of(given, facts, seed, token_limit(given, given.get("n_predict")))
    require_chats(facts)
    messages, images = with_images(facts, lambda images: messages_of(given["messages"], images))
    tools = tools_of(given, facts)
    thinking = thinking_of(given, facts, given.get("reasoning_effort"), "reasoning_effort")
    logprobs = chat_logprobs(given.get("logprobs", False), given.get("top_logprobs"))
    options = replace(options, response_format=format_of(given), logprobs=logprobs)
    continues = _continues(given, messages, tools)
    request = chat_request(messages, tools, thinking, options, images, continues=continues)
    without_effect = (*tools.left_out, *thinking.without_effect, *images.ignored, *ignored)
    return parsed_completion([request], options, without_effect)


def chat_request(
    messages: Sequence[Mapping[str, Any]],
    tools: ToolOptions,
    thinking: ThinkingOptions,
    options: Options,
    images: Images,
    *,
    continues: bool = False,
) -> Request:
    """Return the request for one choice of a chat. Raises InvalidField if a format is combined with tools.

    images     the images of the messages
    continues  True if the model should continue the last message
    """
    wanted = options.response_format
    if wanted is not None and tools.may_be_called:
        raise unsupported(wanted.origin, "cannot be combined with tools", hint='set tool_choice to "none"')
    prompt = ChatPrompt(
        messages, tools.tools, tools.choice, tools.parallel, not continues, thinking.variables, images.files
    )
    return options.request(prompt, thinking)


def parse_completion(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of a completion. Raises InvalidField and ContextExceeded.

    `seed` is the default seed.
    """
    given, ignored = read(CompletionRequest, body)
    options = options_of(given, facts, seed, token_limit(given, given.get("n_predict")))
    texts = prompts_of(given["prompt"], "prompt", facts)
    check_lengths(texts, facts)
    suffix = given.get("suffix")
    prompts = [filled(prompt, suffix, facts) for prompt in texts] if suffix else texts
    if len(prompts) * options.n > MOST_CHOICES:
        raise InvalidField("prompt", f"{len(prompts):,} prompts with n={options.n} exceed {MOST_CHOICES} choices")
    if given.get("best_of", options.n) != options.n:
        raise unsupported("best_of", "supported only if it equals n")
    if suffix and given.get("echo"):
        raise unsupported("echo", "cannot be combined with suffix")
    options = replace(
        options, logprobs=given.get("logprobs"), echo=given.get("echo", False), response_format=format_of(given)
    )
    return parsed_completion([*map(options.request, prompts)], options, ignored)


def parsed_completion(requests: Sequence[Request], options: Options, ignored: tuple[str, ...]) -> ParsedCompletion:
    """Return the parsed call for `requests`, which contain one request for each prompt."""
    return ParsedCompletion(
        requests=tuple(choice for request in requests for choice in choices_of(request, options)),
        stream=options.stream,
        returns_progress=options.returns_progress,
        ignored=ignored,
        n=options.n,
        seed=options.seed,
        include_usage=options.include_usage,
    )


def choices_of(request: Request, options: Options) -> Iterator[Request]:
    """Yield a request for each choice. The requests differ only in their seeds."""
    for choice in range(options.n):
        seed = choice_seed(options.seed, choice)
        yield structs.replace(request, sampling=replace(request.sampling, seed=seed))


def chat_logprobs(wanted: bool, most: int | None) -> int | None:
    """Return the number of likeliest tokens at each position, or None without log-probabilities. Raises InvalidField.

    wanted, most  the fields `logprobs` and `top_logprobs`
    """
    if most and not wanted:
        raise InvalidField("top_logprobs", "needs logprobs to be true")
    return most or 0 if wanted else None


def _continues(given: ChatRequest, messages: Sequence[Mapping[str, Any]], tools: ToolOptions) -> bool:
    """Return whether the model should continue the last message, according to vLLM's fields."""
    name, continues = "continue_final_message", given.get("continue_final_message", False)
    if given.get("add_generation_prompt", not continues) == continues:
        raise InvalidField("add_generation_prompt", f"expected the opposite of {name}")
    if continues and messages[-1]["role"] != "assistant":
        raise InvalidField(name, 'the last message must have the role "assistant"')
    if continues and tools.may_be_called:
        raise unsupported(name, "cannot be combined with tools")
    return continues
