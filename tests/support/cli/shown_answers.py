"""Answers on an in-memory terminal, drawn piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.cli.answers.markdown.view import MarkdownView
from tests.support.cli.reflowing import ReflowingTerminal
from tests.support.cli.terminals import Terminal

PROSE = "The quick brown fox jumps over the lazy dog, and **boldly** so, with `code_in_it` and *no* regret at all. "
SAMPLE = """\
# A title

Some *emphasised* and **strong** text with `code`, a [link](https://example.com/a_b) and snake_case_names.
A second line of it, where 5 * 3 = 15.

- one item that is longer than a narrow terminal is wide
- two
  - nested
    1. deeper

10. ten
11. eleven
    ```python
    def hello(name):
        '''Say
        hello.'''
        return f"hello {name}"  # done
    ```

> A quote
> of two lines.

| Name | Value |
|:-----|------:|
| alpha | 1 |
| beta | 22 |

```
plain   code, with    blanks
```
---
日本語のテキストは空白がないので、どこでも改行できるはずです。 The end.
"""


class Answer:
    """An answer on a terminal. `pause` is the number of seconds between pieces; at one second, every piece is drawn."""

    def __init__(self, terminal: Terminal | ReflowingTerminal, *, color: bool = False, pause: float = 1.0) -> None:
        self._now = 0.0
        self._pause = pause
        self._view = MarkdownView(color=color, write=terminal.write, size=terminal.size, clock=lambda: self._now)

    def add(self, *pieces: str) -> None:
        for piece in pieces:
            self._now += self._pause
            self._view.text(piece)

    def end(self) -> None:
        self._view.end()


def shown(pieces: Sequence[str], *, columns: int = 100, lines: int = 30, color: bool = False) -> Terminal:
    """Show a complete answer on a new terminal, drawing every piece."""
    terminal = Terminal(columns, lines)
    answer = Answer(terminal, color=color)
    answer.add(*pieces)
    answer.end()
    return terminal


def rows(text: str, columns: int = 100) -> list[str]:
    return shown([text], columns=columns, color=True).rows()
