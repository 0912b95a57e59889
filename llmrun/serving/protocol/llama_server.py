"""The bodies and answers of /completion and /infill, with the fields of llama-server.

/infill fills a gap between two texts. Otherwise, both routes are the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypedDict, TypeVar

from llmrun.base import types as times
from llmrun.base.amounts import counted
from llmrun.base.sampling_texts import TEMPERATURE, parse_samplers
from llmrun.base.types import FinishReason
from llmrun.engine.requests import (
    IMAGE_MARKER,
    ContextFile,
    Event,
    FillPrompt,
    Finished,
    MixedPrompt,
    ModelFacts,
    PrefillProgress,
    Prompt,
    Request,
    TextDelta,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
)
from llmrun.options.sampling_params import SAMPLING, SamplingParams
from llmrun.serving.protocol.declarations import Expected, Limits, Refused, agreed, read, wrong_type
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.images import Base64, Images
from llmrun.serving.protocol.openai.messages import check_lengths, check_tokens, require_filling
from llmrun.serving.protocol.openai.objects import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    NO_LIMIT,
    AnswerLimit,
    Common,
    Count,
    Fingerprint,
    PromptProgress,
    Timings,
    Token,
    TokenEntry,
    TopLogprobs,
)
from llmrun.serving.protocol.openai.options import format_of, options_of, token_limit
from llmrun.serving.protocol.openai.requests import choices_of
from llmrun.serving.protocol.openai.responses import timings, timings_of, token_entry
from llmrun.serving.protocol.parsed import Parsed, checked

MOST_FILES: Final = 1024
MOST_RESPONSE_FIELDS: Final = 64
_ONLY_PROMPT: Final = 0  # the value of n_predict for processing the prompt without generating anything
_ANY_OBJECT: Final = {"type": "object"}  # llama-server's meaning of an empty schema
_LONGEST_SAMPLER: Final = 100  # characters; no sampler has such a long name
_UNNAMED_FILE: Final = "tmp"  # llama-server's default for `filename`
StopType = Literal["eos", "word", "limit"]


class _File(TypedDict, total=False):
    filename: str
    text: Required[str]


class _Generation(Common, AnswerLimit, total=False):
    """The fields that both routes have."""

    n_predict: Annotated[
        int,
        Limits(NO_LIMIT),
        "llama.cpp's name for `max_tokens`. With 0, the prompt is cached, and the answer is empty.",
    ]
    n_cmpl: Annotated[int, Limits(1, MOST_CHOICES), "llama.cpp's name for `n`."]
    n_probs: TopLogprobs
    logprobs: Annotated[int, Limits(0, MOST_LOGPROBS), "Another name for `n_probs`, which takes precedence."]
    return_tokens: Annotated[bool, "Return the IDs of the tokens. Streams always contain these IDs."]
    timings_per_token: Annotated[bool, "Return `timings` in each event of a stream."]
    response_fields: Annotated[
        list[str],
        Limits(0, MOST_RESPONSE_FIELDS, "path"),
        "The paths of the fields to return. The names in a path are separated by slashes, as in timings/prompt_n.",
    ]
    min_keep: Annotated[Any, Refused((0,))]
    post_sampling_probs: Annotated[Any, Refused((False,), "n_probs returns the probabilities before sampling")]


class InfillRequest(_Generation, total=False):
    input_prefix: Required[Annotated[str, "The text before the gap."]]
    input_suffix: Required[Annotated[str, "The text after the gap."]]
    prompt: Annotated[
        str, "The text between `input_prefix` and the gap. Control strings in this text become control tokens."
    ]
    input_extra: Annotated[list[_File], Limits(0, MOST_FILES, "file"), "Other files, the most important one last."]


class ImagePrompt(TypedDict, total=False):
    """A text with images."""

    prompt_string: Required[
        Annotated[str, f"The text, in which `{IMAGE_MARKER}` stands for each image. /props shows this marker."]
    ]
    multimodal_data: Annotated[list[Base64], "The images in the order of their markers: PNG, JPEG, WebP, GIF or BMP."]


_Mixed = Annotated[list[str | Token], Limits(1, noun="part"), Expected("a list of texts and token IDs")]


class LlamaCompletionRequest(_Generation, total=False):
    """A request for /completion. Values that llama-server ignores, such as unknown samplers, are ignored."""

    prompt: Required[
        Annotated[
            str | ImagePrompt | Annotated[list[str | Token | ImagePrompt | _Mixed], Limits(1, noun="prompt")],
            Expected("a string, a list of strings and token IDs, an object with images, or a list of such prompts"),
            "One or more prompts. A list with a token ID is one prompt, whose parts are joined. Control strings in "
            "texts become control tokens.",
        ]
    ]
    image_data: Annotated[Any, Refused(([],), "send images in prompt.multimodal_data", "not supported")]


class _TokenWithId(TokenEntry):
    id: Count


class TokenProbabilities(_TokenWithId):
    """A token of an answer, with the likeliest tokens at its position."""

    top_logprobs: list[_TokenWithId]


class _Head(TypedDict):
    index: Count
    content: str
    tokens: list[Count]
    tokens_predicted: Count
    tokens_evaluated: Count
    completion_probabilities: NotRequired[list[TokenProbabilities]]


class LlamaCompletion(_Head):
    """A choice of an answer, or the choice's last event in a stream."""

    stop: Literal[True]
    model: str
    system_fingerprint: Fingerprint
    generation_settings: Annotated[dict[str, Any], "The settings that produced the answer, including the seed."]
    has_new_line: bool
    truncated: Annotated[bool, "True if parts of the texts were left out because the texts were too long."]
    stop_type: StopType
    stopping_word: str
    tokens_cached: Count
    timings: Timings


