"""Tests of encoding between steps: other requests go on, and what goes wrong with an image ends only its request."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from llmrun.backends.run_speeds import LearntCosts
from llmrun.backends.scripted_vision import ScriptedEncoding, ScriptedVision
from llmrun.base.errors import BackendCrashed, LlmrunError, UsageError
from llmrun.base.types import FinishReason
from llmrun.engine.embedding import EmbeddingJob
from llmrun.engine.requests import ChatPrompt, Event, Finished, PrefillProgress, TextDelta
from llmrun.formats.images.decoding import Decoded
from llmrun.formats.images.scaling import Scaled
from llmrun.model.vision.layout import ImageLayout
from tests.support.engine.answers import answer_all, run_to_the_end
from tests.support.engine.contract import assert_books_agree
from tests.support.engine.pictures import BLUE, GREEN, RED, PlainDecoder, Sight, ask, plain, png

FILES = [png(plain(64, 64, color)) for color in (RED, GREEN, BLUE)]
LARGE = [png(plain(512, 512, color)) for color in (RED, GREEN, BLUE)]


def test_answers_go_on_between_encodings(tmp_path: Path) -> None:
    """Between two images, every answer in progress gets a token."""
    sight = Sight(tmp_path, max_sequences=2)
    text = sight.engine.submit(ask("a long question " * 3, max_tokens=60))
    while not any(isinstance(event, TextDelta) for event in sight.engine.step()):
        pass
    sight.engine.submit(ask([*LARGE, "?"]))
    for encoded in (1, 2, 3):
        tokens = [event for event in sight.engine.step() if isinstance(event, TextDelta) and event.request_id == text]
        assert len(tokens) == 1
        assert sight.encoded == encoded


def test_many_images_do_not_hold_up_one_image(tmp_path: Path) -> None:
    sight = Sight(tmp_path, max_sequences=2)
    many = sight.engine.submit(ask([*LARGE, "?"]))
    events = sight.engine.step()
    one = sight.engine.submit(ask([FILES[0], "?"]))
    answers = run_to_the_end(sight.engine, [many, one], events=events)
    assert [layout.rows for layout in sight.backend.vision.encoded] == [256, 4, 256, 256]  # type: ignore[union-attr]
    assert [answer.finished.timings.encoded_images for answer in answers] == [3, 1]


@pytest.mark.parametrize("projector", [{}, {"is_causal": False}])
def test_a_broken_encoder_ends_only_the_request_with_the_image(tmp_path: Path, projector: dict[str, Any]) -> None:
    sight = Sight(tmp_path, {**projector, "error": "the encoder failed"}, max_sequences=2)
    image, text = answer_all(sight.engine, [ask([FILES[0], "?"]), ask("hello")])
    assert str(image.failed.error) == "the encoder failed"
    assert text.text == "You said: hello"
    assert sight.engine.status().running == sight.engine.status().waiting == 0
    assert_books_agree(sight.engine)


def test_an_image_that_cannot_be_decoded_ends_only_its_request(tmp_path: Path) -> None:
    sight = Sight(tmp_path, max_sequences=2)
    broken = FILES[0].replace(b"IDAT", b"IDIT")
    sight.decoder.tiles = _refuse  # type: ignore[method-assign]
    image, text = answer_all(sight.engine, [ask([broken, "?"]), ask("hello")])
    assert isinstance(image.failed.error, UsageError)
    assert str(image.failed.error) == "image 1: the image cannot be decoded"
    assert text.text == "You said: hello"


class SlowDecoder(PlainDecoder):
    """Decodes the files in `slow` only when `go_on` is set, and fails if it is killed before."""

    def __init__(self, *slow: bytes) -> None:
        super().__init__()
        self._slow, self._killed, self.go_on = slow, False, threading.Event()

    def tiles(self, data: bytes, scaled: Sequence[Scaled], place: str) -> Decoded:
        if data in self._slow:
            assert self.go_on.wait(30)
        if self._killed:
            self._killed = False
            raise UsageError(f"{place}: the image cannot be decoded: killed")
        return super().tiles(data, scaled, place)

    def kill(self) -> None:
        self._killed = True
        self.go_on.set()


def slowly(sight: Sight, *slow: bytes) -> SlowDecoder:
    """Decode these files in a thread, which waits for `go_on`."""
    decoder = SlowDecoder(*slow)
    encoder = sight.engine.image_encoder
    assert encoder is not None
    vars(encoder)["_decoder"] = decoder
    del vars(encoder)["_threads"]
    return decoder


def test_steps_go_on_while_an_image_is_decoded(tmp_path: Path) -> None:
    """Decoding 64 megapixels takes ten seconds, which would hold up the answers to all others."""
    sight = Sight(tmp_path, max_sequences=3)
    answer_all(sight.engine, [ask([FILES[1], "?"])])
    decoder = slowly(sight, FILES[0])
    slow = sight.engine.submit(ask([FILES[0], "?"]))
    others = [sight.engine.submit(ask("hello")), sight.engine.submit(ask([FILES[1], "?"]))]
    events: list[Event] = []
    while len({event.request_id for event in events if isinstance(event, Finished)}) < 2:
        events += sight.engine.step()
    assert sight.encoded == 1
    decoder.go_on.set()
    answers = run_to_the_end(sight.engine, [slow, *others], events=events)
    expected = ["You said: [4 rows of #ff0000]?", "You said: hello", "You said: [4 rows of #00ff00]?"]
    assert [answer.text for answer in answers] == expected


def test_cancel_stops_decoding(tmp_path: Path) -> None:
    sight = Sight(tmp_path)
    decoder = slowly(sight, FILES[0])
    request_id = sight.engine.submit(ask([FILES[0], "?"]))
    for _ in range(3):
        sight.engine.step()
    sight.engine.cancel(request_id)
    [answer] = run_to_the_end(sight.engine, [request_id])
    assert answer.finished.reason is FinishReason.CANCELLED
    assert decoder.go_on.is_set()
    [answer] = answer_all(sight.engine, [ask([FILES[1], "?"])])
    assert answer.text == "You said: [4 rows of #00ff00]?"


def test_close_stops_decoding(tmp_path: Path) -> None:
    sight = Sight(tmp_path)
    decoder = slowly(sight, FILES[0])
    sight.engine.submit(ask([FILES[0], "?"]))
    sight.engine.step()
    encoder = sight.engine.image_encoder
    assert encoder is not None
    encoder.close()
    assert decoder.go_on.is_set()


def _refuse(data: bytes, scaled: object, place: str) -> Any:
    raise UsageError(f"{place}: the image cannot be decoded")


def vision(sight: Sight) -> ScriptedVision:
    assert sight.backend.vision is not None
    return sight.backend.vision


def test_answers_go_on_while_an_image_is_encoded(tmp_path: Path) -> None:
    """Encoding takes up to a minute without a GPU. Meanwhile, each step yields a token of the other answer."""
    sight = Sight(tmp_path, {"encode_looks": 20}, max_sequences=2)
    text = sight.engine.submit(ask("a long question " * 3, max_tokens=60))
    while not any(isinstance(event, TextDelta) for event in sight.engine.step()):
        pass
    image = sight.engine.submit(ask([FILES[0], "?"]))
    events: list[Event] = []
    for _ in range(20):
        new = sight.engine.step()
        assert [event.request_id for event in new if isinstance(event, TextDelta)] == [text]
        assert sight.encoded == 0
        events += new
    answers = run_to_the_end(sight.engine, [text, image], events=events)
    assert answers[1].text == "You said: [4 rows of #ff0000]?"
    assert vision(sight).begun[0].waited == 0


def test_the_engine_waits_if_nothing_else_can_run(tmp_path: Path) -> None:
    """Without waiting, it would occupy a core that the encoder needs."""
    sight = Sight(tmp_path, {"encode_seconds": 0.3})
    request_id = sight.engine.submit(ask([FILES[0], "?"]))
    n_steps, events = 0, list[Event]()
    while not sight.encoded:
        events += sight.engine.step()
        n_steps += 1
    assert n_steps < 60
    assert vision(sight).begun[0].waited > 0
    [answer] = run_to_the_end(sight.engine, [request_id], events=events)
    assert answer.text == "You said: [4 rows of #ff0000]?"


def test_the_next_image_is_decoded_meanwhile(tmp_path: Path) -> None:
    sight = Sight(tmp_path, {"encode_looks": 9})
    sight.engine.submit(ask([*LARGE, "?"]))
    for _ in range(3):
        sight.engine.step()
    assert (sight.decoder.names, len(vision(sight).begun), sight.encoded) == (["image 1", "image 2"], 1, 0)


def test_an_image_of_two_requests_outlives_one_of_them(tmp_path: Path) -> None:
    sight = Sight(tmp_path, {"encode_looks": 20}, max_sequences=2)
    ids = [sight.engine.submit(ask([text, FILES[0], "?"])) for text in ("one", "two")]
    for _ in range(3):
        sight.engine.step()
    sight.engine.cancel(ids[0])
    one, two = run_to_the_end(sight.engine, ids)
    assert one.finished.reason is FinishReason.CANCELLED
    assert two.text == "You said: two[4 rows of #ff0000]?"
    assert [each.is_cancelled for each in vision(sight).begun] == [False]
    assert (one.finished.timings.encoded_images, two.finished.timings.encoded_images) == (0, 1)


class Begins(ScriptedVision):
    """Fails when an encoding begins, as if the encoder's process had ended."""

    def begin(self, tiles: object, layout: ImageLayout) -> ScriptedEncoding:
        raise BackendCrashed("the encoder's process has ended")


