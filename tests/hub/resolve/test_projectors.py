"""Tests of when a run opens a model with its projector, and of which projectors are downloaded, with a local Hub."""

from __future__ import annotations

import dataclasses
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llmrun.base.errors import DoesNotFit, ModelNotFound, UsageError
from llmrun.hub.local.projectors import projector_for
from llmrun.hub.local.safe_writes import SPARE
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.resolve.lockfile import read_lock, write_lock
from llmrun.hub.resolve.model_file import Pull, plan, plan_current, plan_locked, require_room, resolve
from llmrun.hub.resolve.projectors import projector_options, with_projector
from llmrun.hub.transfer.download import download
from llmrun.options.settings import MMPROJ_OFF, Settings
from tests.support.hub.fake_hub import FakeHub, Fault, fake_hub
from tests.support.hub.hub_client import at_hub, settled
from tests.support.hub.model_stores import Stores
from tests.support.vision.projectors import tiny_projector, tiny_text_model

QUIET = Silent()
Usage = namedtuple("Usage", "total used free")


class Notes:
    """A reporter that keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, label: str, done: int, total: int) -> None:
        del label, done, total


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return a text model, its projector in two precisions, and the projector of another model."""
    folder = tmp_path_factory.mktemp("files")
    return {
        "m-Q8_0.gguf": tiny_text_model(folder, "gemma3").read_bytes(),
        "mmproj-m-F16.gguf": tiny_projector(folder, "gemma3").read_bytes(),
        "mmproj-m-Q8_0.gguf": tiny_projector(folder, "gemma3", seed=1).read_bytes(),
        "wide": tiny_projector(folder, "gemma3", text_width=128).read_bytes(),
    }


