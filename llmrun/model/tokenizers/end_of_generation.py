"""Finds the tokens that end an answer. GGUF files name one or two of them; the others are recognized by their text.

The rule and the lists are llama.cpp's (`llama_vocab_is_eog`), so answers end at the same token as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmrun.model.tokenizers.fill_in_middle import ROLES, Found, Role

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

KNOWN_TEXTS = (*ENDING_TEXTS, "<|plamo:eos|>", *(text for role in ROLES for text in role.texts))


def find_ending_tokens(
    known: Mapping[str, int], named: Mapping[str, int], eos_id: int | None, roles: Mapping[Role, Found]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids that end an answer and the ids that are control tokens because of their text.

    known  the ids of the KNOWN_TEXTS that are in the vocabulary
    named  the ids in the file's keys `tokenizer.ggml.*_token_id`, indexed by the part of the key after the last dot
    roles  the result of `find_roles`
    """
    ending = {named[key] for key in ENDING_KEYS if key in named}
    ending |= {found.token for role, found in roles.items() if role.ends}
    control = {found.token for found in roles.values() if found.by_text}
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
