"""The answers to calls that want embeddings or scores."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable
from typing import Any

from llmrun.engine.child.messages import Embedded
from llmrun.engine.requests import TextPrompt
from llmrun.serving.protocol.embeddings.calls import BASE64, EmbeddingCall

_NANOSECONDS = 1e9

Write = Callable[[EmbeddingCall, Embedded, str, float], dict[str, Any]]


def embeddings_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> dict[str, Any]:
    """Return the answer of /v1/embeddings. `model` is the name that the client used. `seconds` is not needed."""
    vectors: list[Any] = [_encoded(vector) if call.encoding == BASE64 else [*vector] for vector in _rows(found)]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "model": model, "data": data, "usage": _usage(found)}


def rerank_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> dict[str, Any]:
    """Return the answer of /v1/rerank: the best documents first. Documents with equal scores keep their order."""
    scores = [score for [score] in _rows(found)]
    results: list[dict[str, Any]] = []
    for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n]:
        results.append({"index": index, "relevance_score": scores[index]})
        document = call.wanted.inputs[index]
        if call.return_documents and isinstance(document, TextPrompt):
            results[-1]["document"] = {"text": document.text}
    return {"object": "list", "model": model, "results": results, "usage": _usage(found)}


def ollama_embed_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> dict[str, Any]:
    """Return the answer of Ollama's /api/embed. `seconds` is how long the call took."""
    return {
        "model": model,
        "embeddings": [[*vector] for vector in _rows(found)],
        "total_duration": round(seconds * _NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": sum(found.tokens),
    }


def ollama_embeddings_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> dict[str, Any]:
    """Return the answer of Ollama's older /api/embeddings."""
    [vector] = _rows(found)
    return {"embedding": [*vector]}


def _rows(found: Embedded) -> list[array[float]]:
    """Return the vector of each input."""
    values = array("f", found.data)
    width = len(values) // len(found.tokens)
    return [values[start : start + width] for start in range(0, len(values), width)]


def _encoded(vector: array[float]) -> str:
    """Return the Base64 of little-endian float32 values."""
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def _usage(found: Embedded) -> dict[str, int]:
    return {"prompt_tokens": sum(found.tokens), "total_tokens": sum(found.tokens)}
