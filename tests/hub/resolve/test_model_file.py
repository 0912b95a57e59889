"""Tests of paths, names, trying a model's sources in order, and the message when none is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmrun
from llmrun.base.errors import (
    DoesNotFit,
    IntegrityError,
    LlmrunError,
    ModelFileError,
    ModelNotFound,
    NetworkError,
)
from llmrun.hub.catalog import Wanted
from llmrun.hub.names import Artifact, Expected, HeldSource, HubSource, PypiSource, RemoteFile, UrlSource
from llmrun.hub.progress_reporter import Reporter, Silent
from llmrun.hub.resolve.model_file import LocalPath, ResolvedModel, refuse_if_offline, resolve, understand
from llmrun.hub.resolve.offers import Sources, fetch
from tests.support.hub.fake_hub import MODEL, SHA256, FakeHub, fake_hub
from tests.support.hub.hub_client import at_hub, settled

ROOT = Path(llmrun.__file__).resolve().parents[1]
HUB = HubSource("o/n", "m-Q8_0.gguf")
WHEEL = PypiSource("pack", "1.0", 100)
KNOWN = Expected("m-Q8_0.gguf", len(MODEL), SHA256)
CATALOGUE = f"""
[models."tiny:1b"]
description = "a model made for a test"
license = "MIT"
parameters = 1
repository = "o/n"
default = "Q8_0"
quants.Q8_0 = {{ file = "m-Q8_0.gguf", size = {len(MODEL)}, sha256 = "{SHA256}", pypi = "pack==1", wheel_bytes = 9 }}
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a machine whose folders this process uses, and return its root."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.toml").touch()
    (tmp_path / "models.toml").write_text(CATALOGUE)
    return tmp_path


@pytest.fixture
def hub(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        at_hub(monkeypatch, running.url)
        running.add("o/n", {"m-Q8_0.gguf": MODEL})
        yield running


class Heard(Silent):
    """A reporter that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my.gguf", "MY.GGUF", "with space.gguf"])
def test_a_path_is_the_file_itself(machine: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(machine)
    Path(name).write_bytes(b"GGUF")
    assert resolve(name, reporter=Silent()) == ResolvedModel(Path(name), Path(name).stem, None)
    assert resolve(f"./{name}", reporter=Silent()).path.samefile(name)
    assert resolve(str(machine / name), reporter=Silent()).path == machine / name


def test_a_path_with_another_ending_is_a_file_too(machine: Path) -> None:
    (machine / "blob").write_bytes(b"GGUF")
    assert resolve(str(machine / "blob"), reporter=Silent()).path == machine / "blob"


def test_a_path_may_begin_at_home(machine: Path) -> None:
    (machine / "my.gguf").write_bytes(b"GGUF")
    assert resolve("~/my.gguf", reporter=Silent()).path == machine / "my.gguf"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.gguf", "no such file"),
        ("./missing", "no such file"),
        ("~nobody-of-that-name/x.gguf", "no such file"),
        ("/", "is a folder, not a file"),
        ("a" * 3000 + ".gguf", "name too long"),
        ("nul\0.gguf", ""),
    ],
)
def test_a_path_to_nothing_is_not_found(machine: Path, name: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve(name, reporter=Silent())
    assert said in str(caught.value).lower()
    assert "\0" not in str(caught.value)
    assert caught.value.hint


def test_the_folder_of_a_checkpoint_can_be_converted(machine: Path) -> None:
    folder = machine / "Qwen3-4B-AWQ"
    folder.mkdir()
    (folder / "config.json").touch()
    with pytest.raises(ModelNotFound) as caught:
        resolve(str(folder), reporter=Silent())
    assert caught.value.hint == f"convert the checkpoint first: llmrun convert {folder} OUT.gguf"


@pytest.mark.parametrize(
    ("name", "said"),
    [("/dev/null", "a device"), ("pipe", "a named pipe"), ("loop", "a symbolic link that leads to itself")],
)
def test_a_path_to_no_regular_file_says_what_is_there(machine: Path, name: str, said: str) -> None:
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    os.mkfifo(machine / "pipe")
    (machine / "loop").symlink_to(machine / "loop")
    path = str(machine / name)
    with pytest.raises(LlmrunError) as caught:
        resolve(path, reporter=Silent())
    assert type(caught.value) is (ModelNotFound if name == "loop" else ModelFileError)
    assert str(caught.value).startswith(f"model: {path!r}: ")
    assert str(caught.value).endswith(said)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Qwen/Qwen3-4B-GGUF", "did you mean hf:Qwen/Qwen3-4B-GGUF?"),
        ("Qwen/Qwen3-4B-GGUF:Q8_0", "did you mean hf:Qwen/Qwen3-4B-GGUF:Q8_0?"),
        ("Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q8_0.gguf", "did you mean hf:Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q8_0.gguf?"),
        ("here/Qwen3-4B-GGUF", "check the path"),
        ("../Qwen/Qwen3-4B-GGUF", "check the path"),
        ("/Qwen/Qwen3-4B-GGUF", "check the path"),
        ("Qwen/Qwen3 4B\n", "check the path"),
        ("m.gguf", "check the path"),
    ],
)
def test_a_repository_that_is_no_path_is_suggested_as_one(
    machine: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    (machine / "here").mkdir()
    monkeypatch.chdir(machine)
    with pytest.raises(ModelNotFound, match="no such file") as caught:
        resolve(name, reporter=Silent())
    assert caught.value.hint.startswith(hint)


def test_a_file_without_the_ending_needs_a_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(machine)
    Path("weights").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound) as caught:
        resolve("weights", reporter=Silent())
    assert "./weights" in caught.value.hint


@pytest.mark.push
@given(st.text(max_size=40))
def test_any_other_text_is_not_found_in_one_line(name: str) -> None:
    meant: object = None
    try:
        meant = understand(name)
    except LlmrunError:
        meant = None
    if isinstance(meant, Wanted) or (isinstance(meant, LocalPath) and Path(name.replace("\0", "")).exists()):
        return
    with pytest.raises(LlmrunError) as caught:
        resolve(name, offline=True, reporter=Silent())
    assert str(caught.value).isprintable()


# --- stored models and offline mode -----------------------------------------------------------------------------------


@pytest.mark.push
def test_a_model_that_is_here_costs_no_network_and_no_heavy_import(machine: Path) -> None:
    repository = machine / "hf" / "hub" / "models--o--n"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "blobs" / SHA256).write_bytes(MODEL)
    (snapshot / "m-Q8_0.gguf").symlink_to(f"../../blobs/{SHA256}")
    code = """
import json, sys
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.resolve.model_file import resolve
found = resolve("tiny:1b", reporter=Silent())
print(json.dumps([str(found.path), found.name, found.entry.name, sorted(sys.modules)]))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}

    def run() -> list[object]:
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        assert done.stderr == b""
        found: list[object] = json.loads(done.stdout)
        return found

    path, name, entry, _ = run()  # hashed once
    assert (path, name, entry) == (str(snapshot / "m-Q8_0.gguf"), "tiny:1b", "tiny:1b")
    *_, modules = run()
    heavy = {"huggingface_hub", "httpx2", "filelock", "numpy", "ssl", "asyncio", "subprocess", "difflib"}
    assert isinstance(modules, list)
    assert not heavy & set(modules)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", None])
