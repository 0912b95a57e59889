"""Tests of typing at a terminal, with real keys, a real process, and pyte as the screen."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

if sys.platform == "win32":
    pytest.skip("needs a POSIX terminal", allow_module_level=True)

import termios

from tests.support.cli.commands import TIMEOUT_S, modes_of_a_new_terminal, module_on_terminal
from tests.support.cli.terminals import Terminal
from tests.support.engine.pictures import plain, png

pytestmark = pytest.mark.push

UP, LEFT, RIGHT, CTRL_A, CTRL_C, CTRL_D, CTRL_J, CTRL_R, TAB, BACKSPACE = (
    *("\x1b[A", "\x1b[D", "\x1b[C", "\x01", "\x03", "\x04", "\n", "\x12", "\t", "\x7f"),
)
ALT_ENTER = "\x1b\r"


class Prompt:
    """A process that reads turns, together with its terminal."""

    def __init__(self, folder: Path, *, columns: int = 80, seconds: float = 0.0, **environment: str) -> None:
        self.turns_file = folder / "turns.jsonl"
        self.data = folder / "data"
        self.terminal = Terminal(columns, 24)
        self.written = ""
        env = {**os.environ, "TERM": "xterm-256color", "LLMRUN_DATA_DIR": str(self.data), **environment}
        self.process = module_on_terminal(
            "tests.support.cli.prompting",
            str(self.turns_file),
            str(seconds),
            columns=columns,
            env={name: value for name, value in env.items() if value},
            encoding="utf-8",
        )
        self.process.delaybeforesend = None
        self.modes = modes_of_a_new_terminal()
        self.until(lambda: "\n> " in "\n" + "\n".join(self.terminal.rows()) + " ")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.process.send(key)

    def paste(self, text: str) -> None:
        self.process.send(f"\x1b[200~{text}\x1b[201~")

    def look(self, quiet_s: float = 0.2) -> str:
        """Return the screen's contents once no more output arrives for a while."""
        while True:
            try:
                text = self.process.read_nonblocking(65536, timeout=quiet_s)
            except (pexpect.TIMEOUT, pexpect.EOF):
                return "\n".join(self.terminal.rows())
            self.written += text
            self.terminal.write(text.replace("\r\n", "\n"))

    def until(self, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            screen = self.look(0.05)
            if seen():
                return
            assert time.monotonic() < deadline, screen

    def shows(self, text: str) -> None:
        self.until(lambda: text in "\n".join(self.terminal.rows()))

    def turns(self, count: int) -> list[str]:
        """Wait until `count` turns were read, and return them."""

        def read() -> list[str]:
            return (
                [json.loads(line) for line in self.turns_file.read_text().splitlines()]
                if self.turns_file.exists()
                else []
            )

        self.until(lambda: len(read()) >= count)
        return read()

    def leave(self) -> None:
        self.press(CTRL_D)
        self.look()
        self.process.expect(pexpect.EOF)
        self.process.close()
        assert self.process.exitstatus == 0


@pytest.fixture
def prompt(tmp_path: Path) -> Iterator[Prompt]:
    prompt = Prompt(tmp_path)
    yield prompt
    prompt.process.close(force=True)


def test_enter_sends_and_two_other_keys_begin_a_line(prompt: Prompt) -> None:
    prompt.press("one", "\r", "a", ALT_ENTER, "b", CTRL_J, "c", "\r")
    assert prompt.turns(2) == ["one", "a\nb\nc"]
    assert "> a\n  b\n  c\n" in prompt.look()


def test_an_empty_line_is_not_sent(prompt: Prompt) -> None:
    prompt.press("\r", "  ", "\r", "x", "\r")
    assert prompt.turns(1) == ["  x"]


def test_a_block_in_triple_quotes_is_sent_when_it_is_closed(prompt: Prompt) -> None:
    prompt.press('"""', "\r", "a", "\r", "\r", 'b"""', "\r")
    assert prompt.turns(1) == ['"""\na\n\nb"""']


def test_a_paste_goes_in_whole_and_is_not_sent_by_its_newlines(prompt: Prompt) -> None:
    prompt.paste("first\r\nsecond\nthird")
    prompt.shows("  third")
    prompt.press("!", "\r")
    assert prompt.turns(1) == ["first\nsecond\nthird!"]


def test_a_long_paste_is_folded_on_the_screen_and_sent_in_full(prompt: Prompt) -> None:
    lines = "\n".join(f"line {n}" for n in range(300))
    letters = "xyz " * 2500
    prompt.press("see ")
    prompt.paste(lines)
    prompt.press(" and ")
    prompt.paste(letters)
    prompt.shows("> see [300 lines pasted] and [10,000 characters pasted]")
    prompt.press("?", "\r")
    assert prompt.turns(1) == [f"see {lines} and {letters}?"]
    assert "line 150" not in prompt.look()


def test_a_folded_paste_is_one_character_and_tab_opens_it(prompt: Prompt) -> None:
    text = "\n".join(f"line {n}" for n in range(20))
    prompt.paste(text)
    prompt.press(BACKSPACE)
    prompt.paste(text)
    prompt.press(LEFT, "a ", "\x1b[C", TAB, "!")
    prompt.shows("  line 19!")
    prompt.press("\r")
    assert prompt.turns(1) == [f"a {text}!"]


def test_control_characters_in_a_paste_are_seen_and_kept(prompt: Prompt) -> None:
    prompt.paste("a\x1b[31mb\x07c\x9bd")
    prompt.shows("> a^[[31mb^Gc<9b>d")
    prompt.press("\r")
    assert prompt.turns(1) == ["a\x1b[31mb\x07c\x9bd"]
    assert prompt.terminal.modes()["title"] == ""


def test_bytes_that_are_no_utf8_do_not_stop_anything(prompt: Prompt) -> None:
    os.write(prompt.process.child_fd, b"a\xff\xfeb\r")
    assert prompt.turns(1) == ["a\ufffd\ufffdb"]


def test_commands_and_their_arguments_are_completed(prompt: Prompt) -> None:
    prompt.press("/s")
    prompt.shows("/save")
    assert "a copy" in prompt.look()
    prompt.press(TAB, TAB, "\r")  # selected, not sent
    prompt.press(" ")
    prompt.shows("evening")
    prompt.press(TAB, "\r", "\r")
    assert prompt.turns(1) == ["/save evening"]
    assert "a copy" not in prompt.look()


def test_what_completions_say_is_shown_safely(prompt: Prompt) -> None:
    prompt.press("/h")
    prompt.shows("␛]0;pwned␇")
    assert prompt.terminal.modes()["title"] == ""


def test_ctrl_c_clears_the_line_and_then_says_how_to_leave(prompt: Prompt) -> None:
    prompt.press("unwanted")
    prompt.shows("unwanted")
    prompt.press(CTRL_C)
    prompt.until(lambda: "unwanted" not in "\n".join(prompt.terminal.rows()))
    assert "leaves" not in prompt.look()
    prompt.press(CTRL_C)
    prompt.shows("Ctrl-D or /exit ends the chat")
    prompt.press("x", "\r")
    assert prompt.turns(1) == ["x"]
    assert "leaves" not in prompt.look()


def test_the_meter_stands_at_the_right_and_not_in_the_scrollback(prompt: Prompt) -> None:
    assert prompt.look().endswith("90% of 8,192")
    prompt.press("word", "\r")
    prompt.turns(1)
    assert [row.endswith("8,192") for row in prompt.look().splitlines() if row.startswith(">")] == [False, True]


def test_a_narrow_terminal_has_no_meter(tmp_path: Path) -> None:
    prompt = Prompt(tmp_path, columns=20)
    assert "8,192" not in prompt.look()
    prompt.press("words that need more than a row", "\r")
    assert prompt.turns(1) == ["words that need more than a row"]
    prompt.leave()


def test_without_color_no_color_is_written(tmp_path: Path) -> None:
    prompt = Prompt(tmp_path, NO_COLOR="1")
    prompt.press("/s", TAB, CTRL_C, "x", "\r")
    prompt.turns(1)
    prompt.leave()
    assert not [number for number in range(30, 50) if number != 39 and f"[{number}m" in prompt.written]
    assert ";3" not in prompt.written


def test_history_is_there_in_the_next_chat_and_can_be_searched(tmp_path: Path) -> None:
    first = Prompt(tmp_path)
    first.press("the first question", "\r", "another one", "\r")
    first.turns(2)
    first.leave()
    assert (tmp_path / "data" / "history.jsonl").stat().st_mode & 0o777 == 0o600
    second = Prompt(tmp_path)
    second.press(UP, UP)
    second.shows("> the first question")
    second.press(CTRL_C)
    second.shows("> ")
    second.press(CTRL_R, "anoth")
    second.shows("`anoth': another one")
    second.press("\r", "!", "\r")
    assert second.turns(3)[2] in ("another one!", "!another one")
    second.leave()


def test_a_folded_paste_is_in_the_history_in_full(prompt: Prompt) -> None:
    text = "\n".join(f"line {n}" for n in range(12))
    prompt.paste(text)
    prompt.press("\r")
    prompt.turns(1)
    assert json.loads((prompt.data / "history.jsonl").read_text()) == text


def test_a_history_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    prompt = Prompt(tmp_path)
    prompt.press("one", "\r")
    prompt.turns(1)
    prompt.press("two", "\r")
    assert prompt.turns(2) == ["one", "two"]
    assert prompt.look().count("history:") == 1
    prompt.leave()


def test_a_draft_can_be_edited(prompt: Prompt) -> None:
    prompt.press("/draft old words", "\r")
    prompt.turns(1)
    prompt.shows("> old words")
    prompt.press(CTRL_A, "my ", "\r")
    assert prompt.turns(2)[1] == "my old words"


def drafted(prompt: Prompt) -> None:
    prompt.press("/draft old words", "\r")
    prompt.turns(1)
    prompt.shows("> old words")


@pytest.mark.parametrize("typed", ["/undo", "/help", "a new question"])
def test_what_is_typed_replaces_a_draft(prompt: Prompt, typed: str) -> None:
    drafted(prompt)
    prompt.press(typed, "\r")
    assert prompt.turns(2)[1] == typed


def test_a_paste_replaces_a_draft(prompt: Prompt) -> None:
    drafted(prompt)
    prompt.paste("pasted")
    prompt.press("\r")
    assert prompt.turns(2)[1] == "pasted"


def test_a_command_typed_ahead_replaces_a_draft(tmp_path: Path) -> None:
    prompt = Prompt(tmp_path, seconds=1.0)
    prompt.press("/draft old words", "\r")
    prompt.shows("answering")
    prompt.press("/undo", "\r")
    assert prompt.turns(2)[1] == "/undo"


def test_enter_sends_a_draft_as_it_is(prompt: Prompt) -> None:
    drafted(prompt)
    assert "Enter sends it, an arrow key edits it" in prompt.look()
    prompt.press("\r")
    assert prompt.turns(2)[1] == "old words"
    assert "Enter sends it" not in prompt.look()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ((RIGHT, "!"), "old words!"),
        ((LEFT, "!"), "old word!s"),
        (("\x1b[F", "!"), "old words!"),
        (("\x05", "!"), "old words!"),
        (("\x1b[H", "!"), "!old words"),
        (("\x02", "!"), "old word!s"),
        ((CTRL_J, "more"), "old words\nmore"),
        ((BACKSPACE, "new"), "new"),
        (("\x1b[3~", "new"), "new"),
        ((CTRL_C, "new"), "new"),
        ((CTRL_C, ">new"), ">new"),  # prompt_toolkit indents selected text with Ctrl-C >
        (("\x15", RIGHT, "new"), "new"),
        ((ALT_ENTER, "more"), "old words\nmore"),
    ],
    ids=[
        *("right", "left", "end", "ctrl-e", "home", "ctrl-b", "new line", "backspace", "delete", "ctrl-c"),
        *("ctrl-c at once", "ctrl-u", "alt-enter"),
    ],
)
def test_moving_keeps_a_draft_and_deleting_removes_it(prompt: Prompt, keys: tuple[str, ...], sent: str) -> None:
    drafted(prompt)
    prompt.press(*keys, "\r")
    assert prompt.turns(2)[1] == sent


