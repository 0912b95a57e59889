"""Tests of `llmrun chat` through pipes, with the real process on the scripted backend."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from llmrun.cli.chatting.store import read_conversation
from tests.support.cli.chats import chat, environment, events_in, journals, open_chat, say, words
from tests.support.cli.commands import llmrun, script_file, shell

pytestmark = pytest.mark.push

LONG = "abcdefghij\n" * 500  # a pipe's reader gets whole lines


def answered(path: Path) -> list[tuple[str, str]]:
    return [(one.question, one.answer) for one in read_conversation(path).conversation.exchanges]


def until_saved(path: Path) -> None:
    """Wait until the file holds the final line of the last answer."""
    end = time.monotonic() + 60
    while "reason" not in events_in(path)[-1]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_line_is_a_turn_and_every_answer_a_line(tmp_path: Path) -> None:
    done = chat(tmp_path, turns="one\ntwo\n\nthree")
    assert done.stdout == b"You said: one\nYou said: two\nYou said: three\n"
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 3
    assert all(" tokens in " in line for line in lines)
    assert done.returncode == 0


def test_quiet_leaves_stderr_empty(tmp_path: Path) -> None:
    done = chat(tmp_path, "-q", turns="one\ntwo\n")
    assert (done.stdout, done.stderr, done.returncode) == (b"You said: one\nYou said: two\n", b"", 0)


def test_no_turns_are_no_answers_and_no_file(tmp_path: Path) -> None:
    done = chat(tmp_path, turns="")
    assert (done.stdout, done.stderr, done.returncode) == (b"", b"", 0)
    assert journals(tmp_path) == []


def test_blocks_commands_and_the_endings_of_other_systems(tmp_path: Path) -> None:
    turns = b'\xef\xbb\xbfone\r\n"""\ntwo\n\n/lines\n"""\n//x\n/undo\n/set max_tokens 5\n \xc3\xa9\n/exit\nnever\n'
    done = chat(tmp_path, "-q", turns=turns)
    assert done.stdout == b"You said: one\nYou said: two\n\n/lines\nYou said: /x\nYou s\n"
    assert done.returncode == 0
    (path,) = journals(tmp_path)
    assert [question for question, _ in answered(path)] == ["one", "two\n\n/lines", " é"]


def test_undo_twice_in_a_pipe_takes_two_turns_back(tmp_path: Path) -> None:
    done = chat(tmp_path, "-q", turns="one\ntwo\n/undo\n/undo\nthree\n")
    assert done.stdout == b"You said: one\nYou said: two\nYou said: three\n"
    assert answered(journals(tmp_path)[0]) == [("three", "You said: three")]


def test_a_program_at_the_other_end_can_wait_for_each_answer(tmp_path: Path) -> None:
    with open_chat(tmp_path, "-q") as process:
        assert process.stdout
        for turn in ("one", "two", "three"):
            say(process, f"{turn}\n")
            assert process.stdout.readline() == f"You said: {turn}\n".encode()


@pytest.mark.parametrize(
    ("turns", "code", "said"),
    [
        (b"one\n/exti\ntwo\n", 2, "did you mean /exit?"),
        (b"one\n/set temperature x\ntwo\n", 2, "temperature: 'x' is not a number"),
        (b"one\ntw\xff\n", 2, "line 2 is not UTF-8: byte 0xff"),
        (b'one\n"""two\n', 2, "ended inside a"),
        (b"one\n" + b"x" * 300 + b"\ntwo\n", 8, "limit of 200"),
    ],
)
def test_the_first_error_ends_a_pipe_with_its_code(tmp_path: Path, turns: bytes, code: int, said: str) -> None:
    done = chat(tmp_path, "-q", "-c", "200", turns=turns)
    assert (done.stdout, done.returncode) == (b"You said: one\n", code)
    told = done.stderr.decode()
    assert told.startswith("error: ")
    assert said in told
    assert told.count("\n") == 2 if "hint" in told else 1
    assert answered(journals(tmp_path)[0])[0] == ("one", "You said: one")


