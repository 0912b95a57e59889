"""Forwards one request to an upstream, or to another upstream if the first one fails.

Before the first token of an answer, the client has received nothing, so any other upstream can take over. Afterward,
only another llmrun server can take over, because llmrun resumes streams with event IDs and repeats the same bytes.

Upstreams are not trusted: the length of an event is limited, and events that are not JSON are errors. The streams of
all APIs are split into events to track the progress of the answer, but the bytes of events are passed on unchanged.
While an upstream processes the prompt, the client receives the upstream's progress as comments, and the upstream's
chunks with `prompt_progress`. After these, another upstream can still take over. llmrun servers also send events for
the timers of clients such as Codex and Claude Code. These events belong to an answer. They are passed on, together with
the events before them, because another llmrun server can resume the answer. Other servers' events are held back.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from functools import partial
from typing import Any, Final

from starlette.types import Send

from llmrun.engine.remote.client import OWNER
from llmrun.engine.remote.stream import follows, is_event_id, prompt_state, server_words
from llmrun.serving.bodies import LARGE, off_the_loop
from llmrun.serving.exchanges import Exchange
from llmrun.serving.gate import UPSTREAM_FLAG
from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.wire import WireFormat
from llmrun.serving.refusals import INVALID, SERVER, Refused
from llmrun.serving.upstreams.pool import Pool
from llmrun.serving.upstreams.upstream import MOST_ERROR, Answering, Cut, Misbehaved, Upstream

MOST_BYTES: Final = 4 << 20  # the size limit of one event; the last event of a response contains the whole answer
_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_NEWLINE: Final = re.compile(rb"\n")
_DONE: Final = b"[DONE]"
_PING: Final = "ping"
# Event types of the Responses API and Anthropic's API that precede the first generated token.
_EARLY_TYPES: Final = (
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "message_start",
    "content_block_start",
    _PING,
)
_LAST_TYPES: Final = ("response.completed", "response.incomplete", "message_stop")
_ERROR_TYPES: Final = ("error", "response.failed")
_TEXTS: Final = ("content", "text", "reasoning_content", "reasoning", "refusal", "tool_calls", "thinking", "response")


class BadStream(ValueError):
    """An upstream sent data that is not an event of an answer."""


class Progress(IntEnum):
    """How far an answer has progressed after an event.

    ASIDE   the event reports the progress of the prompt, and does not belong to the answer
    EARLY   nothing has been generated yet, so another upstream can still take over
    TOKEN   something has been generated
    FINISH  the answer is complete, but other events may follow
    LAST    the last event
    ERROR   an error, which ends the stream
    """

    ASIDE = auto()
    EARLY = auto()
    TOKEN = auto()
    FINISH = auto()
    LAST = auto()
    ERROR = auto()


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream.

    raw       the event's bytes, including the blank line or newline at the end
    id        the value for `Last-Event-ID`; "" if the event has no ID in llmrun's form
    progress  the progress of the answer after the event
    data      the event's JSON object; empty for `[DONE]`
    """

    raw: bytes
    id: str
    progress: Progress
    data: Mapping[str, Any]


class EventSplitter:
    """Splits a stream of server-sent events, or of JSON lines as in Ollama's API.

    Comments and Anthropic's pings are dropped, because this server sends its own comments.

    prompt  the last comment about the progress of the prompt; "" before the first one
    """

    def __init__(self, *, json_lines: bool) -> None:
        self._json_lines = json_lines
        self._end = _NEWLINE if json_lines else _BLANK_LINE
        self._held = bytearray()
        self.prompt = ""

    def feed(self, data: bytes) -> list[StreamEvent]:
        """Return the events that the new data completes. Raises BadStream."""
        searched = max(0, len(self._held) - 2)  # the last two bytes may belong to the separator
        self._held += data
        events, start = [], 0
        while found := self._end.search(self._held, max(start, searched)):
            raw = bytes(self._held[start : found.end()])
            start = found.end()
            if (event := self._event(raw)) is not None:
                events.append(event)
        del self._held[:start]
        if len(self._held) > MOST_BYTES:
            raise BadStream(f"an event of more than {MOST_BYTES:,} bytes")
        return events

    def _event(self, raw: bytes) -> StreamEvent | None:
        if self._json_lines:
            return None if raw.isspace() else _parsed(raw, "", raw)
        lines = [line.partition(b":") for line in raw.splitlines()]
        data = b"\n".join(value.removeprefix(b" ") for name, _, value in lines if name in (b"data", b"error"))
        ids = [value.strip().decode("latin-1") for name, _, value in lines if name == b"id"]
        known = bool(ids) and is_event_id(ids[-1])
        if not data:
            self.prompt = next((found[0] for found in map(prompt_state, raw.splitlines()) if found), self.prompt)
            return None
        event = _parsed(raw, ids[-1] if known else "", data)
        return None if event.data.get("type") == _PING and event.progress is not Progress.ASIDE else event


