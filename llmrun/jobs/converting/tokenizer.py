"""Converts tokenizer.json, and the special tokens and chat templates of other files, to the metadata of a GGUF file.

Two kinds of tokenizers are supported, and tokenizer.json describes both as BPE: byte-level BPE (`gpt2` in GGUF files)
and SentencePiece with byte fallback (`llama`). Other tokenizers are refused.

GGUF files store the name of a byte-level pre-tokenizer. The name stands for patterns that llmrun and llama.cpp
implement on their own, so a pre-tokenizer is recognized only if it exactly equals the pre-tokenizer of published
models. Other pre-tokenizers are refused, because text would be split differently.

The scores of a SentencePiece vocabulary are recovered from the merges. SentencePiece merges the two neighbors whose
combination has the best score. For such a vocabulary, transformers writes a BPE model that lists all pairs of tokens
whose combination is a token, in the order of these scores. The order alone is sufficient: if the score of each token is
its negative rank, text is split identically.

For a token without a score, old versions of transformers used the best score, 0, and left out the token's pairs. In the
files of Llama 2 and Mistral 7B, this token consists of two spaces. This module restores the missing score.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmrun.base.errors import shown
from llmrun.formats.gguf.writer import NewValue
from llmrun.jobs.converting.checkpoint import Checkpoint, JsonObject, unsupported
from llmrun.model.tokenizers.kinds import PRE_TOKENIZERS
from llmrun.model.tokenizers.vocabulary import BYTE, CONTROL, ENDING_TEXTS, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_SPACES_PATTERN = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES_PATTERN}"


_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES_PATTERN}"
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")

# A step is the pattern of a Split, or one of these words. The last step maps bytes to characters, and one variant of
# this step first splits by GPT-2's pattern.
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
    """Return the value of `tokenizer.ggml.pre`. Raises UnsupportedModel for an unknown pre-tokenizer."""
    whole = tokenizer.object("model").boolean("ignore_merges", False)
    steps = tuple(map(_step, steps_of(tokenizer, "pre_tokenizer")))
    names = [name for name in _FORMS.get(steps, ()) if PRE_TOKENIZERS[name].ignore_merges == whole]
    if not names:
        known = ", ".join(name for several in _FORMS.values() for name in several)
        merges = "with" if whole else "without"
        seen = f"is unknown ({' then '.join(shown(step, 60) for step in steps)}, {merges} ignore_merges)"
        raise tokenizer.unsupported("pre_tokenizer", f"{seen}; llmrun supports the pre-tokenizers of {known}")
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
    # A split that isolates all matches, and a split that keeps only the matches of a pattern that matches everything.
    if kind == "Split" and (values.get("behavior"), values.get("invert")) in (("Isolated", False), ("Removed", True)):
        return part.object("pattern").string("Regex", f"<{kind}>")
    return f"<{kind}>"


Merge = tuple[str, str]
_MOST_CHARACTERS = 1024  # the maximum length of a token, because the pairs of a token take quadratic time


def scores_of(tokens: Sequence[str], merges: Sequence[Merge], mergeable: Sequence[str]) -> NDArray[np.float32] | None:
    """Return a score for each token, float32[tokens], or None if scores cannot express the merges.

    mergeable  the tokens that may be the result or a part of a merge, in the order of their IDs

    Scores express merges if all pairs that form the same token are listed consecutively, no pair that forms a token
    is missing, and all characters of the mergeable tokens are tokens. Tokens are much shorter than _MOST_CHARACTERS.
    """
    if any(len(token) > _MOST_CHARACTERS for token in mergeable):
        return None
    ranks: dict[str, int] = {}
    last = ""
    for left, right in merges:
        combined = left + right
        if combined != last and combined in ranks:
            return None
        last = combined
        ranks.setdefault(combined, 1 + len(ranks))
    known, listed = set(mergeable), set(merges)
    unlisted = [token for token in mergeable if any(pair not in listed for pair in _pairs(token, known))]
    if unlisted == list(mergeable[:1]) and unlisted[0] not in ranks:
        ranks[unlisted[0]] = 0
    elif unlisted:
        return None
    if not {character for token in mergeable for character in token} <= known:
        return None
    return np.array([-ranks.get(token, 1 + len(ranks)) for token in tokens], np.float32)


def _pairs(token: str, known: set[str]) -> list[Merge]:
    """Return the pairs of known tokens that form a token."""
    pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    return [(left, right) for left, right in pairs if left in known and right in known]


TOKENIZER = "tokenizer.json"
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# Some publishers do not mark these tokens as special, but llama.cpp's converter also treats them as control tokens.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<pad>|<mask>|<unused\d+>", re.DOTALL)
_PREFIX, _SPACES = "<prefix>", "<spaces>"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, by ID.

    kinds     values of `tokenizer.ggml.token_type`
    ids       token -> the token's ID
    left_out  added tokens without an embedding in the model
    """

    source: JsonObject
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]
    left_out: list[str]


