"""The form of Ollama's streams and errors."""

from __future__ import annotations

from typing import Any, Final

from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.wire import WireFormat, json_line

PREFIX: Final = "/api/"  # all paths of this API begin with it
MEDIA_TYPE: Final = "application/x-ndjson"
_SPACE: Final = b" "  # before the next line; every JSON parser skips it, and an empty line would break Ollama's client


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error, which is also the last line of a stream that failed."""
    return {"error": error.message}


OLLAMA: Final = WireFormat(MEDIA_TYPE, json_line, _SPACE, b"", ollama_error, ollama_error)
