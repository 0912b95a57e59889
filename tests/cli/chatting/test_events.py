"""Tests that events round-trip through one line of JSON."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.chatting.events import (
    Answered,
    Began,
    Event,
    PreferenceSet,
    QuestionAsked,
    from_line,
    parse_value,
    to_line,
)
from tests.support.cli.conversations import events


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("seed", "-1", -1), ("max_tokens", "-1", -1), ("top_k", "-1", 0), ("temperature", "-1", 0)],
)
def test_a_chat_takes_the_numbers_of_llama_cpp(name: str, text: str, value: float) -> None:
    """A seed of -1 is kept, because it replaces the seed of config.toml by a random one."""
    assert parse_value(name, text) == value


@given(events())
def test_an_event_comes_back_from_its_line_as_it_was(event: Event) -> None:
    line = to_line(event)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert from_line(line) == event


def test_a_path_that_is_not_utf_8_survives() -> None:
    event = Began(1, "ab", "/models/\udcff.gguf", "2026-01-01T00:00:00Z", "0.1.0")
    line = to_line(event)
    assert b"\\udcff" in line
    assert from_line(line) == event


SHOWN = {"at": 0, "sha256": "a" * 64, "name": "a.png", "format": "PNG", "width": 3, "height": 2}
GOOD = {"event": "end", "reason": "stop", "context_used": 9, "prompt_tokens": 5, "cached_tokens": 0}
GOOD |= {"generated_tokens": 4, "ttft_s": 0.1, "decode_s": 1}
WHOLE = GOOD | {"event": "answered", "text": "A", "thinking": None, "seed": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "not JSON"),
        (b"\x00\x00\x00", "not JSON"),
        (b'{"event": "undo"', "not JSON"),
        (b'{"event": "undo"}}', "not JSON"),
        (b'{"event": "system", "text": "\xff"}', "not JSON in UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "not a JSON object"),
        (b"7", "not a JSON object"),
        (b"{}", "unknown event None"),
        (b'{"event": "undone"}', "unknown event 'undone'"),
        (b'{"event": ["undo"]}', "unknown event"),
        (b'{"event": "undo", "more": 1}', "keys 'more'"),
        (b'{"event": "question", "text": "x"}', "not text, time"),
        (b'{"event": "question", "text": 7, "time": ""}', "text: 7 is not a str"),
        (b'{"event": "question", "text": null, "time": ""}', "text: None is not a str"),
        (b'{"event": "text", "text": "\\ud800"}', "is not a str"),
        *[
            (json.dumps({"event": "question", "text": "why?", "time": "", "images": images}).encode(), said)
            for images, said in (
                ({}, "images: {} is not"),
                ([{**SHOWN, "width": "3"}], "is not a tuple[imageshown, ...]"),
                ([{**SHOWN, "more": 1}], "is not a tuple"),
                ([{**SHOWN, "at": 5}], "not in the order of their places"),
                ([{**SHOWN, "at": 2}, SHOWN], "not in the order of their places"),
                ([{**SHOWN, "sha256": "../../etc/passwd"}], "not 64 hexadecimal digits"),
                ([{**SHOWN, "sha256": "a" * 63 + "\n"}], "not 64 hexadecimal digits"),
            )
        ],
        (b'{"event": "answer", "seed": true}', "seed: True is not a int"),
        (b'{"event": "answer", "seed": -1}', "seed: -1"),
        (b'{"event": "answer", "seed": 18446744073709551616}', "seed: 18446744073709551616"),
        (b'{"event": "answer", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"event": "answer", "seed": NaN}', "NaN is not a number"),
        (b'{"event": "set", "name": "temperature", "value": Infinity}', "Infinity is not a number"),
        (b'{"event": "set", "name": "temperature", "value": 1e999}', "inf is not a number from 0 to 100"),
        (b'{"event": "set", "name": "temperature", "value": "hot"}', "'hot' is not a number from 0 to 100"),
        (b'{"event": "set", "name": "top_k", "value": 1.5}', "1.5 is not an integer"),
        (b'{"event": "set", "name": "top_k", "value": true}', "True is not an integer"),
        (b'{"event": "set", "name": "top_k", "value": {"a": 1}}', "is not a value"),
        (b'{"event": "set", "name": "backend", "value": "cpu"}', "no such setting"),
        (b'{"event": "set", "name": "stop", "value": []}', "is not a list of strings"),
        (b'{"event": "set", "name": "stop", "value": [""]}', "is not a list of strings"),
        (b'{"event": "set", "name": "stop", "value": [1]}', "is not a value"),
        (json.dumps(GOOD | {"reason": "bored"}).encode(), "'bored' is not one of"),
        (json.dumps(GOOD | {"ttft_s": -1}).encode(), "ttft_s: -1 is not a float"),
        (json.dumps(GOOD | {"ttft_s": "1"}).encode(), "ttft_s: '1' is not a float"),
        (b'{"event":"began","format":6,"conversation":"","model":"","created":"","version":""}', "reads format 5"),
        (json.dumps(WHOLE | {"reason": "bored"}).encode(), "answered: reason: 'bored' is not one of"),
        (json.dumps(WHOLE | {"thinking": 1}).encode(), "answered: thinking: 1 is not"),
        (b'{"event": "call", "id": "x", "name": "echo"}', "not id, name, arguments"),
        (b'{"event": "call", "id": 1, "name": "echo", "arguments": ""}', "id: 1 is not a str"),
        (b'{"event": "call", "id": "x", "name": "echo", "arguments": {}}', "arguments: {} is not a str"),
        (b'{"event": "call", "id": "x", "name": "\\ud800", "arguments": ""}', "is not a str"),
        (b'{"event": "result", "id": "x"}', "not id, text"),
        (b'{"event": "result", "id": "x", "text": null}', "text: None is not a str"),
    ],
)
def test_a_hostile_line_is_refused_with_what_is_wrong(line: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        from_line(line)
    assert len(str(refused.value)) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["undo", "set", "stop"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["event", "text", "time", "seed", "name", "value", "reason", "model", "format"]) | st.text()


@pytest.mark.push
@given(st.dictionaries(keys, json_values, max_size=6) | json_values)
def test_any_json_is_an_event_or_a_value_error(value: object) -> None:
    try:
        event = from_line(json.dumps(value).encode())
    except ValueError:
        return
    assert from_line(to_line(event)) == event


@pytest.mark.push
@given(events(), st.data())
def test_a_line_with_one_byte_changed_is_an_event_or_a_value_error(event: Event, data: st.DataObject) -> None:
    line = bytearray(to_line(event)[:-1])
    line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    try:
        from_line(bytes(line))
    except ValueError:
        return


def test_a_conversation_from_before_there_were_thoughts_can_be_read() -> None:
    line = b'{"event":"began","format":1,"conversation":"","model":"","created":"","version":""}'
    assert from_line(line) == Began(1, "", "", "", "")


def test_an_answer_without_an_end_has_no_reason() -> None:
    event = from_line(json.dumps(WHOLE | {"reason": None}).encode())
    assert isinstance(event, Answered)
    assert (event.reason, event.text) == (None, "A")


def test_text_is_written_so_that_grep_finds_it() -> None:
    assert "Größe: 日本".encode() in to_line(QuestionAsked("Größe: 日本", ""))


def test_an_integer_will_do_for_a_temperature() -> None:
    event = from_line(b'{"event": "set", "name": "temperature", "value": 1}')
    assert event == PreferenceSet("temperature", 1.0)
