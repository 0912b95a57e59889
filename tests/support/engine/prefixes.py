"""Conversations with an engine whose answers the test dictates, for tests of reused prefixes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.backends.scripted import IM_END, ScriptedBackend
from llmrun.base.types import Adapter
from llmrun.engine.answer import Answer
from llmrun.engine.engine import Engine
from llmrun.engine.prefix_history import LEAST, PrefixHistory
from llmrun.engine.requests import ChatPrompt, PrefixReport, Request
from tests.support.templates.template_runs import PROCESS

_CONTROL = re.compile(r"<\|[^|>'\"]+\|>|</?(?:start|end)_of_turn>|<\|?turn>|<turn\|?>|</?think>|</?tool_call>")
SYSTEM = (
    "You are a careful coding agent. Read the files before you change them.\n"
    "Today is Monday, 30 November, 16:05.\n"
    "Write short answers, run the tests after each change, and never delete files without asking first.\n"
)


class Talk:
    """An engine with a chat template. `ask` answers a request as the test wishes and returns what was reused and why.

    The report before the request ran and the report afterwards must agree, unless `changes` is True. The engine is
    never closed, because its process for templates belongs to all tests.
    """

    def __init__(
        self, template: str | None, *, slots: int = 4, checkpoint: int | None = None, adapters: Sequence[Adapter] = ()
    ) -> None:
        controls = [] if template is None else sorted(set(_CONTROL.findall(template)) - {"<|im_start|>", "<|im_end|>"})
        self._answer: list[int] = []
        self._n_prompt = 0
        self.backend = ScriptedBackend(
            self._voice,
            chat_template=template,
            control_tokens=controls,
            vocabulary_size=1000,
            max_sequences=slots,
            context_size=1 << 15,
            checkpoint=checkpoint,
            adapters=adapters,
        )
        self.engine = Engine(self.backend, templates=PROCESS)
        self.history = PrefixHistory(self.engine.tokenizer, self.engine.drops, self.engine.thinking.style)

    def _voice(self, sequence: str) -> int | None:
        at = len(sequence) - self._n_prompt
        return self._answer[at] if 0 <= at < len(self._answer) else IM_END

    def ask(
        self, request: Request | ChatPrompt, answer: str | Sequence[int] = "Done.", *, changes: bool = False
    ) -> PrefixReport:
        prepared, expected = self.queue(request, answer)
        while not self.engine.idle:
            self.engine.step()
        report = self.report_of(prepared)
        if not changes:
            assert abs(report.reused - expected.reused) < LEAST
            assert (report.cause, report.where) == (expected.cause, expected.where)
        return report

    def queue(self, request: Request | ChatPrompt, answer: str | Sequence[int] = "") -> tuple[Answer, PrefixReport]:
        """Queue a request without running it."""
        request = Request(request) if isinstance(request, ChatPrompt) else request
        tokenizer = self.engine.tokenizer
        prepared = self.engine.prepare(request)
        if isinstance(answer, str):
            answer = tokenizer.encode(answer, add_special=False, parse_special=True).tolist()
        self._answer, self._n_prompt = [*answer], prepared.prompt_tokens
        self.engine.predicted(prepared)
        expected = self.history.expected(prepared)
        self.history.add(prepared)
        self.engine.enqueue(prepared)
        return prepared, expected

    def report_of(self, answer: Answer) -> PrefixReport:
        assert answer.cached_tokens is not None
        return self.history.explained(answer, answer.cached_tokens, waits=answer.has_waited, found=answer.found_tokens)


def tool(name: str, description: str = "") -> Mapping[str, Any]:
    properties = {"path": {"type": "string", "description": f"The path for {name}."}}
    described = description or f"Use {name} to work with a file of the project, and report each error in full."
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {"type": "function", "function": {"name": name, "description": described, "parameters": parameters}}


TOOLS = tuple(map(tool, ("list_files", "search_text", "read_file", "write_file", "run_tests")))


def turn(role: str, text: str, **others: Any) -> Mapping[str, Any]:
    return {"role": role, "content": text, **others}


def chat(*turns: tuple[str, str] | Mapping[str, Any], system: str = SYSTEM, **options: Any) -> ChatPrompt:
    """Return a conversation; it begins with a system prompt unless `system` is empty."""
    first = [turn("system", system)] if system else []
    return ChatPrompt([*first, *(each if isinstance(each, Mapping) else turn(*each) for each in turns)], **options)
