"""Reads the lines of a batch, and turns the lines into OpenAI API calls.

The lines are JSON Lines, prompts, or rows of a CSV file.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypedDict

from llmrun.base.errors import LlmrunError, UsageError, shown
from llmrun.base.folders import refuse_utf_16
from llmrun.jobs.batching.images import IMAGES, ImageFile, ImageFolder, loaded, prompt_content, with_files
from llmrun.jobs.batching.workers.base import CHAT
from llmrun.options.presets import INPUT
from llmrun.serving.protocol.declarations import Limits, missing, read, wrong_type
from llmrun.serving.protocol.errors import parse_json

LONGEST_LINE: Final = 16 << 20  # bytes, the same limit as for the body of a request to the server
_CSV: Final = {".csv": ",", ".tsv": "\t"}
_TEXT: Final = ".txt"
_BLANK: Final = b" \t\r\n"
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input.

    number   counts from 1, as editors do; if a CSV row has line breaks, the number of the row's first line
    data     the line without surrounding whitespace, or a CSV row as a JSON object
    digest   the SHA-256 of `data`
    """

    number: int
    data: bytes
    digest: bytes


def is_csv(path: Path) -> bool:
    """Return whether a file name has a CSV or TSV extension."""
    return path.suffix.lower() in _CSV


def is_text(path: Path) -> bool:
    """Return whether the lines of a file with this name are prompts."""
    return path.suffix.lower() == _TEXT


def check_source(path: Path, *, has_template: bool) -> None:
    """Raise UsageError if the input is not a file, or if the columns of a CSV file cannot be used.

    has_template  True if the columns are the variables of a prompt template
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if not path.is_file():
        raise UsageError(f"{path}: not a file", hint="use - to read standard input")
    if not is_csv(path):
        return
    names = _csv_names(path)
    if not has_template and not {"prompt", "messages"} & {*names}:
        shown_names = shown(", ".join(names), 200)
        raise UsageError(
            f"{path}: no column is named prompt; the columns are {shown_names}",
            hint="rename a column, or name a preset whose prompt uses the columns: -m NAME",
        )


def read_lines(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Line]:
    """Yield the lines of a batch that are not blank. Only one line is in memory at a time, regardless of its length.

    check  called for every line, including blank lines; may raise an exception to stop
    Raises UsageError for a file that cannot be read, for a line that is too long, and for invalid CSV.
    """
    with _reading(path) as stream:
        yield from _csv_rows(stream, path, check) if is_csv(path) else _text_lines(stream, path, check)


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as stream:
            refuse_utf_16(stream.peek(2), str(path))
            yield stream
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def _text_lines(stream: BinaryIO, path: Path, check: Callable[[], None]) -> Iterator[Line]:
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        check()
        number += 1
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            raise bad_line(path, number, f"the line has more than {LONGEST_LINE:,} bytes")
        if data := line.removeprefix(_BOM).strip(_BLANK):
            yield Line(number, data, hashlib.sha256(data).digest())


def bad_line(path: Path, number: int, words: str, hint: str = "") -> UsageError:
    """Return the error for a line that cannot be used."""
    return UsageError(f"{path}: line {number:,}: {words}", hint=hint)


class _CsvText:
    """The lines of a CSV file as text, which Python's csv module reads."""

    def __init__(self, stream: BinaryIO, path: Path, check: Callable[[], None]) -> None:
        self._stream = stream
        self._path = path
        self._check = check
        self._number = 0
        self.row_bytes = 0  # bytes of the current row so far; the caller resets the count before each row

    def __iter__(self) -> Iterator[str]:
        while line := self._stream.readline(LONGEST_LINE + 1):
            self._check()
            self._number += 1
            self.row_bytes += len(line)
            if self.row_bytes > LONGEST_LINE:
                raise bad_line(self._path, self._number, f"the row has more than {LONGEST_LINE:,} bytes")
            yield line.removeprefix(_BOM).decode(errors="surrogateescape")


def _csv_names(path: Path) -> list[str]:
    """Return the names of the columns. Raises UsageError for an invalid header."""
    with _reading(path) as stream:
        return _header(_csv_reader(_CsvText(stream, path, lambda: None), path), path)


