"""Tests of `generate --image`, with a scripted model that answers with the colors that it sees."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.cli.commands import llmrun, on_terminal, scripted
from tests.support.engine.pictures import BLUE, plain, png
from tests.support.vision.projectors import tiny_projector, tiny_text_model

RED_PNG, BLUE_PNG = png(plain(40, 20)), png(plain(20, 20, BLUE))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a folder with two images."""
    (tmp_path / "cat.png").write_bytes(RED_PNG)
    (tmp_path / "dog.png").write_bytes(BLUE_PNG)
    return tmp_path


def seen(
    folder: Path, *arguments: str, stdin: bytes = b"", code: int = 0, env: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Run `generate` with a projector, check the exit code, and return the answer and the notes."""
    done: subprocess.CompletedProcess[bytes] = scripted(
        "--mmproj", "any.gguf", *arguments, stdin=stdin, cwd=folder, env={**os.environ, **(env or {})}
    )
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode().strip(), done.stderr.decode()


@pytest.mark.push
def test_images_come_before_the_prompt_in_their_order(files: Path) -> None:
    answer, notes = seen(files, "--image", "dog.png", "--image", "cat.png", "--stats", "what?")
    assert answer == "You said: [1 row of #0000ff][2 rows of #ff0000]what?"
    assert "  2 images " in notes


@pytest.mark.push
def test_long_images_are_announced_and_stopped(files: Path) -> None:
    """The encoder works in the engine's thread, in tiles of 0.1 s."""
    projector = {"encode_tiles": 600, "tile_seconds": 0.1, "expected_seconds": 60.0}
    (files / "slow.json").write_text(json.dumps(projector))
    images = ("--image", str(files / "cat.png"), "--image", str(files / "dog.png"))
    process = on_terminal(
        "generate", "--backend", "scripted", "--mmproj", str(files / "slow.json"), *images, "what?", NO_COLOR="1"
    )
    process.expect(rb"reading image 1 of 2(: [12]%)?, about 2 min")
    process.sendintr()
    began = time.monotonic()
    rest = process.read().decode()
    process.close()
    assert (process.exitstatus, "Traceback" in rest) == (130, False)
    assert time.monotonic() - began < 30


@pytest.mark.push
def test_verbose_runs_name_the_projector(files: Path) -> None:
    """The file is often chosen by llmrun, for example among several precisions."""
    assert f"projector  {files / 'any.gguf'}\n" in seen(files, "-v", "--image", "cat.png", "what?")[1]


@pytest.mark.push
def test_an_image_can_come_from_a_pipe(files: Path) -> None:
    assert seen(files, "--image", "-", "what?", stdin=RED_PNG)[0] == "You said: [2 rows of #ff0000]what?"
    assert "error: --image -: the image file is empty" in seen(files, "--image", "-", "x", code=2)[1]


@pytest.mark.push
def test_piped_text_follows_the_prompt_beside_images(files: Path) -> None:
    assert seen(files, "--image", "dog.png", "what?", stdin=b"a text")[0].endswith("]what?\n\na text")


@pytest.mark.push
def test_raw_prompts_have_markers_for_images(files: Path) -> None:
    asked = ("--raw", "-n", "5", "--json", "--image", "cat.png")
    body = json.loads(seen(files, *asked, "a <__media__> b")[0])
    assert body["usage"]["prompt_tokens"] > 2
    assert body["timings"]["encoded_images"] == 1
    _, told = seen(files, *asked, "a b", code=2)
    assert "1 image for a raw prompt with 0 markers" in told
    assert "write <__media__> in the prompt" in told


@pytest.mark.push
def test_several_samples_see_the_same_image(files: Path) -> None:
    answer, notes = seen(files, "--image", "dog.png", "--samples", "2", "-0", "what?")
    assert answer.split("\0")[:2] == 2 * ["You said: [1 row of #0000ff]what?"]
    assert "scaled down" not in notes


@pytest.mark.push
def test_scaling_down_is_reported(files: Path) -> None:
    (files / "big.png").write_bytes(png(plain(700, 600)))
    _, notes = seen(files, "--image", "big.png", "what?")
    assert "note: big.png: scaled down from 700x600 to 512x512 pixels for the model (256 tokens)" in notes


@pytest.mark.push
def test_the_log_names_the_images(files: Path) -> None:
    data = {"LLMRUN_DATA_DIR": str(files / "data")}
    seen(files, "--log", "--image", "cat.png", "what?", env=data)
    [line] = (files / "data" / "logs" / "answers.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["prompt"], [image["name"] for image in entry["images"]]) == ("what?", ["cat.png"])
    assert len(line) < 5000
    shown = llmrun("logs", "--full", env={**os.environ, **data}).stdout.decode()
    assert "image: cat.png\n> what?\n" in shown


@pytest.mark.night
def test_the_cpu_engine_reads_images(files: Path) -> None:
    """Single runs with any number of threads and batches give the same answer, and name the engine."""
    model, mmproj = tiny_text_model(files, "gemma3"), tiny_projector(files, "gemma3")
    common = ("-m", str(model), "--mmproj", str(mmproj), "--backend", "cpu", "-n", "8", "--temp", "0")
    bodies = []
    for threads in ("1", "2"):
        images = ("--image", "cat.png", "--image", "dog.png")
        asked = ("generate", *common, "-t", threads, "--json", "--logprobs", "1", *images, "what?")
        done = llmrun(*asked, cwd=files)
        assert done.returncode == 0, done.stderr.decode()
        bodies.append(json.loads(done.stdout))
        assert (bodies[-1]["run"]["backend"], bodies[-1]["timings"]["encoded_images"]) == ("cpu", 2)
    assert bodies[0]["choices"] == bodies[1]["choices"]
    line = {"prompt": "what?", "images": ["cat.png", "dog.png"]}
    (files / "in.jsonl").write_text("".join(json.dumps({**line, "custom_id": each}) + "\n" for each in "abc"))
    done = llmrun("batch", "in.jsonl", "-o", "out.jsonl", *common, "--image-dir", ".", cwd=files)
    assert done.returncode == 0, done.stderr.decode()
    for answer in (files / "out.jsonl").read_text().splitlines():
        [choice] = json.loads(answer)["response"]["body"]["choices"]
        assert choice["message"]["content"] == bodies[0]["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--image", "cow.png", "x"), "--image: cow.png: No such file"),
        (("--image", ".", "x"), "--image: .: Is a directory"),
        (("--image", "cat.png", "--suffix", "b", "a"), "--image: cannot be combined with --suffix"),
        (("--image", "-", "-"), "standard input can be read only once"),
        (("--image", "-", "--no-stdin", "x"), "cannot be combined with --no-stdin"),
        (("--image", "cat.png"), "the prompt is empty"),
    ],
)
@pytest.mark.push
def test_wrong_uses_are_usage_errors(files: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in seen(files, *arguments, code=2)[1]


@pytest.mark.push
def test_a_model_without_a_projector_refuses_images(files: Path) -> None:
    done = scripted("--image", "cat.png", "what?", cwd=files)
    assert done.returncode != 0
    assert b"images cannot be read: " in done.stderr


@pytest.mark.push
def test_a_name_in_the_prompt_is_text_with_a_note(files: Path) -> None:
    """ollama/ollama#7804: a path in the prompt was silently sent as text."""
    answer, notes = seen(files, "what is in ./cat.png?")
    assert answer == "You said: what is in ./cat.png?"
    assert "note: ./cat.png is text in the prompt; --image ./cat.png shows the image to the model" in notes
    assert "--image" not in seen(files, "what is it?", stdin=b"./cat.png")[1]
