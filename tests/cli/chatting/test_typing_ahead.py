"""Tests of the terminal's input modes while no prompt reads the keyboard."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

if sys.platform == "win32":
    pytest.skip("needs a POSIX terminal", allow_module_level=True)

import termios

from llmrun.cli.chatting.typing_ahead import QuietKeyboard
from tests.support.cli.commands import ROOT, TIMEOUT_S, modes_of_a_new_terminal

pytestmark = pytest.mark.push

PROGRAM = """
import os, signal, sys, time
from llmrun.cli.chatting.typing_ahead import QuietKeyboard
keyboard = QuietKeyboard(0)
keyboard.begin()
quiet = lambda: print("quiet", flush=True)  # from here on signals may come
{body}
keyboard.end()
print("loud", flush=True)
time.sleep(100)
"""

# Acts like a shell: gives the terminal to its own process group for the job, and takes it back when the job stops.
SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
while os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]):
    os.tcsetpgrp(0, os.getpgrp())
    print("stopped", flush=True)
    sys.stdin.readline()
    if sys.argv[2] == "in the background":
        os.kill(child, signal.SIGCONT)
        print("in the background", flush=True)
        sys.stdin.readline()
    os.tcsetpgrp(0, child)
    os.kill(child, signal.SIGCONT)
"""


def process(body: str) -> tuple[pexpect.spawn[bytes], list[object]]:
    """Start a program that silences its keyboard; return it with its terminal's earlier modes."""
    return _started("-c", PROGRAM.format(body=body))


def process_of_a_shell(body: str, continued: str) -> tuple[pexpect.spawn[bytes], list[object]]:
    return _started("-c", SHELL, PROGRAM.format(body=body), continued)


def _started(*arguments: str) -> tuple[pexpect.spawn[bytes], list[object]]:
    child = pexpect.spawn(sys.executable, [*arguments], cwd=str(ROOT), timeout=TIMEOUT_S)
    child.delaybeforesend = None
    before = modes_of_a_new_terminal()
    child.expect_exact("quiet")
    return child, before


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.night
def test_keys_are_not_echoed_and_wait_as_they_were_typed() -> None:
    child, before = process("quiet(); time.sleep(3); keyboard.end(); time.sleep(0.2); print(os.read(0, 9000))")
    child.send(b"ab\r\x04" + b"x" * 4200)
    child.expect_exact("b'ab")
    assert b"ab" not in child.before
    child.expect_exact(r"\r\x04" + "x" * 4000)
    assert termios.tcgetattr(child.child_fd) == before
    child.close(force=True)


def test_ctrl_c_is_a_signal_and_what_was_typed_before_it_stays() -> None:
    child, _ = process(
        "try: quiet(); time.sleep(100)\nexcept KeyboardInterrupt: print('stopped', os.read(0, 100), flush=True)",
    )
    child.send(b"typed")
    time.sleep(0.2)
    child.sendintr()
    child.expect_exact("stopped b'typed'")
    assert b"^C" not in child.before
    child.close(force=True)


def test_output_on_its_way_survives_ctrl_c() -> None:
    """By default, a terminal driver discards pending output on Ctrl-C, including half-sent cursor movements."""
    child, _ = process(
        "signal.signal(signal.SIGINT, lambda *_: None)\nquiet()\n"
        "for n in range(300): print(f'<{n}>', flush=True)\ntime.sleep(1)"
    )
    for _ in range(20):
        child.sendintr()
        time.sleep(0.01)
    child.expect_exact("loud")
    assert child.before.decode().split() == [f"<{n}>" for n in range(300)]
    child.close(force=True)


def test_ctrl_c_is_a_signal_however_much_was_typed_and_nothing_is_lost() -> None:
    """Keys that the thread has not read yet are left in the driver's queue for the next reader."""
    child, _ = process(
        "import select\n"
        "keyboard.hold()\n"
        "try: quiet(); time.sleep(100)\n"
        "except KeyboardInterrupt: keyboard.release(); typed = keyboard.taken()\n"
        "while select.select([0], [], [], 0.2)[0]: typed += os.read(0, 1 << 16)\n"
        "print('stopped', len(typed), keyboard.taken())"
    )
    child.send(b"x" * 50_000)
    child.sendintr()
    child.expect_exact("stopped 50000 b''")
    child.close(force=True)


