"""Recognizes the pre-tokenizer of a byte-level tokenizer.json, whose name GGUF files store.

The name stands for patterns that llmrun and llama.cpp implement on their own, so a pre-tokenizer is only recognized if
it has exactly the form that published models have. All others are refused, because text would be split differently.
"""

from __future__ import annotations

from typing import Any

from llmrun.formats.gguf.problems import shown
from llmrun.jobs.converting.json_objects import JsonObject
from llmrun.model.tokenizers.pretokenize import PRE_TOKENIZERS

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")

# A step is the pattern of a Split, or one of these. The last step maps bytes to characters, in one variant after
# splitting by GPT-2's pattern.
_DIGITS, _GPT2_BYTES, _BYTES = "<digits>", "<bytes, GPT-2>", "<bytes>"
_INNER_KEYS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
_FORMS = {
    (_GPT2_BYTES,): ("gpt-2",),
    (_DIGITS, _GPT2_BYTES): ("smollm",),
    (_words(r"\p{N}"), _BYTES): ("qwen2",),
    (_words(r"\p{N}{1,3}"), _BYTES): ("llama-bpe", "smaug-bpe"),
    (_TEKKEN, _BYTES): ("tekken",),
    (*_DEEPSEEK_CODER, _DIGITS, _BYTES): ("deepseek-coder",),
}


def is_byte_level(tokenizer: JsonObject) -> bool:
    """Return whether the pre-tokenizer maps bytes to characters."""
    return any(step.string("type") == "ByteLevel" for step in steps_of(tokenizer, "pre_tokenizer"))


def pre_tokenizer_name(tokenizer: JsonObject) -> str:
    """Return the value of `tokenizer.ggml.pre`. Raises UnsupportedModel."""
    whole = tokenizer.object("model").boolean("ignore_merges", False)
    steps = tuple(map(_step, steps_of(tokenizer, "pre_tokenizer")))
    names = [name for name in _FORMS.get(steps, ()) if PRE_TOKENIZERS[name].ignore_merges == whole]
    if not names:
        known = ", ".join(name for several in _FORMS.values() for name in several)
        merges = "with" if whole else "without"
        seen = f"is unknown ({' then '.join(shown(step, 60) for step in steps)}, {merges} ignore_merges)"
        raise tokenizer.unsupported("pre_tokenizer", f"{seen}; llmrun knows those of {known}")
    return names[0]


def steps_of(tokenizer: JsonObject, key: str) -> list[JsonObject]:
    """Return the steps of a normalizer, pre-tokenizer or post-processor."""
    part = tokenizer.object(key)
    if part.string("type") == "Sequence":
        return part.objects(_INNER_KEYS[key])
    return [part] if part.values else []


def _step(part: JsonObject) -> str:
    values: dict[str, Any] = {key: value for key, value in part.values.items() if key != "trim_offsets"}
    kind = values.pop("type", "")
    if kind == "Digits" and values.get("individual_digits") is True:
        return _DIGITS
    if kind == "ByteLevel" and values.get("add_prefix_space") is False:
        return _GPT2_BYTES if values.get("use_regex", True) is True else _BYTES
    # A split that isolates all matches, and one that keeps only the matches of a pattern that matches everything.
    if kind == "Split" and (values.get("behavior"), values.get("invert")) in (("Isolated", False), ("Removed", True)):
        return part.object("pattern").string("Regex", f"<{kind}>")
    return f"<{kind}>"
