"""Tests of finding a template's tool-call format, against llama.cpp's own analysis of the same templates."""

from __future__ import annotations

import contextlib
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from llmrun.base.errors import LlmrunError
from llmrun.engine.templates.probing import probe
from llmrun.engine.templates.tool_format import CALL_ID, INDEX, NAME, ToolAbilities, ToolCallFormat
from llmrun.engine.tool_calls.grammar import tool_grammar
from llmrun.engine.tool_calls.schemas import read_tools
from tests.support.growth import TIMES, growth
from tests.support.templates.template_runs import PROCESS
from tests.support.tiers import examples
from tests.support.tool_calls.answers import parsed
from tests.support.tool_calls.formats import DIFFERENT, EXPECTED, TEMPLATES, WITH_FORMATS, case_of, source_of, tools_of
from tests.support.tool_calls.grammars import problem


def kind_of(found: ToolCallFormat) -> str:
    if found.arguments.style == "items":
        return "items"
    return "json" if "{" in found.call_start.partition(NAME)[0] else "name+json"


def test_every_template_is_in_the_table() -> None:
    assert sorted(EXPECTED) == TEMPLATES


@pytest.mark.sample(20)
@pytest.mark.push
@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - DIFFERENT.keys()))
def test_the_format_is_the_one_llama_cpp_finds(name: str) -> None:
    kind, start, keys = EXPECTED[name]
    found = tools_of(name).tool_format
    assert (kind == "-") == (found is None)
    if found is None:
        return
    assert kind_of(found) == kind
    begun = (found.section_start + found.call_start).strip()
    assert begun.startswith(start) or start == "-"
    written = found.call_start + found.call_end
    if keys == "name as key":
        assert f'"{NAME}": ' in found.call_start
    elif keys != "-":
        name_key, arguments_key, *_ = keys.split(",")
        assert f'"{name_key}": "{NAME}"' in found.call_start
        assert found.call_start.endswith(f'"{arguments_key}": ')
        assert all(f'"{key}": ' in written for key in keys.split(","))


@pytest.mark.parametrize("name", DIFFERENT)
def test_known_differences_are_still_there(name: str) -> None:
    assert (tools_of(name).tool_format is None) != (EXPECTED[name][0] == "-")


@pytest.mark.push
def test_every_template_that_shows_tools_has_a_format() -> None:
    without = [name for name in TEMPLATES if tools_of(name).takes_tools and not tools_of(name).tool_format]
    assert without == ["meetkai-functionary-medium-v3.2"]
    assert [name for name in TEMPLATES if tools_of(name).tool_format] == WITH_FORMATS
    assert len(WITH_FORMATS) >= 63


@pytest.mark.parametrize("name", ["Qwen3-Coder", "MiniMax-M3", "mistralai-Mistral-Nemo-Instruct-2407", "LFM2-8B-A1B"])
def test_the_process_finds_the_same_format(name: str) -> None:
    assert PROCESS.abilities(source_of(name)).tools == tools_of(name)


@pytest.mark.push
@pytest.mark.parametrize("name", WITH_FORMATS)
def test_a_format_survives_json(name: str) -> None:
    assert ToolAbilities.from_json(to_builtins(tools_of(name))) == tools_of(name)


def test_ids_and_numbers_of_calls_are_found() -> None:
    small = tools_of("Mistral-Small-3.2-24B-Instruct-2506").tool_format
    kimi = tools_of("moonshotai-Kimi-K2").tool_format
    third = tools_of("Kimi-K3").tool_format
    assert small
    assert kimi
    assert third
    assert (small.call_start, small.id_form) == (f"[TOOL_CALLS]{NAME}[CALL_ID]{CALL_ID}[ARGS]", "short")
    assert f"functions.{NAME}:{INDEX}" in kimi.call_start
    assert (kimi.first_index, third.first_index) == (0, 1)


def test_arguments_are_objects_or_text_as_the_template_needs() -> None:
    assert tools_of("deepseek-ai-DeepSeek-R1-Distill-Llama-8B").arguments_as_text
    assert not tools_of("Qwen-Qwen3-0.6B").arguments_as_text


def test_a_template_for_single_calls_is_recognized() -> None:
    single = [name for name in WITH_FORMATS if not getattr(tools_of(name).tool_format, "parallel", True)]
    assert "meta-llama-Llama-3.1-8B-Instruct" in single
    assert "openai-gpt-oss-120b" in single
    assert "Qwen-Qwen3-0.6B" not in single


