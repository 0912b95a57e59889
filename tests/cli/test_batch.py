"""Tests of `llmrun batch`, as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batching.batch_runs import answers_in, batch, openai_line, random_lines, texts_in, write_lines
from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S, llmrun, on_terminal, shell
from tests.support.cli.tool_chats import call, tool_script_file
from tests.support.hub.small_disks import SmallDisk, mounted_disk
from tests.support.serving.pictures import PHOTO, SEEN, data_url
from tests.support.serving.served import serve

pytestmark = pytest.mark.push

SCRIPTED = ("--backend", "scripted", "-m", "x")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def slow_model(folder: Path, step_seconds: float = 0.02) -> tuple[str, ...]:
    script = folder / "slow.json"
    script.write_text(json.dumps({"step_seconds": step_seconds}))
    return ("--backend", "scripted", "--speculate", "off", "-m", str(script))


def test_prompts_messages_and_openais_lines_are_answered(tmp_path: Path, output: Path) -> None:
    messages = [{"role": "user", "content": "three"}]
    lines = [{"prompt": "one"}, openai_line("two", {"messages": [{"role": "user", "content": "two"}]})]
    source = write_lines(tmp_path / "in.jsonl", [*lines, {"messages": messages}])
    done = batch(source, "-o", output, *SCRIPTED)
    assert (done.returncode, done.stdout) == (0, b"")
    assert texts_in(output) == ["You said: one", "You said: two", "You said: three"]
    assert [answer["custom_id"] for answer in answers_in(output)] == ["line-1", "two", "line-3"]
    assert b"3 lines in " in done.stderr


def test_errors_are_records_and_the_exit_code(tmp_path: Path, output: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": "a", "top_p": 7}])
    done = batch(source, "-o", output, *SCRIPTED)
    assert done.returncode == 1
    assert f"note: 1 line of {output} has an error; --retry-errors runs them again" in done.stderr.decode()
    answers = answers_in(output)
    assert [answer["error"] for answer in answers] == [None, None]
    assert answers[1]["response"]["status_code"] == 400
    assert answers[1]["response"]["body"]["error"]["param"] == "top_p"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\xff", "not UTF-8 text: invalid byte at 0"),
        (b"Why?", "not valid JSON: Expecting value: column 1"),
        (b'{"prompt": 5}', "prompt: expected a string, got 5"),
        (b'{"prompt": "x", "custom_id": "line-1"}', "custom_id: already used in line 1"),
    ],
)
@pytest.mark.parametrize("flag", [[], ["--dry-run"]])
def test_the_first_bad_line_stops_before_anything_is_written(
    tmp_path: Path, output: Path, line: bytes, words: str, flag: list[str]
) -> None:
    """The model does not even exist, so no attempt is made to load it."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "one"}, b"", line, b"[", {"prompt": "two"}])
    done = batch(source, "-o", output, "-m", "no-such-model", *flag)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith(f"error: {source}: line 3: {words}")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(("name", "flag"), [("in.TXT", []), ("in", ["--text"])])
def test_each_line_of_a_text_is_a_prompt(tmp_path: Path, output: Path, name: str, flag: list[str]) -> None:
    source = tmp_path / name
    source.write_bytes(b'\xef\xbb\xbf one \r\n\r\n{"prompt": "two"}\nthr\xc3\xa9e')
    done = batch(source, "-o", output, *SCRIPTED, *flag)
    assert done.returncode == 0, done.stderr
    assert texts_in(output) == ["You said: one", 'You said: {"prompt": "two"}', "You said: thrée"]
    assert [answer["custom_id"] for answer in answers_in(output)] == ["line-1", "line-3", "line-4"]


def test_standard_input_and_output_are_a_pipeline(tmp_path: Path) -> None:
    done = llmrun("batch", "-", "--text", "-o", "-", *SCRIPTED, stdin=b"one\ntwo\n")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    contents = [each["response"]["body"]["choices"][0]["message"]["content"] for each in records]
    assert contents == ["You said: one", "You said: two"]
    assert b"2 lines in " in done.stderr
    bad = llmrun("batch", "-", "-o", "-", *SCRIPTED, stdin=b"one\n")
    assert (bad.returncode, bad.stdout) == (2, b"")
    assert bad.stderr.startswith(b"error: standard input: line 1: not valid JSON")
    empty = llmrun("batch", "-", "-o", "-", *SCRIPTED, stdin=b"\n")
    assert empty.stderr == b"error: standard input: the file has no lines\n"


@pytest.mark.night
def test_a_closed_pipe_ends_the_run_quietly(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"number {number}\n" for number in range(2000)))
    model = " ".join(slow_model(tmp_path))
    done = shell(f"$LLMRUN batch {source} -o - {model} | head -n 1")
    assert (done.returncode, done.stdout.count(b"\n"), done.stderr) == (141, 1, b"")


