"""The entry point of `python -m llmrun` and of the `llmrun` command."""

from __future__ import annotations

import sys


def main() -> None:
    from llmrun.cli.app import main

    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    main()
