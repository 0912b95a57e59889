"""The scripted backend with prompts that end its process, and with models that break promises.

`deadly_child.py` registers it. A file whose name begins with "varying" is a model without batch invariance. One whose
name begins with "lying" promises the same answers, but gives others in each process.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.backends.scripted import ScriptedBackend, ScriptedStandIn, echo
from llmrun.base.types import HIDDEN

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.backends.registry import StandIn
    from llmrun.base.types import Batch, Outputs

KILLS = "kill the process"  # a prompt that kills the process in its first step, and a text that cannot be embedded
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


def lying_voice(history: str) -> int | None:
    """Give other answers in each process. Two answers of ten letters are the same once in 26^10 tries."""
    return ord("a") + Random(f"{os.getpid()} {len(history)}").randrange(26)


class DeadlyStandIn(ScriptedStandIn):
    """The StandIn of the deadly backend."""

    def open(self, path: Path, options: OpenOptions) -> ScriptedBackend:
        backend = super().open(path, options)
        backend._voice = lying_voice if path.name.startswith("lying") else deadly_voice
        forward = backend.forward

        def deadly_forward(batch: Batch) -> Outputs:
            if (batch.want & HIDDEN).any() and KILLS in "".join(map(chr, batch.tokens.tolist())):
                os.kill(os.getpid(), signal.SIGKILL)
            return forward(batch)

        backend.forward = deadly_forward  # type: ignore[method-assign]
        if path.name.startswith("varying"):
            backend.info = replace(backend.info, batch_invariant=False)
        return backend


KIND: StandIn = DeadlyStandIn()
