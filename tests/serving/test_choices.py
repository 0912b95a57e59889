from __future__ import annotations

import asyncio

from llmrun.engine.requests import Event, Finished, Request, TextDelta, TextPrompt
from llmrun.serving.metrics import Metrics
from llmrun.serving.streams import Choices
from tests.support.serving.fake_model import HOLD, FakeModel, text

REQUEST = Request(TextPrompt("x"))


async def arrivals(model: FakeModel, n: int = 1) -> list[tuple[int, Event]]:
    async with Choices(model, [REQUEST] * n, Metrics()) as choices:
        await choices.accepted()
        found: list[tuple[int, Event]] = []
        while (events := await choices.arrived()) is not None:
            found += events
        return found


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


def test_a_backlog_arrives_in_parts_and_others_run_in_between() -> None:
    async def run() -> tuple[list[int], int]:
        turns, over = 0, False

        async def other() -> None:
            nonlocal turns
            while not over:
                turns += 1
                await asyncio.sleep(0)

        async with Choices(FakeModel(lambda number: text(*["x"] * 500)), [REQUEST], Metrics()) as choices:
            await choices.accepted()
            (asked,) = choices._served
            while not asked.over:
                await asyncio.sleep(0)
            beside = asyncio.create_task(other())
            sizes = []
            while (events := await choices.arrived()) is not None:
                sizes.append(len(events))
            over = True
            await beside
            return sizes, turns

    sizes, turns = asyncio.run(run())
    assert sum(sizes) == 502
    assert max(sizes) <= 64
    assert turns >= len(sizes) - 1
