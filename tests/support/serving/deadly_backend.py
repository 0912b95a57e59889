"""The scripted backend with prompts that kill or stop its process. `deadly_child.py` registers it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.backends.scripted.backend import ScriptedBackend, ScriptedStandIn, echo

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.backends.kind import StandIn

KILLS = "kill the process"  # a prompt that kills the process in its first step
KILLS_LATER = "kill it in the middle"  # a prompt that kills the process after 20 tokens
FAILS = "raise an error"  # a prompt that raises an error in its first step


def deadly_voice(history: str) -> int | None:
    """Echo the question, but die at a deadly one."""
    if FAILS in history:
        raise ZeroDivisionError("this prompt divides by zero")
    said = history.rpartition("assistant\n")[2]
    if KILLS in history or (KILLS_LATER in history and len(said) > 20):
        os.kill(os.getpid(), signal.SIGKILL)
    return echo(history)


class DeadlyStandIn(ScriptedStandIn):
    """The StandIn of the deadly backend."""

    def open(self, path: Path, options: OpenOptions) -> ScriptedBackend:
        backend = super().open(path, options)
        backend._voice = deadly_voice
        return backend


KIND: StandIn = DeadlyStandIn()
