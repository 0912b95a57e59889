"""The model that a chat has open, which can be exchanged for another one."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol

from llmrun.errors import LlmrunError, TemplateRefused

if TYPE_CHECKING:
    from types import TracebackType

    from llmrun.cli.answers.open_model import OpenModel


class ModelOpener(Protocol):
    """Opens models by the names that users type. Both methods raise every LlmrunError of hub and engine."""

    def fetch(self, name: str) -> str:
        """Make sure that the model is on this machine. Returns the name that finds it again from any folder."""

    def open(self, name: str) -> AbstractContextManager[OpenModel]:
        """Open a model by a name that `fetch` returned."""


class ModelLost(LlmrunError):
    """A model that was in use could not be opened again: nothing is left to answer."""


class ModelInUse:
    """One open model at a time.

    Memory may not hold two, and the context that a model gets by default depends on how much memory is free. So the
    model in use is closed before the next one is opened, and opened again if that fails.
    """

    def __init__(self, opener: ModelOpener, lasting_name: str) -> None:
        """Open the first model. Raises what the opener raises, and TemplateRefused for one that takes no chats."""
        self._opener = opener
        self._held = ExitStack()
        self._opened: OpenModel | None = None
        self.lasting_name = lasting_name
        self._open(lasting_name)

    @property
    def opened(self) -> OpenModel:
        assert self._opened is not None
        return self._opened

    def switch(self, name: str) -> bool:
        """Open another model in place of this one. Returns False if it is the same one.

        Raises what the opener raises, KeyboardInterrupt too; call `reopen` then. A name that means nothing and a
        download that fails leave the model in use untouched.
        """
        lasting = self._opener.fetch(name)
        if lasting == self.lasting_name:
            return False
        self.close()
        self._open(lasting)
        self.lasting_name = lasting
        return True

    def reopen(self) -> None:
        """Open the last model again if none is open. Raises ModelLost."""
        if self._opened is not None:
            return
        try:
            self._open(self.lasting_name)
        except (LlmrunError, OSError) as error:
            raise ModelLost(f"{self.lasting_name}: cannot be opened again: {error}") from error

    def cancel(self) -> None:
        """Stop the answer under way: for a signal handler."""
        if self._opened is not None:
            self._opened.engine.cancel_current()

    def close(self) -> None:
        """Idempotent."""
        self._opened = None
        self._held.close()

    def __enter__(self) -> ModelInUse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, lasting_name: str) -> None:
        with ExitStack() as trial:
            opened = trial.enter_context(self._opener.open(lasting_name))
            engine = opened.engine
            if not engine.takes_chats:
                raise TemplateRefused(
                    f"no chat template: {engine.info.path}: tokenizer.chat_template is absent, and the vocabulary is "
                    "of no known family",
                    hint="give it one with --chat-template FILE, or complete texts with llmrun generate --raw",
                )
            self._held = trial.pop_all()
        self._opened = opened
