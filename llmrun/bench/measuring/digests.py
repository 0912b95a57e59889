"""The sha256 of a model file, remembered: reading it again would take seconds and fill the page cache.

Of a model that llmrun fetched or checked the hub knows it; any other file's is kept here.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.folders import cache_folder

if TYPE_CHECKING:
    from llmrun.hub.progress_reporter import Reporter

_MOST = 256  # files remembered, those hashed last


def file_sha256(path: Path, reporter: Reporter) -> str:
    """In hexadecimal. Computed anew when size, time or inode of the file have changed since. Raises OSError."""
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
        others = [(name, entry) for name, entry in _remembered().items() if name != key]  # as they are by now
        _remember(dict(others[1 - _MOST :]) | {key: [*fingerprint, sha256]})
    return sha256


def _fingerprint(path: Path) -> list[str]:
    status = path.stat()
    return [str(status.st_size), str(status.st_mtime_ns), str(status.st_ino)]


def _file() -> Path:
    return cache_folder() / "bench" / "sha256.json"


def _remembered() -> dict[str, list[str]]:
    """By path: size, time, inode, sha256. Entries that this function did not mean are no entries."""
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
    """All or nothing; of two processes the later one's table stays, and the other's file is hashed once more."""
    partial = _file().with_name(f".sha256.{os.getpid()}")
    with contextlib.suppress(OSError):  # a folder that cannot be written costs a reading each time, no more
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(table), "ascii")
            partial.replace(_file())
        finally:
            partial.unlink(missing_ok=True)
