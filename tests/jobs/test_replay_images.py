"""Tests that runs with images are repeated, and that replays tell a decoder or an encoder from the engine itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llmrun.base.errors import LlmrunError
from llmrun.base.types import IMAGE_ROW
from llmrun.engine.engine import Engine
from llmrun.engine.requests import RecordedChat, Request, TextPrompt, TokenPrompt
from llmrun.hub.progress_reporter import Silent
from llmrun.jobs import replay as replay_module
from llmrun.jobs.recording import Recording, parse_recording
from llmrun.jobs.replay import (
    Incomparable,
    OtherImage,
    WatchedBackend,
    Watcher,
    check_projector,
    opening_of,
    projector_digest,
    record,
    replay,
)
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import answer_all
from tests.support.engine.pictures import BLUE, PlainDecoder, chat, part, plain, png
from tests.support.models.digests import StableRandom
from tests.support.templates.template_runs import PROCESS
from tests.support.vision.seeing import SEEING, HashedVision, TinySeeing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.vision.layout import ImageLayout

pytestmark = pytest.mark.push

NOISE = png(np.random.default_rng(1).integers(0, 256, (60, 90, 3), np.uint8))
BLUE_PNG = png(plain(50, 120, BLUE))
CHAT = chat([NOISE, "and", BLUE_PNG, "which?"])
STRANGERS = [Request(TokenPrompt(StableRandom(seed).tokens(30 + seed, 290)), max_tokens=20) for seed in (4, 5)]


class OtherVision(HashedVision):
    """An encoder whose rows differ in their last bits, like those of another version of the encoder."""

    def begin(self, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> Any:
        encoding = super().begin(tiles, layout)
        encoding.rows *= np.float32(1 + 2**-20)
        return encoding


@contextmanager
def opened(
    seeing: TinySeeing,
    *,
    threads: int = 2,
    sequences: int = 1,
    vision: type[HashedVision] | None = None,
    **options: Any,
) -> Iterator[tuple[Engine, WatchedBackend]]:
    backend: Any = seeing.open(threads=threads, sequences=sequences)
    if vision is not None:
        backend.vision = vision(backend.vision.projector)
    watched = Watcher()(backend)
    assert isinstance(watched, WatchedBackend)
    with Engine(watched, templates=PROCESS, max_running=sequences, **options) as engine:
        yield engine, watched


def recorded(seeing: TinySeeing, prompt: Any, **options: Any) -> Recording:
    """Record a run, and return the recording as it is read from its file."""
    request = Request(prompt, max_tokens=16, sampling=SamplingParams(temperature=0.2, seed=11))
    with opened(seeing, **options) as (engine, watched):
        [answer] = answer_all(engine, [request])
        opening = opening_of(engine, chat_template=None, thinking_tags=None, raw=isinstance(prompt, TextPrompt))
        recording = record(
            engine,
            watched,
            request,
            answer.tokens,
            answer.finished,
            model="tiny",
            opening=opening,
            image_limits=(None, 300),
            reporter=Silent(),
        )
    return parse_recording(json.dumps(recording.as_json()).encode())


def opened_model(folder: Path, name: str) -> TinySeeing:
    found = SEEING[name](folder)
    assert isinstance(found, TinySeeing)
    return found


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> TinySeeing:
    return opened_model(tmp_path_factory.mktemp("model"), "qwen3vl_merger")


@pytest.mark.parametrize("name", ["gemma3", "qwen3vl_merger", pytest.param("lfm2", marks=pytest.mark.night)])
def test_neither_threads_nor_company_change_a_run_with_images(tmp_path: Path, name: str) -> None:
    seeing = opened_model(tmp_path, name)
    recording = recorded(seeing, CHAT)
    assert isinstance(recording.request.prompt, RecordedChat)
    assert recording.request.prompt.images == CHAT.images
    assert recording.prompt_tokens.count(IMAGE_ROW) > 0
    for threads in (1, 2):
        with opened(seeing, threads=threads, sequences=3) as (engine, watched):
            for beside in ((), STRANGERS, [Request(chat([BLUE_PNG, "this?"]), max_tokens=9)]):
                result = replay(engine, watched, recording, beside)
                assert result.is_same, result


def test_images_of_raw_prompts_are_repeated(seeing: TinySeeing) -> None:
    recording = recorded(seeing, TextPrompt("see <__media__> and <__media__> now", (NOISE, NOISE)))
    assert isinstance(recording.request.prompt, TokenPrompt)
    assert recording.request.prompt.images == (NOISE, NOISE)
    assert recording.images[0] == recording.images[1]
    with opened(seeing, threads=1) as (engine, watched):
        assert replay(engine, watched, recording).is_same


def test_each_detail_of_an_image_has_digests(seeing: TinySeeing) -> None:
    large = png(plain(400, 300))
    prompt = chat([large, "and", large])
    prompt.messages[0]["content"][2] = part(large, "low")
    first, second = recorded(seeing, prompt).images
    assert first.sha256 == second.sha256
    assert first.pixels != second.pixels
    assert first.rows != second.rows


def test_another_decoder_is_told_from_another_computation(seeing: TinySeeing) -> None:
    recording = recorded(seeing, CHAT)
    with opened(seeing) as (engine, watched):
        assert engine.image_encoder is not None
        vars(engine.image_encoder)["_decoder"] = PlainDecoder()  # it scales differently, except for plain pictures
        result = replay(engine, watched, recording)
    assert result.images == (OtherImage(0, pixels=True),)
    assert result.op is None
    assert not result.is_same
    assert result.as_json()["other_images"] == [{"index": 0, "differs": "pixels"}]


def test_another_encoder_is_told_from_another_computation(seeing: TinySeeing) -> None:
    recording = recorded(seeing, CHAT)
    with opened(seeing, vision=OtherVision) as (engine, watched):
        result = replay(engine, watched, recording)
    assert result.images == (OtherImage(0, pixels=False), OtherImage(1, pixels=False))
    assert result.logits == 0
    assert result.op is None
    assert result.as_json()["other_images"][1] == {"index": 1, "differs": "rows"}


@pytest.mark.parametrize("prompt", [CHAT, TextPrompt("see <__media__> now", (NOISE,))], ids=["chat", "raw"])
def test_logits_after_images_are_computed_again(
    seeing: TinySeeing, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay computes logits that the run did not compute, as it does for forced tokens."""
    recording = recorded(seeing, prompt)
    answer, runs = replay_module._answer, []

    def without_logits(engine: Engine, request: Request, beside: Any) -> Any:
        runs.append(request)
        found = answer(engine, request, beside)
        if len(runs) == 1:
            watched.logits.clear()
        return found

    monkeypatch.setattr(replay_module, "_answer", without_logits)
    with opened(seeing) as (engine, watched):
        assert replay(engine, watched, recording).is_same
        runs.clear()
        logits = {**recording.output.logits, 5: "0" * 16}
        other = replace(recording, output=replace(recording.output, logits=logits))
        assert replay(engine, watched, other).logits == 5
    assert len(runs) > 1


def test_another_projector_is_refused(seeing: TinySeeing, tmp_path: Path) -> None:
    recording = recorded(seeing, CHAT)
    projector = recording.projector
    assert projector is not None
    assert (projector.image_min_tokens, projector.image_max_tokens) == (None, 300)
    check_projector(recording, projector_digest(Path(projector.path), Silent()))
    with pytest.raises(Incomparable, match="another projector: it has sha256 0000") as caught:
        check_projector(recording, "0" * 64)
    assert projector.name in caught.value.hint
    with pytest.raises(LlmrunError, match=r"projector: .* cannot be read"):
        projector_digest(tmp_path / "no.gguf", Silent())


def test_an_image_that_the_template_leaves_out_cannot_be_recorded(seeing: TinySeeing) -> None:
    with pytest.raises(LlmrunError, match="image 1 is not in the prompt"):
        recorded(seeing, CHAT, chat_template="hello{% for message in messages %}!{% endfor %}")
