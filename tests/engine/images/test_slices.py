"""Tests of encoders that work in the engine's thread, between steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.base.types import Batch, FinishReason, Outputs
from llmrun.engine.embedding import EmbeddingJob
from llmrun.engine.requests import Event, Finished, PrefillProgress, TextDelta
from tests.support.engine.answers import answer_all, run_to_the_end
from tests.support.engine.contract import assert_books_agree
from tests.support.engine.pictures import BLUE, RED, ask, plain, png
from tests.support.engine.scripted_models import endless
from tests.support.engine.sliced import Sliced

IMAGE, OTHER = png(plain(64, 64, RED)), png(plain(64, 64, BLUE))
LONGEST_S = 0.3  # the promised 99th percentile of the delay of another answer's tokens


def delays(sliced: Sliced, number: int, done: Callable[[], bool]) -> tuple[list[float], list[Event]]:
    """Run steps until `done`. Return the times between the tokens of an answer, and all events."""
    last, found, events = sliced.clock.now, list[float](), list[Event]()
    while not done():
        for event in sliced.engine.step():
            events.append(event)
            if isinstance(event, TextDelta) and event.request_id == number:
                found.append(sliced.clock.now - last)
                last = sliced.clock.now
    return found, events


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("step_s", [0.005, 0.03, 0.09])
@pytest.mark.parametrize("tile_s", [0.01, 0.06, 0.2])
def test_tokens_of_other_answers_are_on_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile_s: float, step_s: float, prompt: bool
) -> None:
    """The encoding gets nearly all of the time that answers leave, or half of it beside a prompt."""
    sliced = Sliced(
        tmp_path, monkeypatch, tiles=round(6 / tile_s), tile_s=tile_s, step_s=step_s, context_size=20_000, voice=None
    )
    text = sliced.engine.submit(endless(ask("a long question", max_tokens=3000)))
    for _ in range(20):
        sliced.engine.step()
    if prompt:
        sliced.engine.submit(ask("another question " * 800, max_tokens=1))
    sliced.engine.submit(ask([IMAGE, "?"], max_tokens=1))
    began = sliced.clock.now
    found, _ = delays(sliced, text, lambda: sliced.encoded > 0)
    assert len(found) > 20
    assert percentile(found, 0.99) <= LONGEST_S
    budget = max(0.1, 2.5 * step_s)
    assert sum(found) / len(found) < 1.25 * budget
    if not prompt:
        assert max(found) < 1.1 * max(budget, tile_s + step_s)
    left = sliced.clock.now - began - step_s * len(found)
    assert sliced.clock.sliced > left * (0.35 if prompt else 0.9)


def test_slow_answers_keep_half_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a step alone takes 0.4 s, no share of the encoder is on time, but both go on."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=60, tile_s=0.1, step_s=0.4)
    text = sliced.answer_text()
    sliced.engine.submit(ask([IMAGE, "?"], max_tokens=1))
    found, _ = delays(sliced, text, lambda: sliced.encoded > 0)
    assert sliced.clock.sliced == pytest.approx(6.0)
    assert 6.0 <= 0.4 * len(found) <= 18.0
    assert max(found) < 0.4 + 0.2 + 0.1


def test_a_prompt_and_an_image_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take 6 s alone, so each of them gets about half of the first 8 s."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=60, step_s=0.0, row_s=0.002, context_size=20_000)
    answer_all(sliced.engine, [ask("words " * 60, max_tokens=2)])
    image = sliced.engine.submit(ask([IMAGE, "?"], max_tokens=1))
    text = sliced.engine.submit(ask("another prompt " * 200, max_tokens=1))
    began, done = sliced.clock.now, 0
    while sliced.clock.now < began + 8:
        for event in sliced.engine.step():
            if isinstance(event, PrefillProgress) and event.request_id == text:
                done = event.done
    assert 3.0 < sliced.clock.sliced < 5.0
    assert 1500 < done < 2500
    run_to_the_end(sliced.engine, [image, text])


def test_slices_are_large_if_nothing_else_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=100, tile_s=0.02)
    request = sliced.engine.submit(ask([IMAGE, "?"]))
    n_steps, events = 0, list[Event]()
    while not sliced.encoded:
        events += sliced.engine.step()
        n_steps += 1
    assert n_steps <= 4
    [answer] = run_to_the_end(sliced.engine, [request], events=events)
    assert answer.text == "You said: [4 rows of #ff0000]?"


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("all_requests", [False, True])
def test_a_cancel_ends_an_encoding_within_a_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_requests: bool, others: bool
) -> None:
    """Ctrl-C and closed connections arrive during a tile."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=100, tile_s=0.01)
    text = sliced.answer_text() if others else None
    image = sliced.engine.submit(ask([IMAGE, "?"]))

    def interrupt() -> None:
        if sliced.begun[-1].n_tiles == 60:
            sliced.clock.in_tile = lambda: None
            if all_requests:
                sliced.engine.cancel_current()
            else:
                sliced.engine.cancel(image)

    sliced.clock.in_tile = interrupt
    answer, *_ = run_to_the_end(sliced.engine, [image] if text is None else [image, text])
    assert answer.finished.reason is FinishReason.CANCELLED
    assert (sliced.begun[0].n_tiles, sliced.begun[0].is_cancelled) == (61, True)
    assert sliced.begun[0].has_ended  # so its threads and its memory are freed
    assert sliced.engine.image_encoder is not None
    assert not sliced.engine.image_encoder._jobs
    assert_books_agree(sliced.engine)
    [again] = answer_all(sliced.engine, [ask([IMAGE, "?"])])
    assert again.text == "You said: [4 rows of #ff0000]?"
    assert sliced.begun[1].n_tiles == 100


