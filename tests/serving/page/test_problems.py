"""Tests of the chat page when something goes wrong: errors in plain words, waits, and connections that break."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from llmrun.base.errors import BackendCrashed, ContextExceeded, LlmrunError, Overloaded, Unavailable, UsageError
from llmrun.engine.requests import TextDelta
from tests.support.browser.chat_page import answer_to, ask, last_answer, open_chat
from tests.support.browser.chromium import NEEDS_CHROMIUM
from tests.support.browser.live_page import Browser
from tests.support.servers.tcp_relay import relay_to
from tests.support.serving.fake_model import FACTS, HOLD, FakeModel, Script, text
from tests.support.serving.servers import serving

pytestmark = [pytest.mark.night, NEEDS_CHROMIUM]

# The page's clock runs 30 times as fast, so that its waits are short.
FAST_CLOCK = """
const now = performance.now.bind(performance), wait = setTimeout, tick = setInterval;
performance.now = () => now() * 30;
window.setTimeout = (run, ms, ...more) => wait(run, ms / 30, ...more);
window.setInterval = (run, ms, ...more) => tick(run, ms / 30, ...more);
"""
REPEATABLE = structs.replace(FACTS, info=replace(FACTS.info, batch_invariant=True))


def held_once(number: int) -> Script:
    """Return an answer that holds in the middle the first time."""
    events = text("One ", "two ", "three ", "four.")
    return [*events[:3], HOLD] if number == 0 else events


@pytest.mark.parametrize(
    ("error", "title", "words"),
    [
        (ContextExceeded("x"), "The conversation is too long for this model.", "Start a new chat"),
        (UsageError("temperature: 9 is too much"), "The server could not answer.", "Temperature: 9 is too much."),
        (BackendCrashed("x"), "The server could not answer.", "The model's process crashed while"),
        (Unavailable("x", state="draining"), "The server is not available.", "The server is shutting down. Try again"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_plain_words(chromium: Browser, error: LlmrunError, title: str, words: str) -> None:
    model = FakeModel()
    with serving(model) as server:
        page = open_chat(chromium, server)
        model.refusal = error
        answer_to(page, "Hi")
        assert page.text(".problem").startswith(f"{title}\n{words}")
        model.refusal = None
        page.click(".again")
        assert last_answer(page) == "Hello there"
        assert not page.is_shown(".problem")


def test_an_error_in_the_stream_leaves_the_text_before_it(chromium: Browser) -> None:
    with serving(FakeModel(lambda _: [*text("Hello")[:-1], BackendCrashed("x")])) as server:
        page = open_chat(chromium, server)
        assert answer_to(page, "Hi") == "Hello"
        assert "crashed" in page.text(".problem")
        answer_to(page, "Again")
        assert page.evaluate("JSON.parse(bodyOf(messages.slice(0, -1))).messages.map((one) => one.content)") == [
            "Hi",
            "Hello",
            "Again",
        ]


@pytest.mark.parametrize("error", [Overloaded("the queue is full", retry_after=20), Unavailable("x", retry_after=20)])
def test_a_busy_server_is_asked_again_after_its_wait(chromium: Browser, error: LlmrunError) -> None:
    model = FakeModel()
    with serving(model) as server:
        page = open_chat(chromium, server, setup=FAST_CLOCK)
        model.refusal = error
        ask(page, "Hi")
        page.wait_for("document.querySelector('.doing')?.innerText.includes('Trying again in')")
        model.refusal = None
        assert last_answer(page) == "Hello there"


def test_a_wait_can_be_stopped(chromium: Browser) -> None:
    model = FakeModel()
    with serving(model) as server:
        page = open_chat(chromium, server)
        model.refusal = Overloaded("the queue is full", retry_after=100)
        ask(page, "Hi")
        page.wait_for("document.querySelector('.doing')?.innerText.includes('Trying again in')")
        assert page.text(".doing").startswith("The server is busy. Trying again in 100 s (1 of 30)")
        page.press("Escape")
        last_answer(page)
        assert page.text(".note") == "You stopped this answer."


def test_the_wait_in_the_queue_is_shown(chromium: Browser) -> None:
    model = FakeModel(lambda _: [HOLD, *text("Hello")])
    model.wait_s = 42
    with serving(model) as server:
        page = open_chat(chromium, server)
        ask(page, "Hi")
        model.wait_for("held")
        page.wait_for("document.querySelector('.doing')?.innerText.startsWith('Waiting for other requests, about 4')")
        assert page.evaluate("$('spoken').textContent") == "Waiting for other requests, about 42 seconds."
        server.release()
        assert last_answer(page) == "Hello"
        assert not page.is_shown(".state")


def test_a_broken_stream_continues_where_it_broke(chromium: Browser) -> None:
    model = FakeModel(held_once)
    model.facts = REPEATABLE
    with serving(model) as server, relay_to(server.port) as relay:
        page = chromium.open(f"http://127.0.0.1:{relay.port}/", setup=FAST_CLOCK)
        page.wait_for("models.length")
        ask(page, "Count")
        page.wait_for("messages[1]?.content === 'One two '")
        relay.cut()
        assert last_answer(page) == "One two three four."
        assert len(model.asked) == 2
        assert model.asked[0].request.seed == model.asked[1].request.seed
        assert "4 tokens" in page.text(".statistics")


def test_a_stream_that_cannot_continue_says_so(chromium: Browser) -> None:
    with serving(FakeModel(held_once)) as server, relay_to(server.port) as relay:
        page = chromium.open(f"http://127.0.0.1:{relay.port}/", setup=FAST_CLOCK)
        page.wait_for("models.length")
        ask(page, "Count")
        page.wait_for("messages[1]?.content === 'One two '")
        relay.cut()
        assert last_answer(page) == "One two"
        assert page.text(".problem").startswith("The connection broke.\nThis model cannot continue")
        assert not page.is_shown(".continue")
        page.click(".again")
        assert last_answer(page) == "One two three four."


def test_an_unreachable_server_is_tried_and_then_named(chromium: Browser) -> None:
    model = FakeModel(held_once)
    model.facts = REPEATABLE
    with serving(model) as server, relay_to(server.port) as relay:
        page = chromium.open(f"http://127.0.0.1:{relay.port}/", setup=FAST_CLOCK)
        page.wait_for("models.length")
        ask(page, "Count")
        page.wait_for("messages[1]?.content === 'One two '")
        page.go_offline()
        relay.cut()
        page.wait_for("document.querySelector('.doing').innerText.includes('(6 of 6)')")
        assert last_answer(page) == "One two"
        assert page.text(".problem").startswith("The server cannot be reached.\nCheck that the server is running")
        page.go_offline(False)
        page.click(".continue")
        assert last_answer(page) == "One two three four."
        assert not page.is_shown(".problem")


def test_an_answer_can_be_continued_after_a_reload(chromium: Browser) -> None:
    model = FakeModel(held_once)
    model.facts = REPEATABLE
    with serving(model) as server:
        page = open_chat(chromium, server)
        ask(page, "Count")
        page.wait_for("messages[1]?.content === 'One two '")
        page.reload()
        model.wait_for("cancelled")
        assert page.text(".problem").startswith("The page was reloaded while this answer was being written.")
        page.click(".continue")
        assert last_answer(page) == "One two three four."
        assert page.evaluate("tab.getItem('llmrun.chat').includes('One two three four.')")


def test_a_stream_of_another_model_is_not_continued(chromium: Browser) -> None:
    model = FakeModel(held_once)
    model.facts = REPEATABLE
    with serving(model) as server:
        page = open_chat(chromium, server)
        ask(page, "Count")
        page.wait_for("messages[1]?.content === 'One two '")
        page.reload()
        model.facts = structs.replace(REPEATABLE, fingerprint="fp-other")
        page.click(".continue")
        page.wait_for("document.querySelector('.problem').innerText.startsWith('The answer cannot be continued.')")
        assert last_answer(page) == "One two"
        assert not page.is_shown(".continue")


def test_thinking_that_breaks_continues_too(chromium: Browser) -> None:
    thoughts = [TextDelta(0, "", (n,), reasoning=word) for n, word in enumerate(("Hmm, ", "so."))]
    model = FakeModel(lambda number: [*thoughts[:1], HOLD] if number == 0 else [*thoughts, *text("Two.")])
    model.facts = REPEATABLE
    with serving(model) as server, relay_to(server.port) as relay:
        page = chromium.open(f"http://127.0.0.1:{relay.port}/", setup=FAST_CLOCK)
        page.wait_for("models.length")
        ask(page, "1 + 1?")
        page.wait_for("messages[1]?.reasoning === 'Hmm, '")
        relay.cut()
        assert last_answer(page) == "Two."
        assert page.evaluate("messages[1].reasoning") == "Hmm, so."
