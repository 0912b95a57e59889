"""Asks idle background engines to leave if a model that is about to be opened needs their memory.

The default context size depends on the free memory, so it would otherwise be smaller beside an engine that nobody uses.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError
from llmrun.base.machine.memory import free_memory
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.backends.base import OpenOptions


def make_room_for(path: Path, options: OpenOptions, *, draft: Path | None = None, sequences: int = 1) -> None:
    """If memory is short for a model and engines are idle, ask all of them to leave, and wait until they are gone.

    sequences  how many sequences should have room for a whole context
    """
    from llmrun.serving.background.place import has_sockets

    with suppress(LlmrunError, OSError):  # opening the model will report the error
        if not has_sockets():
            return
        from llmrun.serving.background.control import make_room, running  # a start without engines does not import this

        if not any(engine.is_idle for engine in running()):
            return
        others = 0 if draft is None else draft.stat().st_size
        others += os.stat(options.mmproj).st_size if options.mmproj else 0  # noqa: PTH116  (a text, for other processes)
        if _is_short(path, options, others, sequences) and make_room():
            out.detail("memory     idle background engines have ended")


def idle_memory() -> int:
    """Return the memory of idle background engines in bytes. They leave if another model needs this memory."""
    from llmrun.serving.background.control import running

    with suppress(LlmrunError):  # without a usable folder, there are no engines
        return sum(engine.state.memory_bytes for engine in running() if engine.state is not None and engine.is_idle)
    return 0


def _is_short(path: Path, options: OpenOptions, others: int, sequences: int) -> bool:
    """Return whether the context would be smaller than with unlimited memory, or would not fit.

    others  bytes that other models will need
    Raises the errors of reading the header.
    """
    from llmrun.backends.fitting import Resources, fit_of
    from llmrun.backends.sizing import LARGEST_DEFAULT, MemoryNeeds
    from llmrun.formats.gguf.reader import open_gguf

    free = free_memory(reserved=options.reserved_memory)
    if free is None:
        return False
    with open_gguf(path) as file:
        fit = fit_of(file, Resources(free), context=options.context_size, kv_type=options.kv_type)
    needs = MemoryNeeds(fit.footprint, free - fit.footprint.programs - others)
    if options.context_size is not None and sequences == 1:
        return not needs.fits(fit.context)
    wanted = min(fit.trained_context or LARGEST_DEFAULT, LARGEST_DEFAULT)
    return needs.comfortable < sequences * (wanted if options.context_size is None else fit.context)
