"""The bodies and answers of calls for embeddings and scores, with the fields of OpenAI, Jina and Ollama."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypedDict

from llmrun.engine.child.messages import Embed, Embedded
from llmrun.engine.embedding import MOST_TOKENS, too_many_tokens
from llmrun.engine.requests import ModelFacts, TextPrompt, TokenPrompt
from llmrun.serving.protocol.declarations import Expected, Limits, read
from llmrun.serving.protocol.ollama.objects import ContextSize, Loading, ModelName, Nanoseconds
from llmrun.serving.protocol.ollama.requests import unused_context, whole_numbers
from llmrun.serving.protocol.openai.messages import prompts_of
from llmrun.serving.protocol.openai.objects import Count, Tokens

# The paths of the routes. Paths without /v1 and the name "reranking" come from llama-server.
EMBEDDING_PATHS: Final = ("/v1/embeddings", "/embeddings")
RERANK_PATHS: Final = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")
OLLAMA_EMBED_PATH, OLLAMA_EMBEDDINGS_PATH = "/api/embed", "/api/embeddings"

MOST_INPUTS: Final = 2048  # OpenAI's API has the same limit
BASE64: Final = "base64"
Encoding = Literal["float", "base64"]

Inputs = Annotated[
    str | Annotated[list[str | Tokens], Limits(1, MOST_INPUTS, "text")] | Tokens,
    Expected("a string, a list of strings, a list of token IDs, or a list of such lists"),
    "One or more texts, or one or more lists of token IDs.",
]
Dimensions = Annotated[int, Limits(1), "The number of dimensions to keep, for models trained for shorter vectors."]


class EmbeddingRequest(TypedDict, total=False):
    model: ModelName
    input: Required[Inputs]
    encoding_format: Annotated[Encoding, "Return vectors as numbers, or as little-endian float32 values in Base64."]
    dimensions: Dimensions
    truncate: Annotated[bool, "Cut off the end of inputs that are too long, instead of returning an error."]


class Document(TypedDict):
    text: str


class RerankRequest(TypedDict, total=False):
    model: ModelName
    query: Required[str]
    documents: Required[
        Annotated[
            list[Annotated[str | Document, Expected("a string or an object with a text")]],
            Limits(1, MOST_INPUTS, "document"),
        ]
    ]
    top_n: Annotated[int, Limits(1), "The number of best documents to return."]
    return_documents: Annotated[bool, "Repeat the documents in the answer."]
    truncate: Annotated[bool, "Cut off the end of documents that are too long, instead of returning an error."]


class OllamaEmbeddingOptions(TypedDict, total=False):
    num_ctx: ContextSize


class OllamaEmbedRequest(Loading, total=False):
    input: Annotated[
        str | Annotated[list[str | Tokens], Limits(0, MOST_INPUTS, "text")] | Tokens,
        Expected("a string, a list of strings, a list of token IDs, or a list of such lists"),
        "One or more texts, or one or more lists of token IDs. Without input, the model is only loaded.",
    ]
    options: OllamaEmbeddingOptions
    truncate: Annotated[bool, "Cut off the end of inputs that are too long. The default is true."]
    dimensions: Annotated[int, Limits(0), "As in `/v1/embeddings`, or 0 for all dimensions."]


class OllamaEmbeddingsRequest(Loading, total=False):
    prompt: Annotated[str, "The text. Without a text, the model is only loaded."]
    options: OllamaEmbeddingOptions


class _Usage(TypedDict):
    prompt_tokens: Count
    total_tokens: Count


class _Computed(TypedDict):
    object: Literal["list"]
    model: str
    usage: _Usage


class _Embedding(TypedDict):
    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class Embeddings(_Computed):
    data: list[_Embedding]


class _Result(TypedDict):
    index: Count
    relevance_score: float
    document: NotRequired[Document]


class Ranking(_Computed):
    """The answer of /v1/rerank, with the best documents first."""

    results: list[_Result]


class OllamaEmbeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: Nanoseconds
    load_duration: Nanoseconds
    prompt_eval_count: Count


class OllamaEmbedding(TypedDict):
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """One parsed call, with the options for writing the answer.

    encoding          the encoding of vectors
    top_n             the number of documents in the answer, or None for all documents
    return_documents  True if the answer repeats the documents
    ignored           the paths of the request's ignored fields
    context           the size of the context in tokens if the client wants a larger context, or 0
    """

    wanted: Embed
    encoding: Encoding = "float"
    top_n: int | None = None
    return_documents: bool = False
    ignored: tuple[str, ...] = ()
    context: int = 0


Parse = Callable[[dict[str, Any], ModelFacts, str], EmbeddingCall]


def parse_embeddings(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Convert the body of a request to /v1/embeddings. Raises InvalidField."""
    given, ignored = read(EmbeddingRequest, body)
    inputs = _inputs_of(given["input"], facts)
    wanted = Embed(inputs, None, given.get("dimensions"), True, given.get("truncate", False), tenant)
    return EmbeddingCall(wanted, given.get("encoding_format", "float"), ignored=ignored)


