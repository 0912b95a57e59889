"""Tests that tokens are split into thinking and answer: a control token is a tag, but its spelled-out text is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.scripted import ScriptedTokenizer
from llmrun.engine.thinking import STYLES, ThinkingDecoder, pair_style, spelled

TOKENIZER = ScriptedTokenizer(more_control_tokens=("<think>", "</think>"))
PLAIN = ScriptedTokenizer()
STYLE = pair_style("<think>", "</think>")


def decoded(tokenizer: ScriptedTokenizer, tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[str, str]:
    decoder = ThinkingDecoder(stop, spelled(STYLE, tokenizer))
    thought = answer = ""
    for token in tokens:
        split = decoder.feed(token, tokenizer.token_bytes(token))
        if split.unopened:
            thought, answer = answer, ""
        thought, answer = thought + split.thought, answer + split.answer
        if decoder.stopped_by:
            return thought, answer
    split = decoder.finish()
    return thought + split.thought, answer + split.answer


def ids(tokenizer: ScriptedTokenizer, text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special=False, parse_special=True).tolist()
    return tokens


def test_letters_that_spell_a_control_token_are_text() -> None:
    typed: list[int] = TOKENIZER.encode("<think>Yes.", add_special=False, parse_special=False).tolist()
    assert decoded(TOKENIZER, typed) == ("", "<think>Yes.")
    assert decoded(TOKENIZER, ids(TOKENIZER, "<think>hm</think>Yes.")) == ("hm", "Yes.")
    assert decoded(PLAIN, ids(PLAIN, "<think>hm</think>Yes.")) == ("hm", "Yes.")


def test_every_style_in_a_vocabulary_of_its_own_tags() -> None:
    for style in STYLES:
        controls = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|open|>", "<|close|>", "<|sep|>", "<think>")
        tokenizer = ScriptedTokenizer(more_control_tokens=controls)
        decoder = ThinkingDecoder((), spelled(style, tokenizer))
        tokens = ids(tokenizer, f"{style.opening}hm, it is{style.ending}Yes.")
        splits = [decoder.feed(token, tokenizer.token_bytes(token)) for token in tokens]
        splits.append(decoder.finish())
        assert "".join(split.thought for split in splits) == "hm, it is", style
        assert "".join(split.answer for split in splits) == "Yes.", style


def test_characters_of_several_tokens_on_both_sides() -> None:
    assert decoded(TOKENIZER, ids(TOKENIZER, "<think>🙂</think>日本")) == ("🙂", "日本")
    cut = [*ids(TOKENIZER, "<think>"), 0xF0, 0x9F, *ids(TOKENIZER, "</think>"), 0xE6]
    assert decoded(TOKENIZER, cut) == ("\ufffd", "\ufffd")


@given(st.text(alphabet="ab\n ", max_size=8), st.text(alphabet="ab\n <>", max_size=8))
def test_stop_strings_end_the_answer_where_they_would_without_any_thinking(thought: str, answer: str) -> None:
    stop = ("ab", "b\n")
    text = f"<think>{thought}</think>{answer}"
    alone = decoded(PLAIN, ids(PLAIN, answer.lstrip()), stop)
    assert decoded(TOKENIZER, ids(TOKENIZER, text), stop) == (thought.strip(), alone[1])
