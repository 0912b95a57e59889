"""The route of the chat page, which is one file without secrets.

Answers of models are untrusted, and the page may hold an API key. So its policy lets the browser run only the page's
own scripts, send requests only to this server, and load nothing.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib.resources import files
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

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
