"""Renders Markdown answers on a terminal while they stream.

parse     splits an answer into blocks and finds the first one that is unfinished
tokens    prepares markdown-it's tokens for Rich
elements  defines how Rich draws each kind of block
rows      wraps text into terminal rows, splits and encodes these rows, and makes untrusted text safe
pending   tracks the unfinished blocks and what is on the screen
live      redraws the rows that may still change
view      shows the answer as it streams
"""

from llmrun.cli.chatting.markdown.view import MarkdownView

__all__ = ["MarkdownView"]
