"""Tests of the requests that each repetition makes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert

from llmrun.base.errors import UsageError
from llmrun.jobs.bench.measuring.pool import CODEC
from llmrun.jobs.bench.measuring.workload import CHAT_CONTEXT, Workload, chats, cold_starts, from_file, synthetic

ROOT = Path(__file__).resolve().parents[4]


def test_a_synthetic_workload_says_what_it_is() -> None:
    assert synthetic(512, 128, 0, 1).facts.label == "512 in, 128 out"
    assert synthetic(0, 16, 1024, 4).facts.label == "1,024 before, 16 out, 4 at once"
    assert synthetic(512, 128, 256, 1).context_size == 256 + 512 + 128 + 1


def test_nothing_to_do_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to measure: -p and -n are both 0"):
        synthetic(0, 0, 0, 1)


def test_the_conversations_that_come_with_it_are_conversations() -> None:
    found = chats(2)
    assert [workload.facts.label for workload in found] == [
        "chat: short question, 2 at once",
        "chat: long document, 2 at once",
        "chat: four turns, 2 at once",
    ]
    for workload in found:
        assert len(workload.sessions) == 2
        assert workload.context_size == CHAT_CONTEXT
        for session in workload.sessions:
            for turn in session:
                assert turn.messages[-1]["role"] == "user"
    assert [len(turn.messages) for turn in found[2].sessions[0]] == [2, 4, 6, 8]


def test_a_workload_survives_the_way_to_another_process() -> None:
    for workload in (synthetic(5, 6, 7, 8), *chats(1), cold_starts()):
        assert convert(CODEC.decode(CODEC.encode(workload)), Workload) == workload


def test_a_file_of_prompts_is_read_a_line_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "why?"}]
    path.write_text(f'{{"prompt": "hi"}}\n\n{json.dumps({"messages": messages, "max_tokens": 7})}\n')
    (found,) = from_file(path, 3)
    assert found.facts.label == "mine.jsonl: 2 prompts, 3 at once"
    assert found.sessions[0][0].messages == ({"role": "user", "content": "hi"},)
    assert (found.sessions[1][0].messages, found.sessions[1][0].max_tokens) == (tuple(messages), 7)
    assert found.context_size is None


def test_every_name_in_a_file_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"name": "copy", "prompt": "a"},
        {"prompt": "b"},
        {"name": "chat", "prompt": "c", "temperature": 1},
        {"name": "copy", "prompt": "d", "max_tokens": 9},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = from_file(path, 1)
    assert [one.facts.label for one in found] == ["copy: 2 prompts", "mine.jsonl: 1 prompt", "chat: 1 prompt"]
    assert [session[0].max_tokens for session in found[0].sessions] == [128, 9]
    assert [one.sessions[0][0].temperature for one in found] == [0.0, 0.0, 1.0]


def test_the_prompts_for_speculation_are_of_six_kinds() -> None:
    found = from_file(ROOT / "scripts" / "speculation_prompts.jsonl", 1)
    names = [one.facts.label.partition(":")[0] for one in found]
    assert names == ["copy", "edit", "json", "summary", "chat", "chat at 0.8"]
    assert [{turn.temperature for (turn,) in one.sessions} for one in found] == [{0.0}] * 5 + [{0.8}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "the file has no prompts"),
        ("hello", "line 1: not valid JSON"),
        ('{"prompt": "a"}\n[1]', "line 2: not a JSON object"),
        ("{}", 'must have either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'must have either "prompt" or "messages"'),
        ('{"prompt": 5}', "prompt: must be a non-empty string"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: 0"),
        ('{"prompt": "a", "name": 5}', "name: must be a string of at most 40 characters"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature: 'hot' is not a number from 0"),
        ('{"prompt": "a", "temperature": -2}', "temperature: -2 is not a number from 0"),
        ('{"messages": []}', "messages: must be a non-empty list"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "each needs one of these roles"),
        ('{"messages": [{"role": "user"}]}', "each needs a string as content"),
        ('{"a":' * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_file_of_prompts_is_one_line_that_names_the_place(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        from_file(path, 1)
    assert str(caught.value).startswith(f"prompts: {path}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_of_prompts_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        from_file(tmp_path / "none.jsonl", 1)


@given(st.binary(max_size=200))
def test_any_bytes_are_prompts_or_a_usage_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("prompts") / "any.jsonl"
    path.write_bytes(content)
    with suppress(UsageError):
        assert all(one.sessions for one in from_file(path, 1))