def parse_rerank(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Convert the body of a request to /v1/rerank. Raises InvalidField."""
    given, ignored = read(RerankRequest, body)
    inputs = tuple(TextPrompt(each if isinstance(each, str) else each["text"]) for each in given["documents"])
    wanted = Embed(inputs, given["query"], truncate=given.get("truncate", False), tenant=tenant)
    return EmbeddingCall(
        wanted, top_n=given.get("top_n"), return_documents=given.get("return_documents", False), ignored=ignored
    )


def parse_ollama_embed(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Convert the body of a request to Ollama's /api/embed, where `truncate` is true by default."""
    given, ignored = read(OllamaEmbedRequest, {**body, "options": whole_numbers(body.get("options"))})
    inputs = _inputs_of(texts, facts) if (texts := given.get("input")) else ()
    wanted = Embed(inputs, None, given.get("dimensions") or None, True, given.get("truncate", True), tenant)
    unused, context = unused_context(given["options"].get("num_ctx", 0), facts)
    return EmbeddingCall(wanted, ignored=(*unused, *ignored), context=context)


def parse_ollama_embeddings(body: dict[str, Any], facts: ModelFacts, tenant: str) -> EmbeddingCall:
    """Convert a body of Ollama's older /api/embeddings, which returns unnormalized vectors. Raises InvalidField."""
    given, ignored = read(OllamaEmbeddingsRequest, {**body, "options": whole_numbers(body.get("options"))})
    inputs = (TextPrompt(text),) if (text := given.get("prompt")) else ()
    wanted = Embed(inputs, normalize=False, truncate=True, tenant=tenant)
    unused, context = unused_context(given["options"].get("num_ctx", 0), facts)
    return EmbeddingCall(wanted, ignored=(*unused, *ignored), context=context)


def _inputs_of(
    given: str | Sequence[str | Sequence[int] | int], facts: ModelFacts
) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the inputs. Raises InvalidField if there are too many tokens.

    Inputs with too many tokens are refused here, because sending millions of numbers to the engine's process would hold
    up all other requests.
    """
    inputs = prompts_of(given, "input", facts)
    tokens = sum(len(each.tokens) for each in inputs if isinstance(each, TokenPrompt))
    if tokens > MOST_TOKENS:
        raise too_many_tokens(tokens)
    return inputs


_NANOSECONDS = 1e9

Write = Callable[[EmbeddingCall, Embedded, str, float], Mapping[str, Any]]


def embeddings_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> Embeddings:
    """Return the answer of /v1/embeddings. `model` is the name that the client used. `seconds` is ignored."""
    vectors = [_encoded(vector) if call.encoding == BASE64 else [*vector] for vector in _rows(found)]
    data: list[_Embedding] = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
    ]
    return {"object": "list", "model": model, "data": data, "usage": _usage(found)}


def rerank_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> Ranking:
    """Return the answer of /v1/rerank, with the best documents first. Documents with equal scores keep their order."""
    scores = [score for [score] in _rows(found)]
    results: list[_Result] = []
    for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n]:
        results.append({"index": index, "relevance_score": scores[index]})
        document = call.wanted.inputs[index]
        if call.return_documents and isinstance(document, TextPrompt):
            results[-1]["document"] = {"text": document.text}
    return {"object": "list", "model": model, "results": results, "usage": _usage(found)}


def ollama_embed_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> OllamaEmbeddings:
    """Return the answer of Ollama's /api/embed. `seconds` is the duration of the call."""
    return {
        "model": model,
        "embeddings": [[*vector] for vector in _rows(found)],
        "total_duration": round(seconds * _NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": sum(found.tokens),
    }


def ollama_embeddings_body(call: EmbeddingCall, found: Embedded, model: str, seconds: float) -> OllamaEmbedding:
    """Return the answer of Ollama's older /api/embeddings. The vector is empty if there was no text."""
    return {"embedding": [value for vector in _rows(found) for value in vector]}


def _rows(found: Embedded) -> list[array[float]]:
    """Return the vector of each input."""
    if not found.tokens:
        return []
    values = array("f", found.data)
    width = len(values) // len(found.tokens)
    return [values[start : start + width] for start in range(0, len(values), width)]


def _encoded(vector: array[float]) -> str:
    """Return a vector's little-endian float32 values, encoded in Base64."""
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def _usage(found: Embedded) -> _Usage:
    return {"prompt_tokens": sum(found.tokens), "total_tokens": sum(found.tokens)}
