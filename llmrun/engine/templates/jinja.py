"""Jinja2's sandbox, configured as in `transformers`. Only code in the template process imports this module."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from time import thread_time
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FILENAME = "<template>"  # Jinja2's file name for templates that are not loaded from a file
_LONGEST_WORDS = 10_000  # maximum length of an error message, in characters


class ConversationRefused(Exception):
    """The template rejected the conversation by calling `raise_exception`."""


class TemplateFailed(Exception):
    """The source is not a valid template, or rendering failed. The message contains the line number and the reason."""


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the model's output for training. The body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja2 declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(source: str, variables: Mapping[str, Any], now: datetime) -> str:
    """Render a template. `now` is the time for `strftime_now`.

    Raises ConversationRefused, TemplateFailed, MemoryError and RecursionError.
    """
    template = None
    try:
        template = _compiled(source)
        context = template.new_context({"strftime_now": now.strftime, **variables})
        return "".join(template.root_render_func(context))
    except (ConversationRefused, MemoryError, RecursionError):
        raise
    except Exception as error:
        raise TemplateFailed(_place(error, template) + _words(error)) from error


def parse(source: str) -> nodes.Template:
    """Return the syntax tree of a template. Raises TemplateFailed, MemoryError and RecursionError."""
    try:
        return _ENVIRONMENT.parse(source)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        raise TemplateFailed(_place(error, None) + _words(error)) from error


class Tries:
    """A renderer of test conversations, which stops when the time limit is reached."""

    def __init__(self, source: str, limit_s: float) -> None:
        self._source = source
        self._deadline = thread_time() + limit_s

    def text(self, messages: Sequence[Mapping[str, object]], **variables: object) -> str | None:
        """Render a conversation. Returns None if the template rejects the conversation or no time is left."""
        if thread_time() > self._deadline:
            return None
        given = {"bos_token": "", "eos_token": "", "tools": None, "add_generation_prompt": True}
        try:
            return render(self._source, {**given, **variables, "messages": [*messages]}, datetime.now())
        except (ConversationRefused, TemplateFailed, RecursionError):
            return None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize to JSON in the same way as the `tojson` filter in `transformers`.

    Jinja2's own filter would escape `<`, `>`, `&` and `'` for HTML.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise ConversationRefused(str(message)[:_LONGEST_WORDS])


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


_ENVIRONMENT = _environment()


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    return _ENVIRONMENT.from_string(source)


def _place(error: Exception, template: Template | None) -> str:
    """Return a prefix such as "line 7: ", or an empty string if the line is unknown."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else None
    trace = error.__traceback__
    while trace is not None and template is not None:
        if trace.tb_frame.f_code.co_filename == _FILENAME:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return f"line {line}: " if line else ""


def _words(error: Exception) -> str:
    words = str(error.msg if isinstance(error, SyntaxError) else error)
    return words[:_LONGEST_WORDS] or type(error).__name__