def _csv_reader(text: _CsvText, path: Path) -> Any:
    csv.field_size_limit(LONGEST_LINE)
    return csv.reader(text, delimiter=_CSV[path.suffix.lower()], strict=True)


def _csv_rows(stream: BinaryIO, path: Path, check: Callable[[], None]) -> Iterator[Line]:
    """Yield the rows of a CSV file as JSON objects, whose keys are the column names in the header."""
    text = _CsvText(stream, path, check)
    rows = _csv_reader(text, path)
    names = _header(rows, path)
    while True:
        number, text.row_bytes = rows.line_num + 1, 0
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise bad_line(path, number, f"not valid CSV: {error}") from None
        if row is None:
            return
        if not row:
            continue
        if len(row) != len(names):
            raise bad_line(path, number, f"the row has {len(row):,} fields, the header has {len(names):,}")
        try:
            data = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise bad_line(path, number, "the row is not UTF-8 text") from None
        yield Line(number, data, hashlib.sha256(data).digest())


def _header(rows: Iterator[list[str]], path: Path) -> list[str]:
    """Read the names of the columns. Raises UsageError for an invalid header."""
    try:
        names = next(rows, [])
    except csv.Error as error:
        raise UsageError(f"{path}: the header is not valid CSV: {error}") from None
    if not any(names):
        raise UsageError(f"{path}: the file has no header", hint="the first line of a CSV file names its columns")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f'{path}: two columns have the name "{shown(name, 40)}"')
        if any("\udc80" <= character <= "\udcff" for character in name):
            raise UsageError(f"{path}: the header is not UTF-8 text")
    return names


_LONGEST_ID: Final = 512  # The maximum length of a line's ID in characters.
_SEEDS: Final = 1 << 31  # All servers and JSON parsers accept seeds up to 2**31 - 1.
_LEFT_OUT: Final = ("model", "stream", "stream_options")
_RANDOM_SEED: Final = -1  # requests a random seed, as in llama.cpp

Fill = Callable[[Mapping[str, Any]], tuple[str, str | None]]


