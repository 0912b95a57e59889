"""Tests of the fake Hub with the real client, huggingface_hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi, errors, hf_hub_download

from tests.support.hub.fake_hub import MODEL, SHA256, FakeHub, Fault, fake_hub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.add("org/repo", {"sub/model.gguf": MODEL, "README.md": b"# hello"})
        yield running


@pytest.mark.parametrize("file", ["sub/model.gguf", "README.md"])
def test_the_real_client_downloads_a_file(hub: FakeHub, file: str, tmp_path: Path) -> None:
    path = Path(hf_hub_download("org/repo", file, endpoint=hub.url, cache_dir=tmp_path, token=False))
    made = hub.repositories["org/repo"]
    assert path.read_bytes() == made.file(file).content
    assert path.parts[-2 - file.count("/")] == made.commit
    assert path.resolve().name == made.file(file).etag


def test_the_real_client_reads_the_metadata(hub: FakeHub) -> None:
    api = HfApi(endpoint=hub.url, token=False)
    found = api.model_info("org/repo", files_metadata=True)
    large = next(sibling for sibling in found.siblings or [] if sibling.rfilename == "sub/model.gguf")
    assert found.sha == hub.repositories["org/repo"].commit
    assert large.lfs is not None
    assert (large.lfs.sha256, large.size) == (SHA256, len(MODEL))
    tree = {entry.path: entry for entry in api.list_repo_tree("org/repo", recursive=True)}
    assert getattr(tree["sub/model.gguf"], "lfs").sha256 == SHA256  # noqa: B009 (a folder has none)
    assert [entry.path for entry in api.get_paths_info("org/repo", ["README.md"])] == ["README.md"]
    assert [branch.name for branch in api.list_repo_refs("org/repo").branches] == ["main"]
    assert api.model_info("org/repo", revision="main").sha == found.sha


def test_refusals_are_what_the_real_client_takes_them_for(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/gated", {"a.gguf": b"1"}, gated=True)
    hub.add("org/private", {"a.gguf": b"1"}, token="hf_right")
    hub.moved["org/old"] = "org/repo"

    def fetch(repository: str, file: str, **more: str | bool) -> Path:
        options = {"endpoint": hub.url, "cache_dir": tmp_path, "token": False} | more
        return Path(hf_hub_download(repository, file, **options))  # type: ignore[call-overload]

    with pytest.raises(errors.GatedRepoError):
        fetch("org/gated", "a.gguf")
    with pytest.raises(errors.RepositoryNotFoundError):
        fetch("org/private", "a.gguf")
    with pytest.raises(errors.RepositoryNotFoundError):
        fetch("org/none", "a.gguf")
    with pytest.raises(errors.RemoteEntryNotFoundError):
        fetch("org/repo", "none.gguf")
    with pytest.raises(errors.RevisionNotFoundError):
        fetch("org/repo", "README.md", revision="none")
    assert fetch("org/private", "a.gguf", token="hf_right").read_bytes() == b"1"
    assert fetch("org/old", "README.md").read_bytes() == b"# hello"


def get(url: str, **headers: str) -> httpx2.Response:
    return httpx2.get(url, headers={name.replace("_", "-"): value for name, value in headers.items()}, trust_env=False)


@pytest.mark.push
def test_ranges_are_served_and_written_down(hub: FakeHub) -> None:
    url = hub.public(MODEL)
    part = get(url, Range="bytes=10-19")
    assert (part.status_code, part.content) == (206, MODEL[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(MODEL)}"
    assert get(url, Range=f"bytes={len(MODEL)}-").status_code == 416
    assert get(url, Range="bytes=10-", If_Range='"other"').status_code == 200
    assert get(url, Range="bytes=10-", If_Range=part.headers["etag"]).content == MODEL[10:]
    assert [(asked.range, asked.status, asked.sent) for asked in hub.asked][:2] == [
        ("bytes=10-19", 206, 10),
        (f"bytes={len(MODEL)}-", 416, 0),
    ]


@pytest.mark.push
def test_faults_come_in_their_order_and_go(hub: FakeHub) -> None:
    url = hub.public(MODEL)
    hub.faults += [
        Fault(status=503, headers={"Retry-After": "1"}),
        Fault(ignore_range=True),
        Fault(alter=lambda body: body[:-1] + b"?", skip=1),
    ]
    refused = get(url)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert get(url, Range="bytes=10-19").status_code == 200
    assert get(url).content == MODEL
    assert get(url).content == MODEL[:-1] + b"?"
    assert get(url).content == MODEL
    assert hub.faults == []
    hub.faults.append(Fault(cut_after=1000))
    with pytest.raises(httpx2.RemoteProtocolError):
        get(url)
    assert hub.asked[-1].sent == 1000


@pytest.mark.push
def test_an_address_at_the_storage_expires(hub: FakeHub) -> None:
    address = get(f"{hub.url}/org/repo/resolve/main/sub/model.gguf").headers["location"]
    assert get(address).content == MODEL
    hub.expire()
    assert get(address).status_code == 403
    assert get(get(f"{hub.url}/org/repo/resolve/main/sub/model.gguf").headers["location"]).content == MODEL
