"""Tests that misbehaving servers lead to one clear line, in time, and harm neither the terminal nor the memory."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmrun.engine.tools.tool import RefusedJson, ToolFailed, cleaned, cleaned_json, decode_json, result_of, shortened
from llmrun.engine.tools.tools_file import NAME
from tests.support.tiers import examples
from tests.support.tools.boxes import LIMITS, fake_server, opened

DEEP = 10_000
UNUSABLE = "tool echo: the answer cannot be used"
HOSTILE = "\x1b[2J\x9b31m\u202e\r\n\x00\ud800\U000e0041"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def failure(mode: str, argument: str = "", **others: Any) -> str:
    """Return the message of the failed call, after checking that it is one short and harmless line."""
    started = time.monotonic()
    with opened(fake_server(mode, argument, **others)) as box:
        assert box.toolbox.failures == {}
        with pytest.raises(ToolFailed) as failed:
            box.toolbox.call("echo", {"text": "x"})
    assert time.monotonic() - started < 25
    message = str(failed.value)
    assert message.isprintable()
    assert len(message) < 500
    return message


def start_failure(mode: str, argument: str = "", **others: Any) -> str:
    with opened(fake_server(mode, argument, **others)) as box:
        assert box.toolbox.names == []
    message = box.toolbox.failures["fake"]
    assert message.isprintable()
    return message


@pytest.mark.push
def test_a_server_that_never_answers_times_out() -> None:
    assert start_failure("never answers", start_timeout_s=0.3) == "no answer within 0.3 s"


@pytest.mark.push
def test_a_call_without_an_answer_times_out() -> None:
    words = "tool echo: no answer within 0.3 s; the last line of its standard error: still \\x1b[2J busy"
    assert failure("hangs", timeout_s=0.3) == words


@pytest.mark.push
@pytest.mark.parametrize(
    ("mode", "argument", "message"),
    [
        ("dies", "", "tool echo: it ended: exit status 4: out of cheese"),
        ("dies but its child lives", "", "tool echo: it ended: exit status 4"),
        ("closes its output", "", "tool echo: it closed its output"),
        ("floods", "", "tool echo: the server sent more than 1,048,576 unrequested bytes"),
        ("no line end", "", "tool echo: the server sent more than 1,048,576 unrequested bytes"),
        ("stops reading", "", "tool echo: the server does not read its input"),
        ("line", f'{{"id": 3, "result": {"[" * DEEP}{"]" * DEEP}}}', f"{UNUSABLE}: nested too deeply"),
        ("line", f'{{"id": 3, "result": {"[" * 100}{"]" * 100}}}', f"{UNUSABLE}: nested more than 64 levels deep"),
        ("line", '{"id": 3, "result": NaN}', f"{UNUSABLE}: NaN is not a finite number"),
        ("line", '{"id": 3, "result": 1e999}', f"{UNUSABLE}: 1e999 is not a finite number"),
        ("line", '{"id": 3, "result": {}', "tool echo: no answer within 0.5 s"),
        ("line", '{"id": "3", "result": {}}', "tool echo: no answer within 0.5 s"),
        ("line", '{"id": true, "result": {}}', "tool echo: no answer within 0.5 s"),
        ("line", '{"id": 3}', "tool echo: it refused: no reason given"),
        ("error", "[]", "tool echo: it refused: no reason given"),
        ("error", '{"code": -32602, "message": "bad\\u001b"}', "tool echo: it refused: bad\\x1b (error -32602)"),
        ("error", '{"code": true, "message": 5}', "tool echo: it refused: no reason given"),
        ("result", "null", "tool echo: the result is not an object with a list `content`"),
        ("result", '{"content": {}}', "tool echo: the result is not an object with a list `content`"),
    ],
)
def test_a_broken_call_ends_in_one_line(mode: str, argument: str, message: str) -> None:
    assert failure(mode, argument, timeout_s=0.5 if mode == "line" else 30.0) == message


def test_a_line_over_the_limit_fails_its_call() -> None:
    with opened(
        fake_server("one long line", str(LIMITS.line // 2 * 3)), limits=replace(LIMITS, unasked=8 << 20)
    ) as box:
        with pytest.raises(ToolFailed, match="longer than 1,048,576 bytes"):
            box.toolbox.call("echo", {"text": "x"})
        server = box.toolbox._servers[0]
        assert server.is_running  # a server with a browser in it should not lose it for one large screenshot


def test_standard_error_is_drained() -> None:
    with opened(fake_server("floods stderr")) as box:
        assert box.toolbox.call("echo", {}).text == "done"


def test_garbage_on_standard_output_is_reported() -> None:
    with opened(fake_server("writes garbage first")) as box:
        assert box.toolbox.call("echo", {"text": "yes"}).text == "yes"
    first, *others = box.notes
    assert first.startswith("tools: fake: the output is not JSON: Starting up \\x1b[31m...")
    assert [note.partition(": the ")[2] for note in others] == [
        "output is not JSON-RPC: null",
        "output is not JSON-RPC: [1]",
    ]


def test_requests_of_the_server_are_answered_or_refused() -> None:
    with opened(fake_server("asks")) as box:
        ping, sampling = json.loads(box.toolbox.call("echo", {}).text)
    assert ping == {"jsonrpc": "2.0", "id": "a", "result": {}}
    assert (sampling["id"], sampling["error"]["code"]) == ("b", -32601)


def test_lists_of_tools_that_do_not_end_are_refused() -> None:
    assert start_failure("endless pages") == "the list of tools has more than 100 pages"


@pytest.mark.parametrize(
    ("tool", "note"),
    [
        ("null", "a tool is left out: the tool has no name"),
        ('{"name": ""}', "a tool is left out: the tool has no name"),
        ('{"name": "x\\u001b"}', "a tool is left out: x\\x1b: the input schema is not the schema of an object"),
        (
            '{"name": "x", "inputSchema": true}',
            "a tool is left out: x: the input schema is not the schema of an object",
        ),
        ('{"name": "x", "description": 5}', "a tool is left out: x: the description is not text"),
        (
            json.dumps({"name": "x", "description": "y" * 70_000}),
            "a tool is left out: x: the definition has 70,032 characters; the limit is 65,536",
        ),
    ],
)
def test_unusable_tools_are_left_out(tool: str, note: str) -> None:
    good = '{"name": "good", "inputSchema": {"type": "object"}}'
    with opened(fake_server("tools", f"[{tool}, {good}, {good}]")) as box:
        assert box.toolbox.names == ["good"]
    assert box.notes == [f"tools: fake: {note}", "tools: fake: the tool good is offered twice; the first one is used"]


@pytest.mark.push
def test_a_definition_cannot_carry_control_characters() -> None:
    tool = {
        "name": HOSTILE,
        "description": HOSTILE,
        "inputSchema": {"type": "object", "properties": {HOSTILE: {"description": HOSTILE, "enum": [HOSTILE]}}},
    }
    with opened(fake_server("tools", json.dumps([tool]))) as box:
        (name,) = box.toolbox.names
        (definition,) = box.toolbox.definitions
    assert NAME.fullmatch(name)
    text = json.dumps(definition, ensure_ascii=False).replace("\\n", "")
    assert text.isprintable()


def test_results_cannot_carry_control_characters() -> None:
    result = json.dumps({"content": [{"type": "text", "text": HOSTILE}]})
    with opened(fake_server("result", result)) as box:
        assert box.toolbox.call("echo", {}).text == "\\x1b[2J\\x9b31m\\u202e\n\\x00\\ud800\\U000e0041"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ('{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}', "a\nb"),
        ('{"content": [], "structuredContent": {"b": "é"}}', '{"b": "é"}'),
        ('{"content": [{"type": "text", "text": "a"}], "structuredContent": {"b": 1}}', "a"),
        ('{"content": []}', ""),
        (
            '{"content": [{"type": "image", "mimeType": "image/png", "data": "QUJD"}]}',
            "[image: image/png, 3 bytes; not shown]",
        ),
        ('{"content": [{"type": "audio", "data": "QUJD"}]}', "[audio: unknown mimeType, 3 bytes; not shown]"),
        (
            '{"content": [{"type": "resource", "resource": {"uri": "file:///a\\u001b", "text": "secret"}}]}',
            "[resource: file:///a\\x1b, unknown mimeType; not shown]",
        ),
        (
            '{"content": [{"type": "resource_link", "uri": "http://a/b", "name": "c"}]}',
            "[link to a resource: http://a/b, c; not shown]",
        ),
        (
            '{"content": [5, {"type": "text"}]}',
            "[content of type None; not shown]\n[content of type text; not shown]",
        ),
    ],
)
def test_content_becomes_text(result: str, text: str) -> None:
    assert result_of(json.loads(result), 1000).text == text


def test_an_error_of_the_tool_is_a_result() -> None:
    result = result_of({"content": [{"type": "text", "text": "no such city"}], "isError": True}, 1000)
    assert (result.text, result.is_error) == ("no such city", True)


def test_long_results_are_cut_and_say_so() -> None:
    result = result_of({"content": [{"type": "text", "text": "x" * 2000}]}, 1000)
    assert result.truncated
    assert result.text == "x" * 1000 + "\n[cut: these are the first 1,000 of 2,000 characters]"


def test_escapes_count_towards_the_limit() -> None:
    text, truncated = shortened("\U000e0041" * 500, 1000)
    assert truncated
    assert text == "\\U000e0041" * 100 + "\n[cut: these are the first 1,000 of 5,000 characters]"


def test_integers_with_too_many_digits_are_refused() -> None:
    """Python converts at most 4,300 digits, because the time grows with their square."""
    assert decode_json(b"9" * 4300, 64) == 10**4300 - 1
    for line in (b"9" * 4301, b'{"id": 3, "result": [-' + b"9" * 5000 + b"]}"):
        with pytest.raises(RefusedJson, match=r"an integer of [45],\d{3} digits"):
            decode_json(line, 64)


@given(JSON)
def test_any_result_is_text_or_a_failure(value: Any) -> None:
    for result in (value, {"content": value}, {"content": [value]}, {"content": [], "structuredContent": value}):
        try:
            text = result_of(result, 1000).text
        except ToolFailed:
            continue
        assert text.replace("\n", "").replace("\t", "") == cleaned(text).replace("\n", "").replace("\t", "")
        text.encode()


@given(st.binary() | st.text().map(str.encode) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_json_or_a_value_error(line: bytes) -> None:
    try:
        value = decode_json(line, 64)
    except ValueError:
        return
    json.dumps(cleaned_json(value), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.push
@given(JSON)
@hypothesis_settings(max_examples=examples(25))  # each example runs a server
def test_any_definition_gives_valid_tools_or_none(value: Any) -> None:
    tools = [
        value,
        {"name": value},
        {"name": "a", "inputSchema": value},
        {"name": "b", "inputSchema": {"type": "object", "x": value}},
    ]
    with opened(fake_server("tools", json.dumps(tools))) as box:
        assert all(NAME.fullmatch(name) for name in box.toolbox.names)
        json.dumps(box.toolbox.definitions, ensure_ascii=False).encode()
