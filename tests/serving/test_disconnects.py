"""Tests that requests stop when their client leaves, in every phase."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from llmrun.engine.requests import PrefillProgress
from tests.support.serving.fake_model import HOLD, FakeModel, Script, text
from tests.support.serving.servers import eventually, read_until, serving

PROGRESS, *ANSWER = text("one", "two", "three")
PHASES: dict[str, Sequence[Script]] = {
    "queue": [[HOLD, PROGRESS, *ANSWER]],
    "prefill": [[PrefillProgress(0, 1, 3), HOLD, *ANSWER]],
    "decode": [[PROGRESS, *ANSWER[:2], HOLD, *ANSWER[2:]]],
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_cancels_its_requests(phase: str, choices: int, stream: bool) -> None:
    model = FakeModel(lambda number: PHASES[phase][0])
    with serving(model) as server:
        line = server.begin_chat(n=choices, stream=stream)
        model.wait_for("held", choices)
        line.close()
        model.wait_for("cancelled", choices)
        server.release()
        assert server.chat().status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_one_client_that_leaves_disturbs_no_other(stream: bool) -> None:
    model = FakeModel(lambda number: PHASES["decode"][0])
    with serving(model) as server:
        leaving, staying = server.begin_chat(stream=stream), server.begin_chat(stream=stream)
        model.wait_for("held", 2)
        leaving.close()
        model.wait_for("cancelled")
        server.release()
        assert b"three" in read_until(staying, b"three")
        staying.close()
        eventually(lambda: len(server.log) == 2)
        left, _ = sorted(server.log, key=lambda line: not line.endswith("client left"))
        assert re.search(r"  499  3\+2 tokens  \d+\.\d\d s  client left$", left)
        assert b'/chat/completions",status="499"} ' in server.send("GET", "/metrics").body


def test_the_log_says_how_far_a_prompt_came_when_its_client_left() -> None:
    with serving(FakeModel(lambda number: PHASES["prefill"][0])) as server:
        line = server.begin_chat(stream=True)
        server.model.wait_for("held")
        line.close()
        eventually(lambda: bool(server.log))
        assert re.search(r"  499  3\+0 tokens  \d+\.\d\d s  client left$", server.log[0])


def test_requests_that_are_finished_are_not_cancelled_early() -> None:
    """Cancelling after the end does nothing, so the model counts it; before the end, there must be none."""
    model = FakeModel(lambda number: PHASES["decode"][0])
    with serving(model) as server:
        line = server.begin_chat(stream=True)
        model.wait_for("held")
        assert model.counted("cancelled") == 0
        server.release()
        read_until(line, b"[DONE]")
        line.close()
