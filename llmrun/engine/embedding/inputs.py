"""Turns texts, and pairs of a query and a document, into the tokens of one sequence each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from llmrun.base.errors import ContextExceeded, UsageError

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo
    from llmrun.model.tokenizers.base import Tokenizer

_TEMPLATE: Final = "tokenizer.chat_template.rerank"
_PAIR_KEYS: Final = ("model", "pre", "add_eos_token", "add_sep_token", "seperator_token_id")  # GGUF spells it so
# BPE vocabularies whose pairs have a separator although their files do not say so.
_SEPARATED: Final = ("jina-v1-en", "jina-v2-code", "roberta-bpe")
MOST_TOKENS: Final = 1 << 20  # of the inputs of a call, so that a small body cannot take gigabytes and days


def limited(texts: Iterable[list[int]]) -> list[Sequence[int]]:
    """Return the texts of a call, with 4 bytes for each token, because hundreds of calls may wait.

    Raises UsageError if they have more than MOST_TOKENS tokens together.
    """
    found, total = list[Sequence[int]](), 0
    for tokens in texts:
        total += len(tokens)
        if total > MOST_TOKENS:
            raise too_many_tokens(total)
        found.append(array("i", tokens))
    return found


def too_many_tokens(total: int) -> UsageError:
    """Return the error for a call whose inputs have at least `total` tokens."""
    words = f"too many tokens: the inputs have {total:,} or more, the limit for a call is {MOST_TOKENS:,}"
    return UsageError(words, hint="send fewer inputs in a call")


class InputReader:
    """Reads the inputs of one model. `place` names an input in error messages, such as "input 3".

    truncated  how many inputs were truncated so far
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, allow: str) -> None:
        """Create a reader. `allow` says in error messages how to allow truncating, such as "use --truncate"."""
        self.truncated = 0
        self._allow = allow
        self._most, self._vocabulary_size = info.context_size, info.vocabulary_size
        self._tokenizer = tokenizer
        self._template = str(info.metadata.get(_TEMPLATE, ""))
        # The tokens that the tokenizer puts around a text, such as [CLS] and [SEP].
        frame = tokenizer.encode("", add_special=True, parse_special=False).tolist()
        n_before = int(frame[:1] == [tokenizer.bos_id])
        self._before, self._after = frame[:n_before], frame[n_before:]
        self._between, self._end = _around_documents(info, tokenizer.eos_id, self._after)

    def tokens_of(self, text: str | Sequence[int], place: str, *, truncate: bool) -> list[int]:
        """Return the tokens of a text, or given tokens, which get nothing around them.

        `truncate` leaves out the end of the text if it is too long. Raises ContextExceeded if it is too long otherwise,
        and UsageError if it has no tokens or tokens that the vocabulary lacks.
        """
        if isinstance(text, str):
            plain = self._plain(text)
            return self._fitted(lambda tokens: [*self._before, *tokens, *self._after], plain, place, truncate=truncate)
        for token in text:
            if not 0 <= token < self._vocabulary_size:
                most = self._vocabulary_size
                raise UsageError(f"no such token: {place}: {token}, the vocabulary has {most:,} tokens")
        return self._fitted(lambda tokens: tokens, list(text), place, truncate=truncate)

    def pair_of(self, query: str, document: str, place: str, *, truncate: bool) -> list[int]:
        """Return the tokens of a query and a document, in the form that llama-server gives them, too.

        `truncate` leaves out the end of the document if the pair is too long. Raises the errors of `tokens_of`.
        """
        if self._template:
            return self._fitted(
                lambda tokens: self._rendered(query, tokens), self._plain(document), place, truncate=truncate
            )
        beginning = [*self._before, *self._plain(query), *self._between]
        return self._fitted(
            lambda tokens: [*beginning, *tokens, *self._end], self._plain(document), place, truncate=truncate
        )

    def _rendered(self, query: str, document: Sequence[int]) -> list[int]:
        """Return the tokens of the model's template. Control strings in the query and the document stay text."""
        protect, tokenizer = self._tokenizer.protect, self._tokenizer
        text = tokenizer.decode(document).decode(errors="ignore")
        parts = [part.replace("{query}", protect(query)) for part in self._template.split("{document}")]
        tokens: list[int] = tokenizer.encode_rendered(protect(text).join(parts)).tolist()
        return tokens

    def _plain(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special=False, parse_special=False).tolist()
        return tokens

    def _fitted(
        self, framed: Callable[[list[int]], list[int]], plain: list[int], place: str, *, truncate: bool
    ) -> list[int]:
        """Return framed(plain), or with fewer plain tokens if that is too long and may be truncated."""
        found = framed(plain)
        if not found:
            raise UsageError(f"{place} is empty: it has no tokens")
        if len(found) <= self._most:
            return found
        kept = len(plain) - (len(found) - self._most)
        if not truncate or kept <= 0:
            raise ContextExceeded(
                f"{place} does not fit in the context: {len(found):,} tokens exceed the limit of {self._most:,}",
                hint=f"divide it into parts, or {self._allow} to leave out its end",
            )
        self.truncated += 1
        return framed(plain[:kept])[: self._most]


def _around_documents(info: ModelInfo, eos: int | None, after: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the tokens before and after the document of a pair, as in llama-server.

    eos    the vocabulary's EOS, if it has one
    after  the tokens after a single text
    """
    keys = {key: info.metadata.get(f"tokenizer.ggml.{key}") for key in _PAIR_KEYS}
    model, pre, add_eos, add_sep, sep = keys.values()
    if add_eos is None:
        add_eos = model == "t5"
    if add_sep is None:
        add_sep = model == "bert" or pre in _SEPARATED
    sep = sep if sep is not None else next(iter(after), None)
    end = [eos if eos is not None else sep] if add_eos else []
    between = [*end, *([sep] if add_sep else [])]
    return [token for token in between if token is not None], [token for token in end if token is not None]
