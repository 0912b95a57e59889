"""Tests of the benchmark's page: it shows every result, and escapes all text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings

from llmrun.base.amounts import format_seconds
from llmrun.jobs.bench.documents.document import AnswerCheck, Document, Totals, Verdict
from llmrun.jobs.bench.html import page as page_module
from llmrun.jobs.bench.html.page import page
from tests.support.bench.documents import (
    COMMAND,
    HOSTILE,
    REALISTIC,
    all_failed,
    document,
    documents,
    endpoint,
    failed,
    hostile,
    measured,
    single,
    sweep,
    two_backends,
    without_samples,
)
from tests.support.tiers import examples

pytestmark = pytest.mark.push

VOID = {"meta", "link", "br"}
LAYOUT = {"html", "head", "title", "style", "body", "main", "header", "section", "footer", "div", "span", "figure"}
WORDS = {"h1", "h2", "h3", "h4", "p", "ul", "li", "dl", "dt", "dd", "em", "code"}
TABLES = {"table", "thead", "tbody", "tr", "th", "td"}
DRAWINGS = {"svg", "text", "line", "rect", "polyline"}
TAGS = VOID | LAYOUT | WORDS | TABLES | DRAWINGS
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Reader(HTMLParser):
    """A parser that rejects markup a browser would have to guess at, and tags that we do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attributes:
            assert not name.startswith("on")
            self.attributes.append((name, value or ""))
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(text: str) -> Reader:
    """Return the page's parser and text.

    Checks that the page is well formed and loads nothing, and that its policy forbids loading.
    """
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    for name, value in reader.attributes:
        if name in {"href", "src", "action", "style", "xlink:href", "srcset", "data"}:
            assert (name, value) == ("href", "data:,") or (value.startswith("#") and value[1:] in reader.ids)
    assert reader.attributes.index(("content", POLICY)) < 6  # ahead of anything that the policy should block
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    for drawing in re.findall(r"<figure.*?</figure>", text, re.DOTALL):
        ElementTree.fromstring(drawing)  # stricter than HTML
    return reader


@pytest.mark.parametrize("make", [*REALISTIC.values(), hostile], ids=[*REALISTIC, "hostile"])
def test_a_page_is_well_formed_and_needs_nothing_else(make: Callable[[], Document]) -> None:
    text = page(make())
    assert text.startswith("<!DOCTYPE html>")
    read(text)
    assert text.encode("utf-8").decode("utf-8") == text


@pytest.mark.night
@given(documents())
@settings(max_examples=examples(60))
def test_any_document_has_a_page(drawn: Document) -> None:
    text = page(drawn)
    read(text)
    text.encode("utf-8")
    assert "nan" not in "".join(re.findall(r'(?:points|x|x1|x2|cx|cy|width)="([^"]*)"', text)).lower()


def test_the_same_document_has_the_same_page() -> None:
    assert page(two_backends()) == page(two_backends())


def test_the_heading_says_what_was_measured_when_where_and_how() -> None:
    words = read(page(two_backends())).text
    heading = words[: words.index("Summary")]
    assert "smollm2:135m" in heading
    assert "2 October 2026, 14:03 UTC" in heading
    assert "Intel Xeon Platinum 8488C · 2 cores · 7,820 MiB · Linux 6.1, glibc 2.36" in heading
    assert COMMAND in heading


def test_verdicts_are_sentences_at_the_top() -> None:
    words = read(page(two_backends())).text
    assert "cpu is 1.84x as fast as llama in decode (99%: 1.79 to 1.90)" in words
    assert words.index("no significant difference between cpu and llama in prefill") < words.index("Speed")


def test_every_figure_is_in_the_tables() -> None:
    one = single().results[0]
    reader = read(page(document(one)))
    for words in ("load", "TTFT", "prefill", "TPOT", "ITL", "decode", "E2E"):
        assert words in reader.text
    decode = one.figures["decode"]
    assert f"decode tok/s {decode.median:.0f} {decode.mean:.0f} {decode.stddev:.2f} 10" in reader.text
    assert reader.counts["tr"] == 1 + len(one.figures)
    assert "peak memory 312 MiB" in reader.text
    assert "4c9f" * 16 in reader.text


def lengths(text: str) -> list[float]:
    return [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)%"', text)]


def test_bars_are_as_long_as_what_they_show() -> None:
    fast, slow = measured("fast", 100.0, 1000.0), measured("slow", 25.0, 1000.0)
    text = page(document(replace(fast, roofline=None), replace(slow, roofline=None)))
    _, _, first, second = lengths(text)  # two of prefill, then two of decode
    medians = fast.figures["decode"].median / slow.figures["decode"].median
    assert first / second == pytest.approx(medians, rel=0.01)
    assert text.count('class="whisker"') == 4 * 3


