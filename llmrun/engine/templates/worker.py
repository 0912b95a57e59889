"""The process that renders chat templates.

A request is {"probe": source} or {"source", "variables", "now"}. An answer is [kind, value]:

"text"       the rendered text
"abilities"  the result of probing the template
"refuses"    the template's reason for rejecting the conversation
"failed"     the error in the template
"over"       the exceeded limit, "memory" or "depth"
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from llmrun.engine.isolated_worker import decoded, encoded, serve
from llmrun.engine.templates.jinja import ConversationRefused, TemplateFailed, render


def main() -> None:
    """Answer requests until stdin closes."""
    serve(_answer)


def _answer(data: bytes) -> bytes:
    try:
        request = decoded(data)
        return encoded(("abilities", _abilities(request)) if "probe" in request else ("text", _text(request)))
    except ConversationRefused as refusal:
        return encoded(("refuses", str(refusal)))
    except TemplateFailed as failure:
        return encoded(("failed", str(failure)))
    except MemoryError:
        return encoded(("over", "memory"))
    except RecursionError:
        return encoded(("over", "depth"))


def _text(request: dict[str, Any]) -> str:
    return render(request["source"], request["variables"], datetime.fromisoformat(request["now"]))


def _abilities(request: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from llmrun.engine.templates.probing import probe

    return asdict(probe(request["probe"]))
