"""Creates asyncio clients for servers, which follow the same rules as the blocking ones in connection.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmrun.engine.remote.client import tls_settings
from llmrun.engine.remote.connection import CONNECT_S, KEPT_S, WRITE_S
from llmrun.engine.remote.url import Endpoint

if TYPE_CHECKING:
    import httpx2


def async_client(
    endpoint: Endpoint, headers: Mapping[str, str], *, most_open: int | None = None, most_idle: int | None = None
) -> httpx2.AsyncClient:
    """Return a client for one server. Callers limit the time for reading.

    headers    of all requests, from `request_headers`
    most_open  the maximum number of connections
    most_idle  how many of them stay open between requests

    Raises the errors of httpx2 if the proxy or the certificates cannot be used.
    """
    import httpx2

    return httpx2.AsyncClient(
        headers=headers,
        verify=tls_settings(endpoint),
        trust_env=not endpoint.is_loopback,
        follow_redirects=False,  # the key must not be sent to other hosts
        timeout=httpx2.Timeout(None, connect=CONNECT_S, write=WRITE_S, pool=None),
        limits=httpx2.Limits(max_connections=most_open, max_keepalive_connections=most_idle, keepalive_expiry=KEPT_S),
    )
