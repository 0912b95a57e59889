"""The engine's input and output: requests, the events of their answers, and facts about models.

Servers report the facts about a model to clients, and use these facts to parse requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, field, structs

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.types import IMAGE_ROW, FinishReason, ModelInfo, Timings, TokenLogprob
from llmrun.engine.constraint.base import ResponseFormat
from llmrun.options.sampling_params import SAMPLING, SamplingParams
from llmrun.options.settings import RULES

# The values of `tool_choice` that are not names of tools.
AUTO, NONE, REQUIRED = "auto", "none", "required"
# Keys of the tools in a ChatPrompt, and the name of a custom tool's only argument
CUSTOM, DEFERRED, INPUT = "custom", "deferred", "input"
IMAGE = "image"  # the type of a part with an image, and the part's key for the SHA-256 of the file
IMAGE_MARKER = "<__media__>"  # stands for an image in a raw prompt, as in llama-server
LONGEST_TOOL_NAME = 128  # characters, as in Anthropic's API; OpenAI's API allows 64


class Portable(Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base class of values that are sent to other processes. Fields that have the default value are not sent."""


class ChatPrompt(Portable, frozen=True):
    """A conversation, rendered by the model's chat template.

    messages  dicts as in OpenAI's API, with at least `role` and `content`; past thinking is in `reasoning_content`.
              Answers may have `tool_calls`, whose results follow as messages with the role "tool". A list of parts as
              content may have images: {"type": "image", "image": KEY}, optionally with "detail": "low" or "high"
    images    the files of the images by key, which is the SHA-256 of the file in hexadecimal
    tools     definitions of the tools that the model may call, as in OpenAI's API, or None. A custom tool is a function
              whose only argument is `input`, with an additional key `custom`: the grammar of the input (`syntax` and
              `definition`), or {} if the input may be any text. Tools with the key `deferred` are described in messages
              and left out of the template's list of tools
    tool_choice  "auto", "none", "required", or the name of the tool to call
    parallel_tool_calls  True if one answer may contain several calls
    add_generation_prompt  False only if the last message is an answer that the model should continue
    template_kwargs  extra variables for the template, such as `enable_thinking`

    Control strings inside messages, tools and template_kwargs remain plain text. Only the template itself can produce
    control tokens.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str = AUTO
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, bytes] = field(default_factory=dict)


def image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of messages that are images, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            yield from (part for part in content if is_image(part))


def is_image(part: object) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") == IMAGE


class RecordedChat(ChatPrompt, frozen=True):
    """A conversation whose prompt is recorded as token ids, even if the template would now render other tokens."""

    tokens: Sequence[int] = ()


class TextPrompt(Portable, frozen=True):
    """A raw prompt without a chat template (`--raw`). Control strings in the prompt become control tokens.

    images  the files of images, each of which takes the place of one IMAGE_MARKER in the text
    """

    text: str
    images: tuple[bytes, ...] = ()


class TokenPrompt(Portable, frozen=True):
    """A prompt of token ids, to which nothing is added, not even a BOS.

    images  the files of the images; in `tokens`, IMAGE_ROW stands for each of their rows
    """

    tokens: Sequence[int]
    images: tuple[bytes, ...] = ()


class MixedPrompt(Portable, frozen=True):
    """A prompt of texts and token ids. Texts are treated as in a TextPrompt, and only the first part can get a BOS."""

    parts: tuple[str | tuple[int, ...], ...]


class ContextFile(Portable, frozen=True):
    """Another file, as additional context for filling in the middle."""

    name: str
    text: str


class FillPrompt(Portable, frozen=True):
    """A text with a gap that the answer fills. The model's vocabulary must have special tokens for gaps (prompts.py).

    prefix, suffix  the text before and after the gap
    line   text between the prefix and the gap, such as the current line. Control strings in it become control tokens,
           as in llama-server; those in the other texts remain plain text
    files  other files, in order of increasing importance
    cut    leave out what llama-server leaves out of long texts: the beginning of the prefix, the end of the suffix and
           the first files. Finished.cut_tokens counts these tokens. If False, a prompt that is too long is an error
    """

    prefix: str
    suffix: str
    line: str = ""
    files: tuple[ContextFile, ...] = ()
    cut: bool = False


Prompt = ChatPrompt | TextPrompt | TokenPrompt | MixedPrompt | FillPrompt


def without_files(prompt: Prompt) -> Prompt:
    """Return a prompt without the files of its images."""
    if isinstance(prompt, ChatPrompt) and prompt.images:
        return structs.replace(prompt, images={})
    if isinstance(prompt, TextPrompt | TokenPrompt) and prompt.images:
        return structs.replace(prompt, images=())
    return prompt


class Request(Portable, frozen=True):
    """A prompt with the options for its answer.

    max_tokens  the maximum number of generated tokens; None means until the answer ends or the context is full, and 0
                means that only the prompt is computed
    stop        strings that end the answer and are not part of it; they have no effect during thinking
    logprobs    N >= 0 returns the log-probabilities of the chosen token and the N likeliest tokens; None returns none
    think       switches thinking on or off for a ChatPrompt; None leaves the template's default
    think_budget  the maximum number of thinking tokens; None means no limit, 0 means the same as think=False
    response_format  the format of the answer, which begins after the thinking; None means any text. An answer that ends
                   with FinishReason.STOP and without a stop string has this format
    sent_sampling  the names of the sampling parameters to send to a server, which may include "seed"; None sends all.
                   Local models use all parameters
    adapters       the LoRA adapters to use, by name, with their scales; None for the scales with which they were opened
    tenant         the owner of the request. Tenants get equal shares of the engine's time. By default, tenants share no
                   cached prefixes, because the time to the first token would reveal one tenant's prompts to another
    echo           return the prompt in PromptDelta events before the answer, with log-probabilities if `logprobs` is
                   given
    """

    prompt: Prompt
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams()
    logprobs: int | None = None
    think: bool | None = None
    think_budget: int | None = None
    response_format: ResponseFormat | None = None
    sent_sampling: frozenset[str] | None = None
    adapters: Mapping[str, float] | None = None
    tenant: str = ""
    echo: bool = False

    def sends(self, name: str) -> bool:
        """Return whether this sampling parameter is sent to a server."""
        return self.sent_sampling is None or name in self.sent_sampling

    @property
    def seed(self) -> int | None:
        """The seed of the answer, or None if a server chooses it."""
        return self.sampling.seed if self.sends("seed") else None


class StatePlace(Portable, frozen=True):
    """A file for the state of one sequence, such as a conversation. Requests load the state, and later save it there.

    path            the absolute path of the file, which need not exist
    folders, limit  the `Budget` that contains the file; without folders, the file may have any size
    client          the first id of the background engine's client that has asked for this file
    """

    path: str
    folders: tuple[str, ...] = ()
    limit: int = 0
    client: int = 0


class PrefixCause(StrEnum):
    """Why a request did not reuse the prefix that it could have reused. Logs, headers and metrics use these names."""

    REUSED = ""  # all that could be reused was reused
    FIRST = "first prompt"  # no earlier prompt was similar
    DIFFERS = "text differs"
    TOOLS = "tools changed"
    ANSWER = "answer changed"  # the client sent the model's answer back with another text
    RETOKENIZED = "retokenized"  # the answer came back as the same text, which has other tokens
    THINKING = "thinking dropped"
    EVICTED = "evicted"
    OTHER_KEY = "other key"  # only another tenant has the prefix; clients must not learn this
    ADAPTER = "other adapter"
    STATES = "no stored state"  # recurrent states and sliding windows exist only for some lengths of a prefix
    UNFINISHED = "cancelled earlier"
    RESTARTED = "engine restarted"
    LOGPROBS = "prompt log-probabilities"
    WAITED = "waited"  # the request waited until a running request had computed the prefix, and then copied it


class PrefixReport(Portable, frozen=True):
    """How much of a prompt was reused from the KV cache, and why not more.

    total, reused  prompt tokens, and how many of them were in the cache
    lost       approximately how many tokens were computed again although an earlier prompt had them
    where      the part of the prompt in which the texts differ, such as "system prompt", "tool 3" or "message 7 (user)"
    name       the name of the tool in `where`
    detail     more about the cause, such as "added" for a tool
    old, new   the first difference, with at most 40 characters of the earlier prompt and of this prompt
    ago_s      seconds since the prefix was evicted or, for a key's first prompt, since the engine was started; 0 if
               unknown
    beginnings hashes of the prompt's first 32, 64, 128 ... tokens, by which prompts are recognized after a restart
    """

    total: int
    reused: int
    lost: int = 0
    cause: PrefixCause = PrefixCause.REUSED
    where: str = ""
    name: str = ""
    detail: str = ""
    old: str = ""
    new: str = ""
    ago_s: float = 0.0
    beginnings: tuple[str, ...] = ()


class SeenImage(Portable, frozen=True):
    """An image of a prompt, as the model sees it.

    width, height  the size of the file's image in pixels
    seen_width, seen_height  the size to which the image was stretched
    tokens  the number of tokens
    is_first_frame  True if the model sees only the first frame of an animation
    """

    width: int
    height: int
    seen_width: int
    seen_height: int
    tokens: int
    is_first_frame: bool = False


class TokenLogprobs(Portable, frozen=True):
    """The chosen token, and the likeliest tokens at its position, sorted by probability and then by id."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class ImageProgress(Portable, frozen=True):
    """The progress of the image that a prompt needs next.

    number  the number of the image in the prompt, from 1
    count   the number of images in the prompt
    share   the fraction of this image that is encoded, or 0 if unknown
    left_s  the predicted seconds until all images of the prompt are encoded, or None if unknown or not worth mentioning
    """

    number: int
    count: int
    share: float = 0.0
    left_s: float | None = None

    @property
    def words(self) -> str:
        """The progress for people, such as "reading image 1 of 3: 40%, about 7 s left"."""
        image = "the image" if self.count == 1 else f"image {self.number} of {self.count}"
        if self.left_s is None:
            return f"reading {image}"
        from llmrun.base.amounts import format_expected  # commands without a model do not need it

        expected, percent = format_expected(self.left_s), round(100 * self.share)
        return f"reading {image}: {percent}%, {expected} left" if percent else f"reading {image}, {expected}"

    @classmethod
    def parse(cls, words: str) -> ImageProgress | None:
        """Return the progress that `words` describe, which may come from a server, or None."""
        if (found := re.fullmatch(_READING, words)) is None:
            return None
        number, count, percent, left, unit = found.groups()
        left_s = None if left is None else int(left) * (60.0 if unit == "min" else 1.0)
        return cls(int(number or 1), int(count or 1), int(percent or 0) / 100, left_s)


