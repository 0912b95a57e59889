"""The source files that machine code depends on.

Kernels import from only a few folders, and always with the same syntax, so a regular expression finds their imports.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
# Machine code depends on imports from these folders. In `from FOLDER import NAMES`, the names are modules.
_ROOMS = ("kernels", "formats.layouts", "formats.quants", "model.plan")
_IMPORT = re.compile(rf"^from llmrun\.((?:{'|'.join(map(re.escape, _ROOMS))})[\w.]*) import (.+)", re.MULTILINE)


@functools.cache
def digest_of(module: str) -> str:
    """Return a digest of a kernel's source file and of all files that it imports."""
    return hashlib.sha256(json.dumps(sorted(sources(module).items())).encode()).hexdigest()


def sources(module: str) -> dict[str, str]:
    """Return digests, by module name, of a kernel's source file and all files that it imports, directly or indirectly.

    Only imports from the folders that machine code depends on are included.
    """
    seen: dict[str, str] = {}
    waiting = [f"kernels.{module}"]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen[current], imported = _source(current)
            waiting.extend(imported)
    return seen


@functools.cache
def _source(module: str) -> tuple[str, list[str]]:
    """Return the digest of a module's source, and the names of the modules that the source imports.

    The result is cached, because most kernels share most of their files.
    """
    source = _path_of(module).read_bytes()
    return hashlib.sha256(source).hexdigest(), _imported_files(source.decode())


def _imported_files(source: str) -> list[str]:
    """Return the dotted names (below the package) of the imported modules that machine code depends on."""
    files = []
    for module, names in _IMPORT.findall(source):
        is_file = _path_of(module).is_file()
        files += [module] if is_file else [f"{module}.{name.strip()}" for name in names.split(",")]
    return files


def _path_of(module: str) -> Path:
    """Return the file of a module, given as a dotted name below the package."""
    return _PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def digest_of_all() -> str:
    """Return a digest of all files in the folders that machine code depends on."""
    digests = {
        path.relative_to(_PACKAGE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for room in _ROOMS
        for path in _PACKAGE.joinpath(*room.split(".")).rglob("*.py")
    }
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
