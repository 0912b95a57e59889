"""Tests of Ray clusters in --workers."""

from __future__ import annotations

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.batching.workers import WorkersWanted, parse_workers


@pytest.mark.parametrize("text", ["ray", "ray:10.0.0.5:6379", "local,ray", "http://10.0.0.7:8080,ray:head:6379"])
def test_clusters_are_workers_that_need_the_model(text: str) -> None:
    names = parse_workers(text, "m")
    assert names == text.split(",")
    assert WorkersWanted(names, 1, None, None).needs_model


def test_servers_have_the_model() -> None:
    assert not WorkersWanted(["http://10.0.0.7:8080"], 1, None, None).needs_model


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ray,ray:10.0.0.5:6379", "only one Ray cluster can be used"),
        ("ray:10.0.0.5", "is not the address of a Ray cluster"),
        ("rays", "is not a worker"),
    ],
)
def test_other_clusters_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_workers(text, "m")
