"""Tests of images over HTTP, with a fake model."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.errors import ModelFileError, UsageError
from llmrun.base.types import FinishReason
from llmrun.engine.requests import ChatPrompt, Event, Finished, ImageProgress, PrefillProgress, SeenImage
from llmrun.serving.options import Limits, ServingOptions
from llmrun.serving.processes.supervisor import ServingLimits, Waiting
from tests.support.serving.fake_model import BEGIN, FACTS, HOLD, TIMINGS, FakeModel, Script, ScriptedRequest, text
from tests.support.serving.pictures import RED, base64_of, bomb, data_url, key_of, png
from tests.support.serving.servers import CHAT, RunningServer, eventually, read_until, serving

PHOTO = SeenImage(4032, 3024, 896, 672, 252)
ICON = SeenImage(32, 32, 448, 448, 1)
QUICK_PINGS = ServingOptions(limits=Limits(ping_s=0.05))
ENCODED = Finished(0, FinishReason.STOP, None, 5, replace(TIMINGS, encoded_images=1, encode_s=1.25))


def logged(server: RunningServer) -> str:
    """Return the last line of the log, which the server writes after the response."""
    eventually(lambda: bool(server.log))
    return server.log[-1]


def seeing(script: Callable[[int], Script]) -> FakeModel:
    """Return a model that reads images, and sees two images in every prompt."""
    model = FakeModel(script)
    model.facts = structs.replace(FACTS, sees_images=True)
    model.images = (PHOTO, structs.replace(ICON, is_first_frame=True))
    return model


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with serving(seeing(lambda _: [*text("A cat.")[:-1], ENCODED])) as running:
        yield running


def question(file: bytes = RED) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}}, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("stream", [False, True])
def test_no_image_is_shrunk_silently(server: RunningServer, stream: bool) -> None:
    """lmstudio-bug-tracker#941, #990 and #880 report images that were shrunk silently."""
    reply = server.chat(messages=question(), stream=stream)
    shown = "4032x3024 shrunk to 896x672, 252 tokens; 32x32, first frame, 1 token"
    assert (reply.status, reply.headers["x-llmrun-images"]) == (200, shown)
    assert f"  2 images ({shown}), 1 encoded in 1.2 s  " in logged(server)


def test_choices_report_their_images_once(server: RunningServer) -> None:
    assert server.chat(messages=question(), n=2).headers["x-llmrun-images"].count("4032x3024") == 1


def test_choices_whose_images_never_fit_are_invalid(server: RunningServer) -> None:
    """A status of 503 would ask the client to try again, forever."""
    server.model.most_bytes = 3 * len(RED)
    assert server.chat(messages=question(), n=3).status == 200
    reply = server.chat(messages=question(), n=4)
    assert (reply.status, reply.error["param"]) == (400, "n")
    assert "the images of 4 choices have" in reply.error["message"]


def test_texts_have_no_header_for_images(server: RunningServer) -> None:
    server.model.images = ()
    assert "x-llmrun-images" not in server.chat().headers
    assert "image" not in logged(server)


def test_images_appear_in_no_log_and_no_error(server: RunningServer) -> None:
    secret = base64_of(RED)
    for messages in (question(), question(bomb())):
        reply = server.chat(messages=messages)
        shown = f"{reply.headers}{reply.body!r}{server.log}"
        assert secret[20:40] not in shown
        assert base64_of(bomb())[20:40] not in shown
    assert reply.status == 400
    assert reply.error["message"].startswith("messages[0].content[0].image_url.url: the image is too large: 60,000 x")


@pytest.mark.parametrize("is_accepted", [False, True])
def test_damaged_results_end_no_conversation(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, is_accepted: bool
) -> None:
    """Only the engine finds some damage, so one answer fails, and later requests have a note to the model."""
    monkeypatch.setattr("llmrun.serving.protocol.images._UNREADABLE", {})
    damaged = png(9, 9 + is_accepted)
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "image_url", "image_url": data_url(damaged)}]}
    messages = [*question(), {"role": "assistant", "tool_calls": [call]}, result]
    error = UsageError("image 2: invalid PNG file: broken data stream")
    with monkeypatch.context() as patched:
        if is_accepted:
            patched.setattr(ScriptedRequest, "take", _raising(error))
        else:
            patched.setattr(ScriptedRequest, "accepted", _refusing(error))
        assert server.chat(messages=messages).status == 400
    assert server.chat(messages=messages).status == 200
    prompt = server.model.asked[-1].request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[-1]["content"] == "[An image was left out: invalid PNG file: broken data stream.]"
    assert [*prompt.images] == [key_of(RED)]


def _raising(error: Exception) -> Callable[[object], None]:
    def take(request: object) -> None:
        raise error

    return take


def _refusing(error: Exception) -> Callable[[object], Awaitable[None]]:
    async def accepted(request: object) -> None:
        raise error

    return accepted


