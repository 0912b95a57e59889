"""Writes log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any, Final

from llmrun.base.types import TokenLogprob
from llmrun.engine.requests import TokenLogprobs
from llmrun.serving.protocol.errors import InvalidField

_MOST: Final = 2_000_000  # the log-probabilities of one answer, 150 bytes each
_NEVER: Final = -9999.0  # OpenAI's value for very unlikely tokens; JSON has no infinity


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion's choice, for tokens in the order of the answer."""
    content = [{**token_entry(token.chosen), "top_logprobs": [*map(token_entry, token.top)]} for token in tokens]
    return {"content": content, "refusal": None}


class LogprobLimit:
    """Limits the log-probabilities that are kept for one answer."""

    def __init__(self) -> None:
        self._n = 0

    def count(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Count the log-probabilities of the next tokens. Raises InvalidField if there are too many."""
        self._n += sum(1 + len(token.top) for token in tokens)
        if self._n > _MOST:
            words = f"the answer has more than {_MOST:,} log-probabilities"
            raise InvalidField("logprobs", words, hint="ask for fewer, or set max_tokens")


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


def token_entry(token: TokenLogprob) -> dict[str, Any]:
    """Return a token with its log-probability."""
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
