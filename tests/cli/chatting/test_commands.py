"""Tests of the table of slash commands: dispatch, listing and completion."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.chatting import actions, commands
from llmrun.cli.chatting.commands import COMMANDS, command_for, completions
from tests.support.cli.chats import Session, session


def texts(found: Session, before: str) -> list[str]:
    return [one.text for one in completions(found.chat, before)]


def test_every_name_finds_its_command_and_no_two_share_one() -> None:
    names = [name for command in COMMANDS for name in (command.name, *command.aliases)]
    assert len(names) == len(set(names))
    for command in COMMANDS:
        for name in (command.name, *command.aliases):
            assert command_for(name) is command
    assert {"help", "?", "system", "set", "show", "clear", "undo", "regen", "save", "load", "stats"} <= set(names)
    assert {"exit", "bye", "quit"} <= set(names)
    assert {"model", "retry", "copy", "edit"} <= set(names)


@pytest.mark.parametrize(("typed", "near"), [("exti", "/exit"), ("sytem", "/system"), ("regenerate", "/regen")])
def test_an_unknown_command_is_met_with_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(UsageError) as refused:
        command_for(typed)
    assert f"/{typed}: no such command" in str(refused.value)
    assert f"did you mean {near}?" in refused.value.hint
    assert "//" in refused.value.hint


def test_help_lists_every_command_and_one_of_them_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with session(tmp_path) as found:
        found.run("/help")
        listed = capsys.readouterr().err
        assert all(command.usage in listed and command.about in listed for command in COMMANDS)
        found.run("/help /undo")
        assert capsys.readouterr().err.splitlines() == ["/undo  remove the last question and its answer"]


def test_help_lists_commands_in_groups_with_their_other_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with session(tmp_path) as found:
        found.run("/help")
    listed = capsys.readouterr().err.splitlines()
    groups = [line for line in listed if not line.startswith((" ", "/")) and line.endswith(":")]
    assert groups == [f"{group}:" for group in commands.GROUPS]
    settings = listed[listed.index("Model and settings:") : listed.index("Chat:")]
    assert [line.split()[0] for line in settings[1:]] == ["/model", "/system", "/set", "/think", "/nothink", "/tools"]
    assert any(line.startswith("  /exit, /bye, /quit  ") for line in listed)


def test_help_fits_into_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(tmp_path) as found:
        found.run("/help")
        lines = len(capsys.readouterr().err.splitlines())
        monkeypatch.setattr(commands, "room", lambda stream: 80)
        found.run("/help")
        assert len(capsys.readouterr().err.splitlines()) == lines
    assert lines <= 30


def test_on_a_narrow_terminal_help_and_settings_go_on_beneath_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (actions, commands):
        monkeypatch.setattr(module, "room", lambda stream: 44)
    with session(tmp_path) as found:
        found.run("/help set")
        assert capsys.readouterr().err.splitlines() == [
            "/set [NAME VALUE]  show or change the",
            "                   settings; `default`",
            "                   resets one",
        ]
        found.run("/help")
        assert max(map(len, capsys.readouterr().err.splitlines())) <= 44
        monkeypatch.setattr("llmrun.cli.console.output.room", lambda stream: 44)
        found.run("/set")
        rows = capsys.readouterr().err.splitlines()
        assert max(map(len, rows)) <= 44
        assert rows[0].startswith("Sampling       ")
        assert rows[1].startswith(" " * 15)


def test_help_on_an_unknown_command_suggests_the_nearest(tmp_path: Path) -> None:
    with session(tmp_path) as found, pytest.raises(UsageError, match=r"^/exti: no such command") as refused:
        command_for("help").run(found.chat, "/exti")
    assert refused.value.hint.startswith("did you mean /exit?")


def test_completion_follows_the_table(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        assert texts(found, "/s") == ["/save ", "/search ", "/system ", "/set ", "/show ", "/stats "]
        assert texts(found, "/set on_full f") == ["on_full forget"]
        assert texts(found, "/copy ") == ["code"]
        assert texts(found, "/undo") == ["/undo"]
        assert "temperature " in texts(found, "/set t")
        assert texts(found, "/show te") == ["template"]
        assert "retry" in texts(found, "/help ")


def test_completion_replaces_what_it_completes(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        for before in ("/se", "/set tem", "/show "):
            for one in completions(found.chat, before):
                kept = before[: len(before) - one.replaces]
                assert (kept + one.text).startswith(before)


@pytest.mark.parametrize("before", ["", "what", "//se", " /se", "/no such", "/set\nx"])
def test_nothing_completes_what_is_no_command(tmp_path: Path, before: str) -> None:
    with session(tmp_path) as found:
        assert texts(found, before) == []


def test_saved_names_complete_load(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        found.run("Hello there!", "/save first one")
        assert texts(found, "/load fi") == ["first one"]
        assert texts(found, "/load he") == ["hello-there"]
