"""Tests of what the commands that manage models say about projectors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli.commands import run
from tests.support.hub.fake_hub import FakeHub, fake_hub
from tests.support.hub.hub_client import at_hub
from tests.support.hub.model_stores import Stores
from tests.support.vision.projectors import tiny_projector, tiny_text_model

pytestmark = pytest.mark.push

NAMES = "sees-F32.gguf", "mmproj-sees-F32.gguf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model in a folder with its projector."""
    projector = tiny_projector(tmp_path, "gemma3").rename(tmp_path / NAMES[1])
    os.utime(projector, (1, 1))
    return tiny_text_model(tmp_path, "gemma3").rename(tmp_path / NAMES[0])


@pytest.fixture
def hub(stores: Stores, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        at_hub(monkeypatch, running.url)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.add("o/n", {name: model.with_name(name).read_bytes() for name in NAMES})
        yield running


def section(text: str, title: str) -> dict[str, str]:
    """Return the fields of a section of `llmrun show`."""
    lines = text.partition(f"\n{title}\n")[2].partition("\n\n")[0].splitlines()
    fields = [line.strip().partition("  ") for line in lines]
    return {label: value.strip() for label, _, value in fields}


def test_show_says_what_the_model_sees(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(model.parent))  # without speeds, as on a new machine
    assert section(run("show", str(model))[0], "Vision") == {
        "path": str(model.with_name(NAMES[1])),
        "projector": "gemma3, F32, 1.53 MB",
        "resolution": "896 x 896 pixels",
        "sample photo": "1,024 x 768 pixels: 256 tokens, seen in 896 x 896",
    }
    vision = json.loads(run("show", str(model), "--json")[0])["vision"]
    sample = {"width": 1024, "height": 768, "tokens": 256, "encode_s": None}
    assert (vision["family"], vision["sample"]) == ("gemma3", sample)
    assert section(run("show", str(model.with_name(NAMES[1])))[0], "Vision")["projector"] == "gemma3, F32, 1.53 MB"
    model.with_name(NAMES[1]).unlink()
    assert json.loads(run("show", str(model), "--json")[0])["vision"] is None


def test_show_says_why_a_projector_is_not_used(model: Path) -> None:
    tiny_projector(model.parent, "gemma3", text_width=128).rename(model.with_name(NAMES[1]))
    assert "does not fit the model" in section(run("show", str(model))[0], "Vision")["problem"]


def test_fit_adds_the_projector(model: Path) -> None:
    (with_projector,) = json.loads(run("fit", str(model), "--json")[0])["models"][0]["quantizations"]
    model.with_name(NAMES[1]).rename(model.with_name("hidden"))
    (without,) = json.loads(run("fit", str(model), "--json")[0])["models"][0]["quantizations"]
    added = with_projector["memory_of_vision"]
    assert added > 1_500_000
    assert with_projector["memory_needed"] - without["memory_needed"] == added
    assert without["memory_of_vision"] == 0


def test_pull_says_what_images_need(hub: FakeHub, model: Path) -> None:
    size, more = (f"{model.with_name(name).stat().st_size:,}" for name in NAMES)
    planned = run("pull", "--dry-run", "hf:o/n", "-v")
    assert planned[0] == f"hf:o/n  610 kB  hf:o/n/{NAMES[0]}  1.53 MB more for images: {NAMES[1]}\n"
    assert f"  {NAMES[0]}  {size} bytes" in planned[1]
    assert f"  {NAMES[1]}  {more} bytes" in planned[1]
    out, err = run("pull", "hf:o/n")
    here = Path(out.strip())
    assert here.name == NAMES[0]
    assert here.with_name(NAMES[1]).exists()
    assert "\nhf:o/n (projector)  1.53 MB in " in err
    assert run("pull", "hf:o/n")[1] == "hf:o/n  already here\n"
    body = json.loads(run("pull", "hf:o/n", "--json", "--revision", "main")[0])
    assert body["projector"]["path"] == str(here.with_name(NAMES[1]))
    assert body["projector"]["file"] == NAMES[1]


def test_pull_leaves_out_the_projector_on_request(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(run("pull", "hf:o/n", "--no-mmproj")[0].strip())
    assert not here.with_name(NAMES[1]).exists()
    assert run("list")[0].splitlines()[1].split()[:5] == ["hf:o/n:F32", "610", "kB", "F32", "gemma3"]
    monkeypatch.setenv("LLMRUN_MMPROJ", "off")
    run("pull", "hf:o/n")
    assert not here.with_name(NAMES[1]).exists()
    monkeypatch.delenv("LLMRUN_MMPROJ")
    assert f"already here  1.53 MB more for images: {NAMES[1]}" in run("pull", "hf:o/n")[1]
    assert here.with_name(NAMES[1]).exists()
    assert run("list")[0].splitlines()[1].split()[:6] == ["hf:o/n:F32", "610", "kB", "F32", "gemma3,", "vision"]
    assert json.loads(run("list", "--json")[0])["models"][0]["projectors"] == [str(here.with_name(NAMES[1]))]
    assert "hf:o/n:F32: removed, freeing 2.14 MB" in run("rm", "hf:o/n:F32")[0]


def test_fit_knows_as_much_about_projectors_on_the_hub(hub: FakeHub, model: Path) -> None:
    (here,) = json.loads(run("fit", str(model), "--json")[0])["models"][0]["quantizations"]
    (there,) = json.loads(run("fit", "hf:o/n", "--json")[0])["models"][0]["quantizations"]
    assert there["memory_of_vision"] == here["memory_of_vision"] > model.with_name(NAMES[1]).stat().st_size
    assert there["photo_s"] == here["photo_s"] > 0


def test_show_knows_as_much_about_projectors_on_the_hub(hub: FakeHub, model: Path) -> None:
    (fit,) = json.loads(run("fit", str(model), "--json")[0])["models"][0]["quantizations"]
    here, there = (json.loads(run("show", name, "--json")[0])["vision"] for name in (str(model), "hf:o/n"))
    assert there.pop("path") == NAMES[1]
    assert here.pop("path") == str(model.with_name(NAMES[1]))
    assert there == here
    assert here["sample"]["encode_s"] == fit["photo_s"]
    words = section(run("show", "hf:o/n")[0], "Vision")["sample photo"]
    assert "256 tokens, seen in 896 x 896, encoded in " in words


def test_fit_shows_the_time_of_a_photo(model: Path) -> None:
    head, row = run("fit", str(model))[0].splitlines()[-2:]
    assert "PHOTO" in head
    model.with_name(NAMES[1]).unlink()
    assert "PHOTO" not in run("fit", str(model))[0]
    assert row


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right on Windows")
def test_import_takes_flags_for_the_projector(stores: Stores, model: Path) -> None:
    run("import", str(model), "mine", "--no-mmproj")
    assert not (stores.models / "mine.mmproj-F32.gguf").is_symlink()
    run("import", str(model), "mine", "--mmproj", NAMES[1])
    assert (stores.models / "mine.mmproj-F32.gguf").is_symlink()
    _, err = run("import", str(model), "mine", "--mmproj", NAMES[1], "--no-mmproj", code=2)
    assert err == "error: --no-mmproj: cannot be combined with --mmproj\n"
    _, err = run("rm", "mine")
    assert err == f"note: mine: only links are removed; {model} and {model.with_name(NAMES[1])} are kept\n"


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_flags_of_projectors_are_checked(command: str, model: Path) -> None:
    _, err = run(command, "-m", str(model), "--mmproj", NAMES[1], "--no-mmproj", code=2)
    assert err == "error: --no-mmproj: cannot be combined with --mmproj\n"
    _, err = run(command, "-m", str(model), "--image-max-tokens", "0", code=2)
    assert "--image-max-tokens: 0 is not an integer of at least 1" in err


def test_models_on_servers_have_their_own_projectors() -> None:
    for flags in (["--mmproj", "x"], ["--no-mmproj"], ["--image-min-tokens", "7"]):
        _, err = run("generate", "-m", "http://127.0.0.1:1", *flags, "Hello", code=2)
        assert err.startswith(f"error: {flags[0]}: not supported for models on a server")
