"""Tests of `llmrun generate --suffix`, and of filling in the middle in other commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.cli.commands import llmrun, script_file, scripted
from tests.support.gguf.gguf_files import CONTROL, Vocabulary, tiny_llama, tiny_vocabulary

pytestmark = pytest.mark.push

CONTROLS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
CUE = "<fim_prefix>def f():\n<fim_suffix>\n<fim_middle>"


def model(folder: Path, cue: str = CUE) -> str:
    return script_file(folder, [(cue, "    pass")], control_tokens=CONTROLS)


def test_the_answer_fills_the_gap(tmp_path: Path) -> None:
    done = scripted("-q", "-m", model(tmp_path), "--suffix", "\n", "def f():\n")
    assert (done.stdout, done.stderr) == (b"    pass\n", b"")


def test_the_texts_can_be_files_which_keep_their_last_newline(tmp_path: Path) -> None:
    (tmp_path / "before").write_text("def f():\n")
    (tmp_path / "after").write_text("\n")
    files = ("-f", str(tmp_path / "before"), "--suffix-file", str(tmp_path / "after"))
    assert scripted("-q", "-m", model(tmp_path), *files).stdout == b"    pass\n"
    piped = scripted("-q", "-m", model(tmp_path), "--suffix", "\n", "-", stdin=b"def f():\n")
    assert piped.stdout == b"    pass\n"


def test_the_text_before_the_gap_may_be_empty(tmp_path: Path) -> None:
    script = model(tmp_path, "<fim_prefix><fim_suffix>x<fim_middle>")
    assert scripted("-q", "-m", script, "--suffix", "x", "").stdout == b"    pass\n"


def test_json_and_samples_work_as_for_other_prompts(tmp_path: Path) -> None:
    asked = ("-q", "-m", model(tmp_path), "--suffix", "\n", "--json", "def f():\n")
    body = json.loads(scripted(*asked).stdout)
    assert body["choices"][0]["message"]["content"] == "    pass"
    assert body["usage"]["prompt_tokens"] == len("def f():\n\n") + 4
    samples = json.loads(scripted(*asked, "--samples", "2").stdout)["samples"]
    assert [one["text"] for one in samples] == ["    pass"] * 2


@pytest.mark.parametrize(
    "flags", [("--system", "x"), ("--chat-template", __file__), ("--think",), ("--suffix-file", __file__)], ids=str
)
def test_flags_for_chats_are_refused(flags: tuple[str, ...]) -> None:
    done = scripted("--suffix", "x", *flags, "a")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: --suffix: cannot be combined with ")


def test_models_without_the_tokens_are_refused() -> None:
    done = scripted("--suffix", "x", "a")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: this model cannot fill in the middle: ")
    assert b"hint: use a model for code" in done.stderr


def test_the_log_has_the_suffix(tmp_path: Path) -> None:
    env = os.environ | {"LLMRUN_DATA_DIR": str(tmp_path)}
    done = scripted("-q", "--log", "-m", model(tmp_path), "--suffix", "\n", "def f():\n", env=env)
    assert done.returncode == 0, done.stderr
    [entry] = json.loads(llmrun("logs", "--json", env=env).stdout)
    assert (entry["prompt"], entry["suffix"], entry["answer"]) == ("def f():\n", "\n", "    pass")


def coder(folder: Path) -> Path:
    base = tiny_vocabulary()
    tokens, types = (*base.tokens, *CONTROLS), (*base.types, *(CONTROL,) * 3)
    vocabulary = Vocabulary(tokens, types, base.merges, bos=base.bos, eos=base.eos)
    return tiny_llama(folder / "coder.gguf", vocabulary=vocabulary)


@pytest.mark.night
def test_show_says_whether_a_model_can_fill(tmp_path: Path) -> None:
    plain, path = tiny_llama(tmp_path / "plain.gguf"), coder(tmp_path)
    assert b"fill in the middle  <fim_prefix> <fim_suffix> <fim_middle>" in llmrun("show", str(path)).stdout
    assert b"fill in the middle" not in llmrun("show", str(plain)).stdout
    assert [json.loads(llmrun("show", "--json", str(each)).stdout)["fills"] for each in (path, plain)] == [True, False]


def test_a_recorded_run_can_be_replayed(tmp_path: Path) -> None:
    path, recording = coder(tmp_path), tmp_path / "run.json"
    asked = ("-q", "-m", str(path), "--backend", "cpu", "-n", "4", "--suffix", "b", "--record", str(recording), "a")
    assert llmrun("generate", *asked).returncode == 0
    done = llmrun("replay", str(recording))
    assert (done.returncode, done.stdout[:4]) == (0, b"same")
