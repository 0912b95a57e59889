"""Finds the tokens that end an answer. GGUF files name one or two of them; the others are recognized by their text.

The rule and the lists are llama.cpp's (`llama_vocab_is_eog`), so answers end at the same token as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Texts = tuple[str, ...]

# Tokens with these texts end an answer. They are control tokens even if the file says otherwise.
ENDING_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)

# If the file has these keys, the tokens that they name end an answer.
ENDING_KEYS = ("eot_token_id", "eom_token_id")

# Fill-in-the-middle tokens. Each entry has the keys that may name the token, without the prefix `tokenizer.ggml.`, and
# the texts that are tried if the file has none of these keys. All of them are control tokens. The padding, repository
# and file separator tokens also end an answer.
FILL_IN_MIDDLE: tuple[tuple[Texts, Texts], ...] = (
    (
        ("fim_pre_token_id", "prefix_token_id"),
        (
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ),
    ),
    (
        ("fim_suf_token_id", "suffix_token_id"),
        (
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ),
    ),
    (
        ("fim_mid_token_id", "middle_token_id"),
        (
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ),
    ),
)
FILL_IN_MIDDLE_ENDING: tuple[tuple[Texts, Texts], ...] = (
    (("fim_pad_token_id",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    (("fim_rep_token_id",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    (("fim_sep_token_id",), ("<|file_sep|>",)),
)

KNOWN_TEXTS = (
    *ENDING_TEXTS,
    "<|plamo:eos|>",
    *(text for _, texts in (*FILL_IN_MIDDLE, *FILL_IN_MIDDLE_ENDING) for text in texts),
)


def find_ending_tokens(
    known: Mapping[str, int], named: Mapping[str, int], eos_id: int | None
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids that end an answer and the ids that are control tokens because of their text.

    known  the ids of the KNOWN_TEXTS that are in the vocabulary
    named  the ids in the file's keys `tokenizer.ggml.*_token_id`, indexed by the part of the key after the last dot
    """
    control: set[int] = set()
    ending = {named[key] for key in ENDING_KEYS if key in named}
    for keys, texts in FILL_IN_MIDDLE:
        if not any(key in named for key in keys):
            control.update(_first_known(known, texts))
    for keys, texts in FILL_IN_MIDDLE_ENDING:
        by_key = [named[key] for key in keys if key in named]
        found = by_key or _first_known(known, texts)
        ending.update(found)
        if not by_key:
            control.update(found)
    spelled = {known[text] for text in ENDING_TEXTS if text in known}
    ending |= spelled
    control |= spelled
    if eos_id is not None:
        ending.add(eos_id)

    def ends(text: str) -> bool:
        return known.get(text) in ending

    # In vocabularies with these tokens, <|end|> ends one message of an answer, not the whole answer.
    if (ends("<|call|>") or ends("<|calls|>")) and (ends("<|return|>") or ends("<|flush|>")):
        ending.discard(known.get("<|end|>", -1))
    # In vocabularies with these tokens, </s> is an ordinary word.
    if "</s>" in known and (ends("<|tool_response>") or ends("<|plamo:eos|>")):
        ending.discard(known["</s>"])
        control.discard(known["</s>"])
    return frozenset(ending), frozenset(control)


def _first_known(known: Mapping[str, int], texts: Sequence[str]) -> list[int]:
    """Return a list with the id of the first text that is in the vocabulary, or an empty list."""
    return [known[text] for text in texts if text in known][:1]
