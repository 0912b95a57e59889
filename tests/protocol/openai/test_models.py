"""Tests of the list of models."""

from __future__ import annotations

from openai.types import Model

from llmrun.protocol.openai.models import models_body
from tests.support.protocol.answers import FACTS, extras


def test_the_list_has_the_served_model() -> None:
    body = models_body(FACTS, 1_700_000_000)
    assert body["object"] == "list"
    (model,) = [Model.model_validate(each, strict=True) for each in body["data"]]
    assert (model.id, model.created, [*extras(model)]) == (
        "tiny",
        1_700_000_000,
        ["max_model_len", "system_fingerprint", "default_sampling", "batch_invariant"],
    )
