"""Commands, environments and signals for child processes.

Child processes are used for work that should not happen in the main process, such as importing Numba, running code that
may crash, and measuring performance.

The signals that ask a program to end do not include Ctrl-C (SIGINT), because in some commands it ends only the current
work. On Windows, programs cannot send SIGTERM to each other, but Ctrl-Break and closing the console window send
SIGBREAK.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    TERMINATING: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGBREAK)
    HANGUP: tuple[signal.Signals, ...] = ()
else:
    TERMINATING = (signal.SIGTERM,)
    HANGUP = (signal.SIGHUP,)  # the terminal was closed; chats are saved before they end


_NEEDED_TO_START = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # required by some systems
_FIRST_EXCEPTION = 0xC0000000  # on Windows, exit codes of at least this value are errors (NTSTATUS)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command `python -m llmrun.MODULE ...`. If `module` is empty, the command runs llmrun itself."""
    # -P keeps the working directory off the module search path.
    return [sys.executable, "-P", "-m", f"llmrun.{module}" if module else "llmrun", *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment plus its module search path, without NUMBA_* variables.

    NUMBA_* variables could change the machine code or disable the compiler, and they are not part of the cache keys.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}  # noqa: PTH109


def in_own_session() -> dict[str, Any]:
    """Return `Popen` arguments that start a process in its own session, without a terminal and without Ctrl-C."""
    if sys.platform == "win32":
        import subprocess

        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    return {"start_new_session": True}


def in_own_group() -> dict[str, Any]:
    """Return `Popen` arguments that start a process in its own group, which does not receive the terminal's Ctrl-C."""
    if sys.platform == "win32":
        import subprocess

        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"process_group": 0}


def isolated_command(module: str) -> list[str]:
    """Return a command that runs `main()` of `llmrun.MODULE` in an isolated Python process.

    The isolated process ignores environment variables and the user's files, and imports only from this process's module
    search path. An isolated Python process also starts faster than a regular one.
    """
    program = f"import sys; sys.path[:] = sys.argv[1:]; from llmrun.{module} import main; main()"
    folders = [str(Path(__file__).parents[3]), *(path or os.getcwd() for path in sys.path)]  # noqa: PTH109
    return [sys.executable, "-I", "-S", "-c", program, *folders]


def isolated_environment() -> dict[str, str]:
    """Return an environment without the user's variables, which may contain API keys and tokens."""
    return {name: os.environ[name] for name in _NEEDED_TO_START if name in os.environ}


def ending(status: int) -> str:
    """Describe how a process ended, for example "exit status 1", "SIGSEGV" or, on Windows, "exception 0xC0000005"."""
    if status >= _FIRST_EXCEPTION:
        return f"exception 0x{status:X}"
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
