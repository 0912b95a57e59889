"""The routes of Ollama's API that this server does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_PULL: Final = "run `llmrun pull NAME` on the server's machine"
# Missing routes -> the error, and what to do instead
MISSING: Final[Mapping[str, str]] = {
    "/api/pull": f"models cannot be downloaded over HTTP: {_PULL}",
    "/api/create": "models cannot be created over HTTP: add a preset to models.toml on the server's machine",
    "/api/delete": "models cannot be deleted over HTTP: run `llmrun rm NAME` on the server's machine",
    "/api/copy": "models cannot be copied over HTTP: add a preset to models.toml on the server's machine",
    "/api/push": "models cannot be published",
    "/api/blobs/{digest}": f"files cannot be uploaded: {_PULL}",
}
