"""Tests of code that only Windows runs, with fakes. `scripts/test_windows` runs it in Python for Windows."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import io
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("these tests imitate Windows", allow_module_level=True)

from llmrun.base.compiled.cache import KernelCache
from llmrun.base.processes import commands
from llmrun.cli.chatting.tool_turns import ask
from llmrun.cli.console.terminal import can_move_cursor
from llmrun.serving.processes.stop_signals import StopSignals

BREAK = signal.SIGQUIT  # stands for SIGBREAK, which exists only on Windows


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(signal, "SIGBREAK", BREAK, raising=False)
    yield monkeypatch
    monkeypatch.undo()
    importlib.reload(commands)


class Console(io.StringIO):
    """A stream that says it is a console."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


def test_ctrl_c_does_not_reach_child_processes(windows: pytest.MonkeyPatch) -> None:
    windows.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    windows.setattr(subprocess, "CREATE_NO_WINDOW", 0x8000000, raising=False)
    assert commands.in_own_group() == {"creationflags": 0x200}
    assert commands.in_own_session() == {"creationflags": 0x8000200}


def test_exceptions_of_windows_are_shown_in_hexadecimal() -> None:
    assert commands.ending(0xC0000005) == "exception 0xC0000005"
    assert commands.ending(3) == "exit status 3"


def test_ctrl_break_asks_programs_to_end(windows: pytest.MonkeyPatch) -> None:
    importlib.reload(commands)
    assert list(commands.TERMINATING) == [signal.SIGTERM, BREAK]
    assert list(commands.HANGUP) == []


def test_a_server_stops_without_event_loop_handlers(windows: pytest.MonkeyPatch) -> None:
    """Event loops on Windows have no `add_signal_handler`."""

    async def stopped() -> int:
        signals = StopSignals()
        with signals.installed():
            asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGTERM)
            await asyncio.wait_for(signals.first.wait(), 10)
        return signals.number

    def refused(*arguments: object) -> None:
        raise NotImplementedError

    windows.setattr(asyncio.SelectorEventLoop, "add_signal_handler", refused)
    before = signal.getsignal(signal.SIGTERM)
    assert asyncio.run(stopped()) == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("get", "set_", "moves"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_consoles_are_asked_to_interpret_escape_sequences(
    windows: pytest.MonkeyPatch, get: int, set_: int, moves: bool
) -> None:
    modes: list[int] = []

    def get_mode(console: object, mode: Any) -> int:
        mode._obj.value = 3
        return get

    def set_mode(console: object, mode: int) -> int:
        modes.append(mode)
        return set_

    kernel32 = SimpleNamespace(GetConsoleMode=get_mode, SetConsoleMode=set_mode)
    windows.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    windows.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda descriptor: 7))
    windows.delenv("TERM", raising=False)
    assert can_move_cursor(Console()) is moves
    assert modes == ([7] if get else [])


def test_keys_typed_before_a_question_do_not_answer_it(windows: pytest.MonkeyPatch) -> None:
    typed = ["y", "\r"]
    windows.setitem(sys.modules, "msvcrt", SimpleNamespace(kbhit=lambda: bool(typed), getwch=lambda: typed.pop()))

    class Keyboard(io.BytesIO):
        def isatty(self) -> bool:
            return True

    assert ask("Run it?", Keyboard(b"n\r\n")) == "n"
    assert typed == []


def test_kernels_are_saved_after_their_file_is_closed(windows: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Windows does not rename open files."""
    closed: list[bool] = []
    replace = Path.replace

    def careful(path: Path, target: Path) -> Path:
        names = [Path(link).resolve() for link in Path("/proc/self/fd").iterdir()]
        closed.append(path.resolve() not in names)
        return replace(path, target)

    windows.setattr(Path, "replace", careful)
    windows.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    cache = KernelCache()
    assert cache.make("key", lambda: b"object", threading.Event()) == b"object"
    assert (closed, cache.read("key")) == ([True], b"object")
    assert len(list(cache.folder.iterdir())) == 1