def read_vocabulary(checkpoint: Checkpoint, size: int) -> Vocabulary:
    """Read the tokens. `size` is the number of rows of the embedding; IDs without a token get a placeholder.

    Raises ModelFileError and UnsupportedModel.
    """
    source = checkpoint.json(TOKENIZER)
    if source is None:
        raise unsupported(
            checkpoint.folder,
            f"there is no {TOKENIZER}, and llmrun reads no other kind of vocabulary, such as tokenizer.model",
            "let transformers write it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    model = source.object("model")
    if model.string("type", "BPE") != "BPE":
        raise model.unsupported("type", f"is '{shown(model.string('type'), 40)}', but only BPE can be converted")
    words = model.object("vocab")
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    unknown = model.string("unk_token")
    byte_fallback = not is_byte_level(source)
    for token in words.values:
        index = words.integer(token, minimum=0)
        if index >= size:
            raise words.bad(token, f"has the ID {index}, but the model has only {size} tokens")
        if kinds[index] != UNUSED:
            raise words.bad(token, f"has the same ID as '{shown(tokens[index])}', {index}")
        is_byte = byte_fallback and _BYTE_TOKEN.fullmatch(token)
        tokens[index], kinds[index] = token, BYTE if is_byte else UNKNOWN if token == unknown else NORMAL
    left_out = []
    for added in source.objects("added_tokens"):
        token, index = added.string("content"), added.integer("id", minimum=0)
        if index >= size:
            left_out.append(token)
            continue
        if kinds[index] not in (UNKNOWN, BYTE):
            special = added.boolean("special", False) or _LOOKS_SPECIAL.fullmatch(token)
            kinds[index] = CONTROL if special else USER_DEFINED
        # llama.cpp compares user-defined tokens with text before spaces are replaced.
        tokens[index] = token.replace(_SPACE, " ") if kinds[index] == USER_DEFINED else token
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if "\0" in token:
            raise source.bad("model.vocab", f"has the token '{shown(token)}', which contains a NUL")
        if ids.setdefault(token, index) != index:
            raise source.bad("model.vocab", f"has two tokens, {ids[token]} and {index}, with the text '{shown(token)}'")
    return Vocabulary(source, tokens, kinds, ids, left_out)


def vocabulary_metadata(vocabulary: Vocabulary) -> dict[str, NewValue]:
    """Return the metadata of the vocabulary. Raises ModelFileError and UnsupportedModel."""
    source, model = vocabulary.source, vocabulary.source.object("model")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.values.get(key):
            raise model.unsupported(key, "cannot be converted")
    merges = _merges(vocabulary, model)
    kind = _byte_level(vocabulary, merges) if is_byte_level(source) else _sentencepiece(vocabulary, merges)
    return {
        **kind,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": np.array(vocabulary.kinds, np.int32),
    }


def _merges(vocabulary: Vocabulary, model: JsonObject) -> list[Merge]:
    """Return the merges. Older files write both parts of a merge as one string."""
    merges: list[Merge] = []
    for index, merge in enumerate(model.array("merges")):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) for part in parts)):
            raise model.bad("merges", f"element {index} must have two parts")
        left, right = parts
        if not left or not right or " " in left + right or left + right not in vocabulary.ids:
            raise model.bad("merges", f"element {index}, '{shown(left)}' and '{shown(right)}', does not form a token")
        merges.append((left, right))
    if not merges:
        raise model.bad("merges", "is empty")
    return merges