def test_closing_an_answer_ends_its_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=100, tile_s=0.3, projector={"end": ""})
    answer = sliced.engine.generate(ask(["words", IMAGE, "?"]))
    next(answer)
    n_tiles = sliced.begun[0].n_tiles
    answer.close()  # type: ignore[attr-defined]
    assert (sliced.begun[0].n_tiles, sliced.begun[0].is_cancelled) == (n_tiles, True)
    assert sliced.begun[0].has_ended


def test_the_same_image_twice_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=40, tile_s=0.05, row_s=0.001)
    text = sliced.answer_text()
    words = "words " * 50
    image = sliced.engine.submit(ask([words, IMAGE, "and", IMAGE, "?"], max_tokens=1))
    answer, _ = run_to_the_end(sliced.engine, [image, text])
    timings = answer.finished.timings
    assert timings.encode_s == pytest.approx(2.0)
    assert timings.prefill_s > 0.4  # of more than 300 rows
    assert timings.ttft_s >= timings.prefill_s + timings.image_wait_s


def test_new_requests_wait_for_one_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=100, tile_s=0.02)
    sliced.engine.submit(ask([IMAGE, "?"]))
    queued: list[int] = []

    def queue() -> None:
        if sliced.begun[-1].n_tiles == 3 and not queued:
            queued.append(sliced.engine.submit(ask("hello", max_tokens=1)))

    sliced.clock.in_tile = queue
    sliced.engine.step()
    assert sliced.begun[-1].n_tiles == 4
    sliced.engine.step()
    assert sliced.begun[-1].n_tiles < 30


def test_texts_to_embed_wait_for_one_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced(tmp_path, monkeypatch, tiles=100, tile_s=0.02)
    embedder = sliced.engine.embedder()
    sliced.engine.submit(ask([IMAGE, "?"]))
    done: list[EmbeddingJob] = []
    sliced.clock.in_tile = lambda: embedder.add(EmbeddingJob([[1] * 9], done.append)) if embedder.idle else None
    sliced.engine.step()
    assert sliced.begun[-1].n_tiles == 1
    sliced.clock.in_tile = lambda: None
    embedder.step()
    assert done


def test_two_images_are_encoded_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted encoder raises an error if an image begins while another one is being encoded."""
    sliced = Sliced(tmp_path, monkeypatch)
    requests = [ask([IMAGE, OTHER, "?"]), ask([OTHER, "!"])]
    one, two = answer_all(sliced.engine, requests)
    assert one.text == "You said: [4 rows of #ff0000][4 rows of #0000ff]?"
    assert two.text == "You said: [4 rows of #0000ff]!"
    assert [each.n_tiles for each in sliced.begun] == [20, 20]


def test_an_error_ends_the_work_on_other_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pixels would otherwise stay in memory until the next request."""
    sliced = Sliced(tmp_path, monkeypatch, projector={"error": "the encoder failed"})
    [answer] = run_to_the_end(sliced.engine, [sliced.engine.submit(ask([IMAGE, OTHER, "?"]))])
    assert str(answer.failed.error) == "the encoder failed"
    assert sliced.engine.image_encoder is not None
    assert not sliced.engine.image_encoder._jobs


