"""Tests of the server's reports about reused prefixes, with the real `llmrun serve` and a scripted model."""

from __future__ import annotations

import http.client
import json
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.served import Served, scripted_arguments, serve

pytestmark = pytest.mark.push

SYSTEM = (
    "Today is Monday, 16:05. You are a careful coding agent: read the files before you change them, and run the tests."
)
QUESTION = "Why does the test of the parser fail on Windows, although it passes on every other system?"
ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"
HEADER = "x-llmrun-prefix"


def asked(server: Served, system: str = SYSTEM, *, key: str = "", stream: bool = False) -> str:
    """Ask a question, and return the header that says what was reused."""
    turns = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    body = {"messages": turns, "max_tokens": 3, "stream": stream}
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    fields = {"content-type": "application/json", "user-agent": "someagent/1.2 (linux)"}
    line.request("POST", "/v1/chat/completions", json.dumps(body), fields | ({"x-api-key": key} if key else {}))
    response = line.getresponse()
    assert response.status == 200, response.read()
    response.read()
    line.close()
    return response.headers[HEADER]


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Served]:
    with serve(
        *scripted_arguments(folder),
        *arguments,
        log=folder / "log",
        environment={"LLMRUN_CACHE_DIR": str(folder / "cache")},
    ) as server:
        yield server


def records(folder: Path, count: int) -> list[Mapping[str, Any]]:
    """Wait for the records, which another thread writes after the response."""
    path = folder / "cache" / "why" / "prefixes.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or len(lines := path.read_bytes().splitlines()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [json.loads(line) for line in lines]


def test_the_log_the_header_and_the_metrics_name_the_cause(tmp_path: Path) -> None:
    changed = SYSTEM.replace("16:05", "16:07")
    with running(tmp_path) as server:
        assert asked(server) == "reused 0 of 233: first prompt"
        assert asked(server) == "reused 232 of 233"
        assert asked(server, changed, stream=True) == "reused 30 of 233: text differs, system prompt"
        metrics = server.get("/metrics")[1].decode()
        [*_, record] = records(tmp_path, 3)
        text = server.log.read_text()
    misses = re.findall(r'llmrun_prefix_misses_total{model="[^"]*",cause="([^"]*)"} 1', metrics)
    [lost] = re.findall(r'llmrun_prefix_lost_tokens_total{model="[^"]*",cause="text differs"} (\d+)', metrics)
    assert misses == ["first prompt", "text differs"]
    assert 100 < int(lost) <= 203
    assert "  reused 30 of 233: text differs, system prompt  " in text
    assert "16:0" not in text
    report = record["report"]
    assert (record["agent"], report["old"][:23], report["new"][:23]) == (
        "someagent/1.2 (linux)",
        "Today is Monday, 16:05.",
        "Today is Monday, 16:07.",
    )


def test_records_are_private_and_can_be_turned_off(tmp_path: Path) -> None:
    (tmp_path / "off").mkdir()
    with running(tmp_path) as server, running(tmp_path / "off", "--no-prefix-log") as silent:
        asked(server)
        assert asked(silent) == "reused 0 of 233: first prompt"
        records(tmp_path, 1)
    folder = tmp_path / "cache" / "why"
    if sys.platform != "win32":
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "prefixes.jsonl")] == [0o700, 0o600]
    assert not (tmp_path / "off" / "cache" / "why").exists()


def test_clients_do_not_learn_that_another_key_has_their_prefix(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{ALICE}\n{BOB}\n")
    keys.chmod(0o600)
    with running(tmp_path, "--api-key-file", str(keys), "--open-metrics") as server:
        assert asked(server, key=ALICE) == asked(server, key=BOB) == "reused 0 of 233: first prompt"
        metrics = server.get("/metrics")[1].decode()
        text = server.log.read_text()
    assert 'cause="first prompt"} 2' in metrics
    assert "other key" not in metrics
    assert "reused 0 of 233: other key  " in text


def test_a_restart_of_the_engine_or_of_everything_is_named(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        asked(server)
        assert server.kill_engine()
        server.wait_until_ready()
        assert asked(server).startswith("reused 0 of 233: engine restarted, ")
        records(tmp_path, 2)
    with running(tmp_path) as server:
        assert asked(server).startswith("reused 0 of 233: engine restarted, ")