def test_escape_keeps_a_draft(prompt: Prompt) -> None:
    drafted(prompt)
    prompt.press("\x1b")
    time.sleep(1.0)  # until it cannot be the start of another key sequence
    prompt.press("!", "\r")
    assert prompt.turns(2)[1] == "old words!"


def test_a_key_soon_after_escape_is_not_lost(prompt: Prompt) -> None:
    """Escape and / together would be a key sequence of prompt_toolkit."""
    drafted(prompt)
    prompt.press("\x1b")
    time.sleep(0.4)
    prompt.press("/!", "\r")
    assert prompt.turns(2)[1] == "old words/!"


def test_a_key_sequence_that_begins_with_control_can_be_typed_slowly(prompt: Prompt) -> None:
    prompt.press("one", "\x18")
    time.sleep(0.4)
    prompt.press("\x15", "two", "\r")  # Ctrl-X Ctrl-U undoes one character; Ctrl-U alone would delete the line
    assert prompt.turns(1) == ["ontwo"]


def test_a_replaced_draft_is_still_in_the_history(prompt: Prompt) -> None:
    drafted(prompt)
    prompt.press("/undo", "\r")
    prompt.turns(2)
    prompt.press(UP, UP)
    prompt.shows("> /draft old words")


@pytest.mark.night
def test_what_is_typed_while_an_answer_streams_is_not_echoed_and_waits(tmp_path: Path) -> None:
    prompt = Prompt(tmp_path, seconds=2.0)
    prompt.press("one", "\r")
    prompt.shows("answering")
    prompt.press("typed ahead\rand ", "x" * 5000)
    assert "typed" not in prompt.look()
    assert prompt.turns(2)[1] == "typed ahead"
    prompt.until(lambda: prompt.terminal.rows()[-1].endswith("x"))
    prompt.press("\r")
    assert prompt.turns(3)[2] == "and " + "x" * 5000


