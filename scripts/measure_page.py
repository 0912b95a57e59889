#!/usr/bin/env python3
"""Measure whether the chat page drops frames while an answer streams, in headless Chromium.

A frame takes 16.7 ms. The answer is scripted: a token arrives every millisecond, which is faster than any model here.
Paragraphs, lists, tables and code are mixed, or one of them fills the whole answer. Other programs on the machine delay
frames, too, so run this on a quiet one.

Example:
    scripts/measure_page.py --runs 5
"""

from __future__ import annotations

import argparse
import sys
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.browser.live_page import Browser, browser
from tests.support.serving.fake_model import FakeModel, Script, text
from tests.support.serving.servers import serving

DROPPED_MS = 33.0  # two frames, so at least one was dropped
WORDS = ("The ", "cache ", "keeps ", "**keys** ", "and ", "`values` ", "of ", "all ", "earlier ", "tokens", ". ")
KINDS: dict[str, tuple[str, ...]] = {
    "prose": (*WORDS * 5, "\n\n"),
    "list": ("- ", *WORDS, "\n"),
    "code": ("    ", "total ", "+= ", "weight ", "* ", "value ", "# ", "comment", "\n"),
    "table": ("| ", "name ", "| ", "12", ".", "5 ", "| ", "`code` ", "|", "\n"),
    "one line": WORDS,
}
BEGINNINGS = {"code": ("```", "python", "\n"), "table": ("| a | b | c |\n", "| - | -: | - |\n")}
MIXED = tuple(
    part
    for kind in ("prose", "list", "code", "table")
    for part in ("\n\n", *BEGINNINGS.get(kind, ()), *KINDS[kind] * 5, *(["```\n"] if kind == "code" else []))
)

# Resolves to the times between frames and the times for drawing in milliseconds, from the question to the end of the
# answer. Drawing includes the layout, because scrolling to the end needs it.
ASK = """new Promise((resolve) => {
  const gaps = [], draws = [], { draw } = AnswerView.prototype;
  AnswerView.prototype.draw = function () {
    const began = performance.now();
    draw.call(this);
    draws.push(performance.now() - began);
  };
  let last = 0;
  const frame = (now) => {
    if (last) gaps.push(now - last);
    last = now;
    if (running) requestAnimationFrame(frame); else resolve([gaps, draws]);
  };
  $("question").value = "Stream";
  send(new Event("submit"));
  requestAnimationFrame(frame);
})"""


def main() -> int:
    options = _options()
    tokens = {kind: (*BEGINNINGS.get(kind, ()), *islice(cycle(parts), options.tokens)) for kind, parts in KINDS.items()}
    tokens = {"mixed": tuple(islice(cycle(MIXED), options.tokens)), **tokens}
    kinds = iter([kind for kind in tokens for _ in range(options.runs)])
    model = FakeModel(lambda _: paced(tokens[next(kinds)], options.step_ms))
    print(f"{options.tokens:,} tokens, one every {options.step_ms:g} ms, in a window of {options.width} px")
    with TemporaryDirectory() as home, serving(model) as server, browser(Path(home)) as chromium:
        url = f"http://127.0.0.1:{server.port}/"
        for kind in tokens:
            for _ in range(options.runs):
                print(f"{kind:9}", measured(chromium, url, options.width), flush=True)
    return 0


def paced(words: tuple[str, ...], step_ms: float) -> Script:
    """Return a script with a token every `step_ms`."""
    return [part for number, event in enumerate(text(*words)) for part in (number * step_ms / 1000, event)]


def measured(chromium: Browser, url: str, width: int) -> str:
    page = chromium.open(url, width=width, height=900)
    page.wait_for("models.length")
    for domain in ("Network", "Runtime", "Log"):
        page.call(f"{domain}.disable")  # their events would cost time
    gaps, draws = page.evaluate(ASK)
    dropped = sum(gap > DROPPED_MS for gap in gaps)
    return (
        f"{sum(gaps) / 1000:5.2f} s  {len(gaps):4} frames  median {median(gaps):5.1f} ms  "
        f"p99 {quantiles(gaps, n=100)[-1]:5.1f} ms  longest {max(gaps):5.1f} ms  over 33 ms: {dropped:2}  "
        f"drawing: median {median(draws):4.1f} ms, p99 {quantiles(draws, n=100)[-1]:4.1f} ms"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default, words in OPTIONS:
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{words} [{default}]")
    return parser.parse_args()


OPTIONS: tuple[tuple[str, float, str], ...] = (
    ("tokens", 2000, "tokens of an answer"),
    ("step-ms", 1.0, "time between tokens"),
    ("runs", 3, "runs of each kind of answer"),
    ("width", 1440, "width of the window in pixels"),
)

if __name__ == "__main__":
    sys.exit(main())