@pytest.mark.parametrize("state", ["begin", "advance"])
def test_errors_end_all_requests_with_the_image(tmp_path: Path, state: str) -> None:
    sight = Sight(tmp_path, {"encode_looks": 4, "error": "the encoder failed"}, max_sequences=4)
    if state == "begin":
        sight.use_vision(Begins(vision(sight).projector))
    one, two, text = answer_all(sight.engine, [ask(["1", FILES[0], "?"]), ask(["2", FILES[0], "?"]), ask("hello")])
    assert str(one.failed.error) == str(two.failed.error)
    assert text.text == "You said: hello"
    assert_books_agree(sight.engine)
    sight.use_vision(ScriptedVision(structs.replace(vision(sight).projector, error="")))
    [again] = answer_all(sight.engine, [ask(["1", FILES[0], "?"])])
    assert again.text == "You said: 1[4 rows of #ff0000]?"


def test_errors_name_the_image_as_in_the_prompt(tmp_path: Path) -> None:
    """One file is the first image of one prompt, and the second image of another prompt."""
    sight = Sight(tmp_path, max_sequences=2)
    tiles = sight.decoder.tiles
    sight.decoder.tiles = lambda data, *rest: _refuse(data, *rest) if data == FILES[0] else tiles(data, *rest)  # type: ignore[method-assign]
    first, second = answer_all(sight.engine, [ask([FILES[0], "?"]), ask([FILES[1], FILES[0], "?"])])
    assert str(first.failed.error) == "image 1: the image cannot be decoded"
    assert str(second.failed.error) == "image 2: the image cannot be decoded"