def _parsed(raw: bytes, event_id: str, data: bytes) -> StreamEvent:
    if data.strip() == _DONE:
        return StreamEvent(raw, event_id, Progress.LAST, {})
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # invalid JSON, deep nesting, or a very long number
        raise BadStream("an event that is not valid JSON") from None
    if not isinstance(value, dict):
        raise BadStream("an event that is not a JSON object")
    return StreamEvent(raw, event_id, _progress(value), value)


def _progress(data: Mapping[str, Any]) -> Progress:
    found = _stage(data)
    is_aside = "prompt_progress" in data and data.get("type") in (None, _PING)
    return Progress.ASIDE if found is Progress.EARLY and is_aside else found


def _stage(data: Mapping[str, Any]) -> Progress:
    kind = data.get("type")
    if kind in _ERROR_TYPES or server_words(data):
        return Progress.ERROR
    if kind in _LAST_TYPES or data.get("done") is True:
        return Progress.LAST
    if data.get("stop") is True:  # llama-server's own API
        return Progress.FINISH
    if isinstance(choices := data.get("choices"), list):
        parts = [choice for choice in choices if isinstance(choice, dict)]
        if any(part.get("finish_reason") for part in parts):
            return Progress.FINISH
        return Progress.TOKEN if any(map(_has_text, parts)) else Progress.EARLY
    if kind in _EARLY_TYPES or (kind == "message_delta" and not _ends(data)):
        return Progress.EARLY
    known = "done" in data or "stop" in data  # Ollama and llama-server send empty texts, too
    return Progress.EARLY if known and not _has_text(data) else Progress.TOKEN


def _ends(data: Mapping[str, Any]) -> bool:
    """Return whether an event `message_delta` ends its message."""
    return not isinstance(delta := data.get("delta"), dict) or delta.get("stop_reason") is not None


def _has_text(part: Mapping[str, Any]) -> bool:
    """Return whether a choice, or the message in the choice, contains generated text."""
    inner = part.get("delta") or part.get("message")
    return any(part.get(name) for name in _TEXTS) or (isinstance(inner, dict) and _has_text(inner))


# The response headers of upstreams that are passed on. Other headers may concern the upstream's connection or keys.
# The headers of upstreams for clients. x-llmrun-prefix is not among them: all clients share the key for an upstream, so
# it would reveal what other clients have sent.
_PASSED_ON: Final = (
    "content-type",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-llmrun-context",
    "x-llmrun-ignored",
    "x-llmrun-images",
    "x-llmrun-wait",
    "x-llmrun-first-token",
)
_UNANSWERED: Final = 10  # how many times longer the silence may be before an upstream's response begins
_OF_STREAMS: Final = {"x-accel-buffering": "no"}  # nginx would otherwise buffer the events


