"""Tests of pages in a browser: narrow and wide, light and dark, and with hostile text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrun.jobs.bench.html.charts import MOST_COLORS
from llmrun.jobs.bench.html.page import page
from tests.support.bench.documents import REALISTIC, hostile, two_backends
from tests.support.browser.chromium import NEEDS_CHROMIUM
from tests.support.browser.still_pages import launch, measured_pages, picture

pytestmark = [pytest.mark.push, NEEDS_CHROMIUM]

PAGES = [*REALISTIC, "hostile"]
WIDTHS = (360, 1280)
PLACES = [(name, width) for name in PAGES for width in WIDTHS]
LIGHT, DARK = (252, 252, 250), (21, 24, 27)  # --page
CURVE = (42, 111, 158)  # --c1

Found = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {**{name: page(make()) for name, make in REALISTIC.items()}, "hostile": page(hostile())}


@pytest.fixture(scope="module")
def light(pages: dict[str, str], folder: Path) -> Found:
    return measured_pages(pages, WIDTHS, folder, is_dark=False)


@pytest.fixture(scope="module")
def dark(pages: dict[str, str], folder: Path) -> Found:
    return measured_pages(pages, WIDTHS, folder, is_dark=True)


@pytest.mark.night
@pytest.mark.parametrize(("name", "width"), PLACES)
def test_a_page_fits_its_window(light: Found, name: str, width: int) -> None:
    found = light[name, width]
    assert found["width"] == width
    assert found["needed"] == width  # no horizontal scrolling
    assert found["lines"] > 15
    assert found["outside"] == []


@pytest.mark.night
@pytest.mark.parametrize(("name", "width"), PLACES)
def test_no_text_lies_on_another(light: Found, name: str, width: int) -> None:
    assert light[name, width]["overlaps"] == []


@pytest.mark.night
@pytest.mark.parametrize(("name", "width"), PLACES)
def test_all_text_can_be_read_against_its_background(light: Found, dark: Found, name: str, width: int) -> None:
    for scheme in (light, dark):
        assert scheme[name, width]["faint"] == []


@pytest.mark.night
@pytest.mark.parametrize(("name", "width"), PLACES)
def test_charts_have_a_size_and_hold_what_they_draw(light: Found, name: str, width: int) -> None:
    found = light[name, width]
    n_results = {"single": 1, "two_backends": 2, "sweep": 12, "large_sweep": 24, "endpoint": 2, "hostile": 3}.get(
        name, 0
    )
    n_curves = n_results if n_results <= MOST_COLORS else 0
    curves = [(field["box"], curve) for field in found["fields"] for curve in field["curves"]]
    assert len(curves) == n_curves
    assert len(found["bars"]) >= 3 * n_results
    for left, top, right, bottom in [field["box"] for field in found["fields"]]:
        assert right - left > 80
        assert 90 < bottom - top < 400
    for (left, top, right, bottom), (x, y, x_end, y_end) in curves:
        assert max(x_end - x, y_end - y) > 3
        assert left - 5 <= x <= x_end <= right + 5
        assert top - 5 <= y <= y_end <= bottom + 5
    for bar in found["bars"]:
        left, top, right, bottom = bar["box"]
        x, y, x_end, y_end = bar["fill"]
        assert right - left > 80
        assert left - 1 <= x < x_end <= right + 1
        assert top - 1 <= y < y_end <= bottom + 1


@pytest.mark.night
def test_colors_follow_the_readers_scheme(light: Found, dark: Found) -> None:
    for name, width in PLACES:
        assert light[name, width]["background"] == f"rgb{LIGHT}"
        assert dark[name, width]["background"] == f"rgb{DARK}"


@pytest.mark.night
def test_hostile_text_runs_nothing(light: Found) -> None:
    assert light["hostile", 1280]["title"].startswith("</title></style></svg><script>")


@pytest.mark.night
def test_curves_and_bars_are_drawn_light_and_dark_and_nothing_is_complained_about(
    pages: dict[str, str], light: Found, folder: Path
) -> None:
    opened = folder / "two_backends.html"
    opened.write_text(pages["two_backends"], encoding="utf-8")
    day, first = picture(opened, 1280, 2200)
    night, second = picture(opened, 1280, 2200, is_dark=True)
    assert first.complaints == second.complaints == ()
    assert (day.width, day.height) == (1280, 2200)
    assert day.color(3, 3) == LIGHT
    assert night.color(3, 3) == DARK
    found = light["two_backends", 1280]
    assert len(found["fields"]) == 1
    for shape in [*found["fields"], found["bars"][0]]:
        left, top, right, bottom = (round(edge) for edge in shape["box"])
        assert day.count(CURVE, left, top, right, bottom) > 50
        assert night.count(CURVE, left, top, right, bottom) == 0


@pytest.mark.night
def test_the_policy_keeps_the_browser_from_loading_and_running_anything(folder: Path) -> None:
    """The page gets markup that an escaping bug would let through, and the console must report every refusal."""
    torn = folder / "torn.html"
    torn.write_text(
        page(two_backends()).replace(
            "<main>", "<main><img src='http://127.0.0.1:9/x.png'><script>document.title = 'owned'</script>"
        ),
        encoding="utf-8",
    )
    done = launch(torn)
    assert len(done.complaints) == 2
    assert all("Content Security Policy" in line for line in done.complaints)
    assert "<title>owned" not in done.dom