def test_a_pipe_goes_on_past_a_full_context_where_the_settings_say_so(tmp_path: Path) -> None:
    questions = [f"question {number}" for number in range(20)]
    answers = b"".join(b"You said: %s\n" % question.encode() for question in questions)
    done = chat(tmp_path, "-q", "-c", "300", turns=words(questions), LLMRUN_ON_FULL="forget")
    assert (done.stdout, done.stderr, done.returncode) == (answers, b"", 0)
    assert len(answered(journals(tmp_path)[0])) == len(questions)
    (tmp_path / "config.toml").write_text('on_full = "never"\n')
    refused = chat(tmp_path, "-q", LLMRUN_CONFIG=str(tmp_path / "config.toml"))
    assert refused.returncode == 2
    assert b"on_full: 'never' is not one of stop, forget" in refused.stderr


def test_a_broken_template_is_code_9(tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{{ raise_exception('no') }}")
    done = chat(tmp_path, "--chat-template", str(template), turns="one\ntwo\n")
    assert (done.stdout, done.returncode) == (b"", 9)


def test_a_reader_that_leaves_ends_the_chat_with_everything_saved(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", LONG)], step_seconds=0.02)
    done = shell(
        f"echo hello | $LLMRUN chat --backend scripted {script} | head -c 10; exit ${{PIPESTATUS[1]}}",
        LLMRUN_DATA_DIR=str(tmp_path),
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, b"abcdefghij", b"")
    (_, answer), *_ = answered(journals(tmp_path)[0])
    assert LONG.startswith(answer)
    assert len(answer) >= 10
    assert events_in(journals(tmp_path)[0])[-1]["reason"] == "failed"


def test_a_full_disk_behind_stdout_is_code_1(tmp_path: Path) -> None:
    done = shell("echo hello | $LLMRUN chat --backend scripted > /dev/full; exit $?", LLMRUN_DATA_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (
        1,
        b"error: cannot write to standard output: No space left on device\n",
    )


@pytest.mark.night
def test_the_model_is_an_argument_or_an_option(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "yes")])
    for arguments in ([script], ["-m", script], ["--model", script]):
        assert chat(tmp_path, "-q", *arguments, turns="hello\n").stdout == b"yes\n"
    assert chat(tmp_path, script, "-m", script).returncode == 2
    missing = llmrun("chat", "no-such-model", stdin=b"hello\n", env=environment(tmp_path))
    assert (missing.stdout, missing.returncode) == (b"", 4)


@pytest.mark.night
def test_continue_takes_up_messages_system_prompt_settings_and_model(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "abcdef")], context_size=500)
    chat(tmp_path, script, "-s", "brief", "-n", "3", "--seed", "5", "-c", "400", turns="one\n/set top_k 7\n")
    done = chat(tmp_path, "--continue", turns="two\n/show\n/show conversation\n")
    assert done.stdout == b"abc\n"
    told = done.stderr.decode()
    assert told.splitlines()[0] == 'note: continuing "one", 1 turn, just now'
    for part in ("top_k 7", "seed 5, max_tokens 3", "system      brief", "context     400 tokens", "> one"):
        assert part in told
    (path,) = journals(tmp_path)
    assert answered(path) == [("one", "abc"), ("two", "abc")]


def test_flags_win_over_what_is_continued(tmp_path: Path) -> None:
    first = script_file(tmp_path, [("assistant\n", "abcdef")])
    (tmp_path / "other").mkdir()
    other = script_file(tmp_path / "other", [("assistant\n", "ABCDEF")])
    chat(tmp_path, first, "-s", "brief", "-n", "3", turns="one\n")
    assert chat(tmp_path, "-q", "--continue", other, "-n", "2", "-s", "", turns="two\n").stdout == b"AB\n"
    assert chat(tmp_path, "-q", "--continue", turns="three\n").stdout == b"AB\n"
    (path,) = journals(tmp_path)
    saved = read_conversation(path).conversation
    assert (saved.model, saved.system, saved.preferences) == (other, "", {"max_tokens": 2})


