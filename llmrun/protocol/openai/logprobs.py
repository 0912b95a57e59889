"""Writes log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any, Final

from llmrun.engine.requests import TokenLogprobs
from llmrun.types import TokenLogprob

_NEVER: Final = -9999.0  # OpenAI's value for very unlikely tokens; JSON has no infinity


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion's choice, for tokens in the order of the answer."""
    content = [{**_entry(token.chosen), "top_logprobs": [*map(_entry, token.top)]} for token in tokens]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Writes the `logprobs` of one choice of a completion, piece by piece.

    `text_offset` is where the text of a token begins in the text of all tokens. Only stop strings, which are not part
    of the answer, make that text longer than the answer.
    """

    def __init__(self) -> None:
        self._offset = 0  # characters
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def written(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(token.chosen.text))
        return {
            "tokens": [_spelled(token.chosen.text) for token in tokens],
            "token_logprobs": [_finite(token.chosen.logprob) for token in tokens],
            "top_logprobs": [_table(token) for token in tokens] if any(token.top for token in tokens) else None,
            "text_offset": offsets,
        }


def _entry(token: TokenLogprob) -> dict[str, Any]:
    text = token.text.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(token.logprob), "bytes": [*token.text]}


def _table(token: TokenLogprobs) -> dict[str, float]:
    """Return text -> logprob for the likeliest tokens and the chosen one, as OpenAI's API does.

    If several tokens have the same text, the likeliest one is kept.
    """
    table: dict[str, float] = {}
    for each in (*token.top, token.chosen):
        table.setdefault(_spelled(each.text), _finite(each.logprob))
    return table


def _spelled(text: bytes) -> str:
    r"""Return the text of a token, or OpenAI's notation for incomplete characters, such as bytes:\xe2\x80."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NEVER
