"""Tests of tool calls with the real templates in llama.cpp's source. The templates themselves are the oracle."""

from __future__ import annotations

import json
import re
from functools import cache
from random import Random
from typing import Any

import pytest

from llmrun.engine.tool_calls.grammar import tool_grammar
from llmrun.engine.tool_calls.prompting import template_messages
from llmrun.engine.tool_calls.schemas import read_tools
from tests.support.templates.template_runs import PROCESS
from tests.support.tool_calls.answers import parsed
from tests.support.tool_calls.forced import forced_call_problem
from tests.support.tool_calls.formats import WITH_FORMATS, Case, case_of, real_case, source_of, tools_of
from tests.support.tool_calls.grammars import accepts, problem

pytestmark = pytest.mark.push

ASKED = "Qzquestion"
PROPERTIES = {
    "count": {"type": "integer", "description": "How many"},
    "days": {"type": "array", "description": "Which", "items": {"type": "integer"}},
    "flag": {"type": "boolean", "description": "Whether"},
    "options": {
        "type": "object",
        "description": "How",
        "properties": {"deep": {"type": "boolean"}, "names": {"type": "array", "items": {"type": "string"}}},
        "additionalProperties": {"type": "string", "description": "More"},
    },
    "place": {"type": "string", "description": "Where"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["place"]}
DEFINITIONS = [
    {"type": "function", "function": {"name": name, "description": "A tool", "parameters": PARAMETERS}}
    for name in ("get_weather", "web.search-2")
]
TOOLS = read_tools(DEFINITIONS)
FULL = {
    "count": 3,
    "days": [1, 20],
    "flag": True,
    "options": {"deep": False, "names": ["Zürich", "an <old> town"]},
    "place": 'Zürich, the "old" town\nand {more} 北京',
}
# LFM2.5's template does not escape quotes and newlines in strings.
# MiniMax-M3's template writes arrays and objects as tags, which are not read.
SCALARS = {key: value for key, value in FULL.items() if key not in ("days", "options")}
NAIVE = {"LFM2.5-8B-A1B": {**FULL, "place": "Zürich, the old town and {more}"}, "MiniMax-M3": SCALARS}
SIZES = ((), (1,), (2, 7, 1), (13,))


@pytest.fixture(params=WITH_FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def calls_of(name: str) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("get_weather", NAIVE.get(name, FULL)),
        ("web.search-2", {"place": "42"}),
    ]
    if "R1-Distill" not in name:  # these templates end the section again after each call from the second on
        calls.append(("get_weather", {"place": ""}))
    found = tools_of(name).tool_format
    return calls if found and found.parallel else calls[:1]


def message_of(calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"callabc0{number}",
                "type": "function",
                "function": {"name": tool, "arguments": json.dumps(arguments)},
            }
            for number, (tool, arguments) in enumerate(calls, 1)
        ],
    }


@cache
def written(name: str) -> str:
    """Return calls as the template writes them."""
    asked = {"role": "user", "content": ASKED}
    given: dict[str, Any] = {"bos_token": "", "eos_token": "", "add_generation_prompt": False}
    given["messages"] = template_messages([asked, message_of(calls_of(name))], tools_of(name))
    given["tools"] = DEFINITIONS if tools_of(name).takes_tools else None
    text = PROCESS.render(source_of(name), name, given).rpartition(ASKED)[2]
    text = text.partition("<|SYSTEM_TOKEN|>")[0]  # Command-R+ repeats its instructions at the end
    found = tools_of(name).tool_format
    assert found is not None
    head = re.split("[\ufdd1-\ufdd3]", found.section_start + found.call_start)[0]
    start = text.rfind(head) if found.section_start else text.find(head or "get_weather\n")
    end = found.section_end or found.call_end or "}"
    assert start >= 0
    assert end in text
    return text[start : text.rfind(end) + len(end)]


def spelled(case: Case, text: str) -> str:
    """Replace the control tokens of a text with their placeholders."""
    for point, token in sorted(case.spelling.texts.items(), key=lambda each: -len(each[1])):
        text = text.replace(token, chr(point))
    return text


