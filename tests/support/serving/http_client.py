"""An asynchronous HTTP client for the soaks of the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import h11

from llmrun.jobs.bench.serving.driving import Exchange, ExchangeProtocol

_MOST_BYTES = 64 << 20
_PATIENCE_S = 600.0
_TRY_AGAIN = (429, 503)
_TRIES = 400


async def post(port: int, path: str, body: Mapping[str, Any], key: str = "") -> Exchange:
    """Send a JSON body over a connection of its own, and return the exchange when it has ended."""
    content = json.dumps(body).encode()
    headers = [("Host", "localhost"), ("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
    if key:
        headers.append(("Authorization", f"Bearer {key}"))
    request = h11.Request(method="POST", target=path, headers=headers)
    now = time.perf_counter()
    exchange = Exchange(now, now)
    protocol = ExchangeProtocol(exchange, request, content, _MOST_BYTES)
    await asyncio.get_running_loop().create_connection(lambda: protocol, "127.0.0.1", port)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await protocol.done
    except TimeoutError:
        protocol.end("no answer")
    finally:
        protocol.end("cancelled")
    return exchange


async def post_patiently(port: int, path: str, body: Mapping[str, Any], key: str = "") -> Exchange:
    """Send a JSON body, again and again while the server asks for it with 429 or 503, as clients do."""
    for _ in range(_TRIES):
        exchange = await post(port, path, body, key)
        if exchange.status not in _TRY_AGAIN:
            break
        await asyncio.sleep(min(1.0, float(exchange.headers.get("retry-after", "1"))))
    return exchange
