"""Record the picture of a real run that the README shows: `.venv/bin/python scripts/record_run.py`.

Runs the command on a terminal of 100 columns and writes what it showed, answer and colors, to docs/run.svg.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from pathlib import Path

import pexpect
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "run.svg"
COLUMNS = 100
COMMAND = ["llmrun", "generate", "--seed", "3", "Give me three tips for staying healthy."]


def record(arguments: list[str]) -> str:
    """Everything a run of llmrun shows on its terminal, with plain newlines."""
    process = pexpect.spawn(
        sys.executable,
        ["-m", "llmrun", *arguments],
        cwd=str(ROOT),
        env={**os.environ, "TERM": "xterm-256color"},
        dimensions=(40, COLUMNS),
        timeout=600,
    )
    shown: str = process.read().decode()
    process.close()
    if process.exitstatus != 0:
        raise SystemExit(f"error: {shlex.join(COMMAND)} ended with exit code {process.exitstatus}:\n{shown}")
    lines = shown.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)  # what the living line left behind: nothing


def draw(shown: str) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), (shlex.join(COMMAND), "bold")))
    console.print(Text.from_ansi(shown.rstrip("\n")))
    svg = console.export_svg(title="llmrun", unique_id="run")
    return re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)  # a picture that fetches nothing


def main() -> None:
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(record(COMMAND[1:])), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
