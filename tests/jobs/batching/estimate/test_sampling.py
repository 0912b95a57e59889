"""Tests of the measured sample, with the scripted backend."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.machine.energy import EnergyMeter
from llmrun.engine.child.messages import Open
from llmrun.engine.child.opening import describe
from llmrun.engine.engine import Engine
from llmrun.jobs.batching.estimate.counting import CallReader
from llmrun.jobs.batching.estimate.sampling import Limits, Sample, Sampler
from llmrun.jobs.batching.requests import Call
from llmrun.jobs.batching.workers.base import CHAT, COMPLETION

ANSWER = len("You said: ") + 1  # tokens that the scripted backend adds to those of the prompt


@contextmanager
def opened(**options: Any) -> Iterator[CallReader]:
    with Engine(ScriptedBackend(max_sequences=8, **options), max_running=4) as engine:
        yield CallReader(engine, describe(engine, Open("scripted")))


def chat(text: str, **fields: Any) -> Call:
    return Call(CHAT, {"messages": [{"role": "user", "content": text}], "seed": 1, **fields})


def measured(reader: CallReader, calls: Sequence[Call], begin_s: float = 10_000, finish_s: float = 0) -> Sample:
    """Return what is measured if the clock advances by a second whenever it is read, three times in a step."""
    clock = itertools.count().__next__
    sampler = Sampler(reader, calls, 4, Limits(begin_s, finish_s), clock)
    return sampler.run(EnergyMeter([]), lambda done, seconds: None)


@pytest.mark.push
def test_all_answers_are_measured() -> None:
    with opened() as reader:
        sample = measured(reader, [chat("x" * length) for length in range(1, 21)])
    assert sorted(sample.finished) == [length + ANSWER for length in range(1, 21)]
    assert not sample.cut
    assert sample.most_at_a_time == 4
    assert sum(step.generated for step in sample.steps) == sum(sample.finished) == sum(sample.lengths)
    assert (sample.source, sample.joules) == ("", None)


@pytest.mark.push
def test_computed_prompt_tokens_are_counted() -> None:
    """The second prompt shares all but its end with the first one."""
    with opened() as reader:
        calls = [chat("a long beginning: 1"), chat("a long beginning: 2")]
        first, second = (reader.count(call).prompts[0] for call in calls)
        sample = measured(reader, calls)
    alike = next(place for place, both in enumerate(zip(first, second, strict=True)) if both[0] != both[1])
    assert sum(step.prompt_rows for step in sample.steps) == len(first) + len(second) - alike


@pytest.mark.push
def test_steady_steps_have_all_answers_at_a_time() -> None:
    with opened() as reader:
        sample = measured(reader, [chat("x" * length) for length in range(20, 60)])
    answering = [step.answering for step in sample.steps[sample.steady]]
    assert answering.count(4) > 0.8 * len(answering)  # the other steps compute a prompt
    assert all(step.answering == 4 or step.prompt_rows for step in sample.steps[sample.steady][1:])
    assert sample.steps[-1].answering == 1  # the last answers have no others beside them


def test_calls_that_have_begun_are_finished() -> None:
    """The prompts have more than 256 tokens, so only the first one begins in the only step before the time is up."""
    with opened() as reader:
        sample = measured(reader, [chat("x" * 400, max_tokens=30) for _ in range(50)], 3, 10_000)
        assert reader.engine.idle
    assert sample.finished == [30]
    assert not sample.cut
    assert sample.most_at_a_time == 1


@pytest.mark.push
def test_calls_begin_until_the_time_is_up() -> None:
    with opened() as reader:
        sample = measured(reader, [chat("x", max_tokens=10) for _ in range(500)], 300, 10_000)
    assert 4 < len(sample.finished) < 100
    assert set(sample.finished) == {10}


def test_answers_that_take_too_long_are_cut() -> None:
    with opened() as reader:
        sample = measured(reader, [chat("x" * 50, max_tokens=40)], 30, 30)
    assert not sample.finished
    (cut,) = sample.cut
    assert 0 < cut.generated < 40 == cut.most
    assert sample.lengths == [cut.generated]


def test_steps_are_timed() -> None:
    with opened() as reader:
        sample = measured(reader, [chat("x")])
    assert sample.seconds == len(sample.steps) > 0


def test_nothing_begins_without_time() -> None:
    with opened() as reader:
        assert not measured(reader, [chat("x")], 0, 10).steps


def test_calls_with_several_answers_count_as_one() -> None:
    with opened() as reader:
        call = chat("four", n=3)
        counted = reader.count(call)
        sample = measured(reader, [call])
    assert (len(counted.prompts), counted.choices) == (1, 3)
    assert sample.finished == [3 * (4 + ANSWER)]


def test_counted_calls_know_their_limits() -> None:
    with opened(context_size=200) as reader:
        bounded, free = (reader.count(chat("hello", **fields)) for fields in ({"max_tokens": 9}, {}))
        several = reader.count(Call(COMPLETION, {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 5}))
    assert bounded.most == 9
    assert free.most == 200 - free.prompt_tokens
    assert (several.prompt_tokens, several.most) == (sum(map(len, several.prompts)), 20)
    assert [len(prompt) for prompt in several.prompts] == [3, 4]  # with the token at the beginning
