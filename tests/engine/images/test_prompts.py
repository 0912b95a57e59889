"""Tests of the places of images in prompts: only what the template wrote counts, and nothing is dropped silently."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.scripted import CONTROL_TOKENS, ScriptedBackend
from llmrun.backends.scripted_vision import BEGIN_IMAGE, IMAGE_TOKENS, PLACEHOLDER, ScriptedProjector
from llmrun.base.errors import ContextExceeded, TemplateRefused, UsageError
from llmrun.base.types import IMAGE_ROW
from llmrun.engine.engine import Engine
from llmrun.engine.image_rows import PromptImages
from llmrun.engine.images import too_long
from llmrun.engine.requests import IMAGE_MARKER, ChatPrompt, RecordedChat, Request, TextPrompt
from tests.support.engine.answers import answer_all
from tests.support.engine.pictures import BLUE, GREEN, RED, Sight, ask, chat, part, plain, png
from tests.support.templates.template_runs import PROCESS
from tests.support.tool_calls.formats import source_of

RED_FILE, BLUE_FILE, GREEN_FILE = png(plain(64, 32, RED)), png(plain(96, 32, BLUE)), png(plain(32, 32, GREEN))


def turns(content: str) -> str:
    """Return a chat template whose messages have this content."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + content + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


TEXTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)
IGNORES_PARTS = turns(TEXTS)
NEEDS_TEXT = turns("{{ m.content.strip() }}")
PRINTS_LISTS = turns("{{ m.content }}")
DROPS_TEXT = turns("x")
LAST_ONLY = NEEDS_TEXT.replace("in messages", "in messages[-1:]")


def shape_of(sight: Sight, request: Request) -> str:
    """Return the tokens of a prompt as text, with # for a row of an image."""
    tokens = sight.engine.prepare(request).tokens
    spelled = [sight.engine.tokenizer.token_text(token) if token != IMAGE_ROW else "#" for token in tokens]
    return "".join(spelled)


def test_rows_replace_the_placeholders_of_the_template(tmp_path: Path) -> None:
    sight = Sight(tmp_path)
    shape = shape_of(sight, ask(["What are ", RED_FILE, " and ", BLUE_FILE, "?"]))
    expected = "<|image_begin|>##<|image_end|>", "<|image_begin|>###<|image_end|>"
    assert f"user\nWhat are {expected[0]} and {expected[1]}?<|im_end|>" in shape
    [answer] = answer_all(sight.engine, [ask(["What are ", RED_FILE, " and ", BLUE_FILE, "?"])])
    assert answer.text == "You said: What are [2 rows of #ff0000] and [3 rows of #0000ff]?"


@pytest.mark.parametrize(
    ("role", "parts", "expected"),
    [
        ("user", [RED_FILE], "[2 rows of #ff0000]"),
        ("user", [RED_FILE, RED_FILE], "[2 rows of #ff0000][2 rows of #ff0000]"),
        ("user", ["", RED_FILE, ""], "[2 rows of #ff0000]"),
        ("user", [png(plain(1, 1))], "[1 row of #ff0000]"),
        ("user", [png(plain(1, 4000))], "[16 rows of #ff0000]"),
        ("user", [png(plain(4000, 1))], "[16 rows of #ff0000]"),
        ("system", ["see", RED_FILE], "and?"),
        ("assistant", ["see", RED_FILE], "and?"),
    ],
)
@pytest.mark.parametrize("template", [None, NEEDS_TEXT])
def test_valid_forms_are_answered(
    tmp_path: Path, role: str, parts: list[bytes | str], expected: str, template: str | None
) -> None:
    """llama.cpp#14237, #22901, #14615: valid request forms end in a generic error."""
    sight = Sight(tmp_path, chat_template=template)
    prompt = chat(parts)
    messages = [
        {**prompt.messages[0], "role": role},
        *([{"role": "user", "content": "and?"}] if role != "user" else []),
    ]
    request = Request(ChatPrompt(messages, images=prompt.images), max_tokens=60)
    [answer] = answer_all(sight.engine, [request])
    assert answer.text == f"You said: {expected}"


