"""The settings of the model or the preset that a chat uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmrun.cli.console.output import out
from llmrun.options.settings import RULES, with_values

if TYPE_CHECKING:
    from llmrun.cli.chatting.context.prompting import Prompting
    from llmrun.cli.chatting.conversation import Conversation
    from llmrun.cli.chatting.record import ConversationRecord
    from llmrun.options.settings import Settings


class ModelSettings:
    """The settings of the model or preset in use, which apply unless the conversation overrides them.

    base  the settings without those of the conversation
    """

    def __init__(self, settings_for: Callable[[str], Settings], prompting: Prompting, model: str) -> None:
        """Load the settings. `settings_for` returns those for the lasting name of a model or preset."""
        self._settings_for, self._prompting = settings_for, prompting
        self.use(model)

    def use(self, model: str) -> None:
        """Load the settings for another model or preset. Raises UsageError if its files are invalid by now."""
        self.base = self._settings_for(model)
        self._prompting.preset = self.base.variables
        self._model = model

    def of(self, conversation: Conversation) -> Settings:
        """Return the settings for the next answer of a conversation."""
        chosen = {name: value for name, value in conversation.preferences.items() if name in RULES}
        return with_values(self.base, chosen)

    def take_over(self, record: ConversationRecord) -> None:
        """Continue a conversation that used another model or preset with the current one."""
        conversation, settings = record.conversation, self.base
        before = self._settings_for(conversation.model).system
        for event in [*conversation.switched(self._model, before, settings.system)]:
            record.add(event)
        preset = settings.preset
        if preset is not None and preset.system not in (None, conversation.system):
            out.note(f"the conversation keeps its own system prompt; /system default sets that of {preset.name}")
