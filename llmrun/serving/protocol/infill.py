"""The bodies and answers of /infill, with the fields of llama-server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypedDict

from llmrun.base.types import FinishReason
from llmrun.engine.requests import (
    ContextFile,
    Event,
    FillPrompt,
    Finished,
    ModelFacts,
    PrefillProgress,
    Request,
    TextDelta,
    TokenLogprobs,
)
from llmrun.options.sampling_params import SAMPLING
from llmrun.serving.protocol.declarations import Limits, Refused, agreed, read
from llmrun.serving.protocol.openai.messages import require_filling
from llmrun.serving.protocol.openai.objects import (
    MOST_CHOICES,
    NO_LIMIT,
    AnswerLimit,
    Common,
    Count,
    Fingerprint,
    PromptProgress,
    Timings,
    TokenEntry,
    TopLogprobs,
)
from llmrun.serving.protocol.openai.options import format_of, options_of, token_limit
from llmrun.serving.protocol.openai.requests import choices_of
from llmrun.serving.protocol.openai.responses import timings, token_entry
from llmrun.serving.protocol.parsed import Parsed, checked

MOST_FILES: Final = 1024
MOST_RESPONSE_FIELDS: Final = 64
_ONLY_PROMPT: Final = 0  # the value of n_predict for processing the prompt without generating anything
_UNNAMED_FILE: Final = "tmp"  # llama-server's default for `filename`
StopType = Literal["eos", "word", "limit"]


class _File(TypedDict, total=False):
    filename: str
    text: Required[str]


class InfillRequest(Common, AnswerLimit, total=False):
    input_prefix: Required[Annotated[str, "The text before the gap."]]
    input_suffix: Required[Annotated[str, "The text after the gap."]]
    prompt: Annotated[
        str, "The text between `input_prefix` and the gap. Control strings in this text become control tokens."
    ]
    input_extra: Annotated[list[_File], Limits(0, MOST_FILES, "file"), "Other files, the most important one last."]
    n_predict: Annotated[
        int,
        Limits(NO_LIMIT),
        "llama.cpp's name for `max_tokens`. With 0, the prompt is cached, and the answer is empty.",
    ]
    n_cmpl: Annotated[int, Limits(1, MOST_CHOICES), "llama.cpp's name for `n`."]
    n_probs: TopLogprobs
    return_tokens: Annotated[bool, "Return the IDs of the tokens. Streams always contain these IDs."]
    response_fields: Annotated[
        list[str],
        Limits(0, MOST_RESPONSE_FIELDS, "path"),
        "The paths of the fields to return. The names in a path are separated by slashes, as in timings/prompt_n.",
    ]
    min_keep: Annotated[Any, Refused((0,))]
    post_sampling_probs: Annotated[Any, Refused((False,), "n_probs returns the probabilities before sampling")]


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


class Infill(_Head):
    """A choice of an answer of /infill, or the choice's last event in a stream."""

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


class InfillChunk(_Head):
    """An event in a stream of /infill, except a choice's last event."""

    stop: Literal[False]
    prompt_progress: NotRequired[PromptProgress]


class _Problem(TypedDict):
    code: Annotated[Count, "The HTTP status."]
    message: str
    type: str


class LlamaServerError(TypedDict):
    """An error of /infill, as in llama-server."""

    error: _Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedInfill(Parsed):
    """The requests of one call of /infill.

    only_prompt      True if the call only processes the prompt, and the answer is empty
    returns_tokens   True if the answer contains its token IDs
    response_fields  the paths of the fields to return, such as "timings/prompt_n"; None for all fields
    """

    only_prompt: bool
    returns_tokens: bool
    response_fields: tuple[str, ...] | None


