"""Tests that `llmrun doctor --paths` cannot forget a folder: only base/folders.py knows where llmrun's folders are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from llmrun.base import folders
from llmrun.base.folders import cache_folder, data_folder, places

ROOT = Path(__file__).resolve().parents[2]
OURS = {"llmrun/base/folders.py"}
MAY_EXPAND_HOME = {
    "llmrun/hub/local/paths.py",  # the cache of the Hugging Face Hub
    "llmrun/hub/local/other_programs.py",  # models of other programs, which are only read
    "llmrun/jobs/batching/workers/ray_address.py",  # Ray's token, which is only read
    "llmrun/jobs/doctor/folders.py",  # shortens paths
    "llmrun/serving/background/eligibility.py",  # variables that engines inherit
    "llmrun/cli/completing/installed.py",  # the settings files of shells
}


def test_every_function_for_a_path_is_listed() -> None:
    functions = [
        each for _, each in inspect.getmembers(folders, inspect.isfunction) if each.__module__ == folders.__name__
    ]
    paths = [
        each()
        for each in functions
        if inspect.signature(each).return_annotation == "Path" and not inspect.signature(each).parameters
    ]
    assert len(paths) >= 5
    assert {*paths} <= {place.path for place in places()}
    assert len({place.path for place in places()}) == len(places())


@pytest.mark.parametrize("folder", [cache_folder, data_folder])
def test_undeclared_names_have_no_path(folder: object) -> None:
    with pytest.raises(KeyError):
        folder("newly-invented")  # type: ignore[operator]


def test_other_modules_do_not_look_for_folders_themselves() -> None:
    for path in (ROOT / "llmrun").rglob("*.py"):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if name not in OURS:
            assert not re.search(r"platformdirs|PlatformDirs", source), name
        if name not in OURS | MAY_EXPAND_HOME:
            assert not re.search(r"Path\.home\(|XDG_|[\"']~/", source.replace("/tmp", "")), name
