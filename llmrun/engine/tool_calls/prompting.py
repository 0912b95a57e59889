"""Prepares prompts with tools, and the decoding and the grammar of their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import REQUIRED
from llmrun.engine.templates.abilities import ToolAbilities
from llmrun.engine.thinking.decoder import Placeholders, Spelling, spelled
from llmrun.engine.tool_calls.decoding import CallDecoder
from llmrun.engine.tool_calls.grammar import tool_grammar
from llmrun.engine.tool_calls.messages import require_tools, template_messages, template_tools
from llmrun.engine.tool_calls.schemas import Tool, read_tools
from llmrun.engine.tool_calls.spelling import ToolSpelling, spelled_tools

if TYPE_CHECKING:
    from llmrun.engine.requests import ChatPrompt
    from llmrun.engine.templates.chat_template import ChatTemplate
    from llmrun.engine.templates.process import TemplateProcess
    from llmrun.engine.thinking.styles import ThinkingStyle
    from llmrun.model.tokenizers.base import Tokenizer


Check = Callable[[ResponseFormat], object]


class ModelTools:
    """The tool calls of an open model. The template is probed on first use, which takes 20 to 200 ms."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer, process: TemplateProcess) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._process = process
        self._not_enforced: set[str] = set()  # tools whose schemas no grammar can enforce

    @cached_property
    def abilities(self) -> ToolAbilities:
        """What the template can do with tools."""
        if self._template is None:
            return ToolAbilities()
        return self._process.abilities(self._template.tool_source or self._template.source).tools

    def prepared(self, prompt: ChatPrompt) -> ChatPrompt:
        """Return the prompt with past tool calls in the form that the template needs.

        Raises UsageError if the model does not support tools, or if a tool, call or result is invalid.
        """
        if prompt.tools:
            require_tools(self.abilities)
            read_tools(prompt.tools)
        messages = template_messages(prompt.messages, self.abilities)
        return replace(prompt, messages=messages, tools=template_tools(prompt.tools or ()) or None)

    def answer_format(
        self, prompt: ChatPrompt, style: ThinkingStyle | None, check: Check
    ) -> tuple[Spelling | None, CallDecoder, ResponseFormat]:
        """Return the decoding and the format of the answer to a prompt with tools.

        style  the model's thinking tags
        check  raises UsageError if a format cannot be enforced

        Returns the spelling of the thinking tags, the decoder for the calls, which uses the same placeholders, and the
        format that `tool_choice` asks for. Raises UsageError if the tools cannot be enforced.
        """
        found = self.abilities.tool_format
        assert found is not None, "`prepared` has been called"
        placeholders = Placeholders(self._tokenizer)
        thinking = spelled(style, self._tokenizer, placeholders) if style else None
        calls = spelled_tools(found, placeholders, self._tokenizer.end_of_generation)
        tools = read_tools(prompt.tools or ())
        wanted = self._enforced_format(prompt, calls, tools, check)
        # The number of messages makes the ids of calls differ from those of earlier answers.
        return thinking, CallDecoder(calls, tools, str(len(prompt.messages))), wanted

    def _enforced_format(
        self, prompt: ChatPrompt, calls: ToolSpelling, tools: Sequence[Tool], check: Check
    ) -> ResponseFormat:
        """Return the format of an answer with these tools. Raises UsageError.

        Tools may come from anywhere, and one that cannot be enforced must not keep the others from being called. Unless
        it is strict, its calls may have any arguments; they are checked against its schema before it runs.
        """

        def format_of(tools: Sequence[Tool], choice: str) -> ResponseFormat:
            ends, parallel = self._tokenizer.end_of_generation, prompt.parallel_tool_calls
            grammar = tool_grammar(calls, tools, choice, parallel=parallel, ends=ends)
            wanted = ResponseFormat(FormatKind.GRAMMAR, grammar, origin="tools")
            check(wanted)
            return wanted

        def enforceable(tool: Tool) -> Tool:
            try:
                format_of([tool], REQUIRED)
            except UsageError as error:
                if tool.strict:
                    raise UsageError(f"tool {tool.name}: {error}", hint=error.hint) from None
                self._not_enforced.add(_key(tool))
                return _with_any_arguments(tool)
            return tool

        tools = [_with_any_arguments(tool) if _key(tool) in self._not_enforced else tool for tool in tools]
        try:
            return format_of(tools, prompt.tool_choice)
        except UsageError:
            weaker = [enforceable(tool) for tool in tools]
            if weaker == tools:
                raise
        return format_of(weaker, prompt.tool_choice)


def _key(tool: Tool) -> str:
    return json.dumps([tool.name, tool.parameters])


def _with_any_arguments(tool: Tool) -> Tool:
    return replace(tool, parameters={"type": "object", "additionalProperties": True})
