"""Turns typed at a terminal, with prompt_toolkit: history, many lines, completion.

The terminal is never asked where its cursor is (CPR): the answer would come in among what is typed, and a terminal
that gives none would be told off by prompt_toolkit after two seconds. What needs to know (its toolbars) is not used.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer
from prompt_toolkit.completion import Completion as Suggestion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus, shift_selection_mode
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.controls import BufferControl
from prompt_toolkit.layout.dimension import Dimension, to_dimension
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.selection import SelectionState
from prompt_toolkit.styles import Style

from llmrun.cli.chatting.blocks import is_unfinished
from llmrun.cli.chatting.history import StoredHistory
from llmrun.cli.chatting.pastes import Pastes, ShownPastes
from llmrun.cli.chatting.screen import Completions, Meter
from llmrun.cli.chatting.typing_ahead import QuietKeyboard
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_color, is_terminal, visible_line
from llmrun.folders import data_folder

PROMPT = "> "
MOST_ROWS = 10  # of the screen that a text of many lines takes while it is edited
_NEARLY_FULL = 0.9
_METER_FROM = 40  # columns; a narrower terminal has no room for a meter
_DRAFT_HINT = "Enter sends it, an arrow key edits it"
_DRAFT_HINT_FROM = 60  # columns
_LEAVE_SELECTED = ("c-a", "c-e", "c-b", "c-f", "c-p", "c-n")  # besides the arrow keys, Home and End
_MENU_ROWS = 6

_STYLE = Style.from_dict(
    {
        "prompt": "bold",
        "paste": "ansicyan",
        "hint": "dim",
        "meter": "dim",
        "meter.full": "nodim ansiyellow",
        "completion-menu": "bg:default",
        "completion-menu.completion": "bg:default fg:default",
        "completion-menu.completion.current": "bg:default fg:default reverse",
        "completion-menu.meta.completion": "bg:default fg:default dim",
        "completion-menu.meta.completion.current": "bg:default fg:default dim reverse",
    }
)


class TerminalTurns:
    """Reads turns from a person at a terminal, see screen.Turns. From the first line to `close`, the keyboard is ours.

    completions  how the line at hand could go on
    """

    interactive = True

    def __init__(self, completions: Completions = lambda before: ()) -> None:
        self.completions = completions
        self._pastes = Pastes()
        self._meter = Meter("", 0, 0)
        self._leaving = False  # Ctrl-C was pressed on an empty line
        self._stream = stream = sys.stderr if is_terminal(sys.stderr) else sys.stdout
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", PROMPT)],
            prompt_continuation=" " * len(PROMPT),
            rprompt=self._shown_meter,
            placeholder=self._hint,
            history=StoredHistory(data_folder() / "history.jsonl"),
            key_bindings=self._keys(),
            completer=_Completer(lambda before: self.completions(before)),
            complete_while_typing=Condition(self._is_command),
            reserve_space_for_menu=_MENU_ROWS,
            input_processors=[ShownPastes(self._pastes)],
            search_ignore_case=True,
            enable_suspend=True,
            include_default_pygments_style=False,
            style=_STYLE,
            color_depth=ColorDepth.DEPTH_4_BIT if can_color(stream, out.color) else ColorDepth.DEPTH_1_BIT,
            output=_output(stream),
        )
        self._limit_rows()
        self._keyboard = QuietKeyboard(sys.stdin.fileno())
        self._keyboard.begin()

    def read(self, meter: Meter, draft: str = "") -> str | None:
        self._meter, self._leaving = meter, False
        self._pastes.clear()
        sys.stdout.flush()
        self._stream.write("\n")  # a blank row between what was said and what is asked next
        self._keyboard.paused = True
        try:
            text = self._session.prompt(default=self._pastes.folded(draft), pre_run=self._select_draft)
        except EOFError:
            return None
        finally:
            self._keyboard.paused = False
            self._keyboard.quiet()
        return self._typed(text)

    @contextmanager
    def answering(self) -> Iterator[None]:
        self._keyboard.quiet()
        if self._stopped_already():
            os.kill(os.getpid(), signal.SIGINT)
        yield

    @contextmanager
    def lent(self) -> Iterator[None]:
        self._keyboard.paused = True
        self._keyboard.restore()
        try:
            yield
        finally:
            self._keyboard.paused = False
            self._keyboard.quiet()

    def restore(self) -> None:
        self._keyboard.restore()

    def close(self) -> None:
        self._keyboard.end()

    def _stopped_already(self) -> bool:
        """Whether Ctrl-C was pressed right after Enter. The prompt takes tens of milliseconds to go away, and until
        then it is a key and no signal. What was typed before it is dropped, as a signal would have dropped it."""
        source = self._session.input
        waiting = get_typeahead(source) + source.read_keys()
        stops = [place for place, press in enumerate(waiting) if press.key == Keys.ControlC]
        store_typeahead(source, waiting[stops[-1] + 1 :] if stops else waiting)
        return bool(stops)

    def _typed(self, text: str) -> str:
        """What the user meant: pastes in full, and a byte that was no UTF-8 as the sign for it."""
        return self._pastes.unfolded(text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _select_draft(self) -> None:
        """Select the text that the line begins with: what is typed next replaces it, so that no command ever ends up
        behind it. Enter sends it, and moving the cursor keeps it for editing, as in a browser's address bar."""
        buffer = self._session.default_buffer
        if buffer.text:
            buffer.selection_state = SelectionState(original_cursor_position=0)
            buffer.selection_state.enter_shift_mode()

    # Keys

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus(DEFAULT_BUFFER)
        for handler, filtered, *names in (
            (self._enter, typing, "enter"),
            (self._new_line, typing, "c-j"),
            (self._new_line, typing, "escape", "enter"),
            (self._paste, typing, Keys.BracketedPaste),
            (self._open_paste, typing & Condition(self._behind_a_paste), "tab"),
            (self._clear, typing, "c-c"),
            (self._clear, typing, "<sigint>"),
            (self._delete_selected, typing & shift_selection_mode, "delete"),
            (self._unselect, typing & shift_selection_mode, "escape"),
        ):
            keys.add(*names, filter=filtered)(handler)
        for name in _LEAVE_SELECTED:
            keys.add(name, filter=typing & shift_selection_mode)(self._leave_selected)
        return keys

    def _enter(self, event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # takes the completion, and does not send it yet
            return
        buffer.exit_selection()
        if is_unfinished(buffer.text):
            buffer.newline(copy_margin=False)
        elif buffer.text.strip():
            self._session.history.append_string(self._typed(buffer.text))
            event.app.exit(result=buffer.text)

    def _new_line(self, event: KeyPressEvent) -> None:
        event.current_buffer.exit_selection()
        event.current_buffer.newline(copy_margin=False)

    def _paste(self, event: KeyPressEvent) -> None:
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        if event.current_buffer.selection_state:
            event.current_buffer.cut_selection()
        event.current_buffer.insert_text(self._pastes.folded(text))

    def _behind_a_paste(self) -> bool:
        before = self._session.default_buffer.document.char_before_cursor
        return bool(before) and self._pastes.about(before) is not None

    def _open_paste(self, event: KeyPressEvent) -> None:
        """Show a paste in full, to be edited."""
        buffer = event.current_buffer
        sign = buffer.delete_before_cursor()
        buffer.insert_text(self._pastes.unfolded(sign))

    def _delete_selected(self, event: KeyPressEvent) -> None:
        event.current_buffer.cut_selection()

    def _unselect(self, event: KeyPressEvent) -> None:
        event.current_buffer.exit_selection()

    def _leave_selected(self, event: KeyPressEvent) -> None:
        """Keep the selected text, and let the key do what it does without a selection."""
        event.current_buffer.exit_selection()
        event.key_processor.feed_multiple(event.key_sequence, first=True)

    def _clear(self, event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        self._leaving = not buffer.text
        buffer.reset()
        buffer.load_history_if_not_yet_loaded()

    # What is shown

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")

    def _hint(self) -> StyleAndTextTuples:
        return [("class:hint", "Ctrl-D or /exit leaves")] if self._leaving else []

    def _shown_meter(self) -> StyleAndTextTuples:
        app = get_app()
        if not app.is_done and self._session.default_buffer.selection_state:
            wide = app.output.get_size().columns >= _DRAFT_HINT_FROM
            return [("class:hint", _DRAFT_HINT)] if wide else []
        if app.is_done or not self._meter.context_used or app.output.get_size().columns < _METER_FROM:
            return []
        if not self._meter.context_size:
            return [("class:meter", f"{self._meter.context_used:,} tokens")]
        used = self._meter.context_used / self._meter.context_size
        style = "class:meter.full" if used >= _NEARLY_FULL else "class:meter"
        return [(style, f"{used:.0%} of {self._meter.context_size:,}")]

    def _limit_rows(self) -> None:
        """A text of many lines scrolls in a few rows, while it is edited and when it is sent."""
        edited = self._session.default_buffer
        window = next(
            window
            for window in self._session.layout.find_all_windows()
            if isinstance(window.content, BufferControl) and window.content.buffer is edited
        )
        reserved = window.height  # prompt_toolkit's: room for a menu of completions
        window.height = lambda: Dimension(min=to_dimension(reserved).min, max=MOST_ROWS)


class _Completer(Completer):
    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Suggestion]:
        for found in self._completions(document.text_before_cursor):
            yield Suggestion(
                found.text,
                start_position=-found.replaces,
                display=visible_line(found.text),
                display_meta=visible_line(found.about),
            )


def _output(stream: TextIO) -> Output:
    if sys.platform == "win32":
        return create_output(stream)
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = Vt100_Output.from_pty(stream, term=os.environ.get("TERM"), enable_bell=False)
    output.enable_cpr = False
    return output
