"""Returns the names of conversations, for shell completion. Its imports are lazy, as in arguments/values.py."""

from __future__ import annotations

import contextlib


def conversation_names() -> list[str]:
    """Return the names of all conversations, newest first, followed by those of saved copies."""
    from llmrun.base.folders import conversations_folder
    from llmrun.cli.chatting.store import Store

    store = Store(conversations_folder())
    with contextlib.suppress(OSError):  # the command itself will report an unreadable folder
        return [path.stem for path in (*store.journals(), *store.named())]
    return []
