"""Tests of images in the requests of all APIs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from llmrun.engine.requests import IMAGE_MARKER, ChatPrompt, ModelFacts, TextPrompt
from llmrun.serving.protocol.anthropic.requests import parse_count, parse_message
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.ollama.requests import only_unloads_generate, parse_generate, parse_ollama_chat
from llmrun.serving.protocol.openai.requests import parse_chat
from llmrun.serving.protocol.openai_responses.requests import parse_response
from llmrun.serving.protocol.parsed import Parsed
from tests.support.protocol.answers import FACTS, SEED, llama_completion, sent
from tests.support.serving.pictures import BLUE, RED, base64_of, bomb, data_url, part_of, png

SEEING = structs.replace(FACTS, sees_images=True)
JPEG = b"\xff\xd8\xff\xc0\0\x0b\x08\0\x01\0\x01\x01\x01\x11\0\xff\xda\0\x08\x01\x01\0\0\x3f\0pixels\xff\xd9"
NOTE = "[A file was left out, because this model can only read text.]"


def chat(*content: Any, facts: ModelFacts = SEEING) -> Parsed:
    return parse_chat(sent({"messages": [{"role": "user", "content": [*content]}]}), facts, SEED)


def tool_chat(content: Any, facts: ModelFacts = SEEING) -> Parsed:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer, result = {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a"}
    messages = [{"role": "user", "content": "Hi"}, answer, {**result, "content": content}]
    return parse_chat(sent({"messages": messages}), facts, SEED)


def response(*items: Any, facts: ModelFacts = SEEING) -> Parsed:
    return parse_response(sent({"input": [*items]}), facts, SEED)


def message(*content: Any, facts: ModelFacts = SEEING) -> Parsed:
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": [*content]}]}
    return parse_message(sent(body), facts, SEED)


def ollama_chat(*messages: Any, facts: ModelFacts = SEEING) -> Parsed:
    return parse_ollama_chat(sent({"messages": [*messages]}), facts, SEED)


def ollama_text(facts: ModelFacts = SEEING, /, **fields: Any) -> Parsed:
    return parse_generate(sent(fields), facts, SEED)


def image_url(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": words}


def block(source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def in_base64(file: bytes) -> dict[str, str]:
    return {"type": "base64", "media_type": "image/png", "data": base64_of(file)}


def prompt_of(parsed: Parsed) -> ChatPrompt:
    prompt = parsed.request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def last(parsed: Parsed) -> Any:
    """Return the content of the last message."""
    return prompt_of(parsed).messages[-1]["content"]


def refused(parse: Callable[[], object]) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        parse()
    assert caught.value.hint
    return caught.value


def test_chats_keep_the_order_of_their_parts() -> None:
    parsed = chat(text("One:"), image_url(data_url(RED)), text("Two:"), text("here"), image_url(data_url(BLUE)))
    assert last(parsed) == [text("One:"), part_of(RED), text("Two:\nhere"), part_of(BLUE)]
    assert {*prompt_of(parsed).images.values()} == {RED, BLUE}
    assert parsed.ignored == ()


def test_messages_without_images_stay_text() -> None:
    assert last(chat(text("One"), text("two"))) == "One\ntwo"


@pytest.mark.parametrize(
    "part",
    [
        image_url(data_url(RED)),
        image_url(data_url(RED, "image/jpeg")),  # the bytes decide
        image_url(data_url(RED).replace("data:image/png", "DATA:")),
        image_url(base64_of(RED)),  # llama-server
        {"type": "image_url", "image_url": data_url(RED)},  # Ollama's /v1
        {"type": "image_url", "image_url": base64_of(RED).rstrip("=")},
        image_url(base64_of(RED).replace("+", "-").replace("/", "_")),
        image_url("data:image/png;base64,\n" + "\n".join(base64_of(RED)[at : at + 76] for at in range(0, 999, 76))),
        image_url(data_url(RED).replace("+", "%2B").replace("=", "%3D")),
        {"type": "input_image", "image_url": data_url(RED)},
        {"type": "input_image", "image_url": data_url(RED), "file_id": None, "detail": "auto"},
    ],
    ids=range(11),
)
def test_every_form_of_base64_is_read(part: dict[str, Any]) -> None:
    """llama.cpp#14237, #22901 and #14615 report valid forms that end in an error."""
    assert last(chat(part, text("What?"))) == [part_of(RED), text("What?")]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("auto", {}), ("low", {"detail": "low"}), *((each, {"detail": "high"}) for each in ("high", "original"))],
)
def test_detail_is_passed_on(given: str, wanted: dict[str, str]) -> None:
    assert last(chat(image_url(data_url(RED), detail=given))) == [part_of(RED, **wanted)]
    assert last(
        response({"role": "user", "content": [{"type": "input_image", "image_url": data_url(RED), "detail": given}]})
    ) == [part_of(RED, **wanted)]


