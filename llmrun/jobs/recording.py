"""A recorded run: everything that determines an answer of the CPU engine, the answer, and digests of its computation.

Recordings are read strictly, because a recording may be damaged or hostile.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llmrun.base.amounts import format_bytes
from llmrun.base.errors import UsageError, shown
from llmrun.base.types import FinishReason
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.strict_json import parse_unique
from llmrun.engine.requests import ChatPrompt, RecordedChat, Request, TokenPrompt
from llmrun.options.sampling_params import SAMPLING, SamplingParams
from llmrun.options.settings import RULES
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.fields import Fields, missing

if TYPE_CHECKING:
    from pathlib import Path

FORMAT: Final = "llmrun-run"
VERSION: Final = 1  # the version of the file format
TOKENS_A_DIGEST: Final = 32


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model. The file's name contains no folders, and its sha256 is in hexadecimal."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class RecordedAdapter:
    """A LoRA adapter of the opened model. `path` is absolute, and `scale` is the scale of the recorded request."""

    name: str
    path: str
    sha256: str
    scale: float


@dataclass(frozen=True, slots=True)
class Opening:
    """The settings of the opened model that affect answers.

    template       the sha256 of the chat template's source; None if the prompt was raw text
    chat_template  the source of the template that replaced the model's own, or None
    thinking_tags  the thinking tags from the catalogue, or None
    """

    kv_type: str
    context_size: int
    template: str | None
    chat_template: str | None
    thinking_tags: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Output:
    """The answer of a recorded run.

    tokens  token ids, without an end-of-generation token
    finish  why the answer ended, as a FinishReason
    logits  digests of the logits from which tokens were drawn, by the index of the token
    """

    tokens: tuple[int, ...]
    finish: str
    logits: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded run.

    numerics       the version of the engine's numerics (layouts/records.py)
    llmrun         llmrun's version
    model          the model's name as the user gave it; for a file, the absolute path
    prompt_tokens  the token ids of the rendered prompt
    request        the request, whose prompt has the same token ids
    ops            names and digests of all ops in a step with the first tokens of the prompt (`op_tokens`)
    machine        facts about the machine, for information only
    adapters       the LoRA adapters
    """

    numerics: int
    llmrun: str
    model: str
    files: tuple[ModelFile, ...]
    opening: Opening
    prompt_tokens: tuple[int, ...]
    request: Request
    output: Output
    ops: tuple[tuple[str, str], ...]
    machine: Mapping[str, str]
    adapters: tuple[RecordedAdapter, ...] = ()

    @property
    def op_tokens(self) -> tuple[int, ...]:
        """The first tokens of the prompt, which are the input of the step for `ops`."""
        return first_tokens(self.prompt_tokens)

    def as_json(self) -> dict[str, Any]:
        """Return the recording as a JSON object for the file."""
        request, prompt = self.request, self.request.prompt
        chat = None
        if isinstance(prompt, ChatPrompt):
            chat = {"messages": [*prompt.messages], "template_kwargs": dict(prompt.template_kwargs)}
        wanted = request.response_format
        return {
            "format": FORMAT,
            "version": VERSION,
            "numerics": self.numerics,
            "llmrun": self.llmrun,
            "model": self.model,
            "files": [asdict(file) for file in self.files],
            **asdict(self.opening),
            **({"adapters": [asdict(adapter) for adapter in self.adapters]} if self.adapters else {}),
            "chat": chat,
            "prompt_tokens": [*self.prompt_tokens],
            "max_tokens": request.max_tokens,
            "stop": [*request.stop],
            "think": request.think,
            "think_budget": request.think_budget,
            "response_format": wanted and asdict(wanted),
            "sampling": {name: getattr(request.sampling, name) for name in SAMPLING},
            "logit_bias": {
                str(token): None if bias == -math.inf else bias for token, bias in request.sampling.logit_bias.items()
            },
            "seed": request.sampling.seed,
            "tokens": [*self.output.tokens],
            "token_digests": [*token_digests(self.output.tokens)],
            "finish": self.output.finish,
            "logits": {str(index): digest for index, digest in self.output.logits.items()},
            "ops": [[*op] for op in self.ops],
            "machine": dict(self.machine),
        }


def prompt_of(chat: Mapping[str, Any] | None, tokens: Sequence[int]) -> RecordedChat | TokenPrompt:
    """Return the prompt of a recorded request. `chat` has messages and template_kwargs, or is None for raw text."""
    if chat is None:
        return TokenPrompt(tokens)
    return RecordedChat(chat["messages"], template_kwargs=chat["template_kwargs"], tokens=tokens)


