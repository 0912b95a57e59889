"""Chooses a model's chat template and renders conversations with it, in an isolated process.

A template comes with the model file, so it is an untrusted program. Jinja2's sandbox restricts access to Python,
but not running time or memory, so the isolated process limits both. A template that escapes the sandbox finds only an
empty environment and no open files.

Templates receive the same variables as in `transformers`. If the model should continue an answer, the prompt is
truncated at the end of that answer, as in `transformers`.

For files without a template, a fallback template is chosen by the model's vocabulary or name. The fallback templates
come from the model families' model cards. If a family has no system role, the system message becomes part of the first
user turn. `encode_rendered` adds a BOS token unless the template has already written one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from llmrun.base.errors import BadGGUF, TemplateRefused, UsageError
from llmrun.base.processes.frames import encoded
from llmrun.base.processes.limits import INVALID_ANSWER, IsolatedProcess, ProcessFailed, ProcessLimits
from llmrun.engine.requests import CUSTOM, DEFERRED
from llmrun.engine.templates.tool_format import TemplateAbilities, ThinkingTags, ToolAbilities

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo
    from llmrun.engine.requests import ChatPrompt
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer


class Family(Struct, frozen=True):
    """The conversation format of one model family.

    controls  control strings that the vocabulary must contain as single tokens
    end       the control string that ends a turn. If `end` is the vocabulary's EOS, the model is a chat model. The
              vocabularies of the family's base models also contain `end`, but have a different EOS
    named     a regular expression that matches the names of chat models, used if `end` is not the vocabulary's EOS
    """

    name: str
    controls: tuple[str, ...]
    end: str | None
    named: str
    source: str


# As in OpenAI's API, content may be a string or a list of parts.
_TEXT = """\
{%- macro text(message) -%}
{%- if message.content is string -%}{{ message.content }}
{%- elif message.content -%}{%- for part in message.content if part.text is string -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
# This fragment sets `system` to the text of a leading system message, and `turns` to the remaining messages.
_SYSTEM_APART = (
    _TEXT
    + """\
{%- set system, turns = '', messages -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system, turns = text(messages[0]), messages[1:] -%}
{%- endif -%}
"""
)
# `begin`, `middle` and `end` must contain the texts before a role, between role and content, and after a turn.
_TURNS = (
    _TEXT
    + """\
{%- for message in messages -%}
{{ begin + message.role + middle + (text(message) | trim if trims else text(message)) + end }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ begin + 'assistant' + middle }}{%- endif -%}
"""
)
_CHATML = r"{%- set begin, middle, end = '<|im_start|>', '\n', '<|im_end|>\n' -%}" + _TURNS
_LLAMA_3 = (
    r"{%- set begin, middle, end = '<|start_header_id|>', '<|end_header_id|>\n\n', '<|eot_id|>' -%}"
    "{%- set trims = true -%}" + _TURNS
)
_PHI_3 = r"{%- set begin, middle, end = '<|', '|>\n', '<|end|>\n' -%}" + _TURNS
_ZEPHYR = r"{%- set begin, middle, end = '<|', '|>\n', eos_token + '\n' -%}" + _TURNS
_GEMMA = (
    _SYSTEM_APART
    + """\
{%- for message in turns -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{%- if loop.first and system -%}{{ system | trim + '\n\n' }}{%- endif -%}
{{ text(message) | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
)
_MISTRAL = (
    _SYSTEM_APART
    + """\
{%- for message in turns -%}
{%- if message.role == 'assistant' -%}{{ ' ' + text(message) | trim + eos_token }}
{%- else -%}{{ '[INST] ' + (system + '\n\n' if loop.first and system else '') + text(message) + ' [/INST]' }}
{%- endif -%}
{%- endfor -%}
"""
)
_LLAMA_2 = (
    _SYSTEM_APART
    + """\
{%- for message in turns -%}
{%- if message.role == 'assistant' -%}{{ ' ' + text(message) | trim + ' ' + eos_token }}
{%- else -%}
{{ bos_token + '[INST] ' }}
{%- if loop.first and system -%}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{%- endif -%}
{{ text(message) | trim + ' [/INST]' }}
{%- endif -%}
{%- endfor -%}
"""
)

_CHATTING = r"instruct|chat|assistant|\bit\b"
FAMILIES = (
    Family("llama-3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>", _CHATTING, _LLAMA_3),
    Family("chatml", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", _CHATTING, _CHATML),
    Family("gemma", ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", _CHATTING, _GEMMA),
    Family("phi-3", ("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>", _CHATTING, _PHI_3),
    Family("mistral", (), None, r"mi[sx]tral.*instruct", _MISTRAL),
    Family("llama-2", (), None, r"llama[ _-]?2.*chat", _LLAMA_2),
    Family("zephyr", (), None, r"zephyr|tinyllama.*chat", _ZEPHYR),
)


def family_of(info: ModelInfo, tokenizer: Tokenizer) -> Family | None:
    """Return the model's family, or None for base models and unknown families."""
    names = " ".join(str(info.metadata.get(key, "")) for key in ("general.name", "general.finetune"))
    names = f"{info.name} {names}".lower()
    return next((family for family in FAMILIES if _fits(family, names, tokenizer)), None)


def _fits(family: Family, names: str, tokenizer: Tokenizer) -> bool:
    if any(_token(tokenizer, control) is None for control in family.controls):
        return False
    ends_turns = family.end is not None and _token(tokenizer, family.end) == tokenizer.eos_id
    return ends_turns or re.search(family.named, names) is not None


def _token(tokenizer: Tokenizer, control: str) -> int | None:
    """Return the id of a control string, or None if it is not a single token."""
    ids = tokenizer.encode(control, add_special=False, parse_special=True).tolist()
    return ids[0] if len(ids) == 1 and tokenizer.token_text(ids[0]) == control else None


# Additional limits per byte of a long conversation. Python stores text that contains an emoji in four bytes per
# character, and a template that splits, trims and joins a text may keep ten copies of the text in memory.
_MEMORY_PER_BYTE = 40
_OUTPUT_PER_BYTE = 8
_CPU_S_PER_BYTE = 1e-7


class RenderLimits(ProcessLimits, frozen=True):
    """The resource limits for rendering one template. All except `wall_s` grow with the size of the conversation.

    The default `output` is enough for about 4 million tokens.
    """

    cpu_s: float = 6.0
    wall_s: float = 30.0
    memory: int = 256_000_000
    output: int = 1 << 24

    def for_request(self, size: int, memory: int) -> RenderLimits:
        """Return the limits for a request of `size` bytes to a process whose memory limit is already `memory` bytes."""
        return replace(
            self,
            cpu_s=self.cpu_s + size * _CPU_S_PER_BYTE,
            memory=max(self.memory, memory, size * _MEMORY_PER_BYTE),
            output=self.output + size * _OUTPUT_PER_BYTE,
        )


class TemplateProcess(IsolatedProcess):
    """The process that renders one model's templates, started by `start` or on first use. Not thread-safe."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        super().__init__("engine.templates.worker", "chat templates")
        self._limits = limits or RenderLimits()
        self._abilities: dict[str, TemplateAbilities] = {}

    def render(self, source: str, name: str, variables: Mapping[str, Any]) -> str:
        """Render a template. `name` identifies the template in error messages. Raises TemplateRefused."""
        try:
            request = encoded({"source": source, "variables": variables, "now": datetime.now().isoformat()})
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefused(
                f"conversation cannot be passed to a chat template: {name}: {_one_line(error)}"
            ) from error
        text = self._request(request, name, "text")
        if not isinstance(text, str):
            self.close()
            raise TemplateRefused(f"chat template refused: {name}: {INVALID_ANSWER}")
        return text

    def abilities(self, source: str) -> TemplateAbilities:
        """Return the abilities of a template, which are empty if probing fails. The first call takes 20 to 200 ms."""
        if source not in self._abilities:
            self._abilities[source] = self._probe(source)
        return self._abilities[source]

    def _probe(self, source: str) -> TemplateAbilities:
        try:
            found = self._request(encoded({"probe": source}), "", "abilities")
            tags = found["thinking_tags"]
            return TemplateAbilities(
                {**found["reasoning_on"]},
                {**found["reasoning_off"]},
                bool(found["is_off_by_default"]),
                str(found["off_word"]),
                ThinkingTags(**tags) if tags else None,
                ToolAbilities.from_json(found["tools"]),
            )
        except (TemplateRefused, KeyError, TypeError):
            return TemplateAbilities()

    def _request(self, request: bytes, name: str, wanted: str) -> Any:
        """Send a request and return the answer's value. Raises TemplateRefused unless the answer's kind is `wanted`."""
        limits = self._limits.for_request(len(request), self._memory)
        try:
            kind, value = self.request(request, limits, (wanted, "refuses", "failed"))
        except ProcessFailed as failure:
            raise TemplateRefused(f"chat template refused: {name}: {failure}") from None
        if kind == wanted:
            return value
        what = "refuses this conversation" if kind == "refuses" else "failed"
        raise TemplateRefused(f"chat template {what}: {name}: {_one_line(value)}")


def _one_line(words: object) -> str:
    text = " ".join(str(words)[:10_000].split()) or type(words).__name__
    return text if len(text) <= 200 else text[:197] + "..."


_KEY = "tokenizer.chat_template"
_TOOL_KEY = "tokenizer.chat_template.tool_use"  # some files have a second template for conversations with tools
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # message keys that clients use for past thinking
# This marker is appended to the answer that the model should continue. The marker's trailing space shows whether the
# template strips whitespace.
# `transformers` uses the same marker, and some templates, such as LFM2.5's, recognize the marker.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate(Struct, frozen=True):
    """A chat template's source and origin.

    origin       "model" (from the model file), "user" (from the caller) or "fallback" (the model family's template)
    name         "tokenizer.chat_template", "--chat-template", or the family's name, such as "chatml"
    tool_source  the source for conversations with tools; None if they use `source` too
    """

    source: str
    origin: str
    name: str
    tool_source: str | None = None

    def render(
        self,
        prompt: ChatPrompt,
        tokenizer: Tokenizer,
        process: TemplateProcess,
        protect: Callable[[str], str] | None = None,
    ) -> str:
        """Render the conversation as text for `tokenizer.encode_rendered`.

        protect  protects a string, instead of `tokenizer.protect`

        Every string in messages, tools and template_kwargs is protected, so that only the template's own text can
        become control tokens. If an answer is being continued, the text ends with that answer. Raises
        TemplateRefused if the template fails, and UsageError if template_kwargs sets a variable that this method
        sets itself.
        """
        protect = protect or tokenizer.protect
        variables: dict[str, Any] = {
            "add_generation_prompt": prompt.add_generation_prompt,
            "bos_token": _spelled(tokenizer, tokenizer.bos_id),
            "eos_token": _spelled(tokenizer, tokenizer.eos_id),
        }
        try:
            variables["messages"] = messages = _with_reasoning(_protected([*prompt.messages], protect))
            listed = [_shown(tool) for tool in prompt.tools or () if DEFERRED not in tool]
            variables["tools"] = _protected(listed, protect) if listed else None
            extra = _protected(prompt.template_kwargs, protect)
        except RecursionError as error:
            raise TemplateRefused(f"conversation is nested too deeply for a chat template: {self.name}") from error
        for name in extra:
            if name in variables:
                raise UsageError(f"template variable cannot be set: {name}: the conversation determines its value")
        source = self.tool_source if listed and self.tool_source else self.source
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


def alternating(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with at most one system message, at the beginning, and without two user messages in a row.

    Later system messages become user messages, and user messages in a row are joined.
    """
    first = next((n for n, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    turns = [*messages[:first], *map(_without_system, messages[first:])]
    found: list[Mapping[str, Any]] = []
    for merges, group in groupby(turns, _merged_role):
        parts = [*group]
        if merges is None or len(parts) == 1:
            found += parts
        else:
            found.append({**parts[0], "content": "\n\n".join(part["content"] for part in parts)})
    return found


def _without_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") != "system":
        return message
    return {**message, "role": "user", "content": reminder(message.get("content"))}


def _merged_role(message: Mapping[str, Any]) -> str | None:
    """Return the role of a message that can be merged with another one, or None."""
    role = message.get("role")
    return role if role in ("system", "user") and isinstance(message.get("content"), str) else None


def reminder(text: Any) -> str:
    """Return the text of a system message for a user message, between the tags that Claude Code uses."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def choose_template(info: ModelInfo, tokenizer: Tokenizer, given: str | None) -> ChatTemplate | None:
    """Return the user's template, the model's template or a fallback template, in this order, or None.

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


def _shown(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool's definition without the grammar of its input."""
    return {key: value for key, value in tool.items() if key != CUSTOM}


def _with_reasoning(messages: Sequence[Any]) -> list[Any]:
    """Copy past thinking from any known key to `reasoning_content`, which most templates read.

    Past thinking is also copied to `thinking`, which gpt-oss reads, unless that key is already set.
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
    """Append the marker to the last message if it is an answer. Returns the answer without the marker, or None."""
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


def _protected(value: Any, protect: Callable[[str], str]) -> Any:
    """Return a copy of a JSON-like value in which every string is protected, including keys."""
    if isinstance(value, str):
        return protect(value)
    if isinstance(value, Mapping):
        return {_protected(key, protect): _protected(item, protect) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_protected(item, protect) for item in value]
    return value
