"""Writes a conversation as one text: with which chat template and variables, and what must stay plain text in it.

The variables are those that `transformers` sets, and an answer to be continued is cut where `transformers` cuts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrun.engine.templates.families import family_of
from llmrun.errors import BadGGUF, TemplateRefused, UsageError

if TYPE_CHECKING:
    from llmrun.engine.requests import ChatPrompt
    from llmrun.engine.templates.process import TemplateProcess
    from llmrun.tokenizers.base import Tokenizer
    from llmrun.types import ModelInfo

_KEY = "tokenizer.chat_template"
_TOOL_KEY = "tokenizer.chat_template.tool_use"  # a second template that some files have, for conversations with tools
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # names for past thinking that programs send
# Put at the end of an answer to be continued; its space shows whether the template trims. The mark is the one of
# `transformers`, which some templates know (LFM2.5's does).
_GOES_ON = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template's source and where it comes from.

    origin       "model" (the file's own), "user" (given by the caller) or "fallback" (its family's)
    name         "tokenizer.chat_template", "--chat-template", or the family's name ("chatml")
    tool_source  used instead of `source` when the conversation has tools
    """

    source: str
    origin: str
    name: str
    tool_source: str | None = None

    def render(self, prompt: ChatPrompt, tokenizer: Tokenizer, process: TemplateProcess) -> str:
        """Write the conversation as text for `tokenizer.encode_rendered`.

        Every string of messages, tools and template_kwargs is protected, so that only the template's own words can
        become control tokens. An answer to be continued ends the text: nothing comes after its last word. Raises
        TemplateRefused for anything that goes wrong in a template, and UsageError if template_kwargs sets a variable
        that is set here.
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
                raise UsageError(f"not for the template's extra variables: {name}: it is set from the conversation")
        source = self.tool_source if prompt.tools and self.tool_source else self.source
        continued = _mark_continued(messages) if not prompt.add_generation_prompt else None
        text = process.render(source, self.name, {"documents": None, **extra, **variables})
        return text if continued is None else self._cut(text, continued)

    def _cut(self, text: str, continued: str) -> str:
        """Return the text up to the end of the answer to be continued."""
        end = text.rfind(_GOES_ON.rstrip())
        if end < 0 or continued.strip() not in text:
            raise TemplateRefused(f"chat template leaves out some of the answer to be continued: {self.name}")
        trims = not text.startswith(_GOES_ON, end)
        return text[:end].rstrip() if trims else text[:end]


def choose_template(info: ModelInfo, tokenizer: Tokenizer, given: str | None) -> ChatTemplate | None:
    """Return the user's template, else the model's own, else its family's, else None.

    Raises BadGGUF if the file's template is not a string.
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
    """Give past thinking the name that most templates look for, and that of gpt-oss, whatever name it came under."""
    named = []
    for message in messages:
        given = (message.get(key) for key in _REASONING_KEYS) if isinstance(message, dict) else ()
        reasoning = next((text for text in given if text is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        named.append(message)
    return named


def _mark_continued(messages: Sequence[Any]) -> str | None:
    """Put the mark at the end of the last message if that is an answer; return its text without the mark, or None."""
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    if last.get("role") != "assistant":
        return None
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _GOES_ON
        return content
    parts = content if isinstance(content, list) else []
    texts = [part for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not texts:
        return None
    said: str = texts[-1]["text"]
    texts[-1]["text"] = said + _GOES_ON
    return said


def _spelled(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)


def _protected(value: Any, tokenizer: Tokenizer) -> Any:
    """Return a copy of a JSON-like value in which every string, including keys, is protected."""
    if isinstance(value, str):
        return tokenizer.protect(value)
    if isinstance(value, Mapping):
        return {_protected(key, tokenizer): _protected(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_protected(item, tokenizer) for item in value]
    return value
