"""Tests of `llmrun chat --tools` on a terminal: questions about calls, failing tools and Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest

if sys.platform == "win32":
    pytest.skip("needs a POSIX terminal", allow_module_level=True)

import termios

from llmrun.cli.chatting.store import read_conversation
from tests.support.cli.chats import chat, journals
from tests.support.cli.commands import modes_of_a_new_terminal, on_terminal, script_file
from tests.support.cli.tool_chats import RESULT, call, text_call, tool_script_file
from tests.support.tools.boxes import FAKE_SERVER

pytestmark = pytest.mark.push

PROMPT = r"\x1b\[\?2004h(?:\x1b\[\?1l)?\x1b\[\?25l"  # the prompt is drawn
QUESTION = "run it? [y]es, [n]o, [a]lways for this tool, [s]how details: "
SCRIPT = (
    ("Echo?", f"Let me see.\n{call('echo', a='hi')}"),
    ("Text?", f"```json\n{text_call('echo', a='hi')}\n```"),
    ("Wait?", call("slow")),
    ("Hang?", call("hanging_echo", text="x")),
    ("Crash?", call("crashing_echo", text="x")),
    (RESULT, "I have seen it."),
)
ANSWERED = "I have seen it."


PLAIN = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def tools_file(folder: Path) -> Path:
    server = f"command = [{sys.executable!r}, '-I', '-S', {str(FAKE_SERVER)!r}, "
    file = folder / "tools.toml"
    file.write_text(f"""
        [commands.echo]
        description = "Repeat a text."
        command = [{sys.executable!r}, "-I", "-S", "-c", "import sys; print('echo of', sys.argv[1])", "{{a}}"]
        parameters = {{ type = "object", properties = {{ a = {{ type = "string" }} }}, required = ["a"] }}

        [commands.slow]
        description = "Wait for ever."
        command = [{sys.executable!r}, "-I", "-S", "-c", "import time; time.sleep(600)"]
        safe = true

        [servers.hanging]
        {server}'hangs']
        timeout = 0.3

        [servers.crashing]
        {server}'dies']
    """)
    return file


@contextmanager
def chatting(folder: Path) -> Iterator[pexpect.spawn[bytes]]:
    """Yield a chat with tools at its first prompt; afterwards, check that the terminal's modes are restored."""
    script = tool_script_file(folder, *SCRIPT)
    process = on_terminal(
        "chat",
        "--backend",
        "scripted",
        script,
        "--tools",
        str(tools_file(folder)),
        LLMRUN_DATA_DIR=str(folder),
        NO_COLOR="1",
    )
    before = modes_of_a_new_terminal()
    process.expect_exact("/help lists the commands")
    process.expect(PROMPT)
    yield process
    process.expect(PROMPT)
    process.send("\x04")
    process.expect(pexpect.EOF)
    assert termios.tcgetattr(process.child_fd) == before
    process.close()
    assert process.exitstatus == 0


def ask(process: pexpect.spawn[bytes], question: str, shown: str) -> None:
    process.send(f"{question}\r")
    process.expect_exact(shown)


def answer(process: pexpect.spawn[bytes], keys: str) -> None:
    """Answer the question about a call. The terminal echoes the keys, as outside the chat."""
    process.expect_exact(QUESTION)
    process.send(f"{keys}\r")
    process.expect_exact(f"{keys}\r\n")


def results(folder: Path) -> list[str]:
    messages = read_conversation(journals(folder)[0]).conversation.all_messages()
    return [message["content"] for message in messages if message["role"] == "tool"]


