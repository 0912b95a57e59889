"""Downloads from the Hub: right bytes into the shared cache, and a sentence for everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_hub import COMMIT, MODEL, SHA256, FakeHub, fake_hub
from tests.support.resolving import Machine


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def repository(machine: Machine, owner: str) -> Path:
    return machine.hub / f"models--{owner}--repo"


def test_a_file_lands_in_the_shared_cache_as_other_tools_expect_it(machine: Machine, hub: FakeHub) -> None:
    machine.catalogue("tiny", "hf:good/repo/sub/model.gguf")
    got = machine.resolve("tiny", HF_ENDPOINT=hub.url)
    home = repository(machine, "good")
    assert got.path == home / "snapshots" / COMMIT / "sub" / "model.gguf"
    assert got.path.read_bytes() == MODEL
    assert got.path.is_symlink()
    assert not got.path.readlink().is_absolute()
    assert got.path.resolve() == home / "blobs" / SHA256
    assert (home / "refs" / "main").read_text() == COMMIT
    assert machine.left_over() == []
    assert got.notes == []
    # huggingface_hub itself is the judge of the layout, with no network at all.
    code = "import huggingface_hub as h; print(h.hf_hub_download('good/repo', 'sub/model.gguf', local_files_only=True))"
    found = subprocess.run(
        [sys.executable, "-c", code], env=machine.environment(), capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == got.path


def test_progress_counts_every_byte_once(machine: Machine, hub: FakeHub) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    got = machine.resolve("tiny", HF_ENDPOINT=hub.url)
    done = [step[1] for step in got.progress]
    assert done == sorted(set(done))
    assert done[-1] == len(MODEL)
    assert {(label, total) for label, _, total in got.progress} == {("downloading tiny", len(MODEL))}


def test_a_model_that_is_here_costs_no_network_and_no_heavy_import(machine: Machine, hub: FakeHub) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    first = machine.resolve("tiny", HF_ENDPOINT=hub.url)
    before = len(hub.seen)
    again = machine.resolve("tiny", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert again.path == first.path
    assert again.progress == []
    assert len(hub.seen) == before
    heavy = {"huggingface_hub", "httpx2", "filelock", "numpy", "hashlib", "ssl", "asyncio", "subprocess", "difflib"}
    assert not heavy & again.modules


def test_the_token_goes_to_the_hub_and_never_to_its_storage(machine: Machine, hub: FakeHub) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    before = len(hub.seen)
    assert machine.resolve("tiny", HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret").path
    seen = [request for request in hub.seen[before:] if "model.gguf" in request.path]
    at_hub = {request.authorization for request in seen if not request.path.startswith("/storage")}
    at_storage = [request for request in seen if request.path.startswith("/storage")]
    assert at_hub == {"Bearer hf_secret"}
    assert at_storage
    assert {(request.authorization, request.host.partition(":")[0]) for request in at_storage} == {(None, "localhost")}


def test_a_repository_that_was_renamed_is_followed(machine: Machine, hub: FakeHub) -> None:
    machine.catalogue("tiny", "hf:renamed/repo/model.gguf")
    got = machine.resolve("tiny", HF_ENDPOINT=hub.url)
    assert got.path == repository(machine, "renamed") / "snapshots" / COMMIT / "model.gguf"


@pytest.mark.parametrize(
    ("owner", "error", "code", "said"),
    [
        ("unauthorised", "NetworkError", 5, "not authorised (HTTP 401)"),
        ("forbidden", "NetworkError", 5, "no access (HTTP 403)"),
        ("gated", "NetworkError", 5, "the repository is gated (HTTP 403)"),
        ("missing", "NetworkError", 5, "no such file (HTTP 404)"),
        ("broken", "NetworkError", 5, "refused (HTTP 500)"),
        ("busy", "NetworkError", 5, "refused (HTTP 503)"),
        ("expired", "NetworkError", 5, "no access (HTTP 403)"),
        ("other-server", "NetworkError", 5, "not a Hugging Face Hub's"),
        ("climbing", "NetworkError", 5, "not a Hugging Face Hub's"),
        ("truncated", "NetworkError", 5, "peer closed connection"),
        ("unmeasured", "NetworkError", 5, f"ended after {len(MODEL) // 2:,} of {len(MODEL):,} bytes"),
        ("stalled", "NetworkError", 5, "timed out"),
        ("changed", "IntegrityError", 6, f"sha256 {'f' * 64} ({len(MODEL)} bytes) seen, {SHA256}"),
        ("flipped", "IntegrityError", 6, f"seen, {SHA256} expected"),
        ("long", "IntegrityError", 6, f"{len(MODEL):,} expected"),
    ],
)
def test_what_goes_wrong_is_one_line_and_nothing_is_kept(
    machine: Machine, hub: FakeHub, owner: str, error: str, code: int, said: str
) -> None:
    machine.catalogue("tiny", f"hf:{owner}/repo/model.gguf")
    got = machine.resolve("tiny", HF_ENDPOINT=hub.url, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert (got.error, got.code) == (error, code)
    assert got.message.startswith(f"tiny: not downloaded: hf:{owner}/repo/model.gguf: ")
    assert said in got.message
    assert "\n" not in got.message
    assert got.hint
    assert machine.left_over() == []
    assert not list(machine.root.rglob("model.gguf"))
    assert not list(machine.root.rglob(SHA256))


def test_a_hub_that_does_not_answer_is_given_up(machine: Machine, hub: FakeHub) -> None:
    machine.catalogue("tiny", "hf:silent/repo/model.gguf")
    prelude = "import llmrun.hub.huggingface as h; h.ANSWER_SECONDS = 0.5"
    got = machine.resolve("tiny", prelude, HF_ENDPOINT=hub.url)
    assert got.error == "NetworkError"
    assert "no answer within 0.5 s" in got.message or "timed out" in got.message


def test_a_name_that_cannot_be_looked_up_is_unreachable(machine: Machine) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    got = machine.resolve("tiny", HF_ENDPOINT="http://hub.invalid")
    assert got.error == "NetworkError"
    assert "unreachable (" in got.message


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HTTP_PROXY", "gopher://127.0.0.1:1", "network settings: Unknown scheme for proxy URL"),
        ("HTTP_PROXY", "http://127.0.0.1:1", "unreachable (Connection refused)"),
        ("SSL_CERT_FILE", "/no/such.pem", "network settings: No such file or directory"),
        ("HF_ENDPOINT", "nonsense", "Request URL is missing"),
        ("HF_ENDPOINT", "http://[::1", "network settings: Invalid IPv6 URL"),
        ("HF_TOKEN", "é", "network settings: 'ascii' codec can't encode"),
    ],
)
def test_a_network_setting_of_no_use_is_one_line(
    machine: Machine, hub: FakeHub, variable: str, value: str, said: str
) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    got = machine.resolve("tiny", **({"NO_PROXY": "", "HF_ENDPOINT": hub.url} | {variable: value}))
    assert got.error == "NetworkError"
    assert said in got.message
    assert "\n" not in got.message


def test_a_file_another_tool_downloaded_is_checked_once_and_used(machine: Machine, hub: FakeHub) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    code = "import huggingface_hub as h; print(h.hf_hub_download('good/repo', 'model.gguf'))"
    environment = machine.environment(HF_ENDPOINT=hub.url)
    fetched = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    first = machine.resolve("tiny")
    assert first.path == Path(fetched)
    assert {label for label, _, _ in first.progress} == {"checking tiny"}
    assert machine.resolve("tiny").progress == []


@pytest.mark.parametrize("kind", ["flipped", "truncated"])
def test_a_damaged_file_in_the_shared_cache_is_never_used(machine: Machine, hub: FakeHub, kind: str) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    pointer = repository(machine, "good") / "snapshots" / COMMIT / "model.gguf"
    blob = repository(machine, "good") / "blobs" / SHA256
    for path in (pointer, blob):
        path.parent.mkdir(parents=True)
    blob.write_bytes(MODEL[:-1] + b"?" if kind == "flipped" else MODEL[:-1])
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    offline = machine.resolve("tiny", HF_HUB_OFFLINE="1")
    assert offline.error == "NetworkError"
    got = machine.resolve("tiny", HF_ENDPOINT=hub.url)
    assert got.path == pointer
    assert pointer.read_bytes() == MODEL
    assert any("damaged" in note for note in got.notes) == (kind == "flipped")


def test_a_blob_that_only_lacks_its_link_is_not_downloaded_again(machine: Machine, hub: FakeHub) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    blob = repository(machine, "good") / "blobs" / SHA256
    blob.parent.mkdir(parents=True)
    blob.write_bytes(MODEL)
    before = hub.downloads()
    got = machine.resolve("tiny", HF_ENDPOINT=hub.url)
    assert got.path
    assert got.path.read_bytes() == MODEL
    assert hub.downloads() == before


def test_without_symbolic_links_the_file_itself_is_in_the_snapshot(machine: Machine, hub: FakeHub) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    prelude = (
        "import pathlib\n"
        "def refuse(*_): raise OSError(1314, 'A required privilege is not held by the client')\n"
        "pathlib.Path.symlink_to = refuse"
    )
    got = machine.resolve("tiny", prelude, HF_ENDPOINT=hub.url)
    assert got.path
    assert not got.path.is_symlink()
    assert got.path.read_bytes() == MODEL
    assert machine.resolve("tiny", HF_HUB_OFFLINE="1").path == got.path