@pytest.mark.night
def test_the_terminal_is_never_asked_where_its_cursor_is(prompt: Prompt) -> None:
    time.sleep(2.5)  # prompt_toolkit waits two seconds for a reply before it warns
    assert "WARNING" not in prompt.look()
    assert "\x1b[6n" not in prompt.written


def test_a_resize_at_any_time_does_no_harm(prompt: Prompt) -> None:
    prompt.press("some words ")
    for columns in (40, 20, 7, 1, 120, 80):
        prompt.process.setwinsize(24, columns)
        prompt.terminal.resize(columns)
        prompt.press("x")
        prompt.look()
    prompt.press("\r")
    assert prompt.turns(1) == ["some words xxxxxx"]


def test_leaving_puts_every_mode_back(prompt: Prompt) -> None:
    assert termios.tcgetattr(prompt.process.child_fd) != prompt.modes
    before = Terminal(80, 24).modes()
    prompt.press("x", "\r")
    prompt.turns(1)
    prompt.leave()
    assert prompt.terminal.modes() == before


def test_an_interrupt_from_elsewhere_is_a_ctrl_c(prompt: Prompt) -> None:
    prompt.press("word")
    prompt.shows("word")
    prompt.process.kill(signal.SIGINT)
    prompt.until(lambda: "word" not in "\n".join(prompt.terminal.rows()))
    prompt.press("x", "\r")
    assert prompt.turns(1) == ["x"]
    prompt.leave()