@pytest.mark.parametrize("beside", [False, True])
def test_an_error_in_a_slice_ends_only_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    sliced = Sliced(tmp_path, monkeypatch, projector={"error": "the encoder failed"})
    text = sliced.answer_text() if beside else sliced.engine.submit(ask("hello"))
    image = sliced.engine.submit(ask([IMAGE, "?"]))
    failed, other = run_to_the_end(sliced.engine, [image, text])
    assert str(failed.failed.error) == "the encoder failed"
    assert other.finished.reason is FinishReason.STOP
    assert_books_agree(sliced.engine)


def test_each_slice_and_step_names_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the encoder crashes the process, the server must know which request was the reason."""
    sliced = Sliced(tmp_path, monkeypatch, tile_s=0.2)
    text = sliced.answer_text()
    begun: list[list[int]] = []
    in_tiles: list[list[int]] = []
    in_steps: list[list[int]] = []
    forward = sliced.backend.forward

    def watched(batch: Batch) -> Outputs:
        in_steps.append(begun[-1])
        return forward(batch)

    monkeypatch.setattr(sliced.engine, "_on_begin", lambda ids: begun.append([*ids]))
    monkeypatch.setattr(sliced.backend, "forward", watched)
    sliced.clock.in_tile = lambda: in_tiles.append(begun[-1])
    image = sliced.engine.submit(ask([IMAGE, "?"]))
    run_to_the_end(sliced.engine, [image, text])
    assert in_tiles == [[image]] * 20
    assert in_steps == [[]] * len(in_steps)


def test_timings_count_only_the_tiles_as_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill excludes the slices, whether the prompt could have run meanwhile or not."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=40, tile_s=0.05, row_s=0.001, rows_per_step=16)
    text = sliced.answer_text()
    image = sliced.engine.submit(ask(["words " * 50, IMAGE, "?"], max_tokens=1))
    answer, _ = run_to_the_end(sliced.engine, [image, text])
    timings = answer.finished.timings
    assert timings.encode_s == pytest.approx(2.0)
    assert timings.image_wait_s >= 2.0
    assert timings.prefill_s < 1.0
    assert timings.ttft_s >= timings.prefill_s + timings.image_wait_s


def test_costs_are_learnt_between_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder sleeps during steps, so their durations are those of steps without images."""
    sliced = Sliced(tmp_path, monkeypatch, tiles=200, tile_s=0.05)
    costs = sliced.engine._scheduler.costs
    text = sliced.answer_text()
    n_observed = costs.n_observed
    image = sliced.engine.submit(ask([IMAGE, "?"], max_tokens=1))
    prompt = sliced.engine.submit(ask("another prompt " * 30, max_tokens=1))
    events: list[Event] = []
    while prompt not in {event.request_id for event in events if isinstance(event, Finished)}:
        events += sliced.engine.step()
    assert not sliced.encoded
    assert costs.n_observed > n_observed + 2
    run_to_the_end(sliced.engine, [image, text, prompt], events=events)


@pytest.mark.parametrize("other", ["answer", "prompt"])
@pytest.mark.parametrize("new", ["image", "prompt"])
def test_first_tokens_beside_slices_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str, other: str
) -> None:
    """Steps and slices take turns, so an image takes longer beside other requests, and they take longer beside it."""
    sliced = Sliced(
        tmp_path,
        monkeypatch,
        tiles=120,
        tile_s=0.05,
        row_s=0.004,
        voice=None,
        context_size=20_000,
        projector={"expected_seconds": 6.0},
    )
    answer_all(sliced.engine, [endless(ask("words " * 300, max_tokens=40))])
    words = "a long answer" if other == "answer" else "another prompt " * 150
    sliced.engine.submit(endless(ask(words, max_tokens=2000)))
    requests = {"image": ask([IMAGE, "?"], max_tokens=2), "prompt": ask("one more prompt " * 100, max_tokens=2)}
    for _ in range(8):
        sliced.engine.step()
    if new == "prompt":
        sliced.engine.submit(requests["image"])
        sliced.engine.step()
    prepared = sliced.engine.prepare(endless(requests[new]))
    predicted, began = sliced.engine.predicted(prepared).first_token_s, sliced.clock.now
    number = sliced.engine.enqueue(prepared)
    delays(sliced, number, lambda: bool(prepared.step_times))
    assert predicted == pytest.approx(sliced.clock.now - began, rel=0.25)
