"""Maps the paths of routes to APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llmrun.serving.protocol.anthropic.answers import ANTHROPIC
from llmrun.serving.protocol.ollama.answers import OLLAMA, PREFIX
from llmrun.serving.protocol.openai_responses.answers import RESPONSES
from llmrun.serving.protocol.wire import LLAMA_SERVER, OPENAI, WireFormat

# Path prefixes of the APIs with a wire format other than OPENAI
_PREFIXES: Final[Mapping[str, WireFormat]] = {
    "/v1/messages": ANTHROPIC,
    "/infill": LLAMA_SERVER,
    "/v1/responses": RESPONSES,
    "/responses": RESPONSES,
    PREFIX: OLLAMA,
}


def wire_of(path: str) -> WireFormat:
    """Return the wire format of the API that a path belongs to. Unknown routes also report errors in this format."""
    return next((wire for prefix, wire in _PREFIXES.items() if path.startswith(prefix)), OPENAI)
