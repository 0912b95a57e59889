"""Tests of the names by which a model calls tools."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.tools.tools_file import NAME, exposed_names

COMMANDS = st.lists(st.from_regex(NAME, fullmatch=True), unique=True, max_size=4)
# A small alphabet, so that names collide in every way.
TEXTS = st.text("ab_é \ud800", min_size=1, max_size=4) | st.text("a", min_size=60, max_size=70)
TOOLS = st.lists(st.tuples(TEXTS, TEXTS), unique=True, max_size=12)


@pytest.mark.push
@given(COMMANDS, TOOLS)
def test_names_are_valid_and_distinct(commands: list[str], tools: list[tuple[str, str]]) -> None:
    keys = [*(("", name) for name in commands), *tools]
    names = exposed_names(keys)
    assert all(NAME.fullmatch(name) for name in names)
    assert len(set(names)) == len(names) == len(keys)
    assert names[: len(commands)] == commands


@pytest.mark.push
@given(TOOLS, st.integers())
def test_names_do_not_depend_on_the_order(tools: list[tuple[str, str]], seed: int) -> None:
    names = dict(zip(tools, exposed_names(tools), strict=True))
    random.Random(seed).shuffle(tools)
    assert dict(zip(tools, exposed_names(tools), strict=True)) == names


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ([("time", "now"), ("files", "read-1")], ["now", "read-1"]),
        ([("time", "now"), ("moon", "now")], ["time_now", "moon_now"]),
        ([("", "now"), ("time", "now")], ["now", "time_now"]),
        ([("a b", "get.it")], ["get_it"]),
        ([("time", "now"), ("moon", "now"), ("x", "time_now")], ["time_now_fb76bbc2", "moon_now", "time_now_eb28ec00"]),
        ([("time", "é")], ["_"]),
    ],
)
def test_names_are_predictable(tools: list[tuple[str, str]], names: list[str]) -> None:
    assert exposed_names(tools) == names
