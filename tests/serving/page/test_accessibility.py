"""Tests that the chat page works with the keyboard, with screen readers, on narrow windows and in dark rooms."""

from __future__ import annotations

import pytest

from llmrun.base.errors import UsageError
from tests.support.browser.chat_page import answer_to, ask, last_answer, open_chat
from tests.support.browser.chromium import NEEDS_CHROMIUM
from tests.support.browser.live_page import Browser, Page
from tests.support.browser.still_pages import MEASURE
from tests.support.serving.fake_model import HOLD, FakeModel, text
from tests.support.serving.servers import serving

pytestmark = [pytest.mark.night, NEEDS_CHROMIUM]

ANSWER = """# Title

Text with `code`, [a link](https://a.example/x) and **strong** words.

- one
  - two

| a | b |
|---|---|
| 1 | a_very_long_name_without_any_place_to_break_it_in_a_narrow_window_of_a_phone |

> quoted

```py
print("a line of code that is longer than a narrow window, and therefore scrolls inside of its own box")
```
"""


def focused(page: Page) -> str:
    """Return the ID of the focused element, or else its name."""
    return str(page.evaluate("(({id, ariaLabel, innerText}) => id || ariaLabel || innerText)(document.activeElement)"))


def test_every_control_has_a_name(chromium: Browser) -> None:
    with serving(FakeModel(lambda _: text(ANSWER))) as server:
        page = open_chat(chromium, server)
        answer_to(page, "Hi")
        page.type("More")
        controls = page.controls()
        assert [control for control in controls if not control[1].strip()] == []
        for wanted in [
            *(("combobox", "Model"), ("textbox", "Your question"), ("button", "New chat"), ("button", "Settings")),
            *(("button", "Dark colors"), ("button", "Send"), ("button", "Edit this question")),
            *(("button", "Copy the answer"), ("button", "Regenerate the answer"), ("button", "Copy")),
        ]:
            assert wanted in controls
        page.click("#open-settings")
        assert {("textbox", "System prompt"), ("spinbutton", "Temperature")} <= set(page.controls())


def test_tab_reaches_everything_in_reading_order(chromium: Browser) -> None:
    with serving(FakeModel(lambda _: text(ANSWER))) as server:
        page = open_chat(chromium, server)
        answer_to(page, "Hi")
        page.evaluate("document.querySelector('.skip').focus()")
        order = [focused(page)]
        while order[-1] != "question" and len(order) < 20:
            page.press("Tab")
            order.append(focused(page))
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none" or order[-1] == "question", order  # the box around the question changes its color
    controls = ["Skip to the question", "model", "new", "open-settings", "theme", "Edit this question"]
    assert order[:6] == controls
    assert order[6].startswith("a link")
    # A block of code that scrolls sideways can be scrolled with the arrow keys.
    rest = [name.partition("(")[0] for name in order[7:]]
    assert rest == ["Copy", "print", "Copy the answer", "Regenerate the answer", "question"]


def test_the_skip_link_leads_to_the_question(chromium: Browser) -> None:
    with serving() as server:
        page = open_chat(chromium, server)
        page.evaluate("document.querySelector('.skip').focus()")
        page.press("Enter")
        page.wait_for("document.activeElement.id === 'question'")


def test_the_keyboard_alone_is_enough(chromium: Browser) -> None:
    with serving(FakeModel(lambda number: text(f"Answer {number}"))) as server:
        page = open_chat(chromium, server)
        assert focused(page) == "question"
        page.type("Hi")
        page.press("Enter")
        last_answer(page)
        page.evaluate("document.querySelector('.again').focus()")
        page.press("Enter")
        page.wait_for("document.querySelector('.reply').innerText === 'Answer 1'")
        assert focused(page) == "question"
        page.evaluate("$('open-settings').focus()")
        page.press("Enter")
        page.wait_for("document.activeElement.id === 'system'")
        page.press("Escape")
        page.wait_for("document.activeElement.id === 'open-settings'")


def test_screen_readers_hear_paragraphs_and_not_tokens(chromium: Browser) -> None:
    words = ["Fir", "st.\n", "\nSec", "ond.\n\n", "Thi"]
    with serving(FakeModel(lambda _: [*text(*words)[:-1], HOLD, *text("rd.")[1:]])) as server:
        page = open_chat(chromium, server)
        ask(page, "Hi")
        page.wait_for("document.querySelectorAll('.reply p').length === 3")
        spoken = "[...$('spoken').children].map((one) => one.textContent)"
        assert page.evaluate(spoken) == ["First."]
        assert page.evaluate("document.querySelector('.reply').ariaBusy") == "true"
        assert page.evaluate("$('spoken').role") == "log"  # polite
        assert page.evaluate("document.querySelectorAll('main [aria-live], main [role=log]').length") == 0
        server.release()
        last_answer(page)
        assert page.evaluate(spoken) == ["First.", "Second.", "Third.", "The answer is complete."]
        assert page.evaluate("document.querySelector('.reply').ariaBusy") == "false"


def test_headings_follow_each_other(chromium: Browser) -> None:
    with serving(FakeModel(lambda _: text(ANSWER))) as server:
        page = open_chat(chromium, server)
        answer_to(page, "Hi")
        headings = "[...document.querySelectorAll('header :is(h1), main :is(h1, h2, h3)')]"
        shown = page.evaluate(
            f"{headings}.filter((one) => one.checkVisibility()).map((one) => one.localName + one.textContent)"
        )
    assert shown == ["h1llmrun", "h2You", "h2Answer", "h3Title"]


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_can_be_read(chromium: Browser, width: int, scheme: str) -> None:
    model = FakeModel(lambda _: text(ANSWER))
    with serving(model) as server:
        page = open_chat(chromium, server, width=width)
        page.prefer(color_scheme=scheme)
        page.evaluate(f"(() => {{ {MEASURE}; window.measure = measure; }})()")
        found = [page.evaluate("measure({contentDocument: document, contentWindow: window})")]
        answer_to(page, "a_very_long_question_without_any_place_to_break_it_" * 3)
        model.refusal = UsageError("the server says " + "something_long_" * 20)
        answer_to(page, "Hi")
        page.click("#open-settings")
        found.append(page.evaluate("measure({contentDocument: document, contentWindow: window})"))
    for each in found:
        assert each["needed"] == each["width"] == width
        assert each["faint"] == []
    assert found[1]["lines"] > 20


def test_nothing_moves_if_the_user_wants_no_motion(chromium: Browser) -> None:
    with serving(FakeModel(lambda _: [HOLD, *text("Hello")])) as server:
        page = open_chat(chromium, server)
        ask(page, "Hi")
        page.wait_for("document.querySelector('.dots i')?.checkVisibility()")
        assert page.evaluate("document.getAnimations().length") == 3
        page.prefer(reduced_motion="reduce")
        assert page.evaluate("document.getAnimations().length") == 0


def test_the_page_follows_the_answer_until_the_reader_scrolls(chromium: Browser) -> None:
    long = [f"Paragraph {n}.\n\n" for n in range(40)]
    with serving(FakeModel(lambda _: [*text(*long)[:-1], HOLD, *text(*long)[1:]])) as server:
        page = open_chat(chromium, server)
        ask(page, "Hi")
        page.wait_for("document.querySelectorAll('.reply p').length === 40 && isAtEnd()")
        assert not page.is_shown("#latest")
        page.evaluate("scrollTo(0, 100)")
        page.wait_for("$('latest').checkVisibility()")
        server.release()
        last_answer(page)
        assert page.evaluate("scrollY") == 100
        page.click("#latest")
        page.wait_for("isAtEnd() && !$('latest').checkVisibility()")
