"""Record the picture of a real run for the README: `.venv/bin/python scripts/record_run.py`.

It runs the command in a terminal of 100 columns and writes the output, including colors, to docs/run.svg.
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
    """Run llmrun and return everything that it shows on the terminal, with plain newlines."""
    process = pexpect.spawn(
        sys.executable,
        ["-m", "llmrun", *arguments],
        cwd=str(ROOT),
        env={**os.environ, "TERM": "xterm-256color", "LLMRUN_WARM": "0"},
        dimensions=(40, COLUMNS),
        timeout=600,
    )
    shown: str = process.read().decode()
    process.close()
    if process.exitstatus != 0:
        raise SystemExit(f"error: {shlex.join(COMMAND)} failed with exit code {process.exitstatus}:\n{shown}")
    lines = shown.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)  # drop text that the progress line overwrote


def draw(shown: str) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), (shlex.join(COMMAND), "bold")))
    console.print(Text.from_ansi(shown.rstrip("\n")))
    svg = console.export_svg(title="llmrun", unique_id="run")
    return re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)  # the picture must not download fonts


def main() -> None:
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(record(COMMAND[1:])), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