_READING: Final = (  # compiled when needed, because every command imports this module
    r"reading (?:the image|image ([0-9]{1,3}) of ([0-9]{1,3}))"
    r"(?:(?:: ([0-9]{1,3})%)?, about ([0-9]{1,6}) (s|min)(?: left)?)?"
)


class PrefillProgress(Portable, frozen=True):
    """The progress of a prompt: the KV cache contains `done` of its `total` tokens, including reused tokens.

    `total` is 0 if the server reports only that the answer has not started yet. `cached` is the number of tokens that
    were in the cache before the request began. `left_s` is the predicted number of seconds until the first token; only
    events from `prefill_progress` have it, and only once the costs of steps are known. `image` is set while the prompt
    needs an image that is being encoded; only events from `prefill_progress` have it.
    """

    request_id: int
    done: int
    total: int
    cached: int = 0
    left_s: float | None = None
    image: ImageProgress | None = None


class PromptDelta(Portable, frozen=True):
    """A piece of the prompt, if the request asked for `echo`. All pieces precede the first TextDelta.

    text      the whole prompt in the first piece; empty in later pieces. Prompts of token IDs are decoded, and their
              control tokens appear as in the vocabulary
    logprobs  one entry for each of the next tokens if the request asked for log-probabilities, otherwise empty. In the
              entry of the prompt's first token, the log-probability is 0, and there are no likeliest tokens

    A repeated request gets the same pieces, because their sizes do not depend on the steps of the engine.
    """

    request_id: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class ToolCall(Portable, frozen=True):
    """A complete tool call. `arguments` is JSON text: an object, unless the model made a mistake."""

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """Return the call as an item of `tool_calls` in a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallDelta(Portable, frozen=True):
    """A piece of a tool call, as in OpenAI's API.

    index      counts the calls of an answer from 0
    id, name   complete in the first delta of a call, and empty in later deltas
    arguments  the next piece of the JSON text of the arguments
    problem    why the call is invalid, in its last delta; only if the answer was cut off or if the model does not
               follow the format of its calls
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    problem: str = ""


