"""Calls to an engine's process that get one message back: those that tokenize, count or embed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrun.engine.child.messages import encode_to_child
from llmrun.serving.processes.deaths import MOST_DEATHS, ended_repeatedly
from llmrun.serving.processes.served_model import State

if TYPE_CHECKING:
    from llmrun.base.errors import LlmrunError
    from llmrun.engine.child.messages import ToChild
    from llmrun.serving.processes.limits import ServingLimits
    from llmrun.serving.processes.supervisor import Supervisor


@dataclass(slots=True, eq=False)
class _Call:
    """A call that has no answer yet.

    is_sent  whether the process that runs now has it
    deaths   how often a process ended that had it
    """

    tenant: str
    message: bytes
    result: asyncio.Future[Any]
    is_sent: bool = False
    deaths: int = 0


class Calls:
    """The calls that have no answer yet. While the process restarts, they wait, as requests do.

    Those whose clients have left count until the process has forgotten them, too.

    on_over  called when a call is over
    """

    def __init__(self, limits: ServingLimits, supervisor: Supervisor, on_over: Callable[[], None]) -> None:
        self._limits, self._supervisor, self._on_over = limits, supervisor, on_over
        self._calls: dict[int, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def run(self, call_id: int, message: ToChild, tenant: str) -> Any:
        """Send a message, and return the result of the call. Raises Overloaded, and the errors given to `fail`."""
        data = encode_to_child(message)
        waiting = [(each.tenant, len(each.message)) for each in self._calls.values()]
        self._limits.check_room(waiting, tenant, len(data), retry_after=1.0)
        call = self._calls[call_id] = _Call(tenant, data, asyncio.get_running_loop().create_future())
        if self._supervisor.state is State.READY:
            self._send(call)
        try:
            return await call.result
        finally:
            if not call.is_sent:  # the client has left, and no process has the call
                self._pop(call_id)

    def send_held(self) -> None:
        """Send the oldest call that waits for a new process. They run one by one, because one of them may be deadly."""
        held = next((call for call in self._calls.values() if not call.is_sent), None)
        if held is not None and self._supervisor.state is State.READY:
            self._send(held)

    def hold(self, reason: str) -> None:
        """Keep all calls for the next process, except those during which processes have ended too often."""
        for call_id, call in list(self._calls.items()):
            call.deaths += call.is_sent
            call.is_sent = False
            if call.deaths >= MOST_DEATHS or call.result.done():
                self.fail(call_id, ended_repeatedly(reason))

    def end(self, call_id: int, result: Any) -> None:
        """Give a call its result. Unknown calls are ignored."""
        if (waiting := self._pop(call_id)) is not None:
            waiting.set_result(result)

    def fail(self, call_id: int, error: LlmrunError) -> None:
        """End a call with an error. Unknown calls are ignored."""
        if (waiting := self._pop(call_id)) is not None:
            waiting.set_exception(error)

    def fail_all(self, error: LlmrunError) -> None:
        """End all calls with an error."""
        for call_id in list(self._calls):
            self.fail(call_id, error)

    def _send(self, call: _Call) -> None:
        call.is_sent = True
        self._supervisor.send(call.message)

    def _pop(self, call_id: int) -> asyncio.Future[Any] | None:
        """Forget a call, and return its result if someone waits for it."""
        ended = self._calls.pop(call_id, None)
        self._on_over()
        self.send_held()
        return None if ended is None or ended.result.done() else ended.result
