"""The real `llmrun`, with a log of every call that a local worker begins: `python logged_batch.py batch ...`.

The log is the file in the environment variable CALL_LOG_OF_TESTS. It has a line of JSON for each call.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from llmrun.__main__ import main
from llmrun.jobs.batching.driver import _PROOF
from llmrun.jobs.batching.workers.base import Reply
from llmrun.jobs.batching.workers.local import LocalWorker

LOG_VARIABLE = "CALL_LOG_OF_TESTS"


def log_calls(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    answer = LocalWorker.answer

    async def logged(self: LocalWorker, url: str, body: Mapping[str, Any]) -> Reply:
        if body is not _PROOF:
            os.write(file, json.dumps([url, body], sort_keys=True).encode() + b"\n")
        return await answer(self, url, body)

    LocalWorker.answer = logged  # type: ignore[method-assign]


if __name__ == "__main__":
    log_calls(os.environ[LOG_VARIABLE])
    main()