@pytest.mark.night
def test_settings_of_the_environment_are_not_kept_with_a_conversation(tmp_path: Path) -> None:
    assert chat(tmp_path, "-q", turns="one\n", LLMRUN_MAX_TOKENS="3", LLMRUN_SYSTEM="x").stdout == b"You\n"
    assert chat(tmp_path, "-q", "--continue", turns="two\n").stdout == b"You said: two\n"
    assert read_conversation(journals(tmp_path)[0]).conversation.preferences == {}


@pytest.mark.night
def test_continue_from_another_folder_finds_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script_file(tmp_path, [("assistant\n", "yes")])
    done = shell(
        f"here=$PWD; cd {tmp_path}; export PYTHONPATH=$here;"
        "echo one | $LLMRUN chat -q --backend scripted script.json;"
        "cd /; echo two | $LLMRUN chat -q --backend scripted --continue; true",
        LLMRUN_DATA_DIR=str(tmp_path),
    )
    assert done.stdout == b"yes\nyes\n"


def test_continue_without_a_conversation_is_one_line(tmp_path: Path) -> None:
    done = chat(tmp_path, "--continue", turns="one\n")
    assert (done.stdout, done.returncode) == (b"", 1)
    assert done.stderr == b"error: --continue: there are no conversations yet\nhint: llmrun chat starts one\n"


def test_kill_9_in_the_middle_of_an_answer_loses_nothing_that_was_shown(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    turn = "<|im_end|>\n<|im_start|>assistant\n"
    script = script_file(tmp_path, [(f"one{turn}", LONG), (f"again{turn}", "yes")], step_seconds=0.01)
    with open_chat(tmp_path, script) as process:
        assert process.stdout
        say(process, "one\n")
        shown = process.stdout.read(50)
        process.send_signal(signal.SIGKILL)
        shown += process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    (path,) = journals(tmp_path)
    ((question, answer),) = answered(path)
    assert question == "one"
    assert answer.startswith(shown.decode())
    done = chat(tmp_path, "-q", "--continue", turns="again\n")
    assert (done.stdout, done.returncode) == (b"yes\n", 0)
    assert answered(path) == [("one", answer), ("again", "yes")]


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)], ids=["INT", "TERM", "HUP"]
)
def test_a_signal_in_the_middle_of_an_answer_ends_the_chat_with_everything_saved(
    tmp_path: Path, name: str, code: int
) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    script = script_file(tmp_path, [("assistant\n", LONG)], step_seconds=0.01)
    with open_chat(tmp_path, script) as process:
        assert process.stdout
        say(process, "one\ntwo\n")
        shown = process.stdout.read(22)
        process.send_signal(signal.Signals[name])
        rest, told = process.communicate(timeout=120)
    assert process.returncode == code
    ((_, answer),) = answered(journals(tmp_path)[0])
    assert (shown + rest).decode() == answer + "\n"
    assert events_in(journals(tmp_path)[0])[-1]["reason"] == "cancelled"
    assert told.count(b"\n") == 1
    assert b"stopped after " in told


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)], ids=["INT", "TERM", "HUP"]
)
def test_a_signal_between_turns_ends_the_chat_in_silence(tmp_path: Path, name: str, code: int) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    with open_chat(tmp_path, "-q") as process:
        assert process.stdout
        say(process, "one\n")
        assert process.stdout.readline() == b"You said: one\n"
        until_saved(journals(tmp_path)[0])
        process.send_signal(signal.Signals[name])
        rest, told = process.communicate(timeout=120)
    assert (process.returncode, rest, told) == (code, b"", b"")
    assert answered(journals(tmp_path)[0]) == [("one", "You said: one")]


@pytest.mark.night
def test_a_hangup_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    done = shell(
        "(echo one; sleep 2; echo two) | (trap '' HUP; exec $LLMRUN chat -q --backend scripted) &"
        " sleep 1.5; kill -HUP $!; wait $!; (exit $?)",
        LLMRUN_DATA_DIR=str(tmp_path),
    )
    assert (done.stdout, done.returncode) == (b"You said: one\nYou said: two\n", 0)


