"""Reads the bodies of /v1/embeddings and /v1/rerank, whose fields are those of OpenAI, Jina and Ollama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.embedding.inputs import MOST_TOKENS, too_many_tokens
from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import TextPrompt, TokenPrompt
from llmrun.serving.processes.served_model import Embedding
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.fields import Fields, missing, seen
from llmrun.serving.protocol.openai.prompts import text_prompts

# The paths of the routes. Those without /v1 and some other names are llama-server's.
EMBEDDING_PATHS: Final = ("/v1/embeddings", "/embeddings")
RERANK_PATHS: Final = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")
OLLAMA_EMBED_PATH, OLLAMA_EMBEDDINGS_PATH = "/api/embed", "/api/embeddings"

MOST_INPUTS: Final = 2048  # as in OpenAI's API
FLOAT, BASE64 = "float", "base64"


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """One call, and what its answer needs.

    encoding          how vectors are written, FLOAT or BASE64
    top_n             the number of documents in the answer, or None for all
    return_documents  whether the answer repeats the documents
    ignored           the names of fields that have no effect, with their places
    """

    wanted: Embedding
    encoding: str = FLOAT
    top_n: int | None = None
    return_documents: bool = False
    ignored: tuple[str, ...] = ()


Parse = Callable[[dict[str, Any], ModelFacts, str], EmbeddingCall]


def parse_embeddings(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Read a body of /v1/embeddings. Raises InvalidField."""
    fields = Fields(body)
    fields.text("model")
    inputs = _limited(text_prompts(fields, "input", facts), "input")
    encoding = fields.word("encoding_format", (FLOAT, BASE64)) or FLOAT
    wanted = Embedding(inputs, None, fields.integer("dimensions", 1), True, bool(fields.boolean("truncate")), tenant)
    return EmbeddingCall(wanted, encoding, ignored=fields.unread())


def parse_rerank(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Read a body of /v1/rerank. Raises InvalidField."""
    fields = Fields(body)
    fields.text("model")
    query, documents = fields.needed_text("query"), fields.items("documents")
    if documents is None:
        raise missing("documents")
    inputs = _limited(tuple(_document(item, number) for number, item in enumerate(documents)), "documents")
    wanted = Embedding(inputs, query, truncate=bool(fields.boolean("truncate")), tenant=tenant)
    top_n, repeats = fields.integer("top_n", 1), bool(fields.boolean("return_documents"))
    return EmbeddingCall(wanted, top_n=top_n, return_documents=repeats, ignored=fields.unread())


def parse_ollama_embed(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Read a body of Ollama's /api/embed, which truncates inputs unless it is told not to. Raises InvalidField."""
    fields = _ollama_fields(body)
    inputs = _limited(text_prompts(fields, "input", facts), "input")
    truncates = fields.boolean("truncate") is not False
    return EmbeddingCall(
        Embedding(inputs, None, fields.integer("dimensions", 1), True, truncates, tenant), ignored=fields.unread()
    )


def parse_ollama_embeddings(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Read a body of Ollama's older /api/embeddings, whose vector is not normalized. Raises InvalidField."""
    fields = _ollama_fields(body)
    prompt = TextPrompt(fields.needed_text("prompt"))
    wanted = Embedding((prompt,), normalize=False, truncate=True, tenant=tenant)
    return EmbeddingCall(wanted, ignored=fields.unread())


def _ollama_fields(body: dict[str, Any]) -> Fields:
    fields = Fields(body)
    fields.text("model")
    fields.value("keep_alive")  # the route has read it
    return fields


def _document(item: Any, number: int) -> TextPrompt:
    """Return a document, which is a string or an object with its text."""
    text = item.get("text") if type(item) is dict else item
    if type(text) is not str:
        place = f"documents[{number}]"
        raise InvalidField(place, f"expected a string or an object with a text, got {seen(item)}", code="invalid_type")
    return TextPrompt(text)


def _limited(
    inputs: tuple[TextPrompt | TokenPrompt, ...] | tuple[TextPrompt, ...], name: str
) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the inputs if there are not too many of them.

    Too many tokens are refused here, because sending millions of numbers to the engine's process would hold up all
    other requests.
    """
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise InvalidField(name, f"expected 1 to {MOST_INPUTS:,} texts, got {len(inputs):,}")
    tokens = sum(len(each.tokens) for each in inputs if isinstance(each, TokenPrompt))
    if tokens > MOST_TOKENS:
        raise too_many_tokens(tokens)
    return inputs
