"""Tests that special tokens and chat templates are found in all the files that may have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import ModelFileError, UnsupportedModel
from llmrun.formats.gguf.writer import NewValue
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.tokenizer import chat_templates, read_vocabulary, special_tokens
from tests.support.converting.checkpoints import TinyCheckpoint, sentencepiece_tokenizer, tiny_checkpoint
from tests.support.gguf.gguf_files import tiny_vocabulary, write_gguf
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary

TOKENS = tiny_vocabulary().tokens


@pytest.fixture
def tiny() -> TinyCheckpoint:
    """Return a checkpoint with the control tokens <|endoftext|>, <|im_start|> and <|im_end|> at IDs 0 to 2."""
    return tiny_checkpoint()


def found(checkpoint: TinyCheckpoint, folder: Path) -> tuple[dict[str, NewValue], list[str]]:
    with Checkpoint(checkpoint.write(folder / "model")) as opened:
        keys, notes = special_tokens(opened, read_vocabulary(opened, len(TOKENS)))
    return {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items()}, notes


def templates(checkpoint: TinyCheckpoint, folder: Path) -> dict[str, NewValue]:
    with Checkpoint(checkpoint.write(folder / "model")) as opened:
        return chat_templates(opened)


def test_roles_come_from_the_tokenizer_config(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.tokenizer_config["eos_token"] = {"content": "<|im_end|>", "special": True}
    tiny.config["eos_token_id"] = 0
    assert found(tiny, tmp_path)[0] == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
        "add_eos_token": False,
    }


def test_roles_come_from_the_config_otherwise(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.tokenizer_config = {"bos_token": None}
    tiny.config |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": -1}
    keys, _ = found(tiny, tmp_path)
    assert (keys["bos_token_id"], keys["eos_token_id"]) == (0, 2)
    assert "padding_token_id" not in keys


def test_roles_may_be_in_the_special_tokens_map(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.tokenizer_config, tiny.config["eos_token_id"] = {}, None
    tiny.files["special_tokens_map.json"] = json.dumps({"eos_token": "<|im_end|>"})
    assert found(tiny, tmp_path)[0]["eos_token_id"] == 2


def test_models_may_have_several_ends(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """<|endoftext|> is recognized by its text, so no key names it."""
    ends = [0, 2, 40, 41, 42, 43]
    tiny.files["generation_config.json"] = json.dumps({"eos_token_id": ends})
    keys, notes = found(tiny, tmp_path)
    assert (keys["eos_token_id"], keys["eot_token_id"], keys["eom_token_id"]) == (2, 40, 41)
    assert notes == [
        f"GGUF files cannot name more than three tokens that end an answer; left out: {TOKENS[42]}, {TOKENS[43]}"
    ]


def test_all_ends_end_an_answer_in_llama_cpp(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.files["generation_config.json"] = json.dumps({"eos_token_id": [0, 2, 40, 41]})
    keys, _ = found(tiny, tmp_path)
    metadata = {"general.architecture": "llama", **tiny_vocabulary().metadata()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    vocabulary = LlamaVocabulary(write_gguf(tmp_path / "a.gguf", metadata, {}))
    assert vocabulary.end_of_generation() == {0, 2, 40, 41}


def template(*ids: str) -> dict[str, Any]:
    """Return a post-processor that adds tokens around a text, which is the empty ID."""
    parts = [{"SpecialToken": {"id": name}} if name else {"Sequence": {"id": "A"}} for name in ids]
    steps = [{"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": parts}]
    return {"type": "Sequence", "processors": steps}


@pytest.mark.parametrize(
    ("ids", "config", "adds"),
    [
        (("<|im_start|>", ""), {}, (True, False)),
        (("<|im_start|>", "", "<|im_end|>"), {}, (True, True)),
        (("",), {}, (False, False)),
        (("<|im_start|>", ""), {"add_bos_token": False}, (False, False)),
        (("",), {"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ],
)
def test_the_post_processor_adds_tokens(
    ids: tuple[str, ...], config: dict[str, bool], adds: tuple[bool, bool], tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    tiny.tokenizer["post_processor"] = template(*ids)
    tiny.tokenizer_config |= config
    keys, _ = found(tiny, tmp_path)
    assert (keys["add_bos_token"], keys["add_eos_token"]) == adds


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (("<|im_end|>", ""), "adds '<|im_end|>', which is not the BOS token"),
        (("<|im_start|>", "<|im_start|>", ""), "adds 2 tokens on one side of a text"),
    ],
)
def test_other_additions_are_refused(ids: tuple[str, ...], message: str, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.tokenizer["post_processor"] = template(*ids)
    with pytest.raises(UnsupportedModel) as caught:
        found(tiny, tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"eos_token_id": 10**6}}, "eos_token_id must be less than 302"),
        ({"config": {"eos_token_id": ["2"]}}, "eos_token_id must be less than 302"),
        ({"tokenizer_config": {"bos_token": 5}}, "bos_token must be the text of a token"),
        ({"tokenizer_config": {"add_bos_token": 1}}, "add_bos_token must be true or false"),
        ({"tokenizer": {"post_processor": template("<missing>", "")}}, "adds '<missing>', which is not a token"),
    ],
)
def test_broken_files_are_refused(changes: dict[str, Any], message: str, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.tokenizer_config = {}
    for name, values in changes.items():
        getattr(tiny, name).update(values)
    with pytest.raises(ModelFileError) as caught:
        found(tiny, tmp_path)
    assert message in str(caught.value).replace(f"{len(TOKENS)}", "302")


def test_tokens_without_an_embedding_are_left_out(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.tokenizer["added_tokens"] += [{"id": 1000 + index, "content": f"<{index}>"} for index in range(6)]
    _, notes = found(tiny, tmp_path)
    assert notes == ["the model has no embedding for these tokens, so they are left out: <0>, <1>, <2>, <3>, <4>, ..."]


def test_tokens_that_trim_whitespace_get_a_note(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.tokenizer["added_tokens"][2]["rstrip"] = True
    _, notes = found(tiny, tmp_path)
    assert notes == ["GGUF files cannot express that whitespace beside these tokens is ignored: <|im_end|>"]


def test_sentencepiece_models_begin_with_bos(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.tokenizer = sentencepiece_tokenizer()
    tiny.tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    keys, _ = found(tiny, tmp_path)
    assert keys == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "add_eos_token": False,
    }


def test_a_template_may_be_anywhere(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    assert templates(tiny, tmp_path) == {}
    for number, (name, text) in enumerate(
        [
            ("chat_template.json", json.dumps({"chat_template": "{{ a }}"})),
            ("tokenizer_config.json", json.dumps({"chat_template": "{{ b }}"})),
            ("chat_template.jinja", "{{ c }}\n"),
        ]
    ):
        tiny.files[name] = text
        folder = tmp_path / str(number)
        folder.mkdir()
        expected = ("{{ a }}", "{{ b }}", "{{ c }}\n")[number]  # a file replaces those before it
        assert templates(tiny, folder) == {"tokenizer.chat_template": expected}


def test_template_names_are_checked(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    tiny.tokenizer_config["chat_template"] = [{"name": "a b", "template": "{{ a }}"}]
    with pytest.raises(ModelFileError, match="a template with the invalid name 'a b'"):
        templates(tiny, tmp_path)


def test_named_templates_are_kept(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    several = [{"name": "default", "template": "{{ a }}"}, {"name": "tool_use", "template": "{{ b }}"}]
    tiny.tokenizer_config["chat_template"] = several
    assert templates(tiny, tmp_path) == {
        "tokenizer.chat_template": "{{ a }}",
        "tokenizer.chat_template.tool_use": "{{ b }}",
    }