def test_equal_images_are_sent_once() -> None:
    prompt = prompt_of(chat(image_url(data_url(RED)), image_url(base64_of(RED))))
    assert (len(prompt.messages[0]["content"]), [*prompt.images.values()]) == (2, [RED])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("http://127.0.0.1:1/cat.png", "fetches no URLs"),
        ("HTTPS://example.com/cat.png", "fetches no URLs"),
        (" https://example.com/cat.png", "fetches no URLs"),
        ("file:///etc/passwd", "opens no files"),
        ("ftp://example.com/cat.png", "ftp: is not a data URL"),
        ("C:\\cat.png", "c: is not a data URL"),
        ("/etc/passwd", "not an image"),  # this path is valid base64
        ("../cat.png", "not valid base64"),
        ("cat.png", "not valid base64"),
        ("data:image/png,abc", "no base64"),
        ("data:image/png;base64,ab!c", "not valid base64"),
        ("data:image/png;base64,", "empty"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "SVG files are not supported"),
        (data_url(png()[:-4]), "truncated"),
        (data_url(bomb()), "too large: 60,000 x 60,000 pixels"),
    ],
)
def test_everything_but_an_image_is_refused(source: str, words: str) -> None:
    """URLs and paths from clients: vllm-project/vllm#57157, llama.cpp#25002, InternLM/lmdeploy#4761.

    Decompression bombs, refused by their headers: vllm#47010, sglang#28588.
    """
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: chat(text("Hi"), image_url(source)), "messages[0].content[1].image_url.url"),
        (
            lambda: response({"role": "user", "content": [{"type": "input_image", "image_url": source}]}),
            "input[0].content[0].image_url",
        ),
        (
            lambda: message(block({"type": "base64", "media_type": "image/png", "data": source})),
            "messages[0].content[0].source.data",
        ),
        (
            lambda: ollama_chat({"role": "user", "content": "Hi", "images": [base64_of(RED), source]}),
            "messages[0].images[1]",
        ),
        (lambda: ollama_text(prompt="Hi", images=[source]), "images[0]"),
        (
            lambda: llama_completion(SEEING, prompt={"prompt_string": IMAGE_MARKER, "multimodal_data": [source]}),
            "prompt.multimodal_data[0]",
        ),
    ]
    for parse, place in cases:
        with pytest.raises(InvalidField) as caught:
            parse()
        error = caught.value
        assert (error.param, words in str(error)) == (place, True)
        assert len(f"{error} {error.hint}") < 300


@pytest.mark.parametrize("source", ["AB " * 100_000, "data:;base64," + "%41B" * 100_000], ids=["spaces", "escapes"])
def test_hostile_base64_takes_little_memory(source: str) -> None:
    tracemalloc.start()
    try:
        refused(lambda: chat(image_url(source)))
        assert tracemalloc.get_traced_memory()[1] < 8 * len(source)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [{"type": "url", "url": "https://example.com/cat.png"}, {"type": "file", "file_id": "file_1"}],
    ids=["url", "file"],
)
def test_sources_elsewhere_are_refused(source: dict[str, str]) -> None:
    assert refused(lambda: message(block(source))).param == "messages[0].content[0].source.type"


def test_stored_files_are_refused() -> None:
    part = {"type": "input_image", "file_id": "file_1"}
    assert refused(lambda: response({"role": "user", "content": [part]})).param == "input[0].content[0].file_id"


def test_most_images_is_a_limit_for_all_messages() -> None:
    turns: list[Any] = [
        {"role": "user", "content": [image_url(data_url(RED))]},
        {"role": "assistant", "content": "Red."},
    ] * 33
    assert parse_chat(sent({"messages": turns[:63]}), SEEING, SEED)
    error = refused(lambda: parse_chat(sent({"messages": turns[:65]}), SEEING, SEED))
    assert (error.param, "the limit is 32 per request" in str(error)) == ("messages[64].content[0].image_url.url", True)


