"""The object `out`, which writes all output. The answer goes to stdout, and everything else to stderr.

Plain-text tables and wrapped text are formatted without Rich, because importing Rich takes 60 ms.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, TextIO

from llmrun.base.errors import LlmrunError
from llmrun.cli.console.flow import Flow, atomic_writes, flow_to, reader_is_gone
from llmrun.cli.console.terminal import (
    can_color,
    can_move_cursor,
    columns,
    is_terminal,
    room,
    shortened,
    visible,
    visible_json,
    visible_line,
    width,
)

_LEAST_ROOM = 20  # minimum number of columns for text, even on narrower terminals


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns, two spaces apart. Make control characters visible.

    right  indices of the right-aligned columns
    """
    shown = [[visible_line(cell) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(_padded(row, widths, right)).rstrip() for row in shown]


def narrowed(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str], droppable: Sequence[Collection[str]]
) -> list[str]:
    """Format rows like `aligned`, with a header line. Drop columns if the terminal is too narrow.

    right      headings of the right-aligned columns
    droppable  groups of column headings; the columns of one group at a time are dropped until the lines fit
    """
    gone: set[str] = set()
    for group in ((), *droppable):
        gone |= set(group)
        kept = [number for number, head in enumerate(heads) if head not in gone]
        table = [[row[number] for number in kept] for row in (heads, *rows)]
        lines = aligned(table, [place for place, number in enumerate(kept) if heads[number] in right])
        if not is_terminal(sys.stdout) or max(map(width, lines)) < columns():
            break
    return lines


def beside(label: str, text: str, most: int) -> list[str]:
    """Return a label followed by text, as lines of at most `most` columns with a hanging indent."""
    left = width(label)
    first, *rest = wrapped(text, most - left)
    return [label + first, *(" " * left + line for line in rest)]


def hanging(line: str, most: int) -> list[str]:
    """Wrap a line at spaces. Align the second and later rows with the text after the line's indentation and label.

    A label is a few words that are followed by two spaces.
    """
    if width(line) <= most:
        return [line]
    label = re.match(r" {0,16}(?:\S.{0,20}? {2,}(?=\S))?", line)
    assert label is not None  # the pattern matches any line, because both of its parts are optional
    return beside(label[0], line[label.end() :], most)


def wrapped(text: str, most: int) -> list[str]:
    """Wrap text at spaces to lines of at most `most` columns. Words longer than a line are split.

    The standard `textwrap` counts characters instead of columns, but Chinese, Japanese and Korean characters take up
    two columns each.
    """
    most = max(most, _LEAST_ROOM)
    lines = [""]
    for word in re.findall(" *[^ ]+", visible_line(text)):  # each match is a word with the spaces before it
        if width(lines[-1]) + width(word) <= most:
            lines[-1] += word
            continue
        lines += _pieces(word.lstrip(" "), most)
    return lines if lines[0] or len(lines) == 1 else lines[1:]


def _pieces(word: str, most: int) -> Iterator[str]:
    while word:
        piece = shortened(word, most)
        yield piece
        word = word[len(piece) :]


