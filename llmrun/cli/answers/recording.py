"""Records the run of `llmrun generate --record`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmrun.base.types import FinishReason
from llmrun.cli.answers.answering import lasting_model
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import HubReporter
from llmrun.engine.engine import Engine
from llmrun.jobs.replay import Watcher, opening_of, record, write_recording

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.cli.answers.answering import OpenModel
    from llmrun.cli.answers.report import AnsweredRequest
    from llmrun.options.settings import Settings


class Recorder:
    """Watches the backend of one run, and writes the recording when the answer is finished."""

    def __init__(self, path: Path, settings: Settings, chat_template: str | None, *, raw: bool) -> None:
        self._path, self._settings, self._chat_template, self._raw = path, settings, chat_template, raw
        self.watcher = Watcher()

    def after(
        self, opened: OpenModel, log: Callable[[AnsweredRequest], None] | None
    ) -> Callable[[AnsweredRequest], None]:
        """Return a function that logs and records a finished answer. The function may raise LlmrunError."""

        def write(done: AnsweredRequest) -> None:
            if log is not None:
                log(done)
            if done.finished.reason is FinishReason.CANCELLED:
                out.note("the answer was stopped, so it was not recorded")
                return
            engine = opened.engine
            assert isinstance(engine, Engine)  # an earlier check refuses remote models
            template, tags = self._chat_template, opened.thinking_tags
            recording = record(
                engine,
                self.watcher.backend,
                done.request,
                done.tokens,
                done.finished,
                model=lasting_model(self._settings),
                opening=opening_of(engine, chat_template=template, thinking_tags=tags, raw=self._raw),
                image_limits=(self._settings.image_min_tokens, self._settings.image_max_tokens),
                reporter=HubReporter(),
            )
            out.clear_progress()
            write_recording(self._path, recording)
            out.note(f"recorded in {self._path}; repeat the run with llmrun replay {self._path}")

        return write
