"""Tests of `llmrun batch` with several servers, one of which we did not write, and one of which is killed."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.batching.batch_runs import answers_in, write_lines
from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S
from tests.support.models.downloads import smollm2
from tests.support.servers.llama_server import llama_server
from tests.support.serving.served import serve


@pytest.mark.night
def test_a_run_with_our_servers_and_another_one_outlives_a_kill(tmp_path: Path) -> None:
    model = smollm2()
    lines = [
        {"prompt": f"Name a word with the letter {chr(97 + n % 26)}, number {n}.", "max_tokens": 12} for n in range(45)
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = ["-t", "1", "-c", "2048", "--parallel", "4", "-m", str(model)]
    with (
        serve(*arguments, log=tmp_path / "one.log") as one,
        serve(*arguments, log=tmp_path / "two.log") as two,
        llama_server(model) as other,
    ):
        urls = ",".join(f"http://127.0.0.1:{port}" for port in (one.port, two.port, other))
        command = [*LLMRUN, "batch", str(source), "-o", str(output), "--workers", urls, "--mixed", "--parallel", "4"]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            partial = output.with_name("out.jsonl.partial")
            while not partial.exists() or partial.read_bytes().count(b"\n") < 12:
                assert process.poll() is None
                time.sleep(0.02)
            two.process.kill()
            _, written = process.communicate(timeout=2 * TIMEOUT_S)
    assert process.returncode == 0, written.decode()
    answers = answers_in(output)
    assert [answer["custom_id"] for answer in answers] == [f"line-{n}" for n in range(1, 46)]
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    fingerprints = {answer["fingerprint"] for answer in answers}
    assert sorted(name.partition("_")[0] for name in fingerprints) == ["bits", "foreign"]
    assert f"note: http://127.0.0.1:{two.port}/v1: " in written.decode()
    assert "the worker is lost, and its requests will run again" in written.decode()


@pytest.mark.night
def test_a_foreign_server_is_refused_without_mixed(tmp_path: Path) -> None:
    model = smollm2()
    source, output = write_lines(tmp_path / "in.jsonl", [{"prompt": "Hi"}]), tmp_path / "out.jsonl"
    with llama_server(model) as port:
        done = subprocess.run(
            [*LLMRUN, "batch", str(source), "-o", str(output), "-m", f"http://127.0.0.1:{port}", "--json"],
            cwd=ROOT,
            capture_output=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == [
        f"error: http://127.0.0.1:{port}/v1: the server is not llmrun, so its answers may change from run to run",
        "hint: add --mixed to accept such workers",
    ]
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["in.jsonl"]'
