"""Tests of thinking in `llmrun generate` and `llmrun chat`: where it is shown, and how it is switched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.cli.chats import chat, events_in, journals, words
from tests.support.cli.commands import llmrun, on_terminal, screen_of, script_file, scripted
from tests.support.engine.thinking_models import (
    ANSWER,
    CHANNEL_TOKENS,
    CHANNELS,
    ENDED,
    OPENED,
    SWITCHED,
    THOUGHT,
    TURN,
    thinking_script,
)
from tests.support.servers.hostile_server import DONE, counted, response, said, serving

pytestmark = pytest.mark.push

DIM_THOUGHT = THOUGHT.split("\n")[0]


def plain(screen: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)


# --- generate


@pytest.mark.parametrize("template", [SWITCHED, OPENED])
def test_in_a_pipe_thinking_goes_to_stderr_and_the_answer_alone_to_stdout(tmp_path: Path, template: str) -> None:
    done = scripted("--stats", "-m", thinking_script(tmp_path, template), "Is it so?")
    assert done.stdout.decode() == f"{ANSWER}\n"
    before, _, line = done.stderr.decode().rpartition("\n\n")
    assert before == f"thinking:\n{THOUGHT}\ndone thinking"
    assert f"{len(THOUGHT + ENDED + ANSWER) + 1 + (template is SWITCHED) * len('<think>x')} out (" in line
    assert " thinking)" in line
    assert "answer after " in line


def test_quiet_and_hidden_thinking_is_not_shown(tmp_path: Path) -> None:
    script = thinking_script(tmp_path)
    done = scripted("-q", "-m", script, "Is it so?")
    assert (done.stdout.decode(), done.stderr) == (f"{ANSWER}\n", b"")
    done = scripted("--hide-thinking", "-m", script, "Is it so?")
    assert done.stdout.decode() == f"{ANSWER}\n"
    assert b"hm" not in done.stderr
    assert b" thinking)" in done.stderr


def test_json_has_a_reasoning_field_and_counts_its_tokens(tmp_path: Path) -> None:
    done = scripted("--json", "-m", thinking_script(tmp_path), "Is it so?")
    body = json.loads(done.stdout)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (THOUGHT, ANSWER)
    thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thought == len(f"\n{THOUGHT}\n</think>")
    assert body["timings"]["first_answer_s"] > body["timings"]["ttft_s"]
    assert b"hm" not in done.stderr


def test_on_a_terminal_thinking_is_dim_and_an_empty_line_comes_before_the_answer(tmp_path: Path) -> None:
    screen, code = screen_of("generate", "--backend", "scripted", "-m", thinking_script(tmp_path), "Is it so?")
    assert code == 0
    thought, answer, _ = re.split(r"\n\n(?=Yes)|(?<=is\.)\n", plain(screen))[:3]
    assert thought.endswith(THOUGHT)
    assert answer == ANSWER.replace("`", "")  # rendered as code
    dim = "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", screen, re.DOTALL))
    assert dim.startswith(THOUGHT)
    assert "\x1b[2mY" not in screen


def test_without_color_a_line_says_what_is_thinking(tmp_path: Path) -> None:
    script = thinking_script(tmp_path)
    screen, _ = screen_of("generate", "--backend", "scripted", "-m", script, "Is it so?", NO_COLOR="1")
    assert screen.startswith(f"thinking:\n{THOUGHT}\ndone thinking\n\n{ANSWER}\n")
    assert "\x1b" not in screen


def test_control_characters_of_thinking_never_reach_a_terminal(tmp_path: Path) -> None:
    script = script_file(tmp_path, [(TURN, f"<think>\n\x1b[2J\x07{ENDED}Yes.")], chat_template=SWITCHED)
    screen, _ = screen_of("generate", "--backend", "scripted", "-m", script, "x")
    assert "\x1b[2J" not in screen
    assert "\x07" not in screen
    assert "␛[2J␇" in plain(screen)


def test_no_think_and_a_budget(tmp_path: Path) -> None:
    script = thinking_script(tmp_path)
    for flag in (("--no-think",), ("--think-budget", "0")):
        done = scripted("--json", *flag, "-m", script, "Is it so?")
        assert json.loads(done.stdout)["choices"][0]["message"]["reasoning"] is None
    done = scripted("--json", "--think", "--think-budget", "6", "-m", script, "Is it so?")
    assert json.loads(done.stdout)["choices"][0]["message"]["reasoning"] == "hm, l"


def test_settings_of_the_environment_hold_and_a_flag_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_THINK", "false")
    monkeypatch.setenv("LLMRUN_HIDE_THINKING", "yes")
    script = thinking_script(tmp_path)
    assert b" thinking)" not in scripted("-m", script, "Is it so?").stderr
    assert b" thinking)" in scripted("--think", "-m", script, "Is it so?").stderr


@pytest.mark.night
def test_thinking_cannot_be_asked_of_a_model_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    done = scripted("--think", "hello")
    assert (done.stdout, done.returncode) == (b"", 2)
    assert done.stderr.startswith(b"error: thinking cannot be switched on: ")
    done = scripted("--no-think", "hello")
    assert done.stderr.startswith(b"note: --no-think has no effect: this model has no known")
    assert done.returncode == 0
    for budget in ("0", "5"):
        assert scripted("--think-budget", budget, "hello").stderr.startswith(b"note: --think-budget has no effect")
    monkeypatch.setenv("LLMRUN_THINK", "true")  # applies only to models that can think
    done = scripted("hello")
    assert (done.stdout, done.stderr.count(b"\n"), done.returncode) == (b"You said: hello\n", 1, 0)


@pytest.mark.night
def test_a_typed_wish_to_think_wins_over_a_budget_of_0_that_was_set_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = thinking_script(tmp_path)
    both = scripted("--think", "--think-budget", "0", "-m", script, "Is it so?")
    assert (both.returncode, both.stderr.split(b": ")[1]) == (2, b"--think")
    monkeypatch.setenv("LLMRUN_THINK_BUDGET", "0")
    assert b" thinking)" not in scripted("-m", script, "Is it so?").stderr
    assert b" thinking)" in scripted("--think", "-m", script, "Is it so?").stderr
    turns = words(["Is it so?", "/think on", "Is it so?", "/set think_budget 0", "Is it so?", "/think", "Is it so?"])
    done = chat(tmp_path, "-m", script, turns=turns)
    assert [" thinking)" in line for line in done.stderr.decode().splitlines() if " tok/s" in line] == [0, 1, 0, 1]
    chat(tmp_path, "--continue", "-m", script, turns="/set think_budget 0\n")
    done = chat(tmp_path, "--continue", "--think", "-m", script, turns="Is it so?\n")
    assert b" thinking)" in done.stderr


def test_a_raw_prompt_has_no_thinking_to_ask_for(tmp_path: Path) -> None:
    script = thinking_script(tmp_path)
    assert scripted("--raw", "--no-think", "-m", script, "x").returncode == 2
    assert scripted("-q", "--raw", "-m", script, TURN).stdout.startswith(b"<think>\nhm")


def test_an_answer_cut_while_the_model_thinks_says_so(tmp_path: Path) -> None:
    done = scripted("-n", "12", "-m", thinking_script(tmp_path), "Is it so?")
    assert done.stdout == b"\n"
    assert b"note: the answer was cut off while the model was thinking: --think-budget N" in done.stderr


def test_thinking_that_was_never_opened_is_told_when_it_ends(tmp_path: Path) -> None:
    script = script_file(tmp_path, [(TURN, f"hm{ENDED}Yes.")], chat_template=SWITCHED)
    body = json.loads(scripted("--json", "-m", script, "x").stdout)
    message = body["choices"][0]["message"]
    assert (message["reasoning"].strip(), message["content"]) == ("hm", "Yes.")
    done = scripted("-m", script, "x")
    assert done.stdout == b"Yes.\n"
    assert done.stderr.startswith(b"thinking:\nhm\ndone thinking\n\n")
    screen, _ = screen_of("generate", "--backend", "scripted", "-m", script, "x")
    assert "note: the text so far was thinking" in plain(screen)


def test_an_answer_that_was_uncertain_is_whole_in_a_pipe_also_when_it_is_cut(tmp_path: Path) -> None:
    script = script_file(tmp_path, [(TURN, "Yes.\nIt is.")], chat_template=SWITCHED)
    assert scripted("-m", script, "x").stdout == b"Yes.\nIt is.\n"
    assert scripted("-m", script, "-n", "3", "x").stdout == b"Yes\n"


# --- behind a server


def test_a_server_that_tells_thinking_apart_and_one_that_does_not() -> None:
    apart = said(reasoning_content="hm") + said("Yes.", "stop") + counted(5, 9) + DONE
    mixed = said("<thi") + said("nk>\nhm\n</think>") + said("\n\nYes.", "stop") + counted(5, 9) + DONE
    for stream in (apart, mixed):
        with serving(response(stream)) as server:
            done = llmrun("generate", "-m", server.url, "hi")
        assert done.stdout == b"Yes.\n"
        assert done.stderr.startswith(b"thinking:\nhm\ndone thinking\n\n")


def test_thinking_that_the_servers_template_opened_is_not_in_a_pipe() -> None:
    stream = said("hm, ") + said("so\n</think>") + said("\n\nYes.", "stop") + counted(5, 9) + DONE
    with serving(response(stream)) as server:
        done = llmrun("generate", "-m", server.url, "hi")
    assert done.stdout == b"Yes.\n"
    assert done.stderr.startswith(b"thinking:\nhm, so\ndone thinking\n\n")


def test_a_server_that_breaks_off_leaves_what_it_said() -> None:
    with serving(response(said("Yes"))) as server:
        done = llmrun("generate", "-m", server.url, "hi")
    assert (done.stdout[:3], done.returncode) == (b"Yes", 5)


def test_a_server_is_asked_by_the_names_that_templates_know() -> None:
    with serving(response(said("Yes.", "stop") + DONE)) as server:
        llmrun("generate", "-q", "-m", server.url, "--no-think", "hi")
        assert server.asked[0].body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    with serving(response(said("Yes.", "stop") + DONE)) as server:
        done = llmrun("generate", "-m", server.url, "--think-budget", "9", "hi")
        assert (done.returncode, server.asked) == (2, [])
    assert done.stderr.startswith(b"error: --think-budget: not supported for models on a server")


def test_what_was_set_for_good_is_not_asked_of_a_server_and_no_advice_is_given_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLMRUN_THINK_BUDGET", "9")
    monkeypatch.setenv("LLMRUN_THINK", "true")
    with serving(response(said(reasoning_content="hm", finish="length") + DONE)) as server:
        done = llmrun("generate", "-m", server.url, "-n", "1", "hi")
        assert done.returncode == 0
        assert "chat_template_kwargs" not in server.asked[0].body
    assert done.stderr.startswith(b"note: think, think_budget: not sent to the server")
    assert b"cut off while the model was thinking\n" in done.stderr


# --- chat


def test_a_chat_keeps_thinking_apart_and_hands_it_to_the_template(tmp_path: Path) -> None:
    done = chat(tmp_path, "-m", thinking_script(tmp_path), turns=words(["Is it so?", "Sure?"]))
    assert done.stdout.decode() == f"{ANSWER}\n{ANSWER}\n"
    assert done.stderr.decode().count(f"thinking:\n{THOUGHT}\ndone thinking\n\n") == 2
    answers = [event for event in events_in(journals(tmp_path)[0]) if event["event"] == "answered"]
    assert [(one["thinking"], one["text"]) for one in answers] == [(THOUGHT, ANSWER)] * 2


def test_a_chat_in_which_thinking_was_never_opened_keeps_the_answer_alone(tmp_path: Path) -> None:
    script = script_file(tmp_path, [(TURN, f"hm{ENDED}Yes.")], chat_template=SWITCHED)
    done = chat(tmp_path, "-m", script, turns=words(["So?", "/show conversation"]))
    assert done.stdout == b"Yes.\n"
    assert b"thinking:\nhm\ndone thinking" in done.stderr
    assert b"> So?\nYes.\n" in done.stderr
    last = events_in(journals(tmp_path)[0])[-1]
    assert (last["thinking"], last["text"]) == ("hm\n", "Yes.")


def test_an_answer_that_is_replaced_is_no_thinking_of_the_new_one(tmp_path: Path) -> None:
    script = script_file(tmp_path, [(TURN, f"hm{ENDED}Yes.")], chat_template=SWITCHED)
    # "hm" is held back until the tag
    done = chat(tmp_path, "-m", script, "--stop", "hm\nX", turns=words(["So?", "/regen"]))
    assert done.stdout == b"Yes.\nYes.\n"
    answers = [event for event in events_in(journals(tmp_path)[0]) if event["event"] == "answered"]
    assert [(one["thinking"], one["text"]) for one in answers] == [("hm\n", "Yes."), ("hm\n", "Yes.")]


def test_a_model_may_think_again_after_it_has_begun_to_answer(tmp_path: Path) -> None:
    said = (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>hm, so<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes."
    )
    script = script_file(
        tmp_path, [("So?<|end|><|start|>assistant", said)], chat_template=CHANNELS, control_tokens=CHANNEL_TOKENS
    )
    done = chat(tmp_path, "-m", script, turns=words(["So?", "/show conversation"]))
    assert b"thinking:\nhm, so\ndone thinking" in done.stderr
    assert b"> So?\nI look.\n\nYes.\n" in done.stderr
    assert done.stdout == b"I look.\n\n\nYes.\n"  # the first line ends before the model thinks again


@pytest.mark.night
def test_a_conversation_with_thinking_is_taken_up_again(tmp_path: Path) -> None:
    script = thinking_script(tmp_path, SWITCHED.replace(" and loop.last", ""))
    chat(tmp_path, "-m", script, turns=words(["Is it so?", "/save it"]))
    done = chat(tmp_path, "--continue", "-m", script, "-v", turns=words(["Sure?"]))
    assert done.returncode == 0
    known = re.search(rb"prompt     (\d+) tokens", done.stderr)
    assert known
    assert int(known[1]) > len(THOUGHT + ANSWER) + 60  # the prompt includes the thinking


def test_slash_commands_switch_thinking(tmp_path: Path) -> None:
    turns = words(
        ["/nothink", "Is it so?", "/think", "Is it so?", "/think default", "/set think_budget 6", "So?", "/show"]
    )
    done = chat(tmp_path, "-m", thinking_script(tmp_path), turns=turns)
    told = done.stderr.decode()
    first, second, third = re.split(r"the model (?:thinks|decides).*\n", told)
    assert "the model answers without thinking" in first
    assert "thinking:" not in first
    assert f"thinking:\n{THOUGHT}\n" in second
    assert "thinking:\nhm, l\n" in third
    assert "think not set, think_budget 6, hide_thinking off" in third
    assert done.stdout.decode() == f"{ANSWER}\n" * 3


@pytest.mark.night
def test_a_chat_with_a_model_that_does_not_think(tmp_path: Path) -> None:
    assert chat(tmp_path, "--think", turns="hello\n").returncode == 2
    done = chat(tmp_path, turns="/think\n")
    assert done.stderr.startswith(b"error: thinking cannot be switched on")


@pytest.mark.night
def test_on_a_terminal_a_chat_shows_thinking_dim_or_a_line_that_says_it_goes_on(tmp_path: Path) -> None:
    script = thinking_script(tmp_path, step_seconds=0.01)
    process = on_terminal(
        "chat",
        "--backend",
        "scripted",
        "-m",
        script,
        "--speculate",
        "off",  # otherwise, the second answer repeats the first in a few steps
        LLMRUN_DATA_DIR=str(tmp_path),
        LLMRUN_COLOR="always",
    )
    process.expect_exact("/help")
    process.send("Is it so?\r")
    process.expect(rb"\x1b\[2mh\w+")
    process.expect_exact("it is.")
    process.expect_exact("tok/s")
    process.send("/set hide_thinking on\r")
    process.expect_exact("hide_thinking on")
    process.send("Is it so?\r")
    process.expect(rb"thinking  \d")
    shown = process.before
    process.expect_exact("it is.")
    assert b"hm" not in shown + process.before
    process.send("/exit\r")
    process.expect_exact("/exit")
    process.read()
    process.close()
    assert process.exitstatus == 0


def test_ctrl_c_while_it_thinks_takes_the_question_back(tmp_path: Path) -> None:
    script = thinking_script(tmp_path, step_seconds=0.05)
    process = on_terminal("chat", "--backend", "scripted", "-m", script, LLMRUN_DATA_DIR=str(tmp_path))
    process.expect_exact("/help")
    process.send("Is it so?\r")
    process.expect(rb"\x1b\[2mh\w+")
    process.sendintr()
    process.expect_exact("stopped before the answer began; the question was removed")
    process.send("\x15/exit\r")
    process.read()
    process.close()
    assert journals(tmp_path) == []  # no turn was sent