def _byte_level(vocabulary: Vocabulary, merges: list[Merge]) -> dict[str, NewValue]:
    source = vocabulary.source
    for part in steps_of(source, "normalizer"):
        if part.string("type") != "NFC":  # NFC changes almost no text, and the GGUF files of such models omit NFC
            raise part.unsupported("type", f"is '{shown(part.string('type'), 40)}', but only NFC can be converted")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer_name(source),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }


def _sentencepiece(vocabulary: Vocabulary, merges: list[Merge]) -> dict[str, NewValue]:
    source = vocabulary.source
    parts = (*steps_of(source, "normalizer"), *steps_of(source, "pre_tokenizer"))
    steps = [step for part in parts for step in _sentencepiece_steps(part)]
    if not source.object("model").boolean("byte_fallback", False) or BYTE not in vocabulary.kinds:
        raise source.unsupported("model", "is neither byte-level BPE nor SentencePiece with byte fallback")
    if _SPACES not in steps or any(step not in (_PREFIX, _SPACES) for step in steps):
        found = " then ".join(shown(step, 60) for step in steps) or "missing"
        raise source.unsupported("normalizer", f"is unknown ({found}); only Llama 2's and Mistral's are supported")
    normal = [token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == NORMAL]
    results = set(normal)
    scores = scores_of(vocabulary.tokens, [merge for merge in merges if "".join(merge) in results], normal)
    if scores is None:
        raise source.unsupported("model.merges", "are not those of a SentencePiece vocabulary")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": _PREFIX in steps,
    }


def _sentencepiece_steps(part: JsonObject) -> tuple[str, ...]:
    """Return the steps of a normalizer or pre-tokenizer: write spaces as U+2581, prepend a space, or both."""
    kind, values = part.string("type"), part.values
    if kind == "Prepend" and values.get("prepend") == _SPACE:
        return (_PREFIX,)
    if kind == "Replace" and values.get("pattern") == {"String": " "} and values.get("content") == _SPACE:
        return (_SPACES,)
    # Metaspace adds no prefix to a text that begins with a space. SentencePiece and llama.cpp do add a prefix.
    if kind == "Metaspace" and values.get("replacement") == _SPACE and values.get("split") is False:
        scheme = part.string("prepend_scheme", "always" if part.boolean("add_prefix_space", True) else "never")
        return (_SPACES,) if scheme == "never" else (_PREFIX, _SPACES)
    return (f"<{kind}>",)


_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_GENERATION = "generation_config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)

# Maps the roles of tokens to the parts of the GGUF keys that name these tokens.
_ROLES = {"bos": "bos", "unk": "unknown", "pad": "padding"}
_OTHER_ENDS = ("eot", "eom")  # besides EOS, GGUF files can name two tokens that end an answer


def special_tokens(checkpoint: Checkpoint, vocabulary: Vocabulary) -> tuple[dict[str, NewValue], list[str]]:
    """Return the metadata of the special tokens, and notes for the user.

    Raises ModelFileError and UnsupportedModel.
    """
    configs = [found for name in _CONFIGS if (found := checkpoint.json(name)) is not None]
    named = {role: _named(checkpoint, configs, vocabulary, role) for role in (*_ROLES, "eos")}
    ends = _ends(checkpoint, vocabulary, named["eos"])
    keys: dict[str, NewValue] = {
        f"tokenizer.ggml.{name}_token_id": index for role, name in _ROLES.items() if (index := named[role]) is not None
    }
    notes = []
    if vocabulary.left_out:
        notes.append(f"the model has no embedding for these tokens, so they are left out: {_few(vocabulary.left_out)}")
    for name, index in zip(("eos", *_OTHER_ENDS), ends, strict=False):
        keys[f"tokenizer.ggml.{name}_token_id"] = index
    if len(ends) > 1 + len(_OTHER_ENDS):
        others = _few([vocabulary.tokens[index] for index in ends[1 + len(_OTHER_ENDS) :]])
        notes.append(f"GGUF files cannot name more than three tokens that end an answer; left out: {others}")
    first, last = _added(vocabulary)
    for role, token in (("bos", first), ("eos", last)):
        adds = token is not None and token == named[role]
        for config in configs:
            adds = config.boolean(f"add_{role}_token", adds)
        if token is not None and token != named[role]:
            seen = f"adds '{shown(vocabulary.tokens[token], 40)}', which is not the {role.upper()} token"
            raise vocabulary.source.unsupported("post_processor", seen)
        keys[f"tokenizer.ggml.add_{role}_token"] = adds and named[role] is not None
    trimming = [
        added.string("content")
        for added in vocabulary.source.objects("added_tokens")
        if added.boolean("lstrip", False) or added.boolean("rstrip", False)
    ]
    if trimming:
        notes.append(f"GGUF files cannot express that whitespace beside these tokens is ignored: {_few(trimming)}")
    return keys, notes