def test_a_handler_that_ends_the_program_at_the_prompt_puts_every_mode_back(prompt: Prompt) -> None:
    prompt.press("word")
    prompt.shows("word")
    prompt.process.kill(signal.SIGTERM)
    prompt.until(lambda: not prompt.process.isalive())
    assert termios.tcgetattr(prompt.process.child_fd) == prompt.modes
    assert prompt.terminal.modes() == Terminal(80, 24).modes()


def test_an_error_in_the_middle_of_an_answer_puts_every_mode_back(prompt: Prompt) -> None:
    fd = prompt.process.child_fd
    prompt.press("fail", "\r")
    prompt.shows("RuntimeError: in the middle of an answer")
    assert termios.tcgetattr(fd) == prompt.modes


def test_long_input_breaks_between_words(tmp_path: Path) -> None:
    prompt = Prompt(tmp_path, columns=40)
    prompt.press("Please explain to me why the sky is so very wonder")
    prompt.shows("> Please explain to me why the sky is\n  so very wonder")
    prompt.press("fully blue today")
    prompt.shows("\n  so very wonderfully blue today")
    prompt.press(*[BACKSPACE] * 17, CTRL_A, "Yes: ")
    prompt.shows("> Yes: Please explain to me why the sky\n  is so very wonde")
    prompt.process.setwinsize(24, 31)
    prompt.terminal.resize(31)
    prompt.shows("> Yes: Please explain to me\n  why the sky is so very wonde")
    prompt.press("\r")
    assert prompt.turns(1) == ["Yes: Please explain to me why the sky is so very wonde"]
    prompt.leave()