@pytest.mark.parametrize("all_requests", [False, True])
@pytest.mark.parametrize("state", ["queued", "encoding", "encoded"])
def test_cancel_stops_an_encoding(tmp_path: Path, all_requests: bool, state: str) -> None:
    """Another image can be encoded afterwards, at most one at a time."""
    sight = Sight(tmp_path, {"encode_looks": 0 if state == "encoded" else 1000}, max_sequences=2)
    image, text = sight.engine.submit(ask([FILES[0], "?"])), sight.engine.submit(ask("hello"))
    events: list[Event] = []
    for _ in range(0 if state == "queued" else 3):
        events += sight.engine.step()
    if all_requests:
        sight.engine.cancel_current()
    else:
        sight.engine.cancel(image)
    cancelled, other = run_to_the_end(sight.engine, [image, text], events=events)
    assert cancelled.finished.reason is FinishReason.CANCELLED
    assert cancelled.finished.timings.encoded_images == sight.encoded == (state == "encoded")
    assert other.finished.reason is (FinishReason.CANCELLED if all_requests else FinishReason.STOP)
    assert [each.is_cancelled for each in vision(sight).begun] == [True] * (state == "encoding") + [
        False
    ] * sight.encoded
    if not sight.encoded:  # the scripted cache has other numbers for rows of images
        assert_books_agree(sight.engine)
    sight.engine.submit(ask([FILES[1], "?"]))
    sight.engine.step()
    sight.engine.step()
    assert not vision(sight).begun[-1].is_cancelled


