"""Tests of saved model records: found again, trusted only when intact, and never the reason that a command fails."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmrun.hub.local import paths
from llmrun.hub.local.model_records import (
    FileRecord,
    ModelRecord,
    file_record,
    known_digest,
    mark_used,
    read_record,
    record_path,
    remember_digests,
    write_record,
)
from tests.support.hub.model_stores import Stores

DIGEST = "a" * 64


def record_of(path: Path, sha256: str = DIGEST) -> ModelRecord:
    return ModelRecord("qwen3:4b", "hf:o/n/f.gguf", "c" * 40, (file_record(path, sha256),), fetched=5.0, used=0.0)


def test_a_record_comes_back_as_it_was_written(stores: Stores) -> None:
    path = stores.own("m.gguf", b"model")
    write_record(record_of(path))
    assert read_record(path) == record_of(path)
    assert known_digest(path) == DIGEST
    assert [file.name for file in record_path(path).parent.iterdir()] == [record_path(path).name]


def test_a_model_without_a_record(stores: Stores) -> None:
    path = stores.own("m.gguf", b"model")
    assert read_record(path) is None
    assert known_digest(path) is None
    assert known_digest(stores.models / "none.gguf") is None


@pytest.mark.parametrize("change", ["size", "time", "gone"])
def test_a_file_that_was_written_to_is_not_known(stores: Stores, change: str) -> None:
    path = stores.own("m.gguf", b"model")
    write_record(record_of(path))
    if change == "size":
        path.write_bytes(b"other model")
        os.utime(path, (0, read_record(path).files[0].modified))  # type: ignore[union-attr]
    elif change == "time":
        os.utime(path, (0, 1000))
    else:
        path.unlink()
    assert known_digest(path) is None


def test_a_new_snapshot_of_the_same_bytes_has_the_record_of_the_old_one(stores: Stores) -> None:
    (old,) = stores.shared("o/n", {"m.gguf": b"model"}, number=1)
    digest = os.path.realpath(old).rsplit("/", 1)[-1]
    write_record(record_of(old, digest))
    (new,) = stores.shared("o/n", {"m.gguf": b"model"}, number=2)
    old.unlink()
    assert read_record(new) == replace(
        record_of(new, digest), files=(replace(file_record(new, digest), path=str(old)),)
    )
    assert known_digest(new) == digest


def test_a_shard_is_known_by_the_record_of_its_model(stores: Stores) -> None:
    shards = [stores.own(f"m-0000{number}-of-00002.gguf", b"%d" % number) for number in (1, 2)]
    remember_digests(shards, ["b" * 64, "c" * 64], name="m", source="s")
    assert [known_digest(shard) for shard in shards] == ["b" * 64, "c" * 64]


def test_what_was_not_hashed_is_not_known(stores: Stores) -> None:
    path = stores.own("m.gguf", b"model")
    mark_used(path)
    assert known_digest(path) is None
    used = read_record(path)
    assert used is not None
    assert used.name == ""
    assert time.time() - 60 < used.used <= time.time()


def test_use_and_digests_leave_the_rest_as_it_was(stores: Stores) -> None:
    path = stores.own("m.gguf", b"model")
    write_record(record_of(path))
    mark_used(path)
    remember_digests([path], ["d" * 64], name="other", source="other")
    known = read_record(path)
    assert known is not None
    assert (known.name, known.source, known.fetched) == ("qwen3:4b", "hf:o/n/f.gguf", 5.0)
    assert known.used > 0
    assert known_digest(path) == "d" * 64


def test_a_model_that_was_only_used_gets_its_name_when_it_is_hashed(stores: Stores) -> None:
    path = stores.own("m.gguf", b"model")
    mark_used(path)
    remember_digests([path], [DIGEST], name="m", source="s", commit="c")
    known = read_record(path)
    assert known is not None
    assert (known.name, known.source, known.commit) == ("m", "s", "c")
    assert known.used > 0


def test_a_model_that_has_gone_is_nobodys_trouble(stores: Stores) -> None:
    mark_used(stores.models / "gone.gguf")
    remember_digests([stores.models / "gone.gguf"], [DIGEST], name="m", source="s")
    assert not (stores.models / ".records").exists()


def test_a_folder_that_cannot_be_written_is_nobodys_trouble(stores: Stores) -> None:
    path = stores.own("m.gguf", b"model")
    (stores.models / ".records").write_text("in the way")
    write_record(record_of(path))
    mark_used(path)
    assert read_record(path) is None


def test_a_record_that_cannot_be_put_in_place_leaves_nothing(stores: Stores) -> None:
    path = stores.own("m.gguf", b"model")
    record_path(path).mkdir(parents=True)
    write_record(record_of(path))
    assert list(record_path(path).parent.iterdir()) == [record_path(path)]


def good(path: Path) -> dict[str, object]:
    write_record(record_of(path))
    table: dict[str, object] = json.loads(record_path(path).read_text())
    return table


@pytest.mark.parametrize(
    "broken",
    [
        {"version": 2},
        {"version": None},
        {"files": []},
        {"files": [{}]},
        {"files": "text"},
        {"files": [{"path": 1, "size": 1, "modified": 1, "sha256": ""}]},
        {"files": [{"path": "p", "size": -1, "modified": 1, "sha256": ""}]},
        {"files": [{"path": "p", "size": True, "modified": 1, "sha256": ""}]},
        {"files": [{"path": "p", "size": 2**63, "modified": 1, "sha256": ""}]},
        {"files": [{"path": "p", "size": 1, "modified": 1, "sha256": "../../x"}]},
        {"name": 7},
        {"name": "x" * 10_000},
        {"used": "yesterday"},
        {"used": -1},
        {"used": 10**400},
        {"fetched": float("nan")},
        {"fetched": float("inf")},
    ],
    ids=str,
)
def test_a_record_with_one_wrong_value_is_none(stores: Stores, broken: dict[str, object]) -> None:
    path = stores.own("m.gguf", b"model")
    table = good(path)
    assert read_record(path) is not None
    record_path(path).write_text(json.dumps(table | broken))
    assert read_record(path) is None
    assert known_digest(path) is None


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"files": 1' + b" " * (1 << 20) + b"}"],
    ids=lambda d: str(d[:12]),
)
def test_what_is_not_a_record_is_none(stores: Stores, data: bytes) -> None:
    path = stores.own("m.gguf", b"model")
    good(path)
    record_path(path).write_bytes(data)
    assert read_record(path) is None
    mark_used(path)
    assert read_record(path) is not None


@pytest.mark.push
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["version", "files", "name", "path", "size"]), inner)
        ),
    )
)
def test_any_json_is_a_record_or_none(stores: Stores, value: object) -> None:
    path = stores.own("m.gguf", b"model")
    record_path(path).parent.mkdir(parents=True, exist_ok=True)
    record_path(path).write_text(json.dumps(value))
    assert read_record(path) is None


def test_odd_names_of_files_are_remembered_too(stores: Stores) -> None:
    path = stores.models / os.fsdecode(b"m\xff\n.gguf")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"model")
    write_record(record_of(path))
    assert known_digest(path) == DIGEST
    assert record_path(path).is_relative_to(paths.models_folder() / ".records")


def test_a_file_record_is_what_the_system_says(stores: Stores) -> None:
    path = stores.own("m.gguf", b"model")
    os.utime(path, (0, 1234.9))
    assert file_record(path) == FileRecord(str(path), 5, 1234, "")
