"""The interface that local and remote engines share."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo
    from llmrun.engine.requests import Event, Request
    from llmrun.engine.templates.chat_template import ChatTemplate
    from llmrun.engine.thinking import ModelThinking
    from llmrun.engine.tool_calls.prompting import ModelTools


class Answering(Protocol):
    """One open model, local or remote. `Engine` and `RemoteEngine` document the methods and the errors they raise.

    load_s    time to open the model, in seconds
    template  the chat template; None if the model has none, or if the server applies its own
    thinking  the model's thinking tags and switch; None for remote models, where only the server knows them
    tools     what the model can do with tools; None for remote models
    """

    load_s: float

    @property
    def template(self) -> ChatTemplate | None: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def thinking(self) -> ModelThinking | None: ...

    @property
    def tools(self) -> ModelTools | None: ...

    @property
    def takes_chats(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    def prompt_tokens(self, request: Request) -> int | None: ...

    def submit(self, request: Request) -> int: ...

    def step(self) -> list[Event]: ...

    def generate(self, request: Request) -> Iterator[Event]: ...

    def cancel(self, request_id: int) -> None: ...

    def cancel_current(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