def test_what_is_typed_after_release_is_left_to_the_next_reader() -> None:
    child, _ = process(
        "keyboard.hold(); quiet(); time.sleep(0.5); keyboard.release()\n"
        "print(keyboard.taken(), flush=True); time.sleep(0.5); print(os.read(0, 100))"
    )
    child.send(b"held")
    child.expect_exact("b'held'")
    child.send(b"left")
    child.expect_exact("b'left'")
    child.close(force=True)


def test_ctrl_c_that_was_typed_as_a_key_is_heeded_as_a_signal() -> None:
    """While a prompt closes, the terminal is still in raw mode."""
    child, _ = process(
        "import termios, tty; tty.setraw(0)\n"
        "quiet(); time.sleep(0.5); keyboard.quiet()\n"
        "try: keyboard.hold(); time.sleep(100)\n"
        "except KeyboardInterrupt: keyboard.release(); print('stopped', keyboard.taken(), flush=True)"
    )
    child.send(b"ab\x03cd")
    child.expect_exact("stopped b'abcd'")
    child.close(force=True)


def test_what_was_echoed_before_we_began_is_erased() -> None:
    program = """
import sys, time
from llmrun.cli.chatting.typing_ahead import QuietKeyboard
print("ready", flush=True)
time.sleep(0.5)
keyboard = QuietKeyboard(0, 1)
keyboard.begin()
keyboard.end()
print("over", flush=True)
"""
    child = pexpect.spawn(sys.executable, ["-c", program], cwd=str(ROOT), timeout=TIMEOUT_S)
    child.expect_exact("ready\r\n")
    child.send(b"early")
    child.expect_exact("over")
    assert child.before == b"early\x1b[?2004h\r\x1b[K\x1b[?2004l"
    child.close(force=True)


@pytest.mark.parametrize("held", ["", "keyboard.hold()\n"], ids=["left", "held"])
@pytest.mark.parametrize("continued", ["in the foreground", "in the background"])
def test_a_shell_gets_its_terminal_back_while_we_are_stopped(continued: str, held: str) -> None:
    child, before = process_of_a_shell(f"{held}quiet()\nwhile True: time.sleep(0.05)", continued)
    quiet = termios.tcgetattr(child.child_fd)
    assert quiet != before
    for _ in range(3):
        child.send(b"\x1a")  # Ctrl-Z
        child.expect_exact("stopped")
        assert termios.tcgetattr(child.child_fd) == before
        child.send(b"\n")
        if continued == "in the background":
            child.expect_exact(continued)
            time.sleep(0.2)
            assert termios.tcgetattr(child.child_fd) == before
            child.send(b"\n")
        until(lambda: termios.tcgetattr(child.child_fd) == quiet)
    child.close(force=True)


def test_ctrl_z_where_no_shell_could_continue_us_changes_nothing() -> None:
    child, before = process("quiet()\nwhile True: time.sleep(0.05)")
    quiet = termios.tcgetattr(child.child_fd)
    for _ in range(3):
        child.send(b"\x1a")
        time.sleep(0.1)
    until(lambda: termios.tcgetattr(child.child_fd) == quiet != before)
    assert child.isalive()
    child.close(force=True)


def test_ending_restores_the_modes_and_the_handlers_and_may_be_repeated() -> None:
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    handlers = [signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGCONT)]
    keyboard = QuietKeyboard(theirs)
    keyboard.restore()
    keyboard.end()
    keyboard.begin()
    keyboard.begin()
    keyboard.end()
    keyboard.end()
    keyboard.quiet()
    assert termios.tcgetattr(theirs) == before
    assert [signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGCONT)] == handlers
    os.close(ours)
    os.close(theirs)


def test_a_terminal_that_is_gone_is_no_error() -> None:
    ours, theirs = os.openpty()
    keyboard = QuietKeyboard(theirs)
    keyboard.begin()
    os.close(ours)
    os.close(theirs)
    keyboard.quiet()
    keyboard.restore()
    keyboard.end()


def test_what_is_no_terminal_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        keyboard = QuietKeyboard(file.fileno())
        keyboard.begin()
        keyboard.quiet()
        keyboard.end()


@pytest.mark.parametrize("body", ["os.kill(os.getpid(), 2)", "raise RuntimeError"])
def test_whoever_ends_in_a_finally_leaves_the_terminal_as_it_was(body: str) -> None:
    child, before = process(f"try:\n    quiet()\n    {body}\n    time.sleep(9)\nexcept BaseException: pass")
    child.expect_exact("loud")
    assert termios.tcgetattr(child.child_fd) == before
    child.close(force=True)
