"""Tests of the choice of the model and the context for an agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from llmrun.backends.cpu.vision_costs import EncoderMemory
from llmrun.backends.fitting import Resources, fit_of
from llmrun.base.errors import DoesNotFit, UsageError
from llmrun.base.machine.cpu_count import default_threads
from llmrun.cli.launching import models
from llmrun.cli.launching.agents import AGENTS
from llmrun.cli.launching.models import chosen_model, context_for, find_model, least_context, suitable_model
from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub import recommendation
from llmrun.hub.catalog import load_catalog
from llmrun.model.vision.projector import read_projector
from llmrun.options.settings import Settings
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.vision.projectors import tiny_projector, tiny_text_model

TOOLS = "{% for tool in tools %}{{ tool }}{% endfor %}"
CLAUDE = AGENTS["claude"]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free memory in bytes, which tests may set. No speed is known."""
    free = [int(16e9)]

    def resources(**options: object) -> Resources:
        return Resources(free[0])

    monkeypatch.setattr(models, "_resources", lambda settings: resources())
    monkeypatch.setattr(Resources, "of_this_machine", resources)
    monkeypatch.setattr(recommendation, "copies", lambda catalog: {})
    return free


def test_chosen_models_fit_the_machine_and_the_agent(memory: list[int]) -> None:
    for gigabytes in (4, 8, 16, 64, 256):
        memory[0] = int(gigabytes * 1e9)
        found = suitable_model(Settings(), CLAUDE)
        assert found is not None, gigabytes
        assert found.needed < memory[0]
        assert (found.entry.context or 0) >= CLAUDE.context
    memory[0] = int(0.5e9)
    assert suitable_model(Settings(), CLAUDE) is None
    with pytest.raises(DoesNotFit, match="no model of the catalogue suits"):
        chosen_model(Settings(), CLAUDE, None)


def test_models_on_this_machine_come_first(memory: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = recommendation.candidates

    def candidates(*arguments: object) -> list[recommendation.Candidate]:
        found = ours(*arguments)  # type: ignore[arg-type]
        return [replace(each, is_here=each.name == "qwen2.5-coder:1.5b") for each in found]

    monkeypatch.setattr(recommendation, "candidates", candidates)
    found = suitable_model(Settings(), CLAUDE)
    assert found is not None
    assert found.name == "qwen2.5-coder:1.5b"


def test_models_that_the_user_chose_stay(memory: list[int]) -> None:
    mine = Settings(model="gemma3:1b")
    assert chosen_model(mine, CLAUDE, "gemma3:1b") is mine
    assert chosen_model(mine, CLAUDE, None) is mine
    assert chosen_model(Settings(), CLAUDE, None).model != Settings().model


def test_models_for_agents_have_a_known_context_and_size() -> None:
    found = [entry for entry in load_catalog().entries() if entry.agents]
    assert len(found) > 5
    assert [entry.name for entry in found if not entry.context or not entry.estimated_size] == []


def test_contexts_grow_with_the_memory(memory: list[int], tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", chat_template=TOOLS, context=65_536)
    with open_gguf(path) as file:
        needed = fit_of(file, Resources(None), context=8192).footprint
    alone = needed.programs + needed.pinned + needed.mapped
    found = []
    for tokens in (8192, 40_000, 90_000):  # half of the free memory is for the cache
        memory[0] = alone + needed.cache.of(tokens)
        found.append(context_for(Settings(), 8192, path))
    assert found[0] == 8192 < found[1] < found[2] == 32_768
    assert context_for(Settings(ctx_size=9000), 9000, path) == 9000
    memory[0] = alone
    with pytest.raises(DoesNotFit, match="not enough memory for 8,192 tokens of context"):
        context_for(Settings(), 8192, path)


def test_projectors_leave_less_room_for_the_context(memory: list[int], tmp_path: Path) -> None:
    path, mmproj = tiny_text_model(tmp_path, "gemma3"), tiny_projector(tmp_path, "gemma3")
    with open_gguf(path) as file:
        needed = fit_of(file, Resources(None), context=1024).footprint
    memory[0] = needed.programs + needed.pinned + needed.cache.of(1024)
    assert context_for(Settings(), 1024, path) == 1024
    seeing = Settings(mmproj=str(mmproj))
    with pytest.raises(DoesNotFit):
        context_for(seeing, 1024, path)
    memory[0] += sum(structs.astuple(EncoderMemory.in_header(read_projector(mmproj), default_threads())))
    assert context_for(seeing, 1024, path) == 1024


def test_agents_get_what_they_need(memory: list[int], tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", chat_template=TOOLS, context=40_000)
    assert least_context(Settings(), CLAUDE, path) == CLAUDE.context
    assert least_context(Settings(ctx_size=0), CLAUDE, path) == 40_000
    assert least_context(Settings(ctx_size=36_000), CLAUDE, path) == 36_000
    no_tools = tiny_llama(tmp_path / "n.gguf", context=40_000)
    assert least_context(Settings(), AGENTS["aider"], no_tools) == AGENTS["aider"].context
    with pytest.raises(UsageError, match="support tools") as caught:
        least_context(Settings(), CLAUDE, no_tools)
    assert caught.value.hint.startswith("a model that fits: llmrun launch claude -m ")


def test_models_keep_their_names_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    found = find_model(Settings(model="./m.gguf"), download=False)
    assert (found.name, found.lasting) == ("m", str(tmp_path / "m.gguf"))
    missing = find_model(Settings(model="qwen3:4b"), download=False)
    assert (missing.path, missing.name) == (None, "qwen3:4b")
