"""The sha256 of a file that is here, with the waiting shown."""

from __future__ import annotations

from pathlib import Path

from llmrun.hub.reporter import Reporter

CHUNK = 1 << 20  # bytes read and hashed at a time


def digest(path: Path, reporter: Reporter, label: str) -> str:
    """In hexadecimal. Raises OSError."""
    import hashlib

    state, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
            done += len(chunk)
            reporter.progress(label, done, max(done, total))
    return state.hexdigest()
