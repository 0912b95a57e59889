"""Tests that README.md and docs/ are correct: links, commands, tables and file names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmrun.base.errors import LlmrunError
from llmrun.cli.app import CLOSED_PIPE, INTERRUPTED, TERMINATED
from llmrun.cli.chatting.commands import command_for
from llmrun.cli.registry import aliases, load
from llmrun.model.archs.parts.architecture import architectures, table
from llmrun.options.settings import RULES, load_presets
from tests.support.cli.documented import blocks

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS]


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _shell_lines(page: Path) -> Iterator[str]:
    for block in blocks(page, "sh"):
        yield from block.replace("\\\n", "").splitlines()


def _llmrun_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of every llmrun command in a line of shell, including those inside $(...)."""
    line = re.sub(r"(^|\s)#\s.*$", "", line)
    for part in [re.sub(r"\$\(.*?\)", "FILE", line), *re.findall(r"\$\((.*?)\)", line)]:
        words: list[str] = []
        for word in [*shlex.split(part), "|"]:
            if word in ("|", "&&", ";"):
                if "llmrun" in words:
                    yield words[words.index("llmrun") + 1 :]
                words = []
            else:
                words.append(word)


COMMANDS = sorted(
    {shlex.join(words) for page in PAGES for line in _shell_lines(page) for words in _llmrun_commands(line)}
)


def test_commands_are_found_in_the_pages(saw: Callable[[int, str, int], None]) -> None:
    saw(len(COMMANDS), "commands in the documentation", 160)
    assert shlex.join(["pull", "-q", "qwen3:4b"]) in COMMANDS, "the one inside $(...)"


@pytest.mark.push
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shown_parses(command: str) -> None:
    """The flags exist and the values have the right type. Nothing runs."""
    name, *words = shlex.split(command)
    found = load(aliases().get(name, name))
    if words and words[0] in getattr(found, "commands", {}):
        found, *words = found.commands[words[0]], *words[1:]
    found.make_context(name, words).close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_script_shown_exists(page: Path) -> None:
    named = set(re.findall(r"\b(scripts/[\w.-]+)", _text(page)))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", _text(page)):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", _text(linked), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert anchor in anchors, target


def test_every_page_is_linked_from_the_readme() -> None:
    assert [page.name for page in DOCS if f"(docs/{page.name})" not in _text(README)] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_file_a_page_names_exists(page: Path) -> None:
    """Names start at the repository's root or in the package. Names with capital letters are placeholders."""
    today = _text(page).split("\n## Where the old folders are\n")[0]
    named = set(re.findall(r"`((?:[a-z_]+/)+[\w.*-]*)`", today))
    elsewhere = ("dist/", "src/", "speeds/", "llmrun/models", "llmrun/conversations", "llmrun/config.toml")
    missing = [name for name in named if not re.search(r"[A-Z*]|\.\.\.", name) and not name.startswith(elsewhere)]
    assert [name for name in missing if not (ROOT / name).exists() and not (ROOT / "llmrun" / name).exists()] == []


def test_the_table_of_architectures_is_the_registrys() -> None:
    """scripts/architectures_table prints it."""
    assert f"\n\n{table()}" in _text(ROOT / "docs" / "models.md")


def test_every_architecture_says_what_its_users_know_it_as() -> None:
    assert all(architecture.models for architecture in architectures().values())


def test_the_readme_quotes_speeds_from_the_full_table() -> None:
    full = _text(ROOT / "docs" / "bench.md")
    rows = re.findall(r"^\| ([\w. -]+), (Q\w+ \| \d+ \| .*) \|$", _text(README), re.MULTILINE)
    assert len(rows) == 6
    assert [row for row in rows if " ".join(row) not in full] == []


def test_the_table_of_settings_is_complete() -> None:
    section = _text(ROOT / "docs" / "using.md").partition("## Settings")[2]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(RULES)


def test_the_table_of_exit_codes_is_complete() -> None:
    listed = re.findall(r"^\| (\d+) \|", _text(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE)
    raised = {0, INTERRUPTED, TERMINATED, CLOSED_PIPE} | set(_codes(LlmrunError))
    assert [int(code) for code in listed] == sorted(raised)


def _codes(error: type[LlmrunError]) -> Iterator[int]:
    yield error.exit_code
    for below in error.__subclasses__():
        yield from _codes(below)


def test_the_prompt_shown_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = _text(ROOT / "docs" / "using.md").partition("### Saved prompts")[2]
    (tmp_path / "models.toml").write_text(re.findall(r"^```toml\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[0])
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    assert load_presets()["translate"].params == ["language"]


def test_every_chat_command_named_exists() -> None:
    text = "".join(_text(page) for page in (README, ROOT / "docs" / "using.md", ROOT / "docs" / "thinking.md"))
    named = set(re.findall(r"`/(\w+)[^`]*`", text)) | set(re.findall(r"(?<=[ (])/(\w+)(?=[ ,.)])", text))
    assert named
    for name in named:
        command_for(name)
