"""Tests of parsing tool calls from streamed text."""

from __future__ import annotations

import json
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmrun.backends.scripted import ScriptedTokenizer
from llmrun.engine.requests import ToolCallDelta
from llmrun.engine.thinking import Placeholders
from llmrun.engine.tool_calls.openings import spelled_tools
from llmrun.engine.tool_calls.parser import CallDecoder
from llmrun.engine.tool_calls.schemas import read_tools
from tests.support.tiers import examples
from tests.support.tool_calls.answers import Parsed, parsed
from tests.support.tool_calls.formats import Case, real_case, tools_of

SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer"},
        "when": {"type": ["string", "null"]},
        "more": {"type": "object"},
    },
}
TOOLS = read_tools([{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get", "now")])
HERMES = real_case("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", control=False)
QWEN = real_case("Qwen3-Coder", control=False)
LLAMA = real_case("meta-llama-Llama-3.1-8B-Instruct", control=False)
NEMO = real_case("mistralai-Mistral-Nemo-Instruct-2407", control=False)
OSS = real_case("openai-gpt-oss-120b", control=False)
CASES = [HERMES, QWEN, LLAMA, NEMO, OSS] + [
    real_case(name, control=False)
    for name in (
        "google-gemma-4-31B-it",
        "LFM2.5-8B-A1B",
        "MiniMax-M3",
        "deepseek-ai-DeepSeek-V3.2",
        "moonshotai-Kimi-K2",
        "openbmb-MiniCPM5-1B",
        "muse-glimmer",
        "Apertus-8B-Instruct",
    )
]


def calls(found: Parsed) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls if call.ended]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "get", "arguments": {"place": "Ulm"}}', {"place": "Ulm"}),
        ('{ "name" : "get",\n "arguments" : {} }', {}),
        ('{"name":"get","arguments":{"place":"</tool_call>\\"}"}}', {"place": '</tool_call>"}'}),
    ],
)
def test_json_calls_are_read_whatever_their_whitespace(text: str, arguments: object) -> None:
    assert calls(parsed(HERMES, TOOLS, f"<tool_call>{text}</tool_call>", (3,))) == [("get", arguments)]


def test_the_end_of_the_answer_ends_a_complete_call() -> None:
    found = parsed(HERMES, TOOLS, '<tool_call>\n{"name": "get", "arguments": {"days": 1}}')
    assert calls(found) == [("get", {"days": 1})]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get", "arguments": {"days": 1}',
        '<tool_call>\n{"name": "get", "arguments": {"days": 01}}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": {"days": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": {"a": "b\n"}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "a b", "arguments": {}}\n</tool_call>',
        "<tool_call>\nget(1)\n</tool_call>",
        "<tool_call>",
        '<tool_call>\n{"name": "get", "arguments": ' + '{"a": ' * 200,
    ],
)
def test_malformed_calls_are_reported(text: str) -> None:
    found = parsed(HERMES, TOOLS, f"Well. {text}", (4,))
    if found.calls:
        assert found.order[:3] == ["text", "call", "broken"]
    else:  # a call without a name is text
        assert (found.text, found.order) == (f"Well.{text}", ["text"])
    assert len(found.broken) == len(found.calls)
    assert not any(call.ended for call in found.calls)


def test_the_answer_goes_on_after_a_malformed_call() -> None:
    good = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    found = parsed(HERMES, TOOLS, f"<tool_call>\nget(1)\n</tool_call>\n{good} Done.", (2,))
    assert (found.order, calls(found)) == (["text", "call", "text"], [("now", {})])
    assert found.text == "<tool_call>\nget(1)\n</tool_call>Done."


def test_text_that_only_begins_like_a_call_is_shown() -> None:
    found = parsed(HERMES, TOOLS, "if a <tool and b <tool_cal", (1,))
    assert (found.text, found.order) == ("if a <tool and b <tool_cal", ["text"])


def test_a_json_answer_is_no_call_unless_it_names_a_tool() -> None:
    for text in ('{"name": "Ulm", "parameters": {}}', '{"a": 1}', 'See {"name": "get", "parameters": {}}'):
        assert parsed(LLAMA, TOOLS, text, (1,)).text == text
    assert calls(parsed(LLAMA, TOOLS, ' {"name": "get", "parameters": {"days": 3}}', (1,))) == [("get", {"days": 3})]


def test_gpt_oss_may_write_the_recipient_after_the_channel() -> None:
    for start in (
        "<|channel|>commentary to=functions.get <|constrain|>json",
        "to=functions.get<|channel|>commentary json",
    ):
        assert calls(parsed(OSS, TOOLS, f'{start}<|message|>{{"days": 1}}<|call|>', (5,))) == [("get", {"days": 1})]


def test_qwen_coder_may_leave_out_the_first_tag() -> None:
    text = "<function=get>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    assert calls(parsed(QWEN, TOOLS, text, (1,))) == [("get", {"days": 2})]


@pytest.mark.parametrize(
    ("argument", "written", "value"),
    [
        ("place", "42", "42"),
        ("place", "\nnull\n", "null"),
        ("place", "\n a \n\n", " a \n"),
        ("place", "a < b </p> {", "a < b </p> {"),
        ("days", "\n7\n", 7),
        ("when", "null", None),
        ("when", "42", "42"),
        ("when", '"x"', '"x"'),
        ("more", '{"a": ["</parameter>", true]}', {"a": ["</parameter>", True]}),
        ("more", "{'a': None}", {"a": None}),
        ("unknown", "true", True),
        ("unknown", "some text", "some text"),
    ],
)
def test_values_get_the_type_of_the_schema(argument: str, written: str, value: object) -> None:
    text = f"<tool_call>\n<function=get>\n<parameter={argument}>{written}</parameter>\n</function>\n</tool_call>"
    assert calls(parsed(QWEN, TOOLS, text, (1,))) == [("get", {argument: value})]


