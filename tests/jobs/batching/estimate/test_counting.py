"""Tests of reading a whole batch without running it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import ContextExceeded, UsageError
from llmrun.jobs.batching import intake
from llmrun.jobs.batching.estimate.counting import CountedCall, Counts, count_batch
from llmrun.jobs.batching.requests import Call, CallOptions


def tokens_of(call: Call) -> list[int]:
    return [*map(ord, call.body["messages"][-1]["content"])]


def read(call: Call) -> CountedCall:
    tokens = tokens_of(call)
    if len(tokens) > 100:
        raise ContextExceeded("too long", hint="shorten it")
    return CountedCall([tokens], call.body.get("n", 1), 7)


def count(folder: Path, lines: Sequence[dict[str, Any] | str]) -> Counts:
    source = folder / "in.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return count_batch(source, CallOptions(), read, lambda counts: None)


def test_lines_calls_and_tokens_are_counted(tmp_path: Path) -> None:
    counts = count(tmp_path, [{"prompt": "abc"}, "", {"prompt": "abd"}, {"prompt": "abc"}])
    assert (counts.lines, counts.failing, counts.answered, counts.calls) == (3, 0, 3, 2)
    assert (counts.prompt_tokens, counts.billed_tokens, counts.most_generated) == (6, 9, 14)
    assert (counts.prefixes.total, counts.prefixes.computed) == (6, 4)
    assert counts.first_problem is None


def test_lines_with_errors_are_named(tmp_path: Path) -> None:
    long = {"prompt": "x" * 101}
    counts = count(tmp_path, [{"prompt": "z"}, long, "{", {"custom_id": "a", "prompt": "b"}, long])
    assert (counts.lines, counts.failing, counts.calls) == (5, 3, 2)
    assert counts.first_problem == (2, "too long; shorten it")
    assert counts.prompt_tokens == counts.billed_tokens == 2


def test_repeated_ids_fail(tmp_path: Path) -> None:
    counts = count(tmp_path, [{"custom_id": "a", "prompt": "b"}, {"custom_id": "a", "prompt": "c"}])
    assert (counts.failing, counts.calls) == (1, 1)
    assert counts.first_problem is not None
    assert counts.first_problem[0] == 2


def test_windows_do_not_change_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal lines in different windows are found, and so are errors."""
    lines = [{"prompt": f"{number % 40}".zfill(3)} for number in range(100)] + ["["]
    whole = count(tmp_path, lines)
    monkeypatch.setattr(intake, "_LINES", 7)
    parts = count(tmp_path, lines)
    assert (whole.lines, whole.calls, whole.prompt_tokens, whole.billed_tokens) == (101, 40, 120, 300)
    for name in ("lines", "calls", "failing", "prompt_tokens", "billed_tokens", "first_problem"):
        assert getattr(parts, name) == getattr(whole, name)
    assert whole.prefixes.computed <= parts.prefixes.computed < 120


def test_prompts_are_in_the_order_of_the_run(tmp_path: Path) -> None:
    """Sorted, each prompt shares as much as it can with the one before it."""
    counts = count(tmp_path, [{"prompt": text} for text in ("ab1", "cd1", "ab2", "cd2", "ab3")])
    assert counts.prefixes.computed == 3 + 1 + 1 + 3 + 1


def test_several_answers_compute_their_prompt_once(tmp_path: Path) -> None:
    counts = count(tmp_path, [{"prompt": "abcd", "n": 3}])
    assert counts.prompt_tokens == 4
    assert (counts.prefixes.total, counts.prefixes.computed) == (12, 4 + 1 + 1)


def test_small_batches_are_their_own_sample(tmp_path: Path) -> None:
    counts = count(tmp_path, [{"prompt": f"line {number}"} for number in range(200)])
    assert {bytes(tokens_of(call)) for call in counts.sample} == {f"line {number}".encode() for number in range(200)}


@pytest.mark.push
def test_samples_are_spread_over_the_batch(tmp_path: Path) -> None:
    counts = count(tmp_path, [{"prompt": f"{number:05}"} for number in range(4096)])
    numbers = [int(call.body["messages"][-1]["content"]) for call in counts.sample]
    assert len(set(numbers)) == len(numbers) == 512
    tenths = Counter(10 * number // 4096 for number in numbers)
    assert min(tenths[tenth] for tenth in range(10)) >= 25  # 51 are expected, and 25 are 3.8 standard deviations fewer
    half = numbers[:256]
    assert abs(sum(half) / len(half) - 2048) < 300  # those that begin first, too
    assert count_again(tmp_path) == numbers


def count_again(folder: Path) -> list[int]:
    counts = count_batch(folder / "in.jsonl", CallOptions(), read, lambda counts: None)
    return [int(call.body["messages"][-1]["content"]) for call in counts.sample]


def test_missing_input_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        count_batch(tmp_path / "no.jsonl", CallOptions(), read, lambda counts: None)