class TextDelta(Portable, frozen=True):
    """The next token of the answer, with the text that can now be shown. A server's delta may combine several tokens.

    text       empty while a UTF-8 character is incomplete, or while the text may be the beginning of a stop string or
               tag
    tokens     ids generated since the previous delta; empty in a last delta that only flushes buffered text, and for
               servers, which do not send ids
    logprobs   one entry per token if the request asked for log-probabilities, otherwise empty
    reasoning  thinking text, which precedes `text` and is not part of the answer
    unopened   True if the text of all previous deltas was thinking, because the model closed a thinking block that it
               never opened
    tentative  True if a later delta with `unopened` may still turn `text` into thinking
    tool_calls pieces of tool calls, which follow `text`

    The answer is the joined `text` of all deltas, starting at the last delta with `unopened` if there is one. An
    end-of-generation token has a delta only if the request asked for `echo` and log-probabilities.
    """

    request_id: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    unopened: bool = False
    tentative: bool = False
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Finished(Portable, frozen=True):
    """The last event of a request that succeeded or was cancelled.

    stop          the stop string that ended the answer, or None
    context_used  the number of prompt and generated tokens, which now occupy the context
    timings       counts and seconds; `generated_tokens` includes an end-of-generation token
    thinking_tokens  the number of generated tokens that belong to thinking, including the closing tag
    first_answer_s   seconds from `submit` to the first text after the thinking; 0 without such text
    cut_tokens       the number of tokens that were left out of a FillPrompt
    """

    request_id: int
    reason: FinishReason
    stop: str | None
    context_used: int
    timings: Timings
    thinking_tokens: int = 0
    first_answer_s: float = 0.0
    cut_tokens: int = 0


