"""Tests that replays do not depend on levels, threads, drafts or other requests, and that they find differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.backends.base import AUTO, OpenOptions
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Finished, Request, TextDelta, TokenPrompt
from llmrun.formats.layouts.kv import KV_CHOICES
from llmrun.hub.progress_reporter import Silent
from llmrun.jobs.recording import ModelFile, Recording, parse_recording
from llmrun.jobs.replay import (
    Incomparable,
    OtherToken,
    Watcher,
    adapter_digest,
    check_adapters,
    check_files,
    check_numerics,
    check_template,
    model_files,
    opening_of,
    record,
    replay,
    write_recording,
)
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import answer_all
from tests.support.kernels.runs import EXECUTABLE_LEVELS, WEIGHT_TYPES, at_level
from tests.support.missing_packages import hide
from tests.support.models.digests import StableRandom
from tests.support.models.numeric_models import NUMERIC_MODELS, write_numeric_model
from tests.support.models.tiny_adapters import tiny_adapter

pytestmark = pytest.mark.push

# The same tokens twice, so that lookup finds drafts.
PROMPT = StableRandom(3).tokens(40, 290) * 2
STRANGERS = [Request(TokenPrompt(StableRandom(seed).tokens(30 + seed, 290)), max_tokens=20) for seed in (4, 5)]
N_TOKENS = 24


@contextmanager
def opened(
    path: Path,
    *,
    threads: int = 2,
    speculate: bool = True,
    kv_type: str = KV_CHOICES[0],
    max_sequences: int = 1,
    adapters: Sequence[str] = (),
) -> Iterator[tuple[Engine, Watcher]]:
    watcher = Watcher()
    options = OpenOptions(
        backend="cpu",
        context_size=256,
        threads=threads,
        kv_type=kv_type,
        max_sequences=max_sequences,
        kv_tokens=AUTO if max_sequences > 1 else None,
        adapters=adapters,
    )
    with Engine.open(path, options, speculate=speculate, watch=watcher) as engine:
        yield engine, watcher


def recorded(
    path: Path, kv_type: str = KV_CHOICES[0], temperature: float = 0.2, adapters: Sequence[str] = ()
) -> Recording:
    request = Request(
        TokenPrompt(PROMPT), max_tokens=N_TOKENS, sampling=SamplingParams(temperature=temperature, seed=11)
    )
    with opened(path, kv_type=kv_type, speculate=False, adapters=adapters) as (engine, watcher):
        [answer] = answer_all(engine, [request])
        opening = opening_of(engine, chat_template=None, thinking_tags=None, raw=True)
        reporter = Silent()
        return record(
            engine,
            watcher.backend,
            request,
            answer.tokens,
            answer.finished,
            model=str(path),
            opening=opening,
            reporter=reporter,
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_numeric_model(path, "qwen2")
    return path


CASES = [
    *(f"{kind} weights" for kind in WEIGHT_TYPES),
    *(name for name, model in NUMERIC_MODELS.items() if model.kv_type != KV_CHOICES[0]),
    *("gemma3 pattern", "qwen35moe", "nemotron_h", "lfm2", "gpt-oss"),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
def test_neither_the_machine_nor_the_engine_changes_a_run(tmp_path: Path, name: str) -> None:
    path, kv_type = tmp_path / "model.gguf", NUMERIC_MODELS[name].kv_type
    write_numeric_model(path, name)
    recording = recorded(path, kv_type)
    write_recording(tmp_path / "run.json", recording)
    read = parse_recording((tmp_path / "run.json").read_bytes())
    for number, level in enumerate(EXECUTABLE_LEVELS):
        with (
            at_level(level),
            opened(path, threads=1 + number, speculate=number != 1, kv_type=kv_type, max_sequences=3) as (
                engine,
                watcher,
            ),
        ):
            for beside in ((), STRANGERS, ()):
                result = replay(engine, watcher.backend, read, beside)
                assert result.is_same, (level, len(beside), result)
                assert result.n_tokens == len(recording.output.tokens)
            for event in engine.generate(read.request):  # the prompt is cached now
                if isinstance(event, Finished):
                    assert event.timings.cached_tokens > 0
    assert len(recording.output.logits) == 4


def test_a_run_is_recorded_without_numba(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model, speculate=False) as (engine, watcher):
        request = Request(TokenPrompt(PROMPT[:2]), max_tokens=1)
        (finished,) = [event for event in engine.generate(request) if isinstance(event, Finished)]
        opening = opening_of(engine, chat_template=None, thinking_tags=None, raw=True)
        hide(monkeypatch, "numba", "llvmlite")
        recording = record(
            engine, watcher.backend, request, [0], finished, model="m", opening=opening, reporter=Silent()
        )
    assert "numpy" in recording.machine
    assert not {"numba", "llvmlite"} & recording.machine.keys()


def test_a_run_with_adapters_is_repeated(tmp_path: Path, model: Path) -> None:
    """With another scale, the tokens differ, and with another file, the run cannot be compared."""
    adapter = tiny_adapter(tmp_path / "a.gguf", model)
    recording = recorded(model, adapters=[f"{adapter}:0.5"])
    write_recording(tmp_path / "run.json", recording)
    read = parse_recording((tmp_path / "run.json").read_bytes())
    assert read.adapters == recording.adapters
    [found] = read.adapters
    assert (found.name, found.path, found.scale) == ("a", str(adapter), 0.5)
    check_adapters(read, lambda path: adapter_digest(path, Silent()))
    for scale, is_same in ((0.5, True), (0.25, False)):
        with opened(model, threads=1, adapters=[f"{adapter}:{scale}"]) as (engine, watcher):
            assert replay(engine, watcher.backend, read).is_same is is_same
    tiny_adapter(adapter, model, seed=2)
    with pytest.raises(Incomparable, match="does not have the recorded sha256"):
        check_adapters(read, lambda path: adapter_digest(path, Silent()))


def test_a_cached_prompt_gives_the_recorded_tokens(model: Path) -> None:
    """The replay leaves the prompt in the cache, and the next run of the request takes it from there."""
    recording = recorded(model)
    with opened(model) as (engine, watcher):
        assert replay(engine, watcher.backend, recording).is_same
        tokens: list[int] = []
        for event in engine.generate(recording.request):
            if isinstance(event, TextDelta):
                tokens += event.tokens
            elif isinstance(event, Finished):
                assert event.timings.cached_tokens > 0
        assert tuple(tokens) == recording.output.tokens


def test_speculation_is_used(model: Path) -> None:
    """The engine drafts where its measurements promise a gain, which a busy machine may hide in single runs."""
    recording = recorded(model, temperature=0)

    def drafted() -> int:
        with opened(model) as (engine, watcher):
            assert replay(engine, watcher.backend, recording).is_same
            [finished] = [event for event in engine.generate(recording.request) if isinstance(event, Finished)]
            return finished.timings.drafted_tokens

    assert any(drafted() for _ in range(10))


def test_the_first_token_and_op_that_differ_are_named(model: Path) -> None:
    recording = recorded(model)
    with opened(model) as (engine, watcher):
        tokens = list(recording.output.tokens)
        tokens[9] = (tokens[9] + 1) % 290
        other = replace(recording, output=replace(recording.output, tokens=tuple(tokens)))
        result = replay(engine, watcher.backend, other)
        assert result.token == OtherToken(9, tokens[9], recording.output.tokens[9])
        assert (result.logits, result.op, result.is_same) == (None, None, False)

        ops = list(recording.ops)
        ops[5] = (ops[5][0], "0" * 16)
        result = replay(engine, watcher.backend, replace(recording, ops=tuple(ops)))
        assert result.op is not None
        assert (result.op.index, result.op.count, result.op.name) == (5, len(ops), ops[5][0])
        assert result.token is None

        logits = {**recording.output.logits, 8: "0" * 16}
        result = replay(engine, watcher.backend, replace(recording, output=replace(recording.output, logits=logits)))
        assert result.logits == 8

        shorter = replace(recording.output, tokens=recording.output.tokens[:-1])
        result = replay(engine, watcher.backend, replace(recording, output=shorter))
        assert result.token == OtherToken(N_TOKENS - 1, None, recording.output.tokens[-1])

        finish = replace(recording.output, finish="stop")
        assert replay(engine, watcher.backend, replace(recording, output=finish)).finish == ("stop", "length")


def test_other_weights_differ_in_their_op_first(model: Path, tmp_path: Path) -> None:
    recording = recorded(model)
    data = bytearray(model.read_bytes())
    data[-6] ^= 64  # in the mantissa of a number of the last tensor, which is blk.1.attn_v.bias
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(data)
    with opened(changed) as (engine, watcher):
        result = replay(engine, watcher.backend, recording)
    assert result.op is not None
    assert result.op.name == "bias after blk.1.attn_v"


def test_other_numerics_files_and_templates_are_refused(model: Path) -> None:
    recording = recorded(model)
    with pytest.raises(Incomparable, match="numerics version 999"):
        check_numerics(replace(recording, numerics=999))
    files = model_files(model, Silent())
    check_files(recording, files)
    check_files(recording, [replace(files[0], name="other.gguf")])
    with pytest.raises(Incomparable, match="another model"):
        check_files(recording, [ModelFile("model.gguf", "0" * 64)])
    with pytest.raises(Incomparable, match="2 files"):
        check_files(recording, [*files, *files])
    with opened(model) as (engine, _):
        check_template(recording, engine)
        with pytest.raises(Incomparable, match="chat template"):
            check_template(replace(recording, opening=replace(recording.opening, template="0" * 64)), engine)


def test_a_recording_is_private_and_replaces_the_file(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    path.chmod(0o644)
    write_recording(path, recorded(model))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
