"""Tests of answers about images that reach the end of the context, for each API, with a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving.pictures import PHOTO, base64_of, data_url, png
from tests.support.serving.serve_process import Served, served

pytestmark = pytest.mark.push

CONTEXT = 96
LONG = "a" * 50  # the scripted model repeats the question, and has a token for each character


def chat(files: list[bytes], text: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    return {"messages": [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]}


def response(files: list[bytes], text: str) -> dict[str, Any]:
    images = [{"type": "input_image", "image_url": data_url(file)} for file in files]
    return {"input": [{"role": "user", "content": [*images, {"type": "input_text", "text": text}]}]}


def message(files: list[bytes], text: str) -> dict[str, Any]:
    sources = [{"type": "base64", "media_type": "image/png", "data": base64_of(file)} for file in files]
    content = [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": text}]
    return {"model": "scripted", "max_tokens": 4096, "messages": [{"role": "user", "content": content}]}


def ollama(files: list[bytes], text: str) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text, "images": [*map(base64_of, files)]}]}


def completion(files: list[bytes], text: str) -> dict[str, Any]:
    prompt = {"prompt_string": "<__media__>" * len(files) + text, "multimodal_data": [*map(base64_of, files)]}
    return {"prompt": prompt, "n_predict": -1}


# The body, and the field that says why an answer has ended.
APIS: dict[str, tuple[Any, str]] = {
    "/v1/chat/completions": (chat, '"finish_reason":"length"'),
    "/v1/responses": (response, '"reason":"max_output_tokens"'),
    "/v1/messages": (message, '"stop_reason":"model_context_window_exceeded"'),
    "/api/chat": (ollama, '"done_reason":"length"'),
    "/completion": (completion, '"stop_type":"limit"'),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("scripted", "--backend", "scripted", "--mmproj", "any", "--ctx-size", str(CONTEXT)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_answers_end_at_the_end_of_the_context(server: Served, path: str, stream: bool) -> None:
    """Context shift, which llmrun does not have, crashed with images: ggml-org/llama.cpp#17071 and #13865."""
    body, ending = APIS[path]
    for text in (LONG, LONG, "b"):
        status, _, received = server.call("POST", path, {**body([PHOTO], text), "stream": stream})
        assert status == 200
        assert text != LONG or ending in received.decode()
    assert server.process.poll() is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_prompts_that_do_not_fit_report_their_images(server: Served, path: str, stream: bool) -> None:
    """No image is left out to make room, as a context shift would do: ggml-org/llama.cpp#17071 and #13865."""
    files = [PHOTO, png(320, 320)]
    status, headers, received = server.call("POST", path, {**APIS[path][0](files, "?"), "stream": stream})
    assert (status, headers["content-type"]) == (400, "application/json")
    assert "the 2 images take 6 and 100 tokens" in json.dumps(json.loads(received))
