"""Creates llguidance's matchers, whose parsers have limits of their own.

The limits count the parser's work, not seconds, so whether an answer exceeds them does not depend on the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# The maximum number of Earley items per row. Ambiguous grammars need many, and the work per token grows with their
# square or cube. With `s: s s s | s s | "a" | "b"`, a mask takes up to 13 ms with 500 items and up to 850 ms with
# llguidance's default of 2,000.
_MOST_ITEMS = 500


def parser_limits() -> LLParserLimits:
    return LLParserLimits(max_items_in_row=_MOST_ITEMS, verbose_errors=False)


def new_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar for a vocabulary. The matcher is in an error state if the grammar is refused."""
    return LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
