"""The schemas of calls for embeddings and scores, for the OpenAPI document."""

from __future__ import annotations

from typing import Final

from llmrun.serving.protocol.embeddings.calls import BASE64, FLOAT, MOST_INPUTS
from llmrun.serving.protocol.schemas import COUNT, NUMBER, TEXT, Schema, boolean, fixed_object

_DURATION: Final[Schema] = {**COUNT, "description": "In nanoseconds."}
_TEXT_OR_TEXTS: Final[Schema] = {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": MOST_INPUTS}]}
_DIMENSIONS: Final[Schema] = {
    "type": "integer",
    "minimum": 1,
    "description": "Keep only the first dimensions, for models trained for this.",
}
_MODEL: Final[Schema] = {**TEXT, "description": "A model's name. If it is missing, the server's first model answers."}
_VECTOR: Final[Schema] = {"type": "array", "items": NUMBER}


def embedding_schemas() -> dict[str, Schema]:
    """Return the schemas of requests and answers by name."""
    usage = fixed_object(prompt_tokens=COUNT, total_tokens=COUNT)
    listed = {"object": {"const": "list"}, "model": TEXT, "usage": usage}
    vector = fixed_object(object={"const": "embedding"}, index=COUNT, embedding={"anyOf": [_VECTOR, TEXT]})
    result = fixed_object(index=COUNT, relevance_score=NUMBER)
    result["properties"]["document"] = fixed_object(text=TEXT)
    return {
        "EmbeddingRequest": _embedding_request(),
        "Embeddings": fixed_object(**listed, data={"type": "array", "items": vector}),
        "RerankRequest": _rerank_request(),
        "Ranking": fixed_object(**listed, results={"type": "array", "items": result}),
        "OllamaEmbedRequest": {
            "type": "object",
            "required": ["input"],
            "properties": {
                "model": _MODEL,
                "input": _TEXT_OR_TEXTS,
                "truncate": boolean("Leave out the end of inputs that are too long. On by default."),
                "dimensions": _DIMENSIONS,
            },
        },
        "OllamaEmbeddings": fixed_object(
            model=TEXT,
            embeddings={"type": "array", "items": _VECTOR},
            total_duration=_DURATION,
            load_duration=_DURATION,
            prompt_eval_count=COUNT,
        ),
        "OllamaEmbeddingsRequest": {
            "type": "object",
            "required": ["prompt"],
            "properties": {"model": _MODEL, "prompt": TEXT},
        },
        "OllamaEmbedding": fixed_object(embedding=_VECTOR),
    }


def _embedding_request() -> Schema:
    tokens = {"type": "array", "items": COUNT}
    inputs = {"anyOf": [*_TEXT_OR_TEXTS["anyOf"], tokens, {"type": "array", "items": tokens}]}
    properties = {
        "model": _MODEL,
        "input": {**inputs, "description": "A text, texts, a list of token IDs, or such lists."},
        "encoding_format": {"enum": [FLOAT, BASE64], "description": "Numbers, or little-endian float32 in Base64."},
        "dimensions": _DIMENSIONS,
        "truncate": boolean("Leave out the end of inputs that are too long, instead of an error."),
    }
    return {"type": "object", "required": ["input"], "properties": properties}


def _rerank_request() -> Schema:
    document = {"anyOf": [TEXT, fixed_object(text=TEXT)]}
    properties = {
        "model": _MODEL,
        "query": TEXT,
        "documents": {"type": "array", "items": document, "minItems": 1, "maxItems": MOST_INPUTS},
        "top_n": {"type": "integer", "minimum": 1, "description": "Return only the best documents."},
        "return_documents": boolean("Repeat the documents in the answer."),
        "truncate": boolean("Leave out the end of documents that are too long, instead of an error."),
    }
    return {"type": "object", "required": ["query", "documents"], "properties": properties}
