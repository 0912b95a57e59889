"""A recorded run: everything that determines an answer of the CPU engine, the answer, and digests of its computation.

Recordings are read strictly, because a recording may be damaged or hostile.
"""

from __future__ import annotations

import binascii
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
from msgspec import structs

from llmrun.base.amounts import format_bytes
from llmrun.base.errors import UsageError, shown
from llmrun.base.types import IMAGE_ROW, FinishReason
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.strict_json import parse_unique
from llmrun.engine.requests import (
    IMAGE,
    ChatPrompt,
    Prompt,
    RecordedChat,
    Request,
    TextPrompt,
    TokenPrompt,
    image_parts,
)
from llmrun.formats.images.header import MOST_BYTES, MOST_IMAGES
from llmrun.options.sampling_params import SAMPLING, SamplingParams
from llmrun.options.settings import RULES
from llmrun.serving.protocol.declarations import Expected, Limits, Matching, Tagged, read, wrong
from llmrun.serving.protocol.errors import InvalidField

if TYPE_CHECKING:
    from pathlib import Path

FORMAT: Final = "llmrun-run"
VERSION: Final = 2  # the version of the file format; recordings without images have version 1
TOKENS_A_DIGEST: Final = 32
MOST_IMAGE_BYTES: Final = 32 << 20  # of the files of all images of a recording


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
class RecordedProjector(ModelFile):
    """The projector that read the images of a run. `path` is absolute. The limits are those of the settings."""

    path: str
    image_min_tokens: int | None
    image_max_tokens: int | None


@dataclass(frozen=True, slots=True)
class RecordedImage:
    """An image of a recorded prompt. All fields are digests in hexadecimal.

    sha256  of the file
    pixels  of the decoded and scaled tiles
    rows    of the embeddings
    """

    sha256: str
    pixels: str
    rows: str


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
    projector      the projector, or None for a run without images
    images         the images in the order of the prompt, whose files are part of the request
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
    projector: RecordedProjector | None = None
    images: tuple[RecordedImage, ...] = ()

    @property
    def op_tokens(self) -> tuple[int, ...]:
        """The first tokens of the prompt without its images, which are the input of the step for `ops`."""
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
            "version": VERSION if self.images else 1,
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
            "response_format": wanted and structs.asdict(wanted),
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
            **self._images_as_json(),
        }

    def _images_as_json(self) -> dict[str, Any]:
        if self.projector is None:
            return {}
        files = {image.sha256: image.data for image in images_of(self.request.prompt)}
        return {
            "projector": asdict(self.projector),
            "images": [asdict(image) for image in self.images],
            "image_files": {key: binascii.b2a_base64(data, newline=False).decode() for key, data in files.items()},
        }


class SentImage(NamedTuple):
    """An image of a request: the SHA-256 of its file, the file, and the detail."""

    sha256: str
    data: bytes
    detail: str


def images_of(prompt: Prompt) -> list[SentImage]:
    """Return the images in the order of the prompt."""
    if isinstance(prompt, ChatPrompt):
        parts = image_parts(prompt.messages)
        return [SentImage(part[IMAGE], prompt.images[part[IMAGE]], part.get("detail", "auto")) for part in parts]
    if isinstance(prompt, TextPrompt | TokenPrompt):
        return [SentImage(hashlib.sha256(data).hexdigest(), data, "auto") for data in prompt.images]
    return []


