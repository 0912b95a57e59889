"""Chooses a model's chat template and renders conversations with it.

Templates are given the same variables as in `transformers`. If the model should continue an answer, the prompt is
truncated at the end of that answer, as in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import BadGGUF, TemplateRefused, UsageError
from llmrun.engine.templates.families import family_of

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo
    from llmrun.engine.requests import ChatPrompt
    from llmrun.engine.templates.process import TemplateProcess
    from llmrun.model.tokenizers.base import Tokenizer

_KEY = "tokenizer.chat_template"
_TOOL_KEY = "tokenizer.chat_template.tool_use"  # some files have a second template for conversations with tools
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # message keys that clients use for past thinking
# This marker is appended to the answer that is being continued. Its trailing space shows whether the template strips
# whitespace.
# `transformers` uses the same marker, and some templates, such as LFM2.5's, recognize it.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template's source and origin.

    origin       "model" (from the model file), "user" (from the caller) or "fallback" (the model family's template)
    name         "tokenizer.chat_template", "--chat-template", or the family's name, such as "chatml"
    tool_source  the source for conversations with tools; None if they use `source` too
    """

    source: str
    origin: str
    name: str
    tool_source: str | None = None

    def render(self, prompt: ChatPrompt, tokenizer: Tokenizer, process: TemplateProcess) -> str:
        """Render the conversation as text for `tokenizer.encode_rendered`.

        Every string in messages, tools and template_kwargs is protected, so that only the template's own text can
        become control tokens. If an answer is being continued, the text ends with that answer. Raises
        TemplateRefused if the template fails, and UsageError if template_kwargs sets a variable that this method
        itself sets.
        """
        variables: dict[str, Any] = {
            "add_generation_prompt": prompt.add_generation_prompt,
            "bos_token": _spelled(tokenizer, tokenizer.bos_id),
            "eos_token": _spelled(tokenizer, tokenizer.eos_id),
        }
        try:
            variables["messages"] = messages = _with_reasoning(_protected([*prompt.messages], tokenizer))
            variables["tools"] = _protected([*prompt.tools], tokenizer) if prompt.tools else None
            extra = _protected(prompt.template_kwargs, tokenizer)
        except RecursionError as error:
            raise TemplateRefused(f"conversation is nested too deeply for a chat template: {self.name}") from error
        for name in extra:
            if name in variables:
                raise UsageError(f"template variable cannot be set: {name}: it comes from the conversation")
        source = self.tool_source if prompt.tools and self.tool_source else self.source
        continued = _mark_continued(messages) if not prompt.add_generation_prompt else None
        text = process.render(source, self.name, {"documents": None, **extra, **variables})
        return text if continued is None else self._cut(text, continued)

    def _cut(self, text: str, continued: str) -> str:
        """Truncate the text at the end of the answer that is being continued."""
        end = text.rfind(_CONTINUE_TAG.rstrip())
        if end < 0 or continued.strip() not in text:
            raise TemplateRefused(f"chat template drops part of the answer that is being continued: {self.name}")
        trims = not text.startswith(_CONTINUE_TAG, end)
        return text[:end].rstrip() if trims else text[:end]


def choose_template(info: ModelInfo, tokenizer: Tokenizer, given: str | None) -> ChatTemplate | None:
    """Return the user's template, the model's own or its family's, in this order of preference, or None.

    Raises BadGGUF if the template in the file is not a string.
    """
    if given is not None:
        return ChatTemplate(given, "user", "--chat-template")
    for key in (_KEY, _TOOL_KEY):
        if not isinstance(info.metadata.get(key, ""), str):
            raise BadGGUF(f"chat template is not a string: {info.path}: {key}: {type(info.metadata[key]).__name__}")
    own = info.metadata.get(_KEY, "")
    if own.strip():
        return ChatTemplate(own, "model", _KEY, info.metadata.get(_TOOL_KEY))
    family = family_of(info, tokenizer)
    return ChatTemplate(family.source, "fallback", family.name) if family else None


def _with_reasoning(messages: Sequence[Any]) -> list[Any]:
    """Copy past thinking from any known key to `reasoning_content`, which most templates read.

    It is also copied to `thinking`, which gpt-oss reads, unless that key is already set.
    """
    named = []
    for message in messages:
        given = (message.get(key) for key in _REASONING_KEYS) if isinstance(message, dict) else ()
        reasoning = next((text for text in given if text is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        named.append(message)
    return named


def _mark_continued(messages: Sequence[Any]) -> str | None:
    """Append the marker to the last message if it is an answer. Returns its text without the marker, or None."""
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    if last.get("role") != "assistant":
        return None
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_TAG
        return content
    parts = content if isinstance(content, list) else []
    texts = [part for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not texts:
        return None
    said: str = texts[-1]["text"]
    texts[-1]["text"] = said + _CONTINUE_TAG
    return said


def _spelled(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)


def _protected(value: Any, tokenizer: Tokenizer) -> Any:
    """Return a copy of a JSON-like value in which every string is protected, including keys."""
    if isinstance(value, str):
        return tokenizer.protect(value)
    if isinstance(value, Mapping):
        return {_protected(key, tokenizer): _protected(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_protected(item, tokenizer) for item in value]
    return value
