"""Tests of answers that consist only of tool calls in plain JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from time import perf_counter, process_time
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.types import FinishReason
from llmrun.engine.constraint.process import Verdict
from llmrun.engine.engine import Engine
from llmrun.engine.requests import CUSTOM, ChatPrompt, Request, ToolCall
from llmrun.engine.tool_calls.schemas import input_parameters
from llmrun.engine.tool_calls.text_calls import TextCallDecoder
from tests.engine.tool_calls.test_answers_with_tools import WEATHER, calls_of, qwen, request_with
from tests.support.cli.tool_chats import text_call
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.scripted_models import GREEDY
from tests.support.tiers import examples

pytestmark = [pytest.mark.push, pytest.mark.usefixtures("shared_processes")]

SCHEMAS = {"get": "{}", "get_all": "{}", "now": '{"type": "string"}'}
OSLO = text_call("weather", city="Oslo")


def accepts(arguments: str, schema: str) -> bool:
    """Stand in for the validation of arguments."""
    return schema == "{}"


def read(text: str, sizes: Sequence[int] = (1,), *, parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls of an answer that arrives in chunks. The sizes of the chunks repeat."""
    decoder = TextCallDecoder(SCHEMAS, accepts, parallel=parallel)
    shown, at, turn = "", 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        shown += decoder.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    calls = [*decoder.finish()]
    return shown if calls else shown + decoder.release(), calls


def held(text: str) -> str:
    """Return the part of a text that the decoder holds back after the whole text has arrived."""
    return text.removeprefix(TextCallDecoder(SCHEMAS, accepts).feed(text))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "get", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"arguments":{},"name":"get"}', "{}"),
        (' \n{\n "name" : "get" ,\n "arguments" : { }\n}\n\n', "{ }"),
        ('```json\n{"name": "get", "arguments": {"a": "```"}}\n```', '{"a": "```"}'),
        ('\n```\n{"name": "get", "arguments": {}}```\n', "{}"),
        ('```` JSON {"name": "get", "arguments": {}} ````', "{}"),
        ('~~~tool_call\r\n{"name": "get", "arguments": {}}\r\n~~~', "{}"),
        (
            '{"name": "get", "arguments": {"a": [1, -2.5e-3, 0.1E9, true, false, null, [], {"b": "\\u00e9\\n\\""}]}}',
            '{"a": [1, -2.5e-3, 0.1E9, true, false, null, [], {"b": "\\u00e9\\n\\""}]}',
        ),
    ],
)
def test_one_object_is_a_call(text: str, arguments: str) -> None:
    for sizes in ((1,), (3, 2), (len(text),)):
        assert read(text, sizes) == ("", [("get", arguments)])


GET, GET_ALL = '{"name": "get", "arguments": {"a": 1}}', '{"name": "get_all", "arguments": {}}'


