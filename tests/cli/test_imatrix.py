"""Tests of `llmrun imatrix` as users type it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.llama.imatrix_file import read_imatrix
from llmrun.base.errors import Cancelled
from llmrun.cli.commands import imatrix
from llmrun.jobs import importance
from llmrun.jobs.importance import ImatrixCollector
from tests.support.cli.commands import llmrun
from tests.support.gguf.gguf_files import tiny_llama

pytestmark = pytest.mark.push

TEXT = "The harbour of the old town freezes for about six weeks every winter. " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "model.gguf", weight_type="F32", tied=False)


def test_the_imatrix_makes_another_file(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "imatrix.gguf"
    done = llmrun("imatrix", str(model), "-f", str(text), "-o", str(out), "-c", "32", "--chunks", "9")
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert lines[:2] == [f"model     {model}", "text      9 chunks of 32 tokens"]
    assert lines[2].startswith(f"imatrix   {out}  14 matrices, ")
    assert f"to use it: llmrun quantize {model} OUT IQ4_XS --imatrix {out}" in done.stderr.decode()
    measured = read_imatrix(out)
    assert (measured.datasets, measured.chunks, measured.chunk_size) == ((str(text),), 9, 32)
    assert {entry.counts.tolist()[0] for entry in measured.entries.values()} == {9 * 32}
    small = [tmp_path / "with.gguf", tmp_path / "without.gguf"]
    for path, flags in zip(small, (["--imatrix", str(out)], []), strict=True):
        assert llmrun("quantize", str(model), str(path), "Q4_0", *flags).returncode == 0
    assert small[0].read_bytes() != small[1].read_bytes()


def test_the_text_can_come_from_a_pipe_and_the_output_is_optional(model: Path, text: Path, tmp_path: Path) -> None:
    found = []
    for name, arguments, stdin in (
        ("a", ["-f", str(text)], b""),
        ("b", ["-f", "-", "--process-output"], TEXT.encode()),
        ("c", [], TEXT.encode()),
    ):
        done = llmrun("imatrix", str(model), *arguments, "-o", str(tmp_path / name), "-c", "64", "--json", stdin=stdin)
        assert json.loads(done.stdout)["complete"]
        found.append(read_imatrix(tmp_path / name).entries)
    assert found[1].keys() - found[0].keys() == {"output.weight"}
    assert found[2].keys() == found[0].keys()
    assert all((found[1][name].sums == entry.sums).all() for name, entry in found[0].items())


def test_a_quantized_model_has_an_f16_cache(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, types = tiny_llama(tmp_path / "quantized.gguf", tied=False), []
    opened = importance.open_cpu_backend

    def watched(path: Path, options: OpenOptions) -> CpuBackend:
        backend = opened(path, options)
        types.append(backend.info.kv_type)
        return backend

    monkeypatch.setattr(importance, "open_cpu_backend", watched)
    assert imatrix.command(str(path), text=text, output=tmp_path / "out", context=32, chunks=1) == 0
    assert types == ["f16"]


def test_ctrl_c_keeps_the_chunks_so_far(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add = ImatrixCollector.add

    def interrupted(self: ImatrixCollector, tokens: NDArray[np.int32]) -> int:
        if self.chunks == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return add(self, tokens)

    monkeypatch.setattr(ImatrixCollector, "add", interrupted)
    out = tmp_path / "imatrix.gguf"
    assert imatrix.command(str(model), text=text, output=out, context=32) == 130
    assert read_imatrix(out).chunks == 2
    assert "stopped after 2 of " in capsys.readouterr().err


def test_ctrl_c_in_the_first_chunk_writes_nothing(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: ImatrixCollector, tokens: NDArray[np.int32]) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        raise Cancelled("generation stopped")

    monkeypatch.setattr(ImatrixCollector, "add", interrupted)
    with pytest.raises(SystemExit, match="130"):
        imatrix.command(str(model), text=text, output=tmp_path / "imatrix.gguf", context=32)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_folders_that_cannot_be_written_are_found_before_the_work(model: Path, text: Path) -> None:
    done = llmrun("imatrix", str(model), "-f", str(text), "-o", "/proc/imatrix.gguf", "-c", "32")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().startswith("error: /proc/imatrix.gguf: cannot be written: ")


def test_mistakes_are_refused_before_the_work(model: Path, text: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "imatrix.gguf")
    for arguments, code, words in (
        ([str(model), "-f", "missing.txt", "-o", out], 2, "--text: missing.txt: No such file"),
        ([str(model), "-f", str(text), "-o", str(text)], 2, "already exists"),
        ([str(tmp_path / "no.gguf"), "-f", str(text), "-o", out], 4, "no such file"),
        (["http://localhost:1/v1", "-f", str(text), "-o", out], 2, "a server does not show"),
        ([str(model), "-f", str(text)], 2, "--output"),
        ([str(model), "-o", out], 2, "standard input is empty"),
        (["-f", str(text), "-o", out], 2, "MODEL is missing"),
    ):
        done = llmrun("imatrix", *arguments)
        assert done.returncode == code
        assert words in done.stderr.decode()
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_short_texts_are_refused(model: Path, tmp_path: Path) -> None:
    done = llmrun("imatrix", str(model), "-f", "-", "-o", str(tmp_path / "i.gguf"), stdin=b"A short text.")
    assert done.returncode == 2
    assert "tokens do not fill a chunk of 512" in done.stderr.decode()
