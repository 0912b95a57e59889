"""The tool-call formats of llama.cpp's templates, in vocabularies that have their tags as control tokens.

tool_formats.tsv lists, for each template in llama.cpp's source: the kind of calls, the text that begins them, and the
keys of calls that are JSON. It was written by a program linked with llama.cpp (as vendored in llama-cpp-python 0.3.36)
that ran its `autoparser::analyze_template` on each template. For templates that llama.cpp parses with code of their own
(common/parsers/), the row was read from this code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path

from llmrun.backends.scripted import CONTROL_TOKENS, ScriptedTokenizer
from llmrun.engine.templates.probing import probe
from llmrun.engine.templates.tool_format import ToolAbilities, ToolCallFormat
from llmrun.engine.thinking import Placeholders
from llmrun.engine.tool_calls.openings import ToolSpelling, spelled_tools
from tests.support.models.downloads import llama_cpp_source

FOLDER = llama_cpp_source() / "vendor/llama.cpp/models/templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
_ROWS = [line.split("\t") for line in Path(__file__).with_name("tool_formats.tsv").read_text("utf-8").splitlines()]
EXPECTED = {name: (kind, start.replace("\\n", "\n"), keys) for name, kind, start, keys in _ROWS}
# llama.cpp has a format for these templates, and we have none, or the other way around.
DIFFERENT = {
    "fireworks-ai-llama-3-firefunction-v2": "it needs the variables `functions` and `datetime`, and ignores `tools`",
    "llama-cpp-deepseek-r1": "Jinja2, and so `transformers`, cannot render it with tools: `tojson` of a generator",
    "meetkai-functionary-medium-v3.2": "its answers begin with the name of their recipient",
    "ibm-granite-granite-3.3-2B-Instruct": "it does not render calls; llmrun knows the format its prompt describes",
}
# The templates for which probing must find a format.
WITH_FORMATS = [name for name in TEMPLATES if (EXPECTED[name][0] == "-") == (name in DIFFERENT)]
_CONTROL = re.compile(r"<[|｜][\w▁ .\":-]+[|｜]>|\[/?[A-Z_]{3,}\]|</?tool_call>|\]<\]minimax\[>\[")


class Case:
    """A format as spelled in a vocabulary. It is made on first use, because probing a template takes 0.1 s."""

    def __init__(self, name: str, make: Callable[[], tuple[ToolSpelling, ScriptedTokenizer]]) -> None:
        self.name = name
        self._make = make

    @cached_property
    def _made(self) -> tuple[ToolSpelling, ScriptedTokenizer]:
        return self._make()

    @property
    def spelling(self) -> ToolSpelling:
        return self._made[0]

    @property
    def tokenizer(self) -> ScriptedTokenizer:
        return self._made[1]

    @property
    def format(self) -> ToolCallFormat:
        return self.spelling.format


def source_of(name: str) -> str:
    return Path(FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def tools_of(name: str) -> ToolAbilities:
    return probe(source_of(name)).tools


def case_of(found: ToolCallFormat) -> Case:
    """Return a case for a format in a vocabulary without control tokens of its own."""
    return Case("", lambda: _spelled(found, ()))


@cache
def real_case(name: str, control: bool = True) -> Case:
    """Return a template's format in a vocabulary with the control tokens of the template, or with none of them."""

    def make() -> tuple[ToolSpelling, ScriptedTokenizer]:
        found = tools_of(name).tool_format
        assert found is not None
        return _spelled(found, sorted(set(_CONTROL.findall(source_of(name)))) if control else ())

    return Case(name, make)


def _spelled(found: ToolCallFormat, controls: Sequence[str]) -> tuple[ToolSpelling, ScriptedTokenizer]:
    tokenizer = ScriptedTokenizer(more_control_tokens=[text for text in controls if text not in CONTROL_TOKENS])
    return spelled_tools(found, Placeholders(tokenizer)), tokenizer
