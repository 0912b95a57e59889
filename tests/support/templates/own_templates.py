"""Chat templates of our own, which behave like those of real models."""

from __future__ import annotations

from pathlib import Path

# As in Qwen3.5: answers before the last question are rendered without their thinking.
DROPS_THINKING = (Path(__file__).parents[2] / "data" / "drops_thinking.jinja").read_text("utf-8")
