"""Read turns at a terminal, append each to a file as JSON and pretend to answer it for a while.

SIGTERM ends the program as it ends a chat. Run it as `python -m tests.support.cli.prompting FILE [SECONDS]`.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from llmrun.cli.chatting.draft_images import DraftImages
from llmrun.cli.chatting.keyboard import TerminalTurns
from llmrun.cli.chatting.plain import Completion, Meter

COMMANDS = {"/set": "a value", "/save": "a copy", "/help": "what there is \x1b]0;pwned\x07"}
DRAFTED = "/draft "


def completions(before: str) -> list[Completion]:
    if before.startswith("/save "):
        return [Completion("evening", len(before) - len("/save "), "saved")]
    return [Completion(name, len(before), about) for name, about in COMMANDS.items() if name.startswith(before)]


def terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, terminate)
    images = DraftImages()
    turns = TerminalTurns(completions, images=images)
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    draft = ""
    try:
        while (turn := turns.read(Meter(7373, 8192), draft)) is not None:
            with Path(sys.argv[1]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(images.labelled(turn)) + "\n")
            draft = turn.removeprefix(DRAFTED) if turn.startswith(DRAFTED) else ""
            with turns.answering():
                sys.stdout.write("answering\n")
                sys.stdout.flush()
                time.sleep(seconds)
                if turn == "fail":
                    raise RuntimeError("in the middle of an answer")
    finally:
        turns.close()


if __name__ == "__main__":
    main()
