"""Tests of which worker gets which call."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.jobs.batching.requests import Call
from llmrun.jobs.batching.work import Job, WorkQueue, prefix_of


def job(text: str, **fields: object) -> Job:
    return Job(Call("/v1/completions", {"prompt": text, **fields}, text.encode()))


def texts(jobs: Sequence[Job]) -> list[str]:
    return [str(each.call.body["prompt"]) for each in jobs]


def all_of(queue: WorkQueue, owner: str) -> list[Job]:
    taken = []
    while (each := queue.take(owner)) is not None:
        taken.append(each)
    return taken


@pytest.mark.push
@given(st.lists(st.text("ab", max_size=5)), st.randoms(use_true_random=False))
def test_every_call_is_taken_once(prompts: list[str], draw: random.Random) -> None:
    """Whatever the workers do, including those that are lost."""
    queue = WorkQueue()
    queue.add(job(prompt) for prompt in prompts)
    done: list[Job] = []
    held: dict[str, list[Job]] = {"a": [], "b": [], "c": []}
    while len(done) < len(prompts):
        owner = draw.choice("abc")
        match draw.randrange(4):
            case 0 | 1:
                if (taken := queue.take(owner)) is not None:
                    held[owner].append(taken)
            case 2:
                done += held[owner]
                held[owner] = []
            case 3:
                queue.put_back(held[owner])
                queue.leave(owner)
                held[owner] = []
        assert len(queue) + len(done) + sum(map(len, held.values())) == len(prompts)
    assert sorted(texts(done)) == sorted(prompts)


def test_calls_with_a_common_prefix_follow_each_other() -> None:
    queue = WorkQueue()
    queue.add([job("b 1"), job("a 2"), job("b 2"), job("a 1")])
    assert texts(all_of(queue, "one")) == ["a 1", "a 2", "b 1", "b 2"]


def test_workers_divide_the_calls_between_prefixes() -> None:
    """The groups differ in size, so a division in the middle would separate one."""
    queue = WorkQueue()
    groups = {"a": 40, "b": 30, "c": 30}
    queue.add(job(f"{group * 100} {number}") for group, size in groups.items() for number in range(size))
    first = queue.take("one")
    assert first is not None
    two = queue.take("two")
    assert two is not None
    assert texts([first, two]) == [f"{'a' * 100} 0", f"{'b' * 100} 0"]


def test_returned_calls_come_first() -> None:
    queue = WorkQueue()
    queue.add([job("a"), job("b"), job("c")])
    first = queue.take("one")
    assert first is not None
    queue.put_back([first])
    assert texts(all_of(queue, "two")) == ["a", "c", "b"]  # the others belonged to the first worker


def test_the_range_of_a_lost_worker_goes_to_the_others() -> None:
    queue = WorkQueue()
    queue.add(job(str(number)) for number in range(10))
    queue.take("lost")
    queue.leave("lost")
    assert len(all_of(queue, "other")) == 9


def test_the_prefix_begins_with_what_templates_put_first() -> None:
    def prefix(**body: object) -> str:
        return prefix_of(Call("/v1/chat/completions", body))

    system = {"role": "system", "content": "Be brief."}
    one = prefix(messages=[system, {"role": "user", "content": "One"}], temperature=1, seed=5)
    other = prefix(messages=[system, {"role": "user", "content": "Other"}], temperature=0)
    assert one[:-3] == other[:-5]
    with_tools = prefix(messages=[system], tools=[{"type": "function"}])
    assert not with_tools.startswith(one[:20])
    assert prefix(messages="nonsense") == prefix(messages=["nonsense"])
