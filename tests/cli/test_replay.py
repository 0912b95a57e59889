"""Tests of `generate --record` and `replay` from end to end, with the real process and tiny models."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.formats.layouts.records import NUMERICS
from tests.support.cli.commands import llmrun
from tests.support.engine.pictures import png
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.kernels.runs import LEVELS_HERE
from tests.support.named_pipes import named_pipe
from tests.support.vision.projectors import tiny_projector, tiny_text_model

pytestmark = pytest.mark.push

CAT = png(np.random.default_rng(1).integers(0, 256, (60, 90, 3), np.uint8))

THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=512)


def run(*arguments: str, expected: int = 0, **environment: str) -> subprocess.CompletedProcess[bytes]:
    done = llmrun(*arguments, env={**os.environ, **environment})
    assert done.returncode == expected, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return done


def recorded(folder: Path, model: Path, *arguments: str) -> Path:
    path = folder / "run.json"
    prompt = ("--seed", "5", "-n", "40", "Hello world, hello world")
    run("generate", "-q", "-m", str(model), "--record", str(path), *(arguments or prompt))
    return path


def changed(path: Path, **fields: Any) -> Path:
    other = path.with_name("changed.json")
    other.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return other


def test_a_replay_says_that_it_is_the_same(tmp_path: Path, model: Path) -> None:
    path = recorded(tmp_path, model)
    body = json.loads(path.read_text())
    assert (body["numerics"], body["model"], len(body["tokens"]), len(body["logits"])) == (NUMERICS, str(model), 40, 4)
    assert body["kv_type"] == "q8_0"
    words = "same 40 tokens and logits on this machine: tiny.gguf"
    done = run("replay", str(path))
    assert done.stdout.decode().startswith(words)
    done = run("replay", str(path), "-t", "1", "--speculate", "off", LLMRUN_CPU_LEVEL=LEVELS_HERE[-1])
    assert done.stdout.decode() == f"{words}, 1 thread, {LEVELS_HERE[-1]}\n"
    result = json.loads(run("replay", str(path), "--json").stdout)
    assert result["same"] is True
    assert result["recorded_on"] == body["machine"]


@pytest.mark.night
@pytest.mark.parametrize(
    "arguments",
    [
        ("--seed", "3", "-n", "30", "--raw", "Hello world"),
        ("--temp", "0", "-n", "30", "-s", "Be brief.", "Hi"),
        ("--seed", "3", "-n", "60", "--regex", "[a-z ]{5,40}\\.", "Hi"),
        ("--seed", "3", "--choice", "one,two", "Hi"),
        ("--seed", "3", "-n", "40", "--mirostat", "2", "--stop", "zzz", "Hi"),
        ("--seed", "3", "-n", "40", "--logit-bias", "40=-5", "--kv-type", "q8_0", "Hi"),
    ],
)
def test_every_option_of_an_answer_is_repeated(tmp_path: Path, model: Path, arguments: tuple[str, ...]) -> None:
    path = recorded(tmp_path, model, *arguments)
    assert run("replay", str(path)).stdout.startswith(b"same ")
    assert run("replay", str(path), "--speculate", "off").stdout.startswith(b"same ")


@pytest.mark.night
def test_a_thinking_budget_is_repeated(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "thinks.gguf", chat_template=THINKING)
    path = recorded(tmp_path, model, "--seed", "3", "-n", "40", "--think-budget", "6", "--stop", "the", "Hi")
    assert run("replay", str(path)).stdout.startswith(b"same ")


@pytest.mark.night
def test_the_users_template_is_in_the_recording(tmp_path: Path, model: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {{ strftime_now('%f') }}!{% endfor %}")
    path = recorded(tmp_path, model, "--chat-template", str(template), "--seed", "3", "-n", "20", "Hi")
    template.unlink()
    assert run("replay", str(path)).stdout.startswith(b"same ")  # with the recorded date, not today's


@pytest.mark.night
def test_the_first_difference_is_named(tmp_path: Path, model: Path) -> None:
    path = recorded(tmp_path, model)
    body = json.loads(path.read_text())
    ops = [*body["ops"][:4], [body["ops"][4][0], "0" * 16], *body["ops"][5:]]
    logits = dict.fromkeys(body["logits"], "0" * 16)
    done = run("replay", str(changed(path, ops=ops, logits=logits)), expected=1)
    line = done.stdout.decode()
    assert "the same 40 tokens, but different bits; the logits of token 1 differ" in line
    assert f"the first op that differs: {ops[4][0]} (op 5 of {len(ops)}, positions 0 to 7)" in line
    other = changed(path, sampling={**body["sampling"], "temperature": 5.0})
    done = run("replay", str(other), "--json", expected=1)
    token = json.loads(done.stdout)["first_other_token"]
    assert token["expected"] == body["tokens"][token["index"]] != token["got"]
    assert "differs: expected " in run("replay", str(other), expected=1).stdout.decode()


@pytest.mark.night
def test_other_models_and_versions_are_refused(tmp_path: Path, model: Path) -> None:
    path = recorded(tmp_path, model)
    done = run("replay", str(changed(path, numerics=NUMERICS + 1)), expected=1)
    assert f"numerics version {NUMERICS + 1}" in done.stderr.decode()
    other = tiny_llama(tmp_path / "other.gguf", seed=1)
    assert "another model: other.gguf" in run("replay", str(path), str(other), expected=1).stderr.decode()
    same = tmp_path / "renamed.gguf"
    same.write_bytes(model.read_bytes())
    assert run("replay", str(path), str(same)).stdout.startswith(b"same ")
    assert "no such file" in run("replay", str(changed(path, model="/no/such.gguf")), expected=4).stderr.decode()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model that reads images, and its projector."""
    folder = tmp_path_factory.mktemp("seeing")
    return tiny_text_model(folder, "qwen3vl_merger"), tiny_projector(folder, "qwen3vl_merger")


