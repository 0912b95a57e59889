"""Reads the image files that users name: with --image, with /image, or as a path that they drop into a chat.

Only the header is checked here. The image is decoded when the model needs it.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from llmrun.base.amounts import counted
from llmrun.base.errors import UsageError
from llmrun.cli.arguments.generating import IMAGE
from llmrun.cli.arguments.prompts import IMAGE_SUFFIXES, STDIN, read_stdin_bytes
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line
from llmrun.engine.images import check_count
from llmrun.formats.images.header import MOST_BYTES, MOST_IMAGES, ImageHeader, looks_like_image, read_header

if TYPE_CHECKING:
    from llmrun.model.vision.layout import ImageLayout, Projector

COMMAND: Final = "/image"
_FIRST_BYTES = 64  # enough for `looks_like_image`
_MOST_NOTES = 3
_LEAST_KEPT = 0.95  # the part of each side that the model must see, or a note says how it sees the image
_LONGEST_TOLD = 1000  # characters of a prompt
_LONGEST_DROP = 1 << 15  # characters
_ANCHOR = r"(?:~?/|\.\.?/|file://|~?\\|\.\.?\\|[A-Za-z]:[\\/])"  # the beginning of a path that is not just a word
# A word of the text that is a path: in quotes, or with a backslash before each space
_PATH: Final = re.compile(rf"""(?<![^\s(])(?:'{_ANCHOR}[^'\n]+'|"{_ANCHOR}[^"\n]+"|{_ANCHOR}(?:\\.|[^\s\\'"])+)""")
_NAME = re.compile(rf"""(?<![^\s('"])[^\s'"()]+\.(?:{IMAGE_SUFFIXES})(?![^\s)'".,:;?!])""", re.IGNORECASE)


class GivenImage(Struct, frozen=True):
    """An image file. `name` is the file's name without its folder, and `sha256` is in hexadecimal."""

    name: str
    data: bytes
    sha256: str
    header: ImageHeader

    @classmethod
    def of(cls, data: bytes, name: str, place: str) -> GivenImage:
        """Check the contents of a file. `place` names the file in error messages. Raises UsageError."""
        return cls(name, data, sha256(data).hexdigest(), read_header(data, place))


def read_images(paths: Sequence[str], *, no_stdin: bool = False) -> list[GivenImage]:
    """Read the images of --image. Raises UsageError if one of them is missing, unreadable or not an image."""
    check_count(len(paths))
    if paths.count(STDIN) > 1 or (STDIN in paths and no_stdin):
        why = "cannot be combined with --no-stdin" if no_stdin else "standard input can be read only once"
        raise UsageError(f"{IMAGE} -: {why}")
    if STDIN in paths and sys.stdin.isatty():
        hint = 'pipe an image: llmrun generate --image - "What is this?" < cat.jpg'
        raise UsageError(f"{IMAGE} -: standard input is a terminal", hint=hint)
    return [_from_stdin() if path == STDIN else read_image(path, IMAGE) for path in paths]


def read_image(path: str, asker: str = "") -> GivenImage:
    """Read an image from a file. Raises UsageError, whose message begins with `asker`, a flag or a command."""
    where = f"{asker}: {path}" if asker else path
    if not path:
        raise UsageError(f"{where}no file given")
    if re.match(r"https?://", path, re.IGNORECASE):
        raise UsageError(f"{where}: images are read from files, not from the network", hint="download the file first")
    try:
        with open(path, "rb") as file:  # noqa: PTH123  the path must stay as it was typed
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        hint = "put a path with spaces in quotes" if asker == COMMAND and isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{where}: {reason}", hint=hint) from error
    return GivenImage.of(data, os.path.basename(path), where)  # noqa: PTH119


def _from_stdin() -> GivenImage:
    data = read_stdin_bytes("an image", MOST_BYTES)
    return GivenImage.of(data, "standard input", f"{IMAGE} -")


def tell_of_images(images: Sequence[GivenImage], projector: Projector | None) -> None:
    """Print notes about images that the model does not see completely. Raises UsageError if it cannot see one."""
    for image in images:
        header = image.header
        try:
            layout = projector.layout(header.width, header.height) if projector else None
        except UsageError as error:
            raise UsageError(f"{IMAGE}: {image.name}: {error}", hint=error.hint) from None
        tell_of_image(image, layout)


