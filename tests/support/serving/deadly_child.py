"""The engine's process with the deadly backend in place of the scripted one: `python deadly_child.py`."""

from __future__ import annotations

from llmrun.backends import registry
from llmrun.engine.child.main import main

if __name__ == "__main__":
    registry.STAND_INS = (registry.Entry("scripted", "tests.support.serving.deadly_backend"),)
    main()
