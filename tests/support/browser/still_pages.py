"""Open pages in headless Chromium and collect their layout, appearance and console messages."""

from __future__ import annotations

import html
import json
import struct
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.browser.chromium import chromium, chromium_environment

MEASURE = (Path(__file__).parent / "measure_page.js").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Launch:
    dom: str
    complaints: tuple[str, ...]  # console messages


def launch(page: Path, *options: str, is_dark: bool = False) -> Launch:
    """Open a page, wait until it has loaded and close the browser. Needs Chromium."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    done = subprocess.run(
        chromium(
            page.parent,
            "--enable-logging=stderr",
            "--v=0",
            "--virtual-time-budget=20000",
            *scheme,
            *(options or ["--dump-dom"]),
            page.as_uri(),
        ),
        capture_output=True,
        text=True,
        timeout=120,
        env=chromium_environment(page.parent),
        check=True,
    )
    return Launch(done.stdout, tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line))


def measured_pages(
    pages: Mapping[str, str], widths: Sequence[int], folder: Path, *, is_dark: bool
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what measure_page.js finds on each page at each width.

    The pages are not modified; the script inspects them in iframes.
    """
    frames = "".join(
        f'<iframe title="{name} {width}" style="width:{width}px;height:800px;border:0" srcdoc="{html.escape(text)}">'
        "</iframe>"
        for name, text in pages.items()
        for width in widths
    )
    stage = folder / "stage.html"
    stage.write_text(
        '<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'{frames}<script type="application/json" id="found"></script><script>{MEASURE}</script>',
        encoding="utf-8",
    )
    dom = launch(stage, is_dark=is_dark).dom
    start = dom.index('id="found">') + len('id="found">')
    found = json.loads(dom[start : dom.index("</script>", start)])
    return {(name, int(width)): each for title, each in found.items() for name, _, width in [title.rpartition(" ")]}


@dataclass(frozen=True, slots=True)
class Picture:
    width: int
    height: int
    rows: tuple[bytes, ...]  # RGB

    def color(self, x: int, y: int) -> tuple[int, int, int]:
        red, green, blue = self.rows[y][3 * x : 3 * x + 3]
        return red, green, blue

    def count(self, color: tuple[int, int, int], left: int, top: int, right: int, bottom: int) -> int:
        return sum(self.color(x, y) == color for y in range(top, bottom) for x in range(left, right))


def picture(page: Path, width: int, height: int, *, is_dark: bool = False) -> tuple[Picture, Launch]:
    """Return a screenshot of a page."""
    target = page.with_suffix(".dark.png" if is_dark else ".light.png")
    done = launch(page, f"--screenshot={target}", f"--window-size={width},{height}", is_dark=is_dark)
    return _decoded(target.read_bytes()), done


def _decoded(data: bytes) -> Picture:
    """Decode a PNG of 8-bit RGB or RGBA, as written by Chromium."""
    at, packed, header = 8, b"", (0, 0, 0, 0)
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            header = struct.unpack(">IIBB", body[:10])
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    width, height, depth, color_type = header
    assert depth == 8
    channels = {2: 3, 6: 4}[color_type]
    raw, stride = zlib.decompress(packed), width * channels
    rows, above = [], bytearray(stride)
    for y in range(height):
        start = y * (stride + 1)
        above = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), above, channels)
        rows.append(bytes(value for at, value in enumerate(above) if at % channels < 3))
    return Picture(width, height, tuple(rows))


def _unfiltered(kind: int, row: bytearray, above: bytearray, channels: int) -> bytearray:
    for at in range(len(row)):
        left = row[at - channels] if at >= channels else 0
        corner = above[at - channels] if at >= channels else 0
        up = above[at]
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        elif kind == 4:
            distances = [
                (abs(up - corner), 0, left),
                (abs(left - corner), 1, up),
                (abs(left + up - 2 * corner), 2, corner),
            ]
            guess = min(distances)[2]
        else:
            guess = 0
        row[at] = (row[at] + guess) & 255
    return row