def test_what_the_template_writes_is_what_the_parser_reads(name: str) -> None:
    for case in (real_case(name), real_case(name, control=False)):
        for sizes in SIZES:
            found = parsed(case, TOOLS, spelled(case, written(name)), sizes)
            assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls_of(name)
            assert all(call.ended for call in found.calls)
            assert (found.text, found.broken) == ("", [])
            assert len({call.id for call in found.calls}) == len(found.calls)


@pytest.mark.cover(1)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_the_grammar_accepts_what_the_template_writes(name: str, choice: str) -> None:
    for case in (real_case(name), real_case(name, control=False)):
        grammar = tool_grammar(case.spelling, TOOLS, choice)
        assert problem(case, grammar) == ""
        text = spelled(case, written(name))
        assert accepts(case, grammar, text)
        assert not accepts(case, grammar, text.replace("get_weather", "get_wether"))
        assert not accepts(case, grammar, wrong_type(case, text))


def wrong_type(case: Case, text: str) -> str:
    """Replace the integer argument with a word."""
    at = text.index("3", text.index("count"))
    return f"{text[:at]}many{text[at + 1 :]}"


@pytest.mark.night
def test_one_call_at_most_if_calls_are_not_parallel(name: str) -> None:
    case = real_case(name)
    found = case.format
    one, two = [[("web.search-2", {"place": "x"}, "callabc01")] * count for count in (1, 2)]
    for choice in ("required", "auto", "web.search-2"):
        grammar = tool_grammar(case.spelling, TOOLS, choice, parallel=False)
        assert accepts(case, grammar, found.written(one))
        assert not accepts(case, grammar, found.written(two))
    grammar = tool_grammar(case.spelling, TOOLS, "get_weather")
    assert not accepts(case, grammar, found.written(one))


def test_an_answer_needs_no_call_unless_one_is_required(name: str) -> None:
    case = real_case(name)
    plain = "It rains."
    call = case.format.written([("web.search-2", {"place": "x"}, "callabc01")])
    for choice in ("auto", "none"):
        assert accepts(case, tool_grammar(case.spelling, TOOLS, choice), plain)
    assert not accepts(case, tool_grammar(case.spelling, TOOLS, "none"), call)
    assert not accepts(case, tool_grammar(case.spelling, TOOLS, "required"), plain)
    assert not accepts(case, tool_grammar(case.spelling, TOOLS, "required"), "")


def test_text_before_calls_stays_text(name: str) -> None:
    case = real_case(name)
    found = case.format
    call = found.written([("web.search-2", {"place": "x"}, "callabc01")])
    if not (found.section_start + found.call_start).strip().startswith(("{", "\ufdd1", "to=")):
        said = parsed(case, TOOLS, f"Let me see.\n\n{found.after_plain}{call}", (3,))
        assert (said.text, said.order, said.calls[0].name) == ("Let me see.", ["text", "call"], "web.search-2")


@pytest.mark.night
def test_forced_calls_are_valid(name: str) -> None:
    """`scripts/soak tool-calls` forces many more."""
    for number in range(6):
        assert forced_call_problem(real_case(name, control=number % 2 == 0), f"quick {number}") == ""


@pytest.mark.night
def test_an_unfinished_call_is_reported(name: str) -> None:
    case = real_case(name)
    whole = spelled(case, written(name))
    random = Random(name)
    for _ in range(20):
        cut = random.randrange(1, len(whole))
        found = parsed(case, TOOLS, whole[:cut], (5,))
        unfinished = [at for at, call in enumerate(found.calls) if not call.ended]
        assert [each.index for each in found.broken] == unfinished
        if not found.calls:
            assert found.text.strip() == whole[:cut].translate(case.spelling.texts).strip()


def test_a_vocabulary_without_tags_is_no_obstacle() -> None:
    found = tools_of("Qwen-Qwen3-0.6B").tool_format
    assert found is not None
    assert case_of(found).spelling.tokens == {}


def test_a_spelled_out_control_token_is_no_tag() -> None:
    case = real_case("Qwen-Qwen3-0.6B")
    assert case.spelling.tokens
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "x"}}\n</tool_call>'
    found = parsed(case, TOOLS, text, (2,))
    assert (found.text, found.calls, found.broken) == (text, [], [])
