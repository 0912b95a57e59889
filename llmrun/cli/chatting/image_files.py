"""The files of the images in saved conversations. Each file is stored once, however many conversations show it.

    conversations/images/SHA256.png    the original file, named by its SHA-256 and its format
    conversations/images/.lock         held while a question with images is saved, and while unused files are removed

Folders are created with mode 0700 and files with mode 0600, like the conversations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from llmrun.base.errors import LlmrunError
from llmrun.base.folders import write_private
from llmrun.cli.chatting.events import ImageShown

_LOCK = ".lock"
_PATIENCE_S = 10.0  # maximum time to wait for the lock
_REFERENCE = re.compile(rb'"sha256":\s*"([0-9a-f]{64})"')  # in a line of a conversation


class ImageFileError(LlmrunError):
    """The file of an image is missing or damaged."""


class ImageFiles:
    """The images in one folder. The folder does not have to exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, image: ImageShown) -> Path:
        """Return the path of an image's file."""
        suffix = re.sub(r"[^a-z0-9]", "", image.format.lower())
        return self.folder / f"{image.sha256}.{suffix or 'image'}"

    def read(self, image: ImageShown) -> bytes:
        """Return the contents of an image's file. Raises ImageFileError."""
        path = self.path(image)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ImageFileError(
                f"image {image.name}: {path}: {error.strerror or error}",
                hint="/undo removes the last question, /clear starts over",
            ) from error
        if sha256(data).hexdigest() != image.sha256:
            raise ImageFileError(f"image {image.name}: {path}: the file was changed", hint="restore the original file")
        return data

    @contextmanager
    def saving(self, files: Iterable[tuple[ImageShown, bytes]]) -> Iterator[None]:
        """Store images, and keep them from being removed until the block has saved the question that shows them.

        Raises OSError.
        """
        with self._locked():
            for image, data in files:
                if not (path := self.path(image)).exists():
                    write_private(path, data)
            yield

    def remove_unused(self, conversations: Callable[[], Iterable[Path]]) -> None:
        """Remove all images to which none of the conversations' files refers. Raises OSError.

        conversations  lists the files, after the images of new conversations can no longer be saved

        Questions that were undone are still in the files, so their images stay as long as the conversation.
        """
        if not self.folder.is_dir():
            return
        with self._locked():
            used = {found.decode() for path in conversations() for found in _REFERENCE.findall(_contents(path))}
            for path in self.folder.iterdir():
                if path.name != _LOCK and path.stem not in used:
                    path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import filelock

        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with filelock.FileLock(self.folder / _LOCK, mode=0o600, timeout=_PATIENCE_S):
            yield


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # removed since the folder was listed
        return b""
