"""Renders Markdown answers on a terminal while they stream.

parse     splits an answer into blocks and finds the first unfinished block
elements  prepares markdown-it's tokens for Rich, and defines how Rich draws each kind of block
rows      wraps text into terminal rows, splits and encodes these rows, and makes untrusted text safe
pending   tracks the unfinished blocks and what is on the screen
view      shows the answer as it streams, and redraws the rows that may still change
"""

from llmrun.cli.chatting.markdown.view import MarkdownView

__all__ = ["MarkdownView"]
