"""Tests of `llmrun generate`, with the real process on the scripted backend."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.cli.commands import llmrun, screen_of, script_file, scripted

pytestmark = pytest.mark.push


def test_the_answer_and_one_newline_go_to_stdout_and_one_line_of_statistics_to_stderr() -> None:
    done = scripted("Why is", "the sky blue?")
    assert done.stdout == b"You said: Why is the sky blue?\n"
    assert re.fullmatch(rb"31 tokens in .* tok/s\n", done.stderr)
    line = scripted("--stats", "Why is", "the sky blue?").stderr.decode()
    assert line.count("\n") == 1
    for part in ("smollm2:135m scripted", " in ", "TTFT ", " out ", "TPOT ", "ctx ", "seed "):
        assert part in line
    assert done.returncode == 0


def test_quiet_leaves_stderr_empty() -> None:
    done = scripted("-q", "hello")
    assert (done.stdout, done.stderr) == (b"You said: hello\n", b"")


def test_an_answer_keeps_its_own_newlines(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "\na\n\n")])
    assert scripted("-q", "-m", script, "hello").stdout == b"\na\n\n\n"


def test_max_tokens_ends_the_answer() -> None:
    done = scripted("-n", "3", "hello", "--json")
    body = json.loads(done.stdout)
    assert body["choices"][0]["message"]["content"] == "You"
    assert body["choices"][0]["finish_reason"] == "length"
    assert b"context" not in done.stderr


def test_a_reader_at_a_terminal_is_told_of_the_token_limit() -> None:
    run = ("generate", "--backend", "scripted", "-n", "2", "hello")
    note = "note: the answer was cut off after 2 tokens: --max-tokens sets the limit\n"
    assert note in screen_of(*run, NO_COLOR="1")[0]
    assert "note:" not in screen_of(*run, "--json")[0]
    assert "note:" not in screen_of(*run, "-q")[0]
    assert b"note:" not in scripted("-n", "2", "hello").stderr


def test_no_limit_of_tokens_is_minus_one_whatever_the_settings_say() -> None:
    limited = os.environ | {"LLMRUN_MAX_TOKENS": "3"}
    assert scripted("-q", "hello", env=limited).stdout == b"You\n"
    assert scripted("-q", "-n", "-1", "hello", env=limited).stdout == b"You said: hello\n"


@pytest.mark.parametrize("wrong", ["0", "-2"])
def test_other_limits_below_one_are_refused_with_a_hint(wrong: str) -> None:
    done = scripted("-n", wrong, "hello")
    assert done.stderr.decode() == (
        f"error: flag: --max-tokens: {wrong} is not an integer of at least 1, or -1 for no limit\n"
        "hint: -1 lets the model write until it stops, which is the default\n"
    )
    assert done.returncode == 2


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it() -> None:
    done = scripted("-q", "--stop", "never", "--stop", "the sky", "Why is the sky blue?")
    assert done.stdout == b"You said: Why is \n"


def test_a_full_context_ends_the_answer_with_a_note(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "x" * 5000)])
    done = scripted("-m", script, "-c", "200", "hello")
    assert b"note: the answer was cut off: the context of 200 tokens is full" in done.stderr
    assert done.returncode == 0


def test_a_prompt_beyond_the_context_is_code_8() -> None:
    done = scripted("-c", "64", "hello " * 100)
    assert (done.stdout, done.returncode) == (b"", 8)
    assert done.stderr.startswith(b"error: ")


def test_the_same_seed_gives_the_same_text_and_a_reported_seed_can_be_used_again(tmp_path: Path) -> None:
    noise = script_file(tmp_path, [("a cue that never comes", "")])
    first = scripted("--stats", "-m", noise, "-n", "40", "hello")
    seed = re.search(rb"seed (\d+)", first.stderr)
    assert seed
    again = scripted("-m", noise, "-n", "40", "--seed", seed[1], "hello")
    other = scripted("-m", noise, "-n", "40", "--seed", str(int(seed[1]) + 1), "hello")
    assert first.stdout == again.stdout != other.stdout


def test_temperature_0_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    noise = script_file(tmp_path, [("a cue that never comes", "")])
    texts = {scripted("-m", noise, "-n", "20", "--temp", "0", "--seed", seed, "x").stdout for seed in "12"}
    assert len(texts) == 1


def test_a_banned_token_does_not_come() -> None:
    done = scripted("-q", "--temp", "0", "-n", "1", "--logit-bias", f"{ord('Y')}=-inf", "hello")
    assert done.stdout[:1] != b"Y"


def test_json_is_an_openai_chat_completion() -> None:
    done = scripted("--json", "--logprobs", "2", "--seed", "7", "hellö")
    body = json.loads(done.stdout)
    assert done.stdout.count(b"\n") == 1
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert isinstance(body["created"], int)
    assert (body["model"], body["seed"]) == ("smollm2:135m", 7)
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert choice["message"] == {
        "role": "assistant",
        "content": "You said: hellö",
        "reasoning": None,
        "refusal": None,
    }
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == "You said: hellö"
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [len(token["top_logprobs"]), token["top_logprobs"][0]["logprob"]] == [2, token["logprob"]]
    assert {"load_s", "prefill_s", "ttft_s", "decode_s", "tpot_s", "total_s"} <= set(body["timings"])


def test_json_has_no_logprobs_unless_they_were_asked_for() -> None:
    assert json.loads(scripted("--json", "hello").stdout)["choices"][0]["logprobs"] is None


def test_logprobs_are_listed_on_stderr_after_the_answer() -> None:
    done = scripted("--logprobs", "2", "-n", "2", "hello")
    assert done.stdout == b"Yo\n"
    listed = done.stderr.decode().splitlines()[:2]
    assert [line.split()[0] for line in listed] == ["'Y'", "'o'"]
    assert all(line.count("%") == 3 for line in listed)


def test_raw_gives_the_model_the_prompt_and_nothing_else(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("<|bos|>once<|im_end|>", "!")])
    assert scripted("-q", "--raw", "-m", script, "once<|im_end|>").stdout == b"!\n"


def test_a_system_prompt_comes_before_the_question(tmp_path: Path) -> None:
    asked = "system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    script = script_file(tmp_path, [(asked, "no")])
    assert scripted("-q", "-m", script, "-s", "be brief", "hello").stdout == b"no\n"


def test_what_a_user_types_never_becomes_a_control_token(tmp_path: Path) -> None:
    done = scripted("-q", "<|im_end|>")
    assert done.stdout == b"You said: <|im_end|>\n"


def test_a_chat_template_of_ones_own_with_variables(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ name }}:{{ messages[0]['content'] }}>")
    script = script_file(tmp_path, [("Ada:hello>", "yes")])
    done = scripted(
        "-q", "-m", script, "--chat-template", str(template), "--chat-template-kwargs", '{"name": "Ada"}', "hello"
    )
    assert done.stdout == b"yes\n"


def test_a_broken_chat_template_is_code_9(tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% if %}")
    done = scripted("--chat-template", str(template), "hello")
    assert (done.stdout, done.returncode) == (b"", 9)
    assert done.stderr.startswith(b"error: ")


def test_settings_of_the_environment_are_taken_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_BACKEND", "scripted")
    monkeypatch.setenv("LLMRUN_MAX_TOKENS", "3")
    assert llmrun("generate", "-q", "hello").stdout == b"You\n"
    assert llmrun("generate", "-q", "-n", "8", "hello").stdout == b"You said\n"


def test_verbose_says_what_runs_and_how() -> None:
    lines = scripted("-v", "--temp", "0.5", "hello").stderr.decode()
    assert "temperature 0.5" in lines
    assert "template" in lines


def test_verbose_names_the_adapters(tmp_path: Path) -> None:
    (tmp_path / "pirate.gguf").touch()
    lines = scripted("-v", "--lora", f"{tmp_path / 'pirate.gguf'}:0.5", "hello").stderr.decode()
    assert "adapters   pirate (scale 0.5)" in lines


def test_a_traceback_is_for_debug_alone(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.gguf")
    plain = llmrun("generate", "-m", missing, "hello")
    assert plain.returncode == 4
    assert b"Traceback" not in plain.stderr
    assert plain.stderr.startswith(b"error: ")
    assert b"Traceback" in llmrun("generate", "--debug", "-m", missing, "hello").stderr


def test_a_file_that_is_no_model_is_code_3(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    done = llmrun("generate", "-m", str(path), "hello")
    assert (done.stdout, done.returncode) == (b"", 3)


def test_a_name_nobody_knows_is_code_4() -> None:
    done = llmrun("generate", "-m", "no-such-model", "hello")
    assert (done.stdout, done.returncode) == (b"", 4)


def test_a_schema_allows_only_its_properties() -> None:
    """The scripted backend has random formatted answers, which would nearly always have other properties."""
    properties = {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}
    schema: dict[str, object] = {"type": "object", "properties": properties}
    note = b"note: --json-schema: no property is required, so the answer may be {}; list properties in `required`\n"
    for seed in range(3):
        done = scripted("--json-schema", json.dumps(schema), "--seed", str(seed), "-n", "200", "hello")
        assert json.loads(done.stdout).keys() <= properties.keys()
        assert note in done.stderr
    done = scripted("--json-schema", json.dumps(schema | {"required": ["a"]}), "--seed", "0", "-n", "200", "hello")
    assert json.loads(done.stdout).keys() <= properties.keys()
    assert note not in done.stderr


@pytest.mark.parametrize("words", [["qwen3:4b", "Hello"], ["qwen3:4b"], ["SmolLM2", "Hello"], ["./gone.gguf", "Hello"]])
def test_a_model_before_the_prompt_is_refused(words: list[str]) -> None:
    """Users of `ollama run MODEL PROMPT` type this, and the name would silently become a part of the prompt."""
    done = scripted(*words)
    assert f"error: {words[0]}: the prompt begins with the name of a model, which needs -m\n" in done.stderr.decode()
    assert f"-m {' '.join(words)}, or put the whole prompt in quotes\n" in done.stderr.decode()
    assert (done.stdout, done.returncode) == (b"", 2)
    assert scripted("-q", " ".join(words) + "?").stdout.decode() == f"You said: {' '.join(words)}?\n"


def test_version() -> None:
    from llmrun import __version__

    done = llmrun("--version")
    assert (done.stdout, done.returncode) == (f"llmrun {__version__}\n".encode(), 0)


def test_without_a_command_the_help_is_shown() -> None:
    done = llmrun()
    assert b"generate" in done.stdout
    assert done.returncode == 0


def test_a_context_longer_than_the_model_was_trained_for_gets_a_warning(tmp_path: Path) -> None:
    model = tmp_path / "short.json"
    model.write_text('{"train_context": 128}')
    for command in (("generate", "hi"), ("chat",)):
        longer = llmrun(*command, "--backend", "scripted", "-m", str(model), "-c", "256", stdin=b"hi\n")
        as_long = llmrun(*command, "--backend", "scripted", "-m", str(model), "-c", "128", stdin=b"hi\n")
        assert b"note: 256 tokens of context: short was trained for 128, and output may get worse" in longer.stderr
        assert b"trained" not in as_long.stderr
