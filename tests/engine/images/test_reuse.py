"""Tests that images are encoded and computed once, and that a prefix never matches another image.

The noise of a scripted model depends on all rows so far and on their positions, so an answer from a wrong prefix
differs from the answer of a fresh engine.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from llmrun.backends.scripted_vision import ScriptedEncoding
from llmrun.base.machine import system
from llmrun.base.types import Adapter
from llmrun.engine.adapters import AdaptedTokens
from llmrun.engine.engine import Engine
from llmrun.engine.image_encoder import RecentRows
from llmrun.engine.image_rows import PromptImage
from llmrun.engine.requests import Request, StatePlace
from llmrun.engine.saved_state.budget import Budget
from llmrun.engine.saved_state.chunks import CHUNK, SavedChunks
from llmrun.formats.images import resampling
from llmrun.formats.images.decoding import decoder_version
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.pictures import BLUE, GREEN, RED, Sight, ask, plain, png
from tests.support.tiers import examples

WORDS = "Some words before the picture, so that there is a prefix that is worth the reuse. "
SQUARE, OTHER = plain(128, 128, RED), plain(128, 128, RED)
OTHER[127, 127] = 0
FILES = [png(SQUARE), png(OTHER), png(plain(128, 128, BLUE)), png(plain(64, 300, GREEN)), png(plain(20, 20, BLUE))]
KINDS: list[dict[str, Any]] = [
    {},
    {"is_causal": False},
    {"uses_mrope": True},
    {"has_overview": True},
    {"is_causal": False, "has_overview": True},
    {"encode_looks": 5},
]


def greedy(request: Request) -> Request:
    return structs.replace(request, max_tokens=6, sampling=replace(request.sampling, temperature=0.0))


def fresh(tmp_path: Path, request: Request, projector: dict[str, Any], **options: Any) -> Gathered:
    [answer] = answer_all(Sight(tmp_path, projector, voice=None, **options).engine, [request])
    return answer


@pytest.mark.parametrize("checkpoint", [None, 16])
@pytest.mark.parametrize("projector", KINDS)
def test_the_next_turn_encodes_nothing(tmp_path: Path, projector: dict[str, Any], checkpoint: int | None) -> None:
    """llama-cpp-python#2222 and llama.cpp#18686: image encoded again at every turn; llama.cpp#26994: prefix with image
    never cached for hybrid models."""
    sight = Sight(tmp_path, projector, checkpoint=checkpoint)
    first = ask([FILES[0], "?"])
    [one] = answer_all(sight.engine, [first])
    [two] = answer_all(sight.engine, [ask([FILES[0], "?"], one.text, "And now?")])
    assert (one.finished.timings.encoded_images, two.finished.timings.encoded_images, sight.encoded) == (1, 0, 1)
    assert two.finished.timings.cached_tokens >= one.finished.timings.prompt_tokens + len(one.text)
    assert two.text == "You said: And now?"


@pytest.mark.parametrize("checkpoint", [None, 24])
@pytest.mark.parametrize("projector", KINDS)
def test_a_changed_question_keeps_the_image(tmp_path: Path, projector: dict[str, Any], checkpoint: int | None) -> None:
    sight = Sight(tmp_path, projector, voice=None, checkpoint=checkpoint)
    first, second = (greedy(ask([WORDS, FILES[0], text])) for text in ("what?", "where?"))
    answer_all(sight.engine, [first])
    [answer] = answer_all(sight.engine, [second])
    assert sight.encoded == 1
    assert answer.tokens == fresh(tmp_path, second, projector).tokens
    if checkpoint is None:
        assert answer.finished.timings.cached_tokens > len(WORDS) + 16


@pytest.mark.parametrize("other", [1, 2])
@pytest.mark.parametrize("projector", KINDS)
def test_pictures_of_equal_size_never_mix(tmp_path: Path, projector: dict[str, Any], other: int) -> None:
    """sglang#11785, jundot/omlx#1417, ik_llama.cpp#1893: answer about another picture, even if pixels are equal."""
    sight = Sight(tmp_path, projector, voice=None)
    requests = [greedy(ask([WORDS, file, "?"])) for file in (FILES[0], FILES[other], FILES[0])]
    expected = [fresh(tmp_path, request, projector).tokens for request in requests]
    answers = [answer_all(sight.engine, [request])[0] for request in requests]
    assert [answer.tokens for answer in answers] == expected
    assert sight.encoded == 2
    before = answers[1].finished.timings.cached_tokens
    assert len(WORDS) < before < sight.engine.prompt_tokens(requests[1]) - 16
    together = answer_all(Sight(tmp_path, projector, voice=None, max_sequences=3).engine, requests)
    assert [answer.tokens for answer in together] == expected


