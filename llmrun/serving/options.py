"""The options of the HTTP server. The command line creates the options, and tests set small limits."""

from __future__ import annotations

from dataclasses import dataclass, field

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits against clients that are broken, slow or hostile. Sizes are in bytes, and times are in seconds.

    connections   the number of open connections; further connections receive an error and are closed
    header_bytes  the size of the request line and headers
    header_s      the time for a client to send the request line and headers
    body_bytes    the size of one request's body
    bodies_bytes  the total size of bodies being received, parsed or forwarded; small bodies are always accepted
    body_s        the time for a client to send the body
    keep_alive_s  the time after which an idle connection is closed
    unread_s      the time that a client may leave data unread before its connection is aborted
    linger_s      the time for discarding the rest of a body after an early response; closing the connection at once
                  would reset the connection, and the client might never read the response
    ping_s        the longest silence of a stream, because proxies and clients give up silent connections
    stale_s       the time without progress after which a model counts as stuck
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
    ping_s: float = 1.0
    stale_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The access settings and the limits of a server.

    keys           the API keys; empty if clients need none
    allowed_hosts  additional host names that a Host header may contain; "*" allows all host names
    origins        the origins of web pages that may use the server; "*" allows all origins
    open_metrics   True if /metrics requires no key
    secret         the secret that the names of tenants are derived from; random by default
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    open_metrics: bool = False
    secret: bytes = field(default=b"", repr=False)
    limits: Limits = Limits()