def test_no_lock_is_left_behind_whatever_was_loaded(tmp_path: Path) -> None:
    chat(tmp_path, turns="one\n")
    (first,) = journals(tmp_path)
    assert chat(tmp_path, "-q", turns=f"two\n/load {first.stem}\nthree\n").returncode == 0
    assert [question for question, _ in answered(first)] == ["one", "three"]
    assert list((tmp_path / "conversations" / ".locks").iterdir()) == []


def test_two_processes_never_write_into_one_conversation(tmp_path: Path) -> None:
    with open_chat(tmp_path, "-q") as process:
        assert process.stdout
        say(process, "one\n")
        process.stdout.readline()
        second = chat(tmp_path, "--continue", turns="two\n")
        assert b"note: the conversation is open in another process, so this chat continues a copy\n" in second.stderr
        say(process, "three\n")
        process.stdout.readline()
    assert second.stdout == b"You said: two\n"
    assert sorted([question for question, _ in answered(path)] for path in journals(tmp_path)) == [
        ["one", "three"],
        ["one", "two"],
    ]


@pytest.mark.night
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 1000,
        b"not json\n",
        b'{"event": "began"}\n',
        b"[" * 100_000 + b"\n",
        b'{"event": "began", "format": 99, "conversation": "", "model": "", "created": "", "version": ""}\n',
        b'{"event": "began", "format": 1, "conversation": "", "model": "m", "created": "", "version": ""}\n'
        b'{"event": "\x1b[31m"}\n',
    ],
)
def test_a_hostile_conversation_is_one_line_and_stays_as_it_is(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "conversations" / "20260101-000000-abcd.jsonl"
    path.parent.mkdir()
    path.write_bytes(data)
    done = chat(tmp_path, "--continue", turns="one\n")
    told = done.stderr.decode()
    assert done.returncode == 1
    assert told.startswith(f"error: conversation is damaged: {path}: ")
    assert "Traceback" not in told
    assert "\x1b" not in told
    assert told.count("\n") == 2
    assert path.read_bytes() == data
    loaded = chat(tmp_path, turns=f"/load {path.stem}\n")
    assert loaded.returncode == 1
    assert "is damaged" in loaded.stderr.decode()
    assert b"cannot be read: llmrun conversations show" in chat(tmp_path, turns="/load\n").stderr


def test_a_chat_from_a_pipe_imports_nothing_that_draws(tmp_path: Path) -> None:
    env = {"LLMRUN_DATA_DIR": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPROFILEIMPORTTIME": "1"}
    done = llmrun("chat", "--backend", "scripted", stdin=b"**hi**\n", env=env)
    assert done.stdout == b"You said: **hi**\n"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
    assert "llmrun.cli.chatting.plain" in imported
    assert not imported & {"rich", "markdown_it", "pygments", "prompt_toolkit"}


@pytest.mark.night
def test_a_home_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    env = {"HOME": "/dev/null", "PATH": os.environ["PATH"]}
    done = llmrun("chat", "--backend", "scripted", stdin=b"one\ntwo\n", env=env)
    assert (done.stdout, done.returncode) == (b"You said: one\nYou said: two\n", 0)
    notes = [line for line in done.stderr.decode().splitlines() if line.startswith("note: ")]
    kernels, conversation = notes
    assert "cannot save compiled kernels" in kernels
    assert "no longer being saved" in conversation


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    done = shell("umask 000; echo one | $LLMRUN chat -q --backend scripted; true", LLMRUN_DATA_DIR=str(tmp_path))
    assert done.stdout == b"You said: one\n"
    (path,) = journals(tmp_path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_pipe_holds_no_escape_byte(tmp_path: Path) -> None:
    done = chat(tmp_path, "-v", turns=words(["one", "/help", "/show", "/set", "/stats", "/save x", "/load"]))
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"\r" not in done.stdout + done.stderr
    assert done.returncode == 0


def test_help_is_in_the_words_of_its_flags() -> None:
    told = llmrun("chat", "--help-all").stdout.decode()
    for part in ("[MODEL]", "--continue", "--system", "--temp", "--seed", "--ctx-size", "--chat-template", "--offline"):
        assert part in told
