"""Tests that recordings survive a round trip, and that every damaged or hostile file gives one clear line."""

from __future__ import annotations

import binascii
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.base.types import IMAGE_ROW
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import RecordedChat, Request, TokenPrompt
from llmrun.formats.images.header import MOST_BYTES
from llmrun.jobs import recording as recording_module
from llmrun.jobs.recording import (
    ModelFile,
    Opening,
    Output,
    RecordedImage,
    RecordedProjector,
    Recording,
    parse_recording,
    read_recording,
    token_digests,
)
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.pictures import BLUE, plain, png
from tests.support.tiers import examples

MESSAGES = [{"role": "system", "content": "Be brief. 🙂"}, {"role": "user", "content": "Why?\n"}]
TOKENS = tuple(range(100, 170))
RECORDING = Recording(
    numerics=1,
    llmrun="0.1.0",
    model="smollm2:135m",
    files=(ModelFile("a.gguf", "0f" * 32),),
    opening=Opening("f16", 2048, "ab" * 32, "{{ messages }}", ("<think>", "</think>")),
    prompt_tokens=(1, 2, 3),
    request=Request(
        RecordedChat(MESSAGES, template_kwargs={"enable_thinking": True, "n": [1, 2.5, None]}, tokens=(1, 2, 3)),
        max_tokens=80,
        stop=("\n\n", "end"),
        sampling=SamplingParams(
            temperature=0.3, top_k=5, samplers="top_k;temperature", seed=12, logit_bias={7: -math.inf}
        ),
        think=True,
        think_budget=9,
        response_format=ResponseFormat(FormatKind.CHOICE, choices=("a", "b"), origin="--choice"),
    ),
    output=Output(TOKENS, "length", {0: "0123456789abcdef", 70: "f" * 16}),
    ops=(("embed token_embd", "0" * 16), ("logits", "1" * 16)),
    machine={"device": "2 threads, avx2"},
)
RAW = replace(
    RECORDING,
    opening=Opening("q8_0", 64, None, None, None),
    request=Request(TokenPrompt((1, 2, 3)), sampling=SamplingParams()),
)
BODY = RECORDING.as_json()
RED_PNG, BLUE_PNG = png(plain(40, 20)), png(plain(20, 20, BLUE))
RED_KEY, BLUE_KEY = (hashlib.sha256(data).hexdigest() for data in (RED_PNG, BLUE_PNG))
PARTS = [
    {"type": "image", "image": RED_KEY, "detail": "low"},
    {"type": "text", "text": "and"},
    {"type": "image", "image": BLUE_KEY},
    {"type": "image", "image": RED_KEY},
]
ROWS = (1, IMAGE_ROW, 2, IMAGE_ROW, IMAGE_ROW, 3)
WITH_IMAGES = replace(
    RECORDING,
    prompt_tokens=ROWS,
    request=Request(
        RecordedChat([{"role": "user", "content": PARTS}], images={RED_KEY: RED_PNG, BLUE_KEY: BLUE_PNG}, tokens=ROWS)
    ),
    projector=RecordedProjector("mmproj.gguf", "1f" * 32, "/models/mmproj.gguf", None, 280),
    images=(
        RecordedImage(RED_KEY, "2f" * 32, "3f" * 32),
        RecordedImage(BLUE_KEY, "4f" * 32, "5f" * 32),
        RecordedImage(RED_KEY, "6f" * 32, "7f" * 32),
    ),
)
RAW_IMAGE = replace(
    WITH_IMAGES,
    request=Request(TokenPrompt(ROWS, (RED_PNG, BLUE_PNG, RED_PNG))),
)
IMAGE_BODY = WITH_IMAGES.as_json()


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def problem(data: bytes) -> str:
    with pytest.raises(UsageError) as caught:
        parse_recording(data)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


@pytest.mark.parametrize("recording", [RECORDING, RAW, WITH_IMAGES, RAW_IMAGE])
def test_a_round_trip_changes_nothing(recording: Recording) -> None:
    assert parse_recording(encoded(recording.as_json())) == recording


def test_a_recording_holds_each_image_once() -> None:
    assert (IMAGE_BODY["version"], len(IMAGE_BODY["images"]), len(IMAGE_BODY["image_files"])) == (2, 3, 2)
    assert BODY["version"] == 1  # older releases read recordings without images
    assert not {"projector", "images", "image_files"} & BODY.keys()


