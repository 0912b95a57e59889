"""Python processes that do for this one what it must not do itself: import Numba, run what may end it, be measured."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

_NEEDED_TO_START = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # Python itself, on some systems


def command(module: str, *arguments: str) -> list[str]:
    """`python -m llmrun.MODULE ...`; "" is llmrun itself."""
    # -P: modules are searched where this process does, not also in the folder it happens to stand in.
    return [sys.executable, "-P", "-m", f"llmrun.{module}" if module else "llmrun", *arguments]


def environment() -> dict[str, str]:
    """This process's, with its path of modules. The user's own NUMBA_* would change machine code, or switch the
    compiler off, unseen by any key."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}  # noqa: PTH109


def isolated_command(module: str) -> list[str]:
    """Runs `main()` of `llmrun.MODULE` in a Python that looks at no variable, no file of the user's and no folder but
    those where this process finds modules. It starts faster, too."""
    program = f"import sys; sys.path[:] = sys.argv[1:]; from llmrun.{module} import main; main()"
    folders = [str(Path(__file__).parent.parent), *(path or os.getcwd() for path in sys.path)]  # noqa: PTH109
    return [sys.executable, "-I", "-S", "-c", program, *folders]


def isolated_environment() -> dict[str, str]:
    """Nothing of the user's: keys and tokens are in the environment."""
    return {name: os.environ[name] for name in _NEEDED_TO_START if name in os.environ}


def ending(status: int) -> str:
    """How a process ended, in words: "exit status 1", "SIGSEGV"."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
