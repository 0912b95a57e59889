"""The entry point of a background engine's process, in a separate module so that its imports collect no garbage."""

from __future__ import annotations

import gc


def main() -> None:
    """Run a background engine."""
    gc.disable()  # the engine turns it on again when the model is open; it has little garbage until then
    from llmrun.serving.background.daemon import run

    run()
