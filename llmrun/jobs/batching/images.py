"""Images in the lines of a batch: data URLs, and files in the folder of --image-dir.

Lines are read long before they are answered, and one image may belong to thousands of lines. Therefore calls contain
only the SHA-256 of a file, and the file is read again when a worker is about to answer the call.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llmrun.base.errors import LlmrunError, UsageError, shown
from llmrun.formats.images.header import MOST_BYTES, read_header

IMAGES: Final = "images"  # the field for the images of a prompt
_HINT: Final = "name the folder of the images with --image-dir DIR"
_IS_URL: Final = re.compile(r"\s*[a-zA-Z][a-zA-Z0-9+.-]*:")
_SUFFIX: Final = re.compile(r"\.\w{1,5}\s*\Z")  # base64 has no dots


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file, and what it contained when its line was read."""

    path: Path
    digest: str
    kind: str

    @property
    def reference(self) -> str:
        """The text that stands for the image in a call."""
        return f"sha256:{self.digest}"

    def data_url(self) -> str:
        """Read the file. Raises UsageError if it has changed or cannot be read."""
        data = _bytes_of(self.path, self.path.name)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise UsageError(f"{self.path.name}: the image was changed after its line was read")
        return f"data:image/{self.kind};base64,{b64encode(data).decode('ascii')}"


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """The folder of --image-dir. Lines can name only files inside of it."""

    path: Path
    _known: dict[tuple[str, int, int], ImageFile] = field(default_factory=dict)

    def file(self, name: str, place: str) -> ImageFile:
        """Return the file with a relative path, after its header was checked. Raises UsageError.

        place  the path of the field with the name, for messages
        """
        label = f"{place}: {shown(name, 200)}"
        outside = UsageError(f"{label}: not a relative path inside {self.path}")
        if Path(name).is_absolute():  # Windows would log in to the server of a path such as //server/cat.png
            raise outside
        try:
            path = Path(os.path.realpath(self.path / name))
            facts = path.stat()
        except (OSError, ValueError) as error:  # ValueError: the name contains a NUL byte
            raise UsageError(f"{label}: no such file in {self.path}") from error
        if not path.is_relative_to(os.path.realpath(self.path)):
            raise outside
        if not stat.S_ISREG(facts.st_mode):  # opening a named pipe would wait forever
            raise UsageError(f"{label}: not a file")
        stamp = (str(path), facts.st_mtime_ns, facts.st_size)
        if stamp not in self._known:
            data = _bytes_of(path, label)
            kind = read_header(data, label).format.lower()
            self._known[stamp] = ImageFile(path, hashlib.sha256(data).hexdigest(), kind)
        return self._known[stamp]


def with_files(
    body: Mapping[str, Any], folder: ImageFolder | None
) -> tuple[Mapping[str, Any], Mapping[str, ImageFile], bool]:
    """Return a body with references in place of file names, the files by reference, and whether there are images.

    Raises UsageError for a file that cannot be used, and for the name of a file if there is no folder.
    """
    files: dict[str, ImageFile] = {}
    has_images = False

    def referenced(source: str, place: str) -> str:
        nonlocal has_images
        has_images = True
        if _IS_URL.match(source):
            return source
        if folder is None:
            if _SUFFIX.search(source):
                raise UsageError(f"{place}: {shown(source, 200)} is not a data URL", hint=_HINT)
            return source
        file = folder.file(source, place)
        files[file.reference] = file
        return file.reference

    return _with_sources(body, referenced), files, has_images


def loaded(body: Mapping[str, Any], files: Mapping[str, ImageFile]) -> Mapping[str, Any]:
    """Return a body with data URLs in place of references. Raises UsageError if a file has changed."""
    if not files:
        return body
    urls = {reference: file.data_url() for reference, file in files.items()}
    return _with_sources(body, lambda source, place: urls.get(source, source))


def prompt_content(prompt: str, images: Any) -> str | list[dict[str, Any]]:
    """Return the content of a message with a prompt and the images of its line: one or several names or data URLs."""
    given = [images] if isinstance(images, str) and images else images or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise LlmrunError(f"{IMAGES}: expected a list of paths and data URLs")
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": each}} for each in given]
    return [*parts, {"type": "text", "text": prompt}] if parts else prompt


def _bytes_of(path: Path, label: str) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{label}: cannot be read: {error.strerror or error}") from error


def _with_sources(body: Mapping[str, Any], changed: Callable[[str, str], str]) -> Mapping[str, Any]:
    """Return a body in which `changed` has replaced the source of each image. The arguments are source and path."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    return {**body, "messages": [*_messages(messages, changed)]}


def _messages(messages: list[Any], changed: Callable[[str, str], str]) -> Iterator[Any]:
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            place = f"messages[{number}].content"
            parts = [_part(part, f"{place}[{index}].image_url", changed) for index, part in enumerate(content)]
            yield {**message, "content": parts}
        else:
            yield message


def _part(part: Any, place: str, changed: Callable[[str, str], str]) -> Any:
    image = part.get("image_url") if isinstance(part, dict) else None
    if isinstance(image, str):
        return {**part, "image_url": changed(image, place)}
    if isinstance(image, dict) and isinstance(image.get("url"), str):
        return {**part, "image_url": {**image, "url": changed(image["url"], f"{place}.url")}}
    return part
