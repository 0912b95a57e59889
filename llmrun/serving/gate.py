"""The gate in front of all routes: host names, web pages of other origins, and API keys.

A server on this machine is reachable from every web page in the user's browser. CORS alone does not protect it, because
it only keeps a page from reading the response: the request has run by then. So the gate refuses requests that a
browser sends for another site's page, which it can tell by `Origin` and `Sec-Fetch-Site`; pages cannot set these
headers. A page whose own domain name resolves to this machine (DNS rebinding) has the same origin as the server, and is
recognized by the domain name in `Host`.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmrun.serving.exchanges import exchange_of
from llmrun.serving.keys import ApiKeys
from llmrun.serving.options import ServingOptions
from llmrun.serving.refusals import Refused, error_response

_PAGE = "/"
_PUBLIC = (_PAGE, "/health")
_EXPOSED = b"x-request-id, request-id, x-llmrun-ignored, x-llmrun-wait, retry-after"
_PREFLIGHT_S = b"600"  # how long a browser may remember that it may send requests
_HOST = re.compile(r"(?:\[(?P<address>[^\]]+)\]|(?P<name>[^:\[\]]*))(?::\d*)?", re.ASCII)
_HEADER_NAMES = re.compile(r"[\w-]+(?: *, *[\w-]+)*", re.ASCII)


class Gate:
    """ASGI middleware that lets only those requests pass that the options allow.

    host_names  the names under which this machine is known, in addition to its IP addresses and `localhost`
    """

    def __init__(self, app: ASGIApp, options: ServingOptions, host_names: frozenset[str]) -> None:
        self._app = app
        self._options = options
        self._keys = ApiKeys(options.keys, options.secret)
        self._hosts = frozenset(name.lower() for name in host_names | options.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and self._is_allowed(origin):
            send = _with_cors(send, origin)
        try:
            self._check_host(headers)
            self._check_site(scope, headers, origin)
            if origin is not None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _answer_preflight(headers, send)
                return
            self._check_key(scope, headers)
        except Refused as error:
            await error_response(error, exchange_of(scope).wire)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, origin: str) -> bool:
        return "*" in self._options.origins or origin.lower() in self._options.origins

    def _check_host(self, headers: Headers) -> None:
        """Refuse unknown host names. IP addresses pass, because DNS rebinding needs a name, and so do requests
        without the header, which browsers always send."""
        host = headers.get("host")
        if host is None or "*" in self._hosts:
            return
        name = _host_name(host)
        if not (name == "localhost" or name.endswith(".localhost") or name in self._hosts or _is_address(name)):
            raise Refused(
                403,
                f"the host name {name[:100]!r} is not allowed; start the server with --allowed-host NAME",
                code="host_not_allowed",
            )

    def _check_site(self, scope: Scope, headers: Headers, origin: str | None) -> None:
        """Refuse requests for pages of other sites, including simple ones that browsers send without asking."""
        if origin is not None:
            own = headers.get("host", "").lower()
            if self._is_allowed(origin) or (own and origin.lower().partition("://")[2] == own):
                return
            raise Refused(
                403,
                f"pages of {origin[:100]!r} may not use this server; start it with --cors ORIGIN to allow them",
                code="origin_not_allowed",
            )
        site = headers.get("sec-fetch-site", "none").strip().lower()
        if site not in ("none", "same-origin") and not _follows_link(scope, headers):
            raise Refused(403, "pages of other sites may not use this server", code="origin_not_allowed")

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        """Check the API key, and remember whose request it is."""
        if not self._keys or scope["path"] in _PUBLIC:
            return
        if scope["path"] == "/metrics" and self._options.open_metrics:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not self._keys.accept(key):
            what = "the API key is not valid" if key else "an API key is required: send Authorization: Bearer KEY"
            raise Refused(401, what, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        exchange_of(scope).tenant = self._keys.tenant(key)


def _follows_link(scope: Scope, headers: Headers) -> bool:
    """Return whether a user follows a link to the chat page.

    This is harmless: the page is the same for everyone, does nothing by itself, and may not be shown in a frame.
    """
    opens = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return opens and scope["method"] == "GET" and scope["path"] == _PAGE


def _host_name(host: str) -> str:
    """Return the name in a Host header, without port, brackets and the root's dot, or "" if it is not valid."""
    found = _HOST.fullmatch(host.strip().lower())
    return (found["address"] or found["name"]).removesuffix(".") if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _with_cors(send: Send, origin: str) -> Send:
    """Let pages of this origin read the response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message.get("headers", ()),
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"Origin"),
            ]
        await send(message)

    return sending


async def _answer_preflight(headers: Headers, send: Send) -> None:
    """Answer a browser's question whether a page of an allowed origin may send a request."""
    wanted = headers.get("access-control-request-headers", "")
    fields = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-max-age", _PREFLIGHT_S),
    ]
    if _HEADER_NAMES.fullmatch(wanted):
        fields.append((b"access-control-allow-headers", wanted.encode("ascii")))
    await send({"type": "http.response.start", "status": 204, "headers": fields})
    await send({"type": "http.response.body", "body": b""})
