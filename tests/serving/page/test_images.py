"""Tests of images on the chat page: adding, removing, sending and keeping them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import structs

from llmrun.engine.requests import ChatPrompt, ImageProgress, PrefillProgress, SeenImage
from llmrun.serving.options import Limits, ServingOptions
from tests.support.browser.chat_page import answer_to, last_answer, open_chat
from tests.support.browser.chromium import NEEDS_CHROMIUM
from tests.support.browser.live_page import Browser, Page
from tests.support.serving.fake_model import BEGIN, FACTS, HOLD, FakeModel, text
from tests.support.serving.pictures import BLUE, RED, base64_of, part_of
from tests.support.serving.servers import RunningServer, serving

pytestmark = [pytest.mark.push, NEEDS_CHROMIUM]

# Adds files to the next question in one of the ways that people use.
_WAYS = {
    "button": "($('files').files = given.files, $('files').dispatchEvent(new Event('change')))",
    "paste": "$('question').dispatchEvent(new ClipboardEvent('paste', {clipboardData: given, cancelable: true}))",
    "drop": "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: given, bubbles: true}))",
}


@contextmanager
def seeing(
    model: FakeModel | None = None, others: Any = (), options: ServingOptions | None = None
) -> Iterator[RunningServer]:
    """Run a server whose first model reads images."""
    model = model or FakeModel()
    model.facts = structs.replace(FACTS, sees_images=True)
    with serving(model, options, others=others) as server:
        yield server


def add(page: Page, *files: bytes, way: str = "button", kind: str = "image/png", name: str = "cat.png") -> None:
    """Add files to the next question, without waiting until they have been read."""
    data = json.dumps([base64_of(file) for file in files])
    given = f"""
        const given = new DataTransfer();
        for (const one of {data}) {{
            const bytes = Uint8Array.from(atob(one), (letter) => letter.charCodeAt(0));
            given.items.add(new File([bytes], {json.dumps(name)}, {{type: {json.dumps(kind)}}}));
        }}
        {_WAYS[way]};
    """
    page.evaluate(f"(() => {{ {given} return 0; }})()")


def attached(page: Page, count: int) -> None:
    """Wait until the next question has so many images."""
    page.wait_for(f"document.querySelectorAll('#attached img').length === {count}")


def content_of(server: RunningServer, number: int = -1) -> Any:
    """Return the content of a message of the last request."""
    prompt = server.model.asked[-1].request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages[number]["content"]


def words(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize("way", _WAYS)
def test_images_are_added_and_sent(chromium: Browser, way: str) -> None:
    with seeing() as server:
        page = open_chat(chromium, server)
        add(page, RED, BLUE, way=way)
        attached(page, 2)
        assert page.evaluate(
            "[...document.querySelectorAll('#attached img')].every((one) => one.complete && one.naturalWidth > 0)"
        )
        assert answer_to(page, "Which?") == "Hello there"
        assert content_of(server) == [part_of(RED), part_of(BLUE), words("Which?")]
        assert page.evaluate("document.querySelectorAll('.question .images img').length") == 2
        assert not page.is_shown("#attached")
        assert answer_to(page, "And now?") == "Hello there"
        assert [content_of(server, 0), content_of(server)] == [
            [part_of(RED), part_of(BLUE), words("Which?")],
            "And now?",
        ]
        assert page.complaints == []


def test_shrunk_images_are_named_below_the_answer(chromium: Browser) -> None:
    model = FakeModel()
    model.images = (SeenImage(4032, 3024, 896, 672, 252),)
    with seeing(model) as server:
        page = open_chat(chromium, server)
        add(page, RED)
        attached(page, 1)
        answer_to(page, "Which?")
        assert page.text(".statistics").endswith(" · images: 4032x3024 shrunk to 896x672, 252 tokens")


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (ImageProgress(1, 2), "Reading image 1 of 2 for \\d+\\s+s"),
        (ImageProgress(1, 1, 0.0, 12.0), "Reading the image, about 12\\s+s"),
        (ImageProgress(1, 2, 0.4, 150.0), "Reading image 1 of 2: 40%, about 2\\s+min left"),
    ],
)
def test_the_page_says_how_long_images_take(chromium: Browser, image: ImageProgress, words: str) -> None:
    model = FakeModel(lambda _: [BEGIN, PrefillProgress(0, 2, 9, image=image), HOLD, *text("Hello")])
    model.images = (SeenImage(64, 96, 64, 96, 6),)
    with seeing(model, options=ServingOptions(limits=Limits(ping_s=0.1))) as server:
        page = open_chat(chromium, server)
        add(page, RED)
        attached(page, 1)
        page.click("#send")
        page.wait_for(f"/{words}(?! for)/.test(document.body.innerText)")
        server.release()
        assert last_answer(page) == "Hello"


def test_an_image_alone_is_a_question(chromium: Browser) -> None:
    with seeing() as server:
        page = open_chat(chromium, server)
        assert page.evaluate("$('send').disabled")
        add(page, RED)
        attached(page, 1)
        page.click("#send")
        assert last_answer(page) == "Hello there"
        assert content_of(server) == [part_of(RED)]
        assert not page.is_shown(".question .said")


def test_images_can_be_removed(chromium: Browser) -> None:
    with seeing() as server:
        page = open_chat(chromium, server)
        add(page, RED, BLUE)
        attached(page, 2)
        assert ("button", "Remove cat.png") in page.controls()
        page.click("#attached li:first-child button")
        attached(page, 1)
        answer_to(page, "Which?")
        assert content_of(server) == [part_of(BLUE), words("Which?")]


def test_images_survive_a_reload_in_their_tab_only(chromium: Browser) -> None:
    with seeing(FakeModel(lambda _: [*text("Hello")[:-1], HOLD, text("Hello")[-1]])) as server:
        page = open_chat(chromium, server)
        add(page, RED)
        attached(page, 1)
        page.reload()
        attached(page, 1)
        page.click("#question")
        page.type("Which?")
        page.press("Enter")
        page.wait_for("document.querySelector('.reply p')")
        add(page, BLUE)
        attached(page, 1)
        page.reload()
        server.release()
        assert page.evaluate("document.querySelector('.question img').naturalWidth") == 4
        page.click(".again")
        assert last_answer(page) == "Hello"
        assert content_of(server) == [part_of(RED), words("Which?")]
        attached(page, 1)
        assert page.evaluate("Object.keys(sessionStorage).filter((name) => name.startsWith('image-')).length") == 2
        page.click("#new")
        assert page.evaluate("[images.size, Object.keys(sessionStorage).length, localStorage.length]") == [0, 1, 0]


def test_editing_a_question_keeps_its_images(chromium: Browser) -> None:
    with seeing() as server:
        page = open_chat(chromium, server)
        add(page, RED)
        attached(page, 1)
        answer_to(page, "Which?")
        page.click(".question .edit")
        attached(page, 1)
        page.press("Escape")
        attached(page, 0)
        page.click(".question .edit")
        answer_to(page, " Say.")
        assert content_of(server) == [part_of(RED), words("Which? Say.")]


def test_only_images_can_be_added(chromium: Browser) -> None:
    with seeing() as server:
        page = open_chat(chromium, server)
        add(page, b"hello", RED, kind="text/plain", name="a.txt")
        page.wait_for("$('trouble').checkVisibility()")
        assert page.text("#trouble") == "a.txt is not a PNG, JPEG, WebP, GIF or BMP image."
        add(page, RED)
        attached(page, 1)
        assert not page.is_shown("#trouble")
        page.evaluate("images.set('image-1', 'x'.repeat(15 << 20)) && 0")
        add(page, BLUE)
        page.wait_for("$('trouble').innerText.includes('about 11 MB together')")
        attached(page, 1)


def test_models_that_read_only_text_have_no_button(chromium: Browser) -> None:
    other = FakeModel()
    other.facts = structs.replace(FACTS, name="blind")
    with seeing(others=[other]) as server:
        page = open_chat(chromium, server)
        assert page.is_shown("#attach")
        page.evaluate("($('model').value = 'blind', $('model').dispatchEvent(new Event('change')))")
        assert not page.is_shown("#attach")
        add(page, RED, way="drop")
        page.wait_for("$('trouble').checkVisibility()")
        assert page.text("#trouble") == "blind does not read images. Choose another model above."


def test_refused_images_say_why(chromium: Browser) -> None:
    with seeing() as server:
        page = open_chat(chromium, server)
        add(page, RED[:-4])
        attached(page, 1)
        answer_to(page, "Which?")
        assert "the image file is truncated" in page.text(".problem")


def test_conversations_too_large_for_the_tab_say_so(chromium: Browser) -> None:
    setup = "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); };"
    with seeing() as server:
        page = open_chat(chromium, server, setup=setup)
        add(page, RED)
        page.wait_for("$('trouble').checkVisibility()")
        assert page.text("#trouble") == "This conversation is too large to survive a reload."
        answer_to(page, "Which?")
        assert content_of(server) == [part_of(RED), words("Which?")]
