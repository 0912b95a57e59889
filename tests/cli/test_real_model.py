"""Tests of `llmrun generate` from end to end, with a real model on the CPU engine."""

from __future__ import annotations

import json

import pytest

from tests.support.cli.commands import llmrun, on_terminal, shell
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.push


@pytest.fixture(scope="module")
def model() -> str:
    return str(smollm2())


def test_it_says_hello_in_french(model: str) -> None:
    done = llmrun("generate", "-m", model, "--stats", "--temp", "0", "-n", "12", "Say hello in French.")
    assert done.stdout.startswith(b"Bonjour")
    assert b"\x1b" not in done.stdout + done.stderr
    assert f"{'SmolLM2-135M-Instruct.Q4_1'[:23]}… cpu×" in done.stderr.decode()
    assert done.returncode == 0


@pytest.mark.night
def test_the_same_seed_gives_the_same_text_over_threads(model: str) -> None:
    flags = ["generate", "-q", "-m", model, "--seed", "11", "-n", "24", "Tell me a story."]
    assert llmrun(*flags, "-t", "1").stdout == llmrun(*flags, "-t", "2").stdout != b""


@pytest.mark.night
def test_samples_are_what_their_seeds_give_alone(model: str) -> None:
    flags = ["generate", "-q", "-m", model, "--json", "--logprobs", "2", "-n", "24"]
    samples = json.loads(llmrun(*flags, "--seed", "11", "--samples", "4", "Tell me a story.").stdout)["samples"]
    for sample in samples:
        alone = json.loads(llmrun(*flags, "--seed", str(sample["seed"]), "Tell me a story.").stdout)["choices"][0]
        assert sample["text"] == alone["message"]["content"]
        assert sample["logprobs"] == alone["logprobs"]
        assert sample["finish_reason"] == alone["finish_reason"]
    assert len({sample["text"] for sample in samples}) == 4
    cached = [sample["usage"]["prompt_tokens_details"]["cached_tokens"] for sample in samples]
    assert cached == [0] + 3 * [samples[0]["usage"]["prompt_tokens"] - 1]


def test_json_counts_what_it_says(model: str) -> None:
    done = llmrun("generate", "-q", "-m", model, "--json", "--logprobs", "3", "-n", "8", "--seed", "1", "Hello")
    body = json.loads(done.stdout)
    content = body["choices"][0]["logprobs"]["content"]
    text = b"".join(bytes(token["bytes"]) for token in content).decode()
    assert text == body["choices"][0]["message"]["content"]
    assert body["usage"]["completion_tokens"] == 8
    assert body["run"]["backend"] == "cpu"


@pytest.mark.night
def test_a_reader_that_leaves_gives_141_and_silence(model: str) -> None:
    done = shell(f"$LLMRUN generate -m {model} 'Write a very long story.' | head -c 10")
    assert (done.returncode, len(done.stdout), done.stderr) == (141, 10, b"")


def test_ctrl_c_keeps_the_text_and_reports(model: str) -> None:
    process = on_terminal("generate", "-m", model, "Write a very long story.", NO_COLOR="1")
    process.expect(rb"\r +\r[^\r]*?\w+ \w+ \w+ \w+")  # the answer, after the erased line about loading
    process.sendintr()
    rest = process.read().decode()
    process.close()
    assert process.exitstatus == 130
    assert "stopped after " in rest
    assert "Traceback" not in rest


def test_ctrl_c_in_a_long_prefill_ends_it(model: str) -> None:
    process = on_terminal("generate", "-m", model, "-t", "1", "word " * 6000)
    process.expect_exact("prefill")
    process.sendintr()
    rest = process.read().decode()
    process.close()
    assert process.exitstatus == 130
    assert "stopped in prefill" in rest
    assert "Traceback" not in rest


def test_a_prompt_beyond_the_context_is_code_8(model: str) -> None:
    done = llmrun("generate", "-m", model, "-c", "64", "word " * 100)
    assert (done.stdout, done.returncode) == (b"", 8)