def chat_templates(checkpoint: Checkpoint) -> dict[str, NewValue]:
    """Return the metadata of the chat templates. If a model has several, the main template is named `default`."""
    template = checkpoint.text(_TEMPLATE_FILES[0])
    if template is not None:
        return {_TEMPLATE: template}
    for name in (_CONFIGS[0], _TEMPLATE_FILES[1]):
        config = checkpoint.json(name)
        if config is None or not config.has("chat_template"):
            continue
        if isinstance(config.values["chat_template"], str):
            return {_TEMPLATE: config.string("chat_template")}
        named = {each.string("name"): each.string("template") for each in config.objects("chat_template")}
        for template_name in named:
            if not _TEMPLATE_NAME.fullmatch(template_name):
                raise config.bad("chat_template", f"has a template with the invalid name '{shown(template_name)}'")
        return {_TEMPLATE if each == "default" else f"{_TEMPLATE}.{each}": text for each, text in named.items()}
    return {}


def _named(checkpoint: Checkpoint, configs: list[JsonObject], vocabulary: Vocabulary, role: str) -> int | None:
    """Return the ID of the token with a role, or None if no token has the role."""
    key = f"{role}_token"
    for config in configs:
        value = config.values.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str):
            raise config.bad(key, "must be the text of a token")
        if text in vocabulary.ids:
            return vocabulary.ids[text]
    ids = _ids(checkpoint.config, f"{key}_id", vocabulary)
    return ids[0] if ids else None


def _ids(config: JsonObject, key: str, vocabulary: Vocabulary) -> list[int]:
    """Return the IDs at a key, whose value is one ID or several IDs."""
    value = config.values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for index in ids:
        if type(index) is not int or not -1 <= index < len(vocabulary.tokens):
            raise config.bad(key, f"must be less than {len(vocabulary.tokens):,}, the number of tokens")
    return [index for index in ids if index >= 0]  # some publishers write -1 for a missing token


def _ends(checkpoint: Checkpoint, vocabulary: Vocabulary, eos: int | None) -> list[int]:
    """Return the tokens that end an answer, EOS first, except for tokens that every reader recognizes by their text."""
    generation = checkpoint.json(_GENERATION)
    ids = _ids(generation, "eos_token_id", vocabulary) if generation is not None else []
    ids = ids or _ids(checkpoint.config, "eos_token_id", vocabulary)
    eos = ids[0] if eos is None and ids else eos
    others = [index for index in ids if index != eos and vocabulary.tokens[index] not in ENDING_TEXTS]
    return [*([] if eos is None else [eos]), *dict.fromkeys(others)]


def _added(vocabulary: Vocabulary) -> tuple[int | None, int | None]:
    """Return the tokens that the post-processor adds before and after a text. Raises ModelFileError."""
    for step in steps_of(vocabulary.source, "post_processor"):
        if step.string("type") != "TemplateProcessing":
            continue
        names = [part.object("SpecialToken").string("id") for part in step.objects("single")]
        if "" in names:  # "" stands for the text
            text = names.index("")
            return _only(step, vocabulary, names[:text]), _only(step, vocabulary, names[text + 1 :])
    return None, None


def _only(step: JsonObject, vocabulary: Vocabulary, names: list[str]) -> int | None:
    """Return the only token of `names`, or None if `names` is empty. Raises ModelFileError and UnsupportedModel."""
    if len(names) > 1:
        raise step.unsupported("single", f"adds {len(names)} tokens on one side of a text, but GGUF files allow one")
    if names and names[0] not in vocabulary.ids:
        raise step.bad("single", f"adds '{shown(names[0], 40)}', which is not a token")
    return vocabulary.ids[names[0]] if names else None


def _few(tokens: list[str]) -> str:
    """Return the first tokens of a list for a note."""
    return ", ".join(shown(token, 40) for token in tokens[:5]) + (", ..." if len(tokens) > 5 else "")
