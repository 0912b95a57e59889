"""The routes about the server itself: /health, /metrics, /openapi.json and the chat page.

The chat page is one file without secrets. Models' answers are untrusted, and the page may store an API key. So the
page's policy lets the browser run only the page's own scripts, send requests only to this server, and load no files.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from dataclasses import asdict
from importlib.resources import files
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from llmrun import __version__
from llmrun.serving import metrics
from llmrun.serving.processes.served_model import ServedModel, State
from llmrun.serving.protocol.llama_server import Problem
from llmrun.serving.protocol.openapi import Health, document
from llmrun.serving.refusals import json_response
from llmrun.serving.service import Service

_NO_UPSTREAM = "no_upstream"


class StatusRoutes:
    """The routes GET /health, /metrics, /openapi.json and /."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._html = files("llmrun.serving").joinpath("page/chat.html").read_text(encoding="utf-8")
        self._page_headers = {**_HEADERS, "content-security-policy": policy_of(self._html)}

    async def health(self, request: HttpRequest) -> Response:
        """Return status 200 only if the server accepts requests and the engine's heartbeat is recent.

        The request requires no key, so the response contains only the state.
        """
        state = self._state()
        if state == State.READY:
            return json_response(Health(status="ok"))
        problem = Problem(code=503, message=f"the server is not ready: {state}", type="unavailable_error")
        return json_response(Health(status=state, error=problem), status=503, headers={"retry-after": "5"})

    def _state(self) -> str:
        service = self._service
        state = service.models.state(service.options.limits.stale_s)
        if service.upstreams is None or state == State.DRAINING:
            return state
        if service.upstreams.is_up:
            return State.READY
        return state if service.models.known.given else _NO_UPSTREAM

    async def metrics(self, request: HttpRequest) -> Response:
        loaded = [(managed.known.name, managed.process) for managed in self._service.models.loaded()]
        models = {name: _figures(process) for name, process in loaded if process is not None}
        upstreams = (
            None
            if self._service.upstreams is None
            else {
                each.endpoint.base: {"up": each.is_up, "in_flight": each.in_flight, **asdict(each.counts)}
                for each in self._service.upstreams.all
            }
        )  # URLs of upstreams never contain keys
        text = self._service.metrics.text(__version__, models, upstreams)
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE, "cache-control": "no-store"})

    async def openapi(self, request: HttpRequest) -> Response:
        return json_response(document(__version__))

    async def page(self, request: HttpRequest) -> Response:
        return HTMLResponse(self._html, headers=self._page_headers)


def _figures(process: ServedModel) -> dict[str, float]:
    kv_tokens = process.facts.kv_tokens if process.facts else 0
    return {"up": process.state is State.READY, "kv_tokens": kv_tokens, **asdict(process.load)}


_HEADERS: Final = {
    "cache-control": "no-cache",  # browsers must not show an outdated page
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
    "referrer-policy": "no-referrer",
}


def policy_of(html: str) -> str:
    """Return a Content-Security-Policy that allows only the inline scripts and styles of a page.

    `trusted-types 'none'` disables innerHTML and similar functions.
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
    """Return the hash sources that allow the contents of all elements with this tag."""
    contents = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{b64encode(digest).decode('ascii')}'" for digest in digests)
