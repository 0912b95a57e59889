"""The entry of a background engine's process, which is apart so that no garbage collection delays its imports."""

from __future__ import annotations

import gc


def main() -> None:
    """Run a background engine."""
    gc.disable()  # the engine turns it on again when the model is open; it has little garbage until then
    from llmrun.serving.background.daemon import run

    run()
