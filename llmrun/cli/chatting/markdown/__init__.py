"""An answer on a terminal: Markdown, shown while it streams.

parse     the answer's blocks, and which of them are finished
tokens    what is done to markdown-it's tokens before Rich sees them
elements  what a block looks like: Rich draws it
rows      rows of the terminal: wrapping, cutting, and the only way to the screen
pending   the blocks that are not finished
live      the rows that are drawn again
view      the answer as it streams
"""

from llmrun.cli.chatting.markdown.view import MarkdownView

__all__ = ["MarkdownView"]
