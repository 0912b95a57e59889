"""Tests of the chat page with values that nothing in it expects: keys, full or damaged storages, and errors."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from llmrun.serving.options import ServingOptions
from tests.support.browser.chat_page import answer_to, open_chat
from tests.support.browser.chromium import NEEDS_CHROMIUM
from tests.support.browser.live_page import Browser
from tests.support.servers.hostile_server import Asked, event, response, stream_head
from tests.support.servers.hostile_server import serving as scripted
from tests.support.serving.fake_model import FakeModel
from tests.support.serving.fake_upstream import upstream
from tests.support.serving.fronts import fronting
from tests.support.serving.servers import serving

pytestmark = [pytest.mark.night, NEEDS_CHROMIUM]

KEY = "a-long-enough-test-key"
FULL = """
for (const store of [sessionStorage, localStorage]) {
  for (let n = 1 << 22; n; n >>= 1) { try { store.setItem(`x${n}`, "x".repeat(n)); } catch {} }
}
"""


@pytest.mark.parametrize(
    "wrong", ["ключ-ключ-ключ-ключ", "a-long-enough-test-key\u200b", "“quoted-long-key-1”", "two words"]
)
def test_a_key_that_cannot_be_sent_is_asked_for_again(chromium: Browser, wrong: str) -> None:
    with serving(FakeModel(), ServingOptions(keys=(KEY,))) as server:
        page = chromium.open(f"http://127.0.0.1:{server.port}/")
        page.click("#key")
        page.type(wrong)
        page.press("Enter")
        page.wait_for("document.querySelector('#unlock').open")
        page.evaluate("document.querySelector('#key').value = ''")
        page.click("#key")
        page.type(KEY)
        page.press("Enter")
        page.wait_for("models.length > 0")


def test_a_full_storage_keeps_nobody_from_chatting(chromium: Browser) -> None:
    with serving(FakeModel(), ServingOptions(keys=(KEY,))) as server:
        page = chromium.open(f"http://127.0.0.1:{server.port}/", setup=FULL)
        page.click("#key")
        page.type(KEY)
        page.press("Enter")
        page.wait_for("models.length > 0")
        assert answer_to(page, "Hi") == "Hello there"
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") in ("dark", "light")
        assert page.complaints == []


@pytest.mark.cover(1)
@pytest.mark.parametrize("message", [7, ["<b>"], {"a": 1}, None, "", True, "\u202egnp.exe"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_errors_of_any_type_are_shown(chromium: Browser, message: Any, is_stream: bool) -> None:
    """They come from servers behind this one."""
    error = {"error": {"message": message, "type": "invalid_request_error", "code": {}}}

    def failing(asked: Asked, connection: socket.socket) -> None:
        body = json.dumps(error).encode()
        connection.sendall(
            stream_head() + event(body) if is_stream else response(body, status="400 No", kind="application/json")
        )

    with scripted(upstream(failing)) as server, fronting(f"http://127.0.0.1:{server.port}/v1") as front:
        page = open_chat(chromium, front)
        page.evaluate("(settings.model = 'tiny', 0)")
        answer_to(page, "Hi")
        assert page.text(".problem").startswith("The server could not answer.")
        assert page.complaints == []


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"choices": [None]},
        {"choices": [{"delta": {"content": 7}}]},
        {"choices": [{"delta": 5}]},
        {"usage": {}},
        {"choices": 3},
        {"timings": 3},
        {
            "choices": [
                {
                    "delta": {
                        "tool_calls": [{"function": {"name": "<img src=x onerror=alert(1)>", "arguments": "<script>"}}]
                    }
                }
            ]
        },
    ],
)
def test_chunks_of_any_form_do_not_stop_the_page(chromium: Browser, chunk: Any) -> None:
    events = (
        event({"choices": [{"index": 0, "delta": {"content": "Hello"}}]})
        + event(chunk)
        + event({"choices": [{"index": 0, "delta": {"content": " there"}, "finish_reason": "stop"}]})
    )

    def odd(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(response(events, kind="text/event-stream"))

    with scripted(upstream(odd)) as server, fronting(f"http://127.0.0.1:{server.port}/v1") as front:
        page = open_chat(chromium, front)
        page.evaluate("(settings.model = 'tiny', 0)")
        answer = answer_to(page, "Hi")
        assert (answer, page.complaints) == ("Hello there", [])
        page.evaluate("(settings.model = 'fake', 0)")
        assert answer_to(page, "Again") == "Hello there"


def test_a_link_on_another_site_opens_the_page(chromium: Browser) -> None:
    with (
        serving() as server,
        scripted(response(f'<a href="http://127.0.0.1:{server.port}/">x</a>'.encode(), kind="text/html")) as other,
    ):
        page = chromium.open(f"http://localhost:{other.port}/")
        page.evaluate("document.querySelector('a').click()")
        page.wait_for("typeof models !== 'undefined' && models.length > 0")
        assert answer_to(page, "Hi") == "Hello there"