def recorded_image(folder: Path, seeing: tuple[Path, Path], *prompt: str) -> Path:
    model, projector = seeing
    image = folder / "cat.png"
    image.write_bytes(CAT)
    mmproj = ("--mmproj", str(projector), "--image-max-tokens", "100")
    path = recorded(folder, model, *mmproj, "--image", str(image), "--seed", "3", "-n", "12", *(prompt or ("Hi",)))
    image.unlink()
    return path


def test_a_run_with_an_image_is_repeated(tmp_path: Path, seeing: tuple[Path, Path]) -> None:
    path = recorded_image(tmp_path, seeing)
    body = json.loads(path.read_text())
    assert (body["version"], len(body["images"]), len(body["image_files"])) == (2, 1, 1)
    assert (body["projector"]["path"], body["projector"]["image_max_tokens"]) == (str(seeing[1]), 100)
    assert {"pillow", "llama-cpp-python"} <= body["machine"].keys()
    words = b"same 12 tokens and logits on this machine: "
    assert run("replay", str(path)).stdout.startswith(words)
    assert run("replay", str(path), "-t", "1", "--speculate", "off").stdout.startswith(words)


@pytest.mark.night
def test_a_raw_prompt_with_an_image_is_repeated(tmp_path: Path, seeing: tuple[Path, Path]) -> None:
    path = recorded_image(tmp_path, seeing, "--raw", "a <__media__> b")
    assert run("replay", str(path)).stdout.startswith(b"same 12 tokens")


