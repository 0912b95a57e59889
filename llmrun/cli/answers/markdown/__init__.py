"""Renders Markdown answers on a terminal while they stream.

parse     splits an answer into blocks and finds the first unfinished block
elements  prepares markdown-it's tokens for Rich, and defines how Rich draws each kind of block
rows      wraps text into terminal rows, splits and encodes these rows, and makes untrusted text safe
pending   tracks the unfinished blocks and what is on the screen
view      shows the answer as it streams, and redraws the rows that may still change
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from llmrun.cli.console.terminal import can_move_cursor

if TYPE_CHECKING:
    from llmrun.cli.answers.markdown.view import MarkdownView


def markdown_view() -> MarkdownView | None:
    """Return a view of answers, or None if stdout is not a terminal on which rows can be redrawn.

    Rich and the Markdown parser are imported only for a view, because the imports are slow.
    """
    if not can_move_cursor(sys.stdout):
        return None
    from llmrun.cli.answers.markdown.view import MarkdownView

    return MarkdownView()
