"""Tests of KV caches that chats, scripts and servers save on disk, with the real process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.cli.chats import chat, environment, events_in, journals, words
from tests.support.cli.commands import LLMRUN, ROOT, llmrun, scripted, shell
from tests.support.models.downloads import smollm2
from tests.support.named_pipes import named_pipe

pytestmark = pytest.mark.push

LONG = "the quick brown fox jumps over the lazy dog. " * 20


def states(data: Path) -> list[Path]:
    return sorted((data / "conversations").glob("*.kv"))


def answers(data: Path) -> list[dict[str, int]]:
    (path,) = journals(data)
    return [event for event in events_in(path) if event["event"] == "answered"]


@pytest.mark.night
def test_a_continued_chat_starts_from_the_saved_state(tmp_path: Path) -> None:
    assert chat(tmp_path, "-q", turns=f"{LONG}\n").returncode == 0
    (state,) = states(tmp_path)
    assert state.name.partition(".")[0] == journals(tmp_path)[0].stem
    assert state.stat().st_mode & 0o777 == 0o600
    done = chat(tmp_path, "-q", "--continue", turns="two\n")
    assert (done.stdout, done.stderr) == (b"You said: two\n", b"")
    first, second = answers(tmp_path)
    assert second["cached_tokens"] > first["prompt_tokens"]


@pytest.mark.night
@pytest.mark.parametrize("how", [{"arguments": ["--no-save-state"]}, {"LLMRUN_SAVE_STATE": "no"}])
def test_saving_can_be_turned_off(tmp_path: Path, how: dict[str, object]) -> None:
    arguments = how.pop("arguments", [])
    assert isinstance(arguments, list)
    assert chat(tmp_path, "-q", *arguments, turns=f"{LONG}\n", **how).returncode == 0  # type: ignore[arg-type]
    assert states(tmp_path) == []
    assert len(journals(tmp_path)) == 1


@pytest.mark.night
def test_a_lack_of_room_is_told_only_with_v(tmp_path: Path) -> None:
    done = chat(tmp_path, "-v", turns=f"{LONG}\n{LONG}\n", LLMRUN_STATE_GB="0.000001")
    assert done.returncode == 0
    assert done.stderr.decode().count("state is not saved: it needs") == 1
    assert states(tmp_path) == []


@pytest.mark.night
def test_a_damaged_state_changes_nothing(tmp_path: Path) -> None:
    chat(tmp_path, "-q", turns=f"{LONG}\n")
    (state,) = states(tmp_path)
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    done = chat(tmp_path, "-q", "--continue", turns="two\n")
    assert (done.stdout, done.stderr, done.returncode) == (b"You said: two\n", b"", 0)
    chat(tmp_path, "-q", "--continue", turns="three\n")
    first, second, third = answers(tmp_path)
    assert second["cached_tokens"] < first["prompt_tokens"]
    assert third["cached_tokens"] > second["prompt_tokens"]


def test_removing_a_conversation_removes_its_state(tmp_path: Path) -> None:
    chat(tmp_path, "-q", turns=f"{LONG}\n")
    name = journals(tmp_path)[0].stem
    assert llmrun("conversations", "rm", name, env=environment(tmp_path)).returncode == 0
    assert os.listdir(tmp_path / "conversations") == [".locks"]  # noqa: PTH208  the names


def test_prune_removes_states_without_a_conversation(tmp_path: Path) -> None:
    chat(tmp_path, "-q", turns=f"{LONG}\n")
    env = environment(tmp_path, LLMRUN_CACHE_DIR=str(tmp_path / "cache"), HF_HOME=str(tmp_path / "hub"))
    (state,), (journal,) = states(tmp_path), journals(tmp_path)
    assert llmrun("prune", env=env).stdout == b"Nothing to prune.\n"
    journal.unlink()
    done = llmrun("prune", "--dry-run", "--json", env=env)
    assert json.loads(done.stdout)["pruned"][0]["files"] == [str(state)]
    assert llmrun("prune", env=env).stdout.startswith(b"saved states: ")
    assert states(tmp_path) == []


def cached(done_stdout: bytes) -> int:
    usage = json.loads(done_stdout)["usage"]
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_script_processes_a_long_prompt_once(tmp_path: Path) -> None:
    file = tmp_path / "book.kv"
    first = scripted("--json", "-q", "--prompt-cache", str(file), LONG + "one")
    assert (cached(first.stdout), first.stderr) == (0, b"")
    assert file.stat().st_mode & 0o777 == 0o600
    again = scripted("--json", "-q", "--prompt-cache", str(file), LONG + "two")
    assert cached(again.stdout) > len(LONG)
    assert "two" in json.loads(again.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.write_text("GGUF"), "this file has other contents and is not overwritten"),
        (lambda path: path.mkdir(), "not a regular file"),
        (named_pipe, "not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    ],
)
def test_other_files_are_not_overwritten(tmp_path: Path, make, told: str) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "x"
    make(file)
    done = scripted("--prompt-cache", str(file), "hello")
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"error: --prompt-cache: {file}: {told}\nhint: ")


def test_the_answer_is_not_overwritten_by_the_state(tmp_path: Path) -> None:
    file = tmp_path / "x"
    done = shell(f'$LLMRUN generate --backend scripted --prompt-cache "{file}" "{LONG}" > "{file}"')
    assert file.read_bytes().startswith(b"You said: the quick")
    told = f"note: state is not saved: {file}: this file has other contents and is not overwritten"
    assert told in done.stderr.decode().splitlines()


def test_a_prompt_cache_needs_a_folder_and_a_local_model(tmp_path: Path) -> None:
    done = scripted("--prompt-cache", str(tmp_path / "none" / "x"), "hello")
    assert done.returncode == 2
    assert b"there is no folder" in done.stderr
    done = llmrun("generate", "-m", "http://127.0.0.1:9/v1", "--prompt-cache", str(tmp_path / "x"), "hello")
    assert done.returncode == 2
    assert b"not supported for models on a server" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_folder_that_cannot_be_written_to_is_a_note(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs user IDs")
    if os.geteuid() == 0:
        folder = Path("/proc")  # root may write to any ordinary folder
    else:
        folder = tmp_path / "read-only"
        folder.mkdir(0o500)
    done = scripted("--prompt-cache", str(folder / "x.kv"), LONG)
    assert done.returncode == 0
    assert done.stdout.startswith(b"You said: the quick")
    assert done.stderr.decode().count("note: state is not saved: ") == 1


@pytest.mark.night
def test_a_resumed_chat_says_the_same_with_a_real_model(tmp_path: Path) -> None:
    options = ("chat", "-q", str(smollm2()), "--seed", "3", "-n", "24", "-c", "1024")
    turns = [f"Summarize this: {LONG}", "Name an animal in it.", "Name another one."]
    whole = llmrun(*options, "--no-save-state", stdin=words(turns).encode(), env=environment(tmp_path / "whole"))
    said = b""
    for turn in turns:
        continued = ["--continue"] if said else []
        done = llmrun(*options, *continued, stdin=words([turn]).encode(), env=environment(tmp_path / "parts"))
        assert done.returncode == 0, done.stderr
        said += done.stdout
    assert said == whole.stdout
    first, second, third = answers(tmp_path / "parts")
    assert second["cached_tokens"] >= first["prompt_tokens"]
    assert third["cached_tokens"] >= second["prompt_tokens"]


@pytest.mark.night
def test_switching_back_to_a_model_changes_no_answer(tmp_path: Path) -> None:
    first, second = str(smollm2()), tmp_path / "second.gguf"
    second.symlink_to(first)
    turns = [f"Summarize this: {LONG}", f"/model {second}", "Name an animal.", f"/model {first}", "Name another."]
    options = ("chat", "-q", first, "--seed", "3", "-n", "24", "-c", "1024")
    for state in ("--save-state", "--no-save-state"):
        done = llmrun(*options, state, stdin=words(turns).encode(), env=environment(tmp_path / state))
        assert done.returncode == 0, done.stderr
    saved, unsaved = (answers(tmp_path / state) for state in ("--save-state", "--no-save-state"))
    assert [answer["text"] for answer in saved] == [answer["text"] for answer in unsaved]
    assert saved[2]["cached_tokens"] >= saved[0]["prompt_tokens"]
    assert unsaved[2]["cached_tokens"] == 0


def test_listing_commands_do_not_import_numpy() -> None:
    code = "import llmrun.cli.chatting.store, llmrun.engine.saved_state.budget, sys; sys.exit('numpy' in sys.modules)"
    import subprocess

    assert subprocess.run([LLMRUN[0], "-c", code], cwd=ROOT, check=False).returncode == 0
