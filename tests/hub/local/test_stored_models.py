"""Tests that a stored model is found without the network, read once, and not used when it is damaged."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmrun.hub.catalog import Wanted
from llmrun.hub.local import paths, stored_models
from llmrun.hub.local.model_records import known_digest, read_record, remember_digests
from llmrun.hub.local.safe_writes import digest
from llmrun.hub.local.stored_models import candidates, expected_digest, find, find_copy
from llmrun.hub.names import Expected, HeldSource, HubSource, PypiSource, Source, UrlSource
from llmrun.hub.progress_reporter import Reporter
from tests.support.hub.model_stores import Stores, commit, gguf, sha256

ONE, TWO = gguf(salt=1), gguf(salt=2)


@dataclass
class Heard:
    notes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def progress(self, label: str, done: int, total: int) -> None:
        del done, total
        self.labels.append(label)


def wanted(source: Source, *expected: Expected) -> Wanted:
    return Wanted("it", (source,), expected)


def test_a_file_of_another_tool_is_read_once(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m-Q4_0.gguf": ONE})
    heard = Heard()
    asked = wanted(HubSource("org/name", "m-Q4_0.gguf"))
    assert find(asked, heard) == link
    assert heard.labels == ["checking it"]
    assert find(asked, heard) == link
    assert heard.labels == ["checking it"]
    assert heard.notes == []
    record = read_record(link)
    assert record is not None
    assert (record.name, record.commit, record.fetched) == ("it", commit(1), 0.0)


def test_a_damaged_file_is_told_and_not_used_and_not_read_again(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m-Q4_0.gguf": ONE})
    link.resolve().write_bytes(TWO)
    heard = Heard()
    assert find(wanted(HubSource("org/name", "m-Q4_0.gguf")), heard) is None
    assert heard.notes == [
        f"{link}: ignored because it is damaged: its sha256 is {sha256(TWO)}, expected {sha256(ONE)}"
    ]
    assert link.exists()


def test_which_file_of_a_repository(stores: Stores) -> None:
    q4, q8 = stores.shared("org/name", {"m-Q4_K_M.gguf": ONE, "m-Q8_0.gguf": TWO})
    heard = Heard()
    assert find(wanted(HubSource("org/name")), heard) == q4
    assert find(wanted(HubSource("org/name", quantization="Q8_0")), heard) == q8
    assert find(wanted(HubSource("org/name", quantization="Q5_0")), heard) is None
    assert find(wanted(HubSource("org/name", "none.gguf")), heard) is None
    assert find(wanted(HubSource("org/none")), heard) is None


def test_which_revision(stores: Stores) -> None:
    (old,) = stores.shared("org/name", {"m.gguf": ONE}, number=0x1A << 152)
    (new,) = stores.shared("org/name", {"m.gguf": TWO}, number=0x1B << 152)
    (branch,) = stores.shared("org/name", {"m.gguf": gguf(salt=3)}, number=0x2A << 152, ref="v1.0")
    heard = Heard()

    def at(revision: str) -> Path | None:
        return find(wanted(HubSource("org/name", "m.gguf", revision=revision)), heard)

    assert at("main") == new
    assert at("v1.0") == branch
    assert at(commit(0x1A << 152)) == old
    assert at("1a00000") == old
    assert at("1a0000") is None  # too short for a commit
    assert at("fffffff") is None
    assert at("v2.0") is None


def test_known_bytes_are_found_in_any_revision(stores: Stores) -> None:
    (old,) = stores.shared("org/name", {"m.gguf": ONE}, number=1)
    (new,) = stores.shared("org/name", {"m.gguf": TWO}, number=2)
    heard, source = Heard(), HubSource("org/name", "m.gguf")
    assert find(wanted(source, Expected("m.gguf", len(ONE), sha256(ONE))), heard) == old
    assert find(wanted(source, Expected("m.gguf", len(TWO), sha256(TWO))), heard) == new
    assert find(wanted(source, Expected("m.gguf", len(ONE), None)), heard) == new
    assert find(wanted(source, Expected("m.gguf", 7, None)), heard) is None
    assert find(wanted(source, Expected("m.gguf"), Expected("n.gguf")), heard) is None
    assert heard.notes == []  # a different file is not a damaged one


def test_all_shards_must_be_here_and_right(stores: Stores) -> None:
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    links = stores.shared("org/name", dict(zip(names, (ONE, TWO), strict=True)))
    heard, asked = Heard(), wanted(HubSource("org/name", names[0]))
    assert find(asked, heard) == links[0]
    assert [known_digest(link) for link in links] == [sha256(ONE), sha256(TWO)]
    links[1].resolve().write_bytes(ONE[:-1])
    assert find(asked, heard) is None
    links[1].unlink()
    assert find(asked, heard) is None


def test_a_file_without_a_link_is_taken_by_its_size(stores: Stores) -> None:
    """Where symlinks cannot be created, the snapshot holds the file itself."""
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    link.unlink()
    link.write_bytes(ONE)
    heard, source = Heard(), HubSource("org/name", "m.gguf")
    assert find(wanted(source), heard) == link
    assert heard.labels == []  # no hash is known to check against
    assert find(wanted(source, Expected("m.gguf", len(ONE), sha256(TWO))), heard) is None


def test_our_own_folder_and_what_is_damaged_there_stays(stores: Stores) -> None:
    path = stores.own("m.gguf", ONE)
    heard, source = Heard(), PypiSource("pack", "1.0", 1)
    assert find(wanted(source, Expected("m.gguf", len(ONE), sha256(ONE))), heard) == path
    assert find(wanted(source, Expected("n.gguf", len(ONE), sha256(ONE))), heard) is None
    assert find(wanted(source, Expected("../m.gguf", len(ONE), sha256(ONE))), heard) is None
    assert find(wanted(source), heard) is None
    assert find(wanted(source, Expected("m.gguf", len(ONE), sha256(TWO))), heard) is None
    assert path.exists()  # a lookup deletes nothing, because the expected hash may be wrong


def test_a_file_of_the_web_is_found_by_its_address(stores: Stores) -> None:
    url = "https://example.com/a%20b.gguf?key=x"
    path = paths.web_file(url, "a b.gguf")
    path.parent.mkdir(parents=True)
    path.write_bytes(ONE)
    assert find(wanted(UrlSource(url), Expected("a b.gguf")), Heard()) == path
    other = UrlSource("https://example.org/a%20b.gguf")
    assert find(wanted(other, Expected("a b.gguf")), Heard()) is None


def test_what_another_program_holds_is_checked_like_everything(stores: Stores) -> None:
    blob = stores.ollama(ONE, "m", "1b")
    file = stores.lm_studio("org/m/m.gguf", TWO)
    heard = Heard()
    assert find(wanted(HeldSource("ollama", "m:1b")), heard) == blob
    assert heard.labels == ["checking it"]
    assert find(wanted(HeldSource("lmstudio", "org/m/m.gguf")), heard) == file
    assert find(wanted(HeldSource("ollama", "none")), heard) is None
    blob.write_bytes(ONE[:-1])  # another size, because modification times differ only by the second
    assert find(wanted(HeldSource("ollama", "m:1b")), heard) is None
    assert blob.exists()


def test_sources_are_looked_at_in_their_order(stores: Stores) -> None:
    own = stores.own("m.gguf", ONE)
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    sources = (HubSource("org/name", "m.gguf"), PypiSource("pack", "1.0", 1))
    expected = (Expected("m.gguf", len(ONE), sha256(ONE)),)
    assert find(Wanted("it", sources, expected), Heard()) == link
    assert find(Wanted("it", sources[::-1], expected), Heard()) == own


def test_a_file_that_cannot_be_read_is_told_and_the_next_one_is_taken(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    own = stores.own("m.gguf", ONE)

    def refusing(path: Path, reporter: Reporter, label: str) -> str:
        if path != own:
            raise PermissionError(13, "Permission denied", str(path))
        return digest(path, reporter, label)

    monkeypatch.setattr(stored_models, "digest", refusing)
    sources = (HubSource("org/name", "m.gguf"), PypiSource("pack", "1.0", 1))
    heard = Heard()
    assert find(Wanted("it", sources, (Expected("m.gguf", len(ONE), sha256(ONE)),)), heard) == own
    assert heard.notes[0].endswith("m.gguf: ignored because it cannot be read: Permission denied")


def test_a_file_that_goes_while_its_size_is_asked_for(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    gone = stored_models.Candidate(HubSource("org/name"), (link.with_name("gone.gguf"),), (Expected("m.gguf"),))
    monkeypatch.setattr(stored_models, "_of_source", lambda *_: iter([gone]))
    assert list(candidates(wanted(HubSource("org/name", "m.gguf"), Expected("m.gguf", 5)))) == []


def test_what_a_file_must_be(stores: Stores, tmp_path: Path) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    assert expected_digest(link) == sha256(ONE)
    assert expected_digest(link, Expected("m.gguf", None, "a" * 64)) == "a" * 64
    assert expected_digest(link, Expected("m.gguf")) == sha256(ONE)
    assert expected_digest(tmp_path / "m.gguf") is None


def test_a_long_way_of_links_is_followed(stores: Stores, tmp_path: Path) -> None:
    """People move their cache to another disk and leave a symlink."""
    stores.shared("org/name", {"m.gguf": ONE})
    (tmp_path / "disk").mkdir()
    stores.cache.rename(tmp_path / "disk" / "hub")
    stores.cache.symlink_to(tmp_path / "disk" / "hub")
    found = find(wanted(HubSource("org/name", "m.gguf")), Heard())
    assert found is not None
    assert found.is_relative_to(stores.cache)


# --- other programs' copies -------------------------------------------------------------------------------------------


def in_catalogue(data: bytes = ONE, *, sized: bool = True) -> Wanted:
    """Return a model of the catalogue that is on the Hub."""
    expected = (Expected("m-Q4_0.gguf", len(data) if sized else None, sha256(data)),)
    return Wanted("tiny:1b", (HubSource("org/tiny", "m-Q4_0.gguf"),), expected)


def test_ollamas_copy_is_used_if_its_sha256_matches(stores: Stores) -> None:
    blob = stores.ollama(ONE, "m", "1b")
    stores.ollama(gguf(salt=2), "other", "1b")
    heard = Heard()
    assert find(in_catalogue(), heard) == blob
    assert heard.labels == ["checking tiny:1b"]
    assert heard.notes == [f"tiny:1b: used from Ollama's folder, not downloaded: {blob}"]
    again = Heard()
    assert find(in_catalogue(), again) == blob
    assert (again.labels, again.notes) == ([], [])  # hashed and reported once
    held = HeldSource("ollama", "m:1b")
    assert find(Wanted(str(held), (held,)), again) == blob
    assert again.notes == []
    blob.write_bytes(ONE[:-1] + b"!")
    damaged = Heard()
    os.utime(blob, (1, 1))
    assert find(in_catalogue(), damaged) is None
    assert "ignored because it is damaged" in damaged.notes[0]


@pytest.mark.parametrize("sized", [True, False])
def test_lm_studios_copy_is_used_if_size_and_sha256_match(stores: Stores, sized: bool) -> None:
    another = bytes(reversed(ONE))  # of the same size
    stores.lm_studio("a/another/m-Q4_0.gguf", another)
    held = stores.lm_studio("org/tiny/m-Q4_0.gguf", ONE)
    heard = Heard()
    assert find(in_catalogue(sized=sized), heard) == held
    assert heard.notes == [f"tiny:1b: used from LM Studio's folder, not downloaded: {held}"]
    again = Heard()
    assert find(in_catalogue(sized=sized), again) == held
    assert (again.labels, again.notes) == ([], [])  # the other file is not hashed again, either


def test_a_copy_is_found_again_without_the_catalogues_sha256(stores: Stores) -> None:
    blob = stores.ollama(ONE, "m", "1b")
    unknown = Wanted("tiny:1b", (HubSource("org/tiny", "m-Q4_0.gguf"),), (Expected("m-Q4_0.gguf"),))
    assert find(unknown, Heard()) is None
    assert find_copy(unknown, Heard()) is None
    assert find_copy(in_catalogue(), Heard()) == blob  # the Hub has reported the sha256
    assert find(unknown, Heard()) == blob
    blob.unlink()
    heard = Heard()
    assert find(unknown, heard) is None
    assert heard.notes == [f"tiny:1b: no longer in Ollama's folder: {blob}"]
    assert find(unknown, heard) is None
    assert len(heard.notes) == 1


def test_a_download_comes_before_another_programs_copy(stores: Stores) -> None:
    stores.ollama(ONE, "m", "1b")
    (link,) = stores.shared("org/tiny", {"m-Q4_0.gguf": ONE})
    heard = Heard()
    assert find(in_catalogue(), heard) == link
    assert heard.notes == []


def test_a_damaged_copy_is_not_used_because_verify_recorded_it(stores: Stores) -> None:
    blob = stores.ollama(ONE, "m", "1b")
    assert find(in_catalogue(), Heard()) == blob
    blob.write_bytes(ONE[:-1] + b"!")
    remember_digests([blob], [sha256(blob.read_bytes())], name="", source="")
    unknown = Wanted("tiny:1b", (HubSource("org/tiny", "m-Q4_0.gguf"),), (Expected("m-Q4_0.gguf"),))
    assert find(unknown, Heard()) is None