class LlamaCompletionChunk(_Head):
    """An event in a stream, except a choice's last event."""

    stop: Literal[False]
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[PromptProgress]


class Problem(TypedDict):
    code: Annotated[Count, "The HTTP status."]
    message: str
    type: str


class LlamaServerError(TypedDict):
    """An error, as in llama-server."""

    error: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedGeneration(Parsed):
    """The requests of one call.

    only_prompt      True if the call only processes the prompt, and the answer is empty
    returns_tokens   True if the answer contains its token IDs
    returns_timings  True if each event of a stream contains `timings`
    response_fields  the paths of the fields to return, such as "timings/prompt_n"; None for all fields
    """

    only_prompt: bool
    returns_tokens: bool
    returns_timings: bool
    response_fields: tuple[str, ...] | None


def parse_infill(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedGeneration:
    """Convert the body of a call of /infill. `seed` is the default seed. Raises InvalidField."""
    given, ignored = _read(InfillRequest, body)
    require_filling(facts, "input_suffix")
    extra = given.get("input_extra", ())
    files = tuple(ContextFile(file.get("filename") or _UNNAMED_FILE, file["text"]) for file in extra)
    prompt = FillPrompt(given["input_prefix"], given["input_suffix"], given.get("prompt", ""), files, cut=True)
    return _parsed(given, ignored, [prompt], facts, seed)


def parse_llama_completion(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedGeneration:
    """Convert the body of a call of /completion. `seed` is the default seed. Raises InvalidField, ContextExceeded."""
    given, ignored = _read(LlamaCompletionRequest, body)
    prompts = _prompts(given["prompt"], facts)
    check_lengths(prompts, facts)
    return _parsed(given, ignored, prompts, facts, seed)


R = TypeVar("R", bound=_Generation)


def _read(declared: type[R], body: dict[str, Any]) -> tuple[R, tuple[str, ...]]:
    """Return the fields of a body, without values that llama-server ignores, and the paths of all ignored values."""
    body, dropped = {**body}, list[str]()
    if isinstance(stops := body.get("stop"), list):
        body["stop"] = [stop for stop in stops if stop != ""]
    elif stops == "":
        body["stop"] = []
    if isinstance(names := body.get("samplers"), list):
        unknown = dict.fromkeys(name for name in names if isinstance(name, str) and _is_unknown_sampler(name))
        body["samplers"] = [name for name in names if not (isinstance(name, str) and name in unknown)]
        dropped += [f"samplers.{name}" for name in unknown]
        if not body["samplers"]:  # without samplers, llama-server draws from the model's own distribution
            body |= {"samplers": [TEMPERATURE], "temperature": 1.0}
    if body.get("repeat_penalty") is not None and body.pop("repetition_penalty", None) is not None:
        dropped.append("repetition_penalty")
    if body.get("json_schema") == {}:
        body["json_schema"] = _ANY_OBJECT
    given, ignored = read(declared, body)
    return given, (*dropped, *ignored)


def _is_unknown_sampler(name: str) -> bool:
    try:
        parse_samplers(name[:_LONGEST_SAMPLER])
    except ValueError:
        return True
    return False


def _prompts(value: str | ImagePrompt | list[Any], facts: ModelFacts) -> list[TextPrompt | TokenPrompt | MixedPrompt]:
    images = Images(facts)
    if not isinstance(value, list) or any(isinstance(part, int) for part in value):
        return [_prompt(value, "prompt", facts, images)]
    return [_prompt(each, f"prompt[{number}]", facts, images) for number, each in enumerate(value)]


def _with_images(value: ImagePrompt, place: str, images: Images) -> TextPrompt:
    text, given = value["prompt_string"], value.get("multimodal_data", ())
    if given and (markers := text.count(IMAGE_MARKER)) != len(given):
        words = f"{counted(len(given), 'image')}, but prompt_string has {counted(markers, 'marker')}"
        raise InvalidField(f"{place}.multimodal_data", words, hint=f"write {IMAGE_MARKER} in place of each image")
    files = (images.file(each, f"{place}.multimodal_data[{number}]") for number, each in enumerate(given))
    return TextPrompt(text, tuple(files))


def _prompt(
    value: str | ImagePrompt | list[Any], place: str, facts: ModelFacts, images: Images
) -> TextPrompt | TokenPrompt | MixedPrompt:
    """Return the prompt for a text, for a text with images, or for a list of texts and token IDs.

    Raises InvalidField.
    """
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, dict):
        return _with_images(value, place, images)
    parts: list[str | tuple[int, ...]] = []
    for is_text, group in groupby(enumerate(value), lambda item: isinstance(item[1], str)):
        [*items] = group
        if is_text:
            parts += [part for number, part in items if part or not number]  # the first text gets the BOS
            continue
        if (other := next((part for _, part in items if not isinstance(part, int)), None)) is not None:
            raise wrong_type(place, "a list of texts and token IDs", other)
        tokens = [part for _, part in items]
        check_tokens(tokens, place, facts)
        parts.append(tuple(tokens))
    return TokenPrompt(parts[0]) if len(parts) == 1 and not isinstance(parts[0], str) else MixedPrompt(tuple(parts))


def _parsed(
    given: _Generation, ignored: tuple[str, ...], prompts: Sequence[Prompt], facts: ModelFacts, seed: int
) -> ParsedGeneration:
    n_predict = given.get("n_predict")
    only_prompt = n_predict == _ONLY_PROMPT
    if only_prompt:
        n_predict = 1  # the engine generates at least one token
    options = options_of(given, facts, seed, token_limit(given, n_predict))
    counts = {"n_cmpl": given.get("n_cmpl"), "n": given.get("n")}
    n = agreed({name: count for name, count in counts.items() if count is not None}) or 1
    if len(prompts) * n > MOST_CHOICES:
        raise InvalidField("prompt", f"{len(prompts):,} prompts with n={n} exceed {MOST_CHOICES} choices")
    logprobs = given.get("n_probs", given.get("logprobs")) or None
    options = replace(options, logprobs=logprobs, response_format=format_of(given), n=n)
    paths = given.get("response_fields")
    return ParsedGeneration(
        requests=tuple(choice for prompt in prompts for choice in choices_of(options.request(prompt), options)),
        stream=options.stream,
        returns_progress=options.returns_progress,
        ignored=(*(["stream_options.include_usage"] if options.include_usage else []), *ignored),
        seed=options.seed,
        only_prompt=only_prompt,
        returns_tokens=given.get("return_tokens", False),
        returns_timings=given.get("timings_per_token", False),
        response_fields=None if paths is None else tuple(paths),
    )


class LlamaServerAnswer:
    """The answer to a call: one object or, for several choices, a list of objects.

    Unlike llama-server's answer, this answer has no `prompt` (the text of the prompt's tokens) and no `id_slot`.
    """

    def __init__(self, parsed: ParsedGeneration, facts: ModelFacts, answer_id: str, created: int) -> None:
        self._parsed, self._facts = parsed, facts
        self._choices = [_Choice(index, request) for index, request in enumerate(parsed.requests)]

    def feed(self, choice: int, event: Event) -> Sequence[Mapping[str, Any]]:
        event, found = checked(event), self._choices[choice]
        if isinstance(event, Finished):
            found.finished = event
            return [self._body(found)]
        if isinstance(event, PrefillProgress):
            found.progress = event
        elif not self._parsed.only_prompt:
            found.take(event)
            return [found.chunk(event, timed=self._parsed.returns_timings)]
        return []

    def progress(self, choice: int, told: PromptProgress) -> list[LlamaCompletionChunk]:
        return [{**self._choices[choice].chunk(), "prompt_progress": told}]

    def finish(self) -> Sequence[Mapping[str, Any]]:
        return []

    def whole(self) -> Mapping[str, Any] | Sequence[Any]:
        bodies = [self._body(choice) for choice in self._choices]
        return bodies[0] if len(bodies) == 1 else bodies

    def _body(self, choice: _Choice) -> Mapping[str, Any]:
        """Return the last event of a choice in a stream, without text, or the body of the choice."""
        parsed, finished = self._parsed, choice.finished
        assert finished is not None, "the choice has not finished"
        text = "".join(choice.texts)
        body: LlamaCompletion = {
            "index": choice.index,
            "content": "" if parsed.stream else text,
            "tokens": choice.tokens if parsed.returns_tokens and not parsed.stream else [],
            "stop": True,
            "model": self._facts.name,
            "system_fingerprint": self._facts.fingerprint,
            "tokens_predicted": finished.timings.generated_tokens,
            "tokens_evaluated": finished.timings.prompt_tokens,
            "generation_settings": _settings(choice.request, parsed),
            "has_new_line": "\n" in text,
            "truncated": finished.cut_tokens > 0,
            "stop_type": _stop_type(finished),
            "stopping_word": finished.stop or "",
            "tokens_cached": max(0, finished.context_used - 1),  # the last token has not been processed
            "timings": timings([finished]),
        }
        if choice.logprobs and not parsed.stream:
            body["completion_probabilities"] = choice.logprobs
        return body if parsed.response_fields is None else _selected(body, parsed.response_fields)


_NOTHING: Final = TextDelta(0, "", ())


class _Choice:
    """The state of one choice."""

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenProbabilities] = []
        self.progress = PrefillProgress(0, 0, 0)
        self.finished: Finished | None = None
        self._began, self._first = time.perf_counter(), 0.0

    def take(self, delta: TextDelta) -> None:
        self._first = self._first or time.perf_counter()
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += map(_probabilities, delta.logprobs)

    def chunk(self, delta: TextDelta = _NOTHING, *, timed: bool = False) -> LlamaCompletionChunk:
        """Return the stream's chunk for a delta that `take` has added. `timed` is True for chunks with timings."""
        chunk: LlamaCompletionChunk = {
            "index": self.index,
            "content": delta.text,
            "tokens": [*delta.tokens],
            "stop": False,
            "tokens_predicted": len(self.tokens),
            "tokens_evaluated": self.progress.total,
        }
        if delta.logprobs:
            chunk["completion_probabilities"] = [*map(_probabilities, delta.logprobs)]
        if timed:
            chunk["timings"] = self._timings()
        return chunk

    def _timings(self) -> Timings:
        """Return the timings up to now. Unlike the timings at the end, they include the time in the queue."""
        prompt_s, decode_s = self._first - self._began, time.perf_counter() - self._first
        counts = self.progress.total, self.progress.cached, len(self.tokens)
        return timings_of([times.Timings(0.0, *counts, prompt_s, prompt_s, decode_s, prompt_s + decode_s)])


