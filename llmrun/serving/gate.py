"""The gate in front of all routes checks host names, the origins of web pages, and API keys.

A server on this machine is reachable from every web page in the user's browser. CORS alone does not protect the server,
because CORS only keeps a page from reading the response, after the request has run. So the gate refuses requests that
a browser sends for another site's page. The gate recognizes such requests by `Origin` and `Sec-Fetch-Site`, because
pages cannot set these headers. A page whose own domain name resolves to this machine (DNS rebinding) has the same
origin as the server, but is recognized by the domain name in `Host`.

API keys are read from files and compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmrun.base.errors import UsageError
from llmrun.base.folders import decoded_text, write_private
from llmrun.engine.remote.request import is_endpoint, parse_endpoint
from llmrun.serving.exchanges import exchange_of
from llmrun.serving.options import ServingOptions
from llmrun.serving.refusals import Refused, error_response

_SECRET_BYTES = 32
_SHORTEST = 16  # characters; shorter keys can be guessed
_FLAG = "--api-key-file"
UPSTREAM_FLAG = "--upstream-key-file"
_MAKE_ONE = "make a key: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"


class ApiKeys:
    """The API keys of a server. Clients must send one of these keys, unless the list is empty."""

    def __init__(self, keys: Sequence[str], secret: bytes = b"") -> None:
        """Store keys. Processes with the same secret map a key to the same tenant. The default secret is random."""
        self._digests = [_digest(key) for key in keys]
        self._secret = secret or secrets.token_bytes(32)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, key: str) -> bool:
        """Return whether a key is valid, in constant time."""
        digest, found = _digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def tenant(self, key: str) -> str:
        """Return a name for a key's owner, without revealing the key."""
        return hmac.new(self._secret, key.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:16]


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys in a file, one per line, ignoring empty lines and lines that begin with `#`.

    Raises UsageError with a message that never contains a key.
    """
    keys = []
    for number, key in _lines(path, _FLAG):
        if len(key) < _SHORTEST:
            raise UsageError(f"{_FLAG}: {path}: line {number}: shorter than {_SHORTEST} characters", hint=_MAKE_ONE)
        _check_letters(key, f"{_FLAG}: {path}: line {number}", _MAKE_ONE)
        keys.append(key)
    if not keys:
        raise UsageError(f"{_FLAG}: {path}: contains no keys", hint=_MAKE_ONE)
    return tuple(keys)


def read_upstream_keys(path: Path, bases: Sequence[str]) -> dict[str, str]:
    """Return a mapping from the upstreams' URLs to their keys. Upstreams without a key are omitted.

    Each line is `URL KEY`, or `KEY` for all upstreams without their own line.

    bases  the URLs of the upstreams, as in Endpoint.base

    Raises UsageError with a message that never contains a key.
    """
    common: str | None = None
    own: dict[str, str] = {}
    for number, line in _lines(path, UPSTREAM_FLAG):
        where = f"{UPSTREAM_FLAG}: {path}: line {number}"
        url, space, key = line.rpartition(" ")
        _check_letters(key, where, "each line is URL KEY, or a KEY for all upstreams")
        if not space and is_endpoint(key):
            raise UsageError(f"{where}: a URL without a key", hint="write URL KEY")
        if not space:
            common = key
        elif (base := parse_endpoint(url.strip()).base) in bases:
            own[base] = key
        else:
            raise UsageError(f"{where}: {base} is not an upstream", hint=f"add --upstream {base}, or remove the line")
    return {base: found for base in bases if (found := own.get(base, common)) is not None}


def _lines(path: Path, flag: str) -> Iterator[tuple[int, str]]:
    """Yield the numbers and contents of the lines of a file that are neither empty nor comments. Raises UsageError."""
    try:
        lines = decoded_text(path.read_bytes(), f"{flag}: {path}").splitlines()
    except OSError as error:
        raise UsageError(f"{flag}: {path}: {error.strerror}") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            yield number, line


def _check_letters(key: str, where: str, hint: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"{where}: a key must be printable ASCII without spaces", hint=hint)


def kept_secret(folder: Path) -> bytes:
    """Return the random secret stored in a file in the folder, creating the file if necessary. Raises UsageError."""
    path = folder / "secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            write_private(path, secrets.token_bytes(_SECRET_BYTES))
        secret = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--save-prefixes: {error.filename or path}: {error.strerror}") from None
    if len(secret) != _SECRET_BYTES:
        raise UsageError(f"--save-prefixes: {path}: {len(secret)} bytes, expected {_SECRET_BYTES}", hint="remove it")
    return secret


def others_can_read(path: Path) -> bool:
    """Return whether other users of this machine can read a file (always False on Windows, which lacks mode bits)."""
    return sys.platform != "win32" and bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


_PAGE = "/"
_PUBLIC = (_PAGE, "/health", "/v1/health")
_EXPOSED = (
    b"x-request-id, request-id, x-llmrun-context, x-llmrun-ignored, x-llmrun-wait, x-llmrun-first-token, "
    b"x-llmrun-prefix, x-llmrun-images, retry-after"
)
_PREFLIGHT_S = b"600"  # seconds that a browser may cache the answer to a preflight request
_HOST = re.compile(r"(?:\[(?P<address>[^\]]+)\]|(?P<name>[^:\[\]]*))(?::\d*)?", re.ASCII)
_HEADER_NAMES = re.compile(r"[\w-]+(?: *, *[\w-]+)*", re.ASCII)


class Gate:
    """ASGI middleware that refuses all requests that the options do not allow.

    host_names  the host names of this machine, besides its IP addresses and `localhost`
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
        """Refuse unknown host names. IP addresses are allowed, because DNS rebinding requires a host name. Requests
        without a Host header are also allowed, because browsers always send this header."""
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
        """Refuse requests from pages of other sites, including simple requests, which browsers do not preflight."""
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
        """Check the API key, and set the tenant of the exchange."""
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
    """Return whether the request is a browser's navigation to the chat page, such as through a link.

    Navigating to the page is harmless: it is the same for all users, does nothing by itself, and cannot be framed.
    """
    opens = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return opens and scope["method"] == "GET" and scope["path"] == _PAGE


def _host_name(host: str) -> str:
    """Return the host name in a Host header, without port, brackets or trailing dot, or "" if the header is invalid."""
    found = _HOST.fullmatch(host.strip().lower())
    return (found["address"] or found["name"]).removesuffix(".") if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _with_cors(send: Send, origin: str) -> Send:
    """Return a `send` that adds CORS headers, which let pages of the given origin read the response."""

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
    """Answer a browser's CORS preflight request for a page of an allowed origin."""
    wanted = headers.get("access-control-request-headers", "")
    fields = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-max-age", _PREFLIGHT_S),
    ]
    if _HEADER_NAMES.fullmatch(wanted):
        fields.append((b"access-control-allow-headers", wanted.encode("ascii")))
    await send({"type": "http.response.start", "status": 204, "headers": fields})
    await send({"type": "http.response.body", "body": b""})
