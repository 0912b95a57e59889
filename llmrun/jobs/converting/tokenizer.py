"""Turns tokenizer.json into the metadata of a GGUF file.

There are two kinds, both of which tokenizer.json describes as BPE: byte-level BPE (`gpt2` in GGUF files) and
SentencePiece with byte fallback (`llama`). Others are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from llmrun.formats.gguf.problems import shown
from llmrun.formats.gguf.writer import NewValue
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.json_objects import JsonObject, unsupported
from llmrun.jobs.converting.pre_tokenizers import is_byte_level, pre_tokenizer_name, steps_of
from llmrun.jobs.converting.sentencepiece_scores import Merge, scores_of
from llmrun.model.tokenizers.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

TOKENIZER = "tokenizer.json"
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# Some publishers do not mark these tokens as special. llama.cpp's converter treats them as control tokens, too.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<pad>|<mask>|<unused\d+>", re.DOTALL)
_PREFIX, _SPACES = "<prefix>", "<spaces>"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, by ID.

    kinds     values of `tokenizer.ggml.token_type`
    ids       token -> its ID
    left_out  added tokens that the model has no embedding for
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
        # llama.cpp compares user-defined tokens with text in which spaces have not been replaced.
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
    """Return the merges. Older files write both parts as one string."""
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
        if part.string("type") != "NFC":  # NFC changes almost no text, and all GGUF files of such models leave it out
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
        raise source.unsupported("normalizer", f"is unknown ({found}); llmrun knows those of Llama 2 and Mistral")
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
    """Return what a normalizer or pre-tokenizer does: write spaces as U+2581, put one before the text, or both."""
    kind, values = part.string("type"), part.values
    if kind == "Prepend" and values.get("prepend") == _SPACE:
        return (_PREFIX,)
    if kind == "Replace" and values.get("pattern") == {"String": " "} and values.get("content") == _SPACE:
        return (_SPACES,)
    # Metaspace puts no prefix before a text that begins with a space. SentencePiece does, and so does llama.cpp.
    if kind == "Metaspace" and values.get("replacement") == _SPACE and values.get("split") is False:
        scheme = part.string("prepend_scheme", "always" if part.boolean("add_prefix_space", True) else "never")
        return (_SPACES,) if scheme == "never" else (_PREFIX, _SPACES)
    return (f"<{kind}>",)
