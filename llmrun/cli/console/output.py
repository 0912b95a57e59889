"""`out`: the one place that writes. stdout carries the answer and nothing else; the rest goes to stderr."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, TextIO

from llmrun.cli.console.columns import hanging
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
from llmrun.errors import LlmrunError

RED = "31"
YELLOW = "33"
DIM = "2"
MARK = "1;31"  # as grep marks what it has found

MarkedLine = Sequence[tuple[str, bool]]  # pieces of a line, each with whether it is highlighted

_COMMAND = re.compile(r"(?:llmrun|\S*/\S+) ")

_SHOW_AFTER_S = 0.15  # most waits are shorter, and a line that flashes is worse than none
_REDRAW_S = 0.05
_PLAIN_LINE_S = 10.0  # in a log file, one line is enough for a long wait


class Output:
    """Human output, or quiet: then stderr carries errors alone.

    A stderr that cannot be written is given up in silence: there is no one left to tell.
    """

    def __init__(self) -> None:
        self.quiet = False
        self.verbose = False
        self.color = "auto"
        self._answer: Flow | None = None  # of the answer that is open
        self._thinking: Flow | None = None
        self._thinking_ends_a_line = False
        self._live_width = 0  # columns of the living line that is on the screen
        self._waiting_since: float | None = None
        self._last_drawn = 0.0

    # The answer

    def answer(self, text: str) -> None:
        """Take a piece of the answer for stdout: a terminal shows it word by word and with its control characters made
        visible; a pipe or a file gets whole lines. Raises BrokenPipeError as soon as nobody reads the pipe."""
        if not text:
            return
        self.clear_progress()
        if self._answer is None:
            self._answer = flow_to(sys.stdout)
        if passed := self._answer.passed(visible(text) if is_terminal(sys.stdout) else text):
            self._write_stdout(passed)
        elif not is_terminal(sys.stdout) and reader_is_gone(sys.stdout):
            raise BrokenPipeError

    def end_answer(self) -> None:
        """The final newline, which every answer has, an empty one too."""
        self._write_stdout(self._answer_rest() + "\n")

    def _answer_rest(self) -> str:
        """Close the answer, and return what of it is not written yet."""
        rest = self._answer.rest() if self._answer else ""
        self._answer = None
        return rest

    def _cut_answer(self) -> None:
        """Write what is held of an answer that does not go on, and leave its last row on a terminal."""
        if self._answer is not None:
            self._write_stdout(self._answer_rest() + ("\n" if is_terminal(sys.stdout) else ""))

    def thinking(self, text: str) -> None:
        """Write a piece of what the model thinks to stderr: dim, or, where there is no color, after a line that says
        what it is. It ends, with an empty line, when something else is written."""
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
        """Say that the text of the answer so far was none."""
        self._cut_answer()
        self.note("the text so far was thinking: the model has ended what it had not begun")

    def json(self, body: Mapping[str, Any]) -> None:
        """The whole answer as one line of JSON."""
        self.clear_progress()
        self._write_stdout(visible_json(json.dumps(body, ensure_ascii=False)) + "\n")

    def json_list(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """A JSON array, an element a line."""
        self.clear_progress()
        lines = ",\n".join(visible_json(json.dumps(body, ensure_ascii=False)) for body in bodies)
        self._write_stdout(f"[\n{lines}\n]\n" if bodies else "[]\n")

    def lines(self, lines: Iterable[str], *, dim: bool = False) -> None:
        """A report on stdout, line by line, with control characters shown wherever it goes."""
        self.clear_progress()
        begin, end = ("\x1b[2m", "\x1b[0m") if dim and can_color(sys.stdout, self.color) else ("", "")
        self._write_stdout("".join(f"{begin}{visible_line(line)}{end}\n" for line in lines))

    def lines_marked(self, lines: Iterable[MarkedLine]) -> None:
        """A report on stdout, with some of its text highlighted where there is color."""
        self.clear_progress()
        self._write_stdout("".join(_marked(line, can_color(sys.stdout, self.color)) for line in lines))

    def reply_marked(self, lines: Iterable[MarkedLine]) -> None:
        """What the user asked the program itself, with some of it highlighted where there is color."""
        self._write_stderr("".join(_marked(line, can_color(sys.stderr, self.color)) for line in lines))

    def picture(self, renderable: Any) -> None:
        """Something that Rich draws, on stdout. Its texts must have passed `visible_line`."""
        self.clear_progress()
        drawn = io.StringIO()  # Rich ends the process itself over a closed pipe, with another exit code
        self._console(drawn).print(renderable)
        self._write_stdout(drawn.getvalue())

    def width_of(self, renderable: Any) -> int:
        """Columns that it would take if there were enough."""
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

    # The rest

    def note(self, text: str) -> None:
        """One line that a careful user wants to know."""
        if not self.quiet:
            self._line("note:", text, YELLOW)

    def detail(self, text: str) -> None:
        """One line that only --verbose shows."""
        if self.verbose and not self.quiet:
            self._write_stderr(self._styled(visible_line(text), DIM) + "\n")

    def fields(self, fields: Sequence[str]) -> None:
        """Short facts on one line, on more when the terminal is too narrow for one."""
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
        """What the user asked the program itself, not the model: shown in quiet mode too."""
        self._write_stderr("".join(f"{row}\n" for line in lines for row in _rows(visible(line))))

    def sequence(self, text: str) -> None:
        """Write a control sequence of our own to the terminal, on whichever stream it is."""
        if can_move_cursor(sys.stderr):
            self._write_stderr(text)
        else:
            self._write_stdout(text)

    def prompt(self, text: str) -> None:
        """What stands before the line that the user types, on a terminal that can do no more."""
        self._write_stderr(visible(text))

    def error(self, sentence: str, hint: str = "") -> None:
        """`error: ...`, then what to try. Shown in quiet mode too."""
        self._cut_answer()
        self._line("error:", sentence, RED)
        words, _, command = hint.rpartition(": ")
        if _COMMAND.match(command) and width(hint) + len("hint: ") > room(sys.stderr):
            self._line("hint:", f"{words}:", DIM)  # a command stays whole, so that it can be copied
            self._write_stderr(f"  {visible_line(command)}\n")
        elif hint:
            self._line("hint:", hint, DIM)

    def trace(self, text: str) -> None:
        """Where an error came from, for --debug: lines of ours, and texts of anybody's."""
        self._write_stderr(visible(text))

    def progress(self, text: str) -> None:
        """What is going on now: a line that lives until something else is written. In a log, a line now and then."""
        if self.quiet or self._thinking is not None:
            return
        now = time.monotonic()
        live = can_move_cursor(sys.stderr)
        if self._waiting_since is None:
            self._waiting_since = self._last_drawn = now
            return
        if not live and now - self._last_drawn >= _PLAIN_LINE_S:
            self._last_drawn = now
            self._write(f"{visible_line(text)}\n")
        elif live and now - self._waiting_since >= _SHOW_AFTER_S and now - self._last_drawn >= _REDRAW_S:
            self._last_drawn = now
            line = shortened(visible_line(text), columns() - 1)
            rest = " " * (self._live_width - width(line))
            self._live_width = width(line)
            self._write("\r" + self._styled(line, DIM) + rest)

    def clear_progress(self) -> None:
        """End what the model thinks, or erase the living line. Blanks rather than an escape sequence: that works on
        every terminal."""
        self._waiting_since = None
        if self._thinking is not None:
            rest, self._thinking = self._thinking.rest(), None
            self._write_dim(rest)
            newline = "" if self._thinking_ends_a_line else "\n"
            self._write(newline + ("\n" if can_color(sys.stderr, self.color) else "done thinking\n\n"))
        if self._live_width:
            blanks = min(self._live_width + len("^C"), columns() - 1)  # what the terminal echoes goes too
            self._live_width = 0
            self._write("\r" + " " * blanks + "\r")

    # How

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
    """The rows that a line takes on the terminal, wrapped at blanks; elsewhere the line stays whole."""
    return hanging(line, room(sys.stderr))


def _marked(line: MarkedLine, color: bool) -> str:
    shown = ((visible_line(text), marked and color) for text, marked in line)
    return "".join(f"\x1b[{MARK}m{text}\x1b[0m" if marked else text for text, marked in shown) + "\n"


class Stdout(io.TextIOWrapper):
    """Standard output, in UTF-8 whatever the locale says, that fails in our words.

    BrokenPipeError stays what it is; any other OSError becomes LlmrunError, which nobody can take for trouble with a
    file: an OSError of a stream carries no name.
    """

    def __init__(self, buffer: BinaryIO) -> None:
        # A path may hold bytes that are not UTF-8; "\udcff" is also how JSON writes such a byte.
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
            silence(self)  # or Python would try again at exit, and complain in its own words
            raise LlmrunError(f"standard output: cannot be written: {error.strerror}") from error


def silence(stream: TextIO) -> None:
    """Let everything written to a stream from now on, its unwritten buffer included, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


out = Output()
