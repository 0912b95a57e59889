"""Caches the sha256 of model files, because hashing takes seconds and evicts other data from the page cache.

For models that llmrun downloaded or verified, the hub's records contain the sha256. This cache is for all other files.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.folders import cache_folder

if TYPE_CHECKING:
    from llmrun.hub.progress_reporter import Reporter

_MOST = 256  # The maximum number of files in the cache. The files that were hashed longest ago are removed first.


def file_sha256(path: Path, reporter: Reporter) -> str:
    """Return the sha256 of a file in hexadecimal.

    The file is hashed again if its size, modification time or inode has changed. Raises OSError.
    """
    from llmrun.hub.local.model_records import known_digest
    from llmrun.hub.local.safe_writes import digest

    of_the_hub = known_digest(path)
    if of_the_hub is not None:
        return of_the_hub
    key, fingerprint = str(path.resolve()), _fingerprint(path)
    remembered = _remembered()
    known = remembered.get(key, [])
    if known[:-1] == fingerprint:
        return known[-1]
    sha256 = digest(path, reporter, f"hashing {path.name}")
    if _fingerprint(path) == fingerprint:
        # Read the cache again, because another process may have changed it in the meantime.
        others = [(name, entry) for name, entry in _remembered().items() if name != key]
        _remember(dict(others[1 - _MOST :]) | {key: [*fingerprint, sha256]})
    return sha256


def _fingerprint(path: Path) -> list[str]:
    status = path.stat()
    return [str(status.st_size), str(status.st_mtime_ns), str(status.st_ino)]


def _file() -> Path:
    return cache_folder() / "bench" / "sha256.json"


def _remembered() -> dict[str, list[str]]:
    """Return the cache, which maps paths to [size, modification time, inode, sha256]. Skips malformed entries."""
    try:
        table = json.loads(_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: entry for key, entry in table.items() if _is_entry(entry)} if isinstance(table, dict) else {}


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 4
        and all(isinstance(word, str) for word in entry)
        and len(entry[3]) == 64
        and set(entry[3]) <= set("0123456789abcdef")
    )


def _remember(table: dict[str, list[str]]) -> None:
    """Replace the cache file atomically.

    If two processes write at the same time, the last one wins, and the other process's file is hashed again later.
    """
    partial = _file().with_name(f".sha256.{os.getpid()}")
    with contextlib.suppress(OSError):  # If the folder is not writable, files are hashed again each time.
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(table), "ascii")
            partial.replace(_file())
        finally:
            partial.unlink(missing_ok=True)
