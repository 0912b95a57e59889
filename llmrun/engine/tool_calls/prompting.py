"""Prepares prompts with tools, and the decoding and the grammar of their answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.templates.abilities import ToolAbilities
from llmrun.engine.thinking.decoder import Placeholders, Spelling, spelled
from llmrun.engine.tool_calls.decoding import CallDecoder
from llmrun.engine.tool_calls.grammar import tool_grammar
from llmrun.engine.tool_calls.messages import require_tools, template_messages, template_tools
from llmrun.engine.tool_calls.schemas import read_tools
from llmrun.engine.tool_calls.spelling import spelled_tools

if TYPE_CHECKING:
    from llmrun.engine.requests import ChatPrompt
    from llmrun.engine.templates.chat_template import ChatTemplate
    from llmrun.engine.templates.process import TemplateProcess
    from llmrun.engine.thinking.styles import ThinkingStyle
    from llmrun.tokenizers.base import Tokenizer


class ModelTools:
    """The tool calls of an open model. The template is probed on first use, which takes 20 to 200 ms."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer, process: TemplateProcess) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._process = process

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
        self, prompt: ChatPrompt, style: ThinkingStyle | None
    ) -> tuple[Spelling | None, CallDecoder, ResponseFormat]:
        """Return the decoding and the format of the answer to a prompt with tools.

        style  the model's thinking tags

        Returns the spelling of the thinking tags, the decoder for the calls, which uses the same placeholders, and the
        format that `tool_choice` asks for. Raises UsageError if the tools cannot be enforced.
        """
        found = self.abilities.tool_format
        assert found is not None, "`prepared` has been called"
        placeholders = Placeholders(self._tokenizer)
        thinking = spelled(style, self._tokenizer, placeholders) if style else None
        calls, tools = spelled_tools(found, placeholders), read_tools(prompt.tools or ())
        ends, parallel = self._tokenizer.end_of_generation, prompt.parallel_tool_calls
        grammar = tool_grammar(calls, tools, prompt.tool_choice, parallel=parallel, ends=ends)
        # The number of messages makes the ids of calls differ from those of earlier answers.
        decoder = CallDecoder(calls, tools, str(len(prompt.messages)))
        return thinking, decoder, ResponseFormat(FormatKind.GRAMMAR, grammar, origin="tools")
