"""Tests of filling in the variables of a preset's prompts, and of the values that -P gives."""

from __future__ import annotations

import re

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.prompts import Prompts, check_params, filled_system, parse_params
from llmrun.options.presets import Preset
from llmrun.options.settings import Settings


def settings(prompt: str | None, system: str | None = None, **defaults: str) -> Settings:
    """Return the settings of a run with a preset."""
    values = {} if system is None else {"system": system}
    return Settings(system=system, preset=Preset("t", "m", values, prompt=prompt, defaults=defaults))


def test_variables_are_replaced_once_and_dollars_can_be_written() -> None:
    found = settings("$$5: ${a}s, $input", "As $b", b="3")
    assert found.preset is not None
    assert found.preset.params == ["a", "b"]
    assert Prompts.of(found, {"a": "$input"}).filled("$a ${b} $$") == ("$5: $inputs, $a ${b} $$", "As 3")
    assert Prompts.of(found, {"a": "y", "b": "z"}).filled("x") == ("$5: ys, x", "As z")


@pytest.mark.parametrize(
    ("texts", "asked", "prompt", "system"),
    [
        (("Summarize:",), "a text", "Summarize:\n\na text", None),
        (("Tell a joke.",), "", "Tell a joke.", None),
        (("$input", "Be brief."), "a text", "a text", "Be brief."),
        (("Go.", "About $input"), "a text", "Go.", "About a text"),
    ],
)
def test_what_is_asked_has_a_place(texts: tuple[str, ...], asked: str, prompt: str, system: str | None) -> None:
    assert Prompts.of(settings(*texts), {}).filled(asked) == (prompt, system)


def test_input_is_needed_unless_the_prompt_is_whole() -> None:
    assert Prompts.of(settings("On $input"), {}).needs_input
    assert Prompts.of(Settings(), {}).needs_input
    assert not Prompts.of(settings("Tell a joke."), {}).needs_input


def test_only_the_texts_of_a_preset_with_a_prompt_have_variables() -> None:
    """A system prompt from a flag, the environment or another preset may contain any dollar sign."""
    assert Prompts.of(Settings(), {}).filled("$x $") == ("$x $", None)
    assert Prompts.of(settings(None, "$5"), {}).filled("$x") == ("$x", "$5")
    assert Prompts.of(settings("$input", "$a"), {}, "$5").filled("x") == ("x", "$5")
    assert Prompts.of(Settings(system="$5", preset=settings("$input", "$a").preset), {}).filled("x") == ("x", "$5")


def test_all_missing_variables_are_named() -> None:
    found = settings("$a $b $c", "$d", b="x")
    with pytest.raises(UsageError, match=re.escape("preset t: no value for $c, $d")) as refused:
        Prompts.of(found, {"a": ""}).check_complete()
    assert refused.value.hint == "-P c=... -P d=..."
    Prompts.of(found, {"a": "1", "c": "2", "d": "3"}).check_complete()


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("langage", "--param: langage: preset t has no such variable", "did you mean language?"),
        ("input", "--param: input: this variable is the prompt itself", "give the value as the prompt"),
    ],
)
def test_values_for_no_variable_are_refused(name: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        check_params([name], settings("$language $input").preset)
    assert refused.value.hint == hint


def test_parameters_are_pairs() -> None:
    assert parse_params(["a=b=c", "d=", "a=e"]) == {"a": "e", "d": ""}
    for wrong in ("a", "=b", "1=b", "é=b", "a b=c"):
        with pytest.raises(UsageError, match="is not NAME=VALUE"):
            parse_params([wrong])


@pytest.mark.parametrize("preset", [None, settings(None).preset])
def test_parameters_need_a_preset_with_a_prompt(preset: Preset | None) -> None:
    check_params([], preset)
    with pytest.raises(UsageError, match="--param: requires a preset with a prompt"):
        check_params(["a"], preset)


def test_a_chat_has_a_system_prompt_and_no_input() -> None:
    assert filled_system(settings("$x", "As $a"), {"a": "b"}) == "As b"
    assert filled_system(Settings(system="$5"), {}) == "$5"
    assert filled_system(Settings(), {}) is None
    with pytest.raises(UsageError, match=r"preset t: no value for \$a"):
        filled_system(settings("$x", "As $a"), {})
    with pytest.raises(UsageError, match=r"preset t: system: \$input works only in generate and batch"):
        filled_system(settings("$x", "About $input"), {})
