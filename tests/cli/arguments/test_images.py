"""Tests of reading the images that users name, and of recognizing their paths."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.images import (
    GivenImage,
    dropped_images,
    has_image_suffix,
    is_image_file,
    read_image,
    read_images,
    tell_of_image,
    tell_of_images,
    tell_of_paths_in_text,
    typed_path,
    unescaped,
)
from llmrun.formats.images.header import MOST_IMAGES, ImageHeader
from llmrun.model.vision.layout import ImageLayout, Rows
from tests.support.engine.pictures import plain, png

if TYPE_CHECKING:
    from llmrun.model.vision.layout import Projector

Capture = pytest.CaptureFixture[str]
posix = pytest.mark.skipif(os.name == "nt", reason="needs the quotes of POSIX shells")


def picture(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(png(plain(3, 2)))
    return path


def test_an_image_is_read_with_its_header(tmp_path: Path) -> None:
    image = read_image(str(picture(tmp_path, "cat.png")), "--image")
    assert (image.name, image.header.width, image.header.height) == ("cat.png", 3, 2)
    assert len(image.sha256) == 64


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.png", "--image: missing.png: No such file"),
        ("", "--image: no file given"),
        (".", "--image: .: Is a directory"),
        ("notes.txt", "not an image"),
        ("empty.png", "the image file is empty"),
        ("https://example.org/cat.png", "not from the network"),
        ("a\0b.png", "not a path"),
    ],
)
@posix
def test_a_wrong_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("hello")
    Path("empty.png").touch()
    with pytest.raises(UsageError) as refused:
        read_image(name, "--image")
    assert said in str(refused.value)


def test_an_unreadable_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr("builtins.open", refuse)  # root could read every file
    with pytest.raises(UsageError, match="Permission denied"):
        read_image("secret.png", "--image")


def test_too_many_images_are_refused_before_reading() -> None:
    with pytest.raises(UsageError, match="too many images: 33"):
        read_images(["no-such-file.png"] * (MOST_IMAGES + 1))
    with pytest.raises(UsageError, match="only once"):
        read_images(["-", "-"])


@pytest.mark.parametrize(
    "written",
    [
        "{folder}/my cat.png",
        "  {folder}/my cat.png \n",
        "'{folder}/my cat.png'",
        '"{folder}/my cat.png" ',
        "{folder}/my\\ cat.png",
        "file://{folder}/my%20cat.png",
        "file://localhost{folder}/my%20cat.png",
        "~/my cat.png",
        "'{folder}/my cat.png' {folder}/my\\ cat.png",
        "{folder}/my cat.png\n{folder}/my cat.png\n",
    ],
)
@posix
def test_dropped_paths_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = picture(tmp_path, "my cat.png")
    assert set(dropped_images(written.format(folder=tmp_path))) == {str(path)}


@pytest.mark.parametrize(
    "written",
    [
        "",
        "my cat.png",
        "{folder}/missing.png",
        "{folder}",
        "{folder}/notes.png",
        "{folder}/my cat.png is what I mean",
        "see {folder}/my cat.png",
        "file://elsewhere{folder}/my%20cat.png",
        "'{folder}/my cat.png' and",
        "{folder}/my cat.png\n{folder}/missing.png",
        "/" + "x" * 40_000,
        "/a\0b",
        "/dev/zero",
    ],
)
@posix
def test_other_pasted_texts_stay_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path, "my cat.png")
    Path("notes.png").write_text("not an image")
    assert dropped_images(written.format(folder=tmp_path)) == []


@posix
def test_texts_do_not_reach_servers(tmp_path: Path, capsys: Capture) -> None:
    """Windows logs in to the server of a path such as //server/cat.png; here, the path leads to a file."""
    path = f"/{picture(tmp_path, 'cat.png')}"
    assert dropped_images(path) == []
    assert not is_image_file(path)
    tell_of_paths_in_text(f"See {path}", "--image")
    assert capsys.readouterr().err == ""
    assert read_image(path).name == "cat.png"


