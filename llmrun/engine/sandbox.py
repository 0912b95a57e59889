"""The only way to run a chat template: in a closed and metered sandbox, set up as `transformers` sets up its own.

A template comes with the model file, so it is a stranger's program: it may not reach Python, run for ever or eat the
memory. What is refused is a TemplateRefused of one line, whatever was raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from time import thread_time
from types import CodeType
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import TemplateSyntaxError

from llmrun.engine.templating.budget import Budget, OverBudget
from llmrun.engine.templating.environment import ChatSandbox
from llmrun.engine.templating.globals import ConversationRefused
from llmrun.engine.templating.mentions import Mentions, mentions
from llmrun.engine.templating.source import compile_source
from llmrun.engine.templating.values import measure
from llmrun.errors import TemplateRefused

LONGEST_OUTPUT = 1 << 24  # bytes: some 4 million tokens
_FILENAME = "<template>"
_COMPILER = ChatSandbox()


def render(source: str, name: str, variables: Mapping[str, Any]) -> str:
    """The text a template makes. `name` says in errors which template it was. Raises TemplateRefused.

    Whatever the template is, this ends within 2 s and 256 MB, and more only in proportion to what is in `variables`.
    """
    start = thread_time()
    try:
        size = measure([*variables.values()], None)
    except OverBudget as error:
        raise TemplateRefused(f"conversation is too large for a chat template: {name}: {error}") from error
    given = size.bytes(around=0)
    sandbox = template = None
    try:
        sandbox = _COMPILER.for_rendering(Budget(size.nodes, given, start))
        template = Template.from_code(sandbox, _compiled(source), sandbox.globals)
        return _output(template, variables, LONGEST_OUTPUT + 8 * given)
    except ConversationRefused as refusal:
        raise TemplateRefused(f"chat template refuses this conversation: {name}: {_one_line(refusal)}") from refusal
    except OverBudget as error:
        raise TemplateRefused(f"chat template refused: {name}: {_place(error, template)}{_one_line(error)}") from error
    except Exception as error:
        raise TemplateRefused(f"chat template failed: {name}: {_place(error, template)}{_one_line(error)}") from error
    finally:
        if template is not None:
            template.root_render_func.__globals__.clear()
        if sandbox is not None:
            sandbox.close()


def thinking_mentions(source: str) -> Mentions:
    """What a template's source says of thinking, without running it. Raises TemplateRefused for what is no template."""
    try:
        return mentions(_COMPILER, source)
    except Exception as error:
        raise TemplateRefused(f"chat template failed: {_place(error, None)}{_one_line(error)}") from error


@lru_cache(maxsize=8)
def _compiled(source: str) -> CodeType:
    return compile_source(_COMPILER, source)


def _output(template: Template, variables: Mapping[str, Any], longest: int) -> str:
    pieces: list[str] = []
    length = 0
    wide = 1
    for piece in template.root_render_func(template.new_context({**variables})):
        pieces.append(piece)
        length += len(piece)
        if not piece.isascii():
            wide = 4
        if length * wide > longest:
            raise OverBudget(f"the text it makes has more than {longest:,} bytes")
    return "".join(pieces)


def _place(error: Exception, template: Template | None) -> str:
    """ "line 7: ", when it is known."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else getattr(error, "line", None)
    trace = error.__traceback__
    while trace is not None and template is not None:
        if trace.tb_frame.f_code.co_filename == _FILENAME:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return f"line {line}: " if line else ""


def _one_line(error: Exception) -> str:
    words = str(error.msg if isinstance(error, SyntaxError) else error)[:10_000]
    text = " ".join(words.split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
