"""Tests that idle background engines leave when a model needs their memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.cli.answers import room
from llmrun.cli.answers.room import make_room_for
from llmrun.serving.background.control import running
from tests.support.cli.commands import llmrun, run
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.downloads import smollm2
from tests.support.serving.fake_engine import started

pytestmark = pytest.mark.push

ENORMOUS = "20000000000"  # tokens


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with a cache of 288 bytes per token with f16, and a trained context of a million tokens."""
    return tiny_llama(tmp_path / "tiny.gguf", context=1 << 20)


@pytest.fixture
def with_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda free: monkeypatch.setattr(room, "free_memory", lambda *, reserved: free - reserved)


def left_for(model: Path, **options: int | str) -> bool:
    """Return whether an idle engine leaves for a model. Engines that generate never leave."""
    idle, busy = started("idle"), started("busy", answers=1)
    sequences = int(options.pop("sequences", 1))
    make_room_for(model, OpenOptions(kv_type="f16", **options), sequences=sequences)  # type: ignore[arg-type]
    assert busy.poll() is None
    return idle.poll() is not None


@pytest.mark.parametrize(("free", "leaves"), [(10**9, False), (120_000_000, True)])
def test_idle_engines_leave_rather_than_shrink_the_context(
    engines: Path, model: Path, with_free: Callable[[int], None], free: int, leaves: bool
) -> None:
    with_free(free)
    assert left_for(model) is leaves


def test_every_sequence_should_have_a_whole_context(
    engines: Path, model: Path, with_free: Callable[[int], None]
) -> None:
    with_free(200_000_000)
    assert not left_for(model)
    assert left_for(model, sequences=64)


def test_a_requested_context_only_has_to_fit(engines: Path, model: Path, with_free: Callable[[int], None]) -> None:
    with_free(120_000_000)
    assert not left_for(model, context_size=16_384)
    assert left_for(model, context_size=1_000_000)


def test_projectors_need_memory_too(
    engines: Path, model: Path, tmp_path: Path, with_free: Callable[[int], None]
) -> None:
    projector = tmp_path / "mmproj.gguf"
    with projector.open("wb") as file:
        file.truncate(100_000_000)
    with_free(200_000_000)
    assert left_for(model, mmproj=str(projector))


def test_unreadable_files_make_no_engine_leave(engines: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert not left_for(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["generate", "--raw", "-m", "{model}", "hi"], 7),
        (["chat", "-m", "{model}"], 7),
        (["serve", "{model}", "--port", "0"], 7),
        (["batch", "{text}", "-o", "{out}", "-m", "{model}"], 7),
        (["eval", "{model}", "--text", "{text}"], 7),
        (["embed", "-m", "{model}", "hi"], 7),
        (["imatrix", "{model}", "--text", "{text}", "-o", "{out}"], 7),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_command_asks_idle_engines_before_it_fails(
    engines: Path, model: Path, tmp_path: Path, command: list[str], code: int
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "hello"}\n' * 50)
    places = {"model": str(model), "text": str(text), "out": str(tmp_path / "out")}
    engine = started("idle")
    done = llmrun(*(word.format_map(places) for word in command), "-c", ENORMOUS)
    assert done.returncode == code, done.stderr
    assert engine.poll() is not None


@pytest.mark.night
def test_the_longest_idle_engine_leaves_for_a_third(engines: Path) -> None:
    old, older = started("old", name="old", used=2), started("older", used=1)
    run("generate", "-m", str(smollm2()), "--keep-alive", "1h", "-n", "1", "hi")
    assert (old.poll(), older.poll()) == (None, 0)
    assert len(running()) == 2


@pytest.mark.night
def test_fit_counts_the_memory_of_idle_engines_as_free(engines: Path, model: Path) -> None:
    started("idle", memory_bytes=10**15)
    started("busy", memory_bytes=10**15, answers=1)
    machine = json.loads(run("fit", str(model), "--json")[0])["machine"]
    assert 10**15 < machine["memory_free"] < 2 * 10**15
