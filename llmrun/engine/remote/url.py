"""Parses the address of a model on a server, such as `http://127.0.0.1:8080/v1#MODEL`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmrun.base.errors import UsageError
from llmrun.formats.gguf.problems import shown

_EXAMPLE = "example: http://127.0.0.1:8080/v1#MODEL"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server and a model on it.

    base   the prefix of all URLs of the server, such as "http://127.0.0.1:8080/v1"
    model  the name of the model; empty for the server's only one
    host   the host, and the port if one was given, such as "127.0.0.1:8080"
    """

    base: str
    model: str
    host: str
    is_loopback: bool

    @property
    def address(self) -> str:
        """The endpoint in the form `URL#MODEL`, which `parse_endpoint` accepts."""
        return f"{self.base}#{self.model}" if self.model else self.base


def is_endpoint(name: str) -> bool:
    """Return whether a name is a URL rather than a file or a name from the catalogue."""
    return name.lower().startswith(("http://", "https://"))


def parse_endpoint(name: str) -> Endpoint:
    """Parse `URL#MODEL`. Raises UsageError, whose message never contains the URL's password, if it has one."""
    from urllib.parse import urlsplit

    url, _, model = name.partition("#")
    if "@" in url:
        raise UsageError(
            "endpoint: the URL must not contain a user name or password",
            hint="set LLMRUN_API_KEY instead, which is sent as a Bearer token and never shown",
        )
    if not url.isprintable() or " " in url or not model.isprintable():
        raise UsageError(f"endpoint: {shown(name)}: contains a character that is not allowed in a URL", hint=_EXAMPLE)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"endpoint: {shown(url)}: {error}", hint=_EXAMPLE) from None
    if not is_endpoint(url) or not host:
        raise UsageError(f"endpoint: {shown(url)}: not an http or https URL with a host", hint=_EXAMPLE)
    if "?" in url:
        raise UsageError(
            f"endpoint: {shown(parts.hostname or '')}: the URL must not contain a query (?...)", hint=_EXAMPLE
        )
    path = parts.path.rstrip("/")
    # OpenAI's API is at /v1. A path that already contains a version (/api/paas/v4, /v1beta/openai) is complete.
    versioned = any(re.fullmatch(r"v\d\w*", part) for part in path.split("/"))
    named = f"[{host}]" if ":" in host else host
    where = named if port is None else f"{named}:{port}"
    return Endpoint(
        base=f"{parts.scheme}://{where}{path if versioned else path + '/v1'}",
        model=model.strip(),
        host=where,
        is_loopback=_is_loopback(host),
    )


def _is_loopback(host: str) -> bool:
    import ipaddress  # This import takes 2 ms, and most commands do not need it.

    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
