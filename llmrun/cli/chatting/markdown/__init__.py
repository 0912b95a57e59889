"""An answer on a terminal: Markdown, shown while it streams.

parse     splits an answer into blocks, and says which are finished
tokens    prepares markdown-it's tokens for Rich
elements  what a block looks like: Rich draws it
rows      rows of the terminal: wrapping, cutting, and the only way to the screen
pending   the unfinished blocks
live      the rows that are redrawn
view      shows the answer as it streams
"""

from llmrun.cli.chatting.markdown.view import MarkdownView

__all__ = ["MarkdownView"]
