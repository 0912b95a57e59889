"""Tests of background engines that read images, as processes with a tiny model and the real commands."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

from tests.serving.background.test_same_bytes import killed_after
from tests.support.background import BackgroundHome, background_home
from tests.support.engine.pictures import BLUE, RED, plain, png
from tests.support.vision.projectors import tiny_projector, tiny_text_model

pytestmark = pytest.mark.push

NAME = "qwen3vl_merger"


class Place(NamedTuple):
    """A home, and a folder with a model, its projector and two images."""

    home: BackgroundHome
    folder: Path

    def asked(self, *arguments: str) -> dict[str, Any]:
        """Run `generate --json`, and return its output."""
        common = ("generate", "--json", "-v", "--seed", "3", "-n", "6", "-m", str(self.folder / "model.gguf"))
        done = self.home.llmrun(*common, *arguments, cwd=self.folder)
        assert done.returncode == 0, done.stderr.decode()
        return {**json.loads(done.stdout), "notes": done.stderr.decode()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    tiny_text_model(made, NAME).rename(made / "model.gguf")
    tiny_projector(made, NAME).rename(made / "mmproj-model.gguf")
    for name, color in (("red", RED), ("blue", BLUE)):
        (made / f"{name}.png").write_bytes(png(plain(90, 60, color)))
    return made


@pytest.fixture
def place(tmp_path: Path, folder: Path) -> Iterator[Place]:
    with background_home(tmp_path / "home") as made:
        yield Place(made, folder)


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


def test_a_second_question_about_an_image_encodes_nothing(place: Place) -> None:
    first = place.asked("--image", "red.png", "what?")
    again = place.asked("--image", "red.png", "and what else?")
    other = place.asked("--image", "blue.png", "and what else?")
    assert [each["run"]["warm"] for each in (first, again, other)] == [False, True, True]
    assert [each["timings"]["encoded_images"] for each in (first, again, other)] == [1, 0, 1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for warm, image in ((again, "red.png"), (other, "blue.png")):
        cold = place.asked("--no-warm", "--image", image, "and what else?")
        assert text_of(cold) == text_of(warm) != ""


def test_texts_and_images_share_one_engine(place: Place) -> None:
    """The engine without a projector leaves, so that the model is in memory once."""
    place.asked("hello")
    before = place.home.engine()
    place.asked("--image", "red.png", "what?")
    psutil.wait_procs([before], 30)
    engine = place.home.engine()
    assert engine.pid != before.pid
    text = place.asked("hello")
    assert text["run"]["warm"]
    assert f"joined the background engine {engine.pid}" in text["notes"]
    assert text_of(text) == text_of(place.asked("--no-warm", "hello"))


@pytest.mark.night
def test_a_chat_that_gets_an_image_keeps_one_engine(place: Place) -> None:
    model = str(place.folder / "model.gguf")
    lines = b"hello\n/image red.png\nwhat?\nand now?\n"
    shown = []
    for kind in ("--keep-alive=10m", "--no-warm"):
        done = place.home.llmrun("chat", kind, "--seed", "3", "-n", "6", model, stdin=lines, cwd=place.folder)
        assert done.returncode == 0, done.stderr.decode()
        shown.append(done.stdout)
    assert shown[0] == shown[1] != b""
    assert len(place.home.engines()) == 1


def test_an_engine_that_is_killed_leaves_no_encoder(place: Place) -> None:
    place.asked("--image", "red.png", "what?")
    engine = place.home.engine()
    children = engine.children(recursive=True)
    assert len(children) > 1  # the encoder, and the process that renders templates
    [shown] = json.loads(place.home.llmrun("ps", "--json").stdout)["engines"]
    assert shown["memory_bytes"] > engine.memory_info().rss
    engine.kill()
    psutil.wait_procs([engine, *children], 30)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert place.asked("--image", "red.png", "what?")["timings"]["encoded_images"] == 1


@pytest.mark.night
def test_kill_9_changes_no_byte_about_an_image(place: Place) -> None:
    """The moments are spread over the load, the encoding, the prefill and the decode."""
    files = ("-m", str(place.folder / "model.gguf"), "--image", str(place.folder / "red.png"))
    words = [*files, "-n", "400", "--temp", "3", "--seed", "7", "what?"]
    began = time.monotonic()
    expected = place.home.llmrun("generate", *words).stdout
    whole = time.monotonic() - began
    place.home.kill()
    for moment in range(12):
        assert killed_after(place.home, whole * (moment + 0.5) / 12, *words)[0] == expected != b""


@pytest.mark.night
def test_another_projector_needs_another_engine(place: Place, tmp_path: Path) -> None:
    """The engine leaves when the file of the projector changes."""
    projector = place.folder / "mmproj-model.gguf"
    place.asked("--image", "red.png", "what?")
    before = place.home.engine()
    copied = tmp_path / "copied.gguf"
    copied.write_bytes(projector.read_bytes())
    copied.replace(projector)
    body = place.asked("--image", "red.png", "what?")
    assert (body["run"]["warm"], body["timings"]["encoded_images"]) == (False, 1)
    psutil.wait_procs([before], 30)
    assert place.home.engine().pid != before.pid


def test_broken_images_are_the_same_error_as_without_an_engine(place: Place) -> None:
    data = bytearray((place.folder / "red.png").read_bytes())
    data[60] ^= 255
    (place.folder / "broken.png").write_bytes(data)
    shown = []
    for kind in ("--keep-alive=10m", "--no-warm"):
        common = ("generate", kind, "-m", str(place.folder / "model.gguf"), "--image", "broken.png", "what?")
        done = place.home.llmrun(*common, cwd=place.folder)
        shown.append((done.returncode, done.stdout, done.stderr))
    assert shown[0] == shown[1]
    assert b"error: image 1" in shown[0][2]
