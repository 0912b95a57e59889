"""Tests of Ctrl-C and other signals during a whole chat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.cli.chatting.signals import Signals
from tests.support.cli.commands import ROOT

ALL = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    assert {number: signal.getsignal(number) for number in ALL} == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def nothing() -> None: ...


@pytest.mark.parametrize("number", ALL)
def test_while_an_answer_is_computed_a_signal_is_a_wish_to_stop(number: int) -> None:
    cancelled: list[int] = []
    with Signals(lambda: cancelled.append(1), nothing) as signals:
        assert not signals.stop_wanted
        send(number)
        assert signals.stop_wanted
        assert signals.end_wanted == (number != signal.SIGINT)
        assert signals.exit_code == 128 + number
    assert cancelled == [1]


def test_what_ends_programs_counts_more_than_ctrl_c_whichever_came_first() -> None:
    with Signals(nothing, nothing) as signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            send(number)
        assert signals.exit_code == 143


def test_while_a_turn_is_read_ctrl_c_is_a_keyboard_interrupt() -> None:
    with Signals(nothing, nothing) as signals:
        with pytest.raises(KeyboardInterrupt), signals.reading():
            send(signal.SIGINT)
        assert not signals.stop_wanted
        send(signal.SIGINT)
        assert signals.stop_wanted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_while_a_turn_is_read_what_ends_programs_ends_this_one(number: int, code: int) -> None:
    with Signals(nothing, nothing) as signals:
        with pytest.raises(SystemExit) as ended, signals.reading():
            send(number)
        assert ended.value.code == code


def test_a_wish_to_end_that_came_between_turns_is_not_forgotten() -> None:
    with Signals(nothing, nothing) as signals:
        send(signal.SIGTERM)
        with pytest.raises(SystemExit), signals.reading():
            raise AssertionError("no turn is read")


def test_the_next_turn_forgets_an_old_ctrl_c() -> None:
    with Signals(nothing, nothing) as signals:
        send(signal.SIGINT)
        with signals.reading():
            pass
        assert not signals.stop_wanted


def test_a_signal_that_was_ignored_at_the_start_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(nothing, nothing) as signals:
            send(signal.SIGHUP)
            assert not signals.stop_wanted
    finally:
        signal.signal(signal.SIGHUP, before)


STUCK = """
import os, signal, time
from llmrun.cli.chatting import signals
signals.STUCK_S = 1.0
def restore():
    print("restored", flush=True)
with signals.Signals(lambda: None, restore):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    print("the same wish", flush=True)
    time.sleep(1.2)
    os.kill(os.getpid(), signal.SIGINT)
    print("never")
"""


@pytest.mark.push
def test_a_stop_that_is_stuck_does_not_trap_the_user_and_leaves_a_good_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    assert (done.stdout, done.stderr, done.returncode) == ("the same wish\nrestored\n", "", 130)
