"""The tool-call formats of llama.cpp's templates, in vocabularies that have their tags as control tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmrun.backends.scripted.tokenizer import CONTROL_TOKENS, ScriptedTokenizer
from llmrun.engine.templates.abilities import ToolAbilities
from llmrun.engine.templates.probing import probe
from llmrun.engine.templates.tool_format import ToolCallFormat
from llmrun.engine.thinking.decoder import Placeholders
from llmrun.engine.tool_calls.spelling import ToolSpelling, spelled_tools
from tests.support.models.downloads import llama_cpp_source

FOLDER = llama_cpp_source() / "vendor/llama.cpp/models/templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
_CONTROL = re.compile(r"<[|｜][\w▁ .\":-]+[|｜]>|\[/?[A-Z_]{3,}\]|</?tool_call>|\]<\]minimax\[>\[")


@dataclass(frozen=True)
class Case:
    """A format as spelled in a vocabulary."""

    name: str
    spelling: ToolSpelling
    tokenizer: ScriptedTokenizer

    @property
    def format(self) -> ToolCallFormat:
        return self.spelling.format


def source_of(name: str) -> str:
    return Path(FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def tools_of(name: str) -> ToolAbilities:
    return probe(source_of(name)).tools


@cache
def with_formats() -> list[str]:
    """Return the templates whose format is found."""
    return [name for name in TEMPLATES if tools_of(name).tool_format]


def case_of(found: ToolCallFormat, name: str = "", controls: tuple[str, ...] = ()) -> Case:
    """Return a case for a format in a vocabulary with these control tokens."""
    tokenizer = ScriptedTokenizer(more_control_tokens=[text for text in controls if text not in CONTROL_TOKENS])
    return Case(name, spelled_tools(found, Placeholders(tokenizer)), tokenizer)


@cache
def real_case(name: str, control: bool = True) -> Case:
    """Return a template's format in a vocabulary with the control tokens of the template, or with none of them."""
    found = tools_of(name).tool_format
    assert found is not None
    controls = tuple(sorted(set(_CONTROL.findall(source_of(name))))) if control else ()
    return case_of(found, name, controls)
