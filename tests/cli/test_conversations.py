"""Tests of `llmrun conversations` and `llmrun chat --continue NAME`, with the real process."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from llmrun.cli.chatting.store import lock_journal
from tests.support.cli.chats import answering_files, chat, environment, journals, open_chat, say
from tests.support.cli.commands import llmrun, screen_of, script_file

pytestmark = pytest.mark.push


def conversations(data: Path, *arguments: str) -> tuple[str, str, int]:
    """Return stdout, stderr and the exit code."""
    done = llmrun("conversations", *arguments, env=environment(data))
    return done.stdout.decode(), done.stderr.decode(), done.returncode


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return the data folder with two conversations, the newer one second."""
    chat(tmp_path, "-q", "-s", "Be brief.", turns="Why is the sky blue?\nIs the sea?\n")
    chat(tmp_path, "-q", turns="Tell me about a red fox\n/save fox copy\n")
    return tmp_path


def test_without_a_conversation_the_list_says_how_to_begin_one(tmp_path: Path) -> None:
    assert conversations(tmp_path) == ("No conversations yet. `llmrun chat` starts one.\n", "", 0)
    assert json.loads(conversations(tmp_path, "list", "--json")[0]) == {"conversations": []}


@pytest.mark.night
def test_the_list_has_the_newest_first(data: Path) -> None:
    told, errors, code = conversations(data)
    assert (errors, code) == ("", 0)
    head, *rows = told.splitlines()
    assert head.split() == ["NAME", "WHEN", "MODEL", "TURNS", "FIRST", "WORDS"]
    assert [row.split("  ")[0] for row in rows] == ["fox copy", "tell-me-about-a-red-fox", "why-is-the-sky-blue"]
    assert " ".join(rows[2].split()) == "why-is-the-sky-blue just now smollm2:135m 2 Why is the sky blue?"
    assert conversations(data, "list")[0] == told
    listed = json.loads(conversations(data, "--json")[0])["conversations"]
    assert [one["saved_copy"] for one in listed] == [True, False, False]
    assert listed[2]["title"] == "Why is the sky blue?"
    assert (listed[2]["turns"], listed[2]["problem"]) == (2, "")
    assert Path(listed[2]["file"]).is_file()


@pytest.mark.night
def test_a_damaged_file_is_listed_and_does_not_hide_the_others(data: Path) -> None:
    (data / "conversations" / "broken.jsonl").write_bytes(b"\x1b[31m\n")
    told, _, code = conversations(data)
    assert "cannot be read: llmrun conversations show broken" in told
    assert (len(told.splitlines()), code) == (5, 0)
    assert conversations(data, "show", "broken")[1].startswith("error: conversation is damaged: ")
    found = conversations(data, "search", "sky")
    assert "note: 1 conversation cannot be read" in found[1]
    assert found[2] == 0


@pytest.mark.night
def test_show_prints_questions_and_answers(data: Path) -> None:
    told, _, code = conversations(data, "show", "why")
    assert code == 0
    assert told.splitlines() == [
        "why-is-the-sky-blue  smollm2:135m  2 turns  just now",
        "system: Be brief.",
        *("", "> Why is the sky blue?", "You said: Why is the sky blue?"),
        *("", "> Is the sea?", "You said: Is the sea?"),
    ]
    body = json.loads(conversations(data, "show", "why", "--json")[0])
    assert [message["role"] for message in body["messages"]] == ["system", *["user", "assistant"] * 2]