@dataclass(frozen=True, slots=True)
class Default:
    """A default field. Calls without any of the fields in `names` receive `value` under the first name."""

    names: tuple[str, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options that a run adds to its calls.

    seed      decides the seeds of calls without a seed
    defaults  fields that are added to calls without those fields
    system    the system prompt for lines that contain a prompt, or None
    fill      turns a line's fields into a prompt and a system prompt; None if the lines are calls or prompts
    template  the text of the prompt template that `fill` uses, or None
    text      True if each line of the input is a prompt, and not a JSON object
    folder    the folder of the images that lines name, or None
    """

    seed: int = 0
    defaults: tuple[Default, ...] = ()
    system: str | None = None
    fill: Fill | None = None
    template: str | None = None
    text: bool = False
    folder: ImageFolder | None = None

    def as_json(self) -> dict[str, Any]:
        """Return all options except the seed as JSON, to detect a run with different options."""
        defaults = {default.names[0]: default.value for default in self.defaults}
        text = {"--text": True} if self.text else {}  # older versions have no such option
        return {**defaults, "--system": self.system, "--template": self.template, **text}


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a batch, reduced to the fields that affect its answer.

    key    identifies the call: calls with equal keys have equal answers
    model  the model that the line named, or "" if none; in any case, the run's own model answers
    images  the files that the body refers to
    has_images  True if the body has any image
    """

    url: str
    body: Mapping[str, Any]
    key: bytes = field(default=b"")
    model: str = ""
    images: Mapping[str, ImageFile] = field(default_factory=dict)
    has_images: bool = False

    def whole_body(self) -> Mapping[str, Any]:
        """Return the body with its images. Raises UsageError if an image has changed since its line was read."""
        return loaded(self.body, self.images)


@dataclass(frozen=True, slots=True)
class Asked:
    """A line that is a request: the line's ID and the line's call."""

    custom_id: str
    call: Call


class _BatchLine(TypedDict, total=False):
    custom_id: Annotated[str, Limits(1, _LONGEST_ID)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


def read_request(line: Line, options: CallOptions) -> Asked:
    """Read a line as a request. Raises LlmrunError if the line is not a request.

    A line is an object with `custom_id`, `method`, `url` and `body`, as in OpenAI's Batch API, or an object with either
    `messages` or `prompt`, which may have a `custom_id` and any field of a chat completion. With `options.fill`, a line
    contains the values for a prompt template. With `options.text`, a line is a prompt, or the input of the template.
    """
    given = _text(line, options) if options.text else _object(line)
    head, _ = read(_BatchLine, {"custom_id": given.get("custom_id")})
    custom_id = head.get("custom_id", f"line-{line.number}")
    if options.fill is not None:
        values = {**given, "custom_id": custom_id}
        images = values.pop(IMAGES, None)
        prompt, system = options.fill(values)
        return _asked(custom_id, CHAT, {"messages": _messages(prompt_content(prompt, images), system)}, options)
    if "body" in given:
        return _openai_line(given, options)
    return _plain_line(given, custom_id, options)


def _text(line: Line, options: CallOptions) -> dict[str, Any]:
    try:
        return {"prompt" if options.fill is None else INPUT: line.data.decode()}
    except UnicodeDecodeError as error:
        raise LlmrunError(f"not UTF-8 text: invalid byte at {error.start:,}") from None


def _object(line: Line) -> dict[str, Any]:
    """Return the fields of a line. Raises LlmrunError if the line is not a JSON object."""
    try:
        return {name: value for name, value in parse_json(line.data).items() if value is not None}
    except LlmrunError as error:
        words = str(error).replace("the request body is ", "").replace("the request body", "the line")
        hint = "if each line is a prompt, add --text" if line.number == 1 and not line.data.startswith(b"{") else ""
        raise LlmrunError(words.replace(": line 1, column", ": column"), hint=hint) from None


def _openai_line(given: Mapping[str, Any], options: CallOptions) -> Asked:
    line, unknown = read(_BatchLine, given)
    if "custom_id" not in line or "url" not in line:
        raise missing("custom_id" if "custom_id" not in line else "url")
    if unknown:
        raise LlmrunError(f"{unknown[0]}: unknown field next to body", hint="move the field into the body")
    return _asked(line["custom_id"], line["url"], line["body"], options)


def _plain_line(given: Mapping[str, Any], custom_id: str, options: CallOptions) -> Asked:
    prompt = given.get("prompt")
    if (prompt is None) == ("messages" not in given):
        raise LlmrunError("the line must have exactly one of prompt and messages")
    body = {name: value for name, value in given.items() if name not in ("custom_id", "prompt")}
    if prompt is not None:
        if type(prompt) is not str:
            raise wrong_type("prompt", "a string", prompt)
        body["messages"] = _messages(prompt_content(prompt, body.pop(IMAGES, None)), options.system)
    return _asked(custom_id, CHAT, body, options)


def _messages(prompt: str | list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def _asked(custom_id: str, url: str, given: Mapping[str, Any], options: CallOptions) -> Asked:
    body = {name: value for name, value in given.items() if value is not None and name not in _LEFT_OUT}
    if given.get("stream"):
        raise LlmrunError("stream: not supported in a batch")
    for default in options.defaults:
        if not any(name in body for name in default.names):
            body[default.names[0]] = default.value
    if body.get("seed") == _RANDOM_SEED:
        del body["seed"]
    referring, images, has_images = with_files(body, options.folder)
    body = dict(referring)
    content = json.dumps([url, body, options.seed], sort_keys=True, separators=(",", ":")).encode()
    key = hashlib.sha256(content).digest()
    body.setdefault("seed", int.from_bytes(key[:8], "big") % _SEEDS)
    model = given.get("model")
    named = shown(model) if isinstance(model, str) else ""
    return Asked(custom_id, Call(url, body, key[:16], named, images, has_images))


def digest_of(line: Line, call: Call) -> bytes:
    """Return the SHA-256 of a line and of the files of its images."""
    if not call.images:
        return line.digest
    return hashlib.sha256(line.digest + "".join(sorted(call.images)).encode()).digest()