def first_tokens(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of the step with digested ops: up to 8 tokens, so that the kernels for a few rows run.

    Rows of images are left out, because they depend on the encoder.
    """
    return tuple(token for token in prompt if token != IMAGE_ROW)[:8] or (0,)


def token_digests(tokens: Sequence[int]) -> Iterator[str]:
    """Yield digests of the tokens up to every 32nd token and up to the last token, to reveal edits and damage."""
    hashed = hashlib.sha256()
    for start in range(0, len(tokens), TOKENS_A_DIGEST):
        hashed.update(np.array(tokens[start : start + TOKENS_A_DIGEST], "<i4").tobytes())
        yield hashed.hexdigest()[:16]


_MOST_BYTES: Final = 32 << 20  # without images; a recording of a million tokens is 16 MB in size
_MOST_ENCODED: Final = MOST_IMAGE_BYTES // 3 * 4 + 4 * MOST_IMAGES  # characters of all images in base64
_MOST_TOKEN: Final = 1 << 24
_MOST_LOGITS: Final = 64
_MOST_BIAS: Final = 1e30
_DIGEST: Final = re.compile(r"[0-9a-f]{16}")
_ENCODED: Final = re.compile(rb'"[A-Za-z0-9+/]{80,}={0,2}"')


def read_recording(path: Path) -> Recording:
    """Read a file written by `llmrun generate --record`. Raises UsageError if the file is not a readable recording."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + _MOST_ENCODED + 1)
    except OSError as error:
        raise UsageError(f"recording cannot be read: {path}: {error.strerror or error}") from error
    try:
        return parse_recording(data)
    except UsageError as error:
        raise UsageError(f"not a recording of llmrun: {path}: {error}", hint=error.hint) from None


def parse_recording(data: bytes) -> Recording:
    """Parse the contents of a recording. Raises UsageError with a short message."""
    if len(data) > _MOST_BYTES:
        # Images may be longer, because parsing a text takes far less memory than parsing as many bytes of other values.
        encoded = sum(len(found[0]) for found in _ENCODED.finditer(data))
        if len(data) - encoded > _MOST_BYTES:
            raise UsageError(f"larger than {format_bytes(_MOST_BYTES)}, not counting images")
        if encoded > _MOST_ENCODED:
            raise UsageError(f"the images are larger than {MOST_IMAGE_BYTES >> 20} MiB")
    try:
        body = parse_unique(data.decode())
        if type(body) is not dict:
            raise UsageError("expected a JSON object")
        json.dumps(body, ensure_ascii=False).encode()  # raises an error for unpaired surrogates
        return _recording(body)
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


_Sha256 = Annotated[str, Matching("[0-9a-f]{64}", "64 hexadecimal digits")]
_Digest = Annotated[str, Matching("[0-9a-f]{16}", "a digest of 16 hexadecimal digits")]
_TokenId = Annotated[int, Limits(0, _MOST_TOKEN - 1), Expected(f"a token id from 0 to {_MOST_TOKEN - 1}")]
_PromptToken = Annotated[int, Limits(IMAGE_ROW, _MOST_TOKEN - 1), Expected(f"a token id from 0 to {_MOST_TOKEN - 1}")]
_AtLeastOne = Annotated[int, Limits(1)]


class _File(TypedDict):
    name: str
    sha256: _Sha256


class _Adapter(_File):
    path: str
    scale: Annotated[float, Expected("a number")]


class _Projector(_File):
    path: str
    image_min_tokens: NotRequired[_AtLeastOne]
    image_max_tokens: NotRequired[_AtLeastOne]


class _Image(TypedDict):
    sha256: _Sha256
    pixels: _Sha256
    rows: _Sha256


class _TextPart(TypedDict):
    type: Literal["text"]
    text: str


class _ImagePart(TypedDict):
    type: Literal["image"]
    image: _Sha256
    detail: NotRequired[Literal["auto", "low", "high"]]


_Part = Annotated[_TextPart | _ImagePart, Tagged("type")]


class _ChatMessage(TypedDict):
    role: str
    content: str | list[_Part]


class _Chat(TypedDict):
    messages: list[_ChatMessage]
    template_kwargs: NotRequired[dict[str, Any]]


class _Format(TypedDict):
    kind: FormatKind
    choices: list[str]
    text: NotRequired[str]
    origin: NotRequired[str]
    strict: NotRequired[bool]


class _RecordedRun(TypedDict):
    format: Literal["llmrun-run"]
    version: _AtLeastOne
    numerics: _AtLeastOne
    llmrun: str
    model: str
    files: Annotated[list[_File], Limits(1, noun="file")]
    kv_type: Annotated[str, Matching("[a-z0-9_:]{1,40}", "the name of a type")]
    context_size: _AtLeastOne
    template: NotRequired[_Sha256]
    chat_template: NotRequired[str]
    thinking_tags: NotRequired[list[str]]
    adapters: NotRequired[list[_Adapter]]
    chat: NotRequired[_Chat]
    prompt_tokens: Annotated[list[_PromptToken], Limits(1, noun="token")]
    max_tokens: NotRequired[_AtLeastOne]
    stop: list[Annotated[str, Limits(1)]]
    think: NotRequired[bool]
    think_budget: NotRequired[Annotated[int, Limits(0)]]
    response_format: NotRequired[_Format]
    sampling: dict[str, Any]
    logit_bias: NotRequired[dict[str, float | None]]
    seed: Any
    tokens: list[_TokenId]
    token_digests: list[str]
    finish: FinishReason
    logits: dict[str, _Digest]
    ops: list[list[str]]
    machine: NotRequired[dict[str, str]]
    projector: NotRequired[_Projector]
    images: NotRequired[Annotated[list[_Image], Limits(1, MOST_IMAGES, "image")]]
    image_files: NotRequired[dict[str, str]]


def _recording(body: dict[str, Any]) -> Recording:
    version = body.get("version")
    if body.get("format") == FORMAT and type(version) is int and version > VERSION:
        words = f"the format has version {version}, but this llmrun reads versions up to {VERSION}"
        raise UsageError(words, hint="update llmrun")
    given, unknown = read(_RecordedRun, body)
    if unknown:
        raise InvalidField(unknown[0], "this field is unknown")
    if (given["version"] == VERSION) is not ("images" in given):
        raise InvalidField("images", f"recordings of version {VERSION} have images, and others have none")
    tokens = tuple(given["tokens"])
    if given["token_digests"] != [*token_digests(tokens)]:
        raise InvalidField("token_digests", "the digests do not match the tokens, so the file is damaged or was edited")
    return Recording(
        numerics=given["numerics"],
        llmrun=given["llmrun"],
        model=given["model"],
        files=tuple(ModelFile(**file) for file in given["files"]),
        opening=_opening(given),
        prompt_tokens=tuple(given["prompt_tokens"]),
        request=_request(given),
        output=Output(tokens, given["finish"].value, _logits(given, len(tokens))),
        ops=_ops(given),
        machine=given.get("machine", {}),
        adapters=tuple(RecordedAdapter(**adapter) for adapter in given.get("adapters", ())),
        projector=_projector(given),
        images=tuple(RecordedImage(**image) for image in given.get("images", ())),
    )


def _projector(given: _RecordedRun) -> RecordedProjector | None:
    if ("projector" in given) is not ("images" in given):
        raise InvalidField("projector", "recordings with images have a projector, and others have none")
    if (found := given.get("projector")) is None:
        return None
    limits = found.get("image_min_tokens"), found.get("image_max_tokens")
    return RecordedProjector(found["name"], found["sha256"], found["path"], *limits)


def _image_files(given: _RecordedRun) -> dict[str, bytes]:
    """Return the files of the images by their SHA-256. Each image must have a file, and each file an image."""
    files, left = {}, MOST_IMAGE_BYTES
    wanted = {image["sha256"] for image in given.get("images", ())}
    found = given.get("image_files", {})
    if wanted != found.keys():
        raise InvalidField("image_files", "there must be one file for each different image")
    for key, text in found.items():
        place = f"image_files.{key}"
        try:
            files[key] = binascii.a2b_base64(text, strict_mode=True)
        except ValueError:
            raise InvalidField(place, "expected base64") from None
        left -= len(files[key])
        if len(files[key]) > MOST_BYTES or left < 0:
            raise InvalidField(place, "the file is too large")
        if hashlib.sha256(files[key]).hexdigest() != key:
            raise InvalidField(place, "the file has another SHA-256, so it is damaged or was edited")
    return files


def _opening(given: _RecordedRun) -> Opening:
    """Return the model's settings. Whether this version supports the settings is checked when the model is opened."""
    tags = given.get("thinking_tags")
    if tags is not None and len(tags) not in (0, 2):
        raise wrong("thinking_tags", "two strings or none", tags)
    return Opening(
        kv_type=given["kv_type"],
        context_size=given["context_size"],
        template=given.get("template"),
        chat_template=given.get("chat_template"),
        thinking_tags=None if tags is None else tuple(tags),
    )


def _request(given: _RecordedRun) -> Request:
    wanted = given.get("response_format")
    return Request(
        _prompt(given),
        max_tokens=given.get("max_tokens"),
        stop=tuple(given["stop"]),
        sampling=_sampling(given),
        think=given.get("think"),
        think_budget=given.get("think_budget"),
        response_format=None if wanted is None else _format(wanted),
    )


def _prompt(given: _RecordedRun) -> RecordedChat | TokenPrompt:
    tokens, files = tuple(given["prompt_tokens"]), _image_files(given)
    if not files and IMAGE_ROW in tokens:
        raise wrong(f"prompt_tokens[{tokens.index(IMAGE_ROW)}]", "a token id", IMAGE_ROW)
    keys = [image["sha256"] for image in given.get("images", ())]
    if (chat := given.get("chat")) is None:
        return TokenPrompt(tokens, tuple(files[key] for key in keys))
    if [part[IMAGE] for part in image_parts(chat["messages"])] != keys:
        raise InvalidField("images", "the images do not match the messages")
    return RecordedChat(chat["messages"], template_kwargs=chat.get("template_kwargs", {}), images=files, tokens=tokens)


def _sampling(given: _RecordedRun) -> SamplingParams:
    if unknown := given["sampling"].keys() - SAMPLING.keys():
        raise InvalidField(f"sampling.{min(unknown)}", "this field is unknown")
    values = {name: _parameter(name, f"sampling.{name}", given["sampling"].get(name)) for name in SAMPLING}
    biases = {}
    for token, bias in given.get("logit_bias", {}).items():
        if not re.fullmatch(r"\d{1,8}", token) or (bias is not None and abs(bias) >= _MOST_BIAS):
            raise wrong("logit_bias", "token ids with numbers or null", {token: bias})
        biases[int(token)] = -math.inf if bias is None else bias
    return SamplingParams(**values, logit_bias=biases, seed=_parameter("seed", "seed", given["seed"]))


def _parameter(name: str, path: str, value: Any) -> Any:
    """Return a sampling parameter, or the seed. Raises InvalidField."""
    kind = SAMPLING[name].kind if name in SAMPLING else int
    accepted = (int, float) if kind is float else (kind,)
    try:
        if type(value) not in accepted:
            raise ValueError
        RULES[name].check(value)
        if value in RULES[name].also:  # a recording contains the values that a run used
            raise ValueError
    except (ValueError, OverflowError):
        raise wrong(path, RULES[name].words, value) from None
    return kind(value)


def _format(given: _Format) -> ResponseFormat:
    origin = given.get("origin", given["kind"].value)
    text, choices = given.get("text", ""), tuple(given["choices"])
    return ResponseFormat(given["kind"], text, choices, origin, given.get("strict", False))


def _ops(given: _RecordedRun) -> tuple[tuple[str, str], ...]:
    for op in given["ops"]:
        if len(op) != 2 or not _DIGEST.fullmatch(op[1]):
            raise wrong("ops", "names with digests", op)
    return tuple((name, digest) for name, digest in given["ops"])


def _logits(given: _RecordedRun, n_tokens: int) -> dict[int, str]:
    """Return the digests of the logits by token index. The index after the last token belongs to an end token."""
    keys = given["logits"].keys()
    if len(keys) > _MOST_LOGITS or not all(re.fullmatch(r"0|[1-9]\d{0,8}", key) for key in keys):
        raise wrong("logits", f"up to {_MOST_LOGITS} indexes of tokens", given["logits"])
    if any(int(key) > n_tokens for key in keys):
        raise wrong("logits", f"indexes of tokens from 0 to {n_tokens}", given["logits"])
    return {int(key): digest for key, digest in given["logits"].items()}
