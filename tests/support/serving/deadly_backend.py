"""The scripted backend with prompts that end its process, and with models that break promises.

`deadly_child.py` registers it. A file whose name begins with "varying" is a model without batch invariance. One whose
name begins with "lying" promises the same answers, but gives others in each process.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.backends.scripted import ScriptedBackend, ScriptedStandIn, echo
from llmrun.base.types import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from llmrun.backends.base import OpenOptions
    from llmrun.backends.registry import StandIn
    from llmrun.backends.scripted_vision import ScriptedEncoding
    from llmrun.base.types import Batch, Outputs
    from llmrun.model.vision.layout import ImageLayout

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
        if backend.vision is not None:
            backend.vision.begin = partial(_deadly_begin, backend.vision.begin)  # type: ignore[method-assign]
        if path.name.startswith("varying"):
            backend.info = replace(backend.info, batch_invariant=False)
        return backend


def _deadly_begin(
    begin: Callable[..., ScriptedEncoding], tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout
) -> ScriptedEncoding:
    """Begin an encoding. The encoding of a red image kills the process in its third tile of rows."""
    encoding = begin(tiles, layout)
    advance = encoding.advance

    def deadly_advance(seconds: float) -> NDArray[np.float32] | None:
        if encoding.n_tiles == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return advance(seconds)

    if tiles[0][0, 0].tolist() == [255, 0, 0]:
        encoding.advance = deadly_advance  # type: ignore[method-assign]
    return encoding


KIND: StandIn = DeadlyStandIn()
