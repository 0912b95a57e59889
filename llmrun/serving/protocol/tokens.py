"""The bodies and answers of /tokenize, /detokenize and /tokenizer_info, with the fields of llama-server and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Required, TypedDict

from llmrun.engine.requests import ModelFacts
from llmrun.serving.protocol.declarations import agreed, missing, read
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.ollama.objects import ModelName
from llmrun.serving.protocol.openai.messages import check_tokens
from llmrun.serving.protocol.openai.objects import Count, Token


class TokenizeRequest(TypedDict, total=False):
    model: ModelName
    content: Annotated[str, "The text, as in llama-server."]
    prompt: Annotated[str, "The text, as in vLLM."]
    add_special: Annotated[
        bool, "Add special tokens such as a BOS. The default is true for `prompt`, and false for `content`."
    ]
    add_special_tokens: Annotated[bool, "Another name for `add_special`."]
    parse_special: Annotated[bool, "Convert control strings to control tokens. The default is true."]
    with_pieces: Annotated[bool, "Also return the text of each token."]


class DetokenizeRequest(TypedDict, total=False):
    model: ModelName
    tokens: Required[Annotated[list[Token], "The IDs of the tokens."]]


class Piece(TypedDict):
    """A token with its text, or with its bytes if the bytes are not UTF-8 text."""

    id: Count
    piece: str | list[Count]


class Tokens(TypedDict):
    """The tokens of a text. `count` and `max_model_len` are vLLM's fields."""

    tokens: list[Count] | list[Piece]
    count: Count
    max_model_len: Count


class Text(TypedDict):
    """The text of tokens, as `content` (llama-server) and as `prompt` (vLLM)."""

    content: str
    prompt: str


class TokenizerInfo(TypedDict):
    """The texts of BOS and EOS and the chat template, as in vLLM. A value is null if the model has none."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    model_max_length: Count


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A text to tokenize.

    add_special    True to add the model's special tokens, such as a BOS
    parse_special  True to convert control strings in the text to control tokens
    with_pieces    True to return the text of each token
    ignored        the paths of the request's ignored fields
    """

    text: str
    add_special: bool
    parse_special: bool
    with_pieces: bool
    ignored: tuple[str, ...]


def parse_tokenize(body: dict[str, Any]) -> TokenizeCall:
    """Convert a body with `content` (llama-server) or `prompt` (vLLM), each with its own defaults.

    Raises InvalidField.
    """
    given, ignored = read(TokenizeRequest, body)
    text = given.get("content", given.get("prompt"))
    if text is None:
        raise missing("content")
    if "content" in given and "prompt" in given:
        raise InvalidField("prompt", "cannot be combined with content")
    names = {"add_special": given.get("add_special"), "add_special_tokens": given.get("add_special_tokens")}
    add_special = agreed({name: each for name, each in names.items() if each is not None})
    return TokenizeCall(
        text,
        "prompt" in given if add_special is None else add_special,
        given.get("parse_special", True),
        given.get("with_pieces", False),
        ignored,
    )


_MOST_PIECES: Final = 100_000  # writing so many pieces holds up the server's other clients for 0.2 s


def check_pieces(tokens: Sequence[int]) -> None:
    """Raise InvalidField if a text has too many tokens to return the text of each token."""
    if len(tokens) > _MOST_PIECES:
        raise InvalidField("with_pieces", f"the text has {len(tokens):,} tokens, the limit is {_MOST_PIECES:,}")


def tokenize_body(tokens: Sequence[int], facts: ModelFacts, pieces: Sequence[bytes] | None = None) -> Tokens:
    """Return the answer of /tokenize. `pieces` are the bytes of each token, or None to omit the pieces."""
    body: Tokens = {"tokens": [*tokens], "count": len(tokens), "max_model_len": facts.info.context_size}
    if pieces is not None:
        listed: list[Piece] = [{"id": token, "piece": _piece(each)} for token, each in zip(tokens, pieces, strict=True)]
        body["tokens"] = listed
    return body


def parse_detokenize(body: dict[str, Any], facts: ModelFacts) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the token IDs in a body, and the paths of ignored fields. Raises InvalidField."""
    given, ignored = read(DetokenizeRequest, body)
    check_tokens(given["tokens"], "tokens", facts)
    return tuple(given["tokens"]), ignored


def detokenize_body(text: bytes) -> Text:
    """Return the answer of /detokenize."""
    content = text.decode("utf-8", "replace")
    return {"content": content, "prompt": content}


def tokenizer_info_body(facts: ModelFacts) -> TokenizerInfo:
    """Return the answer of /tokenizer_info."""
    return {
        "bos_token": facts.bos_token,
        "eos_token": facts.eos_token,
        "chat_template": facts.chat_template,
        "model_max_length": facts.info.context_size,
    }


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]
