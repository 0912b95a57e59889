"""Tests of the chat page's Markdown, in a browser and without a server's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.browser.chat_page import open_chat
from tests.support.browser.chromium import NEEDS_CHROMIUM
from tests.support.browser.hostile_answers import PAYLOADS
from tests.support.browser.live_page import Browser, Page
from tests.support.serving.servers import serving
from tests.support.tiers import examples

pytestmark = [pytest.mark.push, NEEDS_CHROMIUM]

RENDER = """(pieces) => {
  const box = document.createElement("div"), markdown = new Markdown(box);
  for (const piece of pieces) {
    markdown.add(piece);
    markdown.render();
  }
  return box.innerHTML;
}"""


def code(text: str, language: str = "") -> str:
    """Return the HTML of a code block."""
    bar = f'<div><span>{language}</span><button type="button">Copy</button></div>'
    return f'<div class="code">{bar}<pre><code>{text}</code></pre></div>'


def link(url: str, content: str, where: str = "") -> str:
    """Return the HTML of a link. `where` is the host that follows its text."""
    shown = f'<span class="where">{where}</span>' if where else ""
    return f'<a href="{url}" title="{url}" rel="noopener noreferrer" target="_blank">{content}{shown}</a>'


def ul(*items: str) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


# Pieces of Markdown whose meaning depends on what follows
MARKS = (
    *("a", "b c", " ", "  ", "    ", "\n", "\n\n", "\t", "-", "- ", "* ", "+ ", "1. ", "2) ", "#", "## ", "> ", "```"),
    *("~~~", "`", "``", "*", "**", "_", "__", "~~", "|", "| - |", "|-|-|\n", "a | b\n", "---", "***", "\\", "[", "]"),
    *("](", "(", ")", "![", "<https://x.y>", "https://x.y/z", ".", "[ ] ", "py", "é", "👩‍👩‍👧", "\u202e", "\r"),
)
markdown_pieces = st.lists(st.sampled_from(MARKS), max_size=60)


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Page]:
    with serving() as server:
        yield open_chat(chromium, server)


def rendered(page: Page, *pieces: str) -> str:
    """Return the HTML of a text that arrives in these pieces."""
    found = page.evaluate(f"({RENDER})({json.dumps(pieces)})")
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize(
    ("source", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("# A\n### B ###\n####### C", "<h3>A</h3><h5>B</h5><p>####### C</p>"),
        ("a *b* _c_ **d** ~~e~~", "<p>a <em>b</em> <em>c</em> <strong>d</strong> <del>e</del></p>"),
        ("***a*** **b *c***", "<p><em><strong>a</strong></em> <strong>b <em>c</em></strong></p>"),
        ("2 * 3 * 4, snake_case_name, ~x~, a ** b", "<p>2 * 3 * 4, snake_case_name, ~x~, a ** b</p>"),
        ("**open *and `code *` **", "<p>**open *and <code>code *</code> **</p>"),
        ("`` a ` b `` `open", "<p><code>a ` b</code> `open</p>"),
        (r"\*a\* \`b\` \(x\) \[y\]", r"<p>*a* `b` \(x\) \[y\]</p>"),
        ("- a\n- b\n  - c\n- d", ul("<p>a</p>", "<p>b</p>" + ul("<p>c</p>"), "<p>d</p>")),
        ("- a\n+ b", ul("<p>a</p>") + ul("<p>b</p>")),
        ("3. a\n\n4. b\n   more", '<ol start="3"><li><p>a</p></li><li><p>b<br>more</p></li></ol>'),
        ("- [ ] a\n- [x] b", ul("<p>☐ a</p>", "<p>☑ b</p>")),
        ("- a\n  ```py\n  x = 1\n  ```\n- b", ul("<p>a</p>" + code("x = 1", "py"), "<p>b</p>")),
        ("```\n<b>\n\n  x\n```\nafter", code("&lt;b&gt;\n\n  x") + "<p>after</p>"),
        ("```py\nopen", code("open", "py")),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
        (
            "| a | b |\n|---|:-:|\n| 1 | `x\\|y` |\n| 2 |\n\nc",
            '<div class="table"><table><thead><tr><th>a</th><th class="center">b</th></tr></thead><tbody><tr>'
            '<td>1</td><td class="center"><code>x|y</code></td></tr><tr><td>2</td><td class="center"></td></tr>'
            "</tbody></table></div><p>c</p>",
        ),
        ("a | b\nno table", "<p>a | b<br>no table</p>"),
        ("https://a.example/b_(c). x", f"<p>{link('https://a.example/b_(c)', 'https://a.example/b_(c)')}. x</p>"),
        ("<https://a.example/>", f"<p>{link('https://a.example/', 'https://a.example/')}</p>"),
        ('[*b*](https://a.example/ "t")', f"<p>{link('https://a.example/', '<em>b</em>', 'a.example')}</p>"),
        ("[x](mailto:a@b.example)", f"<p>{link('mailto:a@b.example', 'x', 'a@b.example')}</p>"),
        ("[x](javascript:alert(1)) [y](/v1)", "<p><span>x (javascript:alert(1))</span> <span>y (/v1)</span></p>"),
        ("![cat](https://a.example/c)", '<p><span class="image">Image: cat (https://a.example/c)</span></p>'),
        ("[a][b] [c]\n\n[b]: x", "<p>[a][b] [c]</p><p>[b]: x</p>"),
        ("<b>x</b> &lt;", "<p>&lt;b&gt;x&lt;/b&gt; &amp;lt;</p>"),
        ("a\u202eb", "<p>a[U+202E]b</p>"),
    ],
)
def test_markdown_has_this_html(page: Page, source: str, html: str) -> None:
    assert rendered(page, source) == html


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("[https://bank.example](https://evil.example/x)", "evil.example"),
        ("[bank.example](https://bank.example@evil.example)", "evil.example"),
        ("https://bank.example@evil.example/", "evil.example"),
        ("[https://bank.example](https://bank.example.evil.example)", "bank.example.evil.example"),
        ("[x](https://b\u0430nk.example)", "xn--bnk-6cd.example"),  # a Cyrillic letter
    ],
)
def test_a_link_shows_where_it_goes(page: Page, source: str, where: str) -> None:
    assert f'<span class="where">{where}</span></a>' in rendered(page, source)


@pytest.mark.night
@settings(max_examples=examples(300))
@given(pieces=markdown_pieces)
def test_a_stream_looks_like_the_whole_text(page: Page, pieces: list[str]) -> None:
    assert rendered(page, *pieces) == rendered(page, "".join(pieces))


@given(pieces=markdown_pieces)
def test_letters_are_never_lost(page: Page, pieces: list[str]) -> None:
    """Marks may disappear, but the words of an answer do not."""
    words = [f"word{number}" for number in range(len(pieces))]
    text = "".join(f"{word}{piece}" for word, piece in zip(words, pieces, strict=True))
    html = rendered(page, text)
    assert [word for word in words if word not in html] == []


@pytest.mark.night
@pytest.mark.parametrize("number", range(len(PAYLOADS)))
def test_no_text_takes_more_than_linear_time(page: Page, number: int) -> None:
    """The text is repeated to 200,000 characters. Quadratic time would be minutes."""
    text = json.dumps(PAYLOADS[number] * (200_000 // len(PAYLOADS[number])))
    seconds = page.evaluate(f"""(() => {{
        const start = performance.now(), markdown = new Markdown(document.createElement("div"));
        markdown.add({text});
        markdown.render();
        return (performance.now() - start) / 1000;
    }})()""")
    assert seconds < 10
