"""Tests of `llmrun bench` on servers as users type it, with a fake model."""

from __future__ import annotations

import json
import signal
import subprocess
import threading

import pytest

from tests.support.cli.commands import LLMRUN, ROOT, llmrun
from tests.support.servers.fake_model import FakeModel
from tests.support.servers.hostile_server import serving

pytestmark = pytest.mark.push

QUICK = ("-p", "4", "-n", "4", "--seed", "1")


def bench(model: FakeModel, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    with serving(model) as server:
        return llmrun("bench", "--endpoint", server.url, *QUICK, *arguments)


def test_a_table_has_percentiles_and_goodput() -> None:
    done = bench(FakeModel(), "--rate", "100", "--requests", "20", "--goodput", "ttft:60000")
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert "4 in, 4 out  open loop at 100 requests/s" in text
    for word in ("TTFT", "TPOT", "ITL", "E2E", "p50", "p90", "p99", "throughput: "):
        assert word in text
    assert "100% of requests (TTFT <= 60000 ms)" in text
    assert "\x1b" not in text


def test_json_is_a_list_with_an_object_for_each_rate() -> None:
    done = bench(FakeModel(), "--rate", "100,200", "--requests", "5", "--json")
    assert [row["request_rate"] for row in json.loads(done.stdout)] == [100.0, 200.0]


def test_markdown_is_a_table_and_a_list() -> None:
    lines = bench(FakeModel(), "--requests", "5", "-o", "md").stdout.decode().splitlines()
    assert lines[2] == "| time | count | mean | p50 | p90 | p99 |"
    assert lines[4].startswith("| TTFT | 5 |")
    assert lines[-1].startswith("- throughput: ")


def test_ctrl_c_shows_the_requests_that_had_ended() -> None:
    enough = threading.Event()

    def count(number: int) -> str:
        if number > 20:
            enough.set()
        return ""

    with serving(FakeModel(faults=count)) as server:
        command = [*LLMRUN, "bench", "--endpoint", server.url, *QUICK, "--rate", "100,200", "--duration", "600"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
        assert enough.wait(60)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr.decode()
    assert b"throughput: " in stdout
    assert b"interrupted: showing the requests that had ended" in stderr
    assert b"Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "2"), "--rate: works only for a server, not for models on this machine"),
        (("--endpoint", "http://127.0.0.1:9#m", "--rate", "soon"), "--rate: 'soon' is not a number"),
        (("--endpoint", "http://127.0.0.1:9#m", "--same"), "--same: no longer exists"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = llmrun("bench", *arguments)
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert done.stdout == b""


def test_an_unreachable_server_is_one_line() -> None:
    done = llmrun("bench", "--endpoint", "http://127.0.0.1:9/v1#m", "--rate", "2")
    assert done.returncode == 5
    assert b"127.0.0.1:9" in done.stderr
    assert b"Traceback" not in done.stderr