ANTHROPIC_PART = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(RED)}}
STREAMS: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"messages": question()},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(RED)}]}],
    },
    "/v1/messages": {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": [ANTHROPIC_PART]}]},
    "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "?", "images": [base64_of(RED)]}]},
}


@pytest.mark.parametrize("path", STREAMS)
def test_streams_of_damaged_images_have_a_status(path: str) -> None:
    """Decoding ends after the request was accepted, and SDKs raise errors of a stream's events as other exceptions."""
    model = seeing(lambda _: [BEGIN, PrefillProgress(0, 1, 9), 0.05, UsageError("image 1: invalid PNG file")])
    with serving(model) as server:
        reply = server.send("POST", path, {**STREAMS[path], "stream": True})
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    assert "image 1: invalid PNG file" in reply.body.decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_failed_encoders_are_explained_in_the_log(stream: bool, begins: bool) -> None:
    """Clients are not told the paths of the server, but nobody could repair the projector without the reason."""
    problem = "llama.cpp cannot encode an image with /models/mmproj.gguf: out of memory"
    script: Script = [*text("A cat.")[:-1], ModelFileError(problem)] if begins else [BEGIN, ModelFileError(problem)]
    with serving(seeing(lambda _: script)) as server:
        reply = server.chat(messages=question(), stream=stream)
        assert reply.status == (200 if stream and begins else 500)
        assert b"the model could not process this request" in reply.body
        assert b"mmproj.gguf" not in reply.body
        assert logged(server).endswith(f"  failed: {problem}")


def test_slow_images_delay_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.serving.streams._DECODING_S", 0.05)
    with serving(seeing(lambda _: [BEGIN, HOLD, *text("A cat.")])) as server:
        line = server.begin_chat(messages=question(), stream=True)
        assert b"200 OK" in read_until(line, b"\r\n\r\n")
        server.release()
        assert b"A cat." in read_until(line, b"[DONE]")


@pytest.mark.parametrize(
    ("script", "comment"),
    [
        ([], "ping"),
        ([BEGIN], "ping"),
        ([BEGIN, PrefillProgress(0, 20, 300, image=ImageProgress(1, 2))], "reading image 1 of 2"),
        (
            [BEGIN, PrefillProgress(0, 20, 300, image=ImageProgress(1, 1, 0.4, 7.2))],
            "reading the image: 40%, about 7 s left",
        ),
        ([BEGIN, PrefillProgress(0, 20, 300)], "processing prompt 20/300"),
    ],
)
def test_streams_say_that_images_are_read(
    monkeypatch: pytest.MonkeyPatch, script: list[Event | str], comment: str
) -> None:
    """Encoding an image may take minutes, in which the prompt makes no progress."""
    monkeypatch.setattr("llmrun.serving.streams._DECODING_S", 0.05)
    with serving(seeing(lambda _: [*script, HOLD, *text("A cat.")]), QUICK_PINGS) as server:
        line = server.begin_chat(messages=question(), stream=True)
        read_until(line, f": {comment}\n".encode())
        server.release()
        assert b"A cat." in read_until(line, b"[DONE]")


def test_base64_never_becomes_text_of_the_prompt(server: RunningServer) -> None:
    """open-webui/open-webui#26725 reports base64 that was counted as text."""
    server.chat(messages=question())
    prompt = server.model.asked[-1].request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert base64_of(RED)[:12] not in json.dumps([*prompt.messages])
    assert [*prompt.images] == [key_of(RED)]
    message = {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": base64_of(RED)}}]}
    body = {"model": "fake", "messages": [message]}
    assert server.send("POST", "/v1/messages/count_tokens", body).json == {"input_tokens": 42}
    counted = server.model.counted_prompts[-1].prompt
    assert isinstance(counted, ChatPrompt)
    assert (base64_of(RED)[:12] in json.dumps([*counted.messages]), [*counted.images]) == (False, [key_of(RED)])


def test_models_say_that_they_read_images(server: RunningServer) -> None:
    assert server.send("GET", "/v1/models").json["data"][0]["architecture"]["input_modalities"] == ["text", "image"]
    assert server.send("GET", "/props").json["modalities"]["vision"] is True
    assert "vision" in server.send("POST", "/api/show", {"model": "fake"}).json["capabilities"]


@pytest.mark.parametrize("path", [CHAT, "/apply-template"])
def test_a_large_image_is_accepted(server: RunningServer, path: str) -> None:
    comment = b"teXt" + b" " * (11 << 20)
    file = RED[:-12] + (11 << 20).to_bytes(4, "big") + comment + bytes(4) + RED[-12:]
    reply = server.send("POST", path, {"messages": question(file)})
    assert reply.status == 200, reply.body


def test_several_large_images_may_wait() -> None:
    """Choices of one call wait together, each with the images of its prompt."""
    limits = ServingLimits()
    limits.check_room([Waiting("", 12 << 20, is_cancelled=False)] * 4, "", 12 << 20, retry_after=1.0)
