"""Compares complete answers, except for what may differ between two runs of a request."""

from __future__ import annotations

import json
from typing import Any

from llmrun.bench.serving.exchange import Exchange

_VARYING = ("id", "created", "timings")
_DONE = "[DONE]"


class Incomplete(Exception):
    """A response that cannot be compared, because it is an error or was cut off."""


def comparable(exchange: Exchange) -> str:
    """Return everything in an answer that must not depend on the load, as text.

    The chunks of a stream are in the order of their choices. Raises Incomplete.
    """
    if exchange.problem or exchange.status != 200:
        raise Incomplete(f"status {exchange.status} {exchange.problem} {exchange.body[:300].decode(errors='replace')}")
    return comparable_text(exchange.body, exchange.headers.get("content-type", ""))


def comparable_text(body: bytes, content_type: str) -> str:
    """Return the same for the body of a response with status 200. Raises Incomplete."""
    if content_type.startswith("text/event-stream"):
        return _of_stream(body.decode())
    return json.dumps(_without_varying(json.loads(body)))


def _of_stream(text: str) -> str:
    bodies = _bodies(text)
    if not bodies or bodies[-1] != _DONE:
        raise Incomplete(f"a stream without its end: {text[-300:]}")
    chunks = [json.loads(body) for body in bodies[:-1]]
    if len({chunk["id"] for chunk in chunks}) != 1:
        raise Incomplete("the chunks of a stream have several ids")
    chunks.sort(key=_choice)
    return "\n".join(json.dumps(_without_varying(chunk)) for chunk in chunks)


def _bodies(text: str) -> list[str]:
    if not text.startswith(("data: ", "id: ", ": ")):
        return [text]
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def _choice(chunk: dict[str, Any]) -> int:
    """Return the number of a chunk's choice, or a large one for the chunk with the usage."""
    return int(chunk["choices"][0]["index"]) if chunk["choices"] else 1 << 30


def _without_varying(body: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in body.items() if name not in _VARYING}
    if kept.get("usage"):
        kept["usage"] = {name: value for name, value in kept["usage"].items() if name != "prompt_tokens_details"}
    return kept
