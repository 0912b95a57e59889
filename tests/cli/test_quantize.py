"""Tests of `llmrun quantize` as users type it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llmrun.model.vision.projector import read_projector
from tests.support.backends.fake_llama import fake_llama, without_llama
from tests.support.cli.commands import LLMRUN, ROOT, llmrun, shell
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.vision.projectors import tiny_projector

pytestmark = pytest.mark.push

WAIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "model.gguf", weight_type="F32", width=256, feed_forward=512)


def test_sizes_and_the_next_command_are_printed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.gguf"
    done = llmrun("quantize", str(model), str(out), "q8_0")
    assert done.returncode == 0, done.stderr.decode()
    first, second, size, tensors, took = done.stdout.decode().splitlines()
    assert first.startswith(f"model      {model}  F32, ")
    assert first.endswith(", 32.00 bits per weight")
    assert second.startswith(f"quantized  {out}  Q8_0, ")
    assert size.endswith("% of the model")
    assert tensors.startswith("tensors    15 Q8_0, 5 F32")
    assert took.startswith("time       ")
    assert done.stderr.decode() == f"note: to measure the loss: llmrun eval {out} --against {model} --text FILE\n"


def test_quantizing_twice_needs_a_flag(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model.gguf", weight_type="Q8_0")
    again = ("quantize", str(model), str(tmp_path / "again.gguf"), "Q4_0", "--dry-run")
    done = llmrun(*again)
    assert done.returncode == 2
    assert "accept the loss of quality with --allow-requantize" in done.stderr.decode()
    assert llmrun(*again, "--allow-requantize").returncode == 0


@pytest.mark.parametrize(("number", "name"), [(7, "Q8_0"), (15, "Q4_K_M"), (999, "Q8_0")])
def test_a_file_that_already_has_the_type_is_refused(tmp_path: Path, number: int, name: str) -> None:
    """Mixed types such as Q4_K_M are known from the metadata. Other types are also known from the tensors."""
    model = tiny_llama(tmp_path / "model.gguf", weight_type="Q8_0", extra={"general.file_type": number})
    again = ("quantize", str(model), str(tmp_path / "again.gguf"), name.lower())
    done = llmrun(*again)
    assert (done.returncode, done.stdout) == (2, b"")
    error, hint = done.stderr.decode().splitlines()
    assert error == f"error: {model}: the model is already {name}"
    assert hint.startswith("hint: choose another TYPE, or copy the file")
    assert list(tmp_path.iterdir()) == [model]
    assert llmrun(*again, "--allow-requantize").returncode == 0


def test_a_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.gguf"
    expected = json.loads(llmrun("quantize", str(model), str(out), "Q4_K_M", "--dry-run", "--json").stdout)
    assert list(tmp_path.iterdir()) == []
    found = json.loads(llmrun("quantize", str(model), str(out), "Q4_K_M", "--json").stdout)
    assert found["quantized"]["tensors"] == expected["quantized"]["tensors"]
    assert found["quantized"]["bytes"] == out.stat().st_size
    assert abs(expected["quantized"]["bytes"] - out.stat().st_size) < 1024


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["Q4_KM"], 2, "error: TYPE: 'Q4_KM' is not a file type that llama.cpp writes"),
        (["Q8_0", "--output-type", "Q9"], 2, "error: --output-type: 'Q9' is not a weight type"),
        (["IQ1_S"], 2, "error: IQ1_S: needs an importance matrix"),
        (["Q8_0", "--imatrix", "missing.gguf"], 4, "error: no such importance matrix: missing.gguf"),
        (["Q8_0", "--imatrix", "README.md"], 3, "error: not an importance matrix: README.md"),
    ],
)
def test_mistakes_are_refused_before_the_work(
    model: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    done = llmrun("quantize", str(model), str(tmp_path / "out.gguf"), *arguments)
    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr.decode().startswith(words)
    assert list(tmp_path.iterdir()) == []


def test_existing_files_and_servers_are_refused(model: Path, tmp_path: Path) -> None:
    done = llmrun("quantize", str(model), str(model), "Q8_0")
    assert (done.returncode, b"already exists" in done.stderr) == (2, True)
    done = llmrun("quantize", "http://localhost:1/v1", str(tmp_path / "out.gguf"), "Q8_0")
    assert (done.returncode, b"a server's models cannot be quantized" in done.stderr) == (2, True)


def test_names_must_say_that_the_file_is_gguf(model: Path, tmp_path: Path) -> None:
    done = llmrun("quantize", str(model), str(tmp_path / "out"), "Q8_0")
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[1] == f"hint: try {tmp_path / 'out.gguf'}"


def test_without_llama_cpp_the_error_says_how_to_install_it(model: Path, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(without_llama(tmp_path / "path")), str(ROOT)])}
    done = llmrun("quantize", str(model), str(tmp_path / "out.gguf"), "Q8_0", env=env)
    assert done.returncode == 2
    assert done.stderr.decode().startswith("error: llama.cpp is not installed: the quantizer is part of llama.cpp\n")


def test_projectors_need_no_llama_cpp(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(without_llama(tmp_path / "path")), str(ROOT)])}
    projector, out = tiny_projector(tmp_path, "lfm2", "F16"), tmp_path / "mmproj-q8_0.gguf"
    done = llmrun("quantize", str(projector), str(out), "q8_0", env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    first, second, _, tensors, _ = done.stdout.decode().splitlines()
    assert first.startswith(f"model      {projector}  F16, ")
    assert second.startswith(f"quantized  {out}  Q8_0, ")
    assert tensors.startswith("tensors    ")
    assert read_projector(out).family == "lfm2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Q4_K_M"], "is a vision projector, which can only become Q8_0"),
        (["Q8_0", "--pure"], "error: --pure: not for vision projectors"),
        (["Q8_0", "--output-type", "F16"], "error: --output-type: not for vision projectors"),
    ],
)
def test_other_wishes_for_projectors_are_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    projector = tiny_projector(tmp_path, "lfm2", "F16")
    done = llmrun("quantize", str(projector), str(tmp_path / "out.gguf"), *arguments)
    error, hint = done.stderr.decode().splitlines()
    assert (done.returncode, words in error, hint[:6]) == (2, True, "hint: ")
    assert list(tmp_path.iterdir()) == [projector]


def test_a_full_disk_is_one_line(model: Path, tmp_path: Path) -> None:
    """A limit on the size of files fails a write like a full disk."""
    done = shell(f"ulimit -f 512; $LLMRUN quantize {model} {tmp_path}/out.gguf F16")
    assert done.returncode == 7
    error, hint = done.stderr.decode().splitlines()
    assert error.startswith(f"error: disk: {tmp_path}: out.gguf could not be written completely: ")
    assert hint.startswith("hint: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruptions_leave_no_file(model: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    hangs = """
