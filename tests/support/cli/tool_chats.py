"""Scripted models that call tools, with the chat template of Qwen3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmrun.backends.scripted import CONTROL_TOKENS as BUILT_IN
from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from tests.support.cli.commands import script_file
from tests.support.models.downloads import LLAMA_CPP_FOLDER, llama_cpp_source

CONTROL_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_TURN = "<|im_end|>\n<|im_start|>assistant\n"
RESULT = "</tool_response>"  # follows the last result


def qwen3_template() -> str:
    return (llama_cpp_source() / LLAMA_CPP_FOLDER / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text("utf-8")


def call(name: str, **arguments: Any) -> str:
    """Return a call as Qwen3 writes it."""
    return f"<tool_call>\n{text_call(name, **arguments)}\n</tool_call>"


def text_call(name: str, **arguments: Any) -> str:
    """Return a call in plain JSON, without the tags of the template."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def tool_script(*answers: tuple[str, str]) -> list[tuple[str, str]]:
    """Return a script of answers to prompts that end with the given texts."""
    return [(f"{ending}{_TURN}", answer) for ending, answer in answers]


def tool_backend(*answers: tuple[str, str], **options: Any) -> ScriptedBackend:
    """Return a model with these answers to prompts that end with the given texts."""
    voice = scripted_answers(tool_script(*answers), CONTROL_TOKENS)
    return ScriptedBackend(voice, chat_template=qwen3_template(), control_tokens=CONTROL_TOKENS, **options)


def tool_script_file(folder: Path, *answers: tuple[str, str], **options: Any) -> str:
    """Write the same model as a script to pass as `-m` with `--backend scripted`."""
    return script_file(
        folder, tool_script(*answers), chat_template=qwen3_template(), control_tokens=CONTROL_TOKENS, **options
    )


def spelled(tokens: list[int]) -> str:
    """Return the text of tokens, in which only control tokens are between guillemets, as in "«<tool_call>»"."""
    controls = dict(enumerate((*BUILT_IN, *CONTROL_TOKENS), 256))
    pieces = [f"«{controls[token]}»".encode() if token in controls else bytes([token]) for token in tokens]
    return b"".join(pieces).decode("utf-8", "replace")
