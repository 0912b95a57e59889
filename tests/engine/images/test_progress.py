"""Tests of the progress of images and of its forecast."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.engine.requests import ImageProgress, PrefillProgress, TextDelta
from tests.support.engine.answers import answer_all
from tests.support.engine.pictures import BLUE, GREEN, RED, Sight, ask, plain, png
from tests.support.engine.sliced import Sliced

FILES = [png(plain(64, 64, color)) for color in (RED, GREEN, BLUE)]
WIDE = png(plain(512, 64, RED))


def words(sliced: Sight) -> list[str]:
    return [event.image.words for event in sliced.engine.prefill_progress() if event.image is not None]


def read(sliced: Sliced, *files: bytes) -> list[str]:
    """Return what can be said before each tile of the images of a request, without repetitions."""
    said: list[str] = []

    def note() -> None:
        said.extend(new for new in words(sliced) if [new] != said[-1:])

    sliced.clock.in_tile = note
    answer_all(sliced.engine, [ask([*files, "?"], max_tokens=1)])
    return said


@pytest.mark.parametrize("tiles", [1, 3])
def test_long_images_have_a_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiles: int) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=tiles, tile_s=12 / tiles, projector={"expected_seconds": 12.0})
    later = ["reading the image: 33%, about 8 s left", "reading the image: 67%, about 4 s left"]
    assert read(sliced, FILES[0]) == ["reading the image, about 12 s", *(later if tiles == 3 else [])]


def test_a_forecast_counts_all_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=2, tile_s=2.0, projector={"expected_seconds": 4.0})
    assert read(sliced, *FILES) == [
        "reading image 1 of 3, about 12 s",
        "reading image 1 of 3: 50%, about 10 s left",
        "reading image 2 of 3, about 8 s",
        "reading image 2 of 3: 50%, about 6 s left",
        "reading image 3 of 3",  # The last 4 s are not worth a forecast.
    ]


def test_a_forecast_counts_the_same_image_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=2, tile_s=4.0, projector={"expected_seconds": 8.0})
    said = ["reading image 1 of 2, about 8 s", "reading image 1 of 2: 50%, about 4 s left"]
    assert read(sliced, FILES[0], FILES[0]) == said


def test_a_slice_in_progress_counts_in_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are predicted by another thread, while the engine's thread encodes."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=40, tile_s=0.1)
    found: list[float] = []

    def note() -> None:
        if sliced.begun[-1].n_tiles == 8:
            prepared = sliced.engine.prepare(ask([FILES[0], "?"], max_tokens=1))
            encoder = sliced.engine.image_encoder
            assert encoder is not None
            found.extend(encoder.expected_seconds(prepared, 0).values())

    sliced.clock.in_tile = note
    answer_all(sliced.engine, [ask([FILES[0], "?"], max_tokens=1)])
    assert found == [pytest.approx(3.2)]


def test_short_images_have_no_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=4, tile_s=1.0, projector={"expected_seconds": 4.0})
    assert read(sliced, FILES[0]) == ["reading the image"]


def test_known_images_are_not_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=2, tile_s=4.0, projector={"expected_seconds": 8.0})
    read(sliced, FILES[0])
    assert read(sliced, *FILES[:2])[0] == "reading image 2 of 2, about 8 s"


def test_wrong_forecasts_are_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an image is encoded, its progress corrects its forecast."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=4, tile_s=5.0, projector={"expected_seconds": 10.0})
    assert read(sliced, FILES[0])[:2] == ["reading the image, about 10 s", "reading the image: 25%, about 15 s left"]


def test_the_forecast_grows_beside_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the answer take 0.2 s each, in which nothing is encoded."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=100, projector={"expected_seconds": 10.0}, step_s=0.2)
    sliced.answer_text()
    image = sliced.engine.submit(ask([FILES[0], "?"], max_tokens=1))
    while not sliced.begun or sliced.begun[0].n_tiles < 50:
        sliced.engine.step()
    [progress] = [event.image for event in sliced.engine.prefill_progress() if event.request_id == image]
    assert progress is not None
    assert progress.left_s is not None
    assert (progress.share, progress.left_s > 8.0) == (0.5, True)


def test_progress_replaces_a_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that was never measured, the beginning of the first image predicts the rest."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=5, tile_s=4.0)
    assert read(sliced, *FILES[:2])[:4] == [
        "reading image 1 of 2",
        "reading image 1 of 2: 20%, about 36 s left",
        "reading image 1 of 2: 40%, about 32 s left",
        "reading image 1 of 2: 60%, about 28 s left",
    ]


def test_encoders_without_a_forecast_learn_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libmtmd reports neither a forecast nor progress, so both are derived from the time of earlier images per row."""
    sliced = Sliced(tmp_path, monkeypatch, projector={"encode_tiles": 0, "encode_seconds": 2.0})
    assert sliced.backend.vision is not None
    assert sliced.backend.vision.runs_apart
    said = [*words(sliced)]
    sliced.engine.submit(ask([FILES[0], "?"], max_tokens=1))
    sliced.engine.step()
    assert (said, words(sliced)) == ([], ["reading the image"])
    while not sliced.engine.idle:
        sliced.clock.now += 0.5
        sliced.engine.step()
    sliced.engine.submit(ask([WIDE, "?"], max_tokens=1))
    sliced.engine.step()
    [before] = words(sliced)
    sliced.clock.now += 1.5
    [later] = words(sliced)
    assert (before, later) == ("reading the image, about 16 s", "reading the image: 9%, about 15 s left")


