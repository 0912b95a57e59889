"""Fallback chat templates for files without one, chosen by the model's vocabulary or name.

The formats come from the families' model cards. If a family has no system role, the system message goes into the first
user turn. `encode_rendered` adds a BOS if the template has not written one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo
    from llmrun.model.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Family:
    """The conversation format of one model family.

    controls  control strings that the vocabulary must contain as single tokens
    end       the control string that ends a turn. If it is the vocabulary's EOS, the model is a chat model. The
              vocabularies of the family's base models contain it too, but have a different EOS
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
# Sets `system` to the text of a leading system message, and `turns` to the remaining messages.
_SYSTEM_APART = (
    _TEXT
    + """\
{%- set system, turns = '', messages -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system, turns = text(messages[0]), messages[1:] -%}
{%- endif -%}
"""
)
_CHATML = (
    _TEXT
    + """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + text(message) + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
)
_LLAMA_3 = (
    _TEXT
    + """\
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + text(message) | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""
)
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
_PHI_3 = (
    _TEXT
    + """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\n' + text(message) + '<|end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}
"""
)
_ZEPHYR = (
    _TEXT
    + """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\n' + text(message) + eos_token + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}
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