@pytest.mark.night
def test_search_names_the_conversations_and_the_lines(data: Path) -> None:
    told, errors, code = conversations(data, "search", "SKY", "blue")
    assert told.splitlines() == [
        "why-is-the-sky-blue  just now",
        "  > Why is the sky blue?",
        "    You said: Why is the sky blue?",
    ]
    assert (errors, code) == ("note: llmrun chat --continue NAME continues a conversation\n", 0)
    assert conversations(data, "search", "fox")[0].count("red fox") == 2  # the copy is not shown again
    assert conversations(data, "search", "sky", "fox") == (
        "",
        "note: no conversation contains all of these: sky, fox\n",
        1,
    )
    body = json.loads(conversations(data, "search", "--json", "fox")[0])
    assert [line["role"] for line in body["conversations"][0]["lines"]] == ["user", "assistant"]
    assert conversations(data, "search", " ")[2] == 2


@pytest.mark.night
def test_search_highlights_on_a_terminal_and_shows_no_control_sequence(data: Path) -> None:
    chat(data, "-q", turns="evil \x1b[2J\x9b sky\n")
    screen, code = screen_of("conversations", "search", "sky", LLMRUN_DATA_DIR=str(data))
    assert code == 0
    assert "the \x1b[1;31msky\x1b[0m blue?" in screen
    assert "evil ␛[2J<9B> \x1b[1;31msky\x1b[0m" in screen
    assert "\x1b" not in conversations(data, "search", "sky")[0]
    shown = screen_of("conversations", "show", "evil", LLMRUN_DATA_DIR=str(data))[0]
    assert "\x1b[2J" not in shown
    assert "\x9b" not in shown


@pytest.mark.night
def test_export_writes_markdown_or_json(data: Path, tmp_path: Path) -> None:
    told, _, code = conversations(data, "export", "why-is-the-sky-blue")
    assert code == 0
    assert told.startswith("# Why is the sky blue?\n\nsmollm2:135m, 20")
    assert "\n## System\n\nBe brief.\n\n## You\n\nWhy is the sky blue?\n\n## smollm2:135m\n\nYou said: Why" in told
    target = tmp_path / "out.md"
    written = conversations(data, "export", "why", "-o", str(target))
    assert written == ("", f"note: wrote {target}\n", 0)
    assert target.read_text() == told
    as_json = tmp_path / "out.json"
    conversations(data, "export", "why", "--format", "json", "-o", str(as_json))
    assert json.loads(as_json.read_text()) == json.loads(conversations(data, "export", "why", "--format", "json")[0])
    assert conversations(data, "export", "why", "--format", "pdf")[1:] == (
        "error: --format: 'pdf': unknown format\nhint: use markdown or json\n",
        2,
    )
    assert conversations(data, "export", "why", "-o", "/nowhere/x")[2] == 1


@pytest.mark.night
def test_rm_removes_some_and_reports_the_others(data: Path) -> None:
    told, errors, code = conversations(data, "rm", "why", "why-is-the-sky-blue", "nope", "fox copy")
    assert (told, code) == ("why-is-the-sky-blue: removed\nfox copy: removed\n", 2)
    assert errors.startswith("error: conversations rm: ")
    assert [path.stem for path in journals(data)] == ["tell-me-about-a-red-fox"]
    assert list((data / "conversations" / ".locks").iterdir()) == []


@pytest.mark.night
def test_rm_leaves_a_conversation_that_is_open(data: Path) -> None:
    path = data / "conversations" / "why-is-the-sky-blue.jsonl"
    lock = lock_journal(path)
    told, errors, code = conversations(data, "rm", "why")
    lock.release()
    assert (told, code) == ("", 1)
    assert "another process is writing to it" in errors
    assert path.exists()


@pytest.mark.night
def test_a_name_with_a_slip_gets_a_suggestion(data: Path) -> None:
    for arguments in (("show",), ("export",), ("rm",)):
        _, errors, code = conversations(data, *arguments, "why-is-the-skye")
        assert (errors.splitlines()[1], code) == ("hint: did you mean why-is-the-sky-blue?", 2)


def test_a_flag_in_the_wrong_place_is_not_ignored(tmp_path: Path) -> None:
    assert conversations(tmp_path, "--json", "search", "x") == (
        "",
        "error: --json: must come after search\nhint: llmrun conversations search --json\n",
        2,
    )