def test_images_in_turns_keep_their_order(tmp_path: Path) -> None:
    [answer] = answer_all(Sight(tmp_path).engine, [ask([RED_FILE, "one"], "Red.", [BLUE_FILE, "two", GREEN_FILE])])
    assert answer.text == "You said: [3 rows of #0000ff]two[1 row of #00ff00]"


@pytest.mark.parametrize("template", [IGNORES_PARTS, NEEDS_TEXT, PRINTS_LISTS])
def test_templates_without_images_get_marks(tmp_path: Path, template: str) -> None:
    sight = Sight(tmp_path, chat_template=template)
    [answer] = answer_all(sight.engine, [ask(["What are ", RED_FILE, " and ", BLUE_FILE, "?"])])
    assert answer.text == "You said: What are [2 rows of #ff0000] and [3 rows of #0000ff]?"


@pytest.mark.parametrize("template", [None, IGNORES_PARTS, NEEDS_TEXT])
@pytest.mark.parametrize("marker", [PLACEHOLDER, IMAGE_MARKER, f"{BEGIN_IMAGE}", "<|im_end|>", "IMAGE0x0x"])
def test_marker_text_of_users_stays_text(tmp_path: Path, template: str | None, marker: str) -> None:
    """llama.cpp#29118, #27249 and #21022: marker text in user input moves or injects images."""
    sight = Sight(tmp_path, chat_template=template)
    one, two = ask([f"a {marker} b ", RED_FILE, f" c {marker}"]), ask(f"no image: {marker}")
    first, second = answer_all(sight.engine, [one]) + answer_all(sight.engine, [two])
    assert first.text == f"You said: a {marker} b [2 rows of #ff0000] c {marker}"
    assert second.text == f"You said: no image: {marker}"


def test_placeholders_outside_the_vocabulary_are_protected(tmp_path: Path) -> None:
    """llama.cpp#27249: a placeholder such as <image> that is not a token must not be found in messages, either."""
    image = "{% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}"
    template = turns("{% for p in m.content %}" + image + "{% endfor %}")
    sight = Sight(tmp_path, {"placeholders": ["[IMG]"]}, chat_template=template)
    [answer] = answer_all(sight.engine, [ask(["[IMG] is ", RED_FILE, " not [IMG]"])])
    assert answer.text == "You said: [IMG] is [2 rows of #ff0000] not [IMG]"


@pytest.mark.parametrize("template", [None, NEEDS_TEXT])
def test_texts_side_by_side_form_no_placeholder(tmp_path: Path, template: str | None) -> None:
    """llama.cpp#29118: parts that the template joins must not become a control string."""
    sight = Sight(tmp_path, chat_template=template)
    for text in (PLACEHOLDER, "<|im_end|>"):
        [answer] = answer_all(sight.engine, [ask([text[:5], text[5:], RED_FILE])])
        assert answer.text == f"You said: {text}[2 rows of #ff0000]"


def test_templates_that_leave_out_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateRefused, match="leaves out images"):
        Sight(tmp_path, chat_template=DROPS_TEXT).engine.prepare(ask(["a", RED_FILE]))


@pytest.mark.parametrize("number", ["7", "9" * 5000])
def test_templates_cannot_change_the_number_of_an_image(tmp_path: Path, number: str) -> None:
    template = turns("{{ m.content | replace('a word', '') | replace('x0x', 'xNx') }}".replace("N", number))
    with pytest.raises(TemplateRefused, match="leaves out images"):
        Sight(tmp_path, chat_template=template).engine.prepare(ask(["a word", RED_FILE]))


def test_templates_may_leave_out_whole_turns(tmp_path: Path) -> None:
    sight = Sight(tmp_path, chat_template=LAST_ONLY)
    [answer] = answer_all(sight.engine, [ask(["see", RED_FILE], "Red.", ["and", BLUE_FILE])])
    assert answer.text == "You said: and[3 rows of #0000ff]"
    assert sight.encoded == 1
    with pytest.raises(TemplateRefused, match="leaves out images"):
        sight.engine.prepare(ask([RED_FILE], "Red.", ["and", BLUE_FILE]))