class Reply:
    """One response to the client.

    started  True if the response's header has been sent
    begun    True if a part of the answer has been sent
    headers  the headers of the upstream's response, or None until the response begins
    prompt   a comment about the progress of the prompt, or ""
    """

    def __init__(self, send: Send, wire: WireFormat, *, streamed: bool) -> None:
        """Wrap an ASGI `send` callable."""
        self._send, self._wire, self._streamed = send, wire, streamed
        self._lock = asyncio.Lock()  # two tasks send data: one forwards the answer, and the other sends comments
        self._sent_at = asyncio.get_running_loop().time()
        self.started = False
        self.begun = False
        self.headers: Mapping[str, str] | None = None
        self.prompt = ""

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole response, with headers from the upstream's response."""
        async with self._lock:
            if not self.started:  # spaces may have kept the connection alive
                await self._start(status, headers, {"content-length": str(len(body))})
            await self._body(body, more=False)

    async def events(self, headers: Mapping[str, str], raw: bytes) -> None:
        """Send a part of a stream. `headers` are the headers of the upstream's response."""
        async with self._lock:
            if not self.started:
                await self._start(200, headers, _OF_STREAMS)
            self.begun = True
            await self._body(raw, more=True)

    async def aside(self, raw: bytes) -> None:
        """Send bytes that are not part of the answer."""
        async with self._lock:
            await self._aside(raw)

    async def end(self, error: ApiError | None = None) -> None:
        """End a stream, and send an error event first if `error` is given."""
        async with self._lock:
            last = b"" if error is None else self._wire.frame(self._wire.error_chunk(error), "")
            await self._body(last, more=False)

    @asynccontextmanager
    async def pinging(self, ping_s: float) -> AsyncIterator[None]:
        """Send a comment whenever a stream has been silent for `ping_s` seconds.

        The first silence, until an upstream's response begins, may be longer, because comments begin a response with
        status 200, and the status of a refusal would be lost.
        """
        if not self._streamed:
            yield
            return
        task = asyncio.create_task(self._ping(ping_s))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _ping(self, ping_s: float) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(ping_s, max(0.0, self._sent_at + ping_s - clock())) or ping_s)
            is_answered = self.started or self.headers is not None
            async with self._lock:
                if clock() >= self._sent_at + ping_s * (1 if is_answered else _UNANSWERED):
                    await self._aside(self._wire.ping(self.prompt or "ping"))

    async def _aside(self, raw: bytes) -> None:
        if not self.started:
            await self._start(200, self.headers or {"content-type": self._wire.media_type}, _OF_STREAMS)
        await self._body(raw, more=True)

    async def _start(self, status: int, headers: Mapping[str, str], own: Mapping[str, str]) -> None:
        self.started = True
        passed = {name: headers[name] for name in _PASSED_ON if name in headers}
        fields = {"cache-control": "no-store", **passed, **own}.items()
        encoded = [(name.encode("ascii"), value.encode("latin-1", "replace")) for name, value in fields]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._sent_at = asyncio.get_running_loop().time()


WHOLE: Final = "application/json"
_EVENT_STREAM: Final = "text/event-stream"
_MOVES: Final = 3  # a request that crashes its upstream must not crash all other upstreams
_PATIENCE_S: Final = 10.0  # seconds that a request waits for another upstream after losing its own
_MOST_WHOLE: Final = 64 << 20  # bytes of an answer that is not streamed
_MOST_HELD: Final = 1 << 20  # bytes of the events before the first token
_AFTER_LAST_S: Final = 0.1  # seconds to wait for the end of the body after the last event
_DENIED: Final = (401, 403)  # the upstream refuses this server's key, which is not the client's fault
_FULL: Final = 429
_UNREADY: Final = 503
_OTHERS_MAY: Final = (404, 405, 409, _FULL)  # after these statuses, or 500 and above, another upstream may answer
_NOT_BEGUN: Final = (_UNREADY, 508)  # a request that never started cannot have crashed the upstream
_RETRY: Final = {"retry-after": "5"}


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An upstream's error response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def retry_after_s(self) -> float:
        try:
            return float(self.headers.get("retry-after-ms", "")) / 1000
        except ValueError:
            text = self.headers.get("retry-after", "")
            return float(text) if text.isdecimal() else float("inf")

    @property
    def error(self) -> ApiError:
        """The error to send at the end of a stream, or in place of a body that is not JSON."""
        try:
            words = server_words(json.loads(self.body))
        except (ValueError, RecursionError):
            words = ""
        words = words or f"the upstream answered with HTTP {self.status}"
        return ApiError(self.status, words[:1000], SERVER if self.status >= 500 else INVALID)


