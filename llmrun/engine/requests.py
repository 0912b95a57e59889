"""What goes into the engine and what comes out: a request, and the events that answer it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmrun.errors import LlmrunError, UsageError
from llmrun.sampling_params import SAMPLING, SamplingParams
from llmrun.settings import RULES
from llmrun.types import FinishReason, Timings, TokenLogprob


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, written out by the model's chat template.

    messages  dicts as OpenAI's API has them: at least `role` and `content`; past thinking as `reasoning_content`
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
    stop        strings that end the answer; they are not part of it, and mean nothing in thinking
    logprobs    None: none; N >= 0: the chosen token's log-probability and those of the N likeliest tokens
    think       whether the model is to think before it answers; None: as its template has it. For conversations
    think_budget  tokens after which its thinking is ended for it; None: no limit, 0: as `think` False
    sent_sampling  names of the sampling parameters, "seed" among them, that a server is sent; None: all of them. Models
                   that run here use all values of `sampling`
    """

    prompt: Prompt
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: int | None = None
    think: bool | None = None
    think_budget: int | None = None
    sent_sampling: frozenset[str] | None = None

    def sends(self, name: str) -> bool:
        """Return whether a server is sent this sampling parameter."""
        return self.sent_sampling is None or name in self.sent_sampling

    @property
    def seed(self) -> int | None:
        """The seed of the answer; None if a server chooses it."""
        return self.sampling.seed if self.sends("seed") else None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and the likeliest ones at its place, most likely first (ties: the lower id)."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are in the KV cache (tokens taken over from it included).

    `total` 0: the answer has not begun, and a server says no more.
    """

    request_id: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """One more token of the answer, and the text that is now certain. A server may send several tokens as one.

    text       may be empty: an unfinished UTF-8 character, or what may be a stop string or a tag, is held back
    tokens     ids generated since the delta before; empty in a last delta that only releases held text, and from a
               server, which tells no ids
    logprobs   one entry a token when the request asked for them, else empty
    reasoning  text the model thinks with, which comes before `text`; not part of the answer
    unopened   all text of the deltas before was thinking, too: the model has ended what it never began
    tentative  such a delta may still come, after which `text` was thinking

    The texts of a request's deltas, joined, are the answer (those since the last `unopened` one, if there is one). An
    end-of-generation token has no delta.
    """

    request_id: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    unopened: bool = False
    tentative: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that went well (a cancelled one did: its text is kept).

    stop          the stop string that ended the answer, or None
    context_used  tokens of the context the conversation fills now: prompt and answer
    timings       counts and seconds; `generated_tokens` counts an end-of-generation token too
    thinking_tokens  how many of those generated were spent on thinking, its end included
    first_answer_s   request in hand to the first text of the answer proper; 0: none came
    """

    request_id: int
    reason: FinishReason
    stop: str | None
    context_used: int
    timings: Timings
    thinking_tokens: int = 0
    first_answer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not be answered; `Engine.generate` raises `error` instead."""

    request_id: int
    error: LlmrunError


Event = PrefillProgress | TextDelta | Finished | Failed


def check_request(request: Request, vocabulary_size: int) -> None:
    """Raise UsageError, naming the parameter, for what cannot be meant."""
    if request.max_tokens is not None and request.max_tokens < 1:
        raise UsageError(f"nothing to generate: max_tokens: {request.max_tokens}, at least 1")
    if "" in request.stop:
        raise UsageError("a stop string may not be empty: stop: 0 characters, at least 1")
    if request.logprobs is not None and not 0 <= request.logprobs <= vocabulary_size:
        raise UsageError(f"parameter out of range: logprobs: {request.logprobs}, 0 to {vocabulary_size}")
    if request.think_budget is not None and request.think_budget < 0:
        raise UsageError(f"parameter out of range: think_budget: {request.think_budget}, at least 0")
    if isinstance(request.prompt, TokenPrompt):
        _check_tokens("prompt", request.prompt.tokens, vocabulary_size)
    _check_tokens("logit_bias", request.sampling.logit_bias, vocabulary_size)
    _check_sampling(request.sampling)


def never_drawing(request: Request, tokens: Sequence[int]) -> Request:
    """The same request, in whose answer none of these tokens will be."""
    if not tokens:
        return request
    bias = {**request.sampling.logit_bias, **dict.fromkeys(tokens, -math.inf)}
    return replace(request, sampling=replace(request.sampling, logit_bias=bias))


def _check_tokens(where: str, tokens: Iterable[int], vocabulary_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocabulary_size:
            raise UsageError(f"no such token: {where}: id {token}, the vocabulary has {vocabulary_size}")


def _check_sampling(params: SamplingParams) -> None:
    for name in SAMPLING:
        value = getattr(params, name)
        try:
            RULES[name].check(value)
        except ValueError:
            raise UsageError(f"sampling parameter out of range: {name}: {value} is not {RULES[name].words}") from None
    for token, bias in params.logit_bias.items():
        if math.isnan(bias) or bias == math.inf:
            raise UsageError(f"sampling parameter out of range: logit_bias of token {token}: {bias:g}, below inf")