def test_models_without_a_projector_refuse_images() -> None:
    for parse in (
        lambda: chat(image_url(data_url(RED)), facts=FACTS),
        lambda: message(block(in_base64(RED)), facts=FACTS),
        lambda: ollama_chat({"role": "user", "content": "Hi", "images": [base64_of(RED)]}, facts=FACTS),
        lambda: ollama_text(FACTS, prompt="Hi", images=[base64_of(RED)]),
        lambda: response(
            {"role": "user", "content": [{"type": "input_image", "image_url": data_url(RED)}]}, facts=FACTS
        ),
        lambda: llama_completion(FACTS, prompt={"prompt_string": IMAGE_MARKER, "multimodal_data": [base64_of(RED)]}),
    ):
        error = refused(parse)
        assert (error.code, "--mmproj" in error.hint) == ("unsupported_parameter", True)


def test_images_in_tool_results_reach_the_model() -> None:
    """anomalyco/opencode#26780 reports images in tool results that are lost."""
    wanted = [text("dot.png"), part_of(RED)]
    assert last(tool_chat([text("dot.png"), image_url(data_url(RED))])) == wanted
    image, called = (
        {"type": "input_image", "image_url": data_url(RED)},
        {"call_id": "a", "name": "look", "arguments": "{}"},
    )
    items: list[Any] = [{"role": "user", "content": "Hi"}, {"type": "function_call", **called}]
    output = {"type": "function_call_output", "call_id": "a", "output": [text("dot.png", "input_text"), image]}
    parsed = response(*items, output)
    assert (last(parsed), prompt_of(parsed).messages[-1]["role"], parsed.ignored) == (wanted, "tool", ())
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("dot.png"), block(in_base64(RED))]}
    assert last(message(result)) == wanted
    assert last(message({**result, "content": [block(in_base64(JPEG))]})) == [part_of(JPEG)]
    assert last(message({**result, "is_error": True})) == [text("Error: dot.png"), part_of(RED)]
    assert last(message({**result, "is_error": True, "content": [block(in_base64(RED))]})) == [
        text("Error:"),
        part_of(RED),
    ]
    tool = {"role": "tool", "tool_name": "look", "content": "dot.png", "images": [base64_of(RED)]}
    assert last(ollama_chat({"role": "user", "content": "Hi"}, tool)) == [part_of(RED), text("dot.png")]


def test_text_models_get_notes_for_images_in_tool_results() -> None:
    parsed = tool_chat([text("dot.png"), image_url("https://example.com/cat.png")], FACTS)
    assert (last(parsed), parsed.ignored) == (f"dot.png\n{NOTE}", ("messages[].content[].image_url",))
    tool = {"role": "tool", "tool_name": "look", "content": "dot.png", "images": [base64_of(RED)]}
    parsed = ollama_chat({"role": "user", "content": "Hi"}, tool, facts=FACTS)
    assert (last(parsed), parsed.ignored) == (f"{NOTE}\ndot.png", ("messages[].images",))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (data_url(png()[:-4]), "the image file is truncated (download or save the image again)"),
        (data_url(JPEG[:-2]), "the image file is truncated (download or save the image again)"),
        (data_url(b"\0\0\0\x18ftypheic"), "HEIC files are not supported (convert it to JPEG, for"),
        (data_url(bomb()), "the image is too large: 60,000 x 60,000 pixels"),
        ("https://example.com/cat.png", "this server fetches no URLs."),
        ("%", "not valid base64."),
    ],
)
def test_seeing_models_get_notes_for_unusable_images(source: str, words: str) -> None:
    """An error would end an agent's conversation, because all later requests contain the image again."""
    parsed = tool_chat([text("dot.png"), image_url(source)])
    assert last(parsed).startswith(f"dot.png\n[An image was left out: {words}")
    assert parsed.ignored == ("messages[].content[].image_url",)
    items: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
    ]
    image = {"type": "input_image", "image_url": source}
    parsed = response(*items, {"type": "function_call_output", "call_id": "a", "output": [image]})
    assert last(parsed).startswith(f"[An image was left out: {words}")
    data = source.removeprefix("data:image/png;base64,")
    result = {"type": "tool_result", "tool_use_id": "a"}
    parsed = message({**result, "content": [block({"type": "base64", "media_type": "image/png", "data": data})]})
    assert last(parsed).startswith(f"[An image was left out: {words}")
    tool = {"role": "tool", "tool_name": "look", "images": [source, base64_of(RED)]}
    parsed = ollama_chat({"role": "user", "content": "Hi"}, tool)
    assert last(parsed)[0]["text"].startswith(f"[An image was left out: {words}")
    assert last(parsed)[1:] == [part_of(RED)]


@pytest.mark.parametrize("source", [{"type": "url", "url": "https://example.com/cat.png"}, {"type": "file"}, {}, None])
def test_notes_replace_images_elsewhere_in_results(source: Any) -> None:
    parsed = message({"type": "tool_result", "tool_use_id": "a", "content": [block(source)]})
    assert last(parsed).startswith("[An image was left out: ")


