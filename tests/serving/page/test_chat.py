"""Tests of the chat page as people use it: questions, answers, settings and what survives a reload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.types import FinishReason
from llmrun.engine.requests import ChatPrompt, Event, Finished, PrefillProgress, TextDelta
from llmrun.serving.options import Limits, ServingOptions
from tests.support.browser.chat_page import answer_to, ask, last_answer, open_chat
from tests.support.browser.chromium import NEEDS_CHROMIUM
from tests.support.browser.live_page import Browser, Page
from tests.support.serving.fake_model import FACTS, HOLD, TIMINGS, FakeModel, Script, text
from tests.support.serving.servers import RunningServer, serving

pytestmark = [pytest.mark.push, NEEDS_CHROMIUM]

KEY = "a-long-enough-test-key"


def ended(reason: FinishReason, tokens: int = 2) -> Finished:
    return Finished(0, reason, None, 5, replace(TIMINGS, generated_tokens=tokens))


def numbered(number: int) -> Sequence[Event]:
    """Return an answer that tells how many there were before."""
    return text("Answer ", str(number))


def sent(server: RunningServer) -> list[tuple[str, str]]:
    """Return the roles and the texts of the last request."""
    prompt: Any = server.model.asked[-1].request.prompt
    assert isinstance(prompt, ChatPrompt)
    return [(message["role"], message["content"]) for message in prompt.messages]


def test_an_answer_streams_and_ends_with_statistics(chromium: Browser) -> None:
    with serving(FakeModel(lambda _: [*text("Hello ", "**you**")[:-1], HOLD, ended(FinishReason.STOP)])) as server:
        page = open_chat(chromium, server)
        ask(page, "Hi")
        page.wait_for("document.querySelector('.reply strong')")
        assert page.text(".reply") == "Hello you"
        assert not page.is_shown(".answer .tools")
        server.release()
        assert last_answer(page) == "Hello you"
        statistics = page.text(".statistics")
    assert "2 tokens · 10.0 tokens/s · first token after 0." in statistics
    assert "prompt of 3 tokens" in statistics
    assert sent(server) == [("user", "Hi")]


def test_a_long_prompt_shows_its_progress(chromium: Browser) -> None:
    script = [PrefillProgress(0, 5, 20), HOLD, *text("Hello")[1:]]
    with serving(FakeModel(lambda _: script), ServingOptions(limits=Limits(ping_s=0.1))) as server:
        page = open_chat(chromium, server)
        ask(page, "Hi")
        page.wait_for("/Reading the conversation for \\d+\\s+s, 25\\s+%/.test(document.body.innerText)")
        server.release()
        assert last_answer(page) == "Hello"


def test_enter_sends_and_shift_enter_begins_a_line(chromium: Browser) -> None:
    with serving() as server:
        page = open_chat(chromium, server)
        page.click("#question")
        page.press("Enter")  # nothing to send
        page.type("one")
        page.press("Enter", shift=True)
        page.type("two")
        page.press("Enter")
        last_answer(page)
        assert sent(server) == [("user", "one\ntwo")]
        assert len(server.model.asked) == 1
        assert page.evaluate("$('question').value") == ""


@pytest.mark.parametrize("way", ["Escape", "button", "new chat"])
def test_stopping_cancels_the_request(chromium: Browser, way: str) -> None:
    with serving(FakeModel(lambda _: [*text("Hello")[:-1], HOLD])) as server:
        page = open_chat(chromium, server)
        ask(page, "Hi")
        page.wait_for("document.querySelector('.reply p')")
        if way == "Escape":
            page.press("Escape")
        else:
            page.click("#stop" if way == "button" else "#new")
        server.model.wait_for("cancelled")
        page.wait_for("!running")
        if way == "new chat":
            assert page.texts(".answer") == []
        else:
            assert last_answer(page) == "Hello"
            assert page.text(".note") == "You stopped this answer."
        assert page.evaluate("document.activeElement.id") == "question"


def test_the_last_answer_can_be_regenerated(chromium: Browser) -> None:
    with serving(FakeModel(numbered)) as server:
        page = open_chat(chromium, server)
        assert [answer_to(page, "Hi"), answer_to(page, "And?")] == ["Answer 0", "Answer 1"]
        page.click(".answer:last-child .again")
        assert last_answer(page) == "Answer 2"
        assert sent(server) == [("user", "Hi"), ("assistant", "Answer 0"), ("user", "And?")]
        assert page.texts(".reply") == ["Answer 0", "Answer 2"]


@pytest.mark.night
def test_the_last_question_can_be_edited(chromium: Browser) -> None:
    with serving(FakeModel(numbered)) as server:
        page = open_chat(chromium, server)
        answer_to(page, "Hi")
        answer_to(page, "Who?")
        page.click(".question:nth-last-child(2) .edit")
        assert page.is_shown("#editing")
        page.press("Escape")
        assert (page.is_shown("#editing"), page.evaluate("$('question').value")) == (False, "")
        page.click(".question:nth-last-child(2) .edit")
        page.evaluate("$('question').select()")
        assert answer_to(page, " Why?") == "Answer 2"
        assert page.texts(".said")[0] == "Hi"
        assert len(page.texts(".said")) == len(page.texts(".reply")) == 2
        assert sent(server)[-1][1].endswith("Why?")


def test_settings_are_sent_and_empty_ones_are_not(chromium: Browser) -> None:
    with serving() as server:
        page = open_chat(chromium, server)
        answer_to(page, "Hi")
        assert page.evaluate("Object.keys(JSON.parse(bodyOf([])))") == ["messages", "stream", "stream_options", "model"]
        page.click("#open-settings")
        for field, value in (("system", "Be brief."), ("temperature", "0.25"), ("seed", "7")):
            page.click(f"#{field}")
            page.type(value)
        page.press("Enter")
        answer_to(page, "Again")
        assert sent(server)[0] == ("system", "Be brief.")
        sampling = server.model.asked[-1].request.sampling
        assert (sampling.temperature, sampling.seed) == (0.25, 7)
        page.reload()
        assert page.evaluate("settings.system") == "Be brief."


def test_a_conversation_survives_a_reload_in_its_tab_only(chromium: Browser) -> None:
    with serving(FakeModel(numbered)) as server:
        page = open_chat(chromium, server)
        answer_to(page, "Hi **there**")
        page.reload()
        assert (page.texts(".said"), page.texts(".reply")) == (["Hi **there**"], ["Answer 0"])
        answer_to(page, "More")
        assert sent(server) == [("user", "Hi **there**"), ("assistant", "Answer 0"), ("user", "More")]
        page.click("#new")
        page.reload()
        assert page.is_shown("#welcome")
        assert page.evaluate("localStorage.length") == 0


def test_thinking_is_folded(chromium: Browser) -> None:
    events: Script = [
        TextDelta(0, "", (1,), reasoning="Hmm, *two*"),
        HOLD,
        TextDelta(0, "Two.", (2,)),
        ended(FinishReason.STOP),
    ]
    with serving(FakeModel(lambda _: events)) as server:
        page = open_chat(chromium, server)
        ask(page, "1 + 1?")
        page.wait_for("document.querySelector('.thinking')?.checkVisibility()")
        assert page.text("summary") == "Thinking …"
        server.release()
        assert last_answer(page) == "Two."
        assert page.text("summary").startswith("Thought for ")
        assert not page.is_shown(".thinking .text em")
        page.click("summary")
        page.wait_for("document.querySelector('.thinking .text em')?.checkVisibility()")


@pytest.mark.night
def test_a_truncated_answer_says_why(chromium: Browser) -> None:
    with serving(FakeModel(lambda _: [*text("Hello")[:-1], ended(FinishReason.LENGTH)])) as server:
        page = open_chat(chromium, server)
        answer_to(page, "Hi")
        assert page.text(".note") == "The answer was cut off at the maximum number of tokens."
    full = ended(FinishReason.LENGTH, tokens=FACTS.info.context_size - 3)
    with serving(FakeModel(lambda _: [*text("Hello")[:-1], full])) as server:
        page = open_chat(chromium, server)
        answer_to(page, "Hi")
        assert "the context of 4,096 tokens is full. Start a new chat" in page.text(".note")


def test_answers_and_code_can_be_copied(chromium: Browser) -> None:
    markdown = "Run **this**:\n\n```sh\nrm -i \u202efile\n```"
    with serving(FakeModel(lambda _: text(markdown))) as server:
        page = open_chat(chromium, server)
        page.evaluate("(copied = [], navigator.clipboard.writeText = async (text) => { copied.push(text); }, 0)")
        answer_to(page, "Hi")
        page.click(".code button")
        page.click(".copy")
        page.wait_for("copied.length === 2")
        assert page.evaluate("copied") == ["rm -i \u202efile", markdown]
        assert "[U+202E]" in page.text(".code pre")
        assert page.text(".code button") == "Copied"


def choose(page: Page, model: str) -> None:
    page.evaluate(f"($('model').value = '{model}', $('model').dispatchEvent(new Event('change')))")


def test_the_model_can_be_chosen(chromium: Browser) -> None:
    other = FakeModel(lambda _: text("I am the other."))
    other.facts = structs.replace(FACTS, name="other")
    with serving(others=[other]) as server:
        page = open_chat(chromium, server)
        assert answer_to(page, "Hi") == "Hello there"
        choose(page, "other")
        assert page.evaluate("document.title") == "other – llmrun"
        assert answer_to(page, "And you?") == "I am the other."
        page.reload()
        page.wait_for("$('model').value === 'other'")


@pytest.mark.night
def test_the_list_of_models_is_kept_up_to_date(chromium: Browser) -> None:
    options = "String([...$('model').options].map((one) => one.text))"
    with serving() as server:
        page = open_chat(chromium, server)
        page.evaluate("showModels([...models, {id: 'gone'}])")
        assert page.evaluate(options) == "fake,gone (not loaded)"
        choose(page, "gone")
        answer_to(page, "Hi")
        assert page.text(".problem").startswith("The server does not have this model any more.\nChoose another")
        page.wait_for(f"{options} === 'fake'")
        page.click(".again")
        assert last_answer(page) == "Hello there"


def test_the_key_is_asked_for_and_kept_in_the_tab(chromium: Browser) -> None:
    with serving(options=ServingOptions(keys=(KEY,))) as server:
        page = chromium.open(f"http://127.0.0.1:{server.port}/")
        for key in ("wrong", KEY):
            page.wait_for("$('unlock').open && !$('key').value")
            page.type(key)
            page.press("Enter")
            page.wait_for("!$('unlock').open || $('unlock-words').innerText.includes('not valid')")
        page.wait_for("models.length")
        assert answer_to(page, "Hi") == "Hello there"
        page.reload()
        page.wait_for("models.length")
        assert answer_to(page, "Again") == "Hello there"
        assert page.evaluate("Object.values(localStorage)") == []
        assert KEY not in "".join(server.log)


@pytest.mark.night
def test_a_question_asks_for_the_key_again(chromium: Browser) -> None:
    with serving(options=ServingOptions(keys=(KEY,))) as server:
        page = chromium.open(f"http://127.0.0.1:{server.port}/")
        page.wait_for("$('unlock').open")
        page.press("Escape")
        ask(page, "Hi")
        page.wait_for("$('unlock').open")
        page.click("#unlock [value=cancel]")
        last_answer(page)
        assert page.text(".problem").startswith("The server needs an API key.")
        page.click(".again")
        page.wait_for("$('unlock').open")
        page.type(KEY)
        page.press("Enter")
        assert last_answer(page) == "Hello there"
        page.wait_for("models.length && !$('unlock').open")


@pytest.mark.night
def test_colors_follow_the_system_until_they_are_chosen(chromium: Browser) -> None:
    with serving() as server:
        page = open_chat(chromium, server)
        shown = "getComputedStyle(document.body).backgroundColor"
        page.prefer(color_scheme="light")
        light = page.evaluate(shown)
        page.prefer(color_scheme="dark")
        dark = page.evaluate(shown)
        assert light != dark
        page.wait_for("$('theme').title === 'Light colors'")
        page.click("#theme")
        assert page.evaluate(shown) == light
        page.reload()
        assert page.evaluate(shown) == light
