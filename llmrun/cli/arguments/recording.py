"""Checks the file and the settings of a run to record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.base import AUTO
from llmrun.base.errors import UsageError
from llmrun.engine.remote.url import is_endpoint

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.options.settings import Settings

CPU = "cpu"


def check_recordable(path: Path, settings: Settings, *, several: bool, cached: bool) -> None:
    """Raise UsageError if the run cannot be recorded, before a model is opened.

    several  whether the command generates more than one answer
    cached   whether the command may load a part of the prompt, which a recording could not contain
    """
    if several:
        raise UsageError("--record: cannot be combined with --samples", hint="record one answer, with its --seed")
    if cached:
        raise UsageError("--record: cannot be combined with --prompt-cache", hint="the answers are the same without it")
    if is_endpoint(settings.model):
        raise UsageError("--record: only models on this machine can be recorded, not models on a server")
    if settings.backend not in (AUTO, CPU):
        raise UsageError(
            f"--record: only the CPU engine can repeat a run bit for bit, not --backend {settings.backend}",
            hint="add --backend cpu",
        )
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--record: cannot write {path}: {'is a folder' if path.is_dir() else 'no such folder'}")
    if not _may_overwrite(path):
        raise UsageError(
            f"--record: {path}: this file has other contents and is not overwritten",
            hint="name a new file, or a recording",
        )


def _may_overwrite(path: Path) -> bool:
    """Return whether a file is a recording, empty or missing. Devices and pipes are not."""
    from llmrun.jobs.replaying.recording import FORMAT

    if not path.is_file():
        return not path.exists()
    beginning = f'{{"format": "{FORMAT}"'.encode()
    try:
        with path.open("rb") as file:
            return file.read(len(beginning)) in (beginning, b"")
    except OSError as error:
        raise UsageError(f"--record: {path}: {error.strerror}") from error