def test_swapped_images_give_the_other_answer(tmp_path: Path) -> None:
    """ik_llama.cpp#1893: second image taken as the first."""
    sight = Sight(tmp_path)
    red, blue = FILES[0], FILES[2]
    answers = [answer_all(sight.engine, [ask([*pair, "?"])])[0].text for pair in ((red, blue), (blue, red), (red, red))]
    colors = [[f"[16 rows of #{color}]" for color in pair] for pair in (("ff0000", "0000ff"), ("0000ff", "ff0000"))]
    assert answers == [f"You said: {''.join(pair)}?" for pair in (*colors, [colors[0][0]] * 2)]
    assert sight.encoded == 2


@pytest.mark.parametrize("projector", [*KINDS, {"columns": 3}])
def test_another_projector_or_detail_never_matches(tmp_path: Path, projector: dict[str, Any]) -> None:
    def number(projector: dict[str, Any]) -> list[int]:
        [answer] = [Sight(tmp_path, projector).engine.prepare(ask([FILES[4], "?"]))]
        return [each for each in answer.cached_as if each < 0]

    ours, others = number(projector), [number(each) for each in KINDS if each != projector]
    assert not any({*ours} & {*each} for each in others)


@pytest.mark.push
@given(data=st.data(), checkpoint=st.sampled_from([None, 16]), kind=st.sampled_from(KINDS), together=st.booleans())
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_do_not_depend_on_earlier_images(
    tmp_path: Path, data: st.DataObject, checkpoint: int | None, kind: dict[str, Any], together: bool
) -> None:
    contents: st.SearchStrategy[list[bytes | str]] = st.lists(
        st.sampled_from([*FILES, WORDS, "a"]), min_size=1, max_size=5
    )
    requests = [greedy(ask(data.draw(contents))) for _ in range(data.draw(st.integers(2, 4)))]
    rows = data.draw(st.sampled_from([8, 512]))
    options: dict[str, Any] = {"max_sequences": 2, "checkpoint": checkpoint, "rows_per_step": rows}
    engine = Sight(tmp_path, kind, voice=None, **options).engine
    answers = answer_all(engine, requests) if together else [answer_all(engine, [each])[0] for each in requests]
    for request, answer in zip(requests, answers, strict=True):
        assert answer.tokens == fresh(tmp_path, request, kind).tokens


@pytest.mark.parametrize("looks", [0, 20])
@pytest.mark.parametrize("texts", [["what?"] * 8, list("abcdefgh")])
def test_eight_clients_encode_an_image_once(tmp_path: Path, texts: list[str], looks: int) -> None:
    """The clients ask the same, so that seven wait for a prefix, or have other words before the image."""
    sight = Sight(tmp_path, {"encode_looks": looks}, max_sequences=8)
    requests = [ask([text, FILES[0], "?"]) for text in texts]
    answers = answer_all(sight.engine, requests)
    assert [answer.text for answer in answers] == [f"You said: {text}[16 rows of #ff0000]?" for text in texts]
    assert len(begun(sight)) == sight.encoded == len(sight.decoder.names) == 1
    assert sum(answer.finished.timings.encoded_images for answer in answers) == 1
    again = [ask([text, FILES[0], "?"], answer.text, "more") for text, answer in zip(texts, answers, strict=True)]
    answer_all(sight.engine, again)
    assert len(begun(sight)) == len(sight.decoder.names) == 1


def begun(sight: Sight) -> list[ScriptedEncoding]:
    assert sight.backend.vision is not None
    return sight.backend.vision.begun


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_tenants_share_no_images_unless_asked(tmp_path: Path, shares: bool, together: bool) -> None:
    sight = Sight(tmp_path, {"encode_looks": 5}, max_sequences=4, share_prefixes=shares)
    requests = [ask([text, FILES[0], "?"], tenant=tenant) for text, tenant in zip("1234", "abab", strict=True)]
    for batch in [requests] if together else [[request] for request in requests]:
        answer_all(sight.engine, batch)
    assert len(begun(sight)) == (1 if shares else 2)


