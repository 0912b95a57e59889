"""The shared libraries of kernels that a wheel contains, one for each instruction level.

`scripts/build` links the libraries, so an installed wheel needs neither Numba nor llvmlite, unless a model needs a
kernel that the libraries lack.

The symbol of a kernel follows from its name (`KernelName.symbol`), so a library's symbol table is the index of its
kernels. index.json contains the SHA-256 of each library, the version of llmrun that the libraries belong to, and a
digest of the kernels' source files. Source checkouts have no libraries.

A library is hashed before its first use, and the cache folder records the result until the file changes. The check is
necessary: in a test that flipped single bits of kernels, one flip in ten led to a crash, and some to wrong results.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import stat
from pathlib import Path

from msgspec import Struct, field

from llmrun import __version__
from llmrun.base import folders
from llmrun.base.compiled.kernel import KernelName
from llmrun.base.compiled.levels import AVX2, AVX_VNNI, NEON_DOT, NEON_I8MM, Level

BASE = "base"  # the library with the kernels that run before the level is known
INDEX = "index.json"

# If a level adds a single instruction to another level, its library contains only the kernels that use this
# instruction. All other kernels come from the other level's library.
EXTENDS = {AVX_VNNI.name: AVX2.name, NEON_I8MM.name: NEON_DOT.name}

_LARGEST_INDEX = 1 << 20  # bytes
_SEEN = b"worked\n"


class BadLibrary(Exception):
    """A library cannot be used. The message names the file and the reason."""


def folder() -> Path:
    """Return the folder that holds the libraries of an installed wheel."""
    return Path(__file__).resolve().parents[2] / "kernels" / "libraries"


class Index(Struct, frozen=True):
    """The contents of index.json.

    version  the version of llmrun that the libraries belong to
    sources  a digest of all source files that the kernels were compiled from
    files    maps a level, or BASE, to the name and the SHA-256 of its library
    """

    version: str
    sources: str
    files: dict[str, tuple[str, str]]


@functools.cache
def index() -> Index | None:
    """Return the index of this installation's libraries, or None if there is no folder for them. Raises BadLibrary."""
    path = folder() / INDEX
    try:
        with path.open("rb") as file:
            read = json.loads(file.read(_LARGEST_INDEX))
        found = Index(
            str(read["version"]),
            str(read["sources"]),
            {str(name): (str(entry["file"]), str(entry["sha256"])) for name, entry in read["libraries"].items()},
        )
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not path.parent.is_dir():
            return None
        raise _unreadable(path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadLibrary(f"{path} is damaged") from error
    if found.version != __version__:
        raise BadLibrary(f"{path} belongs to llmrun {found.version}, not to {__version__}")
    return found


class Library(Struct, frozen=True):
    """The open libraries of a level: the level's own, and the library of the level that it extends, if any."""

    handles: tuple[ctypes.CDLL, ...]
    addresses: dict[KernelName, int | None] = field(default_factory=dict)

    def address(self, name: KernelName) -> int | None:
        """Return the address of a kernel, or None if the libraries do not have the kernel."""
        if name not in self.addresses:
            self.addresses[name] = next(filter(None, (_address(handle, name.symbol) for handle in self.handles)), None)
        return self.addresses[name]


def _address(handle: ctypes.CDLL, symbol: str) -> int | None:
    try:
        return ctypes.cast(handle[symbol], ctypes.c_void_p).value
    except AttributeError:
        return None


@functools.cache
def library_of(level: str) -> Library | None:
    """Return the libraries of a level (or BASE), or None if this installation has no libraries.

    Raises BadLibrary if a library is missing, damaged, or cannot be loaded.
    """
    found = index()
    if found is None:
        return None
    return Library(tuple(_open(found, name) for name in (level, EXTENDS.get(level)) if name))


def _open(found: Index, name: str) -> ctypes.CDLL:
    if name not in found.files:
        raise BadLibrary(f"{folder() / INDEX} does not list the library {name}")
    file, digest = found.files[name]
    path = folder() / Path(file).name
    _check(path, digest)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BadLibrary(f"{path} cannot be loaded: {error}") from error


def _check(path: Path, digest: str) -> None:
    """Raise BadLibrary unless the file's SHA-256 is `digest`, or was when the file was last changed."""
    facts = _facts(path)
    state = json.dumps([str(path), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, digest])
    if not seen_before(state):
        _hash(path, digest)
        remember(state)


def _facts(path: Path) -> os.stat_result:
    """Return the size and the times of a file. Raises BadLibrary."""
    try:
        facts = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(facts.st_mode):  # reading a named pipe would block
        raise BadLibrary(f"{path} is not a file")
    return facts


def _hash(path: Path, digest: str) -> None:
    """Read a whole file. Raises BadLibrary unless its SHA-256 is `digest`."""
    try:
        image = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    if hashlib.sha256(image).hexdigest() != digest:
        raise BadLibrary(f"{path} is damaged")


def identity(level: Level) -> str | None:
    """Return the names and digests of the libraries of a level and of BASE, or None if there are no libraries."""
    found = index()
    if found is None:
        return None
    return json.dumps([found.files.get(name) for name in (BASE, level.name, EXTENDS.get(level.name, ""))])


def seen_before(check: str) -> bool:
    """Return whether the check that the text `check` describes has already succeeded on this machine."""
    with contextlib.suppress(OSError):
        return _record_of(check).read_bytes() == _SEEN
    return False


def remember(check: str) -> None:
    """Record that a check succeeded. If the record cannot be written, the next run repeats the check."""
    with contextlib.suppress(OSError):
        folders.write_whole(_record_of(check), _SEEN)


def _record_of(check: str) -> Path:
    return folders.cache_folder("levels") / hashlib.sha256(os.fsencode(check)).hexdigest()


class LibrarySurvey(Struct, frozen=True):
    """All libraries of this installation: their sizes in bytes, and a digest of the sources that they belong to."""

    sizes: dict[str, int]
    sources: str


def survey() -> LibrarySurvey | None:
    """Hash all libraries, or return None if there are none. Raises BadLibrary."""
    found = index()
    if found is None:
        return None
    sizes = {}
    for name, (file, digest) in found.files.items():
        path = folder() / Path(file).name
        sizes[name] = _facts(path).st_size
        _hash(path, digest)
    return LibrarySurvey(sizes, found.sources)


def _unreadable(path: Path, error: OSError) -> BadLibrary:
    if isinstance(error, FileNotFoundError):
        return BadLibrary(f"{path} is missing")
    return BadLibrary(f"{path}: {error.strerror or error}")
