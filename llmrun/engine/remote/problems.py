"""Turns the errors of httpx2 and of the network into llmrun's own."""

from __future__ import annotations

import re

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.engine.remote.connection import CONNECT_S
from llmrun.engine.remote.stream import Teller

TO_TRY = "check the address and that the server is running"


def in_our_words(error: Exception, teller: Teller) -> LlmrunError:
    """Return the error to raise in place of one of httpx2's or the operating system's. It never contains the key."""
    import httpx2

    said = re.sub(r"^\[Errno -?\d+\] ", "", str(error).strip()).partition("\n")[0]
    words = teller.shown(said, 160) or type(error).__name__
    if isinstance(error, httpx2.ConnectTimeout):
        return teller.lost("unreachable", f"no connection within {CONNECT_S:g} s", TO_TRY)
    if isinstance(error, httpx2.ProxyError):
        return teller.lost("unreachable", f"proxy: {words}", "check the proxy variables")
    if isinstance(error, httpx2.ConnectError):
        return teller.lost("unreachable", words, TO_TRY)
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return UsageError(f"endpoint: {teller.host}: {words}")
    if isinstance(error, httpx2.HTTPError | httpx2.StreamError):
        return teller.lost("connection lost", words)
    return teller.fault("invalid network settings", words, "check SSL_CERT_FILE and the proxy variables")