def test_the_ops_of_a_recording_run_no_rows_of_images() -> None:
    assert WITH_IMAGES.op_tokens == (1, 2, 3)
    assert replace(WITH_IMAGES, prompt_tokens=(IMAGE_ROW,)).op_tokens == (0,)


def test_digests_of_tokens_cover_all_tokens() -> None:
    assert [len([*token_digests(range(n))]) for n in (0, 1, 32, 33, 70)] == [0, 1, 1, 2, 3]
    assert [*token_digests(range(70))][:2] == [*token_digests(range(64))]
    assert [*token_digests(range(70))][2] != [*token_digests(range(69))][2]


CHANGES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("format", lambda body: body.pop("format")),
    ("version 3", lambda body: body.update(version=3)),
    ("images", lambda body: body.update(version=2)),
    ("image_files", lambda body: body.update(image_files={"0f" * 32: ""})),
    ("projector", lambda body: body.update(projector=IMAGE_BODY["projector"])),
    ("images", lambda body: body["chat"]["messages"][0].update(content=PARTS)),
    ("numerics", lambda body: body.update(numerics=True)),
    ("files", lambda body: body.update(files=[])),
    ("files[0].sha256", lambda body: body["files"][0].update(sha256="0F" * 32)),
    ("kv_type", lambda body: body.update(kv_type="f 64")),
    ("context_size", lambda body: body.update(context_size=0)),
    ("template", lambda body: body.update(template="x")),
    ("thinking_tags", lambda body: body.update(thinking_tags=["<think>"])),
    ("chat.messages[0].content", lambda body: body["chat"]["messages"][0].pop("content")),
    ("prompt_tokens", lambda body: body.update(prompt_tokens=[])),
    ("prompt_tokens[1]", lambda body: body.update(prompt_tokens=[1, -1])),
    ("stop", lambda body: body.update(stop=[""])),
    ("sampling.temperature", lambda body: body["sampling"].update(temperature="hot")),
    ("sampling.top_k", lambda body: body["sampling"].update(top_k=1.5)),
    ("sampling.samplers", lambda body: body["sampling"].update(samplers="no_such")),
    ("sampling.min_p", lambda body: body["sampling"].pop("min_p")),
    ("seed", lambda body: body.update(seed=-1)),
    ("logit_bias", lambda body: body.update(logit_bias={"x": 1})),
    ("response_format.kind", lambda body: body["response_format"].update(kind="poem")),
    ("tokens[3]", lambda body: body["tokens"].__setitem__(3, 1 << 24)),
    ("token_digests", lambda body: body["tokens"].__setitem__(40, 5)),
    ("finish", lambda body: body.update(finish="done")),
    ("logits", lambda body: body.update(logits={"71": "0" * 16})),
    ("ops", lambda body: body.update(ops=[["embed", "0"]])),
    ("machine", lambda body: body.update(machine={"device": 1})),
    ("surprise", lambda body: body.update(surprise=1)),
]


