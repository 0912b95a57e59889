"""The engine's process, with a log of which requests have rows in which step: `python logged_child.py`.

Requests are known by the marks in their prompts. The server is started by `logged_serve.py`.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

from llmrun.engine.child.main import main
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, TextPrompt
from llmrun.engine.scheduling.scheduler import Work

LOG_VARIABLE = "STEP_LOG_OF_TESTS"
MARK = re.compile(r"<(\d+)>")


def mark_of(work: Work) -> int:
    """Return the number in a request's prompt, or -1."""
    prompt = work.answer.request.prompt
    text = (
        str(prompt.messages)
        if isinstance(prompt, ChatPrompt)
        else prompt.text
        if isinstance(prompt, TextPrompt)
        else ""
    )
    found = MARK.search(text)
    return int(found[1]) if found else -1


def log_steps(path: str) -> None:
    """Make the engine append a line to a file before each step. Times are in seconds of `time.monotonic`.

    A line is `[time, {number: whether it is in its prompt}]`.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    forward = Engine._forward

    def logged(self: Engine, work: list[Work]) -> Any:
        parts = {mark_of(part): part.answer.in_prefill for part in work}
        os.write(file, json.dumps([time.monotonic(), parts]).encode() + b"\n")
        return forward(self, work)

    Engine._forward = logged  # type: ignore[method-assign]


if __name__ == "__main__":
    log_steps(os.environ[LOG_VARIABLE])
    main()
