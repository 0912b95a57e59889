"""Tests of the events of streams."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.serving.upstreams.forwarding import MOST_BYTES, BadStream, EventSplitter, Progress, StreamEvent
from tests.support.serving.fake_upstream import ANSWER

ASIDE, EARLY, TOKEN, FINISH, LAST, ERROR = Progress
PROGRESS: dict[str, Any] = {"total": 9, "cache": 2, "processed": 5, "time_ms": 7}


def sse(data: object, event_id: str = "", ending: str = "\n") -> bytes:
    lines = [f"id: {event_id}"] if event_id else []
    return (ending.join([*lines, f"data: {data if isinstance(data, str) else json.dumps(data)}"]) + 2 * ending).encode()


def split(data: bytes, cuts: list[int] | None = None, *, json_lines: bool = False) -> list[StreamEvent]:
    places = [0, *sorted(cuts or []), len(data)]
    splitter = EventSplitter(json_lines=json_lines)
    parts = [data[start:end] for start, end in pairwise(places)]
    return [event for part in parts for event in splitter.feed(part)]


def progress(data: object) -> Progress:
    (event,) = split(sse(data))
    return event.progress


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


@given(st.lists(st.integers(0, 400)), st.sampled_from(("\n", "\r\n")))
def test_cuts_between_packets_do_not_matter(cuts: list[int], ending: str) -> None:
    events = [sse(chunk(content="ä" * n), f"{ANSWER}-{n}", ending) for n in range(4)]
    data = b": ping\n\n".join(events) + sse("[DONE]")
    found = split(data, [min(cut, len(data)) for cut in cuts])
    assert [event.raw for event in found] == [*events, sse("[DONE]")]
    assert [event.id for event in found] == [*(f"{ANSWER}-{n}" for n in range(4)), ""]
    assert [event.progress for event in found] == [EARLY, TOKEN, TOKEN, TOKEN, LAST]


def test_comments_and_pings_are_dropped() -> None:
    assert split(b": ping\n\nretry: 5\n\n\n\n" + b'event: ping\ndata: {"type":"ping"}\n\n') == []


def test_comments_about_images_are_kept() -> None:
    splitter = EventSplitter(json_lines=False)
    splitter.feed(b": processing prompt 3/9\n\n: reading image 1 of 3: 40%, about 7 s left\n\n: reading 3 books\n\n")
    assert splitter.prompt == "reading image 1 of 3: 40%, about 7 s left"


@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n"])
def test_the_last_comment_about_the_prompt_is_kept(ending: bytes) -> None:
    splitter = EventSplitter(json_lines=False)
    splitter.feed(ending.join((b": processing prompt 3/9", b": processing prompt 5/9", b": processing 7", b"")))
    assert splitter.prompt == "processing prompt 5/9"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (chunk(role="assistant", content=""), EARLY),
        (chunk(content="a"), TOKEN),
        (chunk(reasoning_content="a"), TOKEN),
        (chunk(tool_calls=[{"index": 0}]), TOKEN),
        (chunk("stop"), FINISH),
        ({"choices": [], "usage": {}}, EARLY),
        ({"choices": [{"text": "", "finish_reason": None}]}, EARLY),
        ({"choices": [{"text": "a", "finish_reason": None}]}, TOKEN),
        ({"type": "response.created", "response": {"error": None}}, EARLY),
        ({"type": "response.output_item.added", "item": {}}, EARLY),
        ({"type": "response.output_text.delta", "delta": "a"}, TOKEN),
        ({"type": "response.completed", "response": {}}, LAST),
        ({"type": "response.failed", "response": {}}, ERROR),
        ({"type": "message_start", "message": {"content": []}}, EARLY),
        ({"type": "message_delta", "delta": {"stop_reason": None}, "usage": {}}, EARLY),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}}, TOKEN),
        ({"type": "ping", "prompt_progress": PROGRESS}, ASIDE),
        ({"type": "response.in_progress", "response": {}, "prompt_progress": PROGRESS}, EARLY),
        ({**chunk(role="assistant", content=None), "prompt_progress": PROGRESS}, ASIDE),
        ({**chunk(content="a"), "prompt_progress": PROGRESS}, TOKEN),
        ({"choices": [{"text": "", "finish_reason": None}], "prompt_progress": PROGRESS}, ASIDE),
        ({"content": "", "stop": False, "prompt_progress": PROGRESS}, ASIDE),
        ({"type": "content_block_delta", "delta": {"text": "a"}}, TOKEN),
        ({"type": "message_stop"}, LAST),
        ({"type": "error", "error": {"type": "api_error", "message": "no"}}, ERROR),
        ({"message": {"role": "assistant", "content": ""}, "done": False}, EARLY),
        ({"message": {"role": "assistant", "content": "a"}, "done": False}, TOKEN),
        ({"response": "a", "done": False}, TOKEN),
        ({"response": "", "done": True, "done_reason": "stop"}, LAST),
        ({"content": "", "stop": False}, EARLY),
        ({"content": "a", "stop": False}, TOKEN),
        ({"content": "", "stop": True}, FINISH),
        ({"error": {"message": "no"}}, ERROR),
        ({"error": "no"}, ERROR),
        ({"object": "error", "message": "no"}, ERROR),
        ({"something": "else"}, TOKEN),
    ],
)
def test_progress_is_known_in_all_apis(data: dict[str, Any], expected: Progress) -> None:
    assert progress(data) is expected


def test_json_lines_are_events_without_ids() -> None:
    lines = [{"response": "a", "done": False}, {"response": "", "done": True}]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    found = split(data + b"\n", [3, 40], json_lines=True)
    assert [event.progress for event in found] == [TOKEN, LAST]
    assert b"".join(event.raw for event in found) == data
    assert {event.id for event in found} == {""}


@pytest.mark.parametrize("data", ["{", "nonsense", "[1]", "NaN and more", "[" * 100_000, "1" * 10_000])
def test_garbage_is_refused(data: str) -> None:
    with pytest.raises(BadStream, match=r"not valid JSON|not a JSON object"):
        split(sse(data))


def test_endless_events_are_refused() -> None:
    splitter, data = EventSplitter(json_lines=False), b"data: " + b"x" * (MOST_BYTES - 6)
    for start in range(0, MOST_BYTES, 1 << 16):
        splitter.feed(data[start : start + (1 << 16)])
    with pytest.raises(BadStream, match="more than 4,194,304 bytes"):
        splitter.feed(b"x")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda part: (
            st.lists(part)
            | st.dictionaries(
                st.sampled_from(["choices", "delta", "type", "error", "message", "content", "finish_reason", "done"]),
                part,
            )
        ),
        max_leaves=8,
    )
)
def test_no_json_object_breaks_the_reader(value: Any) -> None:
    found = split(sse({"choices": value}) + sse({"delta": value, "message": value, "type": value, "error": value}))
    assert len(found) == 2
