"""Tests of `llmrun generate --log` and `llmrun logs`, with the real process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.commands import llmrun, on_terminal, screen_of, script_file, scripted

pytestmark = pytest.mark.push


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))


def logged(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(llmrun("logs", "--json", *arguments).stdout)
    return found


def test_nothing_is_logged_unless_asked(tmp_path: Path) -> None:
    scripted("hi")
    assert not (tmp_path / "data").exists()
    done = llmrun("logs")
    assert done.stdout.startswith(b"No answers logged yet. `llmrun generate --log`")
    assert done.returncode == 0


def test_a_logged_answer_is_shown(tmp_path: Path) -> None:
    done = scripted("--log", "--seed", "7", "-s", "Be brief.", "--temp", "0.5", "the sky")
    scripted("--log", "the sea")
    (entry,) = logged("sky")
    assert (entry["prompt"], entry["system"], entry["answer"]) == ("the sky", "Be brief.", done.stdout.decode().strip())
    assert (entry["seed"], entry["sampling"]["temperature"], entry["finish_reason"]) == (7, 0.5, "stop")
    head, first, second = llmrun("logs").stdout.decode().splitlines()
    assert head.split() == ["TIME", "MODEL", "PROMPT", "ANSWER"]
    assert "the sky  " in first
    assert second.endswith("the sea  You said: the sea")
    whole = llmrun("logs", "--full", "-n", "1", "SKY").stdout.decode().splitlines()
    assert whole[0].endswith("smollm2:135m  seed 7")
    assert whole[1:] == ["system: Be brief.", "> the sky", "You said: the sky"]


def test_the_setting_logs_and_the_flag_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("log = true\n")
    monkeypatch.setenv("LLMRUN_CONFIG", str(config))
    scripted("one")
    scripted("--no-log", "two")
    assert [entry["prompt"] for entry in logged()] == ["one"]


def test_a_log_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file in the way")
    done = scripted("--log", "hi")
    assert (done.stdout, done.returncode) == (b"You said: hi\n", 0)
    assert b"note: this answer was not logged: " in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal's Ctrl-C")
def test_an_answer_stopped_by_ctrl_c_is_logged_as_cancelled(tmp_path: Path) -> None:
    slow = script_file(tmp_path, [("assistant\n", "word " * 1000)], step_seconds=0.05)
    process = on_terminal("generate", "--backend", "scripted", "-m", slow, "--log", "hi")
    process.expect("word")
    process.sendintr()
    process.read()
    process.close()
    assert process.exitstatus == 130
    (entry,) = logged()
    assert entry["finish_reason"] == "cancelled"
    assert entry["answer"].startswith("wor")
    assert "(cancelled) wor" in llmrun("logs").stdout.decode()


def test_control_characters_reach_no_terminal(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "\x1b[2Jowned\nand more")])
    scripted("--log", "-m", script, "a\x9bb")
    for flags in ((), ("--full",)):
        screen, code = screen_of("logs", *flags, columns=70, NO_COLOR="1")
        assert code == 0
        assert "\x1b[2J" not in screen
        assert "\x9b" not in screen
        assert max(map(len, screen.splitlines())) < 70


def test_the_log_can_be_found_and_removed(tmp_path: Path) -> None:
    scripted("--log", "hi")
    path = tmp_path / "data" / "logs" / "answers.jsonl"
    assert llmrun("logs", "--path").stdout.decode() == f"{path}\n"
    assert llmrun("logs", "--clear", "hi").returncode == 2
    assert path.exists()
    assert llmrun("logs", "--clear").stdout == b"1 logged answer removed\n"
    assert not path.exists()


def test_a_log_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "data" / "logs" / "answers.jsonl"
    path.mkdir(parents=True)
    done = llmrun("logs")
    assert done.stderr.decode() == f"error: log: {path}: not a file\n"
    assert done.returncode == 1


def test_damaged_lines_are_told(tmp_path: Path) -> None:
    scripted("--log", "hi")
    with (tmp_path / "data" / "logs" / "answers.jsonl").open("a") as file:
        file.write("nonsense\n")
    done = llmrun("logs")
    assert b"note: skipped 1 unreadable line in" in done.stderr
    assert b"You said: hi" in done.stdout
