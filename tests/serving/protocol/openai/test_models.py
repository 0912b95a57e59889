"""Tests of the list of models."""

from __future__ import annotations

from openai.types import Model

from llmrun.serving.protocol.openai.responses import model_body, models_body, unloaded_model_body
from tests.support.protocol.answers import FACTS, extras


def test_the_list_has_all_models() -> None:
    body = models_body([model_body(FACTS, 1_700_000_000), unloaded_model_body("other", 1)])
    assert body["object"] == "list"
    model, other = [Model.model_validate(each, strict=True) for each in body["data"]]
    assert (other.id, [*extras(other)]) == ("other", [])
    assert (model.id, model.created, [*extras(model)]) == (
        "tiny",
        1_700_000_000,
        ["max_model_len", "meta", "system_fingerprint", "default_sampling", "batch_invariant"],
    )
