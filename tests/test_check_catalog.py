"""Tests of scripts/check-catalog against a local Hub: it reports what the Hub still has, and completes a catalogue."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import llmrun
from llmrun.base.errors import LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.catalog import CatalogEntry, read_file, read_whole
from llmrun.hub.names import HubSource, RemoteFile
from scripts.catalog_audit import CatalogFinding, ask_hub, check_entry, with_facts
from tests.support.hub.catalog_hub import CatalogHub, Repositories, catalog_hub
from tests.support.hub.hub_client import refuse_import

pytestmark = pytest.mark.push

SCRIPT = Path(llmrun.__file__).resolve().parents[1] / "scripts" / "check-catalog"
ONE, TWO = "1" * 64, "2" * 64
REPOSITORIES: Repositories = {
    "good/repo": {
        "whole.gguf": (1234, ONE),
        "sub/big-00001-of-00002.gguf": (5, ONE),
        "sub/big-00002-of-00002.gguf": (6, TWO),
    },
    "moved/repo": {"other.gguf": (1, ONE)},
    "gated/repo": 403,
    "broken/repo": 500,
}
CATALOG = f"""# kept as it is

[families.fine]
license = "MIT"
usual = "1b"

[models."fine:1b"]
description = "all of it"
repository = "good/repo"
quants.Q4_K_M = {{ file = "whole.gguf", size = 1_234, sha256 = "{ONE}" }}
quants.Q8_0 = {{ file = "sub/big-00001-of-00002.gguf", about = "11.0 KiB" }}

[models."fine:2b"]
description = "only its size"
repository = "good/repo"
quants.Q8_0 = {{ size = 1_234, file = "whole.gguf" }}
"""
WRONG = f"""
[models.larger]
description = "another size"
license = "MIT"
repository = "good/repo"
quants.Q8_0 = {{ file = "whole.gguf", size = 99 }}

[models.other]
description = "another sha256"
license = "MIT"
repository = "good/repo"
quants.Q8_0 = {{ file = "whole.gguf", sha256 = "{TWO}" }}

[models.moved]
description = "another file"
license = "MIT"
repository = "moved/repo"
quants.Q8_0 = {{ file = "whole.gguf" }}

[models.gone]
description = "another repository"
license = "MIT"
repository = "gone/repo"
quants.Q8_0 = {{ file = "whole.gguf" }}

[models.gated]
description = "not for everybody"
license = "MIT"
repository = "gated/repo"
quants.Q8_0 = {{ file = "whole.gguf" }}

[models.elsewhere]
description = "not of the Hub"
license = "MIT"
quants.Q8_0 = {{ url = "https://example.org/a.gguf" }}
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[CatalogHub]:
    with catalog_hub(REPOSITORIES) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


def entries_of(folder: Path, text: str) -> dict[str, CatalogEntry]:
    (folder / "models.toml").write_text(text)
    return read_whole(read_file(folder / "models.toml"))


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--file", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)


def test_the_hub_tells_sizes_and_sha256(hub: CatalogHub) -> None:
    assert ask_hub("good/repo")["whole.gguf"] == RemoteFile("whole.gguf", 1234, ONE)
    assert "README.md" not in ask_hub("good/repo")


def test_a_repository_that_is_not_there_and_a_hub_that_is_broken_are_two_things(hub: CatalogHub) -> None:
    with pytest.raises(ModelNotFound, match="does not exist or is private"):
        ask_hub("gone/repo")
    with pytest.raises(NetworkError, match="HTTP 500"):
        ask_hub("broken/repo")


def test_every_file_is_held_against_the_hub_and_each_repository_asked_once(hub: CatalogHub, tmp_path: Path) -> None:
    listings: dict[str, Mapping[str, RemoteFile] | str] = {}
    entries = entries_of(tmp_path, CATALOG + WRONG).values()
    found = {
        f"{finding.entry}-{finding.quant}": (finding.wrong, finding.lacking)
        for entry in entries
        for finding in check_entry(entry, listings)
    }
    assert found == {
        "fine:1b-Q4_K_M": ("", False),
        "fine:1b-Q8_0": ("", True),
        "fine:2b-Q8_0": ("", True),
        "larger-Q8_0": ("1,234 bytes on the Hub, 99 in the catalogue", True),
        "other-Q8_0": ("sha256 111111111111... on the Hub, 222222222222... in the catalogue", True),
        "moved-Q8_0": ("whole.gguf is missing on the Hub", False),
        "gone-Q8_0": ("the repository does not exist or is private", False),
        "gated-Q8_0": ("not accessible (HTTP 403)", False),
    }
    assert sorted(hub.asked) == ["gated/repo", "gone/repo", "good/repo", "moved/repo"]


