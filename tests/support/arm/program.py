"""Runs llmrun with the given arguments on an emulated machine: `python -m tests.support.arm.program generate ...`."""

from __future__ import annotations

from llmrun.__main__ import main
from tests.support.arm.host_compiler import compile_outside

if __name__ == "__main__":
    compile_outside()
    main()
