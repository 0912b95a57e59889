"""The actor on each node of a Ray cluster, which runs an engine in a child process and stores the model file.

Ray starts this class in a separate process. Arguments and results are JSON and bytes, because Ray would otherwise
pickle objects whose classes may differ between the machines. This module does not import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any, Final

from msgspec import convert, structs

from llmrun import __version__
from llmrun.base.errors import LlmrunError
from llmrun.base.machine.cpu_count import default_threads
from llmrun.base.processes.frames import decoded, encoded, error_to_json
from llmrun.engine.child.messages import Open
from llmrun.hub.local.safe_writes import in_use
from llmrun.hub.upkeep.model_copies import IncomingModel, OriginalFile, find_copy
from llmrun.jobs.batching.workers.base import DETAIL, FAILED, LOADING, LOST, NOTE, OK, WorkerLost
from llmrun.jobs.batching.workers.local import LocalWorker

_NEWS_S: Final = 5.0  # how long a call of `news` waits for news
_MOST_NEWS: Final = 1000


class RayActor:
    """A worker on a node. All methods return encoded JSON: OK and a value, FAILED and an error, or LOST and a reason.

    Other versions of llmrun may call only `hello`.
    """

    def __init__(self, name: str, n_cpus: int) -> None:
        """Create a worker without opening a model.

        name    the worker's name in messages
        n_cpus  the number of CPUs that Ray grants
        """
        self._name = name
        self._n_cpus = n_cpus
        self._worker: LocalWorker | None = None
        self._incoming: IncomingModel | None = None
        self._files = contextlib.ExitStack()  # holds the locks of the model's files
        self._news: list[tuple[Any, ...]] = []
        self._some_news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def hello(self) -> bytes:
        """Return the version of llmrun, and the node's authentication mode."""
        self._loop = asyncio.get_running_loop()
        return _encoded(OK, {"version": __version__, "auth_mode": os.environ.get("RAY_AUTH_MODE", "")})

    async def news(self) -> bytes:
        """Return the next news to show: LOADING with a description and a fraction, or NOTE or DETAIL with a text.

        If there is no news, the method waits briefly, so the answer also proves that the node is alive.
        """
        if not self._news:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NEWS_S):
                    await self._some_news.wait()
        self._some_news.clear()
        news, self._news = self._news, []
        return _encoded(OK, news)

    async def find(self, files: bytes) -> bytes:
        """Return the local path of the model with these files, or None if this node lacks the model."""
        return await self._threaded(lambda: _path(find_copy(_originals(files), self)))

    async def receive(self, files: bytes) -> bytes:
        """Prepare to receive a model. Return False if another process on this node is receiving the model."""
        self._forget_incoming()
        self._incoming = IncomingModel(_originals(files))
        return await self._threaded(self._incoming.take)

    async def begin_file(self, index: int) -> bytes:
        """Begin a file of the model, and return the number of bytes that are already on this node."""
        return await self._threaded(lambda: self._receiving.begin(index))

    async def add_bytes(self, data: bytes) -> bytes:
        """Append bytes to the current file."""
        return await self._threaded(lambda: self._receiving.write(data))

    async def end_file(self) -> bytes:
        """Verify the current file."""
        return await self._threaded(lambda: self._receiving.end(self))

    async def end_receiving(self) -> bytes:
        """Return the path of the received model."""
        return await self._threaded(lambda: _path(self._receiving.finish()))

    async def open(self, model: bytes) -> bytes:
        """Open a model, given its paths on this node, and return the model's entry of /v1/models."""
        asked = convert(decoded(model), Open)
        if asked.options.get("threads") is None:
            threads = max(1, min(default_threads(), self._n_cpus))
            asked = structs.replace(asked, options={**asked.options, "threads": threads})
        for path in filter(None, (asked.path, asked.draft, asked.options.get("mmproj"))):
            self._files.enter_context(in_use(Path(path)))
        self._worker = LocalWorker(asked, name=self._name, loading=self._loading, note=self.note, detail=self._detail)
        try:
            return _encoded(OK, dict(await self._worker.start()))
        except LlmrunError as error:
            return _failed(error)

    async def answer(self, url: str, body: bytes) -> bytes:
        """Answer a call. Return the status, the body, and the names of the fields that had no effect."""
        assert self._worker is not None
        try:
            reply = await self._worker.answer(url, decoded(body))
        except WorkerLost as error:
            return _encoded(LOST, str(error))
        return _encoded(OK, [reply.status, dict(reply.body), list(reply.ignored)])

    def note(self, line: str) -> None:
        """Show a line, as `hub.progress_reporter.Reporter` specifies."""
        self._tell(NOTE, line)

    def progress(self, label: str, done: int, total: int) -> None:
        """Show progress, as `hub.progress_reporter.Reporter` specifies."""
        self._tell(LOADING, label, done / max(1, total))

    @property
    def _receiving(self) -> IncomingModel:
        assert self._incoming is not None
        return self._incoming

    def _forget_incoming(self) -> None:
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    def _loading(self, work: str, fraction: float) -> None:
        self._tell(LOADING, work, fraction)

    def _detail(self, text: str) -> None:
        self._tell(DETAIL, text)

    def _tell(self, *news: Any) -> None:
        """Add news. Any thread may call this method."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._add_news, news)

    def _add_news(self, news: tuple[Any, ...]) -> None:
        if self._news and self._news[-1][0] == news[0] == LOADING:
            self._news.pop()  # only the latest progress is shown
        if len(self._news) < _MOST_NEWS:
            self._news.append(news)
        self._some_news.set()

    async def _threaded(self, work: Any) -> bytes:
        try:
            return _encoded(OK, await asyncio.to_thread(work))
        except LlmrunError as error:
            self._forget_incoming()
            return _failed(error)


def _originals(files: bytes) -> list[OriginalFile]:
    return convert(decoded(files), list[OriginalFile])


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _encoded(kind: str, value: Any) -> bytes:
    return encoded([kind, value])


def _failed(error: LlmrunError) -> bytes:
    return _encoded(FAILED, error_to_json(error))
