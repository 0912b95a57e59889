"""Tests that `llmrun convert` writes a file that runs, or ends in one line and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from llmrun.base.amounts import format_bytes
from llmrun.formats.gguf.reader import open_gguf
from tests.support.cli.commands import LLMRUN, ROOT, llmrun, shell
from tests.support.converting.checkpoints import tiny_checkpoint
from tests.support.hub.small_disks import mounted_disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint("Qwen2ForCausalLM").write(tmp_path / "model")


def test_what_was_written_is_told(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "new model.gguf"
    done = llmrun("convert", str(folder), str(output))
    size = format_bytes(output.stat().st_size)
    assert done.stdout.decode() == f"{output}: {size}, 27 tensors: 14 Q4_0, 11 F32, 2 F16\n"
    assert done.stderr.decode() == f"note: to try it: llmrun chat -m '{output}'\n"
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "new model.gguf"]


@pytest.mark.push
def test_json_has_the_same_facts(tmp_path: Path) -> None:
    folder = tiny_checkpoint("MistralForCausalLM", "gptq", zero=None, sliding_window=64).write(tmp_path / "model")
    output = tmp_path / "out.gguf"
    done = llmrun("convert", str(folder), str(output), "--json", "--quiet")
    told = json.loads(done.stdout)
    assert told == {
        "path": str(output),
        "bytes": output.stat().st_size,
        "tensors": {"Q5_0": 14, "F32": 5, "F16": 2},
        "notes": told["notes"],
    }
    assert told["notes"][0].startswith("the context is limited to 64 of 512 tokens")
    assert done.stderr == b""


@pytest.mark.push
def test_llmrun_shows_the_converted_file(folder: Path, tmp_path: Path) -> None:
    llmrun("convert", str(folder), str(tmp_path / "out.gguf"))
    shown = llmrun("show", str(tmp_path / "out.gguf")).stdout.decode()
    assert "qwen2" in shown
    assert "Q4_0" in shown


@pytest.mark.push
@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("out.bin", "the name must end in .gguf"),
        (".", "the name must end in .gguf"),
        ("/", "the name must end in .gguf"),
        ("there.gguf", "already exists"),
        ("nowhere/out.gguf", "there is no folder"),
    ],
)
def test_other_outputs_are_refused(output: str, message: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there.gguf").write_text("precious")
    done = llmrun("convert", str(folder), str(tmp_path / output))
    assert done.returncode == 2
    first, _, hint = done.stderr.decode().partition("\n")
    assert message in first
    assert hint.startswith("hint: ")
    assert (tmp_path / "there.gguf").read_text() == "precious"


def test_checkpoints_that_cannot_be_converted_leave_nothing(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "compressed-tensors"
    (folder / "config.json").write_text(json.dumps(config))
    done = llmrun("convert", str(folder), str(tmp_path / "out.gguf"))
    assert done.returncode == 3
    assert done.stderr.decode() == (
        f"error: cannot be converted: {folder / 'config.json'}: quantization_config.quant_method is "
        "'compressed-tensors', but only awq and gptq can be converted\n"
        "hint: try another checkpoint, or a GGUF version of the model\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_small_disks_are_found_before_the_work(folder: Path, tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", 1 << 20, room=64 << 10) as disk:
        done = llmrun("convert", str(folder), str(disk.folder / "out.gguf"))
        assert done.returncode == 7
        error, hint = done.stderr.decode().splitlines()
        assert error.startswith(f"error: disk: {disk.folder}: out.gguf needs 120,224 bytes plus ")
        assert hint == "hint: free up space, or write to a folder on a larger disk"
        assert not list(disk.folder.glob("*gguf*"))


@pytest.mark.push
def test_a_full_disk_is_one_line_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """A limit on the size of files fails a write like a full disk."""
    done = shell(f"ulimit -f 64; $LLMRUN convert {folder} {tmp_path}/out.gguf")
    assert done.returncode == 7
    error, hint = done.stderr.decode().splitlines()
    assert error.startswith(f"error: disk: {tmp_path}: full, ")
    assert hint == "hint: free up space, or write to a folder on a larger disk"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.push
def test_interrupted_conversions_leave_nothing(tmp_path: Path) -> None:
    folder = tiny_checkpoint().write(tmp_path / "model")
    slow = """
import time
from llmrun.jobs.converting import convert
from llmrun.__main__ import main
def write(file, *rest):
    file.write(b"begun")
    print("begun", flush=True)
    time.sleep(60)
convert.write_gguf = write
main()
"""
    command = [LLMRUN[0], "-c", slow, "convert", str(folder), str(tmp_path / "out.gguf")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    assert len(list(tmp_path.iterdir())) == 2
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_converted_file_can_be_opened(folder: Path, tmp_path: Path) -> None:
    llmrun("convert", str(folder), str(tmp_path / "out.gguf"))
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.string("general.name") == "model"
