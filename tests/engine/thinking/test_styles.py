"""Tests of a model's thinking tags: those in the table match those found by probing the real templates of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from llmrun.backends.scripted import ScriptedTokenizer
from llmrun.engine import prompts as prompts_module
from llmrun.engine.prompts import ModelThinking
from llmrun.engine.requests import ChatPrompt
from llmrun.engine.templates.chat_template import ChatTemplate
from llmrun.engine.thinking import STYLES, ThinkingSplitter, ThinkingStyle, pair_style, recognised_style
from tests.support.models.downloads import llama_cpp_source
from tests.support.templates.template_runs import PROCESS


def known_style(
    source: str, tokenizer: ScriptedTokenizer, known_pair: tuple[str, ...] | None = None
) -> ThinkingStyle | None:
    return recognised_style(source, tokenizer, known_pair, lambda: PROCESS.abilities(source).thinking_tags)


TEMPLATES = sorted((llama_cpp_source() / "vendor/llama.cpp/models/templates").glob("*.jinja"))
THINKING = [path for path in TEMPLATES if known_style(path.read_text(), ScriptedTokenizer())]
names = pytest.mark.parametrize("path", THINKING, ids=lambda path: path.stem)
pytestmark = pytest.mark.push


def thinking(source: str) -> ModelThinking:
    return ModelThinking(ChatTemplate(source, "model", "t"), ScriptedTokenizer(), PROCESS)


def test_most_of_the_real_templates_are_of_models_that_think() -> None:
    assert len(THINKING) >= 40


@names
def test_the_table_says_what_the_template_does_when_it_is_tried(path: Path) -> None:
    source = path.read_text()
    style = known_style(source, ScriptedTokenizer())
    tags = PROCESS.abilities(source).thinking_tags
    assert style
    assert tags
    assert (style.opening, tags.closing) == (tags.opening, style.closing[0])
    around = (*style.headers, *style.closing, style.ending.strip())
    assert any(text.endswith(tags.answer_opening) for text in around)
    assert not tags.answer_closing or tags.answer_closing in style.trailers


@names
def test_a_prompt_that_asks_for_no_thinking_begins_none(path: Path) -> None:
    source = path.read_text()
    known = thinking(source)
    prompt = ChatPrompt([{"role": "user", "content": "Is it so?"}])
    rendered = ChatTemplate(source, "model", "t").render(known.asked(prompt, False), ScriptedTokenizer(), PROCESS)
    beginning = known.begun(rendered, False)
    assert not beginning.opened
    assert not beginning.may_close


def test_a_word_in_the_question_switches_thinking_off() -> None:
    source = (TEMPLATES[0].parent / "NVIDIA-Nemotron-Nano-v2.jinja").read_text()
    known, template, tokens = thinking(source), ChatTemplate(source, "model", "t"), ScriptedTokenizer()
    messages = [{"role": "user", "content": "Is it so?"}, {"role": "assistant", "content": "No."}]
    messages += [{"role": "user", "content": "Why?"}]
    prompts = {on: template.render(known.asked(ChatPrompt(messages), on), tokens, PROCESS) for on in (None, False)}
    assert known.has_switch
    assert prompts[None].endswith("User\nWhy?\n<SPECIAL_11>Assistant\n<think>\n")
    assert prompts[False] == prompts[None].removesuffix("<think>\n") + "<think></think>"
    assert known.begun(prompts[False], False).text == prompts[False]
    assert [message["content"] for message in messages] == ["Is it so?", "No.", "Why?"]


def test_the_word_is_added_only_to_plain_text() -> None:
    source = (TEMPLATES[0].parent / "NVIDIA-Nemotron-Nano-v2.jinja").read_text()
    parts = [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    system = [{"role": "system", "content": "Be brief."}]
    for messages in (parts, system):
        assert thinking(source).asked(ChatPrompt(messages), False).messages == messages


def test_a_model_that_thinks_only_if_asked_begins_none_by_default() -> None:
    source = (
        "{% for message in messages %}{{ message.content }}{{ message.reasoning_content }}{% endfor %}"
        "{% if thinking %}Write your thoughts between <think> and </think>.{% endif %}"
    )
    known = thinking(source)
    assert known.has_switch
    assert [known.begun("Why?", on).may_close for on in (None, False, True)] == [False, False, True]
    assert known.begun("Why?", None, {"thinking": 1}).may_close


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.opening)
def test_an_ending_ends_and_begins_no_thinking(style: ThinkingStyle) -> None:
    assert style.ending
    assert any(text in style.ending for text in style.closing)
    assert style.opening not in style.ending


@pytest.mark.parametrize(
    ("mark", "tag"),
    [("<answer></answer>", "answer"), ("<|extra_0|>", "answer"), ("<response></response>", "response")],
)
def test_tags_around_answers_are_removed(mark: str, tag: str) -> None:
    """The templates are those of Hunyuan, with and without its tags, and of ERNIE."""
    source = f"{{{{ messages[0].content }}}}{mark}{{% if enable_thinking is false %}}<think>\n\n</think>{{% endif %}}"
    style = known_style(source, ScriptedTokenizer())
    assert style
    for thought in ("<think>\nHm.\n</think>\n", ""):
        splitter = ThinkingSplitter(replace(style, anywhere=False))
        split, rest = splitter.feed(f"{thought}<{tag}>\nYes.\n</{tag}>"), splitter.finish()
        assert split.answer + rest.answer == "Yes."
        assert split.thought + rest.thought == ("Hm." if thought else "")


def test_two_tags_alone_make_a_style() -> None:
    assert pair_style("<think>", "</think>") is STYLES[-1]
    style = pair_style("<a>", "<b>")
    assert (style.opening, style.closing, style.blank, style.ending) == ("<a>", ("<b>",), "", "<b>")


def test_a_vocabulary_may_give_the_tags_away() -> None:
    tokens = ScriptedTokenizer(more_control_tokens=("[THINK]", "[/THINK]"))
    style = known_style("{{ messages[0].content }}", tokens)
    assert style
    assert style.opening == "[THINK]"
    assert known_style("{{ messages[0].content }}", ScriptedTokenizer()) is None
    assert known_style("{{ messages[0].content }}", tokens, ()) is None  # known not to think


def test_where_the_vocabulary_alone_speaks_of_thinking_the_prompt_says_nothing_of_it() -> None:
    tokens = ScriptedTokenizer(more_control_tokens=("<think>", "</think>"))
    template = ChatTemplate("{{ messages[0].content }}", "model", "t")
    beginning = ModelThinking(template, tokens, PROCESS).begun("Why?", False)
    assert (beginning.text, beginning.may_close) == ("Why?", False)


def test_a_template_is_not_tried_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(prompts_module, "recognised_style", lambda source, *_: tried.append(source))
    known = thinking("{{ messages[0].content }}")
    assert tried == []
    known.prepare()
    known.prepare()
    assert (known.style, tried) == (None, ["{{ messages[0].content }}"])
