"""A worker whose engine runs in a child process on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from llmrun.base.errors import LlmrunError, ModelNotFound, Unavailable, shown
from llmrun.engine.child.messages import Open
from llmrun.engine.requests import ModelFacts
from llmrun.jobs.batching.workers.base import CHAT, COMPLETION, Reply, WorkerLost
from llmrun.serving.processes.model_process import ModelProcess
from llmrun.serving.processes.request import ServedRequest
from llmrun.serving.processes.supervisor import ServingLimits
from llmrun.serving.protocol.errors import api_error, openai_body
from llmrun.serving.protocol.openai.requests import ParsedCompletion, parse_chat, parse_completion
from llmrun.serving.protocol.openai.responses import ChatAnswer, CompletionAnswer, model_body

_Parse = Callable[[dict[str, Any], ModelFacts, int], ParsedCompletion]
_NewAnswer = Callable[[ParsedCompletion, ModelFacts, str, int], ChatAnswer | CompletionAnswer]
_SEED: Final = 0  # Unused, because every call of a batch has a seed.
_NO_LIMIT: Final = 1 << 40  # in bytes, because a batch limits the number of concurrent calls instead
_CALLS: Final[Mapping[str, tuple[_Parse, _NewAnswer]]] = {
    CHAT: (parse_chat, ChatAnswer),
    COMPLETION: (parse_completion, CompletionAnswer),
}


class LocalWorker:
    """An engine in a child process. If the process ends, it is restarted, and its calls run again automatically."""

    def __init__(
        self,
        model: Open,
        *,
        name: str = "this machine",
        loading: Callable[[str, float], None],
        note: Callable[[str], None],
        detail: Callable[[str], None],
    ) -> None:
        """Create a worker without opening the model.

        model  the model to open; `options["max_sequences"]` is the number of answers generated at a time
        loading, note, detail  callbacks, as for ModelProcess
        """
        self.name = name
        self.slots = 2 * int(model.options["max_sequences"])
        limits = ServingLimits(max_queue=_NO_LIMIT, queue_bytes=_NO_LIMIT, unread_bytes=_NO_LIMIT)
        self._new_process: Callable[[], ModelProcess] = lambda: ModelProcess(
            model, limits, loading=loading, note=note, detail=detail
        )
        self._process: ModelProcess | None = None

    @property
    def pid(self) -> int | None:
        """The ID of the engine's process, or None if the worker is not open."""
        return None if self._process is None else self._process.pid

    async def start(self) -> Mapping[str, Any]:
        """Open the model, and return its entry of /v1/models. Raises the errors of opening a model."""
        await self.close()
        self._process = self._new_process()
        await self._process.start()
        assert self._process.facts is not None
        return model_body(self._process.facts, 0)

    async def answer(self, url: str, body: Mapping[str, Any]) -> Reply:
        """Answer a call, as `Worker.answer` specifies."""
        process = self._process
        if process is None or process.facts is None:
            raise WorkerLost(f"{self.name}: the model is not open")
        try:
            parsed = parse_call(url, body, process.facts)
            answer = _CALLS[url][1](parsed, process.facts, "", int(time.time()))
            await _run(process, parsed, answer)
        except Unavailable as error:
            raise WorkerLost(f"{self.name}: {error}") from error
        except LlmrunError as error:
            problem = api_error(error)
            return Reply(problem.status, openai_body(problem))
        return Reply(200, answer.whole(), parsed.ignored)

    async def close(self) -> None:
        """End the engine's process, as `Worker.close` specifies."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()


def parse_call(url: str, body: Mapping[str, Any], facts: ModelFacts) -> ParsedCompletion:
    """Convert the body of a call into requests. Raises LlmrunError if the call cannot be answered."""
    name = body.get("model")
    if isinstance(name, str) and name not in ("", facts.name):
        raise ModelNotFound(f"no such model: {shown(name, 100)}", hint=f"this batch runs {facts.name}")
    return _CALLS[url][0](dict(body), facts, _SEED)


async def _run(process: ModelProcess, parsed: ParsedCompletion, answer: ChatAnswer | CompletionAnswer) -> None:
    """Run the requests of a call, and feed their events to the answer. Raises the error of a failed request."""
    news = asyncio.Event()
    running: list[ServedRequest] = []
    try:
        running.extend(process.ask(request, news) for request in parsed.requests)  # keeps requests sent before an error
        while not answer.is_complete:
            news.clear()
            for choice, one in enumerate(running):
                for _, event in one.take():
                    answer.feed(choice, event)
            if not answer.is_complete:
                await news.wait()
    finally:
        for one in running:
            one.cancel()
