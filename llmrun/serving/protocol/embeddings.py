"""The bodies, answers and schemas of calls for embeddings and scores, with the fields of OpenAI, Jina and Ollama."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.child.messages import Embed, Embedded
from llmrun.engine.embedding import MOST_TOKENS, too_many_tokens
from llmrun.engine.requests import ModelFacts, TextPrompt, TokenPrompt
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.fields import Fields, needed, seen
from llmrun.serving.protocol.openai.messages import text_prompts

# The paths of the routes. Paths without /v1 and the name "reranking" come from llama-server.
EMBEDDING_PATHS: Final = ("/v1/embeddings", "/embeddings")
RERANK_PATHS: Final = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")
OLLAMA_EMBED_PATH, OLLAMA_EMBEDDINGS_PATH = "/api/embed", "/api/embeddings"

MOST_INPUTS: Final = 2048  # OpenAI's API has the same limit
FLOAT, BASE64 = "float", "base64"


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """One parsed call, with the options for writing the answer.

    encoding          the encoding of vectors, FLOAT or BASE64
    top_n             the number of documents in the answer, or None for all documents
    return_documents  True if the answer repeats the documents
    ignored           the paths of the request's ignored fields
    """

    wanted: Embed
    encoding: str = FLOAT
    top_n: int | None = None
    return_documents: bool = False
    ignored: tuple[str, ...] = ()


Parse = Callable[[dict[str, Any], ModelFacts, str], EmbeddingCall]


def parse_embeddings(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Parse the body of a request to /v1/embeddings. Raises InvalidField."""
    fields = Fields(body)
    fields.text("model")
    inputs = _limited(text_prompts(fields, "input", facts), "input")
    encoding = fields.word("encoding_format", (FLOAT, BASE64)) or FLOAT
    wanted = Embed(inputs, None, fields.integer("dimensions", 1), True, bool(fields.boolean("truncate")), tenant)
    return EmbeddingCall(wanted, encoding, ignored=fields.unread())


