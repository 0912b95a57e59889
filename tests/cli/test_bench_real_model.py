"""Tests of `llmrun bench` on a real model: both backends, conversations, cold starts, a server and a profile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.commands import llmrun
from tests.support.models.downloads import smollm2
from tests.support.servers.llama_server import llama_server

pytestmark = pytest.mark.push


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with llama_server(smollm2()) as port:
        yield f"http://127.0.0.1:{port}/v1"


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    done = llmrun("bench", *arguments, "--json")
    assert done.returncode == 0, done.stderr.decode()
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.night
def test_both_backends_are_measured_judged_and_held_against_the_machine() -> None:
    rows = rows_of("-m", str(smollm2()), "--backend", "cpu,llama", "-p", "32", "-n", "8", "-r", "8", "--seconds", "1")
    by_name = {(row["backend"], row["phase"]): row for row in rows}
    assert set(by_name) == {(backend, phase) for backend in ("cpu", "llama") for phase in ("prefill", "decode")}
    for (backend, _), row in by_name.items():
        assert len(row["samples_ts"]) == 8
        assert row["type_k"] == row["type_v"] == {"cpu": "q8_0", "llama": "f16"}[backend]
        assert 0.01 < row["roofline_decode_share"] < 3
        assert row["roofline_read_bandwidth"] > 1e9
        assert 90e6 < row["roofline_bytes_per_token"] < 130e6
        assert row["peak_memory"] > 90e6
        assert len(row["model_sha256"]) == 64
        assert (row["verdict_ratio"] is not None) == (backend == "llama")


@pytest.mark.night
def test_conversations_are_measured() -> None:
    rows = rows_of("-m", str(smollm2()), "--backend", "cpu", "--chat", "-r", "1", "--seconds", "1")
    labels = {row["workload"] for row in rows}
    assert labels == {"chat: short question", "chat: long document", "chat: four turns"}
    assert max(row["total_input_tokens"] for row in rows if row["workload"] == "chat: long document") > 1200


@pytest.mark.night
def test_a_cold_start_takes_longer_than_a_warm_one() -> None:
    (row,) = rows_of("-m", str(smollm2()), "--backend", "cpu", "--cold", "-r", "2", "--seconds", "1")
    assert row["mean_cold_ttft_ms"] > 100


@pytest.mark.night
def test_a_server_stands_in_the_same_table(server: str) -> None:
    rows = rows_of(
        "-m",
        str(smollm2()),
        "--backend",
        "cpu",
        "--endpoint",
        server,
        "-p",
        "32",
        "-n",
        "8",
        "-r",
        "2",
        "--seconds",
        "1",
    )
    remote = [row for row in rows if row["backend"] == "remote"]
    assert remote
    assert all(row["mean_ttft_ms"] > 0 for row in remote)
    assert {row["completed"] > 1 for row in rows} == {True}


@pytest.mark.night
def test_requests_at_once_to_a_server_are_all_answered(server: str) -> None:
    rows = rows_of("--endpoint", server, "-p", "4", "-n", "2", "--concurrency", "64", "-r", "1", "--seconds", "1")
    assert rows[0]["completed"] % 64 == 0


@pytest.mark.night
def test_a_profile_says_where_the_time_goes(tmp_path: Path) -> None:
    (found,) = rows_of("-m", str(smollm2()), "--profile", "-p", "64", "--seconds", "1")
    for step in ("decode", "prefill"):
        ops = found[step]["ops"]
        assert len(ops) > 30 * 7
        assert 0.3 < sum(op["seconds"] for op in ops) / found[step]["timed_step_seconds"] <= 1.05
    kinds = {kind["kind"] for kind in found["decode"]["kinds"]}
    assert {"linear", "attention", "rmsnorm", "rope", "gate"} <= kinds
    done = llmrun("bench", "-m", str(smollm2()), "--profile", "-p", "64", "--seconds", "1")
    text = done.stdout.decode()
    assert "linear" in text
    assert "GB/s" in text
