"""The slash command /model, which shows or switches the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError
from llmrun.cli.answers.model_in_use import ModelLost
from llmrun.cli.console.terminal import visible_line
from llmrun.options.settings import load_presets

if TYPE_CHECKING:
    from llmrun.cli.chatting.session import Chat


def model(chat: Chat, name: str) -> None:
    if not name:
        chat.reply([f"the model is {visible_line(chat.model)}; /model NAME opens another one"])
        return
    before = chat.model
    try:
        switched = chat.switch_model(name)
    except ModelLost:
        raise
    except KeyboardInterrupt:
        if not chat.interactive:
            raise
        chat.confirm(f"stopped; {visible_line(before)} stays in use")
        return
    except (LlmrunError, OSError) as error:
        if not chat.interactive:
            raise
        chat.tell_error(error)
        chat.confirm(f"{visible_line(before)} stays in use")
        return
    if not switched:
        chat.confirm(f"{visible_line(chat.model)} is already in use")
        return
    size = chat.engine.info.context_size
    context = f", context {size:,} tokens" if size else ""
    chat.confirm(f"{visible_line(chat.model)} answers from here on{context}; the conversation continues")


def model_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    presets: dict[str, str] = {}
    with contextlib.suppress(LlmrunError):  # /model itself will report an invalid preset
        presets = {preset.name: f"preset of {preset.model}" for preset in load_presets().values()}
    return (dict(_catalogued()) | presets).items()


@functools.cache
def _catalogued() -> tuple[tuple[str, str], ...]:
    """Return all names in the catalogue with their descriptions, or () if the catalogue is invalid.

    The result is cached, because loading the catalogue takes 40 ms.
    """
    from llmrun.hub.catalog.lookup import load_catalog

    try:
        return tuple((entry.name, entry.description) for entry in load_catalog().entries())
    except LlmrunError:
        return ()