LABEL = "[image 1: my cat.png 30x20]"


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    path = tmp_path / "my cat.png"
    path.write_bytes(png(plain(30, 20)))
    return path


def test_a_dropped_image_is_shown_and_sent(prompt: Prompt, cat: Path) -> None:
    prompt.press("what is ")
    prompt.paste(f"'{cat}' ")
    prompt.press("?")
    prompt.shows(f"> what is {LABEL} ?")
    prompt.press("\r")
    assert prompt.turns(1) == [f"what is {LABEL} ?"]


def test_an_image_is_deleted_like_a_character(prompt: Prompt, cat: Path) -> None:
    prompt.paste(str(cat))
    prompt.shows(LABEL)
    prompt.press(BACKSPACE, BACKSPACE, "nothing", "\r")
    assert prompt.turns(1) == ["nothing"]


def test_images_are_numbered_in_their_order(prompt: Prompt, cat: Path) -> None:
    prompt.paste(str(cat))
    prompt.shows(LABEL)
    prompt.press(CTRL_A)
    prompt.paste(str(cat))
    prompt.shows(f"{LABEL} [image 2: my cat.png 30x20]")


def test_a_typed_path_becomes_an_image_at_the_space(prompt: Prompt, cat: Path) -> None:
    prompt.press(f"what is '{cat}'", " ")
    prompt.shows(f"> what is {LABEL} ")
    prompt.press("?", "\r")
    assert prompt.turns(1) == [f"what is {LABEL} ?"]


def test_enter_shows_an_image_before_sending_it(prompt: Prompt, cat: Path) -> None:
    prompt.press(str(cat).replace(" ", "\\ "), "\r")
    prompt.shows(f"> {LABEL}")
    prompt.shows("Enter sends it")
    prompt.press("\r")
    assert prompt.turns(1) == [LABEL]


@pytest.mark.parametrize("behind", [(), (BACKSPACE,)], ids=["behind the space", "behind the image"])
def test_tab_turns_an_image_back_into_its_path(prompt: Prompt, cat: Path, behind: tuple[str, ...]) -> None:
    prompt.press("see ")
    prompt.press(f"'{cat}'", " ")
    prompt.shows(LABEL)
    prompt.press(*behind, TAB, " ", "\r")
    assert prompt.turns(1) == [f"see '{cat}' "]


def test_paths_of_other_files_stay_text(prompt: Prompt, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    texts = [f"{tmp_path}/missing.png", f"{tmp_path}/notes.txt", str(tmp_path)]
    for text in texts:
        prompt.press("> ", text, " ", "\r")
    assert prompt.turns(3) == [f"> {text} " for text in texts]


def test_an_argument_of_a_command_stays_text(prompt: Prompt, cat: Path) -> None:
    prompt.press("/image ")
    prompt.paste(f"'{cat}'")
    prompt.press(" ", "\r")
    assert prompt.turns(1) == [f"/image '{cat}' "]


def test_a_refused_image_is_an_error_at_once(prompt: Prompt, tmp_path: Path) -> None:
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    prompt.press("see ")
    prompt.paste(str(tmp_path / "a.heic"))
    prompt.shows("HEIC files are not supported")
    prompt.press("x", "\r")
    assert prompt.turns(1) == ["see x"]


def test_an_image_typed_ahead_is_recognized(tmp_path: Path, cat: Path) -> None:
    prompt = Prompt(tmp_path, seconds=1.0)
    prompt.press("x", "\r")
    prompt.turns(1)
    prompt.press(f"what is '{cat}' ?", "\r")
    assert prompt.turns(2)[1] == f"what is {LABEL} ?"
    prompt.process.close(force=True)


def test_the_history_has_the_path_of_an_image(prompt: Prompt, cat: Path) -> None:
    prompt.paste(f"'{cat}'")
    prompt.shows(LABEL)
    prompt.press("\r")
    prompt.turns(1)
    prompt.press(UP)
    prompt.shows("cat.png'")


def test_resizing_keeps_the_labels_of_images(prompt: Prompt, cat: Path) -> None:
    prompt.paste(str(cat))
    prompt.shows(LABEL)
    prompt.process.setwinsize(24, 60)
    prompt.press("and a text that is long enough for a second row", "\r")
    assert prompt.turns(1) == [f"{LABEL} and a text that is long enough for a second row"]
