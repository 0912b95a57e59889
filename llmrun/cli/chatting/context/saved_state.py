"""Saves the KV cache of a conversation beside its file, so that `--continue` need not compute it again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.folders import prefixes_folder
from llmrun.cli.chatting.journal import state_path
from llmrun.cli.console.output import out
from llmrun.engine.engine import Engine
from llmrun.engine.saved_state.budget import Budget
from llmrun.engine.saved_state.one_file import SavedFile

if TYPE_CHECKING:
    from llmrun.engine.base import Answering


class ConversationState:
    """The saved KV cache of a chat's current conversation.

    conversations  the folder of the conversations
    limit          the maximum size of all saved states in bytes
    """

    def __init__(self, conversations: Path, limit: int) -> None:
        self._budget = Budget([conversations, prefixes_folder()], limit)
        self._saved: SavedFile | None = None
        self._conversation: Path | None = None

    def use(self, engine: Answering, conversation: Path | None) -> None:
        """Let an engine load and save the state of a conversation, given its file or None if it has none."""
        if not isinstance(engine, Engine):
            return
        file = None if conversation is None else state_path(conversation)
        if self._saved is not None and (file is None or not self._saved.is_for(file, engine.state_key)):
            self.finish(engine)
            self._saved = None
        if self._saved is None and file is not None:
            self._saved = SavedFile(file, engine.state_key, self._budget, out.detail)
        self._conversation = conversation
        engine.use_saved(self._saved)

    def save(self, engine: Answering) -> None:
        """Save the tokens that the last turn added. Backends that can only save whole sequences do so in `finish`."""
        if isinstance(engine, Engine) and engine.saves_blocks:
            engine.save_prefix()

    def finish(self, engine: Answering) -> None:
        """Save everything, because the engine is about to be closed or to continue another conversation.

        Nothing is saved for a conversation that was removed or renamed meanwhile.
        """
        if isinstance(engine, Engine) and self._conversation is not None and self._conversation.exists():
            engine.save_prefix()
