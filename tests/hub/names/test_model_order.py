"""Tests that models are sorted by size and quantizations by bits."""

from __future__ import annotations

import pytest

from llmrun.hub.names import (
    bits_in_file,
    bits_of,
    nearest_in_bits,
    nearest_in_size,
    smallest_first,
    weights_in,
)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("qwen3:4b", 4e9),
        ("QWEN3:0.6B", 6e8),
        ("gemma3:270m", 270e6),
        ("qwen3:30b-a3b", 30e9),
        ("gemma3n:e2b", None),
        ("mixtral:8x7b", 56e9),
        ("phi3:3.8b-128k", 3.8e9),
        ("phi4-reasoning:plus", None),
        ("mistral:v0.2", None),
        ("qwen3", None),
    ],
)
def test_the_weights_that_a_name_says(name: str, weights: float | None) -> None:
    assert weights_in(name) == weights


def test_sizes_are_sorted_as_numbers() -> None:
    names = ["x:30b", "x:4b", "x:micro", "x:0.6b", "x:8b", "x:1.7b", "x:270m"]
    assert smallest_first(names) == ["x:270m", "x:0.6b", "x:1.7b", "x:4b", "x:8b", "x:30b", "x:micro"]
    assert nearest_in_size("x:5b", names)[:2] == ["x:4b", "x:8b"]
    assert smallest_first(["x:e4b", "x:12b", "x:e2b"]) == ["x:e2b", "x:e4b", "x:12b"]
    assert nearest_in_size("x:0b", names) == smallest_first(names)
    assert nearest_in_size("x:5b", ["x:0b", "x:4b"]) == ["x:4b", "x:0b"]
    assert nearest_in_size("x", names) == smallest_first(names)


def test_quantizations_are_sorted_by_bits() -> None:
    by_bits = ["IQ2_M", "Q4_0", "UD-Q4_K_XL", "Q8_0", "F16"]
    assert nearest_in_bits("none", ["Q8_0", "F16", "IQ2_M", "Q4_0", "UD-Q4_K_XL"]) == by_bits
    assert nearest_in_bits("Q5_0", ["Q8_0", "Q2_K", "Q4_0"]) == ["Q4_0", "Q2_K", "Q8_0"]
    assert [bits_of(name) for name in ("MXFP4", "BF16", "TQ1_0", "none")] == [4, 16, 1, 0]
    assert bits_in_file("Q4_K_M") == 4.85
    assert bits_in_file("F16") == 16.0