@pytest.mark.night
def test_the_part_that_reads_an_image_differently_is_named(tmp_path: Path, seeing: tuple[Path, Path]) -> None:
    path = recorded_image(tmp_path, seeing)
    body = json.loads(path.read_text())
    [image], machine = body["images"], body["machine"]
    other = changed(path, images=[{**image, "pixels": "0" * 64}], machine={**machine, "pillow": "1.2"})
    words = f"image 1: the decoded pixels differ (pillow {machine['pillow']}, recorded with 1.2); the same 12 tokens: "
    assert run("replay", str(other), expected=1).stdout.decode().startswith(words)
    other = changed(path, images=[{**image, "rows": "0" * 64}])
    encoder = f"llama-cpp-python {machine['llama-cpp-python']}, as recorded"
    words = f"image 1: the encoder's rows differ ({encoder}); the same 12 tokens: "
    assert run("replay", str(other), expected=1).stdout.decode().startswith(words)
    result = json.loads(run("replay", str(other), "--json", expected=1).stdout)
    assert (result["same"], result["other_images"]) == (False, [{"index": 0, "differs": "rows"}])


@pytest.mark.night
def test_a_projector_in_another_place_can_be_named(tmp_path: Path, seeing: tuple[Path, Path]) -> None:
    path = recorded_image(tmp_path, seeing)
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(seeing[1].read_bytes())
    gone = {**json.loads(path.read_text())["projector"], "path": "/no/such/mmproj.gguf"}
    same = run("replay", str(changed(path, projector=gone)), "--mmproj", str(moved))
    assert same.stdout.startswith(b"same 12 tokens")
    moved.write_bytes(b"x")
    assert "another projector: " in run("replay", str(path), "--mmproj", str(moved), expected=1).stderr.decode()


def test_images_that_are_too_large_to_record_are_refused(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(CAT + bytes([number]) * (15 << 20))
    images = [word for number in range(3) for word in ("--image", str(tmp_path / f"{number}.png"))]
    done = run("generate", "-m", "no.gguf", "--record", str(tmp_path / "a"), *images, "Hi", expected=2)
    assert "--record: the images are larger than 32 MiB in total" in done.stderr.decode()


def test_runs_that_cannot_be_recorded_are_refused(tmp_path: Path, model: Path) -> None:
    common = ("generate", "-m", str(model), "--record")
    several = run(*common, str(tmp_path / "a"), "--samples", "2", "Hi", expected=2)
    assert "--samples" in several.stderr.decode()
    scripted = run(*common, str(tmp_path / "a"), "--backend", "scripted", "Hi", expected=2)
    assert "only the CPU engine" in scripted.stderr.decode()
    remote = run("generate", "-m", "http://127.0.0.1:9#x", "--record", str(tmp_path / "a"), "Hi", expected=2)
    assert "models on this machine" in remote.stderr.decode()
    assert "no such folder" in run(*common, str(tmp_path / "no" / "a"), "Hi", expected=2).stderr.decode()
    cached = run(*common, str(tmp_path / "a"), "--prompt-cache", str(tmp_path / "b"), "Hi", expected=2)
    assert "cannot be combined with --prompt-cache" in cached.stderr.decode()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.write_text("precious"), "this file has other contents and is not overwritten"),
        (named_pipe, "not a regular file"),
    ],
)
def test_other_files_are_not_overwritten(
    tmp_path: Path, model: Path, make: Callable[[Path], object], problem: str
) -> None:
    path = tmp_path / "x"
    make(path)
    before = path.lstat()
    done = run("generate", "-m", str(model), "--record", str(path), "Hi", expected=2)
    told = f"error: --record: {path}: {problem}\nhint: name a new file"
    assert done.stderr.decode().startswith(told)
    after = path.lstat()  # reading the file may have changed only its time of access
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


@pytest.mark.night
def test_a_recording_is_overwritten(tmp_path: Path, model: Path) -> None:
    before = recorded(tmp_path, model).stat().st_ino
    assert recorded(tmp_path, model).stat().st_ino != before


def test_a_broken_recording_gives_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b'{"format": "llmrun-run", "version": 1}\n')
    done = run("replay", str(path), expected=2)
    assert done.stderr.decode().count("\n") <= 2
    assert "numerics: this field is required" in done.stderr.decode()