def _padded(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    cells = []
    for number, (cell, cell_width) in enumerate(zip(row, widths, strict=True)):
        blanks = " " * (cell_width - width(cell))
        cells.append(blanks + cell if number in right else cell + blanks)
    return cells


RED = "31"
YELLOW = "33"
DIM = "2"
MARK = "1;31"  # the color that grep uses for matches

MarkedLine = Sequence[tuple[str, bool]]  # the pieces of a line; True means highlighted

_COMMAND = re.compile(r"(?:llmrun|\S*/\S+) ")

_SHOW_AFTER_S = 0.15  # delay before the progress line appears, because a brief flash is distracting
_REDRAW_S = 0.05
_PLAIN_LINE_S = 10.0  # interval between progress lines in a log file


class Output:
    """The program's output. In quiet mode, only errors and replies are written to stderr.

    If a write to stderr fails, later output to stderr is discarded, because the failure cannot be reported anywhere.
    """

    def __init__(self) -> None:
        self.quiet = False
        self.verbose = False
        self.stats = False  # True to end answers with all statistics
        self.color = "auto"
        self._answer: Flow | None = None  # the flow of an unfinished answer
        self._thinking: Flow | None = None
        self._thinking_ends_a_line = False
        self._live_width = 0  # width in columns of the progress line on the screen
        self._waiting_since: float | None = None
        self._last_drawn = 0.0

    # Methods for the answer

    def answer(self, text: str) -> None:
        """Write a piece of the answer to stdout.

        On a terminal, whole words are written, with control characters made visible. In a pipe or a file, whole lines
        are written. Raises BrokenPipeError as soon as the reader has closed the pipe.
        """
        if not text:
            return
        self.clear_progress()
        if self._answer is None:
            self._answer = flow_to(sys.stdout)
        if passed := self._answer.passed(visible(text) if is_terminal(sys.stdout) else text):
            self._write_stdout(passed)
        elif not is_terminal(sys.stdout) and reader_is_gone(sys.stdout):
            raise BrokenPipeError

    def end_answer(self, end: str = "\n") -> None:
        """Write the rest of the answer and `end`. Even after an empty answer, `end` is written."""
        self._write_stdout(self._answer_rest() + end)

    def _answer_rest(self) -> str:
        """Close the answer and return the text that has not been written."""
        rest = self._answer.rest() if self._answer else ""
        self._answer = None
        return rest

    def _cut_answer(self) -> None:
        """Write the buffered text of an interrupted answer. On a terminal, also end the last row."""
        if self._answer is not None:
            self._write_stdout(self._answer_rest() + ("\n" if is_terminal(sys.stdout) else ""))

    def thinking(self, text: str) -> None:
        """Write a piece of the model's thinking to stderr.

        The text is dim or, if there is no color, preceded by the line "thinking:". An empty line separates the thinking
        from the output that follows.
        """
        if self.quiet or not text:
            return
        if self._thinking is None:
            self.clear_progress()
            self._thinking = flow_to(sys.stderr)
            if not can_color(sys.stderr, self.color):
                self._write("thinking:\n")
        self._thinking_ends_a_line = text.endswith("\n")
        self._write_dim(self._thinking.passed(visible(text) if is_terminal(sys.stderr) else text))

    def answer_was_thinking(self) -> None:
        """Print a note that the text so far was thinking instead of the answer."""
        self._cut_answer()
        self.note("the text so far was thinking: the model closed a thinking block it never opened")

    def json(self, body: Mapping[str, Any]) -> None:
        """Write a JSON object as one line on stdout."""
        self.clear_progress()
        self._write_stdout(visible_json(json.dumps(body, ensure_ascii=False)) + "\n")

    def json_list(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Write a JSON array to stdout, one element per line."""
        self.clear_progress()
        lines = ",\n".join(visible_json(json.dumps(body, ensure_ascii=False)) for body in bodies)
        self._write_stdout(f"[\n{lines}\n]\n" if bodies else "[]\n")

    def json_lines(self, data: bytes) -> None:
        """Write JSON Lines to stdout. Raises BrokenPipeError, even without data, if the reader has closed the pipe."""
        if not data and not is_terminal(sys.stdout) and reader_is_gone(sys.stdout):
            raise BrokenPipeError
        if data:
            self.clear_progress()
            self._write_stdout(visible_json(data.decode()) if is_terminal(sys.stdout) else data.decode())

    def lines(self, lines: Iterable[str], *, dim: bool = False) -> None:
        """Write the lines of a report to stdout. Always make control characters visible."""
        self.clear_progress()
        begin, end = ("\x1b[2m", "\x1b[0m") if dim and can_color(sys.stdout, self.color) else ("", "")
        self._write_stdout("".join(f"{begin}{visible_line(line)}{end}\n" for line in lines))

    def lines_marked(self, lines: Iterable[MarkedLine]) -> None:
        """Write the lines of a report to stdout, with the marked text highlighted if there is color."""
        self.clear_progress()
        self._write_stdout("".join(_marked(line, can_color(sys.stdout, self.color)) for line in lines))

    def reply_marked(self, lines: Iterable[MarkedLine]) -> None:
        """Write a reply like `reply`, with the marked text highlighted if there is color."""
        self._write_stderr("".join(_marked(line, can_color(sys.stderr, self.color)) for line in lines))

    def picture(self, renderable: Any) -> None:
        """Write a Rich renderable to stdout. The text must have passed through `visible_line`."""
        self.clear_progress()
        drawn = io.StringIO()  # if the pipe is closed, Rich would exit the process with a different exit code
        self._console(drawn).print(renderable)
        self._write_stdout(drawn.getvalue())

    def width_of(self, renderable: Any) -> int:
        """Return the number of columns that a Rich renderable needs."""
        console = self._console(io.StringIO())
        return int(console.measure(renderable, options=console.options.update(width=10_000)).maximum)

    def _console(self, file: TextIO) -> Any:
        from rich.console import Console

        return Console(
            file=file,
            width=columns(),
            force_terminal=can_color(sys.stdout, self.color),
            no_color=not can_color(sys.stdout, self.color),
            markup=False,
            highlight=False,
            emoji=False,
            legacy_windows=False,
        )

    # Methods for all other output

    def note(self, text: str) -> None:
        """Write a note, which is one line that the user should read."""
        if not self.quiet:
            self._line("note:", text, YELLOW)

    def detail(self, text: str) -> None:
        """Write a line of details, which is shown only with --verbose."""
        if self.verbose and not self.quiet:
            self._write_stderr(self._styled(visible_line(text), DIM) + "\n")

    def fields(self, fields: Sequence[str]) -> None:
        """Write short pieces of information on one line, or on several lines if the terminal is narrow."""
        if self.quiet:
            return
        limit = room(sys.stderr)
        lines: list[str] = []
        for field in map(visible_line, fields):
            if lines and width(lines[-1]) + width(field) + 2 <= limit:
                lines[-1] += f"  {field}"
            else:
                lines.append(field)
        self._write_stderr("".join(self._styled(line, DIM) + "\n" for line in lines))

    def reply(self, lines: Iterable[str]) -> None:
        """Write the reply to a user's request, such as /help in a chat. Replies are shown even in quiet mode."""
        self._write_stderr("".join(f"{row}\n" for line in lines for row in _rows(visible(line))))

    def sequence(self, text: str) -> None:
        """Write a control sequence to the terminal, through stderr if possible and stdout otherwise."""
        if can_move_cursor(sys.stderr):
            self._write_stderr(text)
        else:
            self._write_stdout(text)

    def prompt(self, text: str) -> None:
        """Write the input prompt on a basic terminal."""
        self._write_stderr(visible(text))

    def error(self, sentence: str, hint: str = "") -> None:
        """Write `error: ...` and a hint about what to try. Errors and hints are shown even in quiet mode."""
        self._cut_answer()
        self._line("error:", sentence, RED)
        words, _, command = hint.rpartition(": ")
        if words and _COMMAND.match(command) and width(hint) + len("hint: ") > room(sys.stderr):
            self._line("hint:", f"{words}:", DIM)  # keep commands on one line, so that they can be copied
            self._write_stderr(f"  {visible_line(command)}\n")
        elif hint:
            self._line("hint:", hint, DIM)

    def trace(self, text: str) -> None:
        """Write an error's traceback, for --debug. Make control characters visible."""
        self._write_stderr(visible(text))

    def progress(self, text: str, *, at_once: bool = False) -> None:
        """Show what the program is doing, on a line that the next output replaces.

        In a log file, a new line is written every 10 s instead.

        at_once  True if the line must appear even if the wait turns out to be short
        """
        if self.quiet or self._thinking is not None:
            return
        now = time.monotonic()
        live = can_move_cursor(sys.stderr)
        if self._waiting_since is None:
            self._waiting_since = self._last_drawn = now
        if not live and now - self._last_drawn >= _PLAIN_LINE_S:
            self._last_drawn = now
            self._write(f"{visible_line(text)}\n")
        elif live and (at_once or (now - self._waiting_since >= _SHOW_AFTER_S and now - self._last_drawn >= _REDRAW_S)):
            self._last_drawn = now
            line = shortened(visible_line(text), columns() - 1)
            rest = " " * (self._live_width - width(line))
            self._live_width = width(line)
            self._write("\r" + self._styled(line, DIM) + rest)

    def clear_progress(self) -> None:
        """End the display of thinking, and erase the progress line if one is shown.

        The line is overwritten with spaces, because not every terminal supports escape sequences.
        """
        self._waiting_since = None
        if self._thinking is not None:
            rest, self._thinking = self._thinking.rest(), None
            self._write_dim(rest)
            newline = "" if self._thinking_ends_a_line else "\n"
            self._write(newline + ("\n" if can_color(sys.stderr, self.color) else "done thinking\n\n"))
        if self._live_width:
            blanks = min(self._live_width + len("^C"), columns() - 1)  # the spaces also erase the echo of Ctrl-C
            self._live_width = 0
            self._write("\r" + " " * blanks + "\r")

    # Helpers

    def _line(self, label: str, text: str, style: str) -> None:
        first, *rest = _rows(f"{label} {visible_line(text)}")
        styled = self._styled(label, style) + first.removeprefix(label)
        self._write_stderr("".join(f"{row}\n" for row in (styled, *rest)))

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if can_color(sys.stderr, self.color) else text

    def _write_stderr(self, text: str) -> None:
        self.clear_progress()
        self._write(text)

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            silence(sys.stderr)

    def _write_dim(self, text: str) -> None:
        if text:
            self._write(self._styled(text, DIM))

    def _write_stdout(self, text: str) -> None:
        for piece in [text] if is_terminal(sys.stdout) else atomic_writes(text):
            sys.stdout.write(piece)
            sys.stdout.flush()


def _rows(line: str) -> list[str]:
    """Wrap a line at spaces into rows for the terminal. If stderr is not a terminal, return the line unchanged."""
    return hanging(line, room(sys.stderr))


def _marked(line: MarkedLine, color: bool) -> str:
    shown = ((visible_line(text), marked and color) for text, marked in line)
    return "".join(f"\x1b[{MARK}m{text}\x1b[0m" if marked else text for text, marked in shown) + "\n"


class Stdout(io.TextIOWrapper):
    """Standard output in UTF-8 with clear error messages.

    Every OSError except BrokenPipeError is converted to an LlmrunError that names the stream. Without the name, the
    error could be mistaken for a problem with a file.
    """

    def __init__(self, buffer: BinaryIO) -> None:
        # Bytes in a path that are not UTF-8 are written as in JSON, such as "\udcff" for byte 0xff.
        super().__init__(buffer, encoding="utf-8", errors="backslashreplace", newline="")

    def write(self, text: str) -> int:
        with self._in_our_words():
            return super().write(text)

    def flush(self) -> None:
        with self._in_our_words():
            super().flush()

    @contextmanager
    def _in_our_words(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            silence(self)  # otherwise Python would flush again at exit and print its own error
            raise LlmrunError(f"cannot write to standard output: {error.strerror}") from error


def silence(stream: TextIO) -> None:
    """Discard everything that is written to a stream from now on, including its unflushed buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


out = Output()
