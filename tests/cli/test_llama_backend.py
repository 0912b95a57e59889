"""Tests of `llmrun generate --backend llama` from end to end."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from tests.support.cli.commands import ROOT, llmrun
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_models import changed_copy

pytestmark = pytest.mark.push

PROMPTS = ["The lighthouse keeper", "Once upon a time, in a village by the sea,", "def fibonacci(n):"]
TOKENS = 24


@pytest.mark.night
def test_greedy_text_is_that_of_llama_cpp_pythons_own_loop_token_for_token() -> None:
    """Both use one thread, context, batch and flash attention setting, as each changes llama.cpp's summation order."""
    path = str(smollm2())
    theirs = llama_cpp.Llama(
        path, n_ctx=512, n_batch=512, n_threads=1, n_threads_batch=1, n_gpu_layers=0, flash_attn=True, verbose=False
    )
    for prompt in PROMPTS:
        done = llmrun(
            "generate",
            "--backend",
            "llama",
            "--gpu-layers",
            "0",
            "-m",
            path,
            "-t",
            "1",
            "-c",
            "512",
            "--raw",
            "--temp",
            "0",
            "-n",
            str(TOKENS),
            "--json",
            "--logprobs",
            "0",
            "-q",
            prompt,
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


def test_samples_share_one_context(tmp_path: Path) -> None:
    path = str(tiny_llama(tmp_path / "tiny.gguf"))
    flags = ("--samples", "3", "--raw", "-n", "20", "--seed", "1", "--json", "-q", "Once upon a time")
    done = llmrun("generate", "--backend", "llama", "--gpu-layers", "0", "-m", path, "-t", "1", *flags)
    samples = json.loads(done.stdout)["samples"]
    assert [sample["seed"] for sample in samples] == [1, 2, 3]
    assert len({sample["text"] for sample in samples}) == 3


def as_abacus(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Turn the model into a well-formed one of an architecture that no backend runs."""
    metadata["general.architecture"] = "abacus"
    for key in [key for key in metadata if key.startswith("llama.")]:
        metadata["abacus." + key.removeprefix("llama.")] = metadata.pop(key)


def test_a_model_that_llama_cpp_refuses_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    path = changed_copy(tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "abacus.gguf", as_abacus)
    done = llmrun("generate", "--raw", "-m", str(path), "-n", "3", "-q", "a")
    assert done.returncode == 3
    error, hint = done.stderr.decode().splitlines()
    assert "abacus.gguf: unknown model architecture: 'abacus'" in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("backend", "layers"), [("cpu", "all"), ("cpu", "3"), ("llama", "all"), ("llama", "20"), ("auto", "3")]
)
def test_layers_for_a_gpu_that_is_not_there_are_a_note(tmp_path: Path, backend: str, layers: str) -> None:
    path = str(tiny_llama(tmp_path / "tiny.gguf"))
    done = llmrun("generate", "--backend", backend, "-ngl", layers, "--raw", "-m", path, "-n", "3", "a", env=no_gpu())
    assert done.returncode == 0
    assert done.stderr.startswith(b"note: --gpu-layers: no layer of this model runs on a GPU")


def no_gpu(**environment: str) -> dict[str, str]:
    """Return the environment of a machine without a GPU, wherever the tests run."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", **environment}


@pytest.mark.parametrize("flag", ["--gpu-layers", "-ngl"])
def test_a_wrong_number_of_layers_is_a_usage_error(flag: str) -> None:
    done = llmrun("generate", flag, "half", "a")
    assert done.returncode == 2
    assert done.stderr == b"error: flag: --gpu-layers: 'half' is not auto, all or an integer from 0 to 65536\n"


def test_an_unknown_backend_is_a_usage_error_before_a_model_is_looked_for() -> None:
    done = llmrun("generate", "--backend", "abacus", "-m", "no-such-model", "a")
    assert done.returncode == 2
    assert done.stderr == b"error: flag: --backend: 'abacus' is not one of auto, cpu, llama\n"


def test_verbose_says_which_backend_and_why(tmp_path: Path) -> None:
    path = str(tiny_llama(tmp_path / "tiny.gguf"))
    done = llmrun("generate", "-v", "--gpu-layers", "0", "--raw", "-m", path, "-n", "3", "a")
    assert b"\nbackend    cpu: " in done.stderr
    assert b"backend    auto chose cpu: no GPU layers were requested\n" in done.stderr
    named = llmrun("generate", "-v", "--backend", "llama", "--raw", "-m", path, "-n", "3", "a", env=no_gpu())
    assert b"backend    not using GPUs: " in named.stderr
    assert b"\nbackend    llama: " in named.stderr


@pytest.mark.night
@pytest.mark.parametrize("backend", ["auto", "llama"])
def test_an_empty_environment_is_enough(tmp_path: Path, backend: str) -> None:
    path = str(tiny_llama(tmp_path / "tiny.gguf"))
    # without these, it would write to a home folder
    own = {name: value for name, value in os.environ.items() if name.startswith("LLMRUN_")}
    done = llmrun("generate", "--backend", backend, "--raw", "-m", path, "-n", "3", "-q", "a", env=own)
    assert (done.returncode, done.stderr) == (0, b"")


WITHOUT_THE_EXTRA = """
import importlib.machinery, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "llama_cpp" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
from llmrun.__main__ import main
main()
"""


def llmrun_without_the_extra(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run llmrun in a Python that cannot find llama_cpp."""
    command = [sys.executable, "-c", WITHOUT_THE_EXTRA, *arguments]
    return subprocess.run(command, capture_output=True, check=False, cwd=ROOT, timeout=120)


def test_without_the_extra_the_command_that_installs_it_is_given(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    named = llmrun_without_the_extra("generate", "--backend", "llama", "--raw", "-m", str(path), "-q", "a")
    assert named.returncode == 2
    error, hint = named.stderr.decode().splitlines()
    assert error == "error: llama.cpp is not installed: --backend llama"
    command = re.escape(f"{shlex.quote(sys.executable)} -m pip install ")
    # When run from a clone that is not installed, the hint names the clone's own extra.
    assert re.fullmatch(
        rf"hint: install it: {command}--only-binary .*/whl/cpu '(llama-cpp-python.*|\.\[llama\])'", hint
    )

    other = changed_copy(path, tmp_path / "abacus.gguf", as_abacus)
    refused = llmrun_without_the_extra("generate", "--raw", "-m", str(other), "-q", "a")
    assert refused.returncode == 3
    error, hint = refused.stderr.decode().splitlines()
    assert "architecture not supported" in error
    assert re.search(command, hint)

    fine = llmrun_without_the_extra("generate", "-v", "--raw", "-m", str(path), "-n", "3", "a")
    assert fine.returncode == 0
    assert b"backend    auto chose cpu: llama.cpp is not installed\n" in fine.stderr


@pytest.mark.parametrize("content", [b"not a library", b""])
def test_a_broken_installation_is_one_line_or_a_reason(tmp_path: Path, content: bytes) -> None:
    """llama-cpp-python loads its libraries from the folder in this variable."""
    libraries = tmp_path / "lib"
    libraries.mkdir()
    if content:
        (libraries / "libllama.so").write_bytes(content)
    broken = {**os.environ, "LLAMA_CPP_LIB_PATH": str(libraries)}
    path = str(tiny_llama(tmp_path / "tiny.gguf"))
    named = llmrun("generate", "--backend", "llama", "--raw", "-m", path, "-q", "a", env=broken)
    assert named.returncode == 1
    error, hint = named.stderr.decode().splitlines()
    assert error.startswith("error: llama-cpp-python does not work: ")
    assert hint.startswith("hint: unset LLAMA_CPP_LIB_PATH, or ")
    auto = llmrun("generate", "-v", "--raw", "-m", path, "-n", "3", "a", env=broken)
    assert auto.returncode == 0
    assert b"backend    auto chose cpu: llama-cpp-python does not work: " in auto.stderr
