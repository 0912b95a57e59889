"""Tests of paths built from untrusted names: no name leads outside the folder."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.hub.local import paths
from llmrun.hub.local.safe_writes import make_folder
from llmrun.hub.names import safe_segments

pytestmark = pytest.mark.push

SHA256, COMMIT = "a" * 64, "b" * 40
HOSTILE = (
    *("", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/", "/a", "~", "~root/x", "$HOME/x", "a\0b", "a\nb"),
    *("a\\..\\b", "C:\\x", "C:x", "//host/share", "con", "NUL.gguf", "com1.x", ".hidden", "-rf", "a" * 300),
    *("x/" * 9 + "x", "a.", "a ", "a\u202eb", "a\u2044b", "\uff0e\uff0e/x", "\ud800", "a\x7f", "é"),
    *("a:b", "a*b", "a?b", "a|b", "a<b", '"'),
)
plain = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,20}", fullmatch=True)
parts = st.sampled_from(HOSTILE) | st.text(max_size=40) | plain
names = parts | st.lists(parts, max_size=4).map("/".join)

BUILDERS: dict[str, Callable[[str], Path]] = {
    "own_model": paths.own_model,
    "web_file": lambda name: paths.web_file("https://x.example/m.gguf", name),
    "web_file, the address": lambda name: paths.web_file(name, "m.gguf"),
    "received_file, the file": lambda name: paths.received_file(SHA256, name),
    "received_file, the sha256": lambda name: paths.received_file(name, "m.gguf"),
    "work_folder": paths.work_folder,
    "lock_file": paths.lock_file,
    "record_file": lambda name: paths.record_file(Path(name)),
    "repository_folder": paths.repository_folder,
    "blob, the repository": lambda name: paths.blob(name, SHA256),
    "blob, the sha256": lambda name: paths.blob("org/repo", name),
    "snapshot_file, the repository": lambda name: paths.snapshot_file(name, COMMIT, "m.gguf"),
    "snapshot_file, the commit": lambda name: paths.snapshot_file("org/repo", name, "m.gguf"),
    "snapshot_file, the file": lambda name: paths.snapshot_file("org/repo", COMMIT, name),
    "reference_file, the repository": lambda name: paths.reference_file(name, "main"),
    "reference_file, the revision": lambda name: paths.reference_file("org/repo", name),
    "shared_lock, the repository": lambda name: paths.shared_lock(name, SHA256),
    "shared_lock, the sha256": lambda name: paths.shared_lock("org/repo", name),
}


def roots() -> tuple[Path, Path]:
    return paths.models_folder(), paths.hub_cache()


def test_every_builder_of_a_path_is_tried_here() -> None:
    builders = {name for name, value in vars(paths).items() if builds_a_path(value) and not name.startswith("_")}
    not_of_names = {"models_folder", "hub_cache", "expanded", "partial_of"}
    assert builders - not_of_names == {name.partition(",")[0] for name in BUILDERS}


def builds_a_path(value: object) -> bool:
    return getattr(value, "__module__", "") == paths.__name__ and inspect.get_annotations(value).get("return") == "Path"  # type: ignore[arg-type]


def require_one_line(error: LlmrunError) -> None:
    assert len(str(error)) < 2000
    assert str(error).isprintable()


@pytest.mark.parametrize("builder", BUILDERS)
@given(name=names)
@example(name="../../../../../../../../etc/passwd")
def test_no_name_leads_out_of_our_folders(builder: str, name: str) -> None:
    try:
        path = BUILDERS[builder](name)
    except UsageError as error:
        require_one_line(error)
        return
    inside = [root for root in roots() if path.is_relative_to(root)]
    assert inside
    below = path.relative_to(inside[0]).parts
    assert below
    assert ".." not in below
    assert Path(os.path.normpath(path)) == path
    assert all(len(part.encode("utf-8", "surrogatepass")) <= 255 for part in below[-1:])
    assert "\0" not in str(path)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_of_a_file_is_refused(name: str) -> None:
    for builder in ("own_model", "snapshot_file, the file", "reference_file, the revision", "repository_folder"):
        with pytest.raises(UsageError):
            BUILDERS[builder](name)


@given(name=names)
def test_segments_are_the_name_itself_or_refused(name: str) -> None:
    try:
        assert "/".join(safe_segments(name)) == name
    except UsageError as error:
        require_one_line(error)


@given(one=names, two=names)
@example(one="a--b/c", two="a/b--c")
def test_different_names_have_different_places(one: str, two: str) -> None:
    if one == two:
        return
    for what, builder in BUILDERS.items():
        if what == "record_file" and Path(one) == Path(two):
            continue
        try:
            first, second = builder(one), builder(two)
        except UsageError:
            continue
        assert first != second


def test_a_repository_has_an_owner_and_a_name() -> None:
    for name in ("one", "a/b/c", "a--b/c"):
        with pytest.raises(UsageError, match="not in the form owner/name"):
            paths.repository_folder(name)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"HF_HOME": "$PLACE/b"}, "/there/b/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, "/home/someone/.cache/huggingface/hub"),
    ],
)
def test_the_shared_cache_is_where_huggingface_hub_has_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", "PLACE": "/there", **variables}.items():
        monkeypatch.setenv(name, value)
    assert paths.hub_cache() == Path(expected)
    theirs = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    assert subprocess.check_output([sys.executable, "-c", theirs], text=True).strip() == expected


# --- planted symlinks -------------------------------------------------------------------------------------------------


@given(depth=st.integers(0, 3), absolute=st.booleans())
def test_a_folder_that_is_a_link_out_is_not_written_through(
    depth: int, absolute: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("store")
    root, outside = base / "root", base / "outside"
    outside.mkdir()
    levels = ["a", "b", "c", "d"]
    above = root.joinpath(*levels[:depth])
    above.mkdir(parents=True)
    target = outside if absolute else Path(os.path.relpath(outside, above))
    (above / levels[depth]).symlink_to(target)
    with pytest.raises(LlmrunError, match="this link leads out of"):
        make_folder(root.joinpath(*levels), root)
    assert list(outside.iterdir()) == []


def test_links_inside_and_a_root_that_is_a_link_are_followed(tmp_path: Path) -> None:
    (tmp_path / "large disk" / "elsewhere").mkdir(parents=True)
    root = tmp_path / "root"
    root.symlink_to(tmp_path / "large disk")
    (root / "a").symlink_to("elsewhere")
    make_folder(root / "a" / "b", root)
    make_folder(root / "a" / "b", root)
    assert (tmp_path / "large disk" / "elsewhere" / "b").is_dir()


@pytest.mark.parametrize("kind", ["file", "dangling"])
def test_what_is_no_folder_is_one_sentence(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        (tmp_path / "a").write_text("a file")
    else:
        (tmp_path / "a").symlink_to("nowhere")
    with pytest.raises(LlmrunError, match="cannot be written: Not a directory"):
        make_folder(tmp_path / "a" / "b", tmp_path)
