"""The tags with which model families mark their thinking, and the detection of a model's style."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.engine.templates.abilities import ThinkingTags
    from llmrun.model.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class ThinkingStyle:
    """The texts around a model's thinking. Whitespace next to one of these texts counts as part of it.

    opening   the tag that begins thinking, before the answer has started
    closing   the tags that end thinking; any one of them is enough
    headers   texts that may precede the answer and are not part of it
    trailers  texts that may follow the answer and are not part of it
    known_by  a template that contains all of these texts has this style; () means `opening` and `closing[0]`
    anywhere  True if every message has a header, so that the model may think again after it has started to answer
    ending    the text that the model itself would write to end its thinking and begin the answer
    blank     the text that the model would write between `opening` and `ending` if it did not think
    guessed   True if only the vocabulary suggests this style; in some families, all models have the tags, but few think
    """

    opening: str
    closing: tuple[str, ...]
    headers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    known_by: tuple[str, ...] = ()
    anywhere: bool = False
    ending: str = ""
    blank: str = ""
    guessed: bool = False

    @property
    def empty_block(self) -> str:
        """The empty thinking block that makes a model answer without thinking."""
        return self.opening + self.blank + self.ending


def pair_style(opening: str, closing: str) -> ThinkingStyle:
    """Return the style with these two tags: a known one, or else a plain pair of tags."""
    return next(
        (style for style in reversed(STYLES) if (style.opening, style.closing[0]) == (opening, closing)),
        ThinkingStyle(opening, (closing,), ending=closing),
    )


_HUNYUAN = ThinkingStyle(
    "<think>",
    ("</think>",),
    headers=("<answer>",),
    trailers=("\n</answer>", "</answer>"),
    known_by=("</think>", "<answer>", "</answer>"),
    ending="\n</think>\n<answer>\n",
    blank="\n",
)

STYLES = (
    # gpt-oss. Messages to tools keep their header, because it names the tool.
    ThinkingStyle(
        "<|channel|>analysis<|message|>",
        ("<|end|>", "<|channel|>final<|message|>"),
        headers=(
            "<|end|>",
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
        ),
        known_by=("<|channel|>analysis", "<|channel|>final"),
        anywhere=True,
        ending="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    ThinkingStyle(
        "<|open|>think<|sep|>",  # Kimi K3
        ("<|close|>think<|sep|>",),
        headers=("<|open|>response<|sep|>",),
        trailers=("<|close|>response<|sep|><|close|>message<|sep|>", "<|close|>response<|sep|>"),
        known_by=("<|open|>", "<|close|>", "<|sep|>", "'think' if thinking else 'response'"),
        ending="<|close|>think<|sep|><|open|>response<|sep|>",
    ),
    ThinkingStyle("<|channel>thought", ("<channel|>",), ending="<channel|>", blank="\n"),  # Gemma 4
    ThinkingStyle(
        "<|START_THINKING|>",  # Cohere
        ("<|END_THINKING|>",),
        headers=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        trailers=("<|END_RESPONSE|>", "<|END_TEXT|>"),
        ending="<|END_THINKING|>",
    ),
    ThinkingStyle("<|inner_prefix|>", ("<|inner_suffix|>",), ending="<|inner_suffix|>"),  # Apertus
    ThinkingStyle(
        "<|think|>",  # Solar
        ("<|end|>",),
        headers=("<|begin|>assistant", "<|content|>"),
        known_by=("<|think|>", "<|content|>", "<|begin|>"),
        ending="<|end|><|begin|>assistant<|content|>",
    ),
    ThinkingStyle("[THINK]", ("[/THINK]",), ending="[/THINK]"),  # Mistral
    ThinkingStyle("<seed:think>", ("</seed:think>",), ending="</seed:think>"),
    ThinkingStyle("<mm:think>", ("</mm:think>",), ending="</mm:think>"),  # MiniMax M3
    ThinkingStyle(
        "<thinking>",  # Apriel 1.5
        ("</thinking>",),
        headers=("[BEGIN FINAL RESPONSE]",),
        trailers=("[END FINAL RESPONSE]",),
        known_by=("<thinking>", "</thinking>", "[BEGIN FINAL RESPONSE]"),
        ending="</thinking>\n[BEGIN FINAL RESPONSE]\n",
    ),
    ThinkingStyle(
        "Here are my reasoning steps:",  # Apriel 1.6
        ("[BEGIN FINAL RESPONSE]",),
        ending="\n[BEGIN FINAL RESPONSE]\n",
    ),
    ThinkingStyle(
        "<think>",  # Granite 3, ERNIE 4.5
        ("</think>",),
        headers=("<response>",),
        trailers=("\n</response>", "</response>"),
        known_by=("<think>", "</think>", "<response>", "</response>"),
        ending="</think>",
    ),
    _HUNYUAN,
    replace(_HUNYUAN, known_by=("</think>", "<|extra_0|>")),  # A13B, whose template does not show the answer's tags
    # Qwen, DeepSeek, SmolLM, GLM, Nemotron, LFM and many others. Some templates contain only the closing tag.
    ThinkingStyle("<think>", ("</think>",), known_by=("</think>",), ending="\n</think>\n\n", blank="\n"),
)


def recognised_style(
    template: str | None,
    tokenizer: Tokenizer,
    known_pair: Sequence[str] | None,
    tried: Callable[[], ThinkingTags | None],
) -> ThinkingStyle | None:
    """Return the style in which a model marks its thinking, or None if it does not think or the style is unknown.

    The sources are tried in this order: the texts in the template, the tags found by probing the template (`tried`),
    `known_pair` (the two tags, or () if the model does not think), and pairs of tags that the vocabulary has as tokens.
    """
    for style in STYLES:
        if template and all(text in template for text in style.known_by or (style.opening, style.closing[0])):
            return style
    if template and _MENTIONS_THINKING.search(template) and (tags := tried()):
        return _style_of_tags(tags)
    if known_pair is not None:
        return pair_style(*known_pair) if known_pair else None
    for opening, closing in _PAIRS_OF_TOKENS:
        if _is_token(tokenizer, opening) and _is_token(tokenizer, closing):
            return replace(pair_style(opening, closing), guessed=True)
    return None


def _style_of_tags(tags: ThinkingTags) -> ThinkingStyle:
    return ThinkingStyle(
        tags.opening,
        (tags.closing,),
        headers=(tags.answer_opening,) if tags.answer_opening else (),
        trailers=(tags.answer_closing,) if tags.answer_closing else (),
        ending=tags.closing + tags.answer_opening,
    )


_MENTIONS_THINKING = re.compile(r"think|thought|reason", re.IGNORECASE)
_PAIRS_OF_TOKENS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text, add_special=False, parse_special=True).tolist()
    return len(ids) == 1 and tokenizer.token_text(ids[0]) == text
