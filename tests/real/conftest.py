"""Servers with real models, which start when a test needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.real.groups import PARALLEL
from tests.support.models.downloads import PartedModel, assembled
from tests.support.serving.serve_process import Served, served

_FLAGS = ("--backend", "cpu", "-c", "8192", "--parallel", str(PARALLEL), "--max-wait", "3600")
_PATIENCE_S = 3600.0


class Servers:
    """Runs one server at a time. Starting another server stops the running one, to free its memory."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: tuple[object, Served] | None = None

    def of(self, model: PartedModel, **settings: str) -> Served:
        """Return a server with the given model. `settings` are llmrun's settings, such as tool_text="off"."""
        wanted = model, settings
        if self._running is None or self._running[0] != wanted:
            self.close()
            with pytest.MonkeyPatch.context() as environment:
                for name, value in settings.items():
                    environment.setenv(f"LLMRUN_{name.upper()}", value)
                server = self._stack.enter_context(served(str(assembled(model)), *_FLAGS))
            server.patience_s = _PATIENCE_S  # long prompts, on a machine that may be busy
            self._running = wanted, server
        return self._running[1]

    def close(self) -> None:
        if self._running is not None:
            _, server = self._running
            server.stop()
            server.process.wait(_PATIENCE_S)  # otherwise, `served` sends a second signal, which makes the server fail
        self._running = None
        self._stack.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()
