"""Requests completions from a running `llmrun serve`, and returns their status."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request


def status_within(seconds: float, url: str, expected: int) -> bool:
    """Send requests until one has the expected status. Requests shortly after a crash wait for the restart."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if status_of(url) == expected:
            return True
        time.sleep(0.2)
    return False


def status_of(url: str) -> int:
    """Return the status of a completion, or 0 if there is none within 2 s."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 4}).encode()
    asked = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=2.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except TimeoutError:
        return 0
