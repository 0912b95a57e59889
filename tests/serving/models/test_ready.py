"""Tests of what presets add to requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from llmrun.backends.lora_files import LoraOption
from llmrun.engine.requests import ChatPrompt, Request, TextPrompt
from llmrun.options.presets import Preset
from llmrun.serving.models.known import KnownModel
from llmrun.serving.models.registry import Ready
from tests.support.serving.fake_model import FACTS, FakeModel

VALUES: Mapping[str, Any] = {"system": "Be brief.", "temperature": 0.3, "max_tokens": 9, "think": False, "seed": 4}
PIRATE = Preset("Pirate", "fake", VALUES, {"style": "short", "tone": "dry"})
USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be kind."}


def ready(preset: Preset | None = PIRATE, *, thinks: bool = True) -> Ready:
    model = FakeModel()
    model.facts = structs.replace(FACTS, thinks=thinks)
    return Ready.under(KnownModel("Pirate" if preset else "fake", Path("fake"), preset=preset), model)


def test_presets_complete_requests() -> None:
    made = ready()
    assert (made.facts.name, made.facts.default_sampling.temperature, made.seed(7)) == ("Pirate", 0.3, 4)
    done = made.completed(Request(ChatPrompt([USER])))
    assert isinstance(done.prompt, ChatPrompt)
    assert [*done.prompt.messages] == [{"role": "system", "content": "Be brief."}, USER]
    assert done.prompt.template_kwargs == {"style": "short", "tone": "dry"}
    assert (done.max_tokens, done.think, done.think_budget) == (9, False, None)


def test_requests_take_precedence_over_presets() -> None:
    asked = Request(ChatPrompt([SYSTEM, USER], template_kwargs={"tone": "warm"}), 20, think_budget=5)
    done = ready().completed(asked)
    assert isinstance(done.prompt, ChatPrompt)
    assert [*done.prompt.messages] == [SYSTEM, USER]
    assert done.prompt.template_kwargs == {"style": "short", "tone": "warm"}
    assert (done.max_tokens, done.think, done.think_budget) == (20, None, 5)


def test_presets_add_only_what_applies() -> None:
    assert ready().completed(Request(TextPrompt("a"))) == Request(TextPrompt("a"), max_tokens=9)
    assert ready(thinks=False).completed(Request(ChatPrompt([USER]))).think is None


def test_names_choose_adapters() -> None:
    """Requests that choose their own keep them."""
    base = KnownModel("base", Path("fake"))
    pirate = base.under(Preset("Pirate", "fake", loras=("/arr.gguf:0.5", "b=/x.gguf")))
    adapter = base.with_adapter(LoraOption("arr", Path("/arr.gguf"), 0.0))
    assert (adapter.name, adapter.parent) == ("arr", "base")
    text = Request(TextPrompt("a"))
    for known, expected in ((base, None), (pirate, {"arr": 0.5, "b": 1.0}), (adapter, {"arr": 1.0})):
        made = Ready.under(known, FakeModel())
        assert made.completed(text).adapters == expected
        assert made.completed(structs.replace(text, adapters={})).adapters == {}


@pytest.mark.parametrize("limit", [-1, None])
def test_settings_missing_in_a_preset_stay_open(limit: int | None) -> None:
    made = ready(Preset("Pirate", "fake", {} if limit is None else {"max_tokens": limit}))
    asked = Request(ChatPrompt([USER]))
    assert made.completed(asked) == asked
    assert made.seed(7) == 7


def test_names_without_a_preset_add_nothing() -> None:
    asked = Request(ChatPrompt([USER]))
    assert ready(None).completed(asked) is asked


def test_each_preset_has_its_signature() -> None:
    """Streams are resumed only under the same signature."""
    others = (
        None,
        structs.replace(PIRATE, variables={}),
        structs.replace(PIRATE, values={**VALUES, "temperature": 0.4}),
    )
    assert len({ready(preset).signature for preset in (PIRATE, *others)}) == 4
