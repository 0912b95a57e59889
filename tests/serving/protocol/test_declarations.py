"""Tests of the declarations of JSON objects, from which requests are read and schemas are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypedDict

import pytest

from llmrun.serving.protocol.declarations import (
    KEPT,
    Expected,
    Inline,
    Keywords,
    Limits,
    Matching,
    Refused,
    Tagged,
    Usual,
    kind_of,
    read,
    schemas,
)
from llmrun.serving.protocol.errors import InvalidField


class Other(TypedDict):
    """Another object."""

    a: Annotated[str, "A text in two ", "The last description counts."]


class _Hidden(TypedDict):
    a: int


class Bread(TypedDict):
    kind: Literal["bread", "toast"]
    slices: NotRequired[Annotated[int, Limits(1, 9)]]


class _Cake(TypedDict):
    kind: Annotated[Literal["cake"], Refused((), "eat bread")]


class Soup(TypedDict):
    kind: Literal["soup"]
    salt: NotRequired[float]


class _AnyCourse(TypedDict):
    kind: str


class _Buffet(TypedDict):
    courses: list[Annotated[Bread | Annotated[_AnyCourse, KEPT], Tagged("kind", default="bread")]]


def more_fields() -> Mapping[str, Any]:
    return {"warmth": float, "size": Annotated[int, Limits(0)]}


COURSES: Final = Tagged("kind", unknown="no {} here", advice="eat bread")


class Meal(TypedDict, total=False):
    """A meal with its guests and courses."""

    name: Required[Annotated[str, Limits(1, 5), "The name."]]
    guests: list[Annotated[str, Matching("[a-z]+", "lower-case letters")]]
    first: Annotated[Bread | Soup, Tagged("kind", default="bread")]
    courses: Annotated[
        list[Annotated[Bread | Soup, Tagged("kind", unknown="no {} here", advice="eat bread")]], Limits(1)
    ]
    prices: dict[str, Annotated[float, Limits(0, 100)]]
    count: Annotated[int, Limits(-1, without=0), Expected("a count")]
    size_or_words: Annotated[int | str | list[str] | list[int], Expected("one of many things")]
    quiet: Annotated[bool, Usual((False,))]
    loud: Annotated[Any, Refused((False,), "be quiet", "too loud")]
    music: Annotated[Any, Refused()]
    kept: Annotated[Other, KEPT]
    rest: Annotated[dict[str, Any], Inline(more_fields)]


@pytest.mark.parametrize(
    ("declared", "schema"),
    [
        (str, {"type": "string"}),
        (Any, {}),
        (str | None, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (Literal["a", "b"], {"enum": ["a", "b"]}),
        (Literal[0], {"const": 0}),
        (
            Annotated[int, Limits(-1, 7, without=0)],
            {"type": "integer", "minimum": -1, "maximum": 7, "not": {"const": 0}},
        ),
        (Annotated[str, Matching("[a-z]+", "letters")], {"type": "string", "pattern": "^[a-z]+$"}),
        (Annotated[str, Keywords({"format": "date-time"})], {"type": "string", "format": "date-time"}),
        (
            Annotated[list[Annotated[str, Limits(1)]], Limits(high=2)],
            {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 2},
        ),
        (list[str | Other], {"type": "array", "items": {"anyOf": [{"type": "string"}, kind_of(Other).schema({})]}}),
        (Bread | Soup | _Cake, {"anyOf": [kind_of(Bread).schema({}), kind_of(Soup).schema({})]}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (dict[str, Any], {"type": "object"}),
        (_Hidden, {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}),
    ],
    ids=str,
)
def test_types_have_schemas(declared: Any, schema: dict[str, Any]) -> None:
    assert kind_of(declared).schema({}) == schema


def test_an_object_with_any_tag_stands_for_all_others() -> None:
    given = [{"slices": 1}, {"kind": "cake", "layers": 2}]
    assert read(_Buffet, {"courses": given}) == ({"courses": [{"kind": "bread", "slices": 1}, given[1]]}, ())
    with pytest.raises(InvalidField, match=r"courses\[0\]\.kind: expected a string, got 5"):
        read(_Buffet, {"courses": [{"kind": 5}]})


def test_objects_are_components_with_descriptions() -> None:
    found = schemas(list[Other])
    text = {"type": "string", "description": "The last description counts."}
    other = {"type": "object", "description": "Another object.", "required": ["a"], "properties": {"a": text}}
    assert found == {"Other": other}
    meal = schemas(Meal)["Meal"]
    assert meal["required"] == ["name"]
    assert {"warmth", "size", "quiet"} <= {*meal["properties"]}
    assert {"rest", "loud", "music"}.isdisjoint(meal["properties"])


def test_unknown_types_are_mistakes() -> None:
    with pytest.raises(TypeError):
        kind_of(set[int])


def test_known_fields_are_read_and_others_are_named() -> None:
    body = {
        "name": "lunch",
        "guests": None,
        "first": {"slices": 2, "butter": True},
        "courses": [{"kind": "soup", "salt": 1, "pepper": 1}, {"kind": "soup", "pepper": 1}],
        "kept": {"a": "b", "c": "d"},
        "quiet": True,
        "loud": False,
        "size": 3,
        "unknown": 1,
        "nothing": None,
    }
    found, ignored = read(Meal, body)
    assert found["courses"] == [{"kind": "soup", "salt": 1.0}, {"kind": "soup"}]
    assert (found["first"], found["kept"], found["rest"]) == (
        {"kind": "bread", "slices": 2},
        {"a": "b", "c": "d"},
        {"size": 3},
    )
    assert "guests" not in found
    assert "quiet" not in found
    assert {*ignored} == {"quiet", "unknown", "first.butter", "courses[].pepper"}


WRONG: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "missing": ({"name": None}, "name: this field is required"),
    "type": ({"name": 5}, "name: expected a string, got 5"),
    "length": ({"name": "supper"}, "name: expected 1 to 5 characters, got 6"),
    "list": ({"guests": "me"}, 'guests: expected a list, got "me"'),
    "pattern": ({"guests": ["me", "You"]}, 'guests[1]: expected lower-case letters, got "You"'),
    "limit": ({"first": {"kind": "toast", "slices": 10}}, "first.slices: expected an integer from 1 to 9, got 10"),
    "boolean": ({"first": {"slices": True}}, "first.slices: expected an integer from 1 to 9, got true"),
    "tag": ({"first": {"kind": "cake"}}, 'first.kind: expected one of bread, toast, soup, got "cake"'),
    "no tag": ({"courses": [{}]}, "courses[0].kind: this field is required"),
    "unknown tag": ({"courses": [{"kind": "cake"}]}, 'courses[0]: no "cake" here'),
    "empty": ({"courses": []}, "courses: expected at least one item, got an empty list"),
    "value": ({"prices": {"soup": 101}}, "prices.soup: expected a number from 0 to 100, got 101"),
    "without": ({"count": 0}, "count: expected a count, got 0"),
    "no float": ({"count": 1.0}, "count: expected a count, got 1.0"),
    "union": ({"size_or_words": {}}, "size_or_words: expected one of many things, got an object"),
    "list of a union": ({"size_or_words": ["a", 1]}, "size_or_words[1]: expected a string, got 1"),
    "refused": ({"loud": True}, "loud: too loud"),
    "refused in any case": ({"music": "jazz"}, "music: not supported"),
    "inline": ({"size": -1}, "size: expected an integer of at least 0, got -1"),
    "huge": (
        {"warmth": 10**400},
        "warmth: expected a number, got 1000000000000000000000000000000000000000…00000000000000000000",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_field_and_the_value(case: str) -> None:
    fields, message = WRONG[case]
    with pytest.raises(InvalidField) as caught:
        read(Meal, {"name": "lunch", **fields})
    assert (str(caught.value), caught.value.param) == (message, message.partition(":")[0])


def test_the_place_of_an_object_is_part_of_the_path() -> None:
    with pytest.raises(InvalidField, match=r"meals\[2\]\.name"):
        read(Meal, {}, "meals[2]")