@pytest.mark.night
def test_a_line_of_100_megabytes_is_refused(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in.jsonl"
    with source.open("wb") as stream:
        stream.write(b'{"prompt": "before"}\n{"prompt": "')
        for _ in range(100):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n{"prompt": "after"}\n')
    done = batch(source, "-o", output, *SCRIPTED)
    assert (done.returncode, output.exists()) == (2, False)
    assert b"in.jsonl: line 2: the line has more than 16,777,216 bytes" in done.stderr


@pytest.fixture
def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the user's models.toml."""
    (tmp_path / "config.toml").write_text('model = "x"\nbackend = "scripted"\n')
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path / "models.toml"


def test_rows_of_a_csv_file_fill_a_prompt(tmp_path: Path, output: Path, presets: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text('custom_id,text,language\nfirst,"Hello, you",French\nsecond,Bye,\n')
    presets.write_text('[presets.translate]\nprompt = "Say $text in $language."\ntemperature = 0.5\n')
    done = batch(source, "-o", output, "-m", "translate")
    assert done.returncode == 0, done.stderr
    assert texts_in(output) == ["You said: Say Hello, you in French.", "You said: Say Bye in ."]
    assert [answer["custom_id"] for answer in answers_in(output)] == ["first", "second"]


def test_parameters_fill_what_lines_do_not(tmp_path: Path, output: Path, presets: Path) -> None:
    presets.write_text('[presets.t]\nmodel = "x"\nprompt = "$a $b $c: $input"\ndefaults.c = "C"\n')
    source = write_lines(
        tmp_path / "in.jsonl", [{"a": "A", "input": "x"}, {"input": "y", "b": 2, "a": "own"}, {"a": 1}]
    )
    done = batch(source, "-o", output, "-m", "t", "-P", "b=B")
    assert (done.returncode, output.exists()) == (2, False)
    assert b"in.jsonl: line 3: preset t: the line has no field input" in done.stderr
    write_lines(source, [{"a": "A", "input": "x"}, {"input": "y", "b": 2, "a": "own"}])
    assert batch(source, "-o", output, "-m", "t", "-P", "b=B").returncode == 0
    first, second = answers_in(output)
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "You said: A B C: x"
    assert second["response"]["body"]["choices"][0]["message"]["content"] == "You said: own 2 C: y"


def test_flags_are_defaults_for_the_lines(tmp_path: Path, output: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a long text"}, {"prompt": "a long text", "max_tokens": 5}])
    assert batch(source, "-o", output, *SCRIPTED, "-n", "3", "--stop", "zzz").returncode == 0
    usages = [answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers_in(output)]
    assert usages == [3, 5]


@pytest.mark.night
@pytest.mark.parametrize(
    ("flag", "text"),
    [
        (["--choice", "yes,no"], {"yes", "no"}),
        (["--regex", "[ab]{3}"], None),
        (["--json-schema", '{"const": 5}'], {"5"}),
    ],
)
def test_answers_have_the_format(tmp_path: Path, output: Path, flag: list[str], text: set[str] | None) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    done = batch(source, "-o", output, *SCRIPTED, *flag)
    assert done.returncode == 0, done.stderr
    found = set(texts_in(output))
    assert found <= text if text else all(len(each) == 3 and set(each) <= set("ab") for each in found)


def test_the_columns_of_a_csv_file_are_checked_first(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("text;label\na;b\n")
    done = batch(source, "-o", output, *SCRIPTED)
    assert done.returncode == 2
    assert done.stderr.decode() == (
        f"error: {source}: no column is named prompt; the columns are text;label\n"
        "hint: rename a column, or name a preset whose prompt uses the columns: -m NAME\n"
    )


@pytest.mark.night
def test_the_output_behind_a_link_is_written(tmp_path: Path, output: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "one"}])
    link = tmp_path / "link.jsonl"
    link.symlink_to(output)
    assert batch(source, "-o", link, *SCRIPTED).returncode == 0
    assert link.is_symlink()
    assert texts_in(output) == ["You said: one"]


@pytest.mark.night
def test_an_interrupted_run_keeps_its_context_size(tmp_path: Path, output: Path) -> None:
    """The default depends on the free memory, which is different every time."""
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"number {number}"} for number in range(40)])
    model = slow_model(tmp_path)
    command = [*LLMRUN, "batch", str(source), "-o", str(output), *model, "-c", "2048"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        partial = output.with_name("out.jsonl.partial")
        while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    other = batch(source, "-o", output, *model, "-c", "1024")
    assert "the interrupted run used a different context size: 2048 before, 1024 now" in other.stderr.decode()
    assert batch(source, "-o", output, *model).returncode == 0  # without -c, it would be 8192


def test_tools_are_called(tmp_path: Path, output: Path) -> None:
    script = tool_script_file(tmp_path, ("Weather?", call("get_weather", city="Paris", days=2)), ("Hello?", "Hello!"))
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    lines = [{"prompt": "Weather?", "tools": tools}, {"prompt": "Hello?", "tools": tools}]
    done = batch(write_lines(tmp_path / "in.jsonl", lines), "-o", output, "--backend", "scripted", "-m", script)
    assert done.returncode == 0, done.stderr
    weather, hello = (answer["response"]["body"]["choices"][0] for answer in answers_in(output))
    assert weather["finish_reason"] == "tool_calls"
    called = weather["message"]["tool_calls"][0]["function"]
    assert (called["name"], json.loads(called["arguments"])) == ("get_weather", {"city": "Paris", "days": 2})
    assert hello["message"]["content"] == "Hello!"


def test_json_reports_the_counts(tmp_path: Path, output: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": "one"}, {"prompt": "x", "top_p": 7}])
    done = batch(source, "-o", output, *SCRIPTED, "--json")
    body = json.loads(done.stdout)
    assert {name: body[name] for name in ("complete", "lines", "done", "failed", "duplicates", "requests")} == {
        "complete": True,
        "lines": 3,
        "done": 3,
        "failed": 1,
        "duplicates": 1,
        "requests": 1,
    }


def test_ctrl_c_leaves_a_run_that_continues(tmp_path: Path, output: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"number {number}"} for number in range(60)])
    model = slow_model(tmp_path)
    terminal = on_terminal("batch", str(source), "-o", str(output), *model, "--parallel", "4")
    terminal.expect(rb"\d+ of 60 lines +\d")
    while not output.with_name("out.jsonl.partial").read_bytes().count(b"\n") > 3:
        time.sleep(0.01)
    terminal.sendintr()
    written = terminal.read().decode()
    terminal.close()
    assert terminal.exitstatus == 130
    assert "of 60 lines; run the same command again to continue" in written.replace("\r\n", " ")
    assert "Traceback" not in written
    done = batch(source, "-o", output, *model, "--json")
    assert json.loads(done.stdout)["resumed"] >= 3
    assert texts_in(output) == [f"You said: number {number}" for number in range(60)]


