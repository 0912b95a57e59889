"""The entry point of `python -m llmrun` and of the `llmrun` command."""

from __future__ import annotations

import gc
import sys
from typing import Final

# More objects than a start creates (100,000 for a vocabulary of 152,000 tokens). Imports leave hardly any garbage, but
# up to the first token of a 1.5B model, Python collected young objects 144 times and all objects once, which took 48 ms
# of 1.1 s.
_OBJECTS_OF_A_START: Final = 200_000


def main() -> None:
    collect_after_start()
    from llmrun.cli.app import main

    code = main(sys.argv[1:])
    gc.freeze()  # otherwise, Python's finalization collects all objects again, which takes 100 ms after an answer
    sys.exit(code)


def collect_after_start() -> None:
    """Delay the first garbage collection. Later collections are as frequent as usual."""
    usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS_OF_A_START, *usual[1:])

    def restore(phase: str, info: dict[str, int]) -> None:
        if restore in gc.callbacks:
            gc.callbacks.remove(restore)
            gc.set_threshold(*usual)

    gc.callbacks.append(restore)


if __name__ == "__main__":
    main()
