"""Tests of the options that set a model's memory: the context size and the cache type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrun.base.amounts import format_bytes
from llmrun.base.machine.cpu_count import most_threads
from tests.support.cli.commands import llmrun, scripted
from tests.support.gguf.gguf_files import tiny_llama

pytestmark = pytest.mark.push

ASKED = ("--raw", "-n", "3", "--temp", "0", "--backend", "cpu", "-t", "1", "Once")


def test_a_type_of_cache_that_nobody_knows_is_one_line_and_exit_code_2() -> None:
    done = scripted("--kv-type", "q8_0,q4", "hello")
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr == (
        b"error: flag: --kv-type: 'q8_0,q4' is not f16, q8_0, q4_0, or a pair for keys and values, as in q8_0:q4_0\n"
        b"hint: did you mean q8_0:q4_0?\n"
    )


def test_a_context_that_does_not_fit_is_one_line_and_exit_code_7(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    done = llmrun("generate", "-m", str(path), "-c", "20000000000", "-q", *ASKED)
    assert done.returncode == 7
    error, hint = done.stderr.decode().splitlines()
    assert error.startswith(f"error: not enough memory for {path}: weights (")
    assert "a KV cache of 20,000,000,000 tokens (" in error
    assert hint.startswith("hint: try --ctx-size ")
    assert hint.endswith(", or --kv-type q4_0, which halves the KV cache but is less accurate")


@pytest.mark.parametrize(
    ("asked", "kv_type", "bytes_a_token"),
    [
        ([], "q8_0", 144),
        (["--kv-type", "f16"], "f16", 256),
        (["--kv-type", "q4_0"], "q4_0", 80),
        (["--kv-type", "f16:q4_0"], "f16:q4_0", 168),
    ],
)
def test_verbose_tells_what_was_chosen(tmp_path: Path, asked: list[str], kv_type: str, bytes_a_token: int) -> None:
    """Two layers have 2 KV heads of 16 features. A group of 16 has a scale of 2 bytes, except in f16."""
    path = tiny_llama(tmp_path / "tiny.gguf", context=1 << 20)
    done = llmrun("generate", "-m", str(path), *asked, "-v", "--json", *ASKED)
    assert done.returncode == 0, done.stderr
    told = done.stderr.decode()
    assert "context    32768 tokens; the model was trained for 1048576" in told
    assert f"KV cache   {kv_type}, {format_bytes(32768 * bytes_a_token)} for 32,768 tokens" in told
    run = json.loads(done.stdout)["run"]
    assert (run["context_size"], run["kv_type"]) == (32768, kv_type)


def test_more_threads_than_can_run_at_once_are_a_note(tmp_path: Path) -> None:
    path, most = tiny_llama(tmp_path / "tiny.gguf"), most_threads()
    asked = ("generate", "-m", str(path), "--raw", "-n", "2", "--temp", "0", "--backend", "cpu", "Once")
    told = llmrun(*asked, "-t", str(most + 1)).stderr.decode()
    assert f"note: --threads {most + 1}: this machine runs only {'one' if most == 1 else most} thread" in told
    assert "--threads" not in llmrun(*asked, "-t", str(most)).stderr.decode()
