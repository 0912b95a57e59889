"""Tests of the chat page with answers, names and errors that attack it."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.errors import UsageError
from llmrun.base.types import FinishReason
from llmrun.engine.requests import Finished, TextDelta
from tests.support.browser.chat_page import answer_to, open_chat
from tests.support.browser.chromium import NEEDS_CHROMIUM
from tests.support.browser.hostile_answers import OWN, PAYLOADS, hostile_answer, pieces
from tests.support.browser.live_page import Browser, Page
from tests.support.serving.fake_model import FACTS, TIMINGS, FakeModel, Script, text
from tests.support.serving.servers import RunningServer, serving

pytestmark = [pytest.mark.push, NEEDS_CHROMIUM]

N_ANSWERS = 200
# The elements that an answer may consist of, with their attributes
ALLOWED = {
    **dict.fromkeys(("blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "p", "pre"), ""),
    **dict.fromkeys(("strong", "table", "tbody", "thead", "tr", "ul"), ""),
    **dict.fromkeys(("div", "span", "td", "th"), "class"),
    "a": "href rel target title",
    "button": "type",
    "ol": "start",
}
# Returns everything in the texts of answers, as [namespace, element, attributes].
INSPECT = """[...new Set([...document.querySelectorAll('.answer .text *')].map((one) => JSON.stringify(
  [one.namespaceURI, one.localName, one.getAttributeNames()]
)))].map(JSON.parse)"""
ASK = """(async () => {
  startNewChat();
  $("question").value = "?";
  send(new Event("submit"));
  document.querySelector(".thinking").open = true;
  while (running) await new Promise(requestAnimationFrame);
})()"""
LINKS = "[...document.querySelectorAll('.answer .text a')].map((one) => [one.href, one.rel, one.target])"


@dataclass
class Canary:
    """A server to which nothing may send a request."""

    url: str
    visitors: int = 0


@contextmanager
def canary() -> Iterator[Canary]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Canary(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def count() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return
                found.visitors += 1

        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        yield found
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def forbidden(page: Page) -> list[Any]:
    """Return the elements and attributes that an answer may not have."""
    return [
        (namespace, element, attributes)
        for namespace, element, attributes in page.evaluate(INSPECT)
        if namespace != "http://www.w3.org/1999/xhtml"
        or element not in ALLOWED
        or not set(attributes) <= set(ALLOWED[element].split())
    ]


def windows(chromium: Browser) -> int:
    return sum(target["type"] == "page" for target in chromium.call("Target.getTargets")["targetInfos"])


def assert_untouched(page: Page, server: RunningServer) -> None:
    """Assert that no script ran or tried to, and that only our routes were asked for."""
    own = f"http://127.0.0.1:{server.port}"
    assert page.evaluate("window.owned") is None
    assert page.evaluate("Object.keys(Object.prototype).concat(Object.keys(Array.prototype))") == []
    assert page.evaluate("location.href") == f"{own}/"
    assert page.dialogs == []
    assert page.complaints == []  # the page's policy had nothing to refuse
    asked = {("GET", f"{own}/"), ("GET", f"{own}/v1/models"), ("POST", f"{own}/v1/chat/completions")}
    assert set(page.requests) == asked
    counted = server.send("GET", "/metrics").body.decode()
    routes = set(re.findall(r'llmrun_requests_total\{route="([^"]+)"', counted))
    assert routes == {url.removeprefix(own) for _, url in asked}


def both_kinds(number: int, answer: str) -> Script:
    """Return a script whose thinking and text are hostile."""
    end = Finished(0, FinishReason.STOP, None, 5, TIMINGS)
    thoughts = [TextDelta(0, "", (1,), reasoning=piece) for piece in pieces(answer, -number)]
    return [*thoughts, *(TextDelta(0, piece, (1,)) for piece in pieces(answer, number)), end]


@pytest.mark.night
def test_200_hostile_answers_run_nothing_and_fetch_nothing(chromium: Browser) -> None:
    with canary() as bird:
        model = FakeModel(lambda number: both_kinds(number, hostile_answer(number, bird.url)))
        with serving(model) as server:
            page, opened = open_chat(chromium, server), windows(chromium)
            for number in range(N_ANSWERS):
                page.evaluate(ASK)
                assert page.evaluate("messages.at(-1).ending") == "stop", (number, page.text("main"))
                assert forbidden(page) == [], number
                for link in page.evaluate(LINKS):
                    assert link[0].startswith(("https://", "http://", "mailto:")), number
                    assert link[1:] == ["noopener noreferrer", "_blank"], number
            assert len(model.asked) == N_ANSWERS > len(PAYLOADS)
            assert_untouched(page, server)
            assert windows(chromium) == opened
    assert bird.visitors == 0


def test_markup_is_shown_as_text(chromium: Browser) -> None:
    shown = f"<img src=x onerror={OWN}> and <b>bold</b> &amp;"
    with serving(FakeModel(lambda _: text(shown))) as server:
        assert answer_to(open_chat(chromium, server), "Hello") == shown


def test_names_questions_and_errors_are_shown_as_text(chromium: Browser) -> None:
    markup = f"</option><img src=x onerror={OWN}>"
    model = FakeModel()
    model.facts = structs.replace(FACTS, name=markup)
    with serving(model) as server:
        page = open_chat(chromium, server)
        assert page.text("#model") == markup
        assert markup in page.evaluate("document.title")
        page.evaluate("settings.model = ''")  # the fake server knows its model by another name
        model.refusal = UsageError(markup)
        answer_to(page, markup)
        assert page.text(".question .said") == markup
        assert markup in page.text(".problem")
        assert_untouched(page, server)


def test_scripts_and_images_are_refused_even_after_a_bug(chromium: Browser) -> None:
    """Show that the tests above can fail: insert what an escaping bug would let through."""
    with canary() as bird, serving() as server:
        page = open_chat(chromium, server)
        answer_to(page, "Hello")
        for sink in ("innerHTML = '<img>'", "insertAdjacentHTML('beforeend', '<img>')", "setAttribute('onclick', 'x')"):
            with pytest.raises(AssertionError, match="requires 'Trusted"):
                page.evaluate(f"document.querySelector('.reply').{sink}")
        page.evaluate(f"""(() => {{
            const image = element("img"), script = element("script");
            image.src = {json.dumps(bird.url)};
            script.append({json.dumps(OWN)});
            document.querySelector(".reply").append(image, script);
            return fetch(image.src).catch(() => 0);
        }})()""")
        page.wait_for("document.querySelector('.reply img')")
        assert {name for _, name, _ in forbidden(page)} == {"img", "script"}
        assert len([one for one in page.complaints if "Content Security Policy" in one]) >= 2  # image and request
        assert page.evaluate("window.owned") is None
    assert bird.visitors == 0
