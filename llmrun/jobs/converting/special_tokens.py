"""Finds the special tokens and the chat templates of a checkpoint, which are spread over several files."""

from __future__ import annotations

import re

from llmrun.formats.gguf.problems import shown
from llmrun.formats.gguf.writer import NewValue
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.json_objects import JsonObject
from llmrun.jobs.converting.pre_tokenizers import steps_of
from llmrun.jobs.converting.tokenizer import Vocabulary
from llmrun.model.tokenizers.end_of_generation import ENDING_TEXTS

_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_GENERATION = "generation_config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)

# The roles of tokens, and the parts of the keys that name them in GGUF files.
_ROLES = {"bos": "bos", "unk": "unknown", "pad": "padding"}
_OTHER_ENDS = ("eot", "eom")  # GGUF files have room for two tokens besides EOS that end an answer


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
        notes.append(f"GGUF files do not store that whitespace beside these tokens is ignored: {_few(trimming)}")
    return keys, notes


def chat_templates(checkpoint: Checkpoint) -> dict[str, NewValue]:
    """Return the metadata of the chat templates. If there are several, the main one is named `default`."""
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
    """Return the ID of the token with a role, or None if there is none."""
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
    """Return the IDs at a key, which has one ID or several."""
    value = config.values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for index in ids:
        if type(index) is not int or not -1 <= index < len(vocabulary.tokens):
            raise config.bad(key, f"must be less than {len(vocabulary.tokens):,}, the number of tokens")
    return [index for index in ids if index >= 0]  # some publishers write -1 for none


def _ends(checkpoint: Checkpoint, vocabulary: Vocabulary, eos: int | None) -> list[int]:
    """Return the tokens that end an answer, EOS first. Those that every reader knows by their text are left out."""
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
        if "" in names:  # the text
            text = names.index("")
            return _only(step, vocabulary, names[:text]), _only(step, vocabulary, names[text + 1 :])
    return None, None


def _only(step: JsonObject, vocabulary: Vocabulary, names: list[str]) -> int | None:
    """Return the only token among these, or None if there is none. Raises ModelFileError and UnsupportedModel."""
    if len(names) > 1:
        raise step.unsupported("single", f"adds {len(names)} tokens on one side of a text, and GGUF files one")
    if names and names[0] not in vocabulary.ids:
        raise step.bad("single", f"adds '{shown(names[0], 40)}', which is not a token")
    return vocabulary.ids[names[0]] if names else None


def _few(tokens: list[str]) -> str:
    """Return the first tokens of a list for a note."""
    return ", ".join(shown(token, 40) for token in tokens[:5]) + (", ..." if len(tokens) > 5 else "")
