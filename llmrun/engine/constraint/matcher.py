"""Compiles response formats for a vocabulary with llguidance, https://github.com/guidance-ai/llguidance."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, cast

from llmrun.base.errors import InvalidAnswer, UsageError
from llmrun.engine.constraint.grammars import grammar_of, schema_of
from llmrun.engine.constraint.limits import compile_probe, on_large_stack
from llmrun.engine.constraint.process import ConstraintProcess
from llmrun.formats.gguf.problems import shown

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    from numpy.typing import NDArray

    from llmrun.engine.constraint.base import ResponseFormat
    from llmrun.model.tokenizers.base import Tokenizer

_KEPT: Final = 8  # compiled formats
_LONGEST_REASON: Final = 300  # characters
_SHORT: Final = 100  # characters of a text whose tokens are remembered


class ConstraintCompiler:
    """Compiles response formats for one model.

    llguidance needs its own form of the vocabulary, which takes 0.1 s for 49,000 tokens and 0.4 s for 152,000.
    `prepare` builds it in a thread while the weights of the model are loaded. It also starts the isolated process, in
    which every format is compiled first.
    """

    def __init__(self) -> None:
        self._process = ConstraintProcess()
        self._building: threading.Thread | None = None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[ResponseFormat, LLMatcher] = {}

    def prepare(self, tokenizer: Tokenizer) -> None:
        """Start building the vocabulary, unless that has already begun."""
        if self._building is None:
            self._process.start()
            self._building = threading.Thread(target=self._build, args=(tokenizer,), daemon=True)
            self._building.start()

    def compile(self, response_format: ResponseFormat, tokenizer: Tokenizer) -> LlguidanceConstraint:
        """Return the constraint for a new answer. Raises UsageError if the format is invalid or cannot be enforced."""
        matcher = self._compiled.get(response_format)
        if matcher is None:
            matcher = self._new_matcher(response_format, tokenizer)
            if len(self._compiled) == _KEPT:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[response_format] = matcher
        return LlguidanceConstraint(matcher.deep_copy())

    def close(self) -> None:
        """End the isolated process. It starts again when it is needed. Idempotent."""
        self._process.close()

    def _new_matcher(self, response_format: ResponseFormat, tokenizer: Tokenizer) -> LLMatcher:
        from llmrun.engine.constraint.parser import new_matcher

        schema = schema_of(response_format)
        grammar = grammar_of(response_format, schema)
        problem = compile_probe(grammar, schema, process=self._process)
        if problem is None:
            vocabulary = self._vocabulary(tokenizer)
            matcher = on_large_stack(lambda: new_matcher(vocabulary, grammar))
            if not matcher.is_error():
                return matcher
            problem = _reason(matcher)
        raise UsageError(f"{response_format.origin}: cannot be enforced: {problem}")

    def _vocabulary(self, tokenizer: Tokenizer) -> LLTokenizer:
        self.prepare(tokenizer)
        assert self._building is not None
        self._building.join()
        if self._tokenizer is None:
            raise InvalidAnswer("the vocabulary could not be prepared for constrained answers")
        return self._tokenizer

    def _build(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer

        vocabulary = _Vocabulary(tokenizer)
        self._tokenizer = LLTokenizer(
            cast("TokenizerWrapper", vocabulary),  # llguidance only reads the attributes
            n_vocab=len(vocabulary.tokens),
            eos_token=sorted(tokenizer.end_of_generation) or vocabulary.eos_token_id,
        )


class LlguidanceConstraint:
    """A Constraint that llguidance computes."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self, into: NDArray[np.uint32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)
        self._check()

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def back(self, n: int) -> None:
        self._matcher.rollback(n)
        self._check()

    def forced(self) -> Sequence[int]:
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tokens

    def n_allowed(self, tokens: Sequence[int]) -> int:
        n = self._matcher.validate_tokens(list(tokens))
        self._check()
        return n

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidAnswer(f"the response format is too complex to enforce: {_reason(self._matcher)}")


def _reason(matcher: LLMatcher) -> str:
    """Return the error of a matcher on one line."""
    return shown(" ".join(matcher.get_error().split()), _LONGEST_REASON)


class _Vocabulary:
    """A vocabulary in the form that llguidance reads: the bytes of every token, and a function that tokenizes text.

    A vocabulary without end-of-generation tokens gets an additional one, which no model can generate.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = partial(_continuation, tokenizer)
        self._encode_short = lru_cache(1024)(self._encode)  # the keys of objects in a list are forced again and again
        found = tokenizer.all_token_bytes()
        # Control tokens have no bytes. Their names are the texts by which a grammar may refer to them.
        self.special_token_ids = [token for token, text in enumerate(found) if not text]
        self.tokens = [text or tokenizer.token_text(token).encode() for token, text in enumerate(found)]
        self.eos_token_id = min(tokenizer.end_of_generation, default=len(found))
        if self.eos_token_id == len(found):
            self.tokens.append(b"<end>")
            self.special_token_ids.append(self.eos_token_id)

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode_short(text) if len(text) <= _SHORT else self._encode(text)


def _continuation(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode_continuation(text).tolist())
