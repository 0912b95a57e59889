"""Implements `generate --prompt-cache`: loads the KV cache of the prompt from a file, and saves it there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.cli.console.output import out
from llmrun.engine.engine import Engine
from llmrun.engine.saved_state.budget import may_overwrite
from llmrun.engine.saved_state.one_file import SavedFile

if TYPE_CHECKING:
    from llmrun.cli.answers.report import AnsweredRequest
    from llmrun.engine.base import Answering


def with_prompt_cache(
    path: Path, engine: Answering, then: Callable[[AnsweredRequest], None] | None
) -> Callable[[AnsweredRequest], None]:
    """Let a local engine load prompts from a file, and return a function that saves the prompt after an answer.

    then  a function that the returned function calls at the end, or None
    """
    assert isinstance(engine, Engine)  # --prompt-cache is refused for remote models
    engine.use_saved(SavedFile(path, engine.state_key, None, out.note))

    def answered(done: AnsweredRequest) -> None:
        if _is_still_ours(path):
            engine.save_prefix(done.finished.timings.prompt_tokens)
        if then is not None:
            then(done)

    return answered


def _is_still_ours(path: Path) -> bool:
    """Print a note and return False if another program, such as `llmrun ... > FILE`, has written the file."""
    try:
        is_ours = may_overwrite(path)
    except OSError as error:
        out.note(f"state is not saved: {path}: {error.strerror}")
        return False
    if not is_ours:
        out.note(f"state is not saved: {path}: this file has other contents and is not overwritten")
    return is_ours
