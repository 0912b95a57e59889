"""Tests that no token or password is in a report, wherever it was found."""

from __future__ import annotations

import pytest

from llmrun.jobs.doctor import examine
from llmrun.jobs.doctor.examine import NOTE, Finding, Secrets


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "hub_token", lambda: "hf_from_a_file")


@pytest.mark.parametrize(
    "variable", ["HF_TOKEN", "LLMRUN_API_KEY", "openai_apikey", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"]
)
def test_the_value_of_a_variable_that_is_a_secret_by_its_name_is_hidden(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "s3cr3t-value")
    assert Secrets().hidden("it said: s3cr3t-value!") == "it said: [hidden]!"


def test_the_token_of_the_hub_is_hidden_wherever_it_comes_from() -> None:
    assert Secrets().hidden("Bearer hf_from_a_file") == "Bearer [hidden]"


def test_of_two_secrets_that_begin_alike_none_is_left_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    monkeypatch.setenv("B_TOKEN", "secret-and-more")
    assert Secrets().hidden("secret-and-more secret") == "[hidden] [hidden]"


def test_what_is_too_short_to_be_a_secret_does_not_blot_out_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "on")
    assert Secrets().hidden("on and on") == "on and on"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host/x", "https://[hidden]@host/x"),
        ("proxy http://a:b@c@host:1 refused", "proxy http://[hidden]@host:1 refused"),
        ("https://host/@me and me@host", "https://host/@me and me@host"),
    ],
)
def test_names_and_passwords_of_urls_are_hidden(text: str, shown: str) -> None:
    assert Secrets().hidden(text) == shown


def test_every_text_of_a_finding_is_cleaned_and_nothing_else_changes() -> None:
    said = "hf_from_a_file"
    facts = {"a": said, "b": [said, 1], "c": {"d": (said,)}, "e": None, "f": 2.5, "g": True}
    cleaned = Secrets().hidden_in(Finding("S", "n", NOTE, said, said, said, facts))
    h = "[hidden]"
    assert cleaned == Finding(
        "S", "n", NOTE, h, h, h, {"a": h, "b": [h, 1], "c": {"d": [h]}, "e": None, "f": 2.5, "g": True}
    )
