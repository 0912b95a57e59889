"""Scripted models that think, and their templates, in the ways of several families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmrun.backends.scripted.backend import ScriptedBackend, scripted_answers
from tests.support.cli.commands import script_file

THOUGHT = "hm, let me see.\n\nIt is so."
ANSWER = "Yes, `</think>` it is."

# As Qwen3's: thinks unless told not to, and forgets what it thought before.
SWITCHED = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content is string and loop.last -%}
{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif -%}
{{ message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}
"""
# As DeepSeek-R1's: the prompt begins the thinking, and knows no switch.
OPENED = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""
# As gpt-oss's: every message says what it is, in control tokens.
CHANNELS = """\
{%- for message in messages -%}
{{ '<|start|>' + message.role }}
{%- if message.role == 'assistant' -%}{{ '<|channel|>final' }}{%- endif -%}
{{ '<|message|>' + message.content + '<|end|>' }}
{%- if message.thinking is defined and message.tool_calls is defined -%}
{{ '<|channel|>analysis<|message|>' + message.thinking }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""
CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")

TURN = "assistant\n"
ENDED = "\n</think>\n\n"  # with which thinking is closed for the model, too


def answers(thought: str = THOUGHT, answer: str = ANSWER) -> list[tuple[str, str]]:
    return [
        (TURN, f"<think>\n{thought}{ENDED}{answer}"),
        (TURN + "<think>\n", f"{thought}{ENDED}{answer}"),
        (ENDED, answer),
    ]


def thinking_script(folder: Path, template: str = SWITCHED, **options: Any) -> str:
    """A model for `-m`, with `--backend scripted`."""
    return script_file(folder, answers(), chat_template=template, **options)


def thinking_backend(template: str | None = SWITCHED, **options: Any) -> ScriptedBackend:
    script = options.pop("script", answers())
    voice = scripted_answers(script, options.get("control_tokens", ()))
    return ScriptedBackend(voice, chat_template=template, **options)