@pytest.mark.parametrize(
    "text",
    [
        f"{GET}\n{GET_ALL}",
        f"{GET}{GET_ALL}\n",
        f"```json\n{GET}\n{GET_ALL}\n```",
        f"```json\n{GET}\n```\n\n```json\n{GET_ALL}\n```\n",
        f"~~~\n{GET}~~~{GET_ALL}",
        f"<tools>\n{GET}\n{GET_ALL}\n</tools>",
    ],
)
def test_several_objects_are_several_calls(text: str) -> None:
    """Qwen2.5-Coder writes the first form, all calls in one fence, a fence for each call, and the last form."""
    for sizes in ((1,), (3, 2), (len(text),)):
        assert read(text, sizes) == ("", [("get", '{"a": 1}'), ("get_all", "{}")])
        assert read(text, sizes, parallel=False) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "Yes.",
        '{"name": "get"}',
        '{"arguments": {}}',
        '{"name": "get", "arguments": {}, "id": 1}',
        '{"name": "get", "name": "get"}',
        '{"name": "get", "arguments": {"a": 1, "a": 2}}',
        '{"name": "get", "arguments": {"a": [{"b": 1, "b": 1}]}}',
        '{"name": "get", "arguments": "{}"}',
        '{"name": "get", "arguments": [1]}',
        '{"name": "get", "arguments": null}',
        '{"name": "now", "arguments": {}}',  # not what the schema allows
        '{"name": "other", "arguments": {}}',
        '{"name": "g\\u0065t", "arguments": {}}',
        '{"name": "get", "arguments": {}}.',
        'Here: {"name": "get", "arguments": {}}',
        '{"name": "get", "arguments": {}}{"name": "other", "arguments": {}}',
        '{"name": "get", "arguments": {}}, {"name": "get", "arguments": {}}',
        '{"name": "get", "arguments": {}}\n{"name": "now", "arguments": {}}',
        '{"name": "get", "arguments": {}}\n{"name": "get", "arguments": {"a": 1, "a": 1}}',
        '{"name": "get", "arguments": {}}\nThat was the first call.\n{"name": "get", "arguments": {}}',
        '```json\n{"name": "get", "arguments": {}}\n```\n```json\n```',
        '<tools>{"name": "get", "arguments": {}}',
        '<tools>{"name": "get", "arguments": {}}</tool>',
        '<tool>{"name": "get", "arguments": {}}</tool>',
        "<tools></tools>",
        '[{"name": "get", "arguments": {}}]',
        '{"name": "get", "arguments": {}',
        '```json\n{"name": "get", "arguments": {}}',
        '```json\n{"name": "get", "arguments": {}}\n````',
        '```json\n{"name": "get", "arguments": {}}\n~~~',
        '```json\n{"name": "get", "arguments": {}}\n``` or so',
        '```json\nHere: {"name": "get", "arguments": {}}\n```',
        '``{"name": "get", "arguments": {}}``',
        '{"name": "get", "arguments": {"a": 01}}',
        '{"name": "get", "arguments": {"a": 1.}}',
        '{"name": "get", "arguments": {"a": .5}}',
        '{"name": "get", "arguments": {"a": -}}',
        '{"name": "get", "arguments": {"a": NaN}}',
        '{"name": "get", "arguments": {"a": True}}',
        '{"name": "get", "arguments": {"a": [1,]}}',
        '{"name": "get", "arguments": {"a": 1,}}',
        '{"name": "get", "arguments": {a: 1}}',
        "{'name': 'get', 'arguments': {}}",
        '{"name": "get", "arguments": {"a": "\n"}}',
        '{"name": "get", "arguments": {"a": "\\x41"}}',
        '{"name": "get", "arguments": {"a": "\\u00g0"}}',
        '{"name": "get", "arguments": {"a": ' + "1" * 5000 + "}}",
        '{"name": "get", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}",
    ],
)
def test_other_text_is_not_changed(text: str) -> None:
    assert read(text) == read(text, (4, 1)) == (text, [])


@pytest.mark.parametrize(
    ("held_back", "released_by"),
    [
        (" \n", "Y"),
        ("```json\n", "["),
        ("```python\n", "d"),
        ('{"', "age"),
        ('{"name": "get', "x"),
        ('{"name": "get_all', "s"),
        ('{"name": "get", "arg', '"'),
        ('{"name": "get", "arguments": ', "["),
        ('{"name": "get", "arguments": {"a": tru', "t"),
        ('{"name": "get", "arguments": {"a": -', "x"),
        ('{"name": "get", "arguments": {"a": "b', "\n"),
        ('{"name": "get", "arguments": {"a": 1}', "]"),
        ('{"name": "get", "arguments": {"a": 1}} \n', "A"),
        ('```\n{"name": "get", "arguments": {}}\n``', "\n"),
        ('```\n{"name": "get", "arguments": {}}\n````', "\n"),
        ("<tools>", "<"),
        ("<to", "p"),
        ('```\n{"name": "get", "arguments": {}}\n```\n```json\n{"na', "i"),
    ],
)
def test_text_is_held_back_only_while_it_can_become_a_call(held_back: str, released_by: str) -> None:
    for end in range(1, len(held_back) + 1):
        assert held(held_back[:end]) == held_back[:end]
    assert held(held_back + released_by) == ""


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)
FRAGMENTS = [
    *'{}[]":,`~ \n1-.e',
    "```json\n",
    "<tools>",
    "</tools>",
    '"name"',
    '"arguments"',
    '{"name": "get", ',
    '"arguments": {',
    "true",
    "\\u",
]


@given(
    st.dictionaries(st.text(), VALUES),
    st.sampled_from([None, 2]),
    st.booleans(),
    st.sampled_from([("", ""), ("```", "```"), ("```json\n", "\n```"), ("~~~~\n", "\n~~~~\n")]),
    SIZES,
)
@settings(max_examples=examples(300), deadline=None)
def test_every_object_that_a_program_writes_is_a_call(
    arguments: dict[str, Any], indent: int | None, ascii_only: bool, fences: tuple[str, str], sizes: list[int]
) -> None:
    text = json.dumps({"name": "get", "arguments": arguments}, indent=indent, ensure_ascii=ascii_only)
    shown, [call] = read(text.join(fences), sizes)
    assert shown == ""
    assert json.loads(call[1]) == arguments


