"""The model that a chat uses, which the user can switch during the chat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llmrun.base.errors import LlmrunError, TemplateRefused

if TYPE_CHECKING:
    from llmrun.cli.answers.answering import OpenModel
    from llmrun.cli.chatting.context import ConversationState
    from llmrun.formats.images.header import ImageHeader
    from llmrun.model.vision.layout import ImageLayout


class ModelOpener(Protocol):
    """Opens models by name. `fetch` and `open` may raise any LlmrunError from the hub or the engine."""

    def fetch(self, name: str, *, images: bool) -> str:
        """Download the model if necessary, and return a name for it that works from any folder.

        images  whether the model must read images
        """

    def open(self, name: str, context_size: int | None, *, images: bool) -> AbstractContextManager[OpenModel]:
        """Open a model. `name` must be a name that `fetch` returned, and None is the default context size."""


class ModelLost(LlmrunError):
    """The previous model could not be reopened, so no model is open."""


class ModelInUse:
    """The only open model of a chat.

    Two models might not fit in memory at the same time, and the default context size of a model depends on the free
    memory. The current model is therefore closed before the next model is opened, and is reopened after a failure.
    """

    def __init__(
        self,
        opener: ModelOpener,
        lasting_name: str,
        state: ConversationState | None = None,
        context_size: int | None = None,
        *,
        images: bool = False,
    ) -> None:
        """Open the first model. Raises the opener's errors, and TemplateRefused if the model has no chat template."""
        self._opener = opener
        self._state = state
        self._context_size = context_size
        self._images = images
        self._held = ExitStack()
        self._opened: OpenModel | None = None
        self.lasting_name = lasting_name
        self._open(lasting_name)

    @property
    def opened(self) -> OpenModel:
        assert self._opened is not None
        return self._opened

    def switch(self, name: str, *, images: bool = False) -> bool:
        """Close the current model and open another model. Return False if `name` is the current model.

        Raises the opener's errors and KeyboardInterrupt, after which the caller must call `reopen`. If the name is
        unknown or the download fails, the current model stays open.

        images  whether the other model must read images
        """
        lasting = self._opener.fetch(name, images=images)
        if lasting == self.lasting_name:
            return False
        before, self._images = self._images, images
        self.close()
        try:
            self._open(lasting)
        except BaseException:
            self._images = before
            raise
        self.lasting_name = lasting
        return True

    def see_images(self) -> None:
        """Reopen the current model with its projector. Raises errors like `resize`."""
        self._opener.fetch(self.lasting_name, images=True)
        self.close()
        self._images = True
        try:
            self._open(self.lasting_name)
        except BaseException:
            self._images = False
            raise

    def measure(self, header: ImageHeader) -> ImageLayout | None:
        """Return how the current model sees an image, or None if that is unknown or if the model cannot read it."""
        try:
            projector = self.opened.projector()
            return projector.layout(header.width, header.height) if projector else None
        except LlmrunError:
            return None

    def resize(self, context_size: int | None) -> None:
        """Reopen the current model with another context size, which later models will have, too.

        Raises the opener's errors and KeyboardInterrupt, after which the caller must call `reopen`.
        """
        before, self._context_size = self._context_size, context_size
        self.close()
        try:
            self._open(self.lasting_name)
        except BaseException:
            self._context_size = before
            raise

    def reopen(self) -> None:
        """Reopen the last model if no model is open. Raises ModelLost if the model cannot be opened."""
        if self._opened is not None:
            return
        try:
            self._open(self.lasting_name)
        except (LlmrunError, OSError) as error:
            raise ModelLost(f"{self.lasting_name}: cannot be reopened: {error}") from error

    @contextmanager
    def saving(self, conversation: Path | None) -> Iterator[None]:
        """Use a conversation's saved state in the `with` block, and save the new state at the end of the block."""
        if self._state is not None:
            self._state.use(self.opened.engine, conversation)
        try:
            yield
        finally:
            if self._state is not None:
                self._state.save(self.opened.engine)

    def cancel(self) -> None:
        """Stop the current answer. This method is safe to call from a signal handler."""
        if self._opened is not None:
            self._opened.engine.cancel_current()

    def close(self) -> None:
        """Close the model. Calling this method twice is safe."""
        try:
            if self._opened is not None and self._state is not None:
                self._state.finish(self._opened.engine)
        finally:
            self._opened = None
            self._held.close()

    def _open(self, lasting_name: str) -> None:
        with ExitStack() as trial:
            opened = trial.enter_context(self._opener.open(lasting_name, self._context_size, images=self._images))
            engine = opened.engine
            if not engine.takes_chats:
                raise TemplateRefused(
                    f"no chat template: {engine.info.path}: tokenizer.chat_template is missing, and the vocabulary "
                    "does not belong to a known model family",
                    hint="give one with --chat-template FILE, or use llmrun generate --raw for plain completion",
                )
            self._held = trial.pop_all()
        self._opened = opened