@pytest.mark.parametrize(("named", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_the_field_with_a_problem_is_named(named: str, change: Callable[[dict[str, Any]], Any]) -> None:
    body = json.loads(encoded(BODY))
    change(body)
    assert named in problem(encoded(body))


def _larger(body: dict[str, Any]) -> None:
    data = RED_PNG + bytes(MOST_BYTES)
    body["image_files"][RED_KEY] = binascii.b2a_base64(data, newline=False).decode()


IMAGE_CHANGES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("images", lambda body: body.update(version=1)),
    ("images", lambda body: body.update(images=[])),
    ("32", lambda body: body.update(images=33 * body["images"])),
    ("images[1].pixels", lambda body: body["images"][1].update(pixels="5f")),
    ("images", lambda body: body["images"].reverse() or body["images"].pop()),
    ("projector", lambda body: body.pop("projector")),
    ("projector.image_max_tokens", lambda body: body["projector"].update(image_max_tokens=0)),
    ("image_files", lambda body: body["image_files"].pop(BLUE_KEY)),
    ("image_files", lambda body: body["image_files"].update({"0f" * 32: ""})),
    ("another SHA-256", lambda body: body["image_files"].update({RED_KEY: body["image_files"][BLUE_KEY]})),
    ("expected base64", lambda body: body["image_files"].update({RED_KEY: body["image_files"][RED_KEY] + "\n"})),
    ("expected base64", lambda body: body["image_files"].update({RED_KEY: "=" + body["image_files"][RED_KEY]})),
    ("expected base64", lambda body: body["image_files"].update({RED_KEY: "é"})),
    ("too large", _larger),
    ("chat.messages[0].content[0].image", lambda body: body["chat"]["messages"][0]["content"][0].update(image="../x")),
    ("chat.messages[0].content[0].detail", lambda body: body["chat"]["messages"][0]["content"][0].update(detail="x")),
    ("chat.messages[0].content[1].type", lambda body: body["chat"]["messages"][0]["content"][1].update(type="file")),
    ("the images do not match the messages", lambda body: body["chat"]["messages"][0]["content"].pop()),
    ("prompt_tokens[1]", lambda body: body.update(prompt_tokens=[1, -2])),
]


@pytest.mark.parametrize(("named", "change"), IMAGE_CHANGES, ids=[name for name, _ in IMAGE_CHANGES])
def test_a_problem_with_images_is_named(named: str, change: Callable[[dict[str, Any]], Any]) -> None:
    body = json.loads(encoded(IMAGE_BODY))
    change(body)
    assert named in problem(encoded(body))


def test_only_images_may_make_a_recording_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other values would take many times the memory of their text."""
    data = encoded(IMAGE_BODY)
    images = sum(map(len, IMAGE_BODY["image_files"].values()))
    monkeypatch.setattr(recording_module, "_MOST_BYTES", len(data) - images)
    assert parse_recording(data) == WITH_IMAGES
    assert "larger than" in problem(data[:-1] + 100 * b" " + data[-1:])
    monkeypatch.setattr(recording_module, "_MOST_ENCODED", images)
    assert "the images are larger than" in problem(data)


def test_other_files_are_refused() -> None:
    assert "invalid JSON" in problem(b"")
    assert "invalid JSON" in problem(b"\x00GGUF")
    assert "UTF-8" in problem(b"\xff\xfe{")
    assert "JSON object" in problem(b"[]")
    assert "format" in problem(b"{}")
    assert "deep" in problem(b'{"a":' + b"[" * 200_000)
    assert "occurs twice" in problem(b'{"format": "llmrun-run", "format": "llmrun-run"}')
    assert "UTF-8" in problem(encoded({**BODY, "model": "\ud800"}))
    assert "larger than" in problem(b" " * ((32 << 20) + 1))
    assert problem(b'{"format": "llmrun-run", "version": ' + b"9" * 5000 + b"}")
    assert "NaN" in problem(b'{"format": NaN}')


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_recording(tmp_path / "none.json")
    with pytest.raises(UsageError, match="directory"):
        read_recording(tmp_path)
    path = tmp_path / "run.json"
    path.write_bytes(b"{}")
    with pytest.raises(UsageError, match=re.escape(f"not a recording of llmrun: {path}: format")):
        read_recording(path)


PLACES = [(body, key) for body in (BODY, IMAGE_BODY) for key in body if key not in ("format", "version")]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.push
@given(st.sampled_from(PLACES), VALUES)
@settings(max_examples=examples(400))
def test_any_value_in_any_field_is_read_or_refused(place: tuple[dict[str, Any], str], value: Any) -> None:
    body, key = place
    parse_or_refuse(encoded({**body, key: value}))


@pytest.mark.push
@given(st.data())
@settings(max_examples=examples(400))
def test_any_damage_is_read_or_refused(data: st.DataObject) -> None:
    damaged = bytearray(encoded(data.draw(st.sampled_from((BODY, IMAGE_BODY)))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            damaged[at] = data.draw(st.integers(0, 255))
        else:
            del damaged[at : at + data.draw(st.integers(1, 200))]
        if not damaged:
            return
    parse_or_refuse(bytes(damaged))


def parse_or_refuse(data: bytes) -> None:
    """Parse a recording. If it is accepted, it must survive a round trip."""
    problems, found = [], None
    try:
        found = parse_recording(data)
    except UsageError as error:
        problems.append(str(error))
    assert "\n" not in "".join(problems)
    if found is not None:
        assert parse_recording(encoded(found.as_json())) == found