def test_cancel_in_a_signal_handler_ends_the_wait(tmp_path: Path) -> None:
    sight = Sight(tmp_path, {"encode_seconds": 60.0})
    request_id = sight.engine.submit(ask([FILES[0], "?"]))
    sight.engine.step()
    threading.Timer(0.1, sight.engine.cancel_current).start()
    began = time.monotonic()
    [answer] = run_to_the_end(sight.engine, [request_id])
    assert time.monotonic() - began < 30
    assert answer.finished.reason is FinishReason.CANCELLED


def test_abandoned_answers_stop_their_encoding(tmp_path: Path) -> None:
    """Closing the iterator drops the request, and no later step would stop the encoder."""
    sight = Sight(tmp_path, {"encode_looks": 1000, "end": ""}, voice=None)
    answer = sight.engine.generate(ask(["words", FILES[0], "?"]))
    next(answer)
    sight.engine.step()
    answer.close()  # type: ignore[attr-defined]
    assert [each.is_cancelled for each in vision(sight).begun] == [True]


def test_close_stops_an_encoding(tmp_path: Path) -> None:
    sight = Sight(tmp_path, {"encode_looks": 1000})
    sight.engine.submit(ask([FILES[0], "?"]))
    sight.engine.step()
    assert sight.engine.image_encoder is not None
    for _ in range(2):
        sight.engine.image_encoder.close()
    assert [each.is_cancelled for each in vision(sight).begun] == [True]


def test_a_cancel_during_an_image_keeps_the_rest(tmp_path: Path) -> None:
    """llama.cpp#17071 and #13865: context shift crashes with images. We never shift; a cut prefix is computed again."""
    sight = Sight(tmp_path, {"uses_mrope": True}, rows_per_step=20)
    request = ask(["words", LARGE[0], "?"])
    first = sight.engine.submit(request)
    for _ in range(4):
        sight.engine.step()
    sight.engine.cancel(first)
    run_to_the_end(sight.engine, [first])
    [answer] = answer_all(sight.engine, [request])
    assert answer.text == "You said: words[256 rows of #ff0000]?"
    assert sight.encoded == 1
    assert answer.finished.timings.cached_tokens < 30


def test_a_late_cancel_of_another_request_loses_nothing(tmp_path: Path) -> None:
    """The cancel of a step that has already ended stops the next step, which is then repeated."""
    sight = Sight(tmp_path)
    answer_all(sight.engine, [ask("an earlier prompt, which stays cached")])
    request_id = sight.engine.submit(ask([FILES[0], "?"]))
    sight.backend.cancel()
    [answer] = run_to_the_end(sight.engine, [request_id])
    assert answer.text == "You said: [4 rows of #ff0000]?"
    sight.backend.cancel()
    [answer] = answer_all(sight.engine, [ask([FILES[1], "?"])])
    assert answer.text == "You said: [4 rows of #00ff00]?"


def test_full_contexts_end_answers_about_images(tmp_path: Path) -> None:
    """llama.cpp#17071: there is no context shift, so the answer ends at the limit."""
    sight = Sight(tmp_path, context_size=80)
    [answer] = answer_all(sight.engine, [ask([FILES[0], "a question that does not fit"], max_tokens=None)])
    assert answer.finished.reason is FinishReason.LENGTH
    assert answer.finished.context_used == 80


