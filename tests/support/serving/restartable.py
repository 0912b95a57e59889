"""A real server that tests kill and start again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.support.servers.rpc_server import closed_port
from tests.support.serving.served import Served, serve


class Restartable:
    """A server on a port of its own that can be killed and started again."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.port = closed_port()
        self._arguments, self._log, self._stack = [*arguments, "--port", str(self.port)], log, ExitStack()
        self.server: Served = self._stack.enter_context(serve(*self._arguments, log=self._log))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self.server.process.kill()
        self.server.process.wait()

    def stop(self) -> None:
        """End the server as an administrator does. Its answers in progress end with an error."""
        self.server.process.terminate()
        self.server.process.wait()

    def restart(self) -> None:
        """Start the server again on the same port, and wait until it is ready."""
        self.close()
        self.server = self._stack.enter_context(serve(*self._arguments, log=self._log))

    def close(self) -> None:
        """End the server. Idempotent."""
        self._stack.close()
