from __future__ import annotations

import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.requests import Event, Finished, Request, TextDelta, TextPrompt, ToolCallDelta
from llmrun.protocol.openai.choices import ChatChoice
from llmrun.serving.choices import Choices
from llmrun.serving.metrics import Metrics
from tests.support.serving.fake_model import HOLD, FakeModel, text

REQUEST = Request(TextPrompt("x"))

words = st.text("ab", max_size=2)
calls = st.lists(st.builds(ToolCallDelta, st.just(0), st.just(""), st.just("f"), words), max_size=2).map(tuple)
deltas = st.builds(
    TextDelta,
    st.just(0),
    words,
    st.lists(st.integers(0, 9), max_size=2).map(tuple),
    reasoning=st.one_of(st.just(""), words),
    unopened=st.sampled_from([False, False, False, True]),
    tentative=st.booleans(),
    tool_calls=st.one_of(st.just(()), calls),
)


async def arrivals(model: FakeModel, n: int = 1) -> list[tuple[int, Event]]:
    async with Choices(model, [REQUEST] * n, Metrics()) as choices:
        await choices.accepted()
        found: list[tuple[int, Event]] = []
        while (events := await choices.arrived()) is not None:
            found += events
        return found


def joined(events: list[TextDelta]) -> list[TextDelta]:
    """Return the deltas of an answer whose events arrive all at once."""

    async def run() -> list[TextDelta]:
        async with Choices(FakeModel(), [REQUEST], Metrics()) as choices:
            await choices.accepted()
            (asked,) = choices._asked
            asked.take = lambda: [(time.perf_counter(), event) for event in events]  # type: ignore[method-assign, misc]
            return [event for _, event in await choices.arrived() or () if isinstance(event, TextDelta)]

    return asyncio.run(run())


@given(st.lists(deltas, min_size=1, max_size=6))
def test_joined_deltas_are_the_same_answer(events: list[TextDelta]) -> None:
    found = joined(events)
    one_by_one, together = ChatChoice(()), ChatChoice(())
    for event in events:
        one_by_one.take(event)
    for event in found:
        together.take(event)
    assert together.message() == one_by_one.message()
    assert sum((event.tokens for event in found), ()) == sum((event.tokens for event in events), ())


def test_the_tokens_of_one_step_are_one_delta() -> None:
    assert joined([TextDelta(0, letter, (number,)) for number, letter in enumerate("abc")]) == [
        TextDelta(0, "abc", (0, 1, 2))
    ]


def test_the_events_of_all_choices_arrive_with_their_numbers() -> None:
    found = asyncio.run(arrivals(FakeModel(lambda number: text(f"answer {number}")), 3))
    assert {(choice, event.text) for choice, event in found if isinstance(event, TextDelta)} == {
        (number, f"answer {number}") for number in range(3)
    }
    assert sum(isinstance(event, Finished) for _, event in found) == 3


def test_nothing_arrives_until_a_time() -> None:
    async def run() -> tuple[list[tuple[int, Event]] | None, float]:
        async with Choices(FakeModel(lambda number: [HOLD]), [REQUEST], Metrics()) as choices:
            await choices.accepted()
            loop = asyncio.get_running_loop()
            begun = loop.time()
            return await choices.arrived(begun + 0.02), loop.time() - begun

    events, seconds = asyncio.run(run())
    assert events == []
    assert seconds >= 0.02
