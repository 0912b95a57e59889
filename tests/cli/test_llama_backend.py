"""`llmrun generate --backend llama` from end to end."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from tests.support.commands import llmrun
from tests.support.downloads import smollm2
from tests.support.gguf_files import tiny_llama
from tests.support.tiny_models import changed_copy

PROMPTS = ["The lighthouse keeper", "Once upon a time, in a village by the sea,", "def fibonacci(n):"]
TOKENS = 24


def test_greedy_text_is_that_of_llama_cpp_pythons_own_loop_token_for_token() -> None:
    """On one thread, with the same context, batch and flash attention: each changes the order of llama.cpp's sums."""
    path = str(smollm2())
    theirs = llama_cpp.Llama(
        path, n_ctx=512, n_batch=512, n_threads=1, n_threads_batch=1, n_gpu_layers=0, flash_attn=True, verbose=False
    )
    for prompt in PROMPTS:
        done = llmrun(
            *("generate", "--backend", "llama", "--gpu-layers", "0", "-m", path, "-t", "1", "-c", "512", "--raw"),
            *("--temp", "0", "-n", str(TOKENS), "--json", "--logprobs", "0", "-q", prompt),
        )
        assert done.stderr == b""
        body = json.loads(done.stdout)
        theirs.reset()
        tokens = theirs.tokenize(prompt.encode(), add_bos=True, special=True)
        said = list(islice(theirs.generate(tokens, temp=0.0), TOKENS))
        expected = [list(theirs.detokenize([token])) for token in said]
        assert [token["bytes"] for token in body["choices"][0]["logprobs"]["content"]] == expected
        assert body["run"]["backend"] == "llama"
        assert body["usage"]["prompt_tokens"] == len(tokens)
    theirs.close()


def test_a_model_that_llama_cpp_refuses_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    """Well formed, of an architecture that nobody runs."""

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["general.architecture"] = "abacus"
        for key in [key for key in metadata if key.startswith("llama.")]:
            metadata["abacus." + key.removeprefix("llama.")] = metadata.pop(key)

    path = changed_copy(tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "abacus.gguf", change)
    done = llmrun("generate", "--raw", "-m", str(path), "-n", "3", "-q", "a")
    assert done.returncode == 3
    error, hint = done.stderr.decode().splitlines()
    assert "abacus.gguf: unknown model architecture: 'abacus'" in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("layers", ["all", "3"])
def test_layers_for_a_gpu_that_is_not_there_are_a_note(tmp_path: Path, layers: str) -> None:
    path = str(tiny_llama(tmp_path / "tiny.gguf"))
    done = llmrun("generate", "--backend", "cpu", "--gpu-layers", layers, "--raw", "-m", path, "-n", "3", "a")
    assert done.returncode == 0
    assert done.stderr.startswith(b"note: no GPU runs any layer of this model (--gpu-layers)")


def test_a_wrong_number_of_layers_is_a_usage_error() -> None:
    done = llmrun("generate", "--gpu-layers", "half", "a")
    assert done.returncode == 2
    assert done.stderr == b"error: flag: --gpu-layers: 'half' is not auto, all or an integer of at least 0\n"


def test_verbose_says_which_backend_and_why(tmp_path: Path) -> None:
    path = str(tiny_llama(tmp_path / "tiny.gguf"))
    done = llmrun("generate", "-v", "--gpu-layers", "0", "--raw", "-m", path, "-n", "3", "a")
    assert b"\nbackend    cpu: " in done.stderr
    assert b"backend    auto took cpu: " in done.stderr
