"""Finds llmrun's directories, reads users' files, and defines flags of `os.open` that only some systems have.

A flag that the system does not define is 0. Without O_BINARY, Windows translates line endings in `os.read` and
`os.write`.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

from llmrun.base.errors import UsageError

O_BINARY: int = getattr(os, "O_BINARY", 0)
O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
O_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # byte order marks; `>` in Windows PowerShell writes UTF-16
_MONTH_S = 30 * 24 * 3600
_LARGEST = 1 << 20  # the maximum number of bytes in a file that a user wrote


# The names of all folders and files that llmrun writes, and what they hold. `llmrun doctor --paths` lists them.
_CACHE = {
    "kernels": "compiled kernels of the CPU engine",
    "levels": "instruction-set levels that work on this processor",
    "speeds": "measured speeds of this machine and of its models",
    "load-times.json": "how long each model took to load",
    "llama": "GPUs that llama.cpp can use",
    "locks": "locks of running batches and of models.toml",
    "prefixes": "prefixes of prompts, from serve --save-prefixes",
    "why": "the prefix log of serve (see llmrun why)",
    "run": "sockets and locks of background engines, unless /run/user holds them",
}
_DATA = {
    "models": "models that do not come from the Hub, and records of all models",
    "conversations": "conversations of chat, and their saved states",
    "history.jsonl": "lines typed in chat",
    "history.lock": "lock of history.jsonl",
    "launch": "servers for agents, and files that connect agents to them",
    "logs": "logged answers (see llmrun logs)",
    "bench": "runs saved with bench --save",
    "tools": "tools that you marked as safe",
    "told": "notes that have been shown",
}


class Place(NamedTuple):
    """A folder or file that llmrun writes, or that users write for llmrun.

    holds      what is in the place, in a few words
    is_shared  whether the place also holds what does not belong to llmrun, so that it must not be removed as a whole
    """

    path: Path
    holds: str
    is_shared: bool = False


def places() -> list[Place]:
    """Return the folders and files in llmrun's own directories, whether or not they exist."""
    return [
        Place(config_file(), "settings"),
        Place(own_models_file(), "your models and presets"),
        Place(templates_folder(), "prompt templates of earlier versions"),
        *(Place(data_folder(name), holds) for name, holds in _DATA.items()),
        *(Place(cache_folder(name), holds) for name, holds in _CACHE.items()),
    ]


def cache_folder(name: str) -> Path:
    """Return the path of a folder or file that llmrun can recreate, such as compiled kernels, without creating it.

    LLMRUN_CACHE_DIR overrides the default location. Raises KeyError for a name that is not listed above.
    """
    _CACHE[name]
    return (_named_path("LLMRUN_CACHE_DIR") or _user_folder("cache")) / name


def data_folder(name: str) -> Path:
    """Return the path of a folder or file that cannot be recreated, such as models, without creating it.

    LLMRUN_DATA_DIR overrides the default location. Raises KeyError for a name that is not listed above.
    """
    _DATA[name]
    return (_named_path("LLMRUN_DATA_DIR") or _user_folder("data")) / name


def told_once(note: str) -> bool:
    """Return True the first time that a caller asks for a note, so that the note appears only once on this machine.

    A file in the data folder records that the note was shown. If the record cannot be saved, the note is not shown at
    all, because it would otherwise appear on every run.
    """
    told = data_folder("told") / note
    try:
        told.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        told.touch(exist_ok=False)
    except OSError:  # the note was shown, or the folder is not writable
        return False
    return True


def conversations_folder() -> Path:
    """Return the directory for conversations and their saved states, without creating it."""
    return data_folder("conversations")


def prefixes_folder() -> Path:
    """Return the directory for prefixes of the KV cache that servers save, without creating it."""
    return cache_folder("prefixes")


def config_file() -> Path:
    """Return the path of `config.toml`, which need not exist.

    LLMRUN_CONFIG overrides the default path. A file named by LLMRUN_CONFIG must exist.
    """
    return _named_path("LLMRUN_CONFIG") or _user_folder("config") / "config.toml"


def own_models_file() -> Path:
    """Return the path of the user's `models.toml`, which is next to `config.toml` and need not exist."""
    return config_file().with_name("models.toml")


