"""Tests that a sharded model is one model, made up of its own files only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmrun.base.errors import BadGGUF, LlmrunError, ModelFileError, ModelNotFound
from llmrun.formats.gguf.cursor import Cursor
from llmrun.formats.gguf.reader import open_gguf, read_whole_header, with_shards
from llmrun.formats.gguf.source import FileSource
from tests.support.gguf import gguf_bytes
from tests.support.gguf.gguf_bytes import I32, U16, U32, RawGGUF, RawTensor, scalar
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.gguf.gguf_memory import MemorySource, read_gguf
from tests.support.gguf.gguf_shards import FOLDER, built, name_of, raw_shards, read_shards, split_by_gguf_py

SECOND, THIRD = name_of(1), name_of(2)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "tiny.gguf", weight_type="Q4_1", tied=False, rope_scaling="llama3")


@pytest.fixture
def first(whole: Path, tmp_path: Path) -> Path:
    """Return the first of the five files that the same model is split into."""
    found = split_by_gguf_py(whole, tmp_path, tensors_each=5)
    assert found.name == "split-00001-of-00005.gguf"
    return found


def another(path: Path, number: int) -> Path:
    return path.with_name(path.name.replace("00001-of", f"{number:05d}-of"))


# Valid sets of shards


@pytest.mark.push
@pytest.mark.parametrize("small_first", [False, True])
def test_a_model_split_by_gguf_py_has_the_metadata_and_the_bytes_of_the_whole(
    whole: Path, tmp_path: Path, small_first: bool
) -> None:
    path = split_by_gguf_py(whole, tmp_path, tensors_each=5, small_first=small_first)
    parts = sorted(tmp_path.glob("split-*"))
    with open_gguf(whole) as one, open_gguf(path) as several:
        assert (several.path, several.file_bytes) == (path, sum(part.stat().st_size for part in parts))
        assert [key for key in several.metadata if not key.startswith("split.")] == list(one.metadata)
        assert list(several.tensors) == list(one.tensors)
        for name, tensor in one.tensors.items():
            split = several.tensors[name]
            assert (split.type, split.shape, split.nbytes) == (tensor.type, tensor.shape, tensor.nbytes)
            np.testing.assert_array_equal(several.read(split), one.read(tensor))
            part = np.zeros(8, np.uint8)
            several.read_into(split, 8, part)
            np.testing.assert_array_equal(part, one.read(tensor)[8:16])
        several.check_unchanged()
        several.check_in_place()


def test_the_files_may_be_any_source_of_bytes() -> None:
    files = built(raw_shards())
    with read_shards(files) as file:
        assert list(file.tensors) == ["a", "b", "c", "d", "e", "f"]
        assert file.file_bytes == sum(map(len, files.values()))
        last = file.tensors["e"]
        assert file.read(last).nbytes == last.nbytes
        file.check_unchanged()
        file.check_in_place()


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_that_says_it_is_alone_is_whole_whatever_its_name_is(count: int) -> None:
    """gguf-split --merge leaves a count of 0."""
    raw = RawGGUF({"split.count": scalar(U16, count)}, [RawTensor("a")])
    assert list(read_gguf(raw.build(), FOLDER / SECOND).tensors) == ["a"]


def test_a_file_that_says_nothing_is_whole_whatever_its_name_is() -> None:
    assert list(read_gguf(RawGGUF({}, [RawTensor("a")]).build(), FOLDER / SECOND).tensors) == ["a"]


def test_a_file_after_the_first_may_name_the_same_architecture() -> None:
    shards = raw_shards()
    shards[1].keys["general.architecture"] = gguf_bytes.string("llama")
    read_shards(built(shards)).close()


# Invalid sets of shards

Change = Callable[[list[RawGGUF]], object]


def set_key(number: int, key: str, value: bytes) -> Change:
    return lambda shards: shards[number].keys.__setitem__(key, value)


def drop_key(number: int, key: str) -> Change:
    return lambda shards: shards[number].keys.pop(key)


def add_tensor(number: int, name: str) -> Change:
    return lambda shards: shards[number].tensors.append(RawTensor(name))


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (drop_key(0, "split.no"), name_of(0), "split.no: the key is missing"),
        (drop_key(1, "split.no"), SECOND, "split.no: the key is missing"),
        (drop_key(2, "split.count"), THIRD, "split.count: the key is missing"),
        (drop_key(0, "split.tensors.count"), name_of(0), "split.tensors.count: the key is missing"),
        (drop_key(1, "split.tensors.count"), SECOND, "split.tensors.count: the key is missing"),
        (set_key(0, "split.count", scalar(U32, 3)), name_of(0), "split.count: must be u16, not u32"),
        (set_key(0, "split.no", scalar(I32, 0)), name_of(0), "split.no: must be u16, not i32"),
        (set_key(1, "split.no", scalar(U32, 1)), SECOND, "split.no: must be u16, not u32"),
        (
            set_key(0, "split.tensors.count", scalar(U32, 6)),
            name_of(0),
            "split.tensors.count: must be i32, not u32",
        ),
        (
            set_key(0, "split.tensors.count", scalar(I32, -1)),
            name_of(0),
            "split.tensors.count: must be at least 0, not -1",
        ),
        (set_key(0, "split.no", scalar(U16, 3)), name_of(0), "split.no: must be at most 2, not 3"),
        (
            set_key(0, "split.no", scalar(U16, 1)),
            name_of(0),
            "split.no: must be 0 to match the file name (1 of 3), not 1",
        ),
        (set_key(0, "split.count", scalar(U16, 4)), name_of(0), "split.count: must be 3 to match the file name, not 4"),
        (set_key(1, "split.no", scalar(U16, 2)), SECOND, "split.no: must be 1 in file 2 of 3, not 2"),
        (set_key(2, "split.count", scalar(U16, 2)), THIRD, "split.count: must be 3 in file 3 of 3, not 2"),
        (
            set_key(2, "split.tensors.count", scalar(I32, 7)),
            THIRD,
            "split.tensors.count: must be 6 in file 3 of 3, not 7",
        ),
        (add_tensor(2, "g"), name_of(0), "split.tensors.count: must be 7, the number of tensors in all 3 files, not 6"),
        (
            lambda shards: shards[2].tensors.clear(),
            name_of(0),
            "split.tensors.count: must be 4, the number of tensors in all 3 files, not 6",
        ),
        (add_tensor(1, "a"), SECOND, "a: an earlier file of the model already has a tensor of this name"),
        (add_tensor(2, "d"), THIRD, "d: an earlier file of the model already has a tensor of this name"),
        (
            set_key(1, "general.architecture", gguf_bytes.string("qwen2")),
            SECOND,
            "general.architecture: must be 'llama' as in the first file, not 'qwen2'",
        ),
        (
            lambda shards: (
                shards[0].keys.pop("general.architecture"),
                shards[1].keys.__setitem__("general.architecture", gguf_bytes.string("llama")),
            ),
            SECOND,
            "general.architecture: must be 'none' as in the first file, not 'llama'",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_file(change: Change, where: str, message: str) -> None:
    shards = raw_shards()
    change(shards)
    with pytest.raises(BadGGUF) as caught:
        read_shards(built(shards))
    assert f"not a valid GGUF file: {FOLDER / where}: {message}" in str(caught.value)


def test_a_damaged_file_is_named_itself() -> None:
    files = built(raw_shards())
    files[THIRD] = files[THIRD][:-160]
    with pytest.raises(BadGGUF, match=f"incomplete GGUF file: .*{THIRD}: 384 B of 544 B;"):
        read_shards(files)


@pytest.mark.parametrize("number", [1, 2])
def test_naming_a_later_file_hints_at_the_first(number: int) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_shards(built(raw_shards()), name_of(number))
    assert not isinstance(caught.value, BadGGUF)
    assert str(caught.value) == f"not the first file of its model: {FOLDER / name_of(number)}: file {number + 1} of 3"
    assert caught.value.hint == f"Use the first file: {FOLDER / name_of(0)}"


@pytest.mark.parametrize(
    "name", ["model.gguf", "-00001-of-00003.gguf", "model-1-of-3.gguf", "model-00001-of-00003.GGUF"]
)
def test_a_file_by_whose_name_no_other_is_found_says_how_it_must_be_called(name: str) -> None:
    with pytest.raises(BadGGUF, match=r"split\.count: is 3, .* this file must be named NAME-00001-of-00003\.gguf"):
        read_gguf(raw_shards()[0].build(), Path(name))


@pytest.mark.parametrize("name", [SECOND, THIRD])
def test_a_missing_file_is_named(name: str) -> None:
    files = built(raw_shards())
    del files[name]
    with pytest.raises(ModelNotFound) as caught:
        read_shards(files)
    assert f"a file of the model is missing: {FOLDER / name}: file" in str(caught.value)
    assert "in the same folder" in caught.value.hint


def test_a_file_in_memory_is_alone() -> None:
    with pytest.raises(ModelNotFound, match="a file of the model is missing"):
        read_gguf(raw_shards()[0].build(), FOLDER / name_of(0))


# Files that change


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 - Path.iterdir would have it closed before it is counted


@pytest.mark.parametrize("trouble", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-64])])
def test_every_file_is_closed_whether_it_opens_or_not(first: Path, trouble: Callable[[Path], object]) -> None:
    before = open_descriptors()
    with open_gguf(first):
        assert open_descriptors() == before + 5
    trouble(another(first, 4))
    with pytest.raises(LlmrunError):
        open_gguf(first)
    assert open_descriptors() == before


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_change_of_any_file_is_seen(first: Path, number: int) -> None:
    with open_gguf(first) as file:
        os.utime(another(first, number), ns=(0, 0))
        with pytest.raises(ModelFileError, match=f"{another(first, number).name}: it was written to"):
            file.check_unchanged()
        with pytest.raises(ModelFileError, match="it was written to"):
            file.check_in_place()


@pytest.mark.parametrize("number", [1, 3, 5])
def test_another_file_in_place_of_any_is_seen(first: Path, number: int) -> None:
    with open_gguf(first) as file:
        part = another(first, number)
        other = part.with_suffix(".part")
        other.write_bytes(part.read_bytes())
        other.replace(part)
        file.check_unchanged()
        with pytest.raises(ModelFileError, match=f"{part.name}: it was replaced by another file"):
            file.check_in_place()


def test_a_copy_of_a_file_that_is_still_under_way_is_not_called_broken(
    first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third, read = another(first, 3), FileSource.read

    def overtaken(self: FileSource, *arguments: object) -> None:
        read(self, *arguments)  # type: ignore[arg-type]
        if self._path == third:
            with third.open("ab") as file:
                file.write(b"more")

    third.write_bytes(third.read_bytes()[:-64])
    monkeypatch.setattr(FileSource, "read", overtaken)
    with pytest.raises(ModelFileError, match=f"changed while it was being read: .*{third.name}"):
        open_gguf(first)


def test_a_link_to_the_first_file_finds_the_links_beside_it(first: Path, tmp_path: Path) -> None:
    """In the Hub's cache, named symlinks point to files without such names."""
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    for number, part in enumerate(sorted(tmp_path.glob("split-*"))):
        part.rename(blobs / str(number))
        (folder / part.name).symlink_to(blobs / str(number))
    with open_gguf(folder / first.name) as file:
        assert len(file.tensors) == file.integer("split.tensors.count")


def test_a_first_file_whose_header_was_read_in_another_way_gets_its_others_all_the_same() -> None:
    files = built(raw_shards())
    data = files[name_of(0)]
    source = MemorySource(data)
    first = read_whole_header(Cursor(source, FOLDER / name_of(0)), source)
    assert list(first.tensors) == ["a", "b"]
    with with_shards(first, lambda name: MemorySource(files[name])) as file:
        assert list(file.tensors) == ["a", "b", "c", "d", "e", "f"]
        assert (file.version, file.alignment) == (first.version, first.alignment)
        assert file.string("general.architecture") == "llama"


def test_a_file_that_is_alone_is_itself() -> None:
    alone = read_gguf(RawGGUF({}, [RawTensor("a")]).build(), FOLDER / "model.gguf")
    assert with_shards(alone, lambda name: MemorySource(b"")) is alone
