"""The bodies of /tokenize and /detokenize, whose fields are those of llama-server and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmrun.engine.facts import ModelFacts
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.fields import Fields, agreed, missing
from llmrun.serving.protocol.openai.prompts import read_tokens


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A text to tokenize.

    add_special    whether the model's special tokens, such as a BOS, are added
    parse_special  whether control strings in the text become control tokens
    with_pieces    whether the text of each token is wanted
    """

    text: str
    add_special: bool
    parse_special: bool
    with_pieces: bool


def parse_tokenize(body: dict[str, Any]) -> TokenizeCall:
    """Read `content` (llama-server) or `prompt` (vLLM), which differ in their defaults. Raises InvalidField."""
    fields = Fields(body)
    content, prompt = fields.text("content"), fields.text("prompt")
    if content is None and prompt is None:
        raise missing("content")
    if content is not None and prompt is not None:
        raise InvalidField("prompt", "cannot be combined with content")
    is_llama = content is not None
    names = {name: fields.boolean(name) for name in ("add_special", "add_special_tokens")}
    add_special = agreed({name: value for name, value in names.items() if value is not None})
    parse_special = fields.boolean("parse_special")
    with_pieces = fields.boolean("with_pieces")
    return TokenizeCall(
        (content if is_llama else prompt) or "",
        not is_llama if add_special is None else add_special,
        parse_special is not False,
        bool(with_pieces),
    )


def tokenize_body(tokens: Sequence[int], facts: ModelFacts, pieces: Sequence[bytes] | None = None) -> dict[str, Any]:
    """Return the answer of /tokenize. `pieces` are the bytes of each token, if they are wanted.

    A piece is a string or, if it is not UTF-8 text, a list of bytes, as in llama-server. `count` and `max_model_len`
    are vLLM's.
    """
    listed: list[Any] = [*tokens]
    if pieces is not None:
        listed = [{"id": token, "piece": _piece(piece)} for token, piece in zip(tokens, pieces, strict=True)]
    return {"tokens": listed, "count": len(listed), "max_model_len": facts.info.context_size}


def parse_detokenize(body: dict[str, Any], facts: ModelFacts) -> tuple[int, ...]:
    """Read `tokens`. Raises InvalidField."""
    return read_tokens(Fields(body), "tokens", facts)


def detokenize_body(text: bytes) -> dict[str, Any]:
    """Return the answer of /detokenize, as `content` (llama-server) and as `prompt` (vLLM)."""
    content = text.decode("utf-8", "replace")
    return {"content": content, "prompt": content}


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]
