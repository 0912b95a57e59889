"""The bodies and answers of /infill, /tokenize and /detokenize, with the fields of llama-server.

/tokenize and /detokenize also support the fields of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

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
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.fields import Fields, agreed, missing, read_strings
from llmrun.serving.protocol.openai.messages import read_tokens, require_filling
from llmrun.serving.protocol.openai.options import MOST_CHOICES, MOST_LOGPROBS, read_format, read_options, refuse_values
from llmrun.serving.protocol.openai.requests import choices_of
from llmrun.serving.protocol.openai.responses import timings, token_entry
from llmrun.serving.protocol.parsed import Parsed, checked


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A text to tokenize.

    add_special    True to add the model's special tokens, such as a BOS
    parse_special  True to convert control strings in the text to control tokens
    with_pieces    True to return the text of each token
    """

    text: str
    add_special: bool
    parse_special: bool
    with_pieces: bool


def parse_tokenize(body: dict[str, Any]) -> TokenizeCall:
    """Read `content` (llama-server) or `prompt` (vLLM), each with its own defaults. Raises InvalidField."""
    fields = Fields(body)
    content, prompt = fields.text("content"), fields.text("prompt")
    if content is None and prompt is None:
        raise missing("content")
    if content is not None and prompt is not None:
        raise InvalidField("prompt", "cannot be combined with content")
    is_llama = content is not None
    names = {name: fields.boolean(name) for name in ("add_special", "add_special_tokens")}
    add_special = agreed({name: value for name, value in names.items() if value is not None})
    parse_special = fields.boolean("parse_special")
    with_pieces = fields.boolean("with_pieces")
    return TokenizeCall(
        (content if is_llama else prompt) or "",
        not is_llama if add_special is None else add_special,
        parse_special is not False,
        bool(with_pieces),
    )


def tokenize_body(tokens: Sequence[int], facts: ModelFacts, pieces: Sequence[bytes] | None = None) -> dict[str, Any]:
    """Return the answer of /tokenize. `pieces` are the bytes of each token, or None to omit the pieces.

    A piece is a string or, if the bytes are not UTF-8 text, a list of bytes, as in llama-server. `count` and
    `max_model_len` are vLLM's fields.
    """
    listed: list[Any] = [*tokens]
    if pieces is not None:
        listed = [{"id": token, "piece": _piece(piece)} for token, piece in zip(tokens, pieces, strict=True)]
    return {"tokens": listed, "count": len(listed), "max_model_len": facts.info.context_size}


def parse_detokenize(body: dict[str, Any], facts: ModelFacts) -> tuple[int, ...]:
    """Read `tokens`. Raises InvalidField."""
    return read_tokens(Fields(body), "tokens", facts)


def detokenize_body(text: bytes) -> dict[str, Any]:
    """Return the answer of /detokenize, as `content` (llama-server) and as `prompt` (vLLM)."""
    content = text.decode("utf-8", "replace")
    return {"content": content, "prompt": content}


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]


MOST_FILES: Final = 1024
MOST_RESPONSE_FIELDS: Final = 64
_ONLY_PROMPT: Final = 0  # the value of n_predict for processing the prompt without generating anything
_UNNAMED_FILE: Final = "tmp"  # llama-server's default for `filename`

# Maps unsupported fields that would change the answer to the accepted values and advice
REFUSED_IN_INFILL: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "min_keep": ((0,), ""),
    "post_sampling_probs": ((False,), "n_probs returns the probabilities before sampling"),
}


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
    only_prompt = type(body.get("n_predict")) is int and body["n_predict"] == _ONLY_PROMPT
    if only_prompt:
        # The engine generates at least one token. Editors that only process a prompt send an empty list of samplers.
        body = {**body, "n_predict": 1, "samplers": body.get("samplers") or None}
    fields = Fields(body)
    options = read_options(fields, facts, seed)
    require_filling(facts, "input_suffix")
    refuse_values(fields, REFUSED_IN_INFILL)
    n = {"n_cmpl": fields.integer("n_cmpl", 1, MOST_CHOICES), "n": options.n if fields.peek("n") is not None else None}
    prompt = FillPrompt(
        fields.needed_text("input_prefix"),
        fields.needed_text("input_suffix"),
        fields.text("prompt") or "",
        _read_files(fields),
        cut=True,
    )
    options = replace(
        options,
        logprobs=fields.integer("n_probs", 0, MOST_LOGPROBS) or None,
        response_format=read_format(fields),
        n=agreed({name: count for name, count in n.items() if count is not None}) or 1,
    )
    returns_tokens, response_fields = bool(fields.boolean("return_tokens")), _read_response_fields(fields)
    return ParsedInfill(
        requests=tuple(choices_of(options.request(prompt), options)),
        stream=options.stream,
        ignored=(*(["stream_options.include_usage"] if options.include_usage else []), *fields.unread()),
        seed=options.seed,
        only_prompt=only_prompt,
        returns_tokens=returns_tokens,
        response_fields=response_fields,
    )


def _read_files(fields: Fields) -> tuple[ContextFile, ...]:
    files = fields.item_fields("input_extra") or []
    if len(files) > MOST_FILES:
        raise InvalidField("input_extra", f"{len(files):,} files are too many; the limit is {MOST_FILES:,}")
    return tuple(ContextFile(file.text("filename") or _UNNAMED_FILE, file.needed_text("text")) for file in files)


def _read_response_fields(fields: Fields) -> tuple[str, ...] | None:
    paths = read_strings(fields, "response_fields")
    if len(paths or ()) > MOST_RESPONSE_FIELDS:
        raise InvalidField("response_fields", f"more than {MOST_RESPONSE_FIELDS} paths")
    return None if paths is None else tuple(paths)


class InfillAnswer:
    """The answer to a call of /infill: one object or, for several choices, a list of objects.

    Unlike llama-server's answer, this answer has no `prompt` (the text of the prompt's tokens) and no `id_slot`.
    """

    def __init__(self, parsed: ParsedInfill, facts: ModelFacts, answer_id: str, created: int) -> None:
        self._parsed, self._facts = parsed, facts
        self._choices = [_Choice(index, request) for index, request in enumerate(parsed.requests)]

    def feed(self, choice: int, event: Event) -> list[dict[str, Any]]:
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

    def finish(self) -> list[dict[str, Any]]:
        return []

    def whole(self) -> Mapping[str, Any] | Sequence[Any]:
        bodies = [self._body(choice) for choice in self._choices]
        return bodies[0] if len(bodies) == 1 else bodies

    def _body(self, choice: _Choice) -> dict[str, Any]:
        """Return the last event of a choice in a stream, without text, or the body of the choice."""
        parsed, finished = self._parsed, choice.finished
        assert finished is not None, "the choice has not finished"
        text = "".join(choice.texts)
        body = {
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


class _Choice:
    """The state of one choice."""

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.prompt_tokens = 0
        self.finished: Finished | None = None

    def take(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += map(_probabilities, delta.logprobs)

    def chunk(self, delta: TextDelta) -> dict[str, Any]:
        """Return the stream's chunk for a delta that `take` has added."""
        chunk = {
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


def _probabilities(token: TokenLogprobs) -> dict[str, Any]:
    top = [{"id": each.token_id, **token_entry(each)} for each in token.top]
    return {"id": token.chosen.token_id, **token_entry(token.chosen), "top_logprobs": top}


def _stop_type(finished: Finished) -> str:
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
