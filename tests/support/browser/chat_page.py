"""The chat page in a browser: what a person does with it."""

from __future__ import annotations

from tests.support.browser.live_page import Browser, Page
from tests.support.serving.servers import RunningServer


def open_chat(chromium: Browser, server: RunningServer, *, setup: str = "", width: int = 1280) -> Page:
    """Open the page of a server, and wait until it knows the models."""
    page = chromium.open(f"http://127.0.0.1:{server.port}/", setup=setup, width=width)
    page.wait_for("models.length > 0")
    return page


def ask(page: Page, question: str) -> None:
    """Type a question and send it, without waiting for the answer."""
    page.click("#question")
    page.type(question)
    page.press("Enter")


def answer_to(page: Page, question: str) -> str:
    """Ask a question, wait until the answer has ended and return its text."""
    ask(page, question)
    return last_answer(page)


def last_answer(page: Page) -> str:
    """Wait until the last answer has ended, and return its text."""
    page.wait_for("!running && document.querySelector('.answer')")
    return page.texts(".answer .reply")[-1]