def templates_folder() -> Path:
    """Return the folder of earlier versions' prompt templates, which are presets now. The folder need not exist."""
    return own_models_file().with_name("templates")


def read_user_file(path: Path, kind: str) -> bytes:
    """Read a user's file of at most 1 MiB. Error messages describe the file as `kind`. Raises UsageError."""
    try:
        if path.exists() and not path.is_file():  # reading from a pipe might never end
            raise UsageError(f"{kind}: {path}: not a file")
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(f"{kind}: {path}: {error.strerror or error}") from error
    if len(data) > _LARGEST:
        raise UsageError(f"{kind}: {path}: more than {_LARGEST >> 20} MiB")
    return data


def decoded_text(data: bytes, where: str) -> str:
    """Decode a user's text and remove its byte order mark. Raises UsageError if the text is not UTF-8.

    where  the beginning of the error message
    """
    refuse_utf_16(data, where)
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="convert the text first, for example with iconv -f latin1 -t utf8",
        ) from None


def refuse_utf_16(data: bytes, where: str) -> None:
    """Raise UsageError if a text begins with a byte order mark of UTF-16.

    where  the beginning of the error message
    """
    if data.startswith(UTF_16):
        hint = "save it as UTF-8; in PowerShell, use | Out-File -Encoding utf8 FILE instead of > FILE"
        raise UsageError(f"{where}: not UTF-8, but UTF-16", hint=hint)


def is_recent(at: float) -> bool:
    """Return whether a stored figure is less than a month old, given its time in seconds since 1970."""
    return 0 <= time.time() - at < _MONTH_S


def problem_with_private(path: Path, status: os.stat_result) -> tuple[str, str]:
    """Return why a folder is not private to this user and what to do, or two empty texts.

    status  the status of the folder itself; if it is that of a link, the link is the problem
    """
    if not stat.S_ISDIR(status.st_mode):
        return "not a folder, or a link to one", f"remove {path}"
    if sys.platform != "win32":  # on Windows, the user's folders are private, and there are no mode bits
        if status.st_uid != os.geteuid():
            return (
                f"it belongs to user {status.st_uid}",
                "set LLMRUN_CACHE_DIR and LLMRUN_DATA_DIR to folders of your own",
            )
        if status.st_mode & 0o077:
            return (
                f"other users may access it (mode {stat.S_IMODE(status.st_mode):04o})",
                f"make it private: chmod 700 {path}",
            )
    return "", ""


def private_folder(path: Path) -> Path:
    """Create a folder that only this user may enter, and return its path. Raises OSError.

    Raises UsageError if the folder exists and is a link, belongs to another user, or is accessible to others.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    problem, hint = problem_with_private(path, path.lstat())
    if problem:
        raise UsageError(f"cannot use the folder {path}: {problem}", hint=hint)
    return path


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user may read, atomically, after its contents have reached the disk. Raises OSError.

    An existing link is replaced, not followed.
    """
    import tempfile  # imported here because most runs do not need this module

    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123  pathlib cannot open file descriptors
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, and create its folder if necessary. An existing file keeps its mode. Raises OSError."""
    import threading  # imported here because most runs do not need this module

    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        old = path.stat() if path.exists() else None
        partial.touch(0o666 if old is None else 0o600)  # others must not read the new text of a private file
        partial.write_bytes(data)
        if old is not None:
            partial.chmod(stat.S_IMODE(old.st_mode))
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _named_path(variable: str) -> Path | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"environment: {variable}: the home directory in {text!r} does not exist") from error


def _user_folder(kind: Literal["cache", "config", "data"]) -> Path:
    """Return the system's place for a user's files of this kind. Raises UsageError without a home directory."""
    from platformdirs import PlatformDirs

    path = Path("~")
    with contextlib.suppress(RuntimeError):  # there is no home directory; earlier versions of platformdirs return "~"
        path = Path(getattr(PlatformDirs("llmrun", appauthor=False), f"user_{kind}_dir"))
    if not path.is_absolute():
        hint = "set HOME to an absolute path, or set LLMRUN_CONFIG, LLMRUN_DATA_DIR and LLMRUN_CACHE_DIR"
        raise UsageError("this user has no home directory", hint=hint)
    return path
