"""Creates llguidance's matchers, with limits for their parsers.

The limits count the parser's work, not seconds, so whether an answer exceeds a limit does not depend on the machine.

A trial in the isolated process shows whether a grammar compiles at all. llguidance reports most problems, but a few
crash or block the process. In llguidance 1.9.1, the schema `{"const": -9223372036854775808}`, chains of 3,000
`$ref`s and chains of 3,000 grammar rules overflow the stack, and 20 patterns in an `allOf` compile for minutes. A
crash or a timeout of the isolated process does not affect llmrun.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from llmrun.base.stacks import on_stack

# The maximum number of Earley items per row. Ambiguous grammars need many items, and the work per token grows with the
# square or cube of the number of items. With `s: s s s | s s | "a" | "b"`, a mask takes up to 13 ms with 500 items and
# up to 850 ms with llguidance's default of 2,000.
_MOST_ITEMS = 500


def parser_limits() -> LLParserLimits:
    return LLParserLimits(max_items_in_row=_MOST_ITEMS, verbose_errors=False)


def new_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar for a vocabulary. The matcher is in an error state if the grammar is refused."""
    return LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())


_STACK_BYTES = 2 << 20
_STEPS = 8  # number of tokens to try; the parser's limits apply to each token
_NO_TOKENIZER = "no tokenizer"  # start of the warning about special tokens that only the real tokenizer contains


def grammar_problem(grammar: str) -> str:
    """Return llguidance's message if a grammar cannot be compiled or cannot begin an answer, otherwise ""."""
    try:
        return on_stack(_STACK_BYTES, lambda: _compile_problem(grammar))
    except BaseException:  # noqa: BLE001 - a panic of llguidance is not an Exception
        return "the compiler ended without a result"


def _compile_problem(grammar: str) -> str:
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    warnings = [message for message in messages if not message.startswith(_NO_TOKENIZER)]
    if failed or warnings:
        return warnings[0]
    if messages:
        return ""
    matcher = new_matcher(LLTokenizer("byte"), grammar)
    for _ in range(_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            break
        matcher.consume_token(_likely(mask))
    return str(matcher.get_error()) if matcher.is_error() else ""


def _likely(mask: bytes) -> int:
    """Return an allowed byte, preferably not whitespace. Bit i of the mask belongs to byte i."""
    allowed = int.from_bytes(mask, "little")
    visible = allowed >> 33 << 33 or allowed
    return (visible & -visible).bit_length() - 1
