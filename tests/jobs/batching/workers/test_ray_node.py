"""Tests of a node as the process that talks to Ray sees it, with an actor that is not real."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from llmrun import __version__
from llmrun.base.errors import LlmrunError, ModelFileError, UsageError
from llmrun.base.processes.frames import encoded
from llmrun.jobs.batching.workers import ray_driver
from llmrun.jobs.batching.workers.base import FAILED, OK, WorkerLost
from llmrun.jobs.batching.workers.ray_driver import RayNode

pytestmark = pytest.mark.push

GREETING = {"version": __version__, "auth_mode": "token"}
Answers = Mapping[str, Any]  # by methods: a pair of a kind and a value, an error, or None for silence


class FakeMethod:
    """A method of an actor that always gives the same answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_: Any) -> FakeMethod:
        return self

    def future(self) -> concurrent.futures.Future[bytes]:
        future: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        elif self._answer is not None:
            future.set_result(encoded(list(self._answer)))
        return future


class FakeActor:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def __getattr__(self, method: str) -> FakeMethod:
        return FakeMethod(self._answers.get(method))


def opened(answers: Answers, monkeypatch: pytest.MonkeyPatch, *, calls: int = 0, needs_token: bool = False) -> Any:
    """Open a node, and call it as often. Returns the last result."""
    monkeypatch.setattr(RayNode, "_new_actor", lambda self, node: FakeActor(answers))
    monkeypatch.setattr(ray_driver, "SILENCE_S", 0.2)

    async def run() -> Any:
        node = RayNode("ray:10.0.0.6", lambda *news: None)
        result = await node.open(node={}, model={}, files={}, needs_token=needs_token, start_s=0.5)
        for _ in range(calls):
            result = await node.answer("", {})
        return result

    return asyncio.run(run())


def test_a_node_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"hello": (OK, GREETING), "open": (OK, {"id": "m"})}
    assert opened(answers, monkeypatch, needs_token=True) == {"id": "m"}


def test_another_version_of_llmrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"ray:10\.0\.0\.6: the node has llmrun 0\.0\.1, but this machine has "
    ) as raised:
        opened({"hello": (OK, {**GREETING, "version": "0.0.1"})}, monkeypatch)
    assert "same version" in raised.value.hint


def test_a_node_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"hello": (OK, {**GREETING, "auth_mode": ""}), "open": (OK, {})}
    assert opened(answers, monkeypatch) == {}
    with pytest.raises(UsageError, match="started without RAY_AUTH_MODE=token"):
        opened(answers, monkeypatch, needs_token=True)


def test_a_node_that_never_starts_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerLost, match=r"CPUs were not free within 0\.5 s"):
        opened({}, monkeypatch)


def test_a_silent_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"hello": (OK, GREETING), "open": (OK, {})}
    with pytest.raises(WorkerLost, match=r"ray:10\.0\.0\.6: no response for"):
        opened(answers, monkeypatch, calls=1)


def test_errors_keep_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = {"error": "ModelFileError", "message": "broken", "hint": ""}
    with pytest.raises(ModelFileError, match="broken"):
        opened({"hello": (OK, GREETING), "open": (FAILED, failure)}, monkeypatch)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ActorDiedError(), "the worker's process has ended"),
        (ActorUnavailableError("x", None), "the node cannot be reached"),
        (RayError("line\none"), "line one"),
        (
            RayError("ModuleNotFoundError: No module named 'llmrun'"),
            "llmrun is missing or outdated in the Python environment of Ray on the node",
        ),
    ],
)
def test_errors_of_ray_are_put_in_a_few_words(error: RayError, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LlmrunError) as raised:
        opened({"hello": error}, monkeypatch)
    assert str(raised.value) == f"ray:10.0.0.6: {words}"
