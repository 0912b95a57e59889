"""Tests of what a batch takes: counting its tokens, and measuring the speed on a sample with the scripted backend."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import ContextExceeded, LlmrunError, UsageError
from llmrun.engine.child.messages import Open
from llmrun.engine.child.opening import describe
from llmrun.engine.engine import Engine
from llmrun.jobs.batching import intake
from llmrun.jobs.batching.estimate import (
    CallReader,
    CountedCall,
    Counts,
    Estimate,
    PrefixCounter,
    Sample,
    Sampler,
    Step,
    count_batch,
)
from llmrun.jobs.batching.requests import Call, CallOptions
from llmrun.jobs.batching.workers.base import CHAT, COMPLETION

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=20)


def counter_of(prompts: Sequence[list[int]]) -> PrefixCounter:
    counter = PrefixCounter()
    for prompt in prompts:
        counter.add(prompt)
    return counter


def trie_nodes(prompts: Sequence[Sequence[int]]) -> int:
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


@pytest.mark.push
@given(PROMPTS)
def test_sorted_prompts_compute_the_nodes_of_a_trie(prompts: list[list[int]]) -> None:
    """A prompt that equals another one still computes its last token."""
    repeated = len(prompts) - len(set(map(tuple, prompts)))
    counter = counter_of(sorted(prompts))
    assert counter.computed == trie_nodes(prompts) + repeated
    assert counter.total == sum(map(len, prompts))


@pytest.mark.push
@given(PROMPTS)
def test_no_order_computes_less_than_the_trie(prompts: list[list[int]]) -> None:
    counter = counter_of(prompts)
    assert trie_nodes(prompts) <= counter.computed <= counter.total


def tokens_of(call: Call) -> list[int]:
    return [*map(ord, call.body["messages"][-1]["content"])]


def read(call: Call) -> CountedCall:
    tokens = tokens_of(call)
    if len(tokens) > 100:
        raise ContextExceeded("too long", hint="shorten it")
    return CountedCall([tokens], call.body.get("n", 1))


def count(folder: Path, lines: Sequence[dict[str, Any] | str]) -> Counts:
    source = folder / "in.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return count_batch(source, CallOptions(), read, lambda counts: None)


def test_lines_calls_and_tokens_are_counted(tmp_path: Path) -> None:
    counts = count(tmp_path, [{"prompt": "abc"}, "", {"prompt": "abd"}, {"prompt": "abc"}])
    assert (counts.lines, counts.failing, counts.answered, counts.calls) == (3, 0, 3, 2)
    assert (counts.prompt_tokens, counts.billed_tokens) == (6, 9)
    assert (counts.prefixes.total, counts.prefixes.computed) == (6, 4)
    assert counts.first_problem is None


def test_lines_with_errors_are_named(tmp_path: Path) -> None:
    long = {"prompt": "x" * 101}
    counts = count(tmp_path, [{"prompt": "z"}, long, {"custom_id": "a", "prompt": "b"}, long])
    assert (counts.lines, counts.failing, counts.calls) == (4, 2, 2)
    assert counts.first_problem == (2, "too long; shorten it")
    assert counts.prompt_tokens == counts.billed_tokens == 2


def test_repeated_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"in\.jsonl: line 2: custom_id: already used in line 1$"):
        count(tmp_path, [{"custom_id": "a", "prompt": "b"}, {"custom_id": "a", "prompt": "c"}])


def test_windows_do_not_change_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal lines in different windows are found, and so are errors."""
    lines = [{"prompt": f"{number % 40}".zfill(3)} for number in range(100)]
    lines.append({"prompt": "x" * 101})
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


ANSWER = len("You said: ") + 1  # tokens that the scripted backend adds to those of the prompt


@contextmanager
def opened(**options: Any) -> Iterator[CallReader]:
    with Engine(ScriptedBackend(max_sequences=8, **options), max_running=4) as engine:
        yield CallReader(engine, describe(engine, Open("scripted")))


def chat(text: str, **fields: Any) -> Call:
    return Call(CHAT, {"messages": [{"role": "user", "content": text}], "seed": 1, **fields})


def measured(reader: CallReader, calls: Sequence[Call], begin_s: float = 10_000, finish_s: float = 0) -> Sample:
    """Return what is measured if the clock advances by a second whenever it is read, three times in a step."""
    sampler = Sampler(reader, calls, 4, begin_s=begin_s, finish_s=finish_s, clock=itertools.count().__next__)
    return sampler.run(lambda done, seconds: None)


