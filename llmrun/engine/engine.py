"""Tokens in, text out, over any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from llmrun.engine.requests import Event, Request

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.engine.template import ChatTemplate
    from llmrun.tokenizers.base import Tokenizer
    from llmrun.types import ModelInfo


class Engine:
    """One open model that answers requests, up to `info.max_sequences` of them at a time.

    Either hand requests to `submit` and call `step` until `idle`, or let `generate` do both for one request.
    Not thread-safe, except for `cancel` and `cancel_current`.
    """

    def __init__(self, backend: Backend, *, chat_template: str | None = None, load_s: float = 0.0) -> None:
        """Take over an open backend. `chat_template` is Jinja source that replaces the model's own."""

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        backend: str = "auto",
        context_size: int | None = None,
        max_sequences: int = 1,
        threads: int | None = None,
        chat_template: str | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> Engine:
        """Open a GGUF file on the backend named, or on the best one ("auto").

        `chat_template` is Jinja source (not a path). `progress(what, fraction)` is told of loading and of kernels
        being compiled. Raises ModelFileError, UnsupportedModel, DoesNotFit, UsageError.
        """
        raise NotImplementedError

    @property
    def info(self) -> ModelInfo:
        raise NotImplementedError

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template, `template.origin` saying where it is from; None when the file has none and its
        vocabulary belongs to no known family: a base model, to be prompted with TextPrompt."""
        raise NotImplementedError

    @property
    def load_s(self) -> float:
        """Seconds `open` took."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        raise NotImplementedError

    def submit(self, request: Request) -> int:
        """Queue a request and return its id, which its events carry.

        Raises ContextExceeded (the prompt does not fit), TemplateRefused (also for a ChatPrompt when `template` is
        None) and UsageError (a parameter that cannot be meant). The clock of `Timings` starts here.
        """
        raise NotImplementedError

    def step(self) -> list[Event]:
        """Run one forward pass for every request that can go on, and return what came of it."""
        raise NotImplementedError

    def generate(self, request: Request) -> Iterator[Event]:
        """Submit one request and yield its events to the Finished one; raises what `submit` and `Failed` would.

        Closing the iterator early cancels the request. Raises UsageError while other requests are unfinished.
        """
        raise NotImplementedError

    def cancel(self, request_id: int) -> None:
        """Let a request end with Finished(CANCELLED) at the next `step`. Unknown or ended ids are ignored."""

    def cancel_current(self) -> None:
        """Cancel everything that is waiting or running, now: for a signal handler or another thread."""

    def close(self) -> None:
        """Close the backend. Idempotent."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