def test_the_tools_are_listed(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        ask(process, "/tools", "echo  Repeat a text.\r\n")
        process.expect_exact("slow, runs without asking  Wait for ever.\r\n")
        process.expect_exact("hanging_echo (server hanging: echo)  Repeat a text.\r\n")


def test_calls_wait_for_yes_no_show_and_always(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        for keys in ("y", "n", "a"):
            ask(process, "Echo?", 'tool echo {"a": "hi"}\r\n')
            if keys == "y":
                answer(process, "s")
                process.expect_exact("description\r\n  Repeat a text.\r\n")
            answer(process, keys)
            process.expect_exact("not run\r\n" if keys == "n" else "result: echo of hi (11 characters, ")
            process.expect_exact(ANSWERED)
            process.expect(PROMPT)
        ask(process, "Echo?", "result: echo of hi")  # without a question
        assert QUESTION.encode() not in process.before
        process.expect_exact(ANSWERED)
    assert results(tmp_path) == [
        "echo of hi\n",
        "The user did not allow this call.",
        "echo of hi\n",
        "echo of hi\n",
    ]


def test_a_call_as_text_is_shown_only_as_a_call(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        ask(process, "Text?", 'tool echo {"a": "hi"}\r\n')
        assert b"```" not in process.before
        answer(process, "y")
        process.expect_exact(ANSWERED)
    assert results(tmp_path) == ["echo of hi\n"]


@pytest.mark.night
def test_servers_that_hang_or_crash_are_told_to_the_model(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        ask(process, "Hang?", 'tool hanging_echo (server hanging: echo) {"text": "x"}')
        answer(process, "y")
        process.expect_exact("failed: tool hanging_echo: no answer within 0.3 s")
        process.expect_exact(ANSWERED)
        process.expect(PROMPT)
        ask(process, "Crash?", "tool crashing_echo")
        answer(process, "y")
        process.expect_exact("failed: tool crashing_echo: it ended: exit status 4: out of cheese")
        process.expect_exact(ANSWERED)
    assert len(results(tmp_path)) == 2


def test_ctrl_c_stops_a_call_and_a_question(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        ask(process, "Wait?", "waiting for the tool")
        process.send("typed meanwhile")
        process.sendintr()
        process.expect_exact("note: stopped: tool slow; /retry lets the model continue")
        process.expect(PROMPT)
        process.expect_exact("typed meanwhile")
        process.send("\x03")  # clears the line
        ask(process, "Echo?", QUESTION)
        process.sendintr()
        process.expect_exact("note: stopped: tool echo; /retry lets the model continue")
        process.expect(PROMPT)
        ask(process, "/retry", ANSWERED)
    assert results(tmp_path) == ["The user stopped this call."] * 2
    conversation = read_conversation(journals(tmp_path)[0]).conversation
    assert [one.answer for one in conversation.exchanges] == ["", ANSWERED]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return chat(folder, "--tools", str(tools_file(folder)), *arguments, turns="Echo?\n")


def test_a_pipe_refuses_calls_and_gets_only_the_answer(tmp_path: Path) -> None:
    done = run(tmp_path, tool_script_file(tmp_path, ("Echo?", call("echo", a="hi")), (RESULT, ANSWERED)))
    assert (done.stdout, done.returncode) == (f"{ANSWERED}\n".encode(), 0)
    assert b'tool echo {"a": "hi"}\nnot run: the call needs your confirmation\n' in done.stderr
    assert done.stderr.count(b" tokens in ") == 1  # only the final answer has a closing line


def test_long_results_are_cut_to_fit_the_context(tmp_path: Path) -> None:
    flood = tmp_path / "flood.toml"
    flood.write_text(
        f"[commands.flood]\ndescription = 'Flood.'\nsafe = true\ncommand = [{sys.executable!r}, '-c', "
        "'print(10_000 * \"x\")']\n"
    )
    script = tool_script_file(tmp_path, ("Go?", call("flood")), (RESULT, ANSWERED), context_size=4096)
    done = chat(tmp_path, script, "--tools", str(flood), turns="Go?\n")
    (result,) = results(tmp_path)
    assert result.endswith("[cut: these are the first 8,192 of 10,001 characters]")
    assert b"do not fit in the context" in done.stderr  # every character of the scripted model is a token


def test_a_model_without_tools_is_refused_before_its_first_question(tmp_path: Path) -> None:
    done = run(tmp_path, script_file(tmp_path, [("assistant\n", "hi")], chat_template=PLAIN))
    assert done.returncode == 2
    assert b"script cannot call tools: its chat template does not support tools\nhint: " in done.stderr
    assert journals(tmp_path) == []


def test_a_format_and_tools_are_refused_together(tmp_path: Path) -> None:
    done = run(tmp_path, "--json-schema", "{}")
    assert done.returncode == 2
    assert b"--tools: cannot be combined with an answer format" in done.stderr


@pytest.mark.night
def test_past_calls_continue_without_tools_or_end_in_one_line(tmp_path: Path) -> None:
    model = tool_script_file(tmp_path, ("Echo?", call("echo", a="hi")), (RESULT, ANSWERED), ("More?", "No."))
    run(tmp_path, model)
    again = chat(tmp_path, "--continue", turns="More?\n")
    assert (again.stdout, again.returncode) == (b"No.\n", 0)
    other = tmp_path / "other"
    other.mkdir()
    plain = script_file(other, [("assistant\n", "hi")], chat_template=PLAIN)
    [journal] = journals(tmp_path)
    saved = journal.read_bytes()
    refused = chat(tmp_path, "--continue", "-m", plain, turns="More?\n")
    assert (refused.stdout, refused.returncode) == (b"", 2)
    assert b"cannot continue a conversation with tool calls: its chat template does not support tools" in refused.stderr
    assert journal.read_bytes() == saved, "the refused model became the conversation's model"
