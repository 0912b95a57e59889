"""Renders Markdown answers on a terminal while they stream.

parse     splits an answer into blocks and tells which are finished
tokens    prepares markdown-it's tokens for Rich
elements  defines the look of each kind of block, which Rich draws
rows      wraps, cuts and encodes rows of the terminal; all output passes through it
pending   keeps track of the unfinished blocks
live      redraws the rows that still change
view      shows the answer as it streams
"""

from llmrun.cli.chatting.markdown.view import MarkdownView

__all__ = ["MarkdownView"]
