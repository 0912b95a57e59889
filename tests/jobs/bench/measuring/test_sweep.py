"""Tests of turning arguments into the configurations to measure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.jobs.bench.measuring.workload import (
    MOST_CONFIGURATIONS,
    BenchTarget,
    configurations,
    local_targets,
    numbers,
    remote_target,
    synthetic,
    words,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", [4]),
        ("1,2,8", [1, 2, 8]),
        ("1-4", [1, 2, 3, 4]),
        ("0-512+128", [0, 128, 256, 384, 512]),
        ("64-512*2", [64, 128, 256, 512]),
        ("8,1-3", [8, 1, 2, 3]),
        ("2,2,1-2", [2, 1]),
        (" 1 , 2 ", [1, 2]),
    ],
)
def test_lists_and_ranges_name_their_numbers_in_order_and_once(text: str, expected: list[int]) -> None:
    assert numbers(text, "-p") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "x",
        "1.5",
        "-1",
        "8-1",
        "1-",
        "1-8+0",
        "0-8*2",
        "1-8*1",
        "1-9999999",
        "2147483648",
        "9" * 50,
        "1;2",
        "٣",
    ],
)
def test_what_is_no_range_is_one_line_that_names_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match=r"^-p: ") as caught:
        numbers(text, "-p", 1)
    assert "\n" not in str(caught.value)


def test_a_number_below_what_the_flag_takes_is_refused() -> None:
    with pytest.raises(UsageError, match="--threads: '0': 0 is not between 1 and"):
        numbers("0", "--threads", 1)


@given(st.text(alphabet="0123456789-+*, ", max_size=30))
def test_any_text_is_a_list_of_different_integers_or_a_usage_error(text: str) -> None:
    try:
        found = numbers(text, "-p")
    except UsageError:
        return
    assert found
    assert len(set(found)) == len(found)
    assert all(0 <= number < 1 << 31 for number in found)


def test_words_are_those_that_are_known() -> None:
    assert words("llama,cpu,llama", "--backend", ("auto", "cpu", "llama")) == ["llama", "cpu"]
    with pytest.raises(UsageError, match="--backend: 'cuda': 'cuda' is not one of auto, cpu"):
        words("cuda", "--backend", ("auto", "cpu"))


def test_every_value_is_measured_with_every_other_and_the_first_is_the_first_typed() -> None:
    targets = local_targets([("a", "a.gguf")], ["cpu", "llama"], [1, 2], ["f16"], ["auto"])
    found = configurations(targets, [synthetic(64, 8, 0, 1), synthetic(128, 8, 0, 1)])
    assert [one.name for one in found[:4]] == ["cpu, 1 thread", "cpu, 2 threads", "llama, 1 thread", "llama, 2 threads"]
    assert len(found) == 8
    assert {one.workload.facts.prompt for one in found[:4]} == {64}


def test_a_name_says_only_what_differs() -> None:
    alone = configurations([BenchTarget("a", "a.gguf")], [synthetic(1, 1, 0, 1)])
    assert [one.name for one in alone] == [""]
    cached = local_targets([("a", "a"), ("b", "b")], ["cpu"], [None], ["f16", "q8_0"], ["auto"])
    assert [one.name for one in configurations(cached, [synthetic(1, 1, 0, 1)])] == [
        "a, f16",
        "a, q8_0",
        "b, f16",
        "b, q8_0",
    ]


def test_speculations_take_turns_under_their_own_names() -> None:
    speculations = [("off", ""), ("auto", ""), ("small", "/small.gguf")]
    targets = local_targets([("a", "a")], ["cpu"], [None], ["f16"], ["auto"], speculations)
    names = [one.name for one in configurations(targets, [synthetic(1, 1, 0, 1)])]
    assert names == ["speculate off", "speculate auto", "speculate small"]
    assert [target.draft for target in targets] == ["", "", "/small.gguf"]


def test_decoding_is_plain_unless_asked_otherwise() -> None:
    (target,) = local_targets([("a", "a")], ["cpu"], [None], ["f16"], ["auto"])
    assert (target.speculate, target.draft) == ("off", "")


def test_an_endpoint_stands_beside_a_file_by_its_address() -> None:
    targets = [BenchTarget("m", "m.gguf", backend="cpu"), remote_target("http://localhost:1234/v1#big")]
    assert targets[1].model == "big"
    names = [one.name for one in configurations(targets, [synthetic(1, 1, 0, 1)])]
    assert names == ["m, cpu", "big, localhost:1234"]
    unnamed = [BenchTarget("m", "m.gguf"), remote_target("http://localhost:1234/v1")]
    assert [one.name for one in configurations(unnamed, [synthetic(1, 1, 0, 1)])][1] == "localhost:1234"


def test_too_many_configurations_are_refused() -> None:
    targets = local_targets([("a", "a")], ["cpu"], list(range(1, 102)), ["f16"], ["auto"])
    workloads = [synthetic(number, 1, 0, 1) for number in range(1, 12)]
    with pytest.raises(UsageError, match=f"too many configurations: 1,111, limit {MOST_CONFIGURATIONS:,}"):
        configurations(targets, workloads)