def parse_rerank(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Parse the body of a request to /v1/rerank. Raises InvalidField."""
    fields = Fields(body)
    fields.text("model")
    query, documents = fields.needed_text("query"), needed(fields, "documents", fields.items("documents"))
    inputs = _limited(tuple(_document(item, number) for number, item in enumerate(documents)), "documents")
    wanted = Embed(inputs, query, truncate=bool(fields.boolean("truncate")), tenant=tenant)
    top_n, repeats = fields.integer("top_n", 1), bool(fields.boolean("return_documents"))
    return EmbeddingCall(wanted, top_n=top_n, return_documents=repeats, ignored=fields.unread())


def parse_ollama_embed(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Parse the body of a request to Ollama's /api/embed, where `truncate` is true by default. Raises InvalidField."""
    fields = _ollama_fields(body)
    inputs = _limited(text_prompts(fields, "input", facts), "input")
    truncates = fields.boolean("truncate") is not False
    return EmbeddingCall(
        Embed(inputs, None, fields.integer("dimensions", 1), True, truncates, tenant), ignored=fields.unread()
    )


def parse_ollama_embeddings(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Parse a body of Ollama's older /api/embeddings, which returns unnormalized vectors. Raises InvalidField."""
    fields = _ollama_fields(body)
    prompt = TextPrompt(fields.needed_text("prompt"))
    wanted = Embed((prompt,), normalize=False, truncate=True, tenant=tenant)
    return EmbeddingCall(wanted, ignored=fields.unread())


def _ollama_fields(body: dict[str, Any]) -> Fields:
    fields = Fields(body)
    fields.text("model")
    fields.value("keep_alive")  # the route has already read this field
    return fields


def _document(item: Any, number: int) -> TextPrompt:
    """Return a document from a string, or from an object with a field `text`."""
    text = item.get("text") if type(item) is dict else item
    if type(text) is not str:
        place = f"documents[{number}]"
        raise InvalidField(place, f"expected a string or an object with a text, got {seen(item)}", code="invalid_type")
    return TextPrompt(text)


def _limited(
    inputs: tuple[TextPrompt | TokenPrompt, ...] | tuple[TextPrompt, ...], name: str
) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the inputs. Raises InvalidField if there are too many inputs or tokens.

    Inputs with too many tokens are refused here, because sending millions of numbers to the engine's process would hold
    up all other requests.
    """
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise InvalidField(name, f"expected 1 to {MOST_INPUTS:,} texts, got {len(inputs):,}")
    tokens = sum(len(each.tokens) for each in inputs if isinstance(each, TokenPrompt))
    if tokens > MOST_TOKENS:
        raise too_many_tokens(tokens)
    return inputs


_NANOSECONDS = 1e9

Write = Callable[[EmbeddingCall, Embedded, str, float], dict[str, Any]]


def embeddings_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> dict[str, Any]:
    """Return the answer of /v1/embeddings. `model` is the name that the client used. `seconds` is ignored."""
    vectors: list[Any] = [_encoded(vector) if call.encoding == BASE64 else [*vector] for vector in _rows(found)]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "model": model, "data": data, "usage": _usage(found)}


def rerank_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> dict[str, Any]:
    """Return the answer of /v1/rerank, with the best documents first. Documents with equal scores keep their order."""
    scores = [score for [score] in _rows(found)]
    results: list[dict[str, Any]] = []
    for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n]:
        results.append({"index": index, "relevance_score": scores[index]})
        document = call.wanted.inputs[index]
        if call.return_documents and isinstance(document, TextPrompt):
            results[-1]["document"] = {"text": document.text}
    return {"object": "list", "model": model, "results": results, "usage": _usage(found)}


def ollama_embed_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> dict[str, Any]:
    """Return the answer of Ollama's /api/embed. `seconds` is the duration of the call."""
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
    """Return a vector's little-endian float32 values, encoded in Base64."""
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def _usage(found: Embedded) -> dict[str, int]:
    return {"prompt_tokens": sum(found.tokens), "total_tokens": sum(found.tokens)}


EMBEDDING_SCHEMAS: Final = """
default_model = string // The name of a model. By default, the server's first model answers.
dimensions = integer(1..) // Keep only the first dimensions, for models trained for this.
EmbeddingRequest = {
  model?: default_model
  input: string | string[](..MOST_INPUTS) | count[] | count[][] // One or more texts, or one or more lists of token IDs.
  encoding_format?: FLOAT | BASE64 // Return vectors as numbers, or as little-endian float32 values in Base64.
  dimensions?: dimensions
  truncate?: boolean // Cut off the end of inputs that are too long, instead of returning an error.
}
RerankRequest = {
  model?: default_model
  query: string
  documents: (string | {text: string})[](1..MOST_INPUTS)
  top_n?: integer(1..) // Return only the best documents.
  return_documents?: boolean // Repeat the documents in the answer.
  truncate?: boolean // Cut off the end of documents that are too long, instead of returning an error.
}
OllamaEmbedRequest = {
  model?: default_model
  input: string | string[](..MOST_INPUTS)
  truncate?: boolean // Cut off the end of inputs that are too long. The default is true.
  dimensions?: dimensions
}
OllamaEmbeddingsRequest = {model?: default_model; prompt: string}
computed = {object: "list"; model: string; usage: {prompt_tokens: count; total_tokens: count}}
Embeddings = {...computed; data: {object: "embedding"; index: count; embedding: number[] | string}[]}
Ranking = {...computed; results: {index: count; relevance_score: number; document?: {text: string}}[]}
OllamaEmbeddings = {
  model: string; embeddings: number[][]
  total_duration: nanoseconds; load_duration: nanoseconds; prompt_eval_count: count
}
OllamaEmbedding = {embedding: number[]}
"""
