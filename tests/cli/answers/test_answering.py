"""Tests of how settings reach the engine and the backend, and of the messages about them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.scripted import ScriptedBackend
from llmrun.cli.answers.answering import local_options, open_model
from llmrun.cli.answers.background import BackgroundRun
from llmrun.cli.console.output import out
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.engine import Engine
from llmrun.options.settings import Settings

Capture = pytest.CaptureFixture[str]


class Asked(Exception):
    """Raised instead of opening a model."""


def opened_with(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> tuple[Any, Any]:
    """Return the arguments `speculate` and `draft` with which the model would be opened."""
    asked: dict[str, Any] = {}

    def refuse(path: Path, options: object, **others: Any) -> Engine:
        asked.update(others)
        raise Asked

    monkeypatch.setattr(Engine, "open", refuse)
    with contextlib.suppress(Asked), open_model(settings, chat_template=None, will_chat=False):
        pass
    return asked["speculate"], asked["draft"]


@pytest.mark.parametrize(
    ("value", "speculate", "draft"),
    [(None, None, None), ("auto", True, None), ("off", False, None), ("small.json", True, Path("small.json"))],
)
def test_the_engine_is_told_what_to_speculate_with(
    monkeypatch: pytest.MonkeyPatch, value: str | None, speculate: bool | None, draft: Path | None
) -> None:
    settings = Settings(model="big.json", backend="scripted", speculate=value)
    assert opened_with(monkeypatch, settings) == (speculate, draft)


def open_varying(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Open a model on a backend whose results depend on the batch, as llama.cpp's do."""
    backend = ScriptedBackend()
    backend.info = replace(backend.info, batch_invariant=False)

    def opened(path: Path, options: object, *, speculate: bool | None, **others: Any) -> Engine:
        return Engine(backend, drafts=[LookupSource()] if speculate else [])

    monkeypatch.setattr(Engine, "open", opened)
    settings = Settings(model="any.json", backend="scripted", speculate=value)
    with open_model(settings, chat_template=None, will_chat=False):
        pass


def test_drafts_that_stop_during_an_answer_are_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    source = LookupSource()
    engine = Engine(ScriptedBackend(), drafts=[source])
    monkeypatch.setattr(Engine, "open", lambda *arguments, **options: engine)
    settings = Settings(model="any.json", backend="scripted", speculate="auto")
    with open_model(settings, chat_template=None, will_chat=False):
        source.error = "draft model stopped: no memory"
    assert "note: draft model stopped: no memory; the answers are not affected\n" in capsys.readouterr().err


def test_speculation_on_request_is_said_to_change_answers(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    open_varying(monkeypatch, "auto")
    assert "answers may differ from those without speculation" in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, "off"])
def test_no_speculation_needs_no_note(monkeypatch: pytest.MonkeyPatch, capsys: Capture, value: str | None) -> None:
    open_varying(monkeypatch, value)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("value", "words"), [("auto", "by lookup"), ("off", "none")])
def test_verbose_tells_what_drafts(monkeypatch: pytest.MonkeyPatch, capsys: Capture, value: str, words: str) -> None:
    monkeypatch.setattr(out, "verbose", True)
    open_varying(monkeypatch, value)
    assert f"drafts     {words}\n" in capsys.readouterr().err


def test_the_backend_gets_all_settings_of_devices() -> None:
    settings = Settings(
        backend="llama", gpu_layers=7, tensor_split="3,1", split_mode="row", main_gpu=1, rpc="box:1", rpc_anyway=True
    )
    options = local_options(settings)
    devices = (options.tensor_split, options.split_mode, options.main_gpu, options.rpc, options.rpc_anyway)
    assert devices == ("3,1", "row", 1, "box:1", True)
    assert (options.backend, options.gpu_layers) == ("llama", 7)
    assert local_options(Settings()) == OpenOptions(draft_head=True)


def test_tool_calls_as_text_can_be_switched_off() -> None:
    assert local_options(Settings()).text_calls
    assert not local_options(Settings(tool_text="off")).text_calls


@pytest.mark.parametrize(
    ("images", "mmproj", "path", "most"),
    [
        (False, None, "", None),
        (False, "off", "", None),
        (False, "/p.gguf", "/p.gguf", 70),
        (True, "/p.gguf", "/p.gguf", 70),
    ],
)
def test_the_projector_is_opened_only_if_needed(
    monkeypatch: pytest.MonkeyPatch, images: bool, mmproj: str | None, path: str, most: int | None
) -> None:
    asked: list[OpenOptions] = []

    def refuse(path: Path, options: OpenOptions, **others: Any) -> Engine:
        asked.append(options)
        raise Asked

    monkeypatch.setattr(Engine, "open", refuse)
    settings = Settings(model="big.json", backend="scripted", mmproj=mmproj, image_max_tokens=70)
    with contextlib.suppress(Asked), open_model(settings, chat_template=None, will_chat=False, images=images):
        pass
    assert [(options.mmproj, options.image_max_tokens) for options in asked] == [(path, most)]


@pytest.mark.parametrize(("images", "mmproj", "sees"), [(False, None, False), (True, None, True), (False, "p", True)])
def test_runs_with_images_ask_for_an_engine_with_a_projector(
    monkeypatch: pytest.MonkeyPatch, images: bool, mmproj: str | None, sees: bool
) -> None:
    asked: list[bool] = []

    def refuse(*arguments: object) -> None:
        raise Asked

    monkeypatch.setattr(BackgroundRun, "joined", lambda run: asked.append(run.images))
    monkeypatch.setattr("llmrun.cli.answers.answering._open_here", refuse)
    settings = Settings(model="big.gguf", mmproj=mmproj)
    with contextlib.suppress(Asked), open_model(settings, chat_template=None, will_chat=False, images=images):
        pass
    assert asked == [sees]
