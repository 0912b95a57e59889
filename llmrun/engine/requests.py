"""What goes into the engine and what comes out: a request, and the events that answer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmrun.errors import LlmrunError
from llmrun.types import FinishReason, SamplingParams, Timings, TokenLogprob


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, written out by the model's chat template.

    messages  dicts as OpenAI's API has them: at least `role` and `content`
    tools     JSON schemas the template may show to the model, or None
    add_generation_prompt  False only when the last message is an answer to be continued
    template_kwargs  extra variables for the template (`enable_thinking`, ...)

    Control strings inside messages, tools and template_kwargs stay text; only the template writes control tokens.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The user's own prompt, given to the model as it is (`--raw`): control strings become control tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, run as they are: nothing is added."""

    tokens: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """One answer asked for.

    max_tokens  None: to the end of the answer or of the context
    stop        strings that end the answer; they are not part of it
    logprobs    None: none; N >= 0: the chosen token's log-probability and those of the N likeliest tokens
    """

    prompt: Prompt
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and the likeliest ones at its place, most likely first (ties: the lower id)."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are in the KV cache (tokens taken over from it included)."""

    request_id: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """One more token of the answer, and the text that is now certain.

    text      may be empty: an unfinished UTF-8 character or a possible stop string is held back
    tokens    ids generated since the delta before; empty in a last delta that only releases held text
    logprobs  one entry a token when the request asked for them, else empty

    The texts of a request's deltas, joined, are the answer. An end-of-generation token has no delta.
    """

    request_id: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that went well (a cancelled one did: its text is kept).

    stop          the stop string that ended the answer, or None
    context_used  tokens of the context the conversation fills now: prompt and answer
    timings       counts and seconds; `generated_tokens` counts an end-of-generation token too
    """

    request_id: int
    reason: FinishReason
    stop: str | None
    context_used: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not be answered; `Engine.generate` raises `error` instead."""

    request_id: int
    error: LlmrunError


Event = PrefillProgress | TextDelta | Finished | Failed
