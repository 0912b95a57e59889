from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from llmrun.engine.child.serving import TurnQueue


def test_tenants_take_turns() -> None:
    queue: TurnQueue[int] = TurnQueue()
    for item in range(4):
        queue.put("greedy", item)
    queue.put("modest", 10)
    assert [queue.get(), queue.get()] == [0, 10]
    queue.put("modest", 11)
    queue.put("late", 20)
    assert [queue.get() for _ in range(5)] == [1, 11, 20, 2, 3]


def test_urgent_items_come_first() -> None:
    queue: TurnQueue[int] = TurnQueue()
    queue.put("a", 1)
    queue.put_first(2)
    queue.put_first(3)
    assert [queue.get() for _ in range(3)] == [2, 3, 1]


def test_get_waits_for_an_item() -> None:
    queue: TurnQueue[str] = TurnQueue()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(queue.get)
        queue.put("", "item")
        assert waiting.result(timeout=10) == "item"
