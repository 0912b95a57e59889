"""Run chat templates as the engine does and record how each one ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from llmrun.base.errors import TemplateRefused
from llmrun.engine.templates.chat_template import RenderLimits, TemplateProcess

PROCESS = TemplateProcess()  # shared by all tests of a pytest process, and ends with it
CONVERSATION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße, what is 7 ** 2?\nThanks."},
        {"role": "assistant", "content": "49 🙂"},
        {"role": "user", "content": [{"type": "text", "text": "And 8 ** 2?"}]},
    ],
    "tools": [
        {"type": "function", "function": {"name": "get", "parameters": {"properties": {"x": {"type": "string"}}}}},
    ],
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
}


@dataclass(frozen=True)
class Ended:
    """How a template ended. `outcome` is "text", "refused" or the name of an unexpected exception.

    said     the start of the text, or the message
    seconds  wall-clock time
    """

    outcome: str
    said: str
    seconds: float

    @property
    def well(self) -> bool:
        """True if it ended in a text or a one-line refusal, and its child process did not crash."""
        if self.outcome == "refused":
            return "\n" not in self.said and len(self.said) < 300 and "its process" not in self.said
        return self.outcome == "text"


def ended(process: TemplateProcess, source: str) -> Ended:
    """Render a template with CONVERSATION."""
    started = time.perf_counter()
    try:
        outcome, said = "text", process.render(source, "hostile.jinja", CONVERSATION)[:400]
    except TemplateRefused as refused:
        outcome, said = "refused", str(refused)
    except Exception as error:  # noqa: BLE001 - the tests look for any exception
        outcome, said = type(error).__name__, str(error)
    return Ended(outcome, said, time.perf_counter() - started)


def ended_all(sources: Sequence[str], limits: RenderLimits) -> list[Ended]:
    """Run `ended` on all sources with two child processes. Results are in the order of `sources`."""

    def run(part: Sequence[str]) -> list[Ended]:
        process = TemplateProcess(limits)
        try:
            return [ended(process, source) for source in part]
        finally:
            process.close()

    half = len(sources) // 2
    with ThreadPoolExecutor(2) as pool:
        return [each for part in pool.map(run, (sources[:half], sources[half:])) for each in part]