class Failed(Portable, frozen=True):
    """The last event of a request that failed. `Engine.generate` raises `error` instead of yielding this event."""

    request_id: int
    error: LlmrunError


Event = PrefillProgress | PromptDelta | TextDelta | Finished | Failed


def check_request(request: Request, vocabulary_size: int) -> None:
    """Check a request's parameters. Raises UsageError with the name of the first invalid parameter."""
    if request.max_tokens is not None and request.max_tokens < 0:
        raise UsageError(f"parameter out of range: max_tokens: {request.max_tokens} is less than 0")
    if "" in request.stop:
        raise UsageError("empty stop string: stop: every stop string needs at least one character")
    if request.logprobs is not None and not 0 <= request.logprobs <= vocabulary_size:
        raise UsageError(f"parameter out of range: logprobs: {request.logprobs} is not between 0 and {vocabulary_size}")
    if request.think_budget is not None and request.think_budget < 0:
        raise UsageError(f"parameter out of range: think_budget: {request.think_budget} is less than 0")
    if isinstance(request.prompt, TokenPrompt):
        rows = {IMAGE_ROW} if request.prompt.images else set()
        _check_tokens("prompt", (token for token in request.prompt.tokens if token not in rows), vocabulary_size)
    if isinstance(request.prompt, MixedPrompt):
        for part in request.prompt.parts:
            _check_tokens("prompt", () if isinstance(part, str) else part, vocabulary_size)
    _check_tokens("logit_bias", request.sampling.logit_bias, vocabulary_size)
    _check_sampling(request.sampling)


def ban_tokens(request: Request, tokens: Sequence[int]) -> Request:
    """Return a copy of the request whose answer cannot contain any of these tokens."""
    if not tokens:
        return request
    bias = {**request.sampling.logit_bias, **dict.fromkeys(tokens, -math.inf)}
    return structs.replace(request, sampling=replace(request.sampling, logit_bias=bias))


def _check_tokens(where: str, tokens: Iterable[int], vocabulary_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocabulary_size:
            raise UsageError(f"no such token: {where}: id {token} is not in the vocabulary of {vocabulary_size} tokens")


def _check_sampling(params: SamplingParams) -> None:
    for name in SAMPLING:
        value = getattr(params, name)
        try:
            RULES[name].check(value)
            if value in RULES[name].also:  # only users may write these values
                raise ValueError(value)
        except ValueError:
            raise UsageError(f"sampling parameter out of range: {name}: {value} is not {RULES[name].words}") from None
    for token, bias in params.logit_bias.items():
        if math.isnan(bias) or bias == math.inf:
            raise UsageError(
                f"sampling parameter out of range: logit_bias of token {token}: {bias:g} is not a finite number or -inf"
            )


class ModelFacts(Portable, frozen=True):
    """Facts about an open model.

    name             the name that clients use
    info             `info.metadata` is empty, because it can be megabytes
    kv_tokens        the number of tokens that the KV cache holds for all requests together
    takes_chats      True if the model has a chat template
    takes_tools      True if the model can call tools
    fills            True if the model can fill in the middle of a text
    thinks           True if the model's thinking can be switched on
    sees_images      True if the model was opened with its projector
    end_tokens       the tokens that end an answer, which `ignore_eos` bans
    bos_token        the text of the BOS token, or None; likewise `eos_token`
    chat_template    the source of the chat template, or None
    default_sampling the default sampling parameters of requests, with seed 0
    fingerprint      identifies everything that can change the bytes of an answer: the file, llmrun's version and,
                     if results depend on them, the backend and the machine
    memory_bytes     the main memory that the model may take at most, including its process
    """

    name: str
    info: ModelInfo
    kv_tokens: int
    takes_chats: bool
    takes_tools: bool
    fills: bool
    thinks: bool
    end_tokens: tuple[int, ...]
    default_sampling: SamplingParams
    fingerprint: str
    memory_bytes: int = 0
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    sees_images: bool = False
