"""Tests of finding templates by name, and of the error for a missing one."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.prompting import chosen_template, load_template, template_names, template_path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    found = tmp_path / "templates"
    found.mkdir()
    return found


def test_names_are_those_of_toml_files(folder: Path) -> None:
    for name in ("b.toml", "a.toml", "c.txt", ".hidden.toml"):
        (folder / name).touch()
    assert template_names() == ["a", "b"]


def test_no_folder_means_no_templates(folder: Path) -> None:
    folder.rmdir()
    assert template_names() == []


def test_a_name_is_in_the_folder_and_a_path_is_itself(folder: Path) -> None:
    assert template_path("a") == folder / "a.toml"
    for path in ("./a", "a.toml", "x/a.toml", "../a"):
        assert template_path(path) == Path(path)
    for name in ("", ".a", "a\x1b", "a\nb", "x" * 65, "-a"):
        with pytest.raises(UsageError, match="is not a valid name"):
            template_path(name)


@pytest.mark.parametrize(
    ("there", "hint"),
    [
        (["summary", "joke"], "did you mean summary?"),
        (["joke"], "llmrun templates lists your templates"),
        ([], "llmrun templates edit sumary creates it"),
    ],
)
def test_misspelled_names_get_a_suggestion(folder: Path, there: list[str], hint: str) -> None:
    for name in there:
        (folder / f"{name}.toml").touch()
    with pytest.raises(UsageError, match="template: sumary: no such template") as refused:
        load_template("sumary")
    assert refused.value.hint == hint


def test_parameters_need_a_template(folder: Path) -> None:
    assert chosen_template(None, [])[0].name == ""
    with pytest.raises(UsageError, match="--param: requires a template"):
        chosen_template(None, ["a=b"])
    (folder / "a.toml").write_text('prompt = "$x"')
    assert chosen_template("a", ["x=1"])[1] == {"x": "1"}
    with pytest.raises(UsageError, match="has no such variable"):
        chosen_template("a", ["y=1"])
