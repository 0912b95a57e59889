"""Tests that a sampling parameter's declaration applies wherever the parameter appears."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from gguf import Keys

from llmrun.cli.chatting.events import meant
from llmrun.options.sampling_params import SAMPLING, SamplingParameter, SamplingParams
from llmrun.options.settings import PREFIX, RULES, default_sampling
from tests.support.cli.commands import llmrun
from tests.support.servers.hostile_server import HELLO, response, serving

EACH = pytest.mark.parametrize(("name", "parameter"), SAMPLING.items(), ids=SAMPLING)


def another_value(parameter: SamplingParameter) -> int | float | str:
    """Return a valid value that is not the default."""
    if parameter.kind is str:
        return {"--samplers": "top-k;temp", "--dry-sequence-breaker": r'["\n", "é"]'}[parameter.flags[0]]
    value = parameter.maximum if parameter.maximum < math.inf else parameter.minimum + 1
    value = parameter.minimum if value == parameter.default else value
    assert value != parameter.default
    return parameter.kind(value)


def toml_value(value: float | str) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


@EACH
def test_the_default_is_inside_the_range(name: str, parameter: SamplingParameter) -> None:
    assert RULES[name].check(parameter.default) == getattr(SamplingParams(), name)


@pytest.mark.push
def test_help_lists_every_flag_with_a_short_sentence() -> None:
    shown = " ".join(llmrun("generate", "--help-all").stdout.decode().split())
    for parameter in SAMPLING.values():
        default = f"[default: the model's, or {parameter.shown_default}]"
        assert f"{', '.join(parameter.flags)} {parameter.metavar} {parameter.help} {default}" in shown
        assert len(parameter.help) <= 60
        assert parameter.help.endswith(".")


@EACH
def test_each_spelling_of_a_flag_can_be_set_in_a_chat(name: str, parameter: SamplingParameter) -> None:
    assert {meant(spelling, "1") for spelling in (name, *(flag[2:] for flag in parameter.flags))} == {(name, "1")}


@EACH
def test_keys_of_files_are_the_formats_own(name: str, parameter: SamplingParameter) -> None:
    if parameter.gguf_key is not None:
        assert parameter.gguf_key in vars(Keys.General).values()
        value = another_value(parameter)
        assert getattr(default_sampling({parameter.gguf_key: value}), name) == value


@pytest.mark.push
@pytest.mark.parametrize("way", ["flag", "environment", "config"])
def test_every_parameter_reaches_a_server(tmp_path: Path, way: str) -> None:
    values = {name: another_value(parameter) for name, parameter in SAMPLING.items()}
    config = tmp_path / "config.toml"
    config.write_text(
        "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items()) if way == "config" else ""
    )
    env = {**os.environ, "LLMRUN_CONFIG": str(config)}
    if way == "environment":
        env |= {PREFIX + name.upper(): str(value) for name, value in values.items()}
    flags = [f"{SAMPLING[name].flags[-1]}={value}" for name, value in values.items()] if way == "flag" else []
    with serving(response(HELLO)) as server:
        done = llmrun("generate", "-q", "-m", server.url, *flags, "hi", env=env)
    assert (done.stdout, done.returncode) == (b"Hello\n", 0)
    expected: dict[str, object] = {
        field: values[name] for name, parameter in SAMPLING.items() for field in parameter.wire
    }
    expected |= {"samplers": ["top_k", "temperature"], "dry_sequence_breakers": ["\n", "é"]}
    assert {field: server.asked[0].body.get(field) for field in expected} == expected
