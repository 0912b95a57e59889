"""The APIs of the server, by the paths of their routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llmrun.serving.protocol.anthropic.answers import ANTHROPIC
from llmrun.serving.protocol.ollama.answers import OLLAMA, PREFIX
from llmrun.serving.protocol.openai_responses.answers import RESPONSES
from llmrun.serving.protocol.wire import LLAMA_SERVER, OPENAI, WireFormat

# The beginnings of the paths of APIs whose form is not that of chat completions
_PREFIXES: Final[Mapping[str, WireFormat]] = {
    "/v1/messages": ANTHROPIC,
    "/infill": LLAMA_SERVER,
    "/v1/responses": RESPONSES,
    "/responses": RESPONSES,
    PREFIX: OLLAMA,
}


def wire_of(path: str) -> WireFormat:
    """Return the form of the API to which a path belongs. All errors have it, even those of unknown routes."""
    return next((wire for prefix, wire in _PREFIXES.items() if path.startswith(prefix)), OPENAI)
