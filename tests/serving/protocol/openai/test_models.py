"""Tests of the list of models."""

from __future__ import annotations

from msgspec import structs
from openai.types import Model

from llmrun.engine.requests import IMAGE_MARKER
from llmrun.serving.protocol.llama_facts import props_body
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
        ["max_model_len", "meta", "system_fingerprint", "default_sampling", "batch_invariant", "architecture"],
    )


def test_models_that_read_images_say_so() -> None:
    seeing = structs.replace(FACTS, sees_images=True)
    for facts, wanted in ((FACTS, ["text"]), (seeing, ["text", "image"])):
        assert model_body(facts, 1)["architecture"]["input_modalities"] == wanted
        assert props_body(facts, "1")["modalities"] == {"vision": "image" in wanted, "audio": False}
        assert props_body(facts, "1")["media_marker"] == IMAGE_MARKER
