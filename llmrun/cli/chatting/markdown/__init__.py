"""An answer on a terminal: Markdown, shown while it streams.

parse    the text's blocks, by markdown-it
inline   what stands inside a paragraph
code     colors for code
table    tables
layout   blocks as rows, and which of them no further text can change
rows     what a row is, where text is broken, and the one door to the screen
live     the rows that are drawn again
view     the answer as it streams
"""

from llmrun.cli.chatting.markdown.view import MarkdownView

__all__ = ["MarkdownView"]
