"""Tests that every exception ends in one sentence, a next step and the right exit code."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmrun.base import errors
from llmrun.cli.arguments.usage import NO_COMMAND
from llmrun.cli.messages import message_for
from tests.support.cli.commands import ROOT, llmrun
from tests.support.gguf.gguf_files import tiny_llama

CODES = {
    errors.LlmrunError: 1,
    errors.InvalidAnswer: 1,
    errors.UsageError: 2,
    errors.ModelFileError: 3,
    errors.BadGGUF: 3,
    errors.UnsupportedModel: 3,
    errors.BackendCrashed: 3,
    errors.ModelNotFound: 4,
    errors.NetworkError: 5,
    errors.IntegrityError: 6,
    errors.DoesNotFit: 7,
    errors.KVFull: 7,
    errors.ContextExceeded: 8,
    errors.TemplateRefused: 9,
    errors.Overloaded: 1,
    errors.Unavailable: 1,
    errors.Cancelled: 130,
}


def test_the_table_holds_the_whole_tree() -> None:
    def below(kind: type[errors.LlmrunError]) -> set[type[errors.LlmrunError]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    assert {kind for kind in below(errors.LlmrunError) if kind.__module__ == errors.__name__} == set(CODES)


@pytest.mark.parametrize("kind", CODES)
def test_our_errors_keep_their_words_and_code(kind: type[errors.LlmrunError]) -> None:
    assert message_for(kind("what: where: 3, limit 2", hint="do this")) == (
        "what: where: 3, limit 2",
        "do this",
        CODES[kind],
    )


@pytest.mark.parametrize(
    ("error", "sentence", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "system error: /x/y: No space left on device", 7),
        (OSError(errno.EACCES, "Permission denied", "/x/y"), "system error: /x/y: Permission denied", 1),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "system error: /x: Read-only file system", 1),
        (OSError(errno.EIO, "Input/output error"), "system error: Input/output error", 1),
        (MemoryError(), "not enough memory for this request", 7),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory for this request", 7),
        (ValueError("oh\nno"), "internal error: ValueError: oh\nno", 1),
        (OSError("without a number"), "internal error: OSError: without a number", 1),
    ],
)
def test_foreign_errors_are_one_sentence(error: Exception, sentence: str, code: int) -> None:
    message = message_for(error)
    assert (message.sentence, message.exit_code) == (sentence, code)


AGENT_ARGUMENTS = "write the agent's own arguments after --, as in `llmrun launch pi -- --help`"
UNMAPPED = "libopenblas.so: failed to map segment from shared object"


def test_a_library_without_room_to_load_is_lack_of_memory() -> None:
    """NumPy and llvmlite wrap the loader's error in their own."""
    for kind in (ImportError, OSError):
        error = kind("the library could not be loaded, for one of many reasons")
        error.__cause__ = kind(UNMAPPED)
        assert message_for(error).exit_code == 7