class _Failed(Exception):
    """The upstream sent an error event."""

    def __init__(self, event: StreamEvent) -> None:
        super().__init__("the upstream reported an error")
        self.event = event


@dataclass(slots=True)
class Forwarding:
    """One request that is being forwarded.

    path      the path of the route, which is the same on this server and the upstream
    model     the name of the model
    content   the JSON body
    headers   the headers to send, and no others
    expected  the content type of the answer, without parameters
    hashes    the hashes of the request's prefixes; see `prefix_hashes`
    choices   the number of answers that the request asks for
    last_id   the ID of the last event that the client has seen; "" before the first event
    """

    pool: Pool
    reply: Reply
    exchange: Exchange
    path: str
    model: str
    content: bytes
    headers: Mapping[str, str]
    expected: str
    hashes: Sequence[bytes]
    choices: int = 1
    last_id: str = ""
    _moves: int = _MOVES
    _is_lost: bool = False  # True if the last problem may be resolved in a few seconds
    _problem: str = ""  # the reason for the failure of the last attempt
    _unready: set[int] = field(default_factory=set)  # upstreams that have answered with 503 once
    _excluded: set[int] = field(default_factory=set)
    _refusals: list[_Refusal] = field(default_factory=list)
    _told: StreamEvent | None = None  # the error event of an upstream
    _begun_by: Mapping[str, Any] | None = None  # the listed model that began the answer

    async def run(self) -> None:
        """Forward the request until it is answered. Raises Refused if all attempts fail before anything is sent."""
        previous: Upstream | None = None
        while (upstream := await self._next()) is not None:
            if previous is not None:
                previous.counts.moved += not self.reply.begun
                previous.counts.resumed += self.reply.begun
            self.exchange.upstream = ", ".join(filter(None, (self.exchange.upstream, upstream.endpoint.host)))
            previous = upstream
            if await self._try(upstream):
                return
        await self._give_up()

    async def _next(self) -> Upstream | None:
        """Return the next upstream to try, or None. After a lost attempt, wait until an upstream is up again."""
        is_full = any(refusal.status == _FULL for refusal in self._refusals)
        until = asyncio.get_running_loop().time() + (_PATIENCE_S if self._is_lost and not is_full else 0.0)
        while self._moves >= 0:
            among = [one for one in self.pool.having(self.model) if self._can_answer(one)]
            if among:
                return self.pool.choose(among, self.exchange.tenant, self.hashes)
            if not self._can_go_on() or not await self.pool.changed(until):
                break
        return None

    def _can_go_on(self) -> bool:
        """Return whether another upstream might answer. Only answers of llmrun servers can be resumed."""
        if not self.reply.begun:
            return True
        return bool(self.last_id) and self._begun_by is not None and self._begun_by.get("owned_by") == OWNER

    def _can_answer(self, upstream: Upstream) -> bool:
        """Return whether an upstream can answer the request, or resume the answer if the client has seen part of it.

        The upstream itself checks whether its model matches, and lists the model's fingerprint only after loading
        the model. The comparison of fingerprints in this function only saves a request.
        """
        listed = upstream.models[self.model]
        if upstream.number in self._excluded or not self._can_go_on():
            return False
        if not self.last_id:
            return True
        known = [one for each in (listed, self._begun_by or {}) if (one := each.get("system_fingerprint")) is not None]
        return listed.get("owned_by") == OWNER and all(one == known[0] for one in known)

    async def _try(self, upstream: Upstream) -> bool:
        """Send the request to an upstream, and return whether the response to the client is complete."""
        self._is_lost = False
        try:
            with upstream.carrying():
                return await self._send(upstream)
        except Cut as cut:
            self._is_lost = True
            self._moves -= cut.sent
            self._problem = str(cut)
            self.pool.report(upstream, str(cut))
        except Misbehaved as problem:
            self._exclude(upstream, str(problem))
            self._moves -= 1
        except _Failed as failed:
            self._told = failed.event
            self._exclude(upstream, str(failed))
            self._moves -= 1
        return False

    async def _send(self, upstream: Upstream) -> bool:
        headers = dict(self.headers)
        if self.last_id:
            headers["last-event-id"] = self.last_id
        if not self.reply.begun:
            self._begun_by = upstream.models[self.model]
        async with upstream.answering("POST", self.path, self.content, headers) as answering:
            if answering.status != 200:
                return await self._refused(upstream, answering)
            kind, expected = answering.kind, self.expected
            # By default, Ollama's API streams only the answers that models generate.
            if kind != expected and not (kind == WHOLE and expected != _EVENT_STREAM):
                raise Misbehaved(f"content type {upstream.shown(kind)[:60]}, expected {expected}")
            if kind != WHOLE:
                await self._pass_events(upstream, answering)
                return True
            body = await answering.whole(_MOST_WHOLE if answering.has_length else MOST_BYTES)
            if problem := await off_the_loop(len(body) > LARGE, partial(_problem_of, body)):
                raise Misbehaved(upstream.shown(problem))
            await self.reply.whole(200, answering.headers, body)
            return True

    async def _pass_events(self, upstream: Upstream, answering: Answering) -> None:
        """Pass on the events of a stream. Raises Cut if the stream ends before the answer is complete."""
        splitter = EventSplitter(json_lines=self.expected != _EVENT_STREAM)
        self.reply.headers = answering.headers
        held, progress, continues, finished = _Held(), Progress.EARLY, bool(self.last_id), 0
        while (piece := await self._piece(answering, progress)) is not None:
            try:
                events = splitter.feed(piece)
            except BadStream as error:
                raise Misbehaved(str(error)) from None
            self.reply.prompt = splitter.prompt
            for event in events:
                if event.progress is Progress.ASIDE:
                    await self.reply.aside(event.raw)
                    continue
                if event.progress is Progress.ERROR:
                    event = replace(event, raw=upstream.redacted(event.raw))
                if event.progress is Progress.ERROR and _another_may_do_better(event):
                    await self._pass_on(answering, held)
                    raise _Failed(event)
                if continues and (event.id or event.progress > Progress.EARLY):
                    if not (event.progress is Progress.LAST or follows(event.id, self.last_id)):
                        raise Misbehaved("the stream does not continue after the last event")
                    continues = False
                held.add(event)
                progress = max(progress, event.progress)
                finished += event.progress is Progress.FINISH
            await self._pass_on(answering, held)
        if progress < Progress.FINISH or (progress is Progress.FINISH and finished < self.choices):
            raise Cut("the answer ended early", sent=True)
        await self.reply.end()

    async def _piece(self, answering: Answering, progress: Progress) -> bytes | None:
        """Return the next part of a stream, or None at its end. After the last event, ignore lost connections."""
        if progress is not Progress.LAST:
            return await answering.piece()
        answering.expect(_AFTER_LAST_S)
        try:
            return await answering.piece()
        except Cut:
            return None

    async def _pass_on(self, answering: Answering, held: _Held) -> None:
        """Send the held-back events once the upstream has generated output, or keeps the client waiting."""
        must_go = held.progress > Progress.EARLY or held.is_waiting or len(held.raw) > _MOST_HELD
        if held.raw and (self.reply.begun or must_go):
            await self.reply.events(answering.headers, bytes(held.raw))
            self.last_id = held.last_id or self.last_id
            self._moves = _MOVES  # a request whose answer makes progress does not crash upstreams
            held.raw.clear()

    async def _refused(self, upstream: Upstream, answering: Answering) -> bool:
        """Handle an error response, and return whether the error was passed on to the client."""
        status = answering.status
        body = upstream.redacted(await answering.whole(MOST_ERROR))
        if status in _DENIED:
            raise Misbehaved(f"not authorized (HTTP {status}); see {UPSTREAM_FLAG}")
        if status < 400:
            raise Misbehaved(f"HTTP {status}")
        refusal = _Refusal(status, answering.headers, body if answering.kind == WHOLE else b"")
        final = answering.headers.get("x-should-retry") == "false"
        if not self.reply.begun and (final or (status < 500 and status not in _OTHERS_MAY)):
            await self._refuse(refusal)
            return True
        if not self.reply.begun:
            self._refusals.append(refusal)
        self._moves -= status >= 500 and status not in _NOT_BEGUN
        self._problem = f"HTTP {status}"
        if status == _UNREADY and upstream.number not in self._unready:
            self._unready.add(upstream.number)
            self._is_lost = True
            self.pool.report(upstream, self._problem)
        else:
            self._excluded.add(upstream.number)
        return False

    async def _refuse(self, refusal: _Refusal) -> None:
        """Pass on an upstream's error response."""
        self.exchange.outcome = "failed"
        if self.reply.started:
            await self.reply.end(refusal.error)
        elif not refusal.body:
            headers = {name: refusal.headers[name] for name in ("retry-after",) if name in refusal.headers}
            raise Refused(refusal.status, refusal.error.message, kind=refusal.error.type, headers=headers)
        else:
            await self.reply.whole(refusal.status, refusal.headers, refusal.body)

    def _exclude(self, upstream: Upstream, problem: str) -> None:
        self._excluded.add(upstream.number)
        self._problem = problem

    async def _give_up(self) -> None:
        """Report to the client that no upstream can answer. Raises Refused if the client has received nothing yet."""
        self.exchange.outcome = "failed"
        if self._told is not None and not self.pool.is_stopped:
            await self.reply.events({"content-type": self.expected}, self._told.raw)
            await self.reply.end()
        elif self._refusals and not self.reply.begun:
            await self._refuse(min(self._refusals, key=lambda one: (one.status != _FULL, one.retry_after_s)))
        else:
            error = self._last_error()
            if not self.reply.started:
                raise error
            await self.reply.end(error.error)

    def _last_error(self) -> Refused:
        if self.pool.is_stopped:
            return Refused(503, "the server is shutting down", kind=SERVER, code="draining", headers=_RETRY)
        if not self._problem:
            return no_upstream(self.model)
        if self.reply.begun:
            words = f"the upstream failed in the middle of the answer: {self._problem}"
            return Refused(502, words, kind=SERVER, code="upstream_lost")
        words = f"no upstream could answer; the last problem: {self._problem}"
        status, headers = (503, _RETRY) if self._is_lost else (502, {})
        return Refused(status, words, kind=SERVER, code="upstream_failed", headers=headers)