@pytest.mark.night
def test_ctrl_c_does_not_wait_for_a_large_input(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "x"}\n' * 5_000_000)  # reading it takes longer than the limit below
    command = [*LLMRUN, "batch", str(source), "-o", str(output), *SCRIPTED]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        _, written = process.communicate(timeout=5)
    assert process.returncode == 130
    assert b"Traceback" not in written


@pytest.mark.night
def test_sigterm_stops_a_run_cleanly(tmp_path: Path, output: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"number {number}"} for number in range(60)])
    command = [*LLMRUN, "batch", str(source), "-o", str(output), *slow_model(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        partial = output.with_name("out.jsonl.partial")
        while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
            time.sleep(0.01)
        process.terminate()
        _, written = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 143
    assert b"run the same command again to continue" in written


@pytest.mark.night
def test_a_killed_run_continues_with_the_same_bytes(tmp_path: Path, output: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    source = write_lines(tmp_path / "in.jsonl", random_lines(3, 60))
    model = slow_model(tmp_path, 0.005)
    expected = tmp_path / "expected.jsonl"
    batch(source, "-o", expected, *model)
    command = [*LLMRUN, "batch", str(source), "-o", str(output), *model, "--parallel", "4"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        partial = output.with_name("out.jsonl.partial")
        while not partial.exists() or partial.read_bytes().count(b"\n") < 10:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    again = batch(source, "-o", output, *model, "--json", "--parallel", "8")
    assert json.loads(again.stdout)["resumed"] >= 9
    assert output.read_bytes() == expected.read_bytes()
    assert [path.name for path in tmp_path.glob("*out.jsonl?*")] == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted_disk(tmp_path / "disk", 256 << 10, room=66 << 10) as disk:
        yield disk


@pytest.mark.night
def test_a_full_disk_is_one_line_and_the_run_continues(tmp_path: Path, small: SmallDisk) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"number {number}"} for number in range(190)])
    output = small.folder / "out.jsonl"
    done = batch(source, "-o", output, *SCRIPTED)
    assert done.returncode == 7
    assert done.stderr.decode().splitlines()[-2:] == [
        f"error: disk: {small.folder}: full, 0 bytes free",
        "hint: free up space, then run the same command again to continue",
    ]
    small.make_room()
    again = batch(source, "-o", output, *SCRIPTED, "--json")
    assert again.returncode == 0, again.stderr
    assert 0 < json.loads(again.stdout)["resumed"] < 190
    assert len(texts_in(output)) == 190


@pytest.mark.night
def test_servers_are_workers(tmp_path: Path, output: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", random_lines(5, 40))
    script = tmp_path / "model.json"
    script.write_text('{"step_seconds": 0.01}')  # slow enough that both servers are needed
    model = ["--backend", "scripted", "--speculate", "off", "-c", "4096", str(script)]
    local = tmp_path / "local.jsonl"
    batch(source, "-o", local, "-m", *model[-1:], *model[:-1])
    with serve(*model, log=tmp_path / "one.log") as one, serve(*model, log=tmp_path / "two.log") as two:
        urls = f"http://127.0.0.1:{one.port},http://127.0.0.1:{two.port}"
        done = batch(source, "-o", output, "--workers", urls, "--parallel", "4")
        assert done.returncode == 1, done.stderr
        alone = tmp_path / "alone.jsonl"
        assert batch(source, "-o", alone, "-m", urls.split(",")[0]).returncode == 1
    assert output.read_bytes() == alone.read_bytes() == local.read_bytes()
    for log in ("one.log", "two.log"):
        assert b"POST  /v1/chat/completions  200" in (tmp_path / log).read_bytes()


@pytest.mark.night
def test_a_run_outlives_a_server(tmp_path: Path, output: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"number {number}"} for number in range(80)])
    model = slow_model(tmp_path, 0.01)
    arguments = [*model[:-2], model[-1]]
    with serve(*arguments, log=tmp_path / "one.log") as one, serve(*arguments, log=tmp_path / "two.log") as two:
        urls = f"http://127.0.0.1:{one.port},http://127.0.0.1:{two.port}"
        command = [*LLMRUN, "batch", str(source), "-o", str(output), "--workers", urls, "--parallel", "4"]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
            partial = output.with_name("out.jsonl.partial")
            while not partial.exists() or partial.read_bytes().count(b"\n") < 10:
                time.sleep(0.01)
            two.process.kill()
            _, written = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, written
    assert b"the worker is lost, and its requests will run again" in written
    assert texts_in(output) == [f"You said: number {number}" for number in range(80)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "-o: no output file was given"),
        (["-o", "in.jsonl"], "in.jsonl: the output must not be the input"),
        (["-o", "/nowhere/out.jsonl"], "the folder /nowhere does not exist"),
        (["-o", "out", "--workers", "nonsense"], "--workers: 'nonsense' is not a worker"),
        (["-o", "out", "--workers", "local,local"], "--workers: local is given twice"),
        (
            ["-o", "out", "--workers", "local", "-m", "http://127.0.0.1:1"],
            "cannot be combined with a model on a server",
        ),
        (["-o", "out", "--workers", "ftp://x"], "--workers: 'ftp://x' is not a worker"),
        (["-o", "out", "-T", "label"], "--template: no longer exists"),
        (["-o", "out", "-P", "a=b"], "--param: requires a preset with a prompt"),
        (["-o", "out", "--force", "--retry-errors"], "--force: cannot be combined with --retry-errors"),
        (
            ["-o", "out", "--workers", "http://127.0.0.1:1", "-t", "3"],
            "--threads: not supported for models on a server",
        ),
        (
            ["-o", "out", "--workers", "http://127.0.0.1:1", "-m", "x"],
            "--model: has no effect, because all workers are servers",
        ),
        (["-o", "out", "--workers", "http://127.0.0.1:1", "--kv-tokens", "9"], "--kv-tokens: has no effect"),
        (["-o", "out", "--workers", "http://127.0.0.1:1,http://127.0.0.1:1/v1/"], "is given twice"),
        (["-o", "out", "--parallel", "0"], "--parallel: 0 is not a whole number from 1 to 256"),
        (["-o", "-", "--retry-errors"], "--retry-errors: cannot be combined with -o -"),
        (["-o", "-", "--json"], "--json: cannot be combined with -o -"),
        (["-o", "out", "--choice", ""], "--choice: the text must not be empty"),
    ],
)
def test_bad_flags_are_refused_with_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    done = llmrun("batch", "in.jsonl", *arguments, cwd=tmp_path)
    message = done.stderr.decode()
    assert words in message
    assert message.startswith("error: ")
    assert message.count("\n") <= 2
    assert done.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["nothing.jsonl", "", "/dev/null"])