@pytest.fixture
def hub(stores: Stores, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> Iterator[FakeHub]:
    with fake_hub() as running:
        at_hub(monkeypatch, running.url)
        running.add("o/n", {name: data for name, data in files.items() if name != "wide"})
        running.add("o/text", {"m-Q8_0.gguf": files["m-Q8_0.gguf"]})
        yield running


@pytest.fixture
def model(tmp_path: Path, files: dict[str, bytes]) -> Path:
    """Return a model in a folder with its projector."""
    for name in ("m-Q8_0.gguf", "mmproj-m-F16.gguf"):
        (tmp_path / name).write_bytes(files[name])
    return tmp_path / "m-Q8_0.gguf"


def asked(model: Path, notes: Notes | None = None, *, wanted: bool = False, needed: bool = False, **values: Any) -> str:
    settings = dataclasses.replace(Settings(), **values)
    options = projector_options(
        model, settings, name="the model", wanted=wanted, needed=needed, reporter=notes or QUIET
    )
    return Path(options[0]).name


def test_generate_uses_a_projector_only_for_images(model: Path) -> None:
    assert asked(model) == ""
    assert asked(model, needed=True) == "mmproj-m-F16.gguf"
    assert asked(model, mmproj="mmproj-m-F16.gguf") == "mmproj-m-F16.gguf"


def test_servers_use_the_projector_that_is_there(model: Path) -> None:
    assert asked(model, wanted=True) == "mmproj-m-F16.gguf"
    assert asked(model, wanted=True, mmproj=MMPROJ_OFF) == ""
    model.with_name("mmproj-m-F16.gguf").unlink()
    assert asked(model, wanted=True) == ""


def test_image_tokens_come_from_the_settings(model: Path) -> None:
    settings = Settings(image_min_tokens=64, image_max_tokens=256)
    assert projector_options(model, settings, name="m", wanted=False, reporter=QUIET) == ("", 64, 256)


def test_servers_leave_out_projectors_of_other_models(model: Path, files: dict[str, bytes]) -> None:
    model.with_name("mmproj-m-F16.gguf").write_bytes(files["wide"])
    notes = Notes()
    assert asked(model, notes, wanted=True) == ""
    assert "does not fit the model" in notes.lines[0]


def test_images_without_a_projector_name_what_helps(model: Path) -> None:
    model.with_name("mmproj-m-F16.gguf").unlink()
    with pytest.raises(ModelNotFound, match="the model: no projector") as error:
        asked(model, needed=True)
    assert error.value.hint == "--mmproj FILE names the file of a projector"
    with pytest.raises(UsageError, match="images need the projector"):
        asked(model, needed=True, mmproj=MMPROJ_OFF)


def test_stand_ins_search_for_nothing(tmp_path: Path) -> None:
    assert asked(tmp_path / "none", needed=True, backend="scripted") == ""
    assert asked(tmp_path / "none", backend="scripted", mmproj="any") == "any"


@pytest.mark.push
def test_an_image_gets_the_projector_from_the_models_repository(hub: FakeHub) -> None:
    here = resolve("hf:o/n", reporter=QUIET).path
    assert projector_for(here) is None
    with pytest.raises(ModelNotFound) as offline:
        asked(here, needed=True, offline=True)
    assert "`llmrun pull the model` downloads the projector" in offline.value.hint
    assert asked(here, needed=True) == "mmproj-m-Q8_0.gguf"
    assert asked(here, needed=True, offline=True) == "mmproj-m-Q8_0.gguf"
    text = resolve("hf:o/text", reporter=QUIET).path
    with pytest.raises(ModelNotFound, match="so this model cannot read images"):
        asked(text, needed=True)


def test_a_projector_may_be_named_on_the_hub(hub: FakeHub, model: Path) -> None:
    name = "hf:o/n/mmproj-m-F16.gguf"
    assert asked(model, mmproj=name) == "mmproj-m-F16.gguf"
    assert asked(model, mmproj=name, offline=True) == "mmproj-m-F16.gguf"


def pulled(pull: Pull) -> tuple[Path, Path | None]:
    """Carry out a pull as the command does, and return the model and its projector."""
    here = pull.fetch(QUIET)
    if pull.projector is not None:
        download(pull.projector, QUIET)
    return here, projector_for(here)


@pytest.mark.push
def test_pulling_a_model_gets_its_projector(hub: FakeHub, files: dict[str, bytes]) -> None:
    planned = with_projector(plan("hf:o/n", QUIET, offline=False), QUIET, offline=False)
    here, projector = pulled(planned)
    assert projector is not None
    assert projector.read_bytes() == files["mmproj-m-Q8_0.gguf"]
    assert projector.parent == here.parent
    again = with_projector(plan("hf:o/n", QUIET, offline=False), QUIET, offline=False)
    assert (again.here, again.projector) == (here, None)


@pytest.mark.push
def test_models_that_are_here_get_a_missing_projector(hub: FakeHub) -> None:
    here = resolve("hf:o/n", reporter=QUIET).path
    hub.add("o/n", {"m-Q8_0.gguf": b"GGUF newer", "mmproj-m-F16.gguf": b"GGUF newer"})
    offline = with_projector(plan("hf:o/n", QUIET, offline=True), QUIET, offline=True)
    assert offline.projector is None
    planned = with_projector(plan("hf:o/n", QUIET, offline=False), QUIET, offline=False)
    model, projector = pulled(planned)
    assert model == here
    assert projector == here.with_name("mmproj-m-Q8_0.gguf"), "of the same commit"
    assert plan("hf:o/n", QUIET, offline=True).here == here, "the branch has not moved"


@pytest.mark.push
def test_text_models_that_are_here_are_not_asked_about(hub: FakeHub, stores: Stores) -> None:
    hub.add("o/plain", {"plain-Q8_0.gguf": b"GGUF of text"})
    resolve("hf:o/plain", reporter=QUIET)
    before = len(settled(hub))
    assert with_projector(plan("hf:o/plain", QUIET, offline=False), QUIET, offline=False).projector is None
    assert len(settled(hub)) == before


def test_a_precision_that_is_here_is_kept(hub: FakeHub) -> None:
    resolve("hf:o/n/mmproj-m-F16.gguf", reporter=QUIET)
    planned = with_projector(plan_current("hf:o/n", None, QUIET, offline=False), QUIET, offline=False)
    assert planned.projector is not None
    assert planned.projector.files[0].path == "mmproj-m-F16.gguf"


def test_a_listing_that_fails_costs_only_the_projector(hub: FakeHub) -> None:
    planned = plan("hf:o/n/m-Q8_0.gguf", QUIET, offline=False)
    hub.faults.append(Fault(on="api", status=503, times=9))
    notes = Notes()
    assert with_projector(planned, notes, offline=False) == planned
    assert notes.lines[0].startswith("hf:o/n/m-Q8_0.gguf: no projector was downloaded: ")


def test_several_matching_projectors_are_not_guessed(hub: FakeHub, files: dict[str, bytes]) -> None:
    two = {f"mmproj-{owner}_m-F16.gguf": files["mmproj-m-F16.gguf"] for owner in "ab"}
    hub.add("o/two", {"m-Q8_0.gguf": files["m-Q8_0.gguf"]} | two)
    notes = Notes()
    planned = with_projector(plan("hf:o/two", QUIET, offline=False), notes, offline=False)
    assert planned.projector is None
    assert notes.lines == ["hf:o/two: 2 projectors match; choose one later with --mmproj hf:o/two/mmproj-a_m-F16.gguf"]


@pytest.mark.parametrize(
    "name", ["../mmproj.gguf", "a/../../mmproj.gguf", "mmproj\n.gguf", ".mmproj.gguf", "mmproj:.gguf"]
)
def test_unsafe_names_of_projectors_are_not_downloaded(hub: FakeHub, files: dict[str, bytes], name: str) -> None:
    hub.add("o/unsafe", {"m-Q8_0.gguf": files["m-Q8_0.gguf"], name: files["mmproj-m-F16.gguf"]})
    planned = with_projector(plan("hf:o/unsafe", QUIET, offline=False), QUIET, offline=False)
    assert planned.projector is None


def test_copies_of_other_programs_get_no_projector(hub: FakeHub, stores: Stores, files: dict[str, bytes]) -> None:
    stores.ollama(files["m-Q8_0.gguf"], "m", "1b")
    planned = with_projector(plan("hf:o/n", QUIET, offline=False), QUIET, offline=False)
    assert planned.here is not None
    assert planned.projector is None


def test_a_lock_file_records_the_projector(hub: FakeHub, tmp_path: Path, files: dict[str, bytes]) -> None:
    planned = with_projector(plan_current("hf:o/n", None, QUIET, offline=False), QUIET, offline=False)
    assert planned.projector is not None
    locked = {"hf:o/n": planned.lockable(planned.fetch(QUIET))}
    write_lock(tmp_path / "llmrun.lock", locked)
    read = read_lock(tmp_path / "llmrun.lock")
    assert read["hf:o/n"].projector == planned.projector.files[0]
    hub.add("o/n", {"m-Q8_0.gguf": b"GGUF newer", "mmproj-m-Q8_0.gguf": b"GGUF newer"})
    exact = plan_locked("hf:o/n", read, QUIET, offline=False)
    _, projector = pulled(exact)
    assert projector is not None
    assert projector.read_bytes() == files["mmproj-m-Q8_0.gguf"]


def test_a_locked_projector_must_be_one(tmp_path: Path) -> None:
    text = f"""version = 1
[models."hf:o/n"]
repository = "o/n"
revision = "{1:040x}"
files = [{{ file = "m.gguf", size = 1, sha256 = "{2:064x}" }}]
projector = {{ file = "m-Q4_0.gguf", size = 1, sha256 = "{2:064x}" }}
"""
    path = tmp_path / "llmrun.lock"
    for wrong in (text, text.replace("m-Q4_0.gguf", "../mmproj.gguf"), text.replace("projector = {", "projector = [{")):
        path.write_text(wrong)
        with pytest.raises(UsageError, match=r"llmrun\.lock"):
            read_lock(path)
    path.write_text(text.replace("m-Q4_0.gguf", "mmproj-m-Q4_0.gguf"))
    assert read_lock(path)["hf:o/n"].projector is not None


def test_room_for_the_projector_is_checked_first(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plan("hf:o/n", QUIET, offline=False)
    both = with_projector(model, QUIET, offline=False)
    assert model.pinned is not None
    free = SPARE + model.pinned.size
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free, 0, free))
    require_room([model])
    with pytest.raises(DoesNotFit, match="hf:o/n needs"):
        require_room([both])
    with pytest.raises(DoesNotFit, match="hf:o/n needs"):
        require_room([replace(both, here=Path("/x"))])
