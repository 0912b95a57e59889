"""Reads the images in requests of all APIs, and refuses all images that are not in the request itself.

The server opens no path and fetches no URL that a client names, so clients can neither read the server's files nor
reach its network. Only the header of an image is read here; the engine decodes the image.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Annotated, Any, Final, Literal, Required, TypedDict, TypeVar

from llmrun.base.errors import UsageError
from llmrun.engine.images import check_count, without_projector
from llmrun.engine.requests import ChatPrompt, ModelFacts, image_parts
from llmrun.formats.images.header import MOST_IMAGES, jpeg_segments, read_header, truncated
from llmrun.serving.protocol.declarations import KEPT, Expected, Keywords, Limits, Refused, without_indexes
from llmrun.serving.protocol.errors import InvalidField, unsupported

BETWEEN_PARTS: Final = "\n"  # llama.cpp and vLLM use this separator between texts
AS_BASE64: Final = "send the image itself, as base64 or in a data URL (data:image/png;base64,...)"
_SCHEME: Final = re.compile(r"\s*([a-zA-Z][a-zA-Z0-9+.-]*):")
_REFUSED: Final = {
    "http": "this server fetches no URLs",
    "https": "this server fetches no URLs",
    "file": "this server opens no files for clients",
}
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")  # converts the alphabet of URLs to the usual one
_SPACES: Final = b" \t\n\r\v\f"
_ESCAPES: Final = {"%2B": "+", "%2F": "/", "%3D": "=", "%0D": "", "%0A": "", "%20": ""}  # what clients escape in URLs
_DETAILS: Final = {"low": "low", "high": "high", "original": "high"}

Base64 = Annotated[str, Limits(1), Keywords({"contentEncoding": "base64"}), Expected("an image as base64")]
ImageSource = Annotated[str, Limits(1), Expected("an image as base64")]
Detail = Annotated[
    Literal["auto", "low", "high", "original"],
    "`low` makes the image as small as the settings allow, `high` and `original` as large as they allow.",
]


class ImageUrl(TypedDict, total=False):
    url: Required[Annotated[ImageSource, "A data URL with base64, or base64. URLs of other kinds are refused."]]
    detail: Detail


class ImagePart(TypedDict, total=False):
    """An image in a message: PNG, JPEG, WebP, GIF or BMP."""

    type: Required[Literal["image_url"]]
    image_url: Required[
        Annotated[ImageSource | ImageUrl, Expected("an object with a data URL, or a data URL"), "As in `url`."]
    ]


class InputImagePart(TypedDict, total=False):
    """An image in a message, in the form of the Responses API."""

    type: Required[Literal["input_image"]]
    image_url: Required[Annotated[ImageSource, "A data URL with base64, or base64. Other URLs are refused."]]
    detail: Detail
    file_id: Annotated[Any, Refused((), AS_BASE64, "this server stores no files")]


class ResultFile(TypedDict):
    """An image, as in messages, or a file. Models get a note in place of files that they cannot read.

    Errors would end an agent's conversation, because all later requests contain the file again.
    """

    type: Literal["image_url", "input_image", "input_file"]


KeptResultFile = Annotated[ResultFile, KEPT]
Part = dict[str, Any]
T = TypeVar("T")
_STEP: Final = 8  # images
_UNREADABLE: Final[dict[str, str]] = {}  # the reasons of `remember_unreadable` by the SHA-256 of the image
_MOST_REMEMBERED: Final = 1000
_OF_ENGINE: Final = re.compile(r"image (\d{1,4}): ")  # the beginning of the engine's errors about an image
Piece = str | Part  # a text, or the part of a message that stands for an image


class Images:
    """The images of one call.

    An image in the result of a tool that cannot be used becomes a note to the model, because an error would end an
    agent's conversation: all later requests contain the image again.

    files    as in ChatPrompt.images
    ignored  the paths of the fields of files that were left out of tool results, without indexes (used as a set)
    """

    def __init__(self, facts: ModelFacts, left_out: int = 0) -> None:
        """Begin without images. `left_out` is how many images in results become notes, the first ones first."""
        self._model, self.are_seen = facts.name, facts.sees_images
        self.files: dict[str, bytes] = {}
        self.ignored: dict[str, None] = {}
        self._count = self._in_results = 0
        self._left_out = left_out

    @property
    def too_many_results(self) -> int:
        """How many images in results must become notes, so that the others do not exceed the limit of a request.

        The number grows in large steps, because the prompt after a new note must be processed again.
        """
        excess = self._count + self._in_results - MOST_IMAGES
        return min(-(-excess // _STEP) * _STEP, self._in_results) if excess > 0 else 0

    def part(self, source: str, place: str, detail: str = "auto") -> Part:
        """Return the part of a message for an image. Raises InvalidField.

        source  base64, or a data URL with base64
        place   the path of the field with the image
        """
        return self._part(self.file(source, place), detail)

    def _part(self, data: bytes, detail: str = "auto") -> Part:
        key = hashlib.sha256(data).hexdigest()
        self.files[key] = data
        found = {"type": "image", "image": key}
        return {**found, "detail": _DETAILS[detail]} if detail in _DETAILS else found

    def file(self, source: str, place: str) -> bytes:
        """Return the file of an image after its header was checked. Raises InvalidField."""
        if not self.are_seen:
            raise unsupported_images(place, without_projector(self._model))
        self._count += 1
        try:
            check_count(self._count)
            return _checked(source, place)
        except InvalidField:
            raise
        except UsageError as error:
            raise InvalidField(place, str(error).removeprefix(f"{place}: "), hint=error.hint) from None

    def result_piece(
        self, file: Mapping[str, Any], place: str, source_of: Callable[[], tuple[str, str, Iterable[str]]]
    ) -> Piece:
        """Return an image in the result of a tool, or a note if the model cannot see it.

        file       the part of the result
        source_of  returns the source and the detail of the image, and the ignored fields. May raise InvalidField
        """
        if not self.are_seen:
            return self.left_out(file, place)
        if self._left_out:
            self._left_out -= 1
            return self.left_out(file, place, f"only the last images can be seen, at most {MOST_IMAGES}")
        try:
            source, detail, ignored = source_of()
            data = _checked(source, place)
            if _is_cut_off(data):
                raise truncated(place)
        except InvalidField as error:  # the hint is for the client
            return self.left_out(file, place, str(error).removeprefix(f"{error.param}: "))
        except UsageError as error:
            hint = f" ({error.hint})" if error.hint else ""
            return self.left_out(file, place, str(error).removeprefix(f"{place}: ") + hint)
        if reason := _UNREADABLE.get(hashlib.sha256(data).hexdigest()):
            return self.left_out(file, place, reason)
        self._in_results += 1
        self.ignored |= dict.fromkeys(ignored)
        return self._part(data, detail)

    def left_out(self, file: Mapping[str, Any], place: str, reason: str = "") -> str:
        """Return the note that replaces a file in the result of a tool. `reason` is why an image cannot be used."""
        self.ignored |= dict.fromkeys(without_indexes(f"{place}.{name}") for name in file if name != "type")
        kinds = "text and images" if self.are_seen else "text"
        why = (
            f"An image was left out: {reason}"
            if reason
            else f"A file was left out, because this model can only read {kinds}"
        )
        return f"[{why}.]"


def with_images(facts: ModelFacts, convert: Callable[[Images], T]) -> tuple[T, Images]:
    """Return a converted conversation and its images. `convert` adds the images. Raises InvalidField."""
    images = Images(facts)
    found = convert(images)
    if images.too_many_results:
        images = Images(facts, images.too_many_results)
        found = convert(images)
    return found, images


def remember_unreadable(prompt: object, error: BaseException) -> None:
    """Remember the image that the engine could not read, so that an agent's next request gets a note instead.

    Only the engine decodes images, so the server learns from its error that an image is damaged.
    """
    found = _OF_ENGINE.match(str(error)) if isinstance(error, UsageError) else None
    if found is None or not isinstance(prompt, ChatPrompt):
        return
    part = next(islice(image_parts(prompt.messages), int(found[1]) - 1, None), None)
    if part is not None:
        while len(_UNREADABLE) >= _MOST_REMEMBERED:
            _UNREADABLE.pop(next(iter(_UNREADABLE)), None)
        _UNREADABLE[part["image"]] = str(error)[found.end() :]


def unsupported_images(place: str, error: UsageError) -> InvalidField:
    """Return the error for a field with images that the model or the prompt cannot have."""
    return unsupported(place, str(error), hint=error.hint)


def _checked(source: str, place: str) -> bytes:
    data = _bytes_of(source, place)
    read_header(data, place)
    return data


def _is_cut_off(data: bytes) -> bool:
    """Return whether the end of a JPEG file is missing. In other formats, `read_header` notices this."""
    if not data.startswith(b"\xff\xd8"):
        return False
    scan = max((at + length for _, at, length in jpeg_segments(data)), default=0)
    return data.find(b"\xff\xd9", scan) < 0


def _bytes_of(source: str, place: str) -> bytes:
    scheme = _SCHEME.match(source)
    if scheme is None:
        return _decoded(source, place)
    name = scheme[1].lower()
    if name != "data":
        raise unsupported(place, _REFUSED.get(name, f"{name[:20]}: is not a data URL"), hint=AS_BASE64)
    head, _, data = source.partition(",")
    if not head.rstrip().lower().endswith(";base64"):
        raise InvalidField(place, "the data URL has no base64", hint="write data:image/png;base64,...")
    if "%" in data:  # `unquote` takes seconds and a gigabyte for a long text with many escapes
        for escape, character in _ESCAPES.items():
            data = data.replace(escape, character).replace(escape.lower(), character)
    return _decoded(data, place)


def _decoded(text: str, place: str) -> bytes:
    """Decode base64. As in many decoders, the padding may be missing, and line breaks have no effect."""
    try:
        packed = text.encode("ascii").translate(_STANDARD, _SPACES).rstrip(b"=")
        return binascii.a2b_base64(packed + b"=" * (-len(packed) % 4), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise InvalidField(place, "not valid base64", hint=AS_BASE64) from None


def content_of(pieces: Iterable[Piece]) -> str | list[Part]:
    """Return the content of a message: a string if there are only texts, otherwise a list of parts in this order."""
    parts: list[Part] = []
    for _, group in groupby(pieces, lambda piece: isinstance(piece, str)):
        run = [*group]
        texts = [piece for piece in run if isinstance(piece, str)]
        parts += [{"type": "text", "text": BETWEEN_PARTS.join(texts)}] if texts else []
        parts += [piece for piece in run if not isinstance(piece, str)]
    if not any(part["type"] != "text" for part in parts):
        return parts[0]["text"] if parts else ""
    return [part for part in parts if part.get("text") != ""]


def pieces_of(content: str | Sequence[Part]) -> Iterator[Piece]:
    """Yield the texts and the images of a message's content."""
    if isinstance(content, str):
        yield content
    else:
        yield from (part["text"] if part["type"] == "text" else part for part in content)