# --- made-up templates

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
TOOLS = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}BEFORE{{ c.function.name }}MIDDLE{{ c.function.arguments | tojson }}AFTER"
    "{% endfor %}"
)
ITEMS = (
    "{% for c in m.tool_calls or [] %}BEFORE{{ c.function.name }}MIDDLE{% for k, v in c.function.arguments.items() %}"
    "[{{ k }}]={{ v if v is string else v | tojson }};{% endfor %}AFTER{% endfor %}"
)
END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TAGS = st.text("<>/|[]{}():=\"' \nabcXYZ_", max_size=12)


def made_up(before: str, middle: str, after: str, calls: str) -> str:
    """Return a template that writes these texts around the parts of a call."""
    source = TOOLS + PLAIN + calls + END
    for word, text in {"BEFORE": before, "MIDDLE": middle, "AFTER": after}.items():
        source = source.replace(word, "{{ " + repr(text).replace("{", "\\x7b").replace("}", "\\x7d") + " }}")
    return source


@pytest.mark.push
@given(TAGS, TAGS, TAGS, st.sampled_from([CALLS, ITEMS]), TAGS)
@settings(max_examples=examples(150), deadline=None)
def test_any_format_can_be_parsed_and_enforced(before: str, middle: str, after: str, calls: str, answer: str) -> None:
    """Whatever the tags are, parsing and writing a grammar end without an exception that is not LlmrunError."""
    found = probe(made_up(before, middle, after, calls)).tools.tool_format
    if found is None:
        return
    case = case_of(found)
    schema = {"type": "object", "properties": {"qa": {"type": "string"}, "qb": {"type": "integer"}}}
    tools = read_tools([{"function": {"name": "one", "parameters": schema}}])
    text = found.written([("one", {"qa": answer, "qb": 1}, "")])
    for whole in (text, answer + text, text[:-2], text + answer):
        assert parsed(case, tools, whole, (1,)) == parsed(case, tools, whole)
    for choice in ("auto", "none", "required"):
        with contextlib.suppress(LlmrunError):
            assert problem(case, tool_grammar(case.spelling, tools, choice)) == ""


@pytest.mark.night
@given(TAGS, TAGS, TAGS, st.sampled_from([CALLS, ITEMS]))
@settings(max_examples=examples(150), deadline=None)
def test_a_format_predicts_its_template(before: str, middle: str, after: str, calls: str) -> None:
    """Whatever the tags are: either no format is found, or one that predicts what the template writes."""
    found = probe(made_up(before, middle, after, calls)).tools.tool_format
    if found is None:
        return
    assert found == ToolCallFormat.from_json(to_builtins(found))
    arguments = {"qa": "Qzx", "qb": "Qzy"}
    written = "".join(f"{before}{name}{middle}{found_arguments(calls, arguments)}{after}" for name in ("one", "two"))
    assert found.written([("one", arguments, ""), ("two", arguments, "")]).strip() == written.strip()


def found_arguments(calls: str, arguments: dict[str, str]) -> str:
    if calls == ITEMS:
        return "".join(f"[{key}]={value};" for key, value in arguments.items())
    return '{"qa": "Qzx", "qb": "Qzy"}'


@pytest.mark.night
@pytest.mark.parametrize(
    "tag", ["'<x>' + 'w' * SIZE + '<y>'", "'<' + 'w' * 50 + '> ' * SIZE", "'[' * SIZE", "'{' * SIZE"]
)
def test_a_huge_tag_is_no_format_and_makes_nothing_slow(tag: str) -> None:
    source = TOOLS + PLAIN + CALLS.replace("BEFORE", "{{ " + tag + " }}") + END

    def look_for(size: int) -> None:
        assert probe(source.replace("SIZE", str(size))).tools.tool_format is None

    assert growth(look_for, 100_000) < 3 * TIMES


@pytest.mark.push
def test_probing_tools_keeps_to_the_time_limit() -> None:
    """Each rendering takes about 0.1 s, so probing would take seconds without the limit."""
    loop = "{% for i in range(25) %}{% for j in range(90000) %}{% if j %}{% endif %}{% endfor %}{% endfor %}"
    began = thread_time()
    found = probe(loop + TOOLS + PLAIN + CALLS + END, limit_s=0.2)
    assert thread_time() - began < 1.5
    assert found.tools.tool_format is None


def test_a_template_that_writes_slots_has_no_format() -> None:
    source = TOOLS + PLAIN + CALLS.replace("BEFORE", "<call>\ufdd1\ufdd4").replace("AFTER", "</call>") + END
    found = probe(source).tools.tool_format
    assert found is None or found.call_start.count(NAME) == 1