def no_upstream(model: str) -> Refused:
    """Return the error for a model that no running upstream has. An upstream that is down may have the model."""
    words = f"no upstream with the model {model[:100]!r} is up; try again in a few seconds"
    return Refused(503, words, kind=SERVER, code="no_upstream", headers=_RETRY)


@dataclass(slots=True)
class _Held:
    """Events that have arrived but have not yet been sent to the client.

    is_waiting  True if events with IDs are followed by events that only keep the client waiting
    """

    raw: bytearray = field(default_factory=bytearray)
    last_id: str = ""
    progress: Progress = Progress.EARLY
    is_waiting: bool = False

    def add(self, event: StreamEvent) -> None:
        self.raw += event.raw
        self.is_waiting |= bool(self.last_id) and not event.id and event.progress is Progress.EARLY
        self.last_id = event.id or self.last_id
        self.progress = max(self.progress, event.progress)


def _problem_of(body: bytes) -> str:
    """Return the problem with a whole answer, or "" if the answer is valid. Very long answers are not parsed."""
    if len(body) > MOST_BYTES:
        return "" if body.rstrip().endswith((b"}", b"]")) else "the answer is not valid JSON"
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return "the answer is not valid JSON"
    answers = value if isinstance(value, list) else [value]  # /infill can return a list of several answers
    if not all(isinstance(each, dict) for each in answers):
        return "the answer is not a JSON object"
    # Failed responses of the Responses API are answers, too.
    words = "".join(server_words(each) for each in answers if each.get("object") != "response")
    return f"an error with HTTP 200: {words}" if words else ""


def _another_may_do_better(event: StreamEvent) -> bool:
    """Return whether an error concerns the upstream and not the request."""
    response = event.data.get("response")
    error = event.data.get("error") or (response.get("error") if isinstance(response, dict) else None)
    if not isinstance(error, dict):
        return True
    return error.get("type") != INVALID and error.get("code") != "backend_crashed"