def tell_of_image(image: GivenImage, layout: ImageLayout | None) -> None:
    """Print a note if the model does not see all of an image. `layout` is None if it is unknown.

    Rounding a side to a multiple of a patch is not worth a note if the model sees as many pixels as before.
    """
    header, name = image.header, visible_line(image.name)
    if header.animated:
        out.note(f"{name}: the image is animated, and the model sees only its first frame")
    if layout is not None and (
        layout.width * layout.height < header.width * header.height
        or min(layout.width / header.width, layout.height / header.height) < _LEAST_KEPT
    ):
        out.note(
            f"{name}: scaled down from {header.width}x{header.height} to {layout.width}x{layout.height} pixels "
            f"for the model ({counted(layout.rows, 'token')})"
        )


def dropped_images(text: str) -> list[str]:
    """Return the paths in a text that was dropped or pasted, if the text consists of paths of existing images only.

    Terminals paste the paths of dropped files in quotes, with a backslash before each space, as URLs, or as they are.
    Otherwise, the list is empty.
    """
    text = text.strip()
    if not text or len(text) > _LONGEST_DROP or not re.match(rf"['\"]?{_ANCHOR}", text):
        return []
    for candidates in _readings(text):
        paths = [plain_path(candidate) for candidate in candidates]
        if paths and len(paths) <= MOST_IMAGES and all(is_image_file(path) for path in paths):
            return paths
    return []


def _readings(text: str) -> Iterator[Sequence[str]]:
    """Yield the possible meanings of a dropped text: one path, a path on each line, or paths in a shell's notation."""
    yield [text]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1:
        yield lines
    try:
        yield shlex.split(text, posix=sys.platform != "win32" or "'" in text)
    except ValueError:  # a quote is not closed
        return


def plain_path(text: str) -> str:
    """Return the path in a dropped text, which may be quoted or a file:// URL, and may begin with ~."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if text.startswith("file://"):
        from urllib.parse import unquote, urlsplit

        url = urlsplit(text)
        if url.netloc not in ("", "localhost"):
            return text
        text = unquote(url.path)
        if sys.platform == "win32":
            text = text.removeprefix("/")
    return os.path.expanduser(text)  # noqa: PTH111  (Path.expanduser may raise)


def is_image_file(path: str) -> bool:
    """Return whether a path names a regular file that begins like an image. Other files are not opened."""
    if _is_on_a_server(path):
        return False
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  reading from a pipe might never end
            return False
        with open(path, "rb") as file:  # noqa: PTH123
            return looks_like_image(file.read(_FIRST_BYTES))
    except (OSError, ValueError):
        return False


def _is_on_a_server(path: str) -> bool:
    """Return whether Windows would log in to a server to look at a path, which a mere text must not cause."""
    return path.startswith(("\\\\", "//"))


def typed_path(text: str) -> str:
    """Return the end of a text if it is a path as in a shell, or "". The file does not have to exist."""
    found = [match for match in _PATH.finditer(text) if match.end() == len(text)]
    return found[-1][0] if found else ""


def has_image_suffix(name: str) -> bool:
    """Return whether the name of a file ends like the name of an image."""
    return re.search(rf"\.(?:{IMAGE_SUFFIXES})$", name, re.IGNORECASE) is not None


def tell_of_paths_in_text(text: str, way: str) -> None:
    """Print notes about image files that a prompt names, because the model sees only the names. Nothing is opened.

    Long prompts are often logs or code, which name many files, so they get no notes.

    way  how users show the image to the model: IMAGE or COMMAND
    """
    if len(text) > _LONGEST_TOLD:
        return
    paths = [word for word in _PATH.findall(text) if has_image_suffix(word.strip("'\""))]
    names = [name for name in _NAME.findall(text) if not any(name in path for path in paths)]
    for word in [*paths, *names][:_MOST_NOTES]:
        shown = visible_line(word)
        path = unescaped(word)
        if _is_on_a_server(path):
            continue
        if os.path.isfile(path):  # noqa: PTH113
            out.note(f"{shown} is text in the prompt; {way} {shown} shows the image to the model")
        elif word in paths:
            out.note(f"{shown} is text in the prompt, because there is no such file")


def unescaped(word: str) -> str:
    """Return the path of a word in a shell's notation."""
    try:
        words = shlex.split(word) if sys.platform != "win32" else []
    except ValueError:
        words = []
    return plain_path(words[0] if len(words) == 1 else word)
