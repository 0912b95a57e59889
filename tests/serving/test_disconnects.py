"""Tests that requests stop when their client leaves, in every phase."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

import pytest

from llmrun.base.errors import Overloaded
from llmrun.engine.requests import PrefillProgress, Request
from tests.support.serving.fake_model import HOLD, FakeModel, Script, ScriptedRequest, text
from tests.support.serving.servers import CHAT, HELLO, eventually, post, read_until, serving

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


@pytest.mark.parametrize("early", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("same_packet", [False, True])
def test_clients_that_send_more_can_still_leave(early: bytes, same_packet: bool) -> None:
    model = FakeModel(lambda number: PHASES["queue"][0])
    with serving(model) as server:
        line = server.connect()
        line.sendall(post(CHAT, HELLO) + (early if same_packet else b""))
        model.wait_for("held")
        line.sendall(early)
        line.close()
        model.wait_for("cancelled")


def test_requests_that_arrive_early_are_answered_in_order() -> None:
    model = FakeModel(lambda number: [HOLD, *text(f"answer {number}")])
    with serving(model) as server:
        line = server.connect()
        line.sendall(post(CHAT, HELLO))
        model.wait_for("held")
        for number in (1, 2):
            request = post(CHAT, {**HELLO, "n": number})
            line.sendall(request[:100])
            line.sendall(request[100:])
        server.release()
        received = read_until(line, b"answer 3")
    assert [received.index(b"answer %d" % number) for number in range(4)] == sorted(
        received.index(b"answer %d" % number) for number in range(4)
    )


def test_a_large_request_that_arrives_early_stays_in_order() -> None:
    model = FakeModel(lambda number: [HOLD, *text(f"answer {number}")])
    with serving(model) as server:
        line = server.connect()
        line.sendall(post(CHAT, HELLO))
        model.wait_for("held")
        request = post(CHAT, {**HELLO, "user": "".join(map(str, range(10_000)))})  # more than fits
        for part in (request[:20_000], request[20_000:]):
            line.sendall(part)
            time.sleep(0.05)  # otherwise, both parts may arrive as one
        server.release()
        assert b"answer 1" in read_until(line, b"answer 1")


def full_with(model: FakeModel, most: int) -> None:
    """Make a model refuse requests while `most` requests are unfinished, and count the refusals."""
    ask = model.ask

    def ask_if_room(request: Request, news: asyncio.Event) -> ScriptedRequest:
        if sum(not asked.has_left for asked in model.asked) >= most:
            model.count("refused")
            raise Overloaded("the queue is full", retry_after=2)
        return ask(request, news)

    model.ask = ask_if_room  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_repetition_may_arrive_before_the_end_of_the_cancelled_request(stream: bool) -> None:
    model = FakeModel(lambda number: PHASES["queue"][0] if number == 0 else text("Hello"))
    full_with(model, 1)
    with serving(model) as server:
        cancelled = server.begin_chat(stream=stream)
        model.wait_for("held")
        repeated = server.begin_chat(stream=stream)
        model.wait_for("refused")
        cancelled.close()
        assert b" 200 " in read_until(repeated, b"Hello")
        repeated.close()
        assert model.counted("refused") == 1


def test_full_servers_still_refuse_requests() -> None:
    """If no client disconnects, a refused request is not tried again."""
    model = FakeModel(lambda number: PHASES["queue"][0])
    full_with(model, 1)
    with serving(model) as server:
        staying = server.begin_chat()
        model.wait_for("held")
        refused = server.chat()
        assert (refused.status, refused.headers["retry-after"]) == (429, "2")
        assert model.counted("refused") == 1
        server.release()
        staying.close()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_calls_end_with_their_clients(path: str) -> None:
    model = FakeModel()

    async def work(*_: object, **__: object) -> None:
        model.count("held")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            model.count("cancelled")
            raise

    for name in ("tokenize", "detokenize", "count_prompt"):
        setattr(model, name, work)
    with serving(model) as server:
        line = server.connect()
        line.sendall(post(path, {"model": "fake", "content": "x", "tokens": [1], **HELLO}))
        model.wait_for("held")
        line.close()
        model.wait_for("cancelled")


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