def _probabilities(token: TokenLogprobs) -> TokenProbabilities:
    top: list[_TokenWithId] = [{"id": each.token_id, **token_entry(each)} for each in token.top]
    return {"id": token.chosen.token_id, **token_entry(token.chosen), "top_logprobs": top}


def _stop_type(finished: Finished) -> StopType:
    if finished.reason is FinishReason.LENGTH:
        return "limit"
    return "eos" if finished.stop is None else "word"


def _settings(request: Request, parsed: ParsedGeneration) -> dict[str, Any]:
    """Return the settings used for the answer, under llama-server's names."""
    limit = 0 if parsed.only_prompt else NO_LIMIT if request.max_tokens is None else request.max_tokens
    settings = sampling_settings(request.sampling, limit)
    return {**settings, "n_probs": request.logprobs or 0, "stop": [*request.stop], "stream": parsed.stream}


def sampling_settings(sampling: SamplingParams, limit: int) -> dict[str, Any]:
    """Return sampling parameters and the maximum number of tokens under llama-server's names."""
    return {
        "seed": sampling.seed,
        **{name: parameter.wire_value(getattr(sampling, name)) for name, parameter in SAMPLING.items()},
        "max_tokens": limit,
        "n_predict": limit,
    }


def _selected(body: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return a mapping from paths to the values at these paths. Paths that do not exist are omitted."""
    found = {}
    for path in paths:
        value: Any = body
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found
