"""Runs of the real `llmrun batch`, and inputs for them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S

LOGGED = (sys.executable, str(Path(__file__).with_name("logged_batch.py")))
CHAT = "/v1/chat/completions"
_SYSTEMS = (
    "You are a helpful assistant. Answer in one short sentence, and do not explain your answer. ",
    "You review movies. Say what you liked and what you did not like about the movie that the user names. ",
)


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Write each line as JSON, except for bytes, which are written as they are."""
    data = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def openai_line(custom_id: str, body: Mapping[str, Any], url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def random_lines(seed: int, count: int, *, most_tokens: int = 40) -> list[Any]:
    """Return lines with common prefixes, repeated requests, several choices and formats, and some errors."""
    draw = random.Random(seed)
    lines: list[Any] = []
    for number in range(count):
        system = {"role": "system", "content": draw.choice(_SYSTEMS) * draw.randint(1, 5)}
        user = {"role": "user", "content": f"Tell me about number {draw.randrange(count)}."}
        body: dict[str, Any] = {"messages": [system, user], "max_tokens": draw.randint(1, most_tokens)}
        match draw.randrange(20):
            case 0:
                body["n"] = 2
            case 1:
                body |= {"temperature": 0, "logprobs": True, "top_logprobs": 2}
            case 2:
                body["response_format"] = {"type": "json_object"}
            case 3:
                body["top_p"] = 7  # refused
        line: Any = openai_line(f"request {number}", body)
        match draw.randrange(30):
            case 1:
                line = {"prompt": user["content"], "max_tokens": 5}
            case 2:
                line = openai_line(f"request {number}", {"prompt": "Once upon", "max_tokens": 5}, "/v1/completions")
        lines.append(line)
    return lines


def batch(
    *arguments: str | Path, command: Sequence[str] = LLMRUN, stdin: int | None = subprocess.DEVNULL
) -> subprocess.CompletedProcess[bytes]:
    """Run `llmrun batch` to its end."""
    words = [*command, "batch", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, check=False, cwd=ROOT, stdin=stdin, timeout=10 * TIMEOUT_S)


def answers_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def texts_in(output: Path) -> list[str]:
    """Return the texts of all answers in an output without errors."""
    return [answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers_in(output)]