# --- chat --continue [NAME]


def first_note(data: Path, *arguments: str) -> str:
    return chat(data, *arguments, turns="").stderr.decode().splitlines()[0]


def test_continue_takes_up_the_last_conversation_or_the_named_one(data: Path) -> None:
    assert '"Tell me about a red fox"' in first_note(data, "--continue")
    assert '"Why is the sky blue?"' in first_note(data, "--continue", "why-is-the-sky-blue")
    assert '"Why is the sky blue?"' in first_note(data, "--continue=why")
    assert '"Tell me about a red fox"' in first_note(data, "--continue", "-n", "3")
    assert '"Why is the sky blue?"' in first_note(data, "--continue", "why", "-n", "3")


@pytest.mark.night
def test_continue_and_a_model_in_any_order(data: Path) -> None:
    """If the word after --continue names no conversation, it is taken as the model."""
    script = script_file(data, [("assistant\n", "yes")])
    for arguments, title in (
        ((script, "--continue"), "Tell me"),
        (("--continue", script), "Tell me"),
        ((script, "--continue", "why"), "Why is"),
        (("--continue", "why", script), "Why is"),
        (("--continue", "why", "-m", script), "Why is"),
    ):
        done = chat(data, *arguments, turns="/show\n")
        assert f'continuing "{title}' in done.stderr.decode()
        assert f"file        {script}" in done.stderr.decode()
        assert done.returncode == 0
    assert 'continuing "Why is' in first_note(data, "--continue", "smollm2")


@pytest.mark.night
def test_continue_with_a_name_that_is_neither_is_one_error(data: Path) -> None:
    for name, hint in (("sky", "did you mean why-is-the-sky-blue?"), ("zzz", "llmrun conversations lists them")):
        done = chat(data, "--continue", name, turns="x\n")
        assert done.stderr.decode() == f"error: --continue: {name}: no such conversation\nhint: {hint}\n"
        assert done.returncode == 2
    told = llmrun("chat", "--continue", "no:7b", env=environment(data)).stderr
    assert b"neither a model in the catalogue nor a file" in told


@pytest.mark.night
def test_a_conversation_that_is_called_like_a_model_is_the_conversation(tmp_path: Path) -> None:
    chat(tmp_path, "-q", turns="smollm2\n")
    chat(tmp_path, "-q", turns="other\n")
    assert '"smollm2"' in first_note(tmp_path, "--continue", "smollm2")


@pytest.mark.night
def test_continue_after_clear_takes_up_what_was_said_last(tmp_path: Path) -> None:
    done = chat(tmp_path, turns="one\n/clear\n")
    assert done.stderr.decode().splitlines()[-1] == (
        "cleared; to go back: /load one, or later llmrun chat --continue one"
    )
    assert [path.stem for path in journals(tmp_path)] == ["one"]
    assert '"one", 1 turn,' in first_note(tmp_path, "--continue")
    chat(tmp_path, "-q", "--continue", turns="/clear\ntwo\n")
    assert sorted(path.stem for path in journals(tmp_path)) == ["one", "two"]
    assert '"two", 1 turn,' in first_note(tmp_path, "--continue")
    assert '"one", 1 turn,' in first_note(tmp_path, "--continue", "one")


def test_the_answer_under_way_is_a_private_file_that_goes_when_it_ends(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "abcdefghi\n" * 5)], step_seconds=0.01)
    with open_chat(tmp_path, "-q", script) as process:
        assert process.stdout
        say(process, "one\n")
        process.stdout.read(10)
        (pieces,) = answering_files(tmp_path)
        assert stat.S_IMODE(pieces.stat().st_mode) == 0o600
        assert "abcdefghi" in conversations(tmp_path, "show", "one")[0]
        process.stdout.read(40)
        say(process, "/exit\n")
        process.wait(60)
    assert answering_files(tmp_path) == []