@given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=20), SIZES)
@settings(max_examples=examples(600), deadline=None)
def test_chunks_make_no_difference_and_lose_no_text(pieces: list[str], sizes: list[int]) -> None:
    text = "".join(pieces)
    whole = read(text, (len(text) + 1,))
    assert read(text, sizes) == whole
    assert whole[0] == text or whole[1]


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_a_changed_call_is_text_or_a_call(data: st.DataObject) -> None:
    text = '```json\n{"name": "get", "arguments": {"a": [1.5, true], "b": {"c": "\\u00e9 }"}}}\n```'
    at = data.draw(st.integers(0, len(text)))
    new = data.draw(st.sampled_from(["", *FRAGMENTS]))
    changed = text[:at] + new + text[at + data.draw(st.integers(0, 3)) :]
    shown, calls = read(changed, data.draw(SIZES))
    assert (shown, calls) == read(changed)
    if not calls:
        assert shown == changed
    else:
        [call] = calls
        inside = changed[changed.index("{") :].strip().strip("`")
        assert json.loads(inside) == {"name": call[0], "arguments": json.loads(call[1])}


@pytest.mark.night
@pytest.mark.parametrize("piece", ["a ", "[", "1", " ", '"b", '])
def test_long_answers_are_read_in_linear_time(piece: str) -> None:
    decoder = TextCallDecoder(SCHEMAS, accepts)
    decoder.feed('{"name": "get", "arguments": {"a": ' + ('"' if piece == "a " else "["))
    began = process_time()
    for _ in range(20_000):
        decoder.feed(piece)
    decoder.finish()
    assert process_time() - began < 5


# --- whole answers of an engine


def answered(script: str, tools: list[dict[str, Any]], *, text_calls: bool = True, **options: Any) -> Gathered:
    engine = Engine(qwen(script), text_calls=text_calls)
    try:
        [gathered] = answer_all(engine, [request_with(tools, options.pop("choice", "auto"), **options)])
    finally:
        engine.tools.close()
    return gathered


def assert_text(gathered: Gathered, text: str) -> None:
    assert (gathered.text, calls_of(gathered)) == (text, [])


@pytest.mark.parametrize("text", [OSLO, f"```json\n{OSLO}\n```", f"\n{OSLO}\n"])
def test_an_answer_becomes_a_call(text: str) -> None:
    gathered = answered(f"{text}<|im_end|>", [WEATHER], think=False)
    [call] = calls_of(gathered)
    assert (gathered.text, call.name, call.arguments) == ("", "weather", '{"city": "Oslo"}')
    assert gathered.finished.reason is FinishReason.TOOL_CALLS
    assert call.id.startswith("call_")


def test_an_answer_becomes_several_calls() -> None:
    script = f"```json\n{OSLO}\n```\n```json\n{text_call('weather', city='Rome')}\n```<|im_end|>"
    calls = calls_of(answered(script, [WEATHER], think=False))
    assert [call.arguments for call in calls] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert len({call.id for call in calls}) == 2


def test_thinking_may_precede_the_call() -> None:
    gathered = answered(f"<think>\nhm\n</think>\n\n{OSLO}<|im_end|>", [WEATHER])
    assert (gathered.reasoning, gathered.text, len(calls_of(gathered))) == ("hm", "", 1)


def test_ids_differ_in_later_turns() -> None:
    ids = set()
    for messages in ([], [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]):
        prompt = ChatPrompt([{"role": "user", "content": "Is it so?"}, *messages], [WEATHER])
        engine = Engine(qwen(f"{OSLO}<|im_end|>"))
        [gathered] = answer_all(engine, [Request(prompt, 100, sampling=GREEDY, think=False)])
        engine.tools.close()
        ids |= {call.id for call in calls_of(gathered)}
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (OSLO, {"text_calls": False}),
        (OSLO, {"choice": "none"}),
        (OSLO, {"max_tokens": len(OSLO)}),
        (OSLO, {"stop": ("}}",)}),
        (text_call("weather", city=1), {}),
        (text_call("weather"), {}),
        (text_call("other"), {}),
        (f"So: {OSLO}", {}),
        (OSLO[:-1], {}),
        (f"```json\n{OSLO}\n```\n", {"stop": ("\n```",)}),
    ],
)
def test_other_answers_stay_text(script: str, options: dict[str, Any]) -> None:
    gathered = answered(f"{script}<|im_end|>", [WEATHER], think=False, **options)
    stop = script.find(options["stop"][0]) if "stop" in options else len(script)
    assert_text(gathered, script[:stop])
    cut = "max_tokens" in options
    assert gathered.finished.reason is (FinishReason.LENGTH if cut else FinishReason.STOP)
    assert gathered.finished.stop == options.get("stop", [None])[0]


