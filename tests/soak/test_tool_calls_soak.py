"""A long run of random forced tool calls. scripts/soak_tool_calls runs any number and prints those that fail."""

from __future__ import annotations

import pytest

from tests.support.tool_calls.forced import forced_call_problem
from tests.support.tool_calls.formats import WITH_FORMATS, real_case

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("name", WITH_FORMATS)
def test_a_thousand_forced_calls_are_valid(name: str) -> None:
    """As in scripts/soak_tool_calls with its defaults, 64,000 calls in all, in 15 minutes."""
    wrong = [forced_call_problem(real_case(name, control=number % 2 == 0), f"1 {number}") for number in range(1_000)]
    assert [each for each in wrong if each] == []
