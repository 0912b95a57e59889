"""The routes about the server itself: /health, /metrics, /openapi.json and the chat page.

The chat page is one file without secrets. Answers of models are untrusted, and the page may hold an API key. So its
policy lets the browser run only the page's own scripts, send requests only to this server, and load nothing.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from llmrun import __version__
from llmrun.serving import metrics
from llmrun.serving.processes.served_model import State
from llmrun.serving.protocol.openapi import document
from llmrun.serving.refusals import json_response
from llmrun.serving.service import Service

if TYPE_CHECKING:
    from llmrun.serving.upstreams.upstream import Upstream

_NO_UPSTREAM = "no_upstream"
_UPSTREAM_METRICS: Final[Sequence[tuple[str, str, str, Callable[[Upstream], int]]]] = (
    ("up", "gauge", "Whether the upstream is up.", lambda one: int(one.is_up)),
    ("requests_in_flight", "gauge", "Requests that the upstream is working on.", lambda one: one.in_flight),
    ("requests_total", "counter", "Requests that were sent to the upstream.", lambda one: one.counts.requests),
    (
        "moved_total",
        "counter",
        "Requests that moved from this upstream to another one.",
        lambda one: one.counts.moved,
    ),
    (
        "resumed_total",
        "counter",
        "Streams of this upstream that another one continued.",
        lambda one: one.counts.resumed,
    ),
)


class StatusRoutes:
    """GET /health, /metrics and /openapi.json."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: HttpRequest) -> Response:
        """Return 200 only if the server takes requests and the engine's heartbeat is recent.

        The response needs no key, so it says nothing but the state.
        """
        state = self._state()
        if state == State.READY:
            return json_response({"status": "ok"})
        return json_response({"status": state}, status=503, headers={"retry-after": "5"})

    def _state(self) -> str:
        service = self._service
        state = service.models.state(service.options.limits.stale_s)
        if service.upstreams is None or state == State.DRAINING:
            return state
        if service.upstreams.is_up:
            return State.READY
        return state if service.models.known.given else _NO_UPSTREAM

    async def metrics(self, request: HttpRequest) -> Response:
        processes = [(managed.known.name, managed.process) for managed in self._service.models.loaded()]
        loaded = [
            metrics.LoadedModel(name, process.facts.kv_tokens if process.facts else 0, process.state, process.load)
            for name, process in processes
            if process is not None
        ]
        text = self._service.metrics.text(__version__, loaded)
        if self._service.upstreams is not None:
            text += "\n".join(_upstream_lines(self._service.upstreams.all)) + "\n"
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE, "cache-control": "no-store"})

    async def openapi(self, request: HttpRequest) -> Response:
        return json_response(document(__version__))


_HEADERS: Final = {
    "cache-control": "no-cache",  # otherwise, browsers may show the page of an older version
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
    "referrer-policy": "no-referrer",
}


class PageRoute:
    """GET /."""

    def __init__(self) -> None:
        self._html = files("llmrun.serving").joinpath("page/chat.html").read_text(encoding="utf-8")
        self._headers = {**_HEADERS, "content-security-policy": policy_of(self._html)}

    async def page(self, request: HttpRequest) -> Response:
        return HTMLResponse(self._html, headers=self._headers)


def policy_of(html: str) -> str:
    """Return the Content-Security-Policy of a page, which allows its inline scripts and styles and nothing else.

    `trusted-types 'none'` turns innerHTML and similar functions off.
    """
    directives = {
        "default-src": "'none'",
        "script-src": _hashes(html, "script"),
        "style-src": _hashes(html, "style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon of the tab
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in directives.items())


def _hashes(html: str, tag: str) -> str:
    """Return the sources that allow the contents of all elements with this tag."""
    contents = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{b64encode(digest).decode('ascii')}'" for digest in digests)


def _upstream_lines(upstreams: Sequence[Upstream]) -> Iterator[str]:
    """Yield the metrics of upstreams in the format of Prometheus. URLs of upstreams never contain keys."""
    for name, kind, help_text, value in _UPSTREAM_METRICS:
        full = f"llmrun_upstream_{name}"
        yield from metrics.heading(full, kind, help_text)
        for upstream in upstreams:
            yield f"{full}{metrics.labels({'upstream': upstream.endpoint.base})} {value(upstream)}"