def first_tokens(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of the step with digested ops: up to 8 tokens, so that the kernels for a few rows run."""
    return tuple(prompt[:8])


def token_digests(tokens: Sequence[int]) -> Iterator[str]:
    """Yield digests of the tokens up to every 32nd token and up to the last token, to reveal edits and damage."""
    hashed = hashlib.sha256()
    for start in range(0, len(tokens), TOKENS_A_DIGEST):
        hashed.update(np.array(tokens[start : start + TOKENS_A_DIGEST], "<i4").tobytes())
        yield hashed.hexdigest()[:16]


_MOST_BYTES: Final = 32 << 20  # A recording of a million tokens is 16 MB in size.
_MOST_TOKEN: Final = 1 << 24
_MOST_LOGITS: Final = 64
_MOST_BIAS: Final = 1e30
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{16}")


def read_recording(path: Path) -> Recording:
    """Read a file written by `llmrun generate --record`. Raises UsageError if the file is not a readable recording."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"recording cannot be read: {path}: {error.strerror or error}") from error
    try:
        return parse_recording(data)
    except UsageError as error:
        raise UsageError(f"not a recording of llmrun: {path}: {error}", hint=error.hint) from None


def parse_recording(data: bytes) -> Recording:
    """Parse the contents of a recording. Raises UsageError with a short message."""
    if len(data) > _MOST_BYTES:
        raise UsageError(f"larger than {format_bytes(_MOST_BYTES)}")
    try:
        body = parse_unique(data.decode())
        if type(body) is not dict:
            raise UsageError("expected a JSON object")
        json.dumps(body, ensure_ascii=False).encode()  # raises an error for unpaired surrogates
        return _recording(Fields(body))
    except json.JSONDecodeError as error:
        raise UsageError(f"invalid JSON: {error.msg}: line {error.lineno}, column {error.colno}") from None
    except UnicodeError:
        raise UsageError("not UTF-8 text") from None
    except RecursionError:
        raise UsageError("nested too deeply") from None
    except InvalidField as error:
        raise UsageError(str(error)) from None
    except ValueError as error:
        raise UsageError(shown(str(error), 200)) from None


def _recording(fields: Fields) -> Recording:
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", f'"{FORMAT}"')
    version = _integer(fields, "version", 1)
    if version != VERSION:
        raise UsageError(
            f"the format has version {version}, but this llmrun reads version {VERSION}", hint="update llmrun"
        )
    prompt_tokens = _tokens(fields, "prompt_tokens")
    if not prompt_tokens:
        raise fields.wrong("prompt_tokens", "at least one token")
    tokens = _tokens(fields, "tokens")
    if _items(fields, "token_digests") != [*token_digests(tokens)]:
        raise InvalidField("token_digests", "the digests do not match the tokens, so the file is damaged or was edited")
    recording = Recording(
        numerics=_integer(fields, "numerics", 1),
        llmrun=fields.needed_text("llmrun"),
        model=fields.needed_text("model"),
        files=_files(fields),
        opening=_opening(fields),
        prompt_tokens=prompt_tokens,
        request=_request(fields, prompt_tokens),
        output=Output(
            tokens,
            _needed(fields, "finish", fields.word("finish", [*FinishReason])),
            {_index(fields, key, len(tokens)): digest for key, digest in _digests(fields, "logits").items()},
        ),
        ops=_ops(fields),
        machine=_machine(fields),
        adapters=_adapters(fields),
    )
    if unknown := fields.unread():
        raise InvalidField(unknown[0], "this field is unknown")
    return recording


def _files(fields: Fields) -> tuple[ModelFile, ...]:
    items: list[Fields] = _needed(fields, "files", fields.item_fields("files"))
    found = [ModelFile(item.needed_text("name"), _sha256(item)) for item in items]
    if not found:
        raise fields.wrong("files", "at least one file")
    return tuple(found)


def _adapters(fields: Fields) -> tuple[RecordedAdapter, ...]:
    found = []
    for item in fields.item_fields("adapters") or []:
        scale = item.number("scale", -math.inf, math.inf)
        if scale is None:
            raise item.wrong("scale", "a number")
        found.append(RecordedAdapter(item.needed_text("name"), item.needed_text("path"), _sha256(item), scale))
    return tuple(found)


def _sha256(item: Fields) -> str:
    digest = item.needed_text("sha256")
    if not _SHA256.fullmatch(digest):
        raise item.wrong("sha256", "64 hexadecimal digits")
    return digest


def _opening(fields: Fields) -> Opening:
    template = fields.text("template")
    if template is not None and not _SHA256.fullmatch(template):
        raise fields.wrong("template", "64 hexadecimal digits")
    tags = fields.items("thinking_tags")
    if tags is not None and not (len(tags) in (0, 2) and all(type(tag) is str for tag in tags)):
        raise fields.wrong("thinking_tags", "two strings or none")
    return Opening(
        kv_type=_kv_type(fields),
        context_size=_integer(fields, "context_size", 1),
        template=template,
        chat_template=fields.text("chat_template"),
        thinking_tags=None if tags is None else tuple(tags),
    )


def _kv_type(fields: Fields) -> str:
    """Return the type of the KV cache. Opening the model later checks whether this version supports the type."""
    found = fields.needed_text("kv_type")
    if not re.fullmatch(r"[a-z0-9_:]{1,40}", found):
        raise fields.wrong("kv_type", "the name of a type")
    return found


def _request(fields: Fields, prompt_tokens: tuple[int, ...]) -> Request:
    chat = fields.fields("chat")
    seen = None
    if chat is not None:
        messages = [
            {"role": item.needed_text("role"), "content": item.needed_text("content")}
            for item in _needed(chat, "messages", chat.item_fields("messages"))
        ]
        seen = {"messages": messages, "template_kwargs": chat.object("template_kwargs") or {}}
    stops = _items(fields, "stop")
    if not all(type(stop) is str and stop for stop in stops):
        raise fields.wrong("stop", "non-empty strings")
    return Request(
        prompt_of(seen, prompt_tokens),
        max_tokens=fields.integer("max_tokens", 1),
        stop=tuple(stops),
        sampling=_sampling(fields),
        think=fields.boolean("think"),
        think_budget=fields.integer("think_budget", 0),
        response_format=_format(fields.fields("response_format")),
    )


def _sampling(fields: Fields) -> SamplingParams:
    given = _needed(fields, "sampling", fields.fields("sampling"))
    values = {name: _parameter(given, name, given.value(name)) for name in SAMPLING}
    seed = _parameter(fields, "seed", fields.value("seed"))
    biases = {}
    for token, bias in (fields.object("logit_bias") or {}).items():
        is_number = type(bias) in (int, float) and abs(bias) < _MOST_BIAS
        if not (re.fullmatch(r"\d{1,8}", token) and (bias is None or is_number)):
            raise fields.wrong("logit_bias", "token ids with numbers or null")
        biases[int(token)] = -math.inf if bias is None else float(bias)
    return SamplingParams(**values, logit_bias=biases, seed=seed)


def _parameter(fields: Fields, name: str, value: Any) -> Any:
    """Return a sampling parameter, or the seed. Raises InvalidField."""
    kind = SAMPLING[name].kind if name in SAMPLING else int
    accepted = (int, float) if kind is float else (kind,)
    try:
        if type(value) not in accepted:
            raise ValueError
        RULES[name].check(value)
    except (ValueError, OverflowError):
        raise fields.wrong(name, RULES[name].words) from None
    return kind(value)


def _format(fields: Fields | None) -> ResponseFormat | None:
    if fields is None:
        return None
    choices = _items(fields, "choices")
    if not all(type(choice) is str for choice in choices):
        raise fields.wrong("choices", "strings")
    kind = _needed(fields, "kind", fields.word("kind", [*FormatKind]))
    return ResponseFormat(FormatKind(kind), fields.text("text") or "", tuple(choices), fields.text("origin") or kind)


def _ops(fields: Fields) -> tuple[tuple[str, str], ...]:
    found = _items(fields, "ops")
    for op in found:
        if not (type(op) is list and [type(part) for part in op] == [str, str] and _DIGEST.fullmatch(op[1])):
            raise fields.wrong("ops", "names with digests")
    return tuple((name, digest) for name, digest in found)


def _machine(fields: Fields) -> Mapping[str, str]:
    found: Mapping[str, str] = fields.object("machine") or {}
    if not all(type(value) is str for value in found.values()):
        raise fields.wrong("machine", "strings")
    return found


def _digests(fields: Fields, name: str) -> Mapping[str, str]:
    found: Mapping[str, str] = _needed(fields, name, fields.object(name))
    if len(found) > _MOST_LOGITS or not all(
        type(value) is str and _DIGEST.fullmatch(value) for value in found.values()
    ):
        raise fields.wrong(name, "digests of 16 hexadecimal digits")
    return found


def _index(fields: Fields, key: str, n_tokens: int) -> int:
    """Return the index of a token. The index after the last token belongs to an end-of-generation token."""
    if not re.fullmatch(r"0|[1-9]\d{0,8}", key) or int(key) > n_tokens:
        raise fields.wrong("logits", f"indexes of tokens from 0 to {n_tokens}")
    return int(key)


def _tokens(fields: Fields, name: str) -> tuple[int, ...]:
    found = _items(fields, name)
    for number, token in enumerate(found):
        if type(token) is not int or not 0 <= token < _MOST_TOKEN:
            raise InvalidField(f"{name}[{number}]", f"expected a token id from 0 to {_MOST_TOKEN - 1}")
    return tuple(found)


def _items(fields: Fields, name: str) -> list[Any]:
    found: list[Any] = _needed(fields, name, fields.items(name))
    return found


def _integer(fields: Fields, name: str, minimum: int) -> int:
    found: int = _needed(fields, name, fields.integer(name, minimum))
    return found


def _needed(fields: Fields, name: str, value: Any) -> Any:
    if value is None:
        raise missing(fields.path(name))
    return value
