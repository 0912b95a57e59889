"""Checks response formats, turns them into grammars, and compiles the grammars for a vocabulary with llguidance.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md describes llguidance's Lark dialect and JSON schemas.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, cast

from llmrun.base.errors import InvalidAnswer, UsageError, shown
from llmrun.base.stacks import on_stack
from llmrun.engine.constraint.base import LLGUIDANCE, FormatKind, ResponseFormat
from llmrun.engine.constraint.limits import LARGE_STACK, check_grammar_text, check_schema, compile_probe
from llmrun.engine.constraint.process import ConstraintProcess

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    from llguidance._lib import JsonCompileOptions
    from numpy.typing import NDArray

    from llmrun.engine.constraint.repeated_keys import QuotedTokens, RepeatedKeys
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

# llguidance's converter from GBNF runs in this process in quadratic time: 4 s for 5,000 rules.
_MOST_GBNF_RULES: Final = 1_000
_MOST_GBNF_CHARACTERS: Final = 1 << 18
_LARK = re.compile(r"^[ \t]*(%llguidance\b|start\s*:)", re.MULTILINE)  # a line that occurs only in Lark grammars

# Whitespace is fixed, because models tend to add whitespace without end, and fixed text need not be sampled. The
# separators match Python's json.dumps, as in most training data. Each string has only one spelling, because
# llguidance compares keys by their spelling: with \u escapes, "a\u0022b" and "a\"b" would be different keys. Control
# characters without a short escape are thus possible only in property names (see keywords.py).
_JSON_OPTIONS: Final[JsonCompileOptions] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": '"\\bfnrt',  # the letters that may follow a backslash, without the u of \\u0022
}


def require_llguidance() -> None:
    """Raise UsageError if llguidance cannot be imported.

    llguidance has no wheels for some platforms, such as Alpine Linux. With `--only-binary`, pip installs the empty
    version 0.0.1 on these platforms.
    """
    try:
        from llguidance import LLMatcher  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "response formats and tools need the package llguidance, which is not installed",
            hint=f'pip install "{LLGUIDANCE}"; if there is no wheel for this platform, pip needs Rust and a C compiler',
        ) from error


def check_format(response_format: ResponseFormat) -> None:
    """Raise UsageError if a format is malformed or too large, as far as this can be determined without compiling."""
    if schema_of(response_format) is None:
        _lark_of(response_format)


def schema_of(response_format: ResponseFormat) -> dict[str, Any] | None:
    """Return the parsed JSON schema of a format, or None for a format without a schema. Raises UsageError.

    The schema `true`, which allows all JSON values, becomes an empty object. The objects of a strict format are closed.
    """
    if response_format.schema is None:
        return None
    schema = check_schema(response_format.schema, response_format.origin)
    if schema is False:
        raise UsageError(f"{response_format.origin}: the schema is false, so no text can match it")
    if schema is True:
        return {}
    from llmrun.engine.constraint.closing import closed  # most runs have no schema

    try:
        return dict(closed(schema) if response_format.strict else schema)
    except ValueError as error:
        raise UsageError(f"{response_format.origin}: {error}") from None


def grammar_of(response_format: ResponseFormat, schema: dict[str, Any] | None) -> str:
    """Return the grammar of a response format. Raises UsageError if the format is malformed or too large.

    schema  the result of `schema_of`
    """
    from llguidance import LLMatcher

    from llmrun.engine.constraint.rewriting import enforceable  # most runs have no schema

    if schema is not None:
        try:
            text = json.dumps(enforceable(schema))  # llguidance reads larger integers in text than in Python objects
            return LLMatcher.grammar_from_json_schema(text, None, _JSON_OPTIONS)
        except ValueError as error:  # an integer is too large for a double, or too many schemas are composed
            raise UsageError(f"{response_format.origin}: {shown(str(error), 300)}") from None
    return LLMatcher.grammar_from_lark(_lark_of(response_format))


def _lark_of(response_format: ResponseFormat) -> str:
    """Return the Lark grammar of a format that is not JSON."""
    if response_format.kind is FormatKind.CHOICE:
        lark = _lark_of_choices(response_format)
        check_grammar_text(lark, response_format.origin)
        return lark
    check_grammar_text(response_format.text, response_format.origin)
    require_llguidance()
    if response_format.kind is FormatKind.REGEX:
        from llguidance import regex_to_lark

        # As in PCRE and most programs that use PCRE, the classes of digits, word characters and spaces are ASCII.
        return f"start: /{regex_to_lark(response_format.text, 'dws')}/"
    return _lark_of_grammar(response_format)


def _lark_of_choices(response_format: ResponseFormat) -> str:
    if not response_format.choices or "" in response_format.choices:
        raise UsageError(f"{response_format.origin}: a choice is empty", hint="separate the choices by commas: yes,no")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in response_format.choices)


def _lark_of_grammar(response_format: ResponseFormat) -> str:
    """Return a grammar in Lark syntax, converted from GBNF if necessary."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = response_format.text
    if _LARK.search(text):
        return text
    if len(text) > _MOST_GBNF_CHARACTERS or text.count("::=") > _MOST_GBNF_RULES:
        raise UsageError(
            f"{response_format.origin}: too large: a GBNF grammar may have {_MOST_GBNF_RULES:,} rules and "
            f"{_MOST_GBNF_CHARACTERS:,} characters"
        )
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001  (the converter raises Exception itself, IndexError and RecursionError)
        raise UsageError(
            f"{response_format.origin}: not a GBNF or Lark grammar: {shown(str(error), 300)}",
            hint="a GBNF grammar needs a rule `root ::= ...`, and a Lark grammar needs a rule `start: ...`",
        ) from None


