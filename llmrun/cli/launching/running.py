"""Runs an agent in this terminal, and restores the terminal at the end.

The agent shares the process group of llmrun, so the terminal's Ctrl-C and Ctrl-Z reach the agent as in a shell. While
the agent runs, llmrun leaves Ctrl-C to the agent, passes on SIGTERM and SIGHUP, and stops if the agent stops itself, so
that the shell gets the terminal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final, Self

from llmrun.base.errors import LlmrunError
from llmrun.base.processes.commands import HANGUP, TERMINATING
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_move_cursor, saved_modes

# An agent that was killed may have left the alternate screen, a hidden cursor, and mouse and paste reporting.
_USUAL_SCREEN: Final = "\x1b[?1047l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l"


class AgentRun:
    """An agent in this terminal. In the `with` block, Ctrl-C and signals that end programs are left to the agent.

    The block may contain more than the run, so that a second Ctrl-C cannot prevent what must be undone afterwards.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []  # signals that arrived before the agent was started
        self._continued = False  # whether SIGCONT has arrived
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        handlers: dict[int, Callable[[int, FrameType | None], None]]
        handlers = {signal.SIGINT: _leave_to_agent, **dict.fromkeys((*TERMINATING, *HANGUP), self._pass_on)}
        if sys.platform != "win32":
            handlers |= {signal.SIGQUIT: _leave_to_agent, signal.SIGCONT: self._note_continued}
        for number, handler in handlers.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # such as SIGHUP with nohup
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a program, and return its exit code, or 128 plus the number of the signal that ended it.

        Raises LlmrunError if the program cannot be started.
        """
        restore_modes = saved_modes()
        try:
            self._process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise LlmrunError(f"cannot start {command[0]}: {error.strerror or error}") from error
        for number in self._early:
            self._pass_on(number, None)
        code = self._ended(self._process)
        restore_modes()
        if code < 0 and can_move_cursor(sys.stderr):
            out.sequence(_USUAL_SCREEN)
        return 128 - code if code < 0 else code

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the agent's end, and return its exit code. If the agent stops itself, stop until it continues."""
        if sys.platform == "win32":
            return process.wait()
        while True:
            try:
                _, status = os.waitpid(process.pid, os.WUNTRACED)
            except ChildProcessError:  # the agent has ended, and `send_signal` in a signal handler has noticed it first
                return process.wait()
            if not os.WIFSTOPPED(status):
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode
            if not self._continued:  # otherwise, Ctrl-Z has stopped this process, too, and the user has continued both
                os.kill(os.getpid(), signal.SIGSTOP)
            self._continued = False
            process.send_signal(signal.SIGCONT)

    def _note_continued(self, number: int, frame: FrameType | None) -> None:
        self._continued = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def _leave_to_agent(number: int, frame: FrameType | None) -> None:
    """Do nothing. SIG_IGN would be inherited by the agent."""