def test_facts_are_written_into_their_line_and_nothing_else_changes() -> None:
    shards = (RemoteFile("a", 5, ONE), RemoteFile("b", 6_000, TWO))
    text = with_facts(CATALOG, CatalogFinding("fine:1b", "Q8_0", HubSource("good/repo"), "", shards, True))
    line = f'quants.Q8_0 = {{ file = "sub/big-00001-of-00002.gguf", size = [5, 6_000], sha256 = ["{ONE}", "{TWO}"] }}'
    assert text == CATALOG.replace('quants.Q8_0 = { file = "sub/big-00001-of-00002.gguf", about = "11.0 KiB" }', line)
    one = (RemoteFile("whole.gguf", 1234, ONE),)
    text = with_facts(CATALOG, CatalogFinding("fine:2b", "Q8_0", HubSource("good/repo"), "", one, True))
    assert f'quants.Q8_0 = {{ file = "whole.gguf", size = 1_234, sha256 = "{ONE}" }}' in text
    with pytest.raises(LlmrunError, match=r"fine:2b: quants\.F16: not on a line of its own"):
        with_facts(CATALOG, CatalogFinding("fine:2b", "F16", HubSource("good/repo"), "", one, True))


def test_the_script_says_calmly_that_all_holds(hub: CatalogHub, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(CATALOG)
    done = run(path)
    assert (done.returncode, done.stderr) == (0, "")
    summary = "3 files checked, 3 match, 0 do not match, 2 lack a size or a sha256 (--write fills them in)\n"
    assert done.stdout == summary
    assert path.read_text() == CATALOG
    assert run(path, "--all", "fine:2b").stdout.startswith("fine:2b-q8_0 ")


@pytest.mark.night
def test_the_script_completes_the_file(hub: CatalogHub, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(CATALOG)
    done = run(path, "--write")
    assert (done.returncode, done.stdout) == (0, "3 files checked, 3 match, 0 do not match, 2 completed\n")
    text = path.read_text()
    assert text.startswith("# kept as it is\n")
    quants = read_whole(read_file(path))["fine:1b"].quants
    assert [(file.size, file.sha256) for file in quants["Q8_0"].files] == [(5, ONE), (6, TWO)]
    assert run(path, "--write").stdout == "3 files checked, 3 match, 0 do not match\n"
    assert path.read_text() == text


def test_the_script_names_what_does_not_hold_and_leaves_it_as_it_is(hub: CatalogHub, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(CATALOG + WRONG)
    done = run(path, "larger", "moved", "--write")
    assert (done.returncode, done.stderr) == (1, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["larger-q8_0", "moved-q8_0", "2"]
    assert path.read_text() == CATALOG + WRONG


def test_a_hub_that_is_not_there_is_one_line(hub: CatalogHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "models.toml"
    path.write_text(CATALOG)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    done = run(path)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("error: cannot reach the Hub: ")
    assert done.stderr.count("\n") == 1


def test_the_script_refuses_a_wrong_file_and_a_name_that_is_not_in_it(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text("[models.a]\n")
    assert run(path).returncode == 2
    path.write_text(CATALOG)
    done = run(path, "fien")
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)


def test_a_hub_that_is_away_is_one_line(hub: CatalogHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(NetworkError, match=r"cannot reach the Hub: .*refused"):
        ask_hub("good/repo")


def test_an_endpoint_that_huggingface_hub_cannot_take_apart_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_import(monkeypatch, "huggingface_hub.errors")
    with pytest.raises(NetworkError, match="network settings: bad endpoint"):
        ask_hub("good/repo")


def test_sizes_can_be_written_where_no_sha256_is_told(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(CATALOG)
    found = CatalogFinding(
        "fine:2b", "Q8_0", HubSource("good/repo", "whole.gguf"), "", (RemoteFile("whole.gguf", 7, None),), True
    )
    assert 'quants.Q8_0 = { file = "whole.gguf", size = 7 }' in with_facts(CATALOG, found)