def test_offline_and_not_here_is_said_with_the_size(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, machine: Path, variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv(variable, "true")
    with pytest.raises(NetworkError, match=rf"tiny:1b\S*: not on this machine \({len(MODEL):,} bytes") as caught:
        resolve("tiny:1b", offline=variable is None, reporter=Silent())
    assert "offline" in caught.value.hint.lower()
    assert settled(hub) == []
    assert not (machine / "data" / "models").exists()


def test_offline_says_no_size_that_nobody_knows() -> None:
    with pytest.raises(NetworkError, match=r"^hf:o/n: not on this machine, and offline mode is on$"):
        refuse_if_offline(Wanted("hf:o/n", (HubSource("o/n"),)), offline=True)
    with pytest.raises(NetworkError, match=r"^x: not on this machine, and"):
        refuse_if_offline(Wanted("x", (HUB,), (KNOWN, Expected("second"))), offline=True)


@pytest.mark.parametrize("value", ["", "0", "no", "false"])
def test_the_hubs_own_switch_is_read_as_the_hub_reads_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    refuse_if_offline(Wanted("x", (HUB,)), offline=False)


# --- sources ----------------------------------------------------------------------------------------------------------


class Downloads:
    """A stand-in for download.download, which raises the given errors in turn and then returns a path."""

    def __init__(self, *failures: LlmrunError) -> None:
        self.failures = list(failures)
        self.asked: list[Artifact] = []

    def __call__(self, artifact: Artifact, reporter: Reporter) -> Path:
        del reporter
        self.asked.append(artifact)
        if self.failures:
            raise self.failures.pop(0)
        return Path("/models") / artifact.files[0].path


def fetched(monkeypatch: pytest.MonkeyPatch, wanted: Wanted, *failures: LlmrunError) -> tuple[Path, Downloads, Heard]:
    from llmrun.hub.transfer import download

    downloads, heard = Downloads(*failures), Heard()
    monkeypatch.setattr(download, "download", downloads)
    return fetch(Sources(wanted, heard), heard), downloads, heard


def test_the_first_source_that_answers_is_taken(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path, downloads, heard = fetched(monkeypatch, Wanted("tiny", (HUB, WHEEL), (KNOWN,)))
    assert path == Path("/models/m-Q8_0.gguf")
    (artifact,) = downloads.asked
    assert (artifact.name, artifact.source, artifact.commit) == ("tiny", HUB, hub.repositories["o/n"].commit)
    assert artifact.files == (RemoteFile("m-Q8_0.gguf", len(MODEL), SHA256),)
    assert heard.notes == []


def test_a_source_that_fails_is_a_note_and_the_next_one_is_tried(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Wanted("tiny", (HubSource("o/away", "m.gguf"), HUB, WHEEL), (KNOWN,))
    _, downloads, heard = fetched(monkeypatch, wanted, IntegrityError("wrong bytes"))
    assert [str(artifact.source) for artifact in downloads.asked] == ["hf:o/n/m-Q8_0.gguf", "pypi:pack==1.0"]
    assert downloads.asked[1].files == (RemoteFile("m-Q8_0.gguf", len(MODEL), SHA256),)
    assert heard.notes == [
        "hf:o/away/m.gguf: no such repository, or a private one (HTTP 401); trying hf:o/n/m-Q8_0.gguf",
        "hf:o/n/m-Q8_0.gguf: wrong bytes; trying pypi:pack==1.0",
    ]


@pytest.mark.parametrize(
    ("failures", "kind"),
    [
        ((NetworkError("a"), NetworkError("b")), NetworkError),
        ((NetworkError("a"), ModelNotFound("b")), NetworkError),
        ((ModelNotFound("a"), ModelNotFound("b")), ModelNotFound),
        ((NetworkError("a"), IntegrityError("b")), IntegrityError),
        ((DoesNotFit("a"), IntegrityError("b")), DoesNotFit),
        ((LlmrunError("a"), NetworkError("b")), LlmrunError),
    ],
)
def test_when_none_is_left_one_error_has_them_all(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, failures: tuple[LlmrunError, ...], kind: type[LlmrunError]
) -> None:
    with pytest.raises(LlmrunError) as caught:
        fetched(monkeypatch, Wanted("tiny", (HUB, WHEEL), (KNOWN,)), *failures)
    assert type(caught.value) is kind
    assert str(caught.value) == "tiny: not downloaded: hf:o/n/m-Q8_0.gguf: a; pypi:pack==1.0: b"
    assert "download the file yourself" in caught.value.hint


def test_the_hint_is_the_first_one_that_a_source_gave(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = (NetworkError("a"), NetworkError("b", hint="do this"))
    with pytest.raises(NetworkError) as caught:
        fetched(monkeypatch, Wanted("tiny", (HUB, WHEEL), (KNOWN,)), *failures)
    assert caught.value.hint == "do this"


def test_a_name_that_is_its_own_source_is_said_once(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match=r"^hf:o/n:Q2_K: the repository has no Q2_K$") as caught:
        resolve("hf:o/n:Q2_K", reporter=Silent())
    assert caught.value.hint == "available: Q8_0"


def test_the_source_of_an_offer_is_asked_once(hub: FakeHub) -> None:
    sources = Sources(Wanted("tiny", (HUB,), (KNOWN,)), Silent())
    assert sources.offer() is sources.offer()
    assert len(settled(hub)) == 1


def test_a_wheel_of_which_no_sha256_is_known_is_not_taken() -> None:
    for known in (Expected("m.gguf", 5), Expected("m.gguf", None, SHA256)):
        with pytest.raises(ModelNotFound, match="the catalogue has no sha256"):
            Sources(Wanted("tiny", (WHEEL,), (known,)), Silent()).offer()


def test_what_another_program_keeps_is_not_fetched() -> None:
    with pytest.raises(ModelNotFound, match=r"^ollama:x: ollama has no model of this name on this machine$"):
        Sources(Wanted("ollama:x", (HeldSource("ollama", "x"),)), Silent()).offer()


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        (HeldSource("ollama", "qwen3:4b"), "`ollama pull qwen3:4b` downloads the model"),
        (HeldSource("lmstudio", "o/n/m.gguf"), "open LM Studio to download the model"),
    ],
)
def test_the_hint_says_how_the_other_program_downloads(source: HeldSource, advice: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        Sources(Wanted(str(source), (source,)), Silent()).offer()
    assert caught.value.hint == f"`llmrun list` shows the models on this machine; {advice}"


def test_an_address_is_measured_by_its_own_server(hub: FakeHub) -> None:
    url = f"{hub.url}/o/n/resolve/main/m-Q8_0.gguf"
    offer = Sources(Wanted(url, (UrlSource(url),), (Expected("m-Q8_0.gguf"),)), Silent()).offer()
    assert offer.files == (RemoteFile("m-Q8_0.gguf", len(MODEL), None),)
    assert offer.commit == ""


@pytest.mark.push
def test_a_model_is_fetched_from_the_hub_and_is_here_from_then_on(hub: FakeHub, machine: Path) -> None:
    first = resolve("hf:o/n", reporter=Silent())
    assert first.path.read_bytes() == MODEL
    assert first.path.is_relative_to(machine / "hf" / "hub")
    assert (first.name, first.entry and first.entry.name) == ("hf:o/n", "tiny:1b")
    before = len(settled(hub))
    again = resolve("hf:o/n", offline=True, reporter=Silent())
    assert again == first
    assert len(settled(hub)) == before
    assert resolve("tiny:1b", offline=True, reporter=Silent()).path == first.path
