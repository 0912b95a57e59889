"""The process that renders chat templates.

A request is {"probe": source} or {"source", "variables", "now"}. An answer is [kind, value]:

"text"       the rendered text
"abilities"  the result of probing the template
"refuses"    the reason for which the template rejects the conversation
"failed"     the error in the template
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import to_builtins

from llmrun.base.processes.worker import serve_limited
from llmrun.engine.templates.jinja import ConversationRefused, TemplateFailed, render


def main() -> None:
    """Answer requests until stdin closes."""
    serve_limited(_answer)


def _answer(request: dict[str, Any]) -> tuple[str, Any]:
    try:
        if "probe" in request:
            return "abilities", _abilities(request["probe"])
        return "text", render(request["source"], request["variables"], datetime.fromisoformat(request["now"]))
    except ConversationRefused as refusal:
        return "refuses", str(refusal)
    except TemplateFailed as failure:
        return "failed", str(failure)


def _abilities(source: str) -> dict[str, Any]:
    from llmrun.engine.templates.probing import probe

    found: dict[str, Any] = to_builtins(probe(source))
    return found