def parse_infill(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedInfill:
    """Convert the body of a call of /infill. `seed` is the default seed. Raises InvalidField."""
    given, ignored = read(InfillRequest, body)
    n_predict = given.get("n_predict")
    only_prompt = n_predict == _ONLY_PROMPT
    if only_prompt:
        n_predict = 1  # the engine generates at least one token
        if not given["parameters"].get("samplers"):
            given["parameters"].pop("samplers", None)  # editors that only process a prompt send an empty list
    options = options_of(given, facts, seed, token_limit(given, n_predict))
    require_filling(facts, "input_suffix")
    counts = {"n_cmpl": given.get("n_cmpl"), "n": given.get("n")}
    extra = given.get("input_extra", ())
    files = tuple(ContextFile(file.get("filename") or _UNNAMED_FILE, file["text"]) for file in extra)
    prompt = FillPrompt(given["input_prefix"], given["input_suffix"], given.get("prompt", ""), files, cut=True)
    options = replace(
        options,
        logprobs=given.get("n_probs") or None,
        response_format=format_of(given),
        n=agreed({name: count for name, count in counts.items() if count is not None}) or 1,
    )
    paths = given.get("response_fields")
    return ParsedInfill(
        requests=tuple(choices_of(options.request(prompt), options)),
        stream=options.stream,
        returns_progress=options.returns_progress,
        ignored=(*(["stream_options.include_usage"] if options.include_usage else []), *ignored),
        seed=options.seed,
        only_prompt=only_prompt,
        returns_tokens=given.get("return_tokens", False),
        response_fields=None if paths is None else tuple(paths),
    )


class InfillAnswer:
    """The answer to a call of /infill: one object or, for several choices, a list of objects.

    Unlike llama-server's answer, this answer has no `prompt` (the text of the prompt's tokens) and no `id_slot`.
    """

    def __init__(self, parsed: ParsedInfill, facts: ModelFacts, answer_id: str, created: int) -> None:
        self._parsed, self._facts = parsed, facts
        self._choices = [_Choice(index, request) for index, request in enumerate(parsed.requests)]

    def feed(self, choice: int, event: Event) -> Sequence[Mapping[str, Any]]:
        event, found = checked(event), self._choices[choice]
        if isinstance(event, Finished):
            found.finished = event
            return [self._body(found)]
        if isinstance(event, PrefillProgress):
            found.prompt_tokens = event.total
        elif not self._parsed.only_prompt:
            found.take(event)
            return [found.chunk(event)]
        return []

    def progress(self, choice: int, told: PromptProgress) -> list[InfillChunk]:
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
        body: Infill = {
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
        self.prompt_tokens = 0
        self.finished: Finished | None = None

    def take(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += map(_probabilities, delta.logprobs)

    def chunk(self, delta: TextDelta = _NOTHING) -> InfillChunk:
        """Return the stream's chunk for a delta that `take` has added."""
        chunk: InfillChunk = {
            "index": self.index,
            "content": delta.text,
            "tokens": [*delta.tokens],
            "stop": False,
            "tokens_predicted": len(self.tokens),
            "tokens_evaluated": self.prompt_tokens,
        }
        if delta.logprobs:
            chunk["completion_probabilities"] = [*map(_probabilities, delta.logprobs)]
        return chunk


def _probabilities(token: TokenLogprobs) -> TokenProbabilities:
    top: list[_TokenWithId] = [{"id": each.token_id, **token_entry(each)} for each in token.top]
    return {"id": token.chosen.token_id, **token_entry(token.chosen), "top_logprobs": top}


def _stop_type(finished: Finished) -> StopType:
    if finished.reason is FinishReason.LENGTH:
        return "limit"
    return "eos" if finished.stop is None else "word"


def _settings(request: Request, parsed: ParsedInfill) -> dict[str, Any]:
    """Return the settings used for the answer, under llama-server's names."""
    sampling = request.sampling
    limit = 0 if parsed.only_prompt else -1 if request.max_tokens is None else request.max_tokens
    return {
        "seed": sampling.seed,
        **{name: parameter.wire_value(getattr(sampling, name)) for name, parameter in SAMPLING.items()},
        "max_tokens": limit,
        "n_predict": limit,
        "n_probs": request.logprobs or 0,
        "stop": [*request.stop],
        "stream": parsed.stream,
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