def test_the_limit_of_the_machine_stands_at_100_percent_and_holds_shares_above_it() -> None:
    one = measured("cpu", 152.0, 2210.0)
    assert one.roofline is not None
    above = replace(one, roofline=replace(one.roofline, decode_share=1.25))
    text = page(document(above))
    limit = float(re.findall(r'class="limit" x1="([\d.]+)%"', text)[0])
    assert lengths(text)[2] == pytest.approx(1.25 * limit, rel=0.001)
    assert "125%" in read(text).text


def test_configurations_without_a_limit_are_left_out_in_words() -> None:
    words = read(page(endpoint())).text
    assert (
        "Not shown, because they were not compared with the limits of this machine: http://127.0.0.1:8080/v1" in words
    )


def test_each_configuration_has_a_curve_unless_colors_run_out() -> None:
    assert page(two_backends()).count('<polyline class="line') == 2
    assert page(sweep()).count("<polyline") == 0


def test_a_curve_runs_from_none_to_all() -> None:
    (points,) = re.findall(r'<polyline class="line c1" points="([^"]*)"', page(single()))
    ys = [float(point.split(",")[1]) for point in points.split()]
    assert (ys[0], ys[-1]) == (100, 0)
    assert ys == sorted(ys, reverse=True)
    assert len(ys) == 101


def test_long_curves_are_thinned_out() -> None:
    one = replace(single().results[0], gaps=tuple(number / 1e6 for number in range(1, 5001)))
    (points,) = re.findall(r'<polyline class="line c1" points="([^"]*)"', page(document(one)))
    assert len(points.split()) <= 400
    assert points.split()[-1].endswith(",0")


def test_a_chart_and_the_table_tell_the_same_median() -> None:
    median = format_seconds(single().results[0].figures["itl"].median)
    words = read(page(single())).text
    assert f"cpu median {median}" in words
    assert f"ITL {median}" in words


def test_failures_are_said_in_words() -> None:
    reader = read(page(all_failed()))
    assert "The run was interrupted" in reader.text
    assert "No configuration could be measured" in reader.text
    assert "llama.cpp ended: signal 11 try a smaller -c (exit code 7)" in reader.text
    assert "figure" not in reader.counts


def test_one_failure_leaves_the_others_their_charts() -> None:
    reader = read(page(document(measured("cpu", 152.0, 2210.0), failed("llama"))))
    assert "does not fit: KV cache" in reader.text
    assert reader.counts["figure"] == 5
    assert "No configuration" not in reader.text


def test_nothing_measured_is_said() -> None:
    assert "Nothing was measured." in read(page(document())).text
    words = read(page(without_samples())).text
    assert "The run was interrupted" in words
    assert "Nothing was measured." in words


def test_hostile_text_is_shown_and_is_nothing_else() -> None:
    text = page(hostile())
    reader = read(text)
    assert "<script" not in text
    assert "<img" not in text
    assert "</title></style></svg><script>" in reader.text
    assert "{{ 7*7 }}" in reader.text
    assert r"\x00\x1b[31m\u202egpj.exe \ud800" in reader.text
    for hidden in "\x00\x1b\u202e\ud800":
        assert hidden in HOSTILE
        assert hidden not in text


def test_a_text_of_megabytes_does_not_make_a_page_of_megabytes() -> None:
    assert len(page(replace(single(), command="x" * 5_000_000))) < 100_000


def test_a_verdict_in_an_unknown_metric_goes_by_its_name() -> None:
    later = replace(two_backends(), verdicts=(Verdict("warmth", 0, 1, 2.0, 1.5, 2.5),))
    assert "cpu is 2.00x as fast as llama in warmth" in read(page(later)).text


def test_the_templates_lie_in_the_package() -> None:
    folder = Path(page_module.__file__).parent
    assert {path.name for path in folder.iterdir() if path.suffix in {".html", ".css"}} == {
        "charts.html",
        "page.html",
        "style.css",
    }


def test_a_page_tells_what_drafts_gained() -> None:
    made = two_backends()
    off, auto = made.results
    totals = Totals(4, 400, 500, 9.0, steps=200, drafted_tokens=400, accepted_tokens=300)
    drafting = replace(auto, totals=totals, subject=replace(auto.subject, speculate="auto"))
    checks = (AnswerCheck(1, 0, answers=12, different=0, is_exact=True),)
    text = page(replace(made, results=(off, drafting), answer_checks=checks))
    assert "speculation auto" in text
    assert "2.50 tokens per step, 75% of the drafts accepted" in text
    assert "all 12 answers equal those of" in text