def test_oldest_results_beyond_the_limit_become_notes() -> None:
    results = [{"type": "tool_result", "tool_use_id": f"{n}", "content": [block(in_base64(RED))]} for n in range(33)]
    note = "[An image was left out: only the last images can be seen, at most 32.]"
    assert [each["content"] for each in prompt_of(message(*results[:32])).messages] == [[part_of(RED)]] * 32
    assert [each["content"] for each in prompt_of(message(*results)).messages] == [note] * 8 + [[part_of(RED)]] * 25
    asked = prompt_of(message(*results[:1], *[block(in_base64(BLUE))] * 32)).messages
    assert (asked[0]["content"], len(asked[1]["content"])) == (note, 32)


def test_models_that_read_images_get_notes_for_documents() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "document", "source": {}}, block(in_base64(RED))],
    }
    parsed = message(result)
    assert last(parsed) == [text(NOTE.replace("text", "text and images")), part_of(RED)]
    assert parsed.ignored == ("messages[].content[].content[].source",)


def test_turns_of_one_role_are_merged_with_their_images() -> None:
    user = [{"role": "user", "content": each} for each in ("One:", [block(in_base64(RED))], [text("Two:"), text("?")])]
    parsed = parse_count(
        sent({"model": "tiny", "messages": [*user, {"role": "system", "content": "Be nice."}]}), SEEING
    )
    reminder = "<system-reminder>\nBe nice.\n</system-reminder>"
    assert last(parsed) == [text("One:"), part_of(RED), text(f"Two:\n?\n{reminder}")]
    assert prompt_of(parsed).images == {part_of(RED)["image"]: RED}


def test_images_of_ollama_precede_the_text() -> None:
    images = [base64_of(RED), base64_of(BLUE)]
    wanted = [part_of(RED), part_of(BLUE), text("What?")]
    assert last(ollama_chat({"role": "user", "content": "What?", "images": images})) == wanted
    assert last(ollama_text(prompt="What?", images=images, system="Be brief.")) == wanted
    assert last(ollama_text(images=images)) == wanted[:2]
    assert not only_unloads_generate({"images": images, "keep_alive": 0})


@pytest.mark.parametrize("fields", [{"raw": True}, {"suffix": "there"}], ids=["raw", "suffix"])
def test_images_need_a_conversation_in_ollama(fields: dict[str, Any]) -> None:
    error = refused(lambda: ollama_text(prompt="Hi", **fields, images=[base64_of(RED)]))
    assert (error.param, "images are not supported in" in str(error)) == ("images", True)


def test_only_some_roles_have_images_in_ollama() -> None:
    for role in ("system", "assistant"):
        error = refused(lambda: ollama_chat({"role": role, "content": "Hi", "images": [base64_of(RED)]}))  # noqa: B023
        assert error.param == "messages[0].images"
        assert ollama_chat({"role": "user", "content": "Hi"}, {"role": role, "content": "Hi", "images": []})


def test_completions_of_llama_server_have_images() -> None:
    images = [base64_of(RED), base64_of(BLUE)]
    text_of_prompt = f"A {IMAGE_MARKER} and {IMAGE_MARKER}:"
    prompt = {"prompt_string": text_of_prompt, "multimodal_data": images}
    wanted = TextPrompt(text_of_prompt, (RED, BLUE))
    assert llama_completion(SEEING, prompt=prompt).request.prompt == wanted
    several = llama_completion(SEEING, prompt=["Hi", prompt, [1, "a"]])
    assert [each.prompt for each in several.requests][:2] == [TextPrompt("Hi"), wanted]
    for fields in ("prompt_string", "prompt_string multimodal_data"):
        without = {name: "Hi" if name == "prompt_string" else [] for name in fields.split()}
        assert llama_completion(prompt=without).request.prompt == TextPrompt("Hi")
    error = refused(lambda: llama_completion(SEEING, prompt={**prompt, "multimodal_data": images[:1]}))
    assert str(error) == "prompt.multimodal_data: 1 image, but prompt_string has 2 markers"
    error = refused(lambda: llama_completion(SEEING, image_data=[{"id": 1, "data": images[0]}]))
    assert str(error) == "image_data: not supported"
    assert llama_completion(image_data=[])


def test_markers_in_messages_stay_text() -> None:
    """llama.cpp#29118, #27249 and #21022 report markers in messages that move or inject images."""
    content = [text(f"What is {IMAGE_MARKER}?"), image_url(data_url(RED))]
    assert last(chat(*content)) == [text(f"What is {IMAGE_MARKER}?"), part_of(RED)]
