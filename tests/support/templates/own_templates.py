"""Chat templates of our own, which behave like those of real models."""

from __future__ import annotations

from pathlib import Path

# Like the template of Qwen3.5, it renders answers before the last question without their thinking.
DROPS_THINKING = (Path(__file__).parents[2] / "data" / "drops_thinking.jinja").read_text("utf-8")