def test_a_stop_string_ends_an_answer_that_is_held_back() -> None:
    gathered = answered(f"{OSLO}<|im_end|>", [WEATHER], think=False, stop=("arg",))
    assert_text(gathered, '{"name": "weather", "')
    assert gathered.finished.timings.generated_tokens == len('{"name": "weather", "arg')


def test_a_cancelled_answer_keeps_its_text() -> None:
    engine = Engine(qwen(f"{OSLO}<|im_end|>"))
    number = engine.submit(request_with([WEATHER], think=False))
    text = ""
    while not engine.idle:
        for event in engine.step():
            text += getattr(event, "text", "")
            if len(getattr(event, "tokens", ())) and event.tokens[-1] == ord("O"):  # type: ignore[union-attr]
                engine.cancel(number)
    assert text == OSLO[: OSLO.index("O") + 1]


def test_the_call_in_the_tags_of_the_template_follows_text_that_is_no_call() -> None:
    gathered = answered(f"```json\n{OSLO}<tool_call>\n{OSLO}\n</tool_call><|im_end|>", [WEATHER], think=False)
    assert (gathered.text, len(calls_of(gathered))) == (f"```json\n{OSLO}", 1)


def test_the_whole_schema_counts() -> None:
    """A grammar cannot enforce `uniqueItems`, so the schema of the grammar is weaker."""
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "list", "parameters": parameters}}
    assert len(calls_of(answered(text_call("list", a=[1, 2]) + "<|im_end|>", [tool], think=False))) == 1
    script = text_call("list", a=[1, 1])
    assert_text(answered(f"{script}<|im_end|>", [tool], think=False), script)


@pytest.mark.parametrize(("syntax", "definition"), [("regex", "[a-z]+"), ("lark", "start: /[a-z]+/")])
def test_the_grammar_of_a_custom_tool_counts(syntax: str, definition: str) -> None:
    function = {"name": "run", "description": "", "parameters": input_parameters({"type": "string"})}
    tool = {"type": "function", "function": function, CUSTOM: {"syntax": syntax, "definition": definition}}
    assert len(calls_of(answered(text_call("run", input="abc") + "<|im_end|>", [tool], think=False))) == 1
    script = text_call("run", input="ab1")
    assert_text(answered(f"{script}<|im_end|>", [tool], think=False), script)


def test_the_objects_of_a_strict_tool_are_closed() -> None:
    function = {"name": "go", "parameters": {"type": "object", "properties": {"a": {}}}, "strict": True}
    tool = {"type": "function", "function": function}
    assert len(calls_of(answered(text_call("go", a=1) + "<|im_end|>", [tool], think=False))) == 1
    script = text_call("go", a=1, b=2)
    assert_text(answered(f"{script}<|im_end|>", [tool], think=False), script)


def test_schemas_that_take_too_long_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests wait for each validation."""
    validated = []

    def validate(text: str, *others: object, **options: object) -> Verdict:
        validated.append(text)
        return Verdict("not validated", "it takes too long")

    monkeypatch.setattr("llmrun.engine.constraint.process.validate", validate)
    engine = Engine(qwen(f"{OSLO}<|im_end|>"))
    for _ in range(4):
        [gathered] = answer_all(engine, [request_with([WEATHER], think=False)])
        assert_text(gathered, OSLO)
    assert len(validated) == 3
    huge = {"type": "function", "function": {"name": "weather", "parameters": {"title": "a" * 2000}}}
    monkeypatch.setattr("llmrun.engine.tool_calls.prompting._LONGEST_SCHEMA", 2000)
    assert_text(answered(f"{OSLO}<|im_end|>", [huge], think=False), OSLO)
    assert len(validated) == 3


@pytest.mark.parametrize("parameters", [None, {}, "missing"])
def test_a_tool_without_a_schema_takes_any_arguments(parameters: Any) -> None:
    function = {"name": "go"} if parameters == "missing" else {"name": "go", "parameters": parameters}
    tool = {"type": "function", "function": function}
    [call] = calls_of(answered(text_call("go", to=[1]) + "<|im_end|>", [tool], think=False))
    assert call == ToolCall(call.id, "go", '{"to": [1]}')


@pytest.mark.night
def test_a_hostile_schema_ends_within_seconds() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    script = text_call("go", a="a" * 50 + "b")
    began = perf_counter()
    assert_text(answered(f"{script}<|im_end|>", [tool], think=False), script)
    assert perf_counter() - began < 20


def test_closing_an_engine_ends_the_process_that_validates() -> None:
    me = psutil.Process()
    before = {*me.children()}
    engine = Engine(qwen(f"{OSLO}<|im_end|>"))
    answer_all(engine, [request_with([WEATHER], think=False)])
    assert {*me.children()} - before
    engine.close()
    assert not {*me.children()} - before