def test_another_decoder_never_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of libjpeg decode the same file to other pixels, so saved states must not be continued with them."""
    projector = Sight(tmp_path).backend.vision.projector  # type: ignore[union-attr]
    image = PromptImage.of("image 1", FILES[0], "auto", projector)
    assert importlib.metadata.version("pillow") in decoder_version()
    for module, name, version in ((system, "installed_version", lambda name: "9.0"), (resampling, "VERSION", 0)):
        monkeypatch.setattr(module, name, version)
        decoder_version.cache_clear()
        assert PromptImage.of("image 1", FILES[0], "auto", projector).key != image.key
        monkeypatch.undo()
    decoder_version.cache_clear()


@pytest.mark.push
def test_the_decoder_is_not_imported_for_its_version() -> None:
    code = (
        "import sys; from llmrun.formats.images.decoding import decoder_version; decoder_version();"
        "sys.exit('PIL' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forgotten_images_are_encoded_again(tmp_path: Path) -> None:
    sight = Sight(tmp_path)
    for encoded in (1, 2):
        answer_all(sight.engine, [ask([FILES[0], "?"])])
        assert sight.encoded == encoded
        sight.engine.forget()


def test_only_the_most_recent_rows_are_kept(tmp_path: Path) -> None:
    projector = Sight(tmp_path).backend.vision.projector  # type: ignore[union-attr]
    images = [PromptImage.of("image 1", file, "auto", projector) for file in FILES[:3]]
    recent, rows = RecentRows(most_bytes=2 * 800), np.zeros((10, 20), np.float32)
    for image in images[:2]:
        recent.add("", image, rows)
    assert recent.find("", images[0]) is rows
    recent.add("", images[2], rows)
    assert [recent.knows("", image) for image in images] == [True, False, True]
    recent.add("", images[1], np.zeros((100, 20), np.float32))
    assert not any(recent.knows("", image) for image in images)


@pytest.mark.parametrize("projector", KINDS)
def test_saved_states_continue_after_images(tmp_path: Path, projector: dict[str, Any]) -> None:
    place = StatePlace(str(tmp_path / "state.kv"))
    first, second = (greedy(ask([WORDS, FILES[0], FILES[3], text])) for text in ("what?", "where?"))
    answers = []
    for request in (first, second):
        sight = Sight(tmp_path, projector, voice=None)
        sight.engine.use_state(place, pytest.fail)
        answers += answer_all(sight.engine, [request])
        sight.engine.save_state()
    assert sight.encoded == 0
    assert answers[1].finished.timings.cached_tokens > len(WORDS) + 16
    assert answers[1].tokens == fresh(tmp_path, second, projector).tokens


@pytest.mark.parametrize("projector", KINDS)
def test_saved_prefixes_end_at_the_border_of_an_image(tmp_path: Path, projector: dict[str, Any]) -> None:
    """A chunk of a saved prefix ends inside the image, from where only a causal image could go on."""
    large = png(plain(500, 500))
    words = "w" * (CHUNK - 100)
    first, second = greedy(ask([words, large, "?"])), greedy(ask([words, large, FILES[3], "?"]))
    engines = []
    for request in (first, second):
        sight = Sight(tmp_path, projector, voice=None)
        budget = Budget([tmp_path / "saved"], 1 << 30)
        sight.engine.use_saved(SavedChunks(tmp_path / "saved", sight.engine.state_key, budget, pytest.fail))
        [answer] = answer_all(sight.engine, [request])
        while sight.engine.save_prefix(CHUNK):
            pass
        engines.append((sight, answer))
    assert engines[1][1].finished.timings.cached_tokens >= CHUNK - 100
    assert engines[1][1].tokens == fresh(tmp_path, second, projector).tokens


@pytest.mark.parametrize("starts", [(), (7, 8)])
def test_adapters_and_images_never_mix(tmp_path: Path, starts: tuple[int, ...]) -> None:
    adapters = (Adapter("one", "one.gguf", 0.0, starts, "1"), Adapter("two", "two.gguf", 0.0, starts, "2"))
    options: dict[str, Any] = {"adapters": adapters, "voice": None}
    sight = Sight(tmp_path, {"is_causal": False}, **options)
    prompts = [greedy(ask([WORDS, file, "\x07\x08?"])) for file in (FILES[0], FILES[2])]
    asked = [
        structs.replace(prompt, adapters=chosen)
        for chosen in ({}, {"one": 1.0}, {"two": 1.0}, {"one": 0.5})
        for prompt in prompts
    ]
    for request in asked + asked[::-1]:
        [answer] = answer_all(sight.engine, [request])
        [expected] = answer_all(Sight(tmp_path, {"is_causal": False}, **options).engine, [request])
        assert answer.tokens == expected.tokens
    assert sight.encoded == 2


def test_rows_have_other_numbers_with_adapters() -> None:
    """A raw prompt can begin with an image, whose rows then precede all tokens with the mark of an adapter."""
    adapters, rows = [Adapter(name, name, 0.0, (), name) for name in ("one", "two")], [-8, -15, -21]
    marked = [
        AdaptedTokens(adapters, scales, (0, 0)).marked(rows, 0) for scales in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.0))
    ]
    assert len({number for numbers in (rows, *marked) for number in numbers}) == 12
    assert all(-(1 << 63) <= number < 0 for numbers in marked for number in numbers)
    assert [[number & 1 for number in numbers] for numbers in marked] == [[0, 1, 1]] * 3


def test_engines_without_images_have_no_rows(tmp_path: Path) -> None:
    """Text-only requests of a model that reads images get the same batches as before."""
    sight = Sight(tmp_path, {"uses_mrope": True, "is_causal": False})
    answer_all(sight.engine, [ask("hello")])
    assert all(each.embeds is None and each.rope_pos is None and each.ahead is None for each in sight.backend.batches)
    assert isinstance(sight.engine, Engine)
