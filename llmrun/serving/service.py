"""What all routes share: the model, the options, the metrics, and the requests that are running."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from llmrun.serving.bodies import Bodies
from llmrun.serving.choices import Choices
from llmrun.serving.metrics import Metrics
from llmrun.serving.model import ServedModel, State
from llmrun.serving.models import Models, unavailable
from llmrun.serving.options import ServingOptions

if TYPE_CHECKING:
    from llmrun.engine.requests import Request


class Service:
    """The state of one server, apart from its connections."""

    def __init__(self, models: Models, options: ServingOptions) -> None:
        self.models, self.options = models, options
        self.metrics = Metrics()
        self.bodies = Bodies(options.limits)
        self.draining = False
        self._running: set[Choices] = set()

    @property
    def running(self) -> int:
        """The number of calls to the model that are in progress, including those in its queue."""
        return len(self._running)

    @asynccontextmanager
    async def asked(self, model: ServedModel, requests: Sequence[Request]) -> AsyncIterator[Choices]:
        """Yield the choices of a call. They are cancelled when the block ends.

        Raises Unavailable if the server is shutting down.
        """
        self.check_running()
        async with Choices(model, requests, self.metrics) as choices:
            self._running.add(choices)
            try:
                yield choices
            finally:
                self._running.discard(choices)

    def check_running(self) -> None:
        """Raise Unavailable if the server is shutting down."""
        if self.draining:
            raise unavailable(State.DRAINING)

    def drain(self) -> None:
        """Refuse new requests and end those that the engine has not begun."""
        self.draining = True
        for choices in self._running:
            if not choices.begun:
                choices.stop(unavailable(State.DRAINING))

    def end_all(self) -> None:
        """End all requests with an error."""
        for choices in self._running:
            choices.stop(unavailable(State.DRAINING))
