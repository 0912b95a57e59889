"""Tests of the list of models in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from llmrun.serving.protocol.anthropic.answers import anthropic_model, anthropic_models
from llmrun.serving.protocol.openai.responses import model_body, models_body, unloaded_model_body
from tests.support.protocol.answers import FACTS

if TYPE_CHECKING:
    from anthropic.types import ModelInfo


def official(body: Mapping[str, Any]) -> ModelInfo:
    from anthropic.types import ModelInfo  # importing it takes seconds

    return ModelInfo.model_validate(body)


def test_a_model_has_the_fields_of_the_api() -> None:
    model = official(anthropic_model(model_body(FACTS, 1_700_000_000)))
    assert (model.id, model.display_name, model.max_input_tokens) == ("tiny", "tiny", 4096)
    assert model.created_at == datetime.fromtimestamp(1_700_000_000, UTC)
    assert model.model_extra == {}


def test_all_models_are_on_one_page() -> None:
    page = anthropic_models(models_body([model_body(FACTS, 1), unloaded_model_body("other", 1)]))
    assert [model["id"] for model in page["data"]] == ["tiny", "other"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "tiny", "other")
    assert anthropic_models(models_body([]))["first_id"] is None


def test_the_context_of_a_model_that_is_not_loaded_is_unknown() -> None:
    model = official(anthropic_model(unloaded_model_body("other", 1)))
    assert model.max_input_tokens is None
