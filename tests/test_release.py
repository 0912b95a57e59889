"""Tests of scripts/release in a repository of its own, with stand-ins for Python and for the checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.push

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2026-01-02\n\n- The first thing.\n"
)
DATED = re.compile(r"## \[Unreleased\]\n\n## \[0\.2\.0\] - \d{4}-\d\d-\d\d\n\n### Added\n")
IDENTITY = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in {"NAME": "A", "EMAIL": "a@b"}.items()
}
ENVIRONMENT = {**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


def run(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=clone, capture_output=True, text=True, env=ENVIRONMENT)


def git(clone: Path, *words: str) -> str:
    done = run(clone, "git", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def commit(clone: Path) -> None:
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "Something")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clean clone of version 0.1.0 on main. Its checks write the version that they see to a file."""
    (tmp_path / "scripts").mkdir()
    for name in ("release", "environment.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    for check in ("check", "test"):
        program(tmp_path / "scripts" / check, f'grep version llmrun/__init__.py | sed "s/^/{check} $* /" >>checked')
    (tmp_path / "llmrun").mkdir()
    (tmp_path / "llmrun" / "__init__.py").write_text('"""A package."""\n\n__version__ = "0.1.0"\nNAME = "a"\n')
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "llmrun.1").write_text("0.1.0\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".gitignore").write_text(".venv/\nchecked\n")
    program(
        tmp_path / ".venv" / "bin" / "python",
        "[ $1 != scripts/manpage ] || sed -n 's/__version__ = //p' llmrun/__init__.py",
    )
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path)
    return tmp_path


def test_a_release_is_one_commit_and_a_tag(clone: Path) -> None:
    done = run(clone, "scripts/release", "0.2.0")
    assert (done.returncode, done.stdout) == (0, "git push --atomic origin main v0.2.0\n"), done.stderr
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "log", "--format=%s") == "Release 0.2.0\nSomething\n"
    assert git(clone, "rev-parse", "v0.2.0^{commit}") == git(clone, "rev-parse", "HEAD")
    assert git(clone, "cat-file", "-t", "v0.2.0") == "tag\n"
    assert git(clone, "diff", "--name-only", "HEAD~").split() == ["CHANGELOG.md", "docs/llmrun.1", "llmrun/__init__.py"]
    assert (clone / "llmrun" / "__init__.py").read_text() == '"""A package."""\n\n__version__ = "0.2.0"\nNAME = "a"\n'
    assert (clone / "docs" / "llmrun.1").read_text() == '"0.2.0"\n'
    changelog = (clone / "CHANGELOG.md").read_text()
    assert DATED.search(changelog)
    assert changelog.replace(DATED.search(changelog)[0], "## [Unreleased]\n\n### Added\n") == CHANGELOG  # type: ignore[index]


def test_the_checks_see_the_new_version(clone: Path) -> None:
    run(clone, "scripts/release", "0.2.0")
    assert (clone / "checked").read_text() == 'check  __version__ = "0.2.0"\ntest --no-skips __version__ = "0.2.0"\n'


@pytest.mark.parametrize("check", ["check", "test"])
def test_a_failed_check_leaves_the_tree_unchanged(check: str, clone: Path) -> None:
    program(clone / "scripts" / check, "exit 1")
    commit(clone)
    before = git(clone, "rev-parse", "HEAD")
    done = run(clone, "scripts/release", "0.2.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert (git(clone, "rev-parse", "HEAD"), git(clone, "status", "--porcelain"), git(clone, "tag")) == (before, "", "")


def test_the_first_release_may_have_the_version_in_the_file(clone: Path) -> None:
    (clone / "CHANGELOG.md").write_text(CHANGELOG.partition("## [0.1.0]")[0])
    commit(clone)
    done = run(clone, "scripts/release", "0.1.0")
    assert (done.returncode, git(clone, "tag")) == (0, "v0.1.0\n"), done.stderr


def test_a_release_that_was_taken_back_can_be_repeated(clone: Path) -> None:
    """docs/releasing.md describes these steps."""
    run(clone, "scripts/release", "0.2.0")
    git(clone, "tag", "--delete", "v0.2.0")
    git(clone, "revert", "--no-edit", "HEAD")
    done = run(clone, "scripts/release", "0.2.0")
    assert (done.returncode, git(clone, "tag")) == (0, "v0.2.0\n"), done.stderr


def _leave_main(clone: Path) -> None:
    git(clone, "switch", "--quiet", "--create", "other")


def _change_a_file(clone: Path) -> None:
    (clone / "new").touch()


def _release_later_versions(clone: Path) -> None:
    for version in ("v0.2.0", "v0.9.0", "v0.10.0"):
        git(clone, "tag", version)


def _empty_the_section(clone: Path) -> None:
    (clone / "CHANGELOG.md").write_text(CHANGELOG.replace("### Added\n\n- A thing.\n\n", ""))
    commit(clone)


def _nothing(clone: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "arguments", "error"),
    [
        (_nothing, [], "usage:"),
        (_nothing, ["v0.2.0"], "usage:"),
        (_nothing, ["0.2"], "usage:"),
        (_nothing, ["0.2.00"], "usage:"),
        (_nothing, ["0.2.0", "0.3.0"], "usage:"),
        (_leave_main, ["0.2.0"], "the current branch is not main"),
        (_change_a_file, ["0.2.0"], "has changes"),
        (_release_later_versions, ["0.2.0"], "the tag v0.2.0 already exists"),
        (_release_later_versions, ["0.9.1"], "0.10.0 is newer than 0.9.1"),
        (_nothing, ["0.0.9"], "0.1.0 is newer than 0.0.9"),
        (_nothing, ["0.1.0"], "already has a section for 0.1.0"),
        (_empty_the_section, ["0.2.0"], "the section Unreleased of CHANGELOG.md is empty"),
    ],
)
def test_releases_that_are_not_ready_fail(prepare: object, arguments: list[str], error: str, clone: Path) -> None:
    assert callable(prepare)
    prepare(clone)
    before = git(clone, "status", "--porcelain")
    done = run(clone, "scripts/release", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert error in done.stderr
    assert git(clone, "status", "--porcelain") == before
    assert not (clone / "checked").exists()


def test_the_notes_are_the_section_of_the_tag(clone: Path) -> None:
    run(clone, "scripts/release", "0.2.0")
    assert run(clone, "scripts/release", "--notes", "v0.2.0").stdout == "### Added\n\n- A thing.\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "error"),
    [
        ("v0.2.0", CHANGELOG, "the version in llmrun/__init__.py is 0.1.0"),
        ("0.1.0", CHANGELOG, "the version in llmrun/__init__.py is 0.1.0"),
        ("v0.1.0", CHANGELOG.replace("0.1.0", "Something"), "no dated heading for 0.1.0"),
        ("v0.1.0", CHANGELOG.replace(" - 2026-01-02", ""), "no dated heading for 0.1.0"),
        ("v0.1.0", CHANGELOG.replace("- The first thing.\n", ""), "the section 0.1.0 of CHANGELOG.md is empty"),
    ],
)
def test_tags_that_do_not_match_the_tree_are_refused(tag: str, changelog: str, error: str, clone: Path) -> None:
    (clone / "CHANGELOG.md").write_text(changelog)
    done = run(clone, "scripts/release", "--notes", tag)
    assert (done.returncode, done.stdout) == (1, "")
    assert error in done.stderr
