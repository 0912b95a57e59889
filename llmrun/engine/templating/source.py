"""A template's source: what is refused before it is parsed, and the Python code of what is not.

Jinja2's parser and code generator and Python's compiler recurse into what is nested, and take time in proportion to
the tokens, a little more with many assignments. Measured on 64 Ki characters of every construct: 20,000 tokens compile
in 0.45 s at worst (eighteen loops in loops, with names) and in 70 MB (names alone, as `[a,a,a,...]`). The longest real
template has 3,770 tokens and 17 thousand characters, brackets 4 deep, tags 12 deep and 56 tokens in a tag.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import TYPE_CHECKING

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser

from llmrun.engine.templating.budget import OverBudget
from llmrun.engine.templating.rewriting import Rewriter, check_tree
from llmrun.engine.templating.values import WIDEST_INTEGER

if TYPE_CHECKING:
    from jinja2.environment import Environment

LONGEST_SOURCE = 1 << 17  # characters
MOST_TOKENS = 20_000
DEEPEST_BRACKETS = 25  # each takes 15 Python frames of the parser; there are 1,000
DEEPEST_TAGS = 30  # each takes 5
MOST_IN_TAG = 20  # of `not not not ...` without a word between, and of `a if b else c if d else ...`
_OPENING = frozenset(("lparen", "lbracket", "lbrace"))
_CLOSING = frozenset(("rparen", "rbracket", "rbrace"))
_TAGS = frozenset(("autoescape", "block", "call", "filter", "for", "generation", "if", "macro", "set", "with"))


def compile_source(environment: Environment, source: str) -> CodeType:
    """Python code of a template. Raises OverBudget, or what Jinja2 and Python raise for what is no template."""
    if len(source) > LONGEST_SOURCE:
        raise OverBudget(f"its source has {len(source):,} characters, limit {LONGEST_SOURCE:,}")
    tree = environment.parse(source)
    check_tree(tree)
    Rewriter().visit(tree)
    return environment.compile(tree)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model said, for training. Here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TokenGuard(Extension):
    """Sees every token before the parser does."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        brackets = tags = signs = conditions = 0
        before = tag = ""
        for number, token in enumerate(stream):
            kind = token.type
            if number >= MOST_TOKENS:
                raise OverBudget(f"it has more than {MOST_TOKENS:,} tokens", token.lineno)
            if kind in _OPENING:
                brackets += 1
            elif kind in _CLOSING:
                brackets -= 1
            elif kind == "integer" and int(token.value).bit_length() > WIDEST_INTEGER:
                raise OverBudget(f"an integer of more than {WIDEST_INTEGER} bits", token.lineno)
            elif kind in ("block_begin", "variable_begin"):
                conditions = 0
                tag = ""
            elif kind == "assign" and tag == "set" and brackets == 0:  # `{% set a = b %}` has no end
                tags -= 1
                tag = ""
            if before == "block_begin" and kind == "name":
                tag = token.value
                tags += (tag in _TAGS) - tag.startswith("end")
            if kind in ("sub", "add") or (kind == "name" and token.value == "not"):
                signs += 1
            elif kind not in _OPENING:
                signs = 0
            conditions += kind == "name" and token.value == "else"
            if brackets > DEEPEST_BRACKETS or tags > DEEPEST_TAGS or max(signs, conditions) > MOST_IN_TAG:
                raise OverBudget("it is nested too deeply", token.lineno)
            before = kind
            yield token