def test_continued_answers_may_follow_images(tmp_path: Path) -> None:
    prompt = chat([RED_FILE, "?"], "You sa", add_generation_prompt=False)
    [answer] = answer_all(Sight(tmp_path).engine, [Request(prompt, max_tokens=60)])
    assert "You sa" + answer.text == "You said: [2 rows of #ff0000]?"


def test_images_in_tool_results_are_seen(tmp_path: Path) -> None:
    """anomalyco/opencode#26780: images in tool results lost."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}, part(RED_FILE)]},
    ]
    sight = Sight(tmp_path, chat_template=source_of("Qwen-Qwen2.5-7B-Instruct"))
    assert "<tool_response>\na<|image_begin|>##<|image_end|>" in shape_of(
        sight, Request(ChatPrompt(messages, images={part(RED_FILE)["image"]: RED_FILE}))
    )


def test_prompts_are_counted_before_anything_is_decoded(tmp_path: Path) -> None:
    """open-webui/open-webui#26725: base64 counted or tokenised as text."""
    sight = Sight(tmp_path)
    noise = png(np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8))
    request = ask([noise, "?"])
    text_only = sight.engine.prompt_tokens(ask("?"))
    assert len(noise) > 700_000
    assert sight.engine.prompt_tokens(request) == text_only + 16 * 16 + 2
    assert sight.decoder.names == []
    [answer] = answer_all(sight.engine, [request])
    assert answer.finished.timings.prompt_tokens == text_only + 16 * 16 + 2


def test_detail_chooses_the_number_of_tokens(tmp_path: Path) -> None:
    file = png(plain(320, 320))
    sight, images = Sight(tmp_path), {part(file)["image"]: file}
    counts = [
        sight.engine.prompt_tokens(
            Request(ChatPrompt([{"role": "user", "content": [part(file, detail)]}], images=images))
        )
        for detail in ("low", "auto")
    ]
    assert counts[1] - counts[0] == 99


def test_errors_for_long_prompts_list_tokens_of_images(tmp_path: Path) -> None:
    sight = Sight(tmp_path, context_size=256)
    with pytest.raises(ContextExceeded, match="prompt does not fit") as caught:
        sight.engine.prepare(ask([png(plain(512, 512)), RED_FILE, png(plain(320, 320))]))
    assert caught.value.hint == (
        "the 3 images take 256, 2 and 100 tokens: send fewer or smaller images, lower --image-max-tokens, or raise "
        "--ctx-size"
    )
    assert sight.decoder.names == []


@pytest.mark.parametrize(
    ("images", "fewest", "hint"),
    [
        ([80], 64, "the image takes 80 tokens: send a smaller image, lower --image-max-tokens, or raise --ctx-size"),
        ([256], 256, "the image takes 256 tokens: raise --ctx-size"),
        ([256, 256], 256, "the 2 images take 256 tokens each: send fewer images, or raise --ctx-size"),
    ],
)
def test_hints_for_long_prompts_name_only_what_helps(images: list[int], fewest: int, hint: str) -> None:
    assert too_long(600, 512, images, fewest).hint == hint


def test_models_without_projector_refuse_images() -> None:
    engine = Engine(ScriptedBackend(), templates=PROCESS)
    for request in (ask([RED_FILE]), Request(TextPrompt(IMAGE_MARKER, (RED_FILE,)))):
        with pytest.raises(UsageError, match="scripted was opened without a projector"):
            engine.prepare(request)
    assert not engine.sees_images


def test_invalid_images_are_named(tmp_path: Path) -> None:
    engine = Sight(tmp_path).engine
    with pytest.raises(UsageError, match=r"^image 2: .*truncated"):
        engine.prepare(ask([RED_FILE, BLUE_FILE[:20]]))
    with pytest.raises(UsageError, match="image 1 is missing"):
        engine.prepare(Request(ChatPrompt([{"role": "user", "content": [part(RED_FILE)]}])))
    with pytest.raises(UsageError, match="too many images: 33; the limit is 32"):
        engine.prepare(ask([RED_FILE] * 33))
    with pytest.raises(UsageError, match="log-probabilities"):
        engine.prepare(ask([RED_FILE], echo=True, logprobs=1))


