"""Tests of prompt templates: the resulting prompt, which settings win, and what is refused in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.flags import AnswerFlags
from llmrun.cli.prompting import PromptTemplate, parse_params, parse_template, read_template

PATH = Path("t.toml")


def template(text: str) -> PromptTemplate:
    return parse_template(text.encode(), PATH, "t")


def test_variables_are_replaced_once_and_dollars_can_be_written() -> None:
    found = template('prompt = "$$5: ${a}s, $input"\nsystem = "As $b"\n[defaults]\nb = 3')
    assert found.variables == ["a", "b"]
    assert found.filled("$a ${b} $$", {"a": "$input"}) == ("$5: $inputs, $a ${b} $$", "As 3")
    assert found.filled("x", {"a": "y", "b": "z"}) == ("$5: ys, x", "As z")


@pytest.mark.parametrize(
    ("text", "asked", "prompt", "system"),
    [
        ('prompt = "Summarize:"', "a text", "Summarize:\n\na text", None),
        ('prompt = "Tell a joke."', "", "Tell a joke.", None),
        ('system = "Be brief."', "a text", "a text", "Be brief."),
        ('prompt = "Go."\nsystem = "About $input"', "a text", "Go.", "About a text"),
        ("temperature = 0", "a text", "a text", None),
    ],
)
def test_what_is_asked_has_a_place(text: str, asked: str, prompt: str, system: str | None) -> None:
    assert template(text).filled(asked, {}) == (prompt, system)


def test_input_is_needed_unless_the_prompt_is_whole() -> None:
    assert template('system = "Be brief."').needs_input
    assert template('prompt = "On $input"').needs_input
    assert not template('prompt = "Tell a joke."').needs_input


def test_what_was_typed_wins_over_the_template() -> None:
    found = template('model = "a"\ntemperature = 0.1\ntop_k = 5\nmax_tokens = 7\nthink = true')
    flags = found.applied(AnswerFlags(model="b", sampling={"top_k": 9}, think_budget=0))
    assert (flags.model, flags.max_tokens, dict(flags.sampling)) == ("b", 7, {"temperature": 0.1, "top_k": 9})
    assert (flags.think, flags.think_budget) == (None, 0)
    assert found.applied(AnswerFlags()).think


def test_no_template_changes_nothing() -> None:
    flags = AnswerFlags(model="b", sampling={"top_k": 9})
    assert PromptTemplate().applied(flags) == replace(flags)
    assert PromptTemplate().filled("$x $", {}) == ("$x $", None)


def test_all_missing_variables_are_named() -> None:
    found = template('prompt = "$a $b $c"\nsystem = "$d"\n[defaults]\nb = "x"')
    with pytest.raises(UsageError, match=re.escape("template t: no value for $c, $d")) as refused:
        found.check_complete({"a": ""})
    assert refused.value.hint == "-P c=... -P d=..."
    found.check_complete({"a": "1", "c": "2", "d": "3"})


@pytest.mark.parametrize(
    ("params", "said", "hint"),
    [
        ({"langage": "x"}, "--param: langage: template t has no such variable", "did you mean language?"),
        ({"input": "x"}, "--param: input: this variable is the prompt itself", "give it as the prompt"),
    ],
)
def test_values_for_no_variable_are_refused(params: dict[str, str], said: str, hint: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        template('prompt = "$language $input"').check_params(params)
    assert refused.value.hint == hint


def test_parameters_are_pairs() -> None:
    assert parse_params(["a=b=c", "d=", "a=e"]) == {"a": "e", "d": ""}
    for wrong in ("a", "=b", "1=b", "é=b", "a b=c"):
        with pytest.raises(UsageError, match="is not NAME=VALUE"):
            parse_params([wrong])


def test_a_chat_has_a_system_prompt_and_no_input() -> None:
    assert template('system = "As $a"').filled_system({"a": "b"}) == "As b"
    with pytest.raises(UsageError, match=r"\$input cannot be used in a chat"):
        template('system = "About $input"').filled_system({})


@pytest.mark.parametrize(
    ("data", "said", "hint"),
    [
        (b"\xff", "not valid TOML: 'utf-8' codec", ""),
        (b"prompt = ", "not valid TOML: Invalid value", ""),
        (b"a = " + b"[" * 5000, "not valid TOML: ", ""),
        (b"seed = " + b"9" * 5000, "not valid TOML: Exceeds the limit", ""),
        (b"", "empty", 'a template needs a prompt, as in prompt = "Summarize: $input"'),
        (b'promt = "x"', "promt: no such key", "did you mean prompt?"),
        (b'zzz = "x"', "zzz: no such key", "known: prompt, system, defaults, model, "),
        (b"prompt = 3", "prompt: 3 is not text", ""),
        (b'prompt = " "', "prompt: empty", "leave it out to use $input as the prompt"),
        (
            b'prompt = "a\\nfor $5\\nb"',
            "prompt: line 2: '$5' is not a variable",
            "write $$ for a dollar sign",
        ),
        (b'system = "${a b}"', "system: line 1: '${a b}' is not a variable", "write $$ for a dollar sign"),
        (b'prompt = "100$"', "prompt: line 1: '$' is not a variable", "write $$ for a dollar sign"),
        (b"temperature = 'hot'", "temperature: 'hot' is not a number from 0 to 100", ""),
        (b"top_k = true", "top_k: True is not an integer", ""),
        (b"model = ''", "model: '' is not text", ""),
        (b"think = true\nthink_budget = 0", "think: contradicts think_budget = 0", ""),
        (b"threads = 3", "threads: no such key", ""),
        (b"prompt = 'x'\ndefaults = 3", "defaults: not a table", ""),
        (b"prompt = 'x'\ndefaults.a = 3", "defaults: $a is not used in the texts", "known: none"),
        (
            b"prompt = '$language'\ndefaults.langage = 3",
            "defaults: $langage is not used in the texts",
            "did you mean language?",
        ),
        (b"prompt = '$input'\ndefaults.input = 3", "defaults: $input is the prompt", ""),
        (b"prompt = '$a'\ndefaults.a = [1]", "defaults: a: [1] is not text or a number", ""),
    ],
)
def test_a_malformed_template_is_one_line(data: bytes, said: str, hint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"template: t.toml: {said}")) as refused:
        parse_template(data, PATH, "t")
    assert "\n" not in str(refused.value)
    assert refused.value.hint.startswith(hint)


@given(st.binary(max_size=200) | st.text("$_ab{}= '\"\n[]defaultsprompt", max_size=80).map(str.encode))
def test_any_bytes_are_a_template_or_a_usage_error(data: bytes) -> None:
    try:
        found = parse_template(data, PATH, "t")
    except UsageError:
        return
    found.filled("x", dict.fromkeys(found.variables, "y"))


def test_files_that_are_not_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_template(tmp_path / "none.toml", "none")
    with pytest.raises(UsageError, match="not a file"):
        read_template(tmp_path, "folder")
    with pytest.raises(UsageError, match="not a file"):
        read_template(Path("/dev/zero"), "zero")
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(UsageError, match="more than 1 MiB"):
        read_template(large, "large")
