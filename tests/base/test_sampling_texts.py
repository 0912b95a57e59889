"""Tests of the lists of samplers and sequence breakers."""

from __future__ import annotations

import pytest

from llmrun.base.errors import UsageError
from llmrun.base.sampling_texts import BREAKER_LIST, DEFAULT_BREAKERS, SAMPLER_LIST, parse_breakers, parse_samplers
from llmrun.options.settings import load_settings


def test_samplers_have_llama_cpps_names_and_aliases() -> None:
    assert parse_samplers("top-k;TopP; min_p ;temp;typ") == ("top_k", "top_p", "min_p", "temperature", "typ_p")
    assert parse_samplers("nucleus;typ-p") == ("top_p", "typ_p")


@pytest.mark.parametrize("text", ["top_kk", "top_k;", ";", " ", "top_k,top_p", "infil"])
def test_other_samplers_are_invalid(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of samplers"):
        load_settings({"samplers": text})


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("top_kk;temp", "did you mean top_k?"),
        ("top_k;tempertaure", "did you mean temperature?"),
        ("?", "known: penalties, dry"),
    ],
)
def test_a_misspelled_sampler_gets_a_suggestion(text: str, advice: str) -> None:
    assert SAMPLER_LIST.advice(text).startswith(advice)
    with pytest.raises(UsageError, match=r"flag: --samplers: .* is not a list of samplers") as caught:
        load_settings({"samplers": text})
    assert caught.value.hint == SAMPLER_LIST.advice(text)


@pytest.mark.parametrize(
    ("text", "breakers"),
    [
        (DEFAULT_BREAKERS, ("\n", ":", '"', "*")),
        ("none", ()),
        ("[]", ()),
        (":", (":",)),
        ("[", ("[",)),
        ('["[x]"]', ("[x]",)),
    ],
)
def test_breakers_are_a_text_or_a_json_list(text: str, breakers: tuple[str, ...]) -> None:
    assert parse_breakers(text) == breakers


@pytest.mark.parametrize("text", ['["\n]', "[1]", '[""]', "[x]", '["\\ud800"]', "\ud800", "[" * 9999 + "]" * 9999])
def test_invalid_breakers_are_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a string or a JSON list of strings"):
        load_settings({"dry_sequence_breakers": text})
    assert BREAKER_LIST.advice(text)