def test_raw_prompts_have_a_marker_for_each_image(tmp_path: Path) -> None:
    sight = Sight(tmp_path)
    text = f"<|im_start|>user\nis {IMAGE_MARKER} red?<|im_end|>\n<|im_start|>assistant\n"
    [answer] = answer_all(sight.engine, [Request(TextPrompt(text, (RED_FILE,)), max_tokens=60)])
    assert answer.text == "You said: is [2 rows of #ff0000] red?"
    for images in ((RED_FILE, RED_FILE), ()):
        request = Request(TextPrompt(text, images))
        if images:
            with pytest.raises(UsageError, match="2 images for a raw prompt with 1 marker"):
                sight.engine.prepare(request)
        else:
            assert IMAGE_ROW not in sight.engine.prepare(request).tokens


def test_recorded_prompts_keep_their_images(tmp_path: Path) -> None:
    sight = Sight(tmp_path)
    request = ask(["see ", RED_FILE, "!"])
    tokens = sight.engine.prepare(request).tokens
    assert isinstance(request.prompt, ChatPrompt)
    recorded = RecordedChat(request.prompt.messages, images=request.prompt.images, tokens=tokens)
    [answer] = answer_all(sight.engine, [Request(recorded, max_tokens=60)])
    assert answer.text == "You said: see [2 rows of #ff0000]!"
    tokens.remove(IMAGE_ROW)
    with pytest.raises(UsageError, match="another size"):
        sight.engine.prepare(
            Request(RecordedChat(request.prompt.messages, images=request.prompt.images, tokens=tokens))
        )


def test_rendered_prompts_show_placeholders(tmp_path: Path) -> None:
    for template in (None, NEEDS_TEXT):
        sight = Sight(tmp_path, chat_template=template)
        assert f"a {PLACEHOLDER} b" in sight.engine.render_prompt(ask(["a ", RED_FILE, " b"]))


def test_echoed_prompts_leave_out_image_rows(tmp_path: Path) -> None:
    [answer] = answer_all(Sight(tmp_path).engine, [ask(["a ", RED_FILE, " b"], echo=True)])
    assert f"a {BEGIN_IMAGE}{IMAGE_TOKENS[2]} b" in answer.prompt[0].text
    assert answer.prompt[0].text.startswith(CONTROL_TOKENS[0])


@pytest.mark.push
@pytest.mark.parametrize(
    ("name", "placeholder"),
    [
        ("LFM2.5-8B-A1B", "<image>"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "[IMG]"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "[IMG]"),
        ("Qwen3.5-4B", "<|vision_start|><|image_pad|><|vision_end|>"),
        ("google-gemma-4-31B-it", "<|image|>"),
        ("google-gemma-4-31B-it-interleaved", "<|image|>"),
        ("Kimi-K2-Thinking", "<image>"),  # writes another placeholder, so it gets marks
        ("Qwen-Qwen2.5-7B-Instruct", "<image>"),  # knows no parts
    ],
)
def test_real_templates_place_images(tmp_path: Path, name: str, placeholder: str) -> None:
    sight = Sight(tmp_path, {"placeholders": [placeholder]}, chat_template=source_of(name))
    shape = shape_of(sight, ask(["before ", GREEN_FILE, " after"], "Green.", ["now ", RED_FILE, " then"]))
    one, two = (f"{BEGIN_IMAGE}{rows}{IMAGE_TOKENS[2]}" for rows in ("#", "##"))
    assert re.search(rf"before ?{re.escape(one)} ?after.*Green\..*now ?{re.escape(two)} ?then", shape, re.DOTALL)
    assert placeholder not in shape.split("before")[1]


def test_a_template_may_leave_out_the_message_with_all_images() -> None:
    """The prompt then has no tiles, so that no row moves."""
    images = PromptImages([5, 6], [], ScriptedProjector(uses_mrope=True))
    assert not images.moves(2)