_real_quantize = llama_model_quantize
def llama_model_quantize(path, out, parameters):
    if not out:
        return _real_quantize(path, out, parameters)
    open(out, "wb").write(b"half")
    import time
    time.sleep(600)
"""
    fake = fake_llama(tmp_path / "fake", more=hangs.replace("if not out", 'if out == b"."'))
    folder = tmp_path / "out"
    folder.mkdir()
    path = f"{fake}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT)}"
    process = subprocess.Popen(
        [*LLMRUN, "quantize", str(model), str(folder / "out.gguf"), "Q8_0"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + WAIT_S
    while not any(file.stat().st_size for file in folder.iterdir()):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=WAIT_S)
    assert (process.returncode, error) == (code, b"")
    assert list(folder.iterdir()) == []


def test_eval_shows_the_loss(model: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "small.gguf", tmp_path / "text.txt"
    text.write_text("The harbour of the old town freezes for about six weeks every winter. " * 9)
    done = llmrun("quantize", str(model), str(out), "Q4_0", "--json")
    small = json.loads(done.stdout)["quantized"]
    evaluate = ("eval", str(out), "--against", str(model), "--text", str(text), "-c", "64")
    body = json.loads(llmrun(*evaluate, "--json").stdout)
    assert body["model"]["bytes"] == small["bytes"] == out.stat().st_size
    assert body["model"]["bits_per_weight"] == small["bits_per_weight"]
    assert body["base"]["bytes"] == model.stat().st_size
    assert body["text"]["kl_divergence"]["value"] > 1e-4
    lines = llmrun(*evaluate).stdout.decode().splitlines()
    bits = f"{small['bits_per_weight']:.2f} bits per weight"
    assert lines[0].endswith(bits)
    assert lines[2].split() == ["size", f"{100 * small['bytes'] / body['base']['bytes']:.2f}", "%", "of", "the", "base"]
