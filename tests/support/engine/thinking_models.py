"""Scripted thinking models and their templates, modeled on several families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from tests.support.cli.commands import script_file

THOUGHT = "hm, let me see.\n\nIt is so."
ANSWER = "Yes, `</think>` it is."

# Like Qwen3: thinks unless told not to, and drops earlier thoughts from the prompt.
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
# Like DeepSeek-R1: the prompt opens the thinking block, and thinking cannot be switched off.
OPENED = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""
# Like gpt-oss: control tokens name the channel of every message.
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
ENDED = "\n</think>\n\n"  # the engine also inserts this to end thinking


def answers(thought: str = THOUGHT, answer: str = ANSWER) -> list[tuple[str, str]]:
    return [
        (TURN, f"<think>\n{thought}{ENDED}{answer}"),
        (TURN + "<think>\n", f"{thought}{ENDED}{answer}"),
        (ENDED, answer),
    ]


def thinking_script(folder: Path, template: str = SWITCHED, **options: Any) -> str:
    """Write a script to pass as `-m` with `--backend scripted`."""
    return script_file(folder, answers(), chat_template=template, **options)


def thinking_backend(template: str | None = SWITCHED, **options: Any) -> ScriptedBackend:
    script = options.pop("script", answers())
    voice = scripted_answers(script, options.get("control_tokens", ()))
    return ScriptedBackend(voice, chat_template=template, **options)