def test_preempted_requests_encode_nothing_again(tmp_path: Path) -> None:
    sight = Sight(tmp_path, max_sequences=2, capacity=400, context_size=400, overcommit=True)
    requests = [ask([text * 20, file, "?"], max_tokens=150) for text, file in (("one ", FILES[0]), ("two ", FILES[1]))]
    answers = answer_all(sight.engine, requests)
    assert sight.engine.status().preemptions
    assert sight.encoded == 2
    for answer, text, color in zip(answers, ("one ", "two "), ("ff0000", "00ff00"), strict=True):
        assert answer.text == f"You said: {text * 20}[4 rows of #{color}]?"


def test_timings_separate_the_encoding(tmp_path: Path) -> None:
    sight = Sight(tmp_path, {"encode_seconds": 0.15})
    [answer] = answer_all(sight.engine, [ask([FILES[0], FILES[1], FILES[0], "?"])])
    timings = answer.finished.timings
    assert timings.encoded_images == 2
    assert 0.3 <= timings.encode_s < timings.ttft_s
    assert timings.prefill_s < 0.15
    [text] = answer_all(sight.engine, [ask("hello")])
    assert (text.finished.timings.encoded_images, text.finished.timings.encode_s) == (0, 0.0)


def test_images_that_are_not_near_yet_take_no_longer(tmp_path: Path) -> None:
    """An image is decoded early, and encoded when the next large step could reach it."""
    sight = Sight(tmp_path, rows_per_step=128, step_seconds=0.02)
    [answer] = answer_all(sight.engine, [ask(["words " * 320, FILES[0], "?"], max_tokens=1)])
    assert sight.decoder.names == ["image 1"]
    assert answer.finished.timings.encode_s < 0.1


def test_the_encoder_goes_on_during_steps(tmp_path: Path) -> None:
    """The next image begins before the step that runs the rows of the previous one."""
    sight = Sight(tmp_path, {"encode_looks": 1}, max_sequences=2)
    sight.engine.submit(ask([*FILES[:2], "?"]))
    while not sight.encoded:
        sight.engine.step()
    assert [each.has_ended for each in vision(sight).begun] == [True, False]


def test_predictions_include_the_encoding(tmp_path: Path) -> None:
    sight = Sight(tmp_path, {"encode_seconds": 0.2}, rows_per_step=16)
    for file in FILES[:2]:
        answer_all(sight.engine, [ask(["words " * 10, file, "?"], max_tokens=4)])
    new, known = (sight.engine.prepare(ask(["other words " * 10, file, "?"])) for file in FILES[1:][::-1])
    first = sight.engine.predicted(new).first_token_s
    second = sight.engine.predicted(known).first_token_s
    assert first is not None
    assert second is not None
    assert second < 0.2 < first


def test_finished_requests_hold_no_rows(tmp_path: Path) -> None:
    sight = Sight(tmp_path)
    prepared = sight.engine.prepare(ask([FILES[0], "?", LARGE[0]]))
    sight.engine.enqueue(prepared)
    events: list[object] = []
    while not sight.engine.idle:
        events += sight.engine.step()
    assert isinstance(events[-1], Finished)
    assert prepared.images is not None
    assert not prepared.images.rows


def test_ended_requests_hold_no_files(tmp_path: Path) -> None:
    """The engine's process remembers requests for a while, and 32 images may take 16 MiB each."""
    sight = Sight(tmp_path)
    answers = [sight.engine.prepare(ask([file, "?"])) for file in FILES[:2]]
    ids = [sight.engine.enqueue(answer) for answer in answers]
    sight.engine.cancel(ids[1])
    run_to_the_end(sight.engine, ids)
    for answer in answers:
        assert isinstance(answer.request.prompt, ChatPrompt)
        assert not answer.request.prompt.images
        assert answer.images is not None
        assert [image.data for image in answer.images.images] == [b""]


def test_errors_of_images_are_raised_by_generate(tmp_path: Path) -> None:
    sight = Sight(tmp_path, {"error": "the encoder failed"})
    with pytest.raises(LlmrunError, match="the encoder failed"):
        list(sight.engine.generate(ask([FILES[0], "?"])))
    assert sight.engine.idle


