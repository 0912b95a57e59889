"""Tests that a document round-trips through JSON, and that malformed ones are rejected."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.jobs.bench.documents import document as document_module
from llmrun.jobs.bench.documents.document import FORMAT, Document, from_json, to_json
from tests.support.bench.stored_documents import document, documents

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def refusal(value: object) -> str:
    with pytest.raises(UsageError) as caught:
        from_json(value, "old.json")
    message = str(caught.value)
    assert message.startswith("old.json: ")
    assert "\n" not in message
    return message.removeprefix("old.json: ")


@pytest.mark.push
@given(documents())
def test_any_document_comes_back_exactly(made: Document) -> None:
    text = json.dumps(to_json(made), allow_nan=False)
    assert from_json(document_module.parse(text, "new.json"), "new.json") == made


def test_the_json_has_the_shape_of_the_document() -> None:
    made = to_json(document())
    assert made["format"] == FORMAT
    assert set(made) == {"format", *(field.name for field in dataclasses.fields(Document))}
    assert made["results"][0]["figures"]["ttft"]["median"] == 0.8
    assert made["results"][1]["gaps"] == [0.014, 0.015, 0.016]


def as_format_3(made: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a document with the fields that the third version had."""
    older = {**copy.deepcopy(made), "format": 3, "prefetching": ["2 threads: weights are prefetched"]}
    for one in older["results"]:
        one["timeline"] = [[0.9, 1], [0.916, 2]]
        one["energy"] = {"source": "NVML", "watts": 30.0, "joules_per_token": 0.5, "cost_per_million": None}
    return older


def as_format_1(made: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a document as the first version wrote it."""
    older = as_format_3(made)
    older["format"] = 1
    del older["answer_checks"], older["prefetching"]
    for one in older["results"]:
        del one["subject"]["speculate"]
        for name in ("steps", "drafted_tokens", "accepted_tokens"):
            del one["totals"][name]
    return older


def test_fields_of_earlier_formats_are_ignored() -> None:
    assert from_json(as_format_3(to_json(document())), "old.json") == document()


def test_later_formats_have_no_fields_of_earlier_ones() -> None:
    newer = {**as_format_3(to_json(document())), "format": 4}
    assert refusal(newer) == "prefetching: unknown key"


def test_a_document_of_the_first_format_is_read_with_defaults() -> None:
    assert from_json(as_format_1(to_json(document())), "old.json") == document()


def test_a_document_of_the_first_format_has_no_later_keys() -> None:
    older = as_format_1(to_json(document()))
    older["results"][0]["totals"]["steps"] = 3
    assert refusal(older) == "results[0].totals.steps: unknown key"


@pytest.mark.push
@given(JSON_VALUES)
def test_any_json_value_is_refused_in_one_line(value: object) -> None:
    refusal(value)


def _paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [path] * bool(path) + [found for key, item in items for found in _paths(item, (*path, key))]


PATHS = _paths(to_json(document()))


@pytest.mark.push
@given(st.sampled_from(PATHS), JSON_VALUES)
def test_a_document_with_any_value_put_anywhere_is_read_or_refused_in_one_line(path: Any, value: object) -> None:
    changed = copy.deepcopy(to_json(document()))
    target: Any = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    try:
        from_json(changed, "old.json")
    except UsageError:
        refusal(changed)


@pytest.mark.push
def test_a_document_with_any_key_taken_away_is_refused_by_the_name_of_the_key() -> None:
    free = ("facts", "system", "figures", "samples")  # may have any keys
    for path in PATHS:
        if isinstance(path[-1], int) or any(part in free for part in path[:-1]):
            continue
        changed = copy.deepcopy(to_json(document()))
        target: Any = changed
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]
        assert path[-1] in refusal(changed)


def _put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(made: dict[str, Any]) -> None:
        target: Any = made
        *before, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
        for part in before:
            target = target[part]
        target[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "format",
            FORMAT + 1,
            f"format: {FORMAT + 1} is from a newer llmrun; this version reads formats up to {FORMAT}",
        ),
        ("format", 10**400, f"format: a huge one is from a newer llmrun; this version reads formats up to {FORMAT}"),
        ("format", True, f"format: True is not an integer from 1 to {FORMAT}"),
        ("identity", 7, "identity: 7 is not text"),
        ("identity", "\ud800", r"identity: '\ud800' is not text that UTF-8 can encode"),
        ("interrupted", 0, "interrupted: 0 is not true or false"),
        ("results", {}, "results: an object is not a list"),
        ("results.0.workload.prompt", -1, f"results[0].workload.prompt: -1 is not an integer from 0 to {2**63 - 1}"),
        ("results.0.workload.prompt", 1.0, f"results[0].workload.prompt: 1.0 is not an integer from 0 to {2**63 - 1}"),
        ("results.0.figures.ttft.mean", math.nan, "results[0].figures.ttft.mean: nan is not a number of at most 1e+30"),
        (
            "results.0.samples.decode",
            [1, 1.1e30],
            "results[0].samples.decode[1]: 1.1e+30 is not a number of at most 1e+30",
        ),
        (
            "results.0.samples.decode",
            [10**400],
            "results[0].samples.decode[0]: a huge integer is not a number of at most 1e+30",
        ),
        ("results.0.roofline.new", 1, "results[0].roofline.new: unknown key"),
        ("results.0.roofline", [], "results[0].roofline: a list is not an object"),
        ("verdicts.0.of", 2, "verdicts[0].of: 2 is not an index of 2 results"),
        (
            "answer_checks",
            [{"of": 0, "against": 2, "answers": 1, "different": 0, "is_exact": True}],
            "answer_checks[0].against: 2 is not an index of 2 results",
        ),
        ("system.cpu", math.inf, "system.cpu: inf is not a number of at most 1e+30"),
    ],
)
def test_a_wrong_value_is_named_by_its_key(path: str, value: object, message: str) -> None:
    changed = to_json(document())
    _put(path, value)(changed)
    assert refusal(changed) == message


@pytest.mark.push
def test_a_fact_nested_for_ever_is_refused() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    changed = to_json(document())
    changed["system"]["cpu"] = deep
    assert "nested too deep" in refusal(changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("NaN", "NaN is not a finite number"),
        ("-Infinity", "-Infinity is not a finite number"),
        ("1e999", "1e999 is not a finite number"),
        ("1" * 5000, "not valid JSON"),
        ("[" * 200_000, "nested too deep"),
    ],
)
def test_text_that_is_not_strict_json_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        document_module.parse(text, "old.json")
    assert str(caught.value).startswith("old.json: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 200


def test_a_file_that_cannot_be_read_as_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "missing", "nul\0in it", "."):
        with pytest.raises(UsageError, match="results: "):
            document_module.read_text(tmp_path / name)


def test_what_json_cannot_hold_is_refused_when_it_is_written() -> None:
    for bad in (math.nan, math.inf, {1, 2}):
        with pytest.raises(LlmrunError, match=r"document\.system\.load: .* cannot be saved as JSON"):
            to_json(dataclasses.replace(document(), system={"load": bad}))


def test_a_name_that_is_not_utf8_is_kept_in_characters_that_are() -> None:
    made = dataclasses.replace(document(), command="llmrun bench -m \udcff.gguf")
    assert from_json(to_json(made), "new.json").command == r"llmrun bench -m \udcff.gguf"
