"""Checks the file that --prompt-cache names."""

from __future__ import annotations

from pathlib import Path

from llmrun.base.errors import UsageError
from llmrun.engine.remote.url import is_endpoint

_FLAG = "--prompt-cache"
_HINT = "name a new file, or one that --prompt-cache has written"


def check_prompt_cache(path: Path, model: str) -> None:
    """Raise UsageError for a remote model, and for a file that is not ours to overwrite."""
    if is_endpoint(model):
        raise UsageError(f"{_FLAG}: not supported for models on a server", hint="leave it out")
    if not path.parent.is_dir():
        raise UsageError(f"{_FLAG}: {path}: there is no folder {path.parent}", hint="create it first")
    from llmrun.engine.saved_state.magic import may_overwrite

    try:
        is_ours = may_overwrite(path)
    except OSError as error:
        raise UsageError(f"{_FLAG}: {path}: {error.strerror}", hint=_HINT) from error
    if not is_ours:
        raise UsageError(f"{_FLAG}: {path}: this file has other contents and is not overwritten", hint=_HINT)
