"""Tests of images in the lines of a batch."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.jobs.batching.images import ImageFolder
from llmrun.jobs.batching.intake import check_input
from llmrun.jobs.batching.requests import CallOptions, Line, read_request
from llmrun.jobs.batching.work import prefix_of
from tests.jobs.batching.test_run import Files
from tests.support.batching.fake_workers import FakeWorker
from tests.support.named_pipes import named_pipe
from tests.support.serving.pictures import BLUE, RED, bomb, data_url, key_of


@pytest.fixture
def options(tmp_path: Path) -> CallOptions:
    """Return options with a folder that contains the images red.png and more/blue.png."""
    (tmp_path / "images" / "more").mkdir(parents=True)
    (tmp_path / "images" / "red.png").write_bytes(RED)
    (tmp_path / "images" / "more" / "blue.png").write_bytes(BLUE)
    return CallOptions(folder=ImageFolder(tmp_path / "images"))


def call(content: Any, options: CallOptions | None = None) -> Any:
    data = json.dumps(content).encode()
    return read_request(Line(7, data, hashlib.sha256(data).digest()), options or CallOptions()).call


def message(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}


def test_lines_name_images_below_the_folder(options: CallOptions) -> None:
    found = call({"messages": [message("red.png", "more/blue.png", data_url(RED))]}, options)
    assert found.whole_body()["messages"] == [message(data_url(RED), data_url(BLUE), data_url(RED))]
    assert found.body["messages"] == [message(f"sha256:{key_of(RED)}", f"sha256:{key_of(BLUE)}", data_url(RED))]


@pytest.mark.parametrize("images", ["red.png", ["red.png"]])
def test_prompts_have_images(images: Any, options: CallOptions) -> None:
    wanted = [message(data_url(RED))]
    assert call({"prompt": "Which?", "images": images}, options).whole_body()["messages"] == wanted
    assert call({"prompt": "Which?", "images": [data_url(RED)]}).whole_body()["messages"] == wanted
    filling = CallOptions(folder=options.folder, fill=lambda fields: (f"{fields['word']}?", None))
    assert call({"word": "Which", "images": images}, filling).whole_body()["messages"] == wanted
    assert call({"prompt": "Which?", "images": ""}, options).body["messages"] == [{"role": "user", "content": "Which?"}]


def test_other_forms_of_messages_name_images_too(options: CallOptions) -> None:
    for kind, image in (("image_url", "red.png"), ("input_image", "red.png")):
        content = [{"type": kind, "image_url": image}]
        body = call({"messages": [{"role": "user", "content": content}]}, options).whole_body()
        assert body["messages"][0]["content"] == [{"type": kind, "image_url": data_url(RED)}]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.png", "no such file in"),
        ("../secret.png", "not a relative path inside"),
        ("more/../../secret.png", "not a relative path inside"),
        ("link.png", "not a relative path inside"),
        ("/etc/passwd", "not a relative path inside"),
        ("//server/cat.png", "not a relative path inside"),
        ("more", "not a file"),
        ("a\0b", "no such file in"),
        ("text.png", "not an image"),
        ("bomb.png", "too large: 60,000 x 60,000 pixels"),
    ],
)
def test_other_files_are_refused(name: str, words: str, options: CallOptions, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(RED)
    folder = tmp_path / "images"
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "text.png").write_text("hello")
    (folder / "bomb.png").write_bytes(bomb())
    with pytest.raises(UsageError, match=words) as caught:
        call({"messages": [message(name)]}, options)
    assert "messages[0].content[0].image_url.url" in str(caught.value)


def test_named_pipes_are_not_opened(options: CallOptions, tmp_path: Path) -> None:
    named_pipe(tmp_path / "images" / "pipe.png")
    with pytest.raises(UsageError, match="not a file"):
        call({"messages": [message("pipe.png")]}, options)


def test_names_need_the_folder() -> None:
    with pytest.raises(LlmrunError, match=r"red\.png is not a data URL") as caught:
        call({"prompt": "Which?", "images": ["red.png"]})
    assert "--image-dir" in caught.value.hint
    with pytest.raises(LlmrunError, match="expected a list of paths"):
        call({"prompt": "Which?", "images": [5]})


def test_the_contents_decide_whether_calls_are_equal(options: CallOptions, tmp_path: Path) -> None:
    copy = tmp_path / "images" / "copy.png"
    copy.write_bytes(RED)
    lines = [{"prompt": "Which?", "images": [name]} for name in ("red.png", "copy.png", "more/blue.png")]
    red, same, blue = (call(line, options) for line in lines)
    assert red.key == same.key != blue.key
    assert len(prefix_of(red)) < 300
    copy.write_bytes(BLUE)
    assert call(lines[1], options).key == blue.key


def test_a_run_sends_images_and_notices_changes(options: CallOptions, tmp_path: Path) -> None:
    lines = [{"prompt": str(number), "images": ["red.png"]} for number in range(3)]
    files, worker = Files(tmp_path, lines), FakeWorker()
    assert files.run(worker, options=options).tally.failed == 0
    assert [body["messages"][0]["content"][0]["image_url"]["url"] for body in worker.asked] == [data_url(RED)] * 3


def test_a_changed_image_is_an_error_of_its_line(options: CallOptions, tmp_path: Path) -> None:
    found = call({"prompt": "Which?", "images": ["red.png"]}, options)
    (tmp_path / "images" / "red.png").write_bytes(BLUE)
    with pytest.raises(UsageError, match=r"red\.png: the image was changed after its line was read"):
        found.whole_body()


def test_a_run_does_not_continue_with_other_images(options: CallOptions, tmp_path: Path) -> None:
    lines = [{"prompt": str(number), "images": ["red.png"]} for number in range(40)]
    files = Files(tmp_path, lines)
    assert not files.run(FakeWorker(delay_s=0.01), stop_at=5, options=options).is_complete
    image = tmp_path / "images" / "red.png"
    image.write_bytes(BLUE)
    with pytest.raises(UsageError, match="was changed after an earlier run had answered it"):
        files.run(FakeWorker(), options=options)
    image.write_bytes(RED)
    os.utime(image, (1, 1))
    assert files.run(FakeWorker(), options=options).is_complete


def test_the_check_of_the_input_finds_images(options: CallOptions, tmp_path: Path) -> None:
    for lines, wanted in (
        ([{"prompt": "Hi"}], False),
        ([{"prompt": "Hi"}, {"prompt": "Which?", "images": ["red.png"]}], True),
        ([{"messages": [message(data_url(RED))]}], True),
    ):
        assert check_input(Files(tmp_path, lines).source, options, lambda count: None) is wanted
