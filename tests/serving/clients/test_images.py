"""Tests of images with the official clients of OpenAI and Anthropic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.support.serving.pictures import PHOTO, SEEN, base64_of, data_url, png
from tests.support.serving.serve_process import Served, served
from tests.support.vision.projectors import tiny_projector, tiny_text_model

pytestmark = pytest.mark.push

BLUE = png(32, 32, b"\x00\x00\xff")
BOTH = "You said: [6 rows of #ff0000]and[1 row of #0000ff]"


@pytest.fixture(scope="module")
def client(seeing: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=seeing.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(seeing: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=seeing.url.removesuffix("/v1"), api_key="none", max_retries=0)


def image_url(file: bytes) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(file)}}


def block(file: bytes) -> Any:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(file)}}


def test_openai_chats_have_images(client: openai.OpenAI) -> None:
    content = [image_url(PHOTO), {"type": "text", "text": "Which color?"}]
    done = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": content}])
    assert done.choices[0].message.content == SEEN
    text = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Which color?"}])
    assert done.usage is not None
    assert text.usage is not None
    assert done.usage.prompt_tokens == text.usage.prompt_tokens + 6 + 2  # rows, and a marker at both ends
    stream = client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": [*content[:1], {"type": "text", "text": "and"}, image_url(BLUE)]}],
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == BOTH


def test_openai_responses_have_images(client: openai.OpenAI) -> None:
    parts: Any = [
        {"type": "input_image", "image_url": data_url(PHOTO), "detail": "auto"},
        {"type": "input_text", "text": "Which color?"},
    ]
    assert client.responses.create(model="scripted", input=[{"role": "user", "content": parts}]).output_text == SEEN


def test_anthropic_messages_have_images(claude: anthropic.Anthropic) -> None:
    content: Any = [block(PHOTO), {"type": "text", "text": "Which color?"}]
    done = claude.messages.create(model="scripted", max_tokens=99, messages=[{"role": "user", "content": content}])
    assert isinstance(done.content[0], anthropic.types.TextBlock)
    assert done.content[0].text == SEEN
    counted = claude.messages.count_tokens(model="scripted", messages=[{"role": "user", "content": content}])
    assert counted.input_tokens == done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0)


def test_urls_are_refused_by_name(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/cat.png"}}
    with pytest.raises(openai.BadRequestError, match="this server fetches no URLs"):
        client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": [part]}])
    source: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/cat.png"}}
    with pytest.raises(anthropic.BadRequestError, match="this server fetches no URLs"):
        claude.messages.create(model="scripted", max_tokens=9, messages=[{"role": "user", "content": [source]}])


def test_the_second_turn_encodes_nothing(client: openai.OpenAI, seeing: Served) -> None:
    file = png(320, 64, b"\x00\xff\x00")
    question: Any = {"role": "user", "content": [image_url(file), {"type": "text", "text": "Which color?"}]}
    said = client.chat.completions.create(model="scripted", messages=[question]).choices[0].message.content
    answer: Any = {"role": "assistant", "content": said}
    raw = client.chat.completions.with_raw_response.create(
        model="scripted", messages=[question, answer, {"role": "user", "content": "Sure?"}]
    )
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 20
    assert raw.headers["x-llmrun-images"] == "320x64, 20 tokens"
    seeing.wait_for(lambda: len(_lines(seeing)) == 2)
    first, second = _lines(seeing)
    assert (", 1 encoded in " in first, "encoded" in second) == (True, False)


def _lines(seeing: Served) -> list[str]:
    """Return the lines of the log about the image of the last test."""
    return [line for line in seeing.lines if "1 image (320x64, 20 tokens)" in line]


@pytest.mark.night
def test_served_models_find_their_projector(tmp_path: Path) -> None:
    """The CPU engine answers, and the second answer about an image encodes nothing (ggml-org/llama.cpp#18686)."""
    tiny_text_model(tmp_path, "gemma3").rename(tmp_path / "tiny.gguf")
    tiny_projector(tmp_path, "gemma3").rename(tmp_path / "mmproj-tiny-F32.gguf")
    with served(str(tmp_path / "tiny.gguf"), "--ctx-size", "1024", "--gpu-layers", "0", "-v") as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        question: Any = {"role": "user", "content": [image_url(PHOTO), {"type": "text", "text": "Which color?"}]}
        for _ in range(2):
            done = client.chat.completions.create(model="tiny", messages=[question], max_tokens=2)
        assert done.usage is not None
        assert done.usage.prompt_tokens > 256
        server.wait_for(lambda: len([line for line in server.lines if "1 image (64x96, 256 tokens)" in line]) == 2)
        assert sum(", 1 encoded in " in line for line in server.lines) == 1
        assert any(line.startswith("auto chose cpu: ") for line in server.lines)


def test_errors_about_damaged_images_name_the_image(client: openai.OpenAI) -> None:
    """The damage is inside of the pixels, so only the engine finds it. `remember_unreadable` needs the number."""
    damaged = png(48, 32)
    at = damaged.index(b"IDAT") + 8
    damaged = damaged[:at] + bytes(4) + damaged[at + 4 :]
    messages: Any = [{"role": "user", "content": [image_url(PHOTO), image_url(damaged)]}]
    with pytest.raises(openai.BadRequestError, match="400 - image 2: "):
        client.chat.completions.create(model="scripted", messages=messages)
