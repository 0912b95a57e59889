"""Reads turns from a terminal with prompt_toolkit, which provides history, multi-line editing and completion.

Cursor position requests (CPR) are disabled, because the terminal's reply could be mixed up with the user's input,
and because prompt_toolkit prints a warning if the terminal does not reply within two seconds. Features that need CPR,
such as toolbars, are not used.

All chats share one input history. Each line of the file is a JSON string, so multi-line input is one entry, and an
entry that was truncated because the disk was full does not damage the others. Only the user can read the file. Several
chats may append to the file at the same time. When the file reaches LARGEST bytes, its older half is dropped. If the
history cannot be read or written, the chat prints one note and continues without a stored history.

Hundreds of pasted lines would push everything else off the screen and fill the scrollback. In the edit buffer, a long
paste is therefore one private-use character, which is shown as a short label. The user can move over this character or
delete it like any other character.

The path of an image becomes one such character, too, when the user drops, pastes or types it (draft_images.py). Only
paths of existing files are opened. Tab shows the path again, which then stays text.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus, shift_selection_mode
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.formatted_text.base import OneStyleAndTextTuple
from prompt_toolkit.history import History
from prompt_toolkit.input.base import Input
from prompt_toolkit.input.defaults import create_input
from prompt_toolkit.input.posix_utils import PosixStdinReader
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.key_processor import KeyPress, KeyProcessor
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.controls import BufferControl
from prompt_toolkit.layout.dimension import Dimension, to_dimension
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.selection import SelectionState
from prompt_toolkit.styles import Style

from llmrun.base.errors import UsageError
from llmrun.base.folders import O_BINARY, data_folder
from llmrun.cli.answers.report import NEARLY_FULL
from llmrun.cli.arguments.images import dropped_images, is_image_file, read_image, typed_path, unescaped
from llmrun.cli.arguments.prompts import names_image
from llmrun.cli.chatting.draft_images import DraftImages, without_signs
from llmrun.cli.chatting.input_rows import WordWrappedControl
from llmrun.cli.chatting.plain import Completions, Meter, Turns, is_unfinished
from llmrun.cli.chatting.typing_ahead import QuietKeyboard, quiet_keyboard, screen
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_color, visible_line

LARGEST = 1 << 20  # maximum size of the history file in bytes
LONGEST = 1 << 16  # maximum bytes per entry, because longer entries would displace many other entries


class StoredHistory(History):
    """A prompt_toolkit history that is stored in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._told = False
        self._last = ""

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries, newest first."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._tell(error)
            return []
        entries = list(reversed(_entries(data)))
        self._last = entries[0] if entries else ""
        return entries

    def store_string(self, string: str) -> None:
        line = json.dumps(string).encode() + b"\n"
        if string == self._last or len(line) > LONGEST:
            return
        self._last = string
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._append(line)
        except (OSError, TimeoutError) as error:
            self._tell(error)

    def _append(self, line: bytes) -> None:
        from filelock import FileLock

        with FileLock(self._path.with_suffix(".lock"), timeout=1, mode=0o600):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | O_BINARY, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                if size:
                    os.lseek(descriptor, size - 1, os.SEEK_SET)
                    if os.read(descriptor, 1) != b"\n":  # the previous entry was truncated
                        line = b"\n" + line
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
            if size + len(line) > LARGEST:
                self._forget()

    def _forget(self) -> None:
        """Drop the older half of the file."""
        data = self._path.read_bytes()
        kept = data[data.index(b"\n", len(data) - LARGEST // 2) + 1 :]
        beside = self._path.with_suffix(".new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | O_BINARY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(kept)
        beside.replace(self._path)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            out.note(f"history: {self._path}: {error.strerror or error}: input will not be remembered")


def _entries(data: bytes) -> list[str]:
    """Return the strings in a history file, skipping invalid lines."""
    entries = []
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, str):
            entries.append(entry)
    return entries


MOST_LINES = 8
MOST_CHARACTERS = 1000
_FIRST, _LAST = 0x10_0000, 0x10_FFFD  # Unicode's Supplementary Private Use Area-B


class Pastes:
    """The long pastes in the prompt, each of which is represented by one placeholder character."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._foreign: set[str] = set()  # private-use characters in pasted text, which must not be used as placeholders

    def folded(self, text: str) -> str:
        """Return a placeholder character if the text is long, or the text itself if it is short."""
        foreign = {character for character in text if character >= chr(_FIRST)}
        short = text.count("\n") < MOST_LINES and len(text) <= MOST_CHARACTERS
        if short and not foreign & self._texts.keys():
            self._foreign |= foreign
            return text
        for code in range(_FIRST, _LAST):
            sign = chr(code)
            if sign not in self._texts and sign not in self._foreign and sign not in foreign:
                self._texts[sign] = text
                return sign
        return text

    def unfolded(self, text: str) -> str:
        """Return the text with each placeholder replaced by the paste it represents."""
        return "".join(self._texts.get(character, character) for character in text)

    def about(self, sign: str) -> str | None:
        """Return the label that is shown for a placeholder, or None for any other character."""
        text = self._texts.get(sign)
        if text is None:
            return None
        lines = text.count("\n") + 1
        return f"[{lines:,} lines pasted]" if lines > 1 else f"[{len(text):,} characters pasted]"

    def clear(self) -> None:
        self._texts.clear()
        self._foreign.clear()


class ShownPastes(Processor):
    """A prompt_toolkit processor that shows the label of each paste or image instead of its placeholder."""

    def __init__(self, pastes: Pastes, images: DraftImages) -> None:
        self._pastes = pastes
        self._images = images

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        document = transformation_input.document
        labels = {
            character: self._pastes.about(character) or self._images.label(character, document.text)
            for character in set(document.lines[transformation_input.lineno])
            if ord(character) >= _FIRST or self._images.is_image(character)
        }
        if not any(labels.values()):
            return Transformation(transformation_input.fragments)
        fragments: list[OneStyleAndTextTuple] = []
        columns = [0]  # the screen column at which each character of the line starts
        for style, character, *_ in explode_text_fragments(transformation_input.fragments):
            words = labels.get(character)
            fragments.append((style, character) if words is None else (f"{style} class:paste", words))
            columns.append(columns[-1] + len(fragments[-1][1]))

        def on_screen(position: int) -> int:
            return columns[position] if position < len(columns) else columns[-1] + position - len(columns) + 1

        def in_text(position: int) -> int:
            before = [at for at, column in enumerate(columns) if column <= position]
            return before[-1] + max(0, position - columns[-1])

        return Transformation(fragments, on_screen, in_text)


PROMPT = "> "
MOST_ROWS = 10  # maximum number of screen rows for long input
_METER_FROM = 40  # minimum number of columns for the meter
_DRAFT_HINT = "Enter sends it, an arrow key edits it"
_DRAFT_HINT_FROM = 60  # minimum number of columns for the hint
_DELETE_SELECTED = ("delete", "c-u", "c-k")
# The waiting time after Escape in seconds. The bytes of an Alt combination arrive together, but a person who presses
# Escape types the next key later.
_ESCAPE_S = 0.05
_SEQUENCE_S = 1.0  # waiting time within other key sequences, such as Ctrl-X Ctrl-U
_LEAVE_SELECTED = ("c-a", "c-e", "c-b", "c-f", "c-p", "c-n")  # these keys cancel a selection, like the arrow keys
_MENU_ROWS = 6
_COMMAND = re.compile(r"/\w+ ")  # a slash command with an argument; a path has a slash or a dot in its first word

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


class TerminalTurns(Turns):
    """Reads turns from a user at a terminal (see plain.Turns). Controls the keyboard until `close` is called.

    completions  a function that returns the completions for the text before the cursor
    keyboard     a keyboard on which `begin` has been called, and which may already contain buffered keys
    images       the images of drafts
    """

    interactive = True
    edits_drafts = True

    def __init__(
        self,
        completions: Completions = lambda before: (),
        keyboard: QuietKeyboard | None = None,
        images: DraftImages | None = None,
    ) -> None:
        self.completions = completions
        self._images = images or DraftImages()
        self._kept_as_text: set[str] = set()  # paths that Tab has turned back into text
        self._is_new_image = False  # True after Enter has turned a path into an image
        self._keyboard = keyboard or quiet_keyboard()
        self._pastes = Pastes()
        self._meter = Meter(0, 0)
        self._leaving = False  # True after Ctrl-C was pressed on an empty line
        self._stream = stream = screen()
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", PROMPT)],
            prompt_continuation=" " * len(PROMPT),
            rprompt=self._shown_meter,
            placeholder=self._hint,
            history=StoredHistory(data_folder("history.jsonl")),
            key_bindings=self._keys(),
            completer=_Completer(lambda before: self.completions(before)),
            complete_while_typing=Condition(self._is_command),
            reserve_space_for_menu=_MENU_ROWS,
            input_processors=[ShownPastes(self._pastes, self._images)],
            search_ignore_case=True,
            enable_suspend=True,
            include_default_pygments_style=False,
            style=_STYLE,
            color_depth=ColorDepth.DEPTH_4_BIT if can_color(stream, out.color) else ColorDepth.DEPTH_1_BIT,
            input=_input(self._keyboard),
            output=_output(stream),
        )
        self._session.app.ttimeoutlen = _ESCAPE_S
        self._session.app.key_processor.after_key_press += self._choose_timeout
        self._session.default_buffer.on_text_changed += self._text_changed
        self._shape_rows()

    def read(self, meter: Meter, draft: str = "") -> str | None:
        self._meter, self._leaving = meter, False
        self._pastes.clear()
        self._kept_as_text.clear()
        self._is_new_image = False
        sys.stdout.flush()
        self._stream.write("\n")  # add a blank row between the previous output and the prompt
        self._keyboard.paused = True
        self._keyboard.release()
        self._take_typed_ahead()
        try:
            text = self._session.prompt(default=self._folded(draft), pre_run=self._select_draft)
        except EOFError:
            return None
        finally:
            self._keyboard.paused = False
            self._keyboard.quiet()
        return self._typed(text)

    @contextmanager
    def answering(self) -> Iterator[None]:
        self._keyboard.quiet()
        self._keyboard.hold()
        if self._stopped_already():
            os.kill(os.getpid(), signal.SIGINT)
        try:
            yield
        finally:
            self._keyboard.release()

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

    def _take_typed_ahead(self) -> None:
        """Pass the keys that were typed since the last prompt to the next prompt."""
        source = self._session.input
        store_typeahead(source, list(_joined(source.read_keys())))

    def _stopped_already(self) -> bool:
        """Return whether Ctrl-C was pressed right after Enter, while the prompt was still reading keys."""
        source = self._session.input
        waiting = get_typeahead(source)
        others = [press for press in waiting if press.key != Keys.ControlC]
        store_typeahead(source, others)
        return len(others) < len(waiting)

    def _typed(self, text: str) -> str:
        """Return the text with all pastes expanded and with bytes that are not UTF-8 replaced by U+FFFD."""
        return self._pastes.unfolded(text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _folded(self, draft: str) -> str:
        """Return a draft with placeholders for long texts. Images keep their own characters."""
        runs = groupby(draft, self._images.is_image)
        return "".join("".join(run) if is_image else self._pastes.folded("".join(run)) for is_image, run in runs)

    def _select_draft(self) -> None:
        """Select the draft, so that typing replaces the draft instead of appending to it.

        As in a browser's address bar, Enter sends the text, and moving the cursor lets the user edit it. Images without
        a text are not selected, because the user is about to type the question.
        """
        buffer = self._session.default_buffer
        if all(map(self._images.is_image, buffer.text)):
            buffer.insert_text(" " if buffer.text else "")
        else:
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
            (self._space, typing & Condition(self._behind_an_image_path), " "),
            (self._open_paste, typing & Condition(self._behind_a_paste), "tab"),
            (self._clear, typing, "<sigint>"),
            (self._unselect, typing & shift_selection_mode, "escape"),
        ):
            keys.add(*names, filter=filtered)(handler)
        # Without `eager`, prompt_toolkit would wait for the rest of a sequence that begins with Ctrl-C.
        keys.add("c-c", filter=typing, eager=True)(self._clear)
        for name in _DELETE_SELECTED:
            keys.add(name, filter=typing & shift_selection_mode)(self._delete_selected)
        for name in _LEAVE_SELECTED:
            keys.add(name, filter=typing & shift_selection_mode)(self._leave_selected)
        return keys

    def _text_changed(self, buffer: Buffer) -> None:
        self._is_new_image = False

    def _choose_timeout(self, keys: KeyProcessor) -> None:
        """Set how long prompt_toolkit waits for the rest of a key sequence. The time is read after each key."""
        begun = bool(keys.key_buffer) and keys.key_buffer[0].key == Keys.Escape
        self._session.app.timeoutlen = _ESCAPE_S if begun else _SEQUENCE_S

    def _enter(self, event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # Enter accepts the completion without sending the line
            return
        buffer.exit_selection()
        if self._behind_an_image_path():  # the user sees the image before it is sent, and can delete it
            self._take_image_path(buffer)
            self._is_new_image = True
        elif is_unfinished(buffer.text):
            buffer.newline(copy_margin=False)
        elif buffer.text.strip():
            self._session.history.append_string(self._typed(self._with_paths(buffer.text)))
            event.app.exit(result=buffer.text)

    def _new_line(self, event: KeyPressEvent) -> None:
        event.current_buffer.exit_selection()
        event.current_buffer.newline(copy_margin=False)

    def _paste(self, event: KeyPressEvent) -> None:
        text = without_signs(event.data.replace("\r\n", "\n").replace("\r", "\n"))
        buffer = event.current_buffer
        if buffer.selection_state:
            buffer.cut_selection()
        paths = [] if self._is_in_command() else dropped_images(text)
        if not paths:
            buffer.insert_text(self._pastes.folded(text))
        elif signs := self._read_images(paths, text):
            buffer.insert_text(f"{signs} ")

    def _read_images(self, paths: Sequence[str], text: str) -> str:
        """Return the characters for one or more images. If a file is refused, show the error and return "".

        text  what stands for a single image if Tab shows the path again
        """
        texts = [text.strip()] if len(paths) == 1 else paths
        try:
            images = [read_image(path) for path in paths]
            return "".join(self._images.add(image, given) for image, given in zip(images, texts, strict=True))
        except UsageError as error:
            run_in_terminal(functools.partial(out.error, str(error), error.hint))
            return ""

    def _is_in_command(self) -> bool:
        """Return whether the input is a slash command, whose arguments stay text."""
        text = self._session.default_buffer.text
        return _COMMAND.match(text.removeprefix(self._images.leading(text))) is not None

    def _behind_an_image_path(self) -> bool:
        """Return whether the cursor is at the end of the path of an image, and the path is not to stay text."""
        document = self._session.default_buffer.document
        path = "" if self._is_in_command() else typed_path(document.text_before_cursor)
        is_whole = not document.current_char or document.current_char.isspace()
        return bool(path) and is_whole and path not in self._kept_as_text and is_image_file(unescaped(path))

    def _take_image_path(self, buffer: Buffer) -> None:
        path = typed_path(buffer.document.text_before_cursor)
        signs = self._read_images([unescaped(path)], path)
        if signs:
            buffer.delete_before_cursor(len(path))
            buffer.insert_text(signs)
        else:
            self._kept_as_text.add(path)

    def _space(self, event: KeyPressEvent) -> None:
        self._take_image_path(event.current_buffer)
        event.current_buffer.insert_text(" ")

    def _with_paths(self, text: str) -> str:
        """Return a text in which paths stand for images."""
        return "".join(self._images.path(each) if self._images.is_image(each) else each for each in text)

    def _behind_a_paste(self) -> bool:
        return bool(self._paste_before_cursor())

    def _paste_before_cursor(self) -> str:
        """Return the sign of a paste or an image before the cursor, with the space behind an image, or ""."""
        before = self._session.default_buffer.document.text_before_cursor[-2:]
        if before[1:] == " " and self._images.is_image(before[0]):
            return before
        sign = before[-1:]
        return sign if sign and (self._pastes.about(sign) is not None or self._images.is_image(sign)) else ""

    def _open_paste(self, event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        sign = buffer.delete_before_cursor(len(self._paste_before_cursor()))[0]
        if self._images.is_image(sign):
            self._kept_as_text.add(self._images.path(sign))
        buffer.insert_text(self._pastes.unfolded(self._with_paths(sign)))

    def _delete_selected(self, event: KeyPressEvent) -> None:
        event.current_buffer.cut_selection()

    def _unselect(self, event: KeyPressEvent) -> None:
        event.current_buffer.exit_selection()

    def _leave_selected(self, event: KeyPressEvent) -> None:
        """Cancel the selection without deleting the text, and process the key again."""
        event.current_buffer.exit_selection()
        event.key_processor.feed_multiple(event.key_sequence, first=True)

    def _clear(self, event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        self._leaving = not buffer.text
        buffer.reset()
        buffer.load_history_if_not_yet_loaded()

    # Appearance

    def _is_command(self) -> bool:
        text = self._session.default_buffer.text
        return text.removeprefix(self._images.leading(text)).startswith("/")

    def _hint(self) -> StyleAndTextTuples:
        return [("class:hint", "Ctrl-D or /exit ends the chat")] if self._leaving else []

    def _shown_meter(self) -> StyleAndTextTuples:
        app = get_app()
        if not app.is_done and self._session.default_buffer.selection_state:
            wide = app.output.get_size().columns >= _DRAFT_HINT_FROM
            return [("class:hint", _DRAFT_HINT)] if wide else []
        if self._is_new_image and not app.is_done:
            return [("class:hint", "Enter sends it")]
        if app.is_done or not self._meter.context_used or app.output.get_size().columns < _METER_FROM:
            return []
        if not self._meter.context_size:
            return [("class:meter", f"{self._meter.context_used:,} tokens")]
        used = self._meter.context_used / self._meter.context_size
        style = "class:meter.full" if used >= NEARLY_FULL else "class:meter"
        return [(style, f"{used:.0%} of {self._meter.context_size:,}")]

    def _shape_rows(self) -> None:
        """Break rows between words, and limit the height of the prompt. Long input then scrolls within a few rows."""
        edited = self._session.default_buffer
        window = next(
            window
            for window in self._session.layout.find_all_windows()
            if isinstance(window.content, BufferControl) and window.content.buffer is edited
        )
        window.content = WordWrappedControl(window)
        reserved = window.height  # prompt_toolkit's height, which includes room for the completion menu
        window.height = lambda: Dimension(min=to_dimension(reserved).min, max=MOST_ROWS)


class _Completer(Completer):
    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        for found in self._completions(document.text_before_cursor):
            shown, about = visible_line(found.text), visible_line(found.about)
            yield Completion(found.text, -found.replaces, display=shown, display_meta=about)


def _joined(keys: Iterable[KeyPress]) -> Iterator[KeyPress]:
    """Merge each run of printable characters into one key press, because prompt_toolkit needs 0.15 ms per key.

    The first character of a run is not merged, because it may form a sequence with a preceding Escape. If a run may
    have the path of an image, its spaces are not merged, because they end the path.
    """
    for printable, presses in groupby(keys, lambda press: len(press.key) == 1 and press.key.isprintable()):
        run = list(presses)
        if printable and len(run) > 1:
            yield run[0]
            text = "".join(press.data for press in run[1:])
            pieces = re.split("( )", text) if names_image(text) else [text]
            run = [KeyPress(piece[0], piece) for piece in pieces if piece]
        yield from run


class _Reader(PosixStdinReader):
    """Reads the text that the keyboard has buffered, then reads from the terminal."""

    def __init__(self, keyboard: QuietKeyboard) -> None:
        super().__init__(keyboard.descriptor)
        self._keyboard = keyboard

    def read(self, count: int = 1024) -> str:
        held = self._keyboard.taken()
        return self._stdin_decoder.decode(held) if held else super().read(count)


def _input(keyboard: QuietKeyboard) -> Input:
    if sys.platform == "win32":
        return create_input()
    else:  # noqa: RET505  (mypy also checks imports that it cannot reach)
        from prompt_toolkit.input.vt100 import Vt100Input

        source = Vt100Input(sys.stdin)
        source.stdin_reader = _Reader(keyboard)
        return source


def _output(stream: TextIO) -> Output:
    if sys.platform == "win32":
        return create_output(stream)
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = Vt100_Output.from_pty(stream, term=os.environ.get("TERM"), enable_bell=False)
    output.enable_cpr = False
    return output