def test_a_library_on_a_file_system_without_programs_is_no_lack_of_memory(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux reports noexec")

    def noexec(path: str) -> SimpleNamespace:
        return SimpleNamespace(f_flag=os.ST_NOEXEC)

    error = OSError(f"{tmp_path}/{UNMAPPED}")
    assert message_for(error).exit_code == 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", noexec)
        assert message_for(error).exit_code == 1


LIMITED = """
import resource, sys
import llmrun.cli.app, {imported}
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + {room}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(llmrun.cli.app.main(sys.argv[1:]))
"""


@pytest.mark.push
@pytest.mark.parametrize(
    ("imported", "room"),
    [
        ("llmrun.cli.commands.generate", 8_000_000),  # too little for NumPy's libraries
        ("llmrun.engine.engine", 64_000_000),  # too little for llvmlite's libraries
    ],
)
def test_a_process_with_a_limit_of_memory_says_so(tmp_path: Path, imported: str, room: int) -> None:
    program = LIMITED.format(imported=imported, room=room)
    path = tiny_llama(tmp_path / "tiny.gguf", layers=1)
    command = [sys.executable, "-c", program, "generate", "--backend", "cpu", "-t", "1", "-m", str(path), "hello"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    sentence, hint = done.stderr.splitlines()
    assert re.fullmatch(r"error: not enough memory for this request: the process is limited to [\d.]+ MB", sentence)
    assert "ulimit -v" in hint
    assert (done.returncode, done.stdout) == (7, "")


def test_an_internal_error_says_how_to_see_more() -> None:
    assert "--debug" in message_for(ZeroDivisionError("x")).hint


@pytest.mark.push
@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        ("generate --seeed 1", "--seeed: no such option", "did you mean --seed?"),
        ("generate --zzz", "--zzz: no such option", "see llmrun generate --help"),
        ("launch claude --zzz", "--zzz: no such option", AGENT_ARGUMENTS),
        ("version", "no such command 'version'", "`llmrun --version`"),
        ("qwen3:4b hello", "no such command 'qwen3:4b'", NO_COMMAND),
        ("-m qwen3:4b hello", "-m: no such option", NO_COMMAND),
        ("--zzz", "--zzz: no such option", "see llmrun --help"),
        ("generate --top-k many x", "--top-k: 'many' is not a whole number", "see llmrun generate --help"),
        ("generate --temp hot x", "--temperature: 'hot' is not a number", "see llmrun generate --help"),
        (
            "generate --logprobs -1 x",
            "--logprobs: -1 is not a whole number of at least 0",
            "see llmrun generate --help",
        ),
        ("bench --repetitions a", "--repetitions: 'a' is not a whole number of at least 1", "see llmrun bench --help"),
        ("search -n 1001", "--limit: 1001 is not a whole number from 1 to 1000", "see llmrun search --help"),
        ("show", "MODEL is missing", "for example: llmrun show qwen3:4b"),
        (
            "templates show x",
            "templates: no longer exists",
            "prompt templates are presets now: `llmrun list` shows them, and -m NAME uses one",
        ),
        ("list x", "unexpected argument: x", "see llmrun list --help"),
        ("run m two words", "unexpected argument: two words", '`llmrun generate -m MODEL "text"` answers one question'),
        ("generate x --seed", "--seed: a value is missing", "see llmrun generate --help"),
        ("bench -m", "-m: a value is missing", "see llmrun bench --help"),
        ("generate --max-token 3 x", "--max-token: no such option", "did you mean --max-tokens?"),
        ("generate --temprature 1 x", "--temprature: no such option", "did you mean --temperature?"),
        ("generat x", "no such command 'generat'", "did you mean 'generate'?"),
        ("zzz", "no such command 'zzz'", "see llmrun --help"),
        ("generate --quiet=3 x", "--quiet: takes no value", "see llmrun generate --help"),
        ("bench compare a b --fail-above", "--fail-above: a value is missing", "see llmrun bench compare --help"),
        ("bench compare --quiet=3 a b", "--quiet: takes no value", "see llmrun bench compare --help"),
        ("bench compare --zzz a b", "--zzz: no such option", "see llmrun bench compare --help"),
        ("bench compare --fail 5% a b", "--fail: no such option", "did you mean --fail-above?"),
        ("bench history --html", "--html: a value is missing", "see llmrun bench history --help"),
        ("generate --max 3 x", "--max: no such option", "did you mean --max-tokens?"),
        ("generate --no-s x", "--no-s: no such option", "did you mean --no-stream, --no-stats or --no-stdin?"),
        ("generate --tem 1 x", "--tem: no such option", "did you mean --temp?"),
        ("generate --t 1 x", "--t: no such option", "see llmrun generate --help"),  # a dozen options begin with it
    ],
)
def test_usage_errors_are_two_lines_and_code_2(arguments: str, sentence: str, hint: str) -> None:
    done = llmrun(*arguments.split())
    assert done.stderr.decode() == f"error: {sentence}\nhint: {hint}\n"
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.push
def test_a_prompt_that_begins_with_a_dash_gets_a_hint() -> None:
    done = llmrun("generate", "-5 plus 3 is what?")
    assert done.stderr.decode() == "error: -5: no such option\nhint: if this is text, write -- before it\n"


@pytest.mark.push
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--temp -0.5", "--temp: -0.5"),
        ("--temp nan", "--temp: nan"),
        ("--top-p 1.5", "--top-p: 1.5"),
        ("--min-p -0.1", "--min-p: -0.1"),
        ("-n 0", "--max-tokens: 0"),
        ("-c -1", "--ctx-size: -1"),
        ("-t -2", "--threads: -2"),
        ("--seed -2", "--seed: -2"),
        ("--repeat-penalty 0", "--repeat-penalty: 0"),
        ("--repeat-last-n -2", "--repeat-last-n: -2"),
        ("--logit-bias 5", "--logit-bias: '5' is not ID=BIAS"),
        ("--logit-bias 5=inf", "--logit-bias: '5=inf'"),
        ("--logit-bias 5=nan", "--logit-bias: '5=nan'"),
        ("--stop=", "--stop: the text must not be empty"),
        ("--chat-template-kwargs [1]", "--chat-template-kwargs: not a JSON object"),
        ("--chat-template-kwargs {", "--chat-template-kwargs: not JSON"),
        ("--chat-template /no/such/file", "--chat-template: /no/such/file: No such file or directory"),
        ("--raw --system x", "--raw:"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_in_one_line(arguments: str, words: str) -> None:
    done = llmrun("generate", *arguments.split(), "a prompt")
    first, *rest = done.stderr.decode().splitlines()
    assert first.startswith("error: ")
    assert words in first
    assert len(rest) <= 1
    assert (done.returncode, done.stdout) == (2, b"")