def test_named_pipes_are_not_opened(tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer."""
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    os.mkfifo(tmp_path / "pipe.png")
    assert dropped_images(str(tmp_path / "pipe.png")) == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("what is ~/cat.png", "~/cat.png"),
        ("./a\\ b.png", "./a\\ b.png"),
        ("see '/tmp/a b.png'", "'/tmp/a b.png'"),
        ("see cat.png", ""),
        ("/tmp/a.png is", ""),
        ("1/2", ""),
        ("", ""),
    ],
)
@posix
def test_the_typed_path_before_the_cursor_is_found(text: str, path: str) -> None:
    assert typed_path(text) == path


@posix
def test_paths_are_unescaped_as_in_a_shell() -> None:
    assert [unescaped(word) for word in ("./a\\ b.png", "'/x y'", "/it's")] == ["./a b.png", "/x y", "/it's"]


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("what is in cat.png?", ["cat.png is text in the prompt; --image cat.png shows the image to the model"]),
        ("(./cat.png)", ["./cat.png is text in the prompt; --image ./cat.png shows"]),
        ("what is in ./dog.png", ["./dog.png is text in the prompt, because there is no such file"]),
        ("./dog.png or cat.png", ["./dog.png is", "cat.png is"]),
        ("how do I write a .png file? See dog.png", []),
        ("why is the sky blue?", []),
        ("cat.png " + 1000 * "x", []),
    ],
)
@posix
def test_names_of_images_in_a_prompt_get_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, text: str, notes: list[str]
) -> None:
    """ollama/ollama#7804, #10333 and #15711 report paths that were silently sent as text."""
    monkeypatch.chdir(tmp_path)
    picture(tmp_path, "cat.png")
    tell_of_paths_in_text(text, "--image")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(notes)
    assert all(note in line for note, line in zip(notes, told, strict=True))


def test_every_loss_of_detail_is_reported(capsys: Capture) -> None:
    """lmstudio-ai/lmstudio-bug-tracker#941, #990 and #880 report images that were silently scaled down."""
    layout = ImageLayout((Rows(0, 256, 16, 16),), (), 512, 512)

    def told(header: ImageHeader) -> str:
        tell_of_image(GivenImage("a.gif", b"", "", header), layout)
        return capsys.readouterr().err

    assert "a.gif: scaled down from 1024x768 to 512x512 pixels for the model (256 tokens)" in told(
        ImageHeader("GIF", 1024, 768)
    )
    assert "sees only its first frame" in told(ImageHeader("GIF", 40, 40, animated=True))
    assert told(ImageHeader("GIF", 512, 300)) == ""
    assert told(ImageHeader("GIF", 520, 500)) == "", "sizes are rounded to multiples of a patch"
    assert "scaled down from 520x512 to 512x512" in told(ImageHeader("GIF", 520, 512))
    assert "scaled down from 600x100 to 512x512" in told(ImageHeader("GIF", 600, 100))
    one = ImageLayout((Rows(0, 1, 1, 1),), (), 32, 32)
    tell_of_image(GivenImage("a.gif", b"", "", ImageHeader("GIF", 1024, 768)), one)
    assert "(1 token)" in capsys.readouterr().err


def test_images_that_a_model_cannot_see_are_named() -> None:
    class Narrow:
        def layout(self, width: int, height: int) -> ImageLayout:
            raise UsageError("the image is too narrow", hint="crop the image")

    image = GivenImage("strip.png", b"", "", ImageHeader("PNG", 16000, 4))
    with pytest.raises(UsageError, match=r"^--image: strip\.png: the image is too narrow") as refused:
        tell_of_images([image], cast("Projector", Narrow()))
    assert refused.value.hint == "crop the image"


def test_image_suffixes_are_known() -> None:
    assert all(map(has_image_suffix, ("a.JPG", "a.jpeg", "a.webp", "a.heic")))
    assert not any(map(has_image_suffix, ("a.txt", "png", "a.png.txt")))