@pytest.mark.push
def test_all_answers_are_measured() -> None:
    with opened() as reader:
        sample = measured(reader, [chat("x" * length) for length in range(1, 21)])
    assert sample.generated == sum(length + ANSWER for length in range(1, 21))
    assert (sample.finished, sample.unfinished, sample.at_a_time) == (20, 0, 4)


@pytest.mark.push
def test_computed_prompt_tokens_are_counted() -> None:
    """The second prompt shares all but its end with the first one."""
    with opened() as reader:
        calls = [chat("a long beginning: 1"), chat("a long beginning: 2")]
        first, second = (reader.count(call).prompts[0] for call in calls)
        sample = measured(reader, calls)
    alike = next(place for place, both in enumerate(zip(first, second, strict=True)) if both[0] != both[1])
    assert sum(step.prompt_rows for step in sample.steps) == len(first) + len(second) - alike


def test_calls_that_have_begun_are_finished() -> None:
    """The prompts have more than 256 tokens, so only the first one begins in the only step before the time is up."""
    with opened() as reader:
        sample = measured(reader, [chat("x" * 400, max_tokens=30) for _ in range(50)], 3, 10_000)
        assert reader.engine.idle
    assert (sample.finished, sample.unfinished, sample.generated, sample.at_a_time) == (1, 0, 30, 1)


@pytest.mark.push
def test_calls_begin_until_the_time_is_up() -> None:
    with opened() as reader:
        sample = measured(reader, [chat("x", max_tokens=10) for _ in range(500)], 300, 10_000)
    assert 4 < sample.finished < 100
    assert sample.generated == 10 * sample.finished


def test_answers_that_take_too_long_are_cut() -> None:
    with opened() as reader:
        sample = measured(reader, [chat("x" * 50, max_tokens=40)], 30, 30)
    assert (sample.finished, sample.unfinished) == (0, 1)
    assert 0 < sample.generated < 40


def test_steps_are_timed() -> None:
    with opened() as reader:
        sample = measured(reader, [chat("x")])
    assert sample.seconds == len(sample.steps) > 0


def test_a_model_that_generates_nothing_in_time_is_an_error() -> None:
    with opened() as reader, pytest.raises(LlmrunError, match="no token was generated within 0 s"):
        measured(reader, [chat("x")], 0, 10)


def test_calls_with_several_answers_count_as_one() -> None:
    with opened() as reader:
        call = chat("four", n=3)
        counted = reader.count(call)
        sample = measured(reader, [call])
    assert (len(counted.prompts), counted.choices) == (1, 3)
    assert (sample.finished, sample.generated) == (1, 3 * (4 + ANSWER))


def test_calls_with_several_prompts_are_counted() -> None:
    with opened() as reader:
        several = reader.count(Call(COMPLETION, {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 5}))
    assert (several.prompt_tokens, several.choices) == (7, 2)
    assert [len(prompt) for prompt in several.prompts] == [3, 4]  # with the token at the beginning


def estimate(calls: int, steps: Sequence[Step], finished: int, parallel: int = 4) -> Estimate:
    counts = Counts(lines=calls, calls=calls, prompt_tokens=calls)
    counts.prefixes.computed = 10 * calls
    return Estimate(counts, Sample(steps, parallel, parallel, finished, 0), 2.0)


def test_the_speed_is_that_of_full_steps() -> None:
    """Steps of one answer are slower per token, and a prompt token adds 1 ms to a step."""
    full, alone, prompt = Step(0.04, 0, 4, 4), Step(0.03, 0, 1, 1), Step(0.12, 100, 2, 2)
    found = estimate(1000, [prompt, full, full, alone], 1)
    assert found.sample.seconds_per_generated_token == pytest.approx(0.01)
    assert found.sample.seconds_per_prompt_token == pytest.approx(0.001)
    assert found.generated_per_call == 11
    assert found.seconds == pytest.approx(2 + 0.001 * 10_000 + 0.01 * 11 * 1000)


def test_without_full_steps_the_others_count() -> None:
    sample = estimate(1000, [Step(0.03, 0, 1, 1)] * 3, 1).sample
    assert sample.seconds_per_generated_token == pytest.approx(0.03)
    assert sample.seconds_per_prompt_token == 0


def test_answers_of_one_token_have_no_steps_without_prompts() -> None:
    sample = estimate(1000, [Step(0.5, 10, 0, 1)] * 4, 4).sample
    assert sample.seconds_per_generated_token * 4 + sample.seconds_per_prompt_token * 40 == pytest.approx(2)


def test_a_complete_sample_is_the_run() -> None:
    found = estimate(3, [Step(0.5, 10, 0, 0), Step(0.1, 0, 3, 3), Step(0.1, 0, 3, 3)], 3)
    assert found.is_complete
    assert found.seconds == pytest.approx(2.7)