def test_ids_of_the_model_are_kept_and_others_are_made() -> None:
    solar = real_case("upstage-Solar-Open-100B", control=False)
    text = solar.format.written([("get", {}, "abc123456")])
    assert parsed(solar, TOOLS, text).calls[0].id == "abc123456"
    first, again = (parsed(HERMES, TOOLS, HERMES.format.written([("get", {}, "")] * 2)).calls for _ in range(2))
    assert [call.id for call in first] == [call.id for call in again]
    assert first[0].id.startswith("call_")
    assert len({call.id for call in first}) == 2
    assert len(parsed(NEMO, TOOLS, NEMO.format.written([("get", {}, "")])).calls[0].id) == 9


def test_the_seed_makes_ids_differ_between_answers() -> None:
    text = HERMES.format.written([("get", {}, "")])
    ids = set()
    for seed in ("1", "2"):
        first = CallDecoder(HERMES.spelling, TOOLS, seed).feed(text)[0]
        assert isinstance(first, ToolCallDelta)
        ids.add(first.id)
    assert len(ids) == 2


def test_arguments_arrive_while_they_are_written() -> None:
    decoder = CallDecoder(HERMES.spelling, TOOLS)
    text, start, arguments = decoder.feed('Look. <tool_call>\n{"name": "get", "arguments": {"place": "U')
    assert isinstance(start, ToolCallDelta)
    assert (text, start.name, arguments) == ("Look.", "get", ToolCallDelta(0, arguments='{"place": "U'))
    assert decoder.feed("lm") == [ToolCallDelta(0, arguments="lm")]


def test_a_call_of_an_unknown_tool_is_still_a_call() -> None:
    assert calls(parsed(HERMES, TOOLS, HERMES.format.written([("other", {"a": 1}, "")]))) == [("other", {"a": 1})]


WORDS = """<tool_call> </tool_call> <function= get now > </function> <parameter= place { } [ ] " : , \\ null -1.5e3
[TOOL_CALLS] >>> ' ( ) <|tool_call>call: <|tool_call_start|> = to= <arg_key> <invoke <|"|> ]<]minimax[>[ <|channel|>
<![CDATA[ <｜DSML｜invoke"""
TEXTS = ["\n", " ", "all\n", '{"name": "get", ', '"arguments": {', '"parameters": {}}']
FRAGMENTS = st.lists(st.one_of(st.sampled_from(WORDS.split() + TEXTS), st.text(max_size=4)), max_size=25)


@pytest.mark.push
@given(st.sampled_from(CASES), FRAGMENTS, st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=examples(600), deadline=None)
def test_chunks_make_no_difference(case: Case, pieces: list[str], sizes: list[int]) -> None:
    text = "".join(pieces)
    whole = parsed(case, TOOLS, text)
    assert parsed(case, TOOLS, text, sizes) == whole
    for call in whole.calls:
        if call.ended:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.push
@given(st.sampled_from(CASES), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_changed_calls_are_read_or_reported(case: Case, data: st.DataObject) -> None:
    found = case.format
    given_ = [("get", {"place": "Ulm", "days": 2}, "abcdefgh1"), ("now", {}, "abcdefgh2")]
    text = found.written(given_ if found.parallel else given_[:1])
    at = data.draw(st.integers(0, len(text) - 1))
    change = data.draw(st.sampled_from(["", "x", " ", "<", "}", '"', "\n"]))
    changed = text[:at] + change + text[at + data.draw(st.integers(0, 3)) :]
    whole = parsed(case, TOOLS, changed)
    assert parsed(case, TOOLS, changed, (1,)) == whole
    assert sum(not call.ended for call in whole.calls) == len(whole.broken)


@pytest.mark.night
@pytest.mark.parametrize(
    "piece", ["<", "<tool_call>", "<tool_call>{", '<tool_call>{"name": "get", "arguments": {"a": "', " ", "a "]
)
def test_long_answers_are_parsed_in_linear_time(piece: str) -> None:
    decoder = CallDecoder(HERMES.spelling, TOOLS)
    began = process_time()
    for _ in range(20_000):
        decoder.feed(piece)
    decoder.finish()
    assert process_time() - began < 5


@pytest.mark.parametrize("sizes", [(), (1,), (5,)])
def test_the_end_token_is_not_part_of_a_call(sizes: tuple[int, ...]) -> None:
    """Nemotron Nano 2 and others write that token right after the calls, but answers come without it."""
    form = tools_of("NVIDIA-Nemotron-Nano-v2").tool_format
    assert form is not None
    found = replace(form, section_end="]</TOOLCALL><|im_end|>")
    tokenizer = ScriptedTokenizer()
    spelling = spelled_tools(found, Placeholders(tokenizer), tokenizer.end_of_generation)
    text = '<TOOLCALL>[{"name": "get", "arguments": {"days": 2}}, {"name": "now", "arguments": {}}]</TOOLCALL>'
    answer = parsed(Case("", lambda: (spelling, tokenizer)), TOOLS, text + "\n", sizes)
    assert calls(answer) == [("get", {"days": 2}), ("now", {})]
    assert (answer.text, answer.broken) == ("", [])
