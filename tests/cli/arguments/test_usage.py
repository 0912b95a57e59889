"""Tests of options whose value may be omitted."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.registry import load
from tests.support.cli.commands import llmrun


def parsed(*arguments: str) -> dict[str, Any]:
    """Return the parameters of `llmrun chat` that the arguments parse to."""
    with load("chat").make_context("chat", list(arguments)) as context:
        return {name: context.params[name] for name in ("name", "continued", "model", "system")}


@pytest.mark.parametrize(
    ("arguments", "continued", "name"),
    [
        ([], None, None),
        (["--continue"], "", None),
        (["m", "--continue"], "", "m"),
        (["--continue", "x"], "x", None),
        (["--continue=x"], "x", None),
        (["--continue="], "", None),
        (["--continue", "x", "m"], "x", "m"),
        (["m", "--continue", "x"], "x", "m"),
        (["--continue", "-n", "3"], "", None),
        (["-n", "3", "--continue", "x", "-q"], "x", None),
        (["--continue", "--", "m"], "", "m"),
    ],
)
def test_continue_has_a_value_if_a_word_follows(arguments: list[str], continued: str | None, name: str | None) -> None:
    found = parsed(*arguments)
    assert (found["continued"], found["name"]) == (continued, name)


@pytest.mark.parametrize("name", ["chat", "eval", "fit", "imatrix", "pull", "replay", "serve", "show", "verify"])
def test_every_command_takes_its_model_with_m(name: str) -> None:
    needed = {"imatrix": ["-o", "a-new-file"], "replay": ["RECORDING"]}.get(name, [])
    done = llmrun(name, *needed, "a-model", "-m", "another")
    assert done.stderr == b"error: model: given twice: as an argument and with --model\n"
    assert done.returncode == 2


@pytest.mark.parametrize("name", ["eval", "imatrix", "show"])
def test_missing_models_get_an_example(name: str) -> None:
    done = llmrun(name, *(["-o", "a-new-file"] if name == "imatrix" else []))
    assert done.stderr.startswith(b"error: MODEL is missing\nhint: for example: llmrun " + name.encode())
    assert done.returncode == 2


def parsed_by_bench(*arguments: str) -> tuple[Any, Any]:
    """Return the models and the number of tokens to generate."""
    with load("bench").make_context("bench", list(arguments)) as context:
        return list(context.params.get("given") or ()), context.params["n_gen"]


def test_a_group_can_take_models_and_flags_in_any_order() -> None:
    assert parsed_by_bench("a.gguf", "-n", "5", "b") == (["a.gguf", "b"], "5")
    assert parsed_by_bench("-n", "5", "a.gguf") == (["a.gguf"], "5")
    assert parsed_by_bench("-n", "5") == ([], "5")
    assert parsed_by_bench("-m", "history", "-n", "5") == ([], "5")


def test_the_name_of_a_subcommand_is_no_model() -> None:
    assert parsed_by_bench("history", "last") == ([], "128")
    assert parsed_by_bench("-n", "5", "compare", "a", "b", "--fail-above", "5%") == ([], "5")
    assert "Usage: llmrun bench history [OPTIONS]" in llmrun("bench", "history", "--help").stdout.decode()
    assert "bench [OPTIONS] [MODEL]... COMMAND" in llmrun("bench", "--help").stdout.decode()


def test_words_after_two_dashes_are_no_options() -> None:
    with pytest.raises(UsageError, match=r"^unexpected argument: --continue$"):
        parsed("--", "m", "--continue")
