"""The options of the HTTP server. The command line creates them, and tests make the limits small."""

from __future__ import annotations

from dataclasses import dataclass, field

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits against clients that are broken, slow or hostile. Sizes are in bytes, times in seconds.

    connections   open connections; further ones get an error and are closed
    header_bytes  request line and headers
    header_s      time for a client to send them
    body_bytes    the body of one request
    bodies_bytes  the bodies of all requests that are being received, parsed or forwarded; small ones always may
    body_s        time for a client to send the body
    keep_alive_s  how long an idle connection stays open
    unread_s      how long a client may leave data unread before its connection is aborted
    linger_s      how long the rest of a body is discarded after an early response. Closing the connection at once would
                  reset it, and the client might never read the response
    ping_s        the longest silence of a stream, because proxies close silent connections, often after 60 s
    stale_s       seconds without progress after which a model counts as stuck
    """

    connections: int = 1024
    header_bytes: int = 32 << 10
    header_s: float = 10.0
    body_bytes: int = 16 * _MIB
    bodies_bytes: int = 128 * _MIB
    body_s: float = 60.0
    keep_alive_s: int = 75
    unread_s: float = 60.0
    linger_s: float = 5.0
    ping_s: float = 10.0
    stale_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The settings for access to the server, and its limits.

    keys           the API keys; empty if clients need none
    allowed_hosts  more host names that a Host header may contain; "*" allows all
    origins        the origins of web pages that may use the server; "*" allows all
    open_metrics   whether /metrics needs no key
    secret         the names of tenants are derived from it; random by default
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    open_metrics: bool = False
    secret: bytes = field(default=b"", repr=False)
    limits: Limits = Limits()