def test_the_prefill_excludes_only_waits_for_images(tmp_path: Path) -> None:
    """While an image is encoded, the text before it runs, which is a part of the prefill."""
    sight = Sight(tmp_path, {"encode_seconds": 0.15}, rows_per_step=32, step_seconds=0.02)
    [answer] = answer_all(sight.engine, [ask(["words " * 20, FILES[0], "?"], max_tokens=1)])
    timings = answer.finished.timings
    n_steps = -(-timings.prompt_tokens // 32)
    assert timings.encode_s >= 0.15
    assert timings.image_wait_s <= timings.encode_s - 4 * 0.02
    assert timings.prefill_s >= 0.02 * n_steps
    assert timings.ttft_s >= timings.prefill_s + timings.image_wait_s


def test_waits_for_a_shared_image_are_no_prefill(tmp_path: Path) -> None:
    """Only the first of two requests is said to have encoded the image, but both of them have waited for it."""
    sight = Sight(tmp_path, {"encode_seconds": 0.1}, max_sequences=2)
    answers = answer_all(sight.engine, [ask([text, FILES[0], "?"], max_tokens=1) for text in ("one", "two")])
    assert [answer.finished.timings.encoded_images for answer in answers] == [1, 0]
    assert all(answer.finished.timings.prefill_s < 0.09 for answer in answers)


def test_costs_ignore_steps_beside_an_encoding(tmp_path: Path) -> None:
    """The encoder takes cores away from such a step, so its duration would mislead later predictions."""
    sight = Sight(tmp_path, {"encode_looks": 20}, max_sequences=2)
    costs = sight.engine._scheduler.costs
    answer_all(sight.engine, [ask("hello", max_tokens=3)])
    n_observed = costs.n_observed
    image = sight.engine.submit(ask([FILES[0], "?"], max_tokens=1))
    text = sight.engine.submit(ask("another prompt", max_tokens=1))
    events = [*sight.engine.step(), *sight.engine.step()]
    assert any(isinstance(event, Finished) for event in events)
    assert costs.n_observed == n_observed
    run_to_the_end(sight.engine, [image, text], events=events)
    assert costs.n_observed > n_observed


def test_steps_beside_an_encoding_count_if_nothing_is_known(tmp_path: Path) -> None:
    sight = Sight(tmp_path, {"encode_looks": 20})
    sight.engine.submit(ask(["words", FILES[0], "?"], max_tokens=1))
    sight.engine.step()
    assert sight.engine._scheduler.costs.knows_prompts


def test_awaited_images_shorten_the_steps_of_a_prompt(tmp_path: Path) -> None:
    """An image is noticed only after the step in which it is ready. Steps of a single prompt may take two seconds."""
    rows = []
    for image in (True, False):
        sight = Sight(tmp_path, {"encode_looks": 20}, max_sequences=2)
        sight.engine._scheduler.costs.assume(LearntCosts((0.01, 0.01, 0.0, 0.0), (0.01, 0.01, 0.0, 0.0), 512, 0, 1))
        if image:
            sight.engine.submit(ask([FILES[0], "?"]))
            sight.engine.step()
        text = sight.engine.submit(ask("a long prompt " * 40))
        events = sight.engine.step()
        rows += [event.done for event in events if isinstance(event, PrefillProgress) and event.request_id == text]
    assert rows[0] < 110 < 180 < rows[1]


def test_embedding_goes_on_while_images_are_awaited(tmp_path: Path) -> None:
    """The engine waits only briefly for the image, because texts are embedded between its steps."""
    sight = Sight(tmp_path, {"encode_seconds": 60.0}, max_sequences=2)
    embedder = sight.engine.embedder()
    sight.engine.submit(ask([FILES[0], "?"]))
    sight.engine.step()
    done: list[EmbeddingJob] = []
    embedder.add(EmbeddingJob([[1] * 1000 for _ in range(3)], done.append))
    before, n_steps = vision(sight).begun[0].waited, 0
    while not embedder.idle:
        embedder.step()
        sight.engine.step()
        n_steps += 1
    assert done
    assert vision(sight).begun[0].waited - before < 0.005 * n_steps