def test_the_last_moment_of_an_image_has_a_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last tile of rows, the parts are put together, and a step of another request may run first."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=20, tile_s=1.0, projector={"expected_seconds": 20.0})
    sliced.engine.submit(ask([FILES[0], "?"], max_tokens=1))
    sliced.engine.step()
    [encoding] = sliced.begun
    encoding.n_tiles = 20
    sliced.clock.now += 19.0
    assert words(sliced) == ["reading the image: 99%, about 1 s left"]


def test_images_of_other_requests_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=20, tile_s=1.0, projector={"expected_seconds": 20.0})
    sliced.engine.submit(ask([FILES[0], "?"], max_tokens=1))
    sliced.engine.step()
    sliced.engine.submit(ask([FILES[1], "?"], max_tokens=1))
    sliced.engine.step()
    n_tiles = sliced.begun[0].n_tiles
    assert words(sliced)[1] == f"reading the image, about {40 - n_tiles} s"


def test_text_before_an_image_has_its_own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is decoded early, but encoded only when the next large step could reach it."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=24, tile_s=0.5, projector={"expected_seconds": 12.0}, rows_per_step=64)
    seen: list[PrefillProgress] = []
    forward = sliced.backend.forward

    def watched(batch: object) -> object:
        seen.extend(sliced.engine.prefill_progress())
        return forward(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(sliced.backend, "forward", watched)
    answer_all(sliced.engine, [ask(["words " * 150, FILES[0], "?"], max_tokens=1)])
    images = [event.image for event in seen]
    assert images[:8] == [None] * 8
    assert any(image is not None and image.left_s for image in images)


def test_progress_goes_on_with_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step that runs the image's rows, the prompt has the progress of its tokens."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=3, tile_s=4.0, projector={"expected_seconds": 12.0})
    seen: list[PrefillProgress] = []
    forward = sliced.backend.forward

    def watched(batch: object) -> object:
        if sliced.encoded:
            seen.extend(sliced.engine.prefill_progress())
        return forward(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(sliced.backend, "forward", watched)
    [answer] = answer_all(sliced.engine, [ask([FILES[0], "?"], max_tokens=1)])
    assert [event.image for event in seen] == [None]
    assert sliced.engine.prefill_progress() == []
    assert any(isinstance(event, TextDelta) for event in answer.deltas)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("left_s", [None, 7.0, 240.0])
def test_words_can_be_parsed(count: int, share: float, left_s: float | None) -> None:
    progress = ImageProgress(count, count, share if left_s else 0.0, left_s)
    assert ImageProgress.parse(progress.words) == progress


@pytest.mark.parametrize(
    "words", ["", "reading", "reading the image, about x s", "reading image 1 of 99999", "reading 2 images"]
)
def test_other_words_are_no_progress(words: str) -> None:
    assert ImageProgress.parse(words) is None
