"""Formats help pages. `--help` shows what most users need, and `--help-all` shows everything under plain headings.

Each option declares its heading as `rich_help_panel`, which Typer would pass to Rich, whose import takes 64 ms. Options
without a heading are those that most users need. `--help` shows only these options if the whole page does not fit
on a screen.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llmrun.cli.console.output import wrapped

ARGUMENTS, OPTIONS = COMMON = ("Arguments", "Options")

_SCREEN = 29  # lines of a page that fits on a terminal of 30 lines, above the next prompt
_EXAMPLES = 2  # minimum number of examples, if the command has as many
_FRAME = 3  # lines: the heading of the examples, the empty line after them, and the ending
_WIDEST = 100  # columns
_NARROW = 50  # columns; narrower pages have no columns for names and explanations


class Section(NamedTuple):
    """A heading and its rows, each with a term and its explanation. Terms without explanation are paragraphs."""

    heading: str
    rows: Sequence[tuple[str, str]]


def sections(context: Any) -> list[Section]:
    """Return a command's arguments and options by heading. The last heading is that of --help-all, the last option."""
    found: dict[str, list[tuple[str, str]]] = {heading: [] for heading in COMMON}
    parameters = context.command.get_params(context)
    for parameter in parameters:
        if record := parameter.get_help_record(context):
            usual = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
            found.setdefault(parameter.rich_help_panel or usual, []).append(record)
    last = parameters[-1].rich_help_panel
    found[last] = found.pop(last)
    return [Section(heading, rows) for heading, rows in found.items() if rows]


def help_page(context: Any) -> str:
    """Return the page of `--help`: the whole page if it fits on a screen, otherwise what most users need."""
    whole = whole_page(context)
    if whole.count("\n") < _SCREEN:
        return whole
    command, found = context.command, sections(context)
    common = [section for section in found if section.heading in COMMON]
    hidden = sum(len(section.rows) for section in found if section not in common)
    summary = (command.help or "").partition("\n\n")[0]
    ending = command.where_the_rest_is(context, hidden)
    return _page(context, summary, [*command.listed(everything=False), *common], ending)


def whole_page(context: Any) -> str:
    """Return the page of `--help-all`."""
    command = context.command
    return _page(context, command.help or "", [*command.listed(everything=True), *sections(context)])


def _page(context: Any, text: str, shown: Sequence[Section], ending: str = "") -> str:
    """Return a page. A page with an `ending` leaves options out, and has only as many examples as fit."""
    # The last column stays empty, because some terminals wrap a line that fills it.
    width = min(shutil.get_terminal_size().columns, _WIDEST) - 1
    command = context.command
    usage = " ".join(command.collect_usage_pieces(context)).translate({ord("{"): None, ord("}"): None})
    first, *more = wrapped(f"Usage: {context.command_path} {usage}", width)
    blocks = [[first, *(f"    {line}" for line in more)]]
    blocks += [_indented(paragraph, 2, width) for paragraph in text.split("\n\n")]
    longest = max((len(term) for section in shown for term, words in section.rows if words), default=0)
    left = min(longest, width // 3)
    for section in shown:
        rows = [line for row in section.rows for line in _row(*row, left, width)]
        blocks.append([f"{section.heading}:", *rows])
    examples = (command.epilog or "").splitlines()
    if ending:
        used = sum(len(block) + 1 for block in blocks)
        short = [example for example in examples if len(example) + 2 <= width]
        examples = short[: max(_EXAMPLES, _SCREEN - used - _FRAME)]
    if examples:
        blocks.append(
            ["Examples:", *(f"  {example}" for example in examples)]
        )  # not wrapped, so that they can be copied
    if ending:
        blocks.append(_indented(ending, 0, width))
    return "\n\n".join("\n".join(block) for block in blocks)


def _row(term: str, words: str, left: int, width: int) -> Iterator[str]:
    """Yield the lines of a term and its explanation, in two columns if there is room. The first has `left` columns."""
    if not words:
        yield from _indented(term, 2, width)
    elif width < _NARROW:
        yield from (*_indented(term, 2, width), *_indented(words, 6, width))
    else:
        lines = list(_explained(words, width - left - 4))
        yield f"  {term:{left}}  {lines.pop(0)}" if len(term) <= left else f"  {term}"
        yield from (f"{'':{left + 4}}{line}" for line in lines)


def _explained(words: str, room: int) -> Iterator[str]:
    """Yield the lines of an explanation. The default at its end, in brackets, moves to the next line as a whole."""
    text, _, default = words.partition("  [")
    *lines, last = wrapped(text, room)
    yield from lines
    if default and len(last) + len(default) + 3 > room:
        yield last
        yield from wrapped(f"[{default}", room)
    else:
        yield f"{last}  [{default}" if default else last


def _indented(text: str, by: int, width: int) -> list[str]:
    return [f"{'':{by}}{line}" for line in wrapped(" ".join(text.split()), width - by)]
