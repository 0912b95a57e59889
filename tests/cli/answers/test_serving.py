"""Tests of the example request that `llmrun serve` prints, and of the adapters with which it opens models."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from llmrun.backends.base import OpenOptions
from llmrun.base.errors import UsageError
from llmrun.base.types import Pooling
from llmrun.cli.answers import serving
from llmrun.cli.answers.answering import ModelFiles
from llmrun.cli.answers.loading import ModelLoading
from llmrun.cli.answers.vision import with_projector
from llmrun.cli.arguments.serving import ServeFlags
from llmrun.hub.resolve.model_file import ResolvedModel
from llmrun.options.presets import Preset
from llmrun.options.settings import Settings, load_presets
from llmrun.serving.models.known import KnownModel, KnownModels
from llmrun.serving.options import ServingOptions
from tests.support.serving.fake_model import FACTS
from tests.support.vision.projectors import tiny_projector, tiny_text_model


@pytest.mark.parametrize(
    ("changes", "takes_chats", "route"),
    [
        ({}, True, "chat/completions"),
        ({}, False, "completions"),
        ({"has_logits": False}, False, "embeddings"),
        ({"metadata": {"fake.pooling_type": Pooling.LAST}}, True, "embeddings"),
        ({"metadata": {"fake.pooling_type": Pooling.RANK}}, True, "rerank"),
        ({"metadata": {"fake.pooling_type": Pooling.NONE}}, True, "chat/completions"),
    ],
)
def test_the_example_is_one_the_model_can_answer(changes: dict[str, Any], takes_chats: bool, route: str) -> None:
    facts = structs.replace(FACTS, info=replace(FACTS.info, **changes), takes_chats=takes_chats)
    assert serving.example_for(facts)[0] == route


def test_servers_without_a_model_name_one_in_the_example() -> None:
    assert serving.example_for(None)[1].startswith('"model": "NAME"')


def test_models_get_their_own_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of --lora are only for the given model. Those of presets are loaded once, and used only on request."""
    given, other = KnownModel("given", Path("/given.gguf")), KnownModel("other", Path("/other.gguf"), "other")
    presets = [
        other.under(Preset("a", "other", loras=("/a.gguf:0.5", "b=/other.gguf:1.0"))),
        other.under(Preset("b", "other", loras=("/a.gguf:2.0",))),
        given.under(Preset("c", "given", loras=("/lora.gguf:0.5",))),
    ]
    found = {known.name: ResolvedModel(known.path, known.name, None) for known in (given, other)}
    monkeypatch.setattr(serving, "_stored", lambda known: found[known.name])
    monkeypatch.setattr(serving, "ModelProcess", lambda opening, *_, **__: opening)
    settings = replace(Settings(), loras=("/lora.gguf:0.25",))
    files = ModelFiles(found["given"], None, OpenOptions(), ModelLoading("given", given.path))
    opener = serving._Opener(ServeFlags(), settings, [(given, files)], None, ServingOptions())

    async def adapters(known: KnownModel) -> object:
        process = await opener.process(KnownModels([given, other, *presets]), known, None)
        return process.options["adapters"]  # type: ignore[attr-defined]  # the Open in its place

    assert asyncio.run(adapters(given)) == ["/lora.gguf:0.25"]
    assert asyncio.run(adapters(other)) == ["/a.gguf:0.0", "b=/other.gguf:0.0"]


def test_models_are_served_with_their_own_projectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of --mmproj is only for the given model."""
    found = {}
    for name in ("given", "other"):
        folder = tmp_path / name
        folder.mkdir()
        tiny_projector(folder, "gemma3")
        found[name] = ResolvedModel(tiny_text_model(folder, "gemma3"), name, None)
    asked = str(tiny_projector(tmp_path, "gemma3"))
    settings = replace(Settings(), mmproj=asked, image_max_tokens=256)
    known = [KnownModel(name, model.path) for name, model in found.items()]
    monkeypatch.setattr(serving, "_stored", lambda known: found[known.name])
    monkeypatch.setattr(serving, "ModelProcess", lambda opening, *_, **__: opening)
    files = ModelFiles(found["given"], None, OpenOptions(), ModelLoading("given", found["given"].path))
    read = replace(files, options=with_projector(files.options, files.found, settings, wanted=True))
    opener = serving._Opener(ServeFlags(), settings, [(known[0], read)], None, ServingOptions())

    async def projector(model: KnownModel) -> tuple[object, object]:
        process = await opener.process(KnownModels(known), model, None)
        options = process.options  # type: ignore[attr-defined]  # the Open in its place
        return options["mmproj"], options["image_max_tokens"]

    assert asyncio.run(projector(known[0])) == (asked, 256)
    assert asyncio.run(projector(known[1])) == (str(tmp_path / "other" / "mmproj-tiny-gemma3-F32.gguf"), 256)
    off = replace(settings, mmproj="off")
    assert with_projector(files.options, files.found, off, wanted=True) == files.options


def test_requests_get_the_system_prompt_of_a_preset_with_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests bring their own prompts. A preset whose system prompt needs a value is left out."""
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").touch()
    (tmp_path / "models.toml").write_text(
        '[presets.full]\nprompt = "$x"\nsystem = "You are a $who: $$5"\nseed = 1\ndefaults.who = "cook"\n'
        '[presets.plain]\nmodel = "m"\nsystem = "$who"\n'
        '[presets.bare]\nprompt = "$x"\n'
        '[presets.open]\nprompt = "x"\nsystem = "You are a $who"\n'
    )
    assert [(preset.name, preset.system) for preset in serving._presets()] == [
        ("full", "You are a cook: $5"),
        ("plain", "$who"),
        ("bare", None),
    ]
    assert "preset open: no value for $who; requests cannot use this preset" in capsys.readouterr().err
    opened = load_presets()["open"]
    with pytest.raises(UsageError, match=r"preset open: no value for \$who") as refused:
        serving._without_prompt(opened)
    assert refused.value.hint == "a server needs defaults: add [presets.open.defaults] to models.toml"