_KEPT: Final = 8  # number of compiled formats to keep
_LONGEST_REASON: Final = 300  # maximum number of characters
_SHORT: Final = 100  # maximum length of a text whose tokens are cached


class ConstraintCompiler:
    """Compiles response formats for one model.

    llguidance requires its own form of the vocabulary, whose creation takes 0.1 s for 49,000 tokens and 0.4 s for
    152,000. `prepare` builds this form in a thread while the weights of the model are loaded, and starts the isolated
    process, which compiles every format first.
    """

    def __init__(self) -> None:
        self._process = ConstraintProcess()
        self._building: threading.Thread | None = None
        self._tokenizer: LLTokenizer | None = None
        self._quoted: QuotedTokens | None = None
        self._compiled: dict[ResponseFormat, LLMatcher] = {}

    def prepare(self, tokenizer: Tokenizer) -> None:
        """Start building the vocabulary, unless building has already begun."""
        if self._building is None:
            self._process.start()
            self._building = threading.Thread(target=self._build, args=(tokenizer,), daemon=True)
            self._building.start()

    def compile(self, response_format: ResponseFormat, tokenizer: Tokenizer) -> Constraint:
        """Return the constraint for a new answer. Raises UsageError if the format is invalid or cannot be enforced."""
        from llmrun.engine.constraint.repeated_keys import RepeatedKeys

        matcher = self._compiled.get(response_format)
        if matcher is None:
            matcher = self._new_matcher(response_format, tokenizer)
            if len(self._compiled) == _KEPT:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[response_format] = matcher
        quoted = None if response_format.schema is None else self._quoted
        return Constraint(matcher.deep_copy(), None if quoted is None else RepeatedKeys(quoted))

    def close(self) -> None:
        """End the isolated process, which restarts when needed. Idempotent."""
        self._process.close()

    def _new_matcher(self, response_format: ResponseFormat, tokenizer: Tokenizer) -> LLMatcher:
        require_llguidance()
        from llmrun.engine.constraint.parser import new_matcher

        schema = schema_of(response_format)
        grammar = grammar_of(response_format, schema)
        problem = compile_probe(grammar, schema, process=self._process)
        if problem is None:
            vocabulary = self._vocabulary(tokenizer)
            matcher = on_stack(LARGE_STACK, lambda: new_matcher(vocabulary, grammar))
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
        try:
            require_llguidance()
        except UsageError:
            return  # `compile` raises this error in the thread of the request
        from llguidance import LLTokenizer

        from llmrun.engine.constraint.repeated_keys import QuotedTokens

        vocabulary = _Vocabulary(tokenizer)
        self._quoted = QuotedTokens(vocabulary.tokens, tokenizer.token_bytes)
        self._tokenizer = LLTokenizer(
            cast("TokenizerWrapper", vocabulary),  # llguidance only reads the vocabulary's attributes
            n_vocab=len(vocabulary.tokens),
            eos_token=sorted(tokenizer.end_of_generation) or vocabulary.eos_token_id,
        )


class Constraint:
    """The allowed continuations of one answer, as tokens. All methods raise LlmrunError if a limit is exceeded."""

    def __init__(self, matcher: LLMatcher, keys: RepeatedKeys | None = None) -> None:
        """Create a constraint. `keys` is None unless the answer is JSON."""
        self._matcher = matcher
        self._keys = keys

    @property
    def is_complete(self) -> bool:
        """True if the text matches the format and nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self, into: NDArray[np.uint32]) -> None:
        """Write the mask of the tokens that may come next, uint32[mask_words].

        End-of-generation tokens are allowed if the text so far matches the format.
        """
        self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)
        self._check()
        if self._keys is not None:
            self._keys.forbid(into)

    def take(self, token: int) -> None:
        """Add an allowed token to the text."""
        self._matcher.consume_token(token)
        self._check()
        if self._keys is not None:
            self._keys.take(token)

    def back(self, n: int) -> None:
        """Remove the last n tokens."""
        self._matcher.rollback(n)
        self._check()
        if self._keys is not None:
            self._keys.back(n)

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next because `allowed` permits no others."""
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tokens

    def n_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of a sequence are allowed, one after another."""
        n = self._matcher.validate_tokens(list(tokens))
        self._check()
        return n if self._keys is None else self._keys.n_allowed(tokens[:n])

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidAnswer(f"the response format is too complex to enforce: {_reason(self._matcher)}")


def _reason(matcher: LLMatcher) -> str:
    """Return the error of a matcher on one line."""
    return shown(" ".join(matcher.get_error().split()), _LONGEST_REASON)


class _Vocabulary:
    """A vocabulary in the form that llguidance reads: the bytes of every token, and a function that tokenizes text.

    A vocabulary without end-of-generation tokens receives an additional token, which no model can generate.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = partial(_continuation, tokenizer)
        self._encode_short = lru_cache(1024)(self._encode)  # the keys of objects in a list are forced repeatedly
        found = tokenizer.all_token_bytes()
        # Control tokens have no bytes. Grammars may refer to control tokens by name.
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