def test_an_input_that_is_no_file_is_one_line(tmp_path: Path, output: Path, name: str) -> None:
    done = llmrun("batch", str(tmp_path / name), "-o", str(output), *SCRIPTED)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") <= 2
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_exist_leaves_nothing_behind(tmp_path: Path, output: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    done = batch(source, "-o", output, "-m", "no-such-model", "--offline")
    assert done.returncode == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_lines_that_name_another_model_are_answered_with_a_note(tmp_path: Path, output: Path) -> None:
    body: dict[str, Any] = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hi"}], "nonsense": 1}
    source = write_lines(tmp_path / "in.jsonl", [openai_line("a", body)])
    done = batch(source, "-o", output, *SCRIPTED)
    assert b"note: lines that name another model (gpt-4o) were answered by the model of this run" in done.stderr
    assert b"note: these fields had no effect: nonsense" in done.stderr


def test_lines_may_have_images(tmp_path: Path, output: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "red.png").write_bytes(PHOTO)
    lines = [{"prompt": "Which color?", "images": image} for image in ("red.png", data_url(PHOTO))]
    source = write_lines(tmp_path / "in.jsonl", lines)
    flags = (*SCRIPTED, "--image-dir", tmp_path / "photos")
    done = batch(source, "-o", output, *flags, "--mmproj", "x")
    assert (done.returncode, texts_in(output)) == (0, [SEEN, SEEN]), done.stderr
    counted = batch(source, "--dry-run", "--json", *flags, "--mmproj", "x")
    assert json.loads(counted.stdout)["failing"] == 0
