"""Tests of the facts that are read from models' files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from llmrun.formats.gguf.glance import Glance
from llmrun.hub.local.model_records import remember_digests
from llmrun.serving.models.known import Header, KnownModel, digest_of, glance_at, header_of
from tests.support.gguf.gguf_files import write_gguf

TEMPLATE = "{% if tools %}{{ tools }}{% endif %}{{ messages }}"
METADATA = {
    "general.architecture": "llama",
    "general.size_label": "1B",
    "llama.context_length": 4096,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b"],
    "tokenizer.ggml.token_type": [1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.chat_template": TEMPLATE,
}


@pytest.fixture
def known(tmp_path: Path) -> KnownModel:
    path = write_gguf(tmp_path / "some-Q4_K_M.gguf", METADATA, {})
    status = path.stat()
    return KnownModel("some", path, "", status.st_size, status.st_mtime)


def test_a_glance_shows_what_lists_need(known: KnownModel) -> None:
    assert glance_at(known) == Glance("llama", "Q4_K_M", 4096, "1B")


def test_headers_have_no_lists_and_the_template_apart(known: KnownModel) -> None:
    header = header_of(known)
    assert header.values == {
        "general.architecture": "llama",
        "general.size_label": "1B",
        "llama.context_length": 4096,
        "tokenizer.ggml.model": "gpt2",
    }
    assert header.template == TEMPLATE
    assert not header.fills
    assert header.mentions_tools
    assert not header.mentions_thinking
    assert Header(template="{{ enable_thinking }}").mentions_thinking
    assert not Header(template="{{ my_tools_x }}").mentions_tools


def test_headers_show_whether_a_model_fills_gaps(known: KnownModel) -> None:
    tokens = ["a", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    vocabulary = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 3]}
    path = write_gguf(known.path.with_name("code.gguf"), {**METADATA, **vocabulary}, {})
    assert header_of(KnownModel("code", path)).fills


def test_files_that_are_no_models_have_no_facts(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text("{}")
    for known in (KnownModel("script", path), KnownModel("gone", tmp_path / "gone.gguf")):
        assert (glance_at(known), header_of(known)) == (Glance(), Header())


def test_changed_files_are_read_again(known: KnownModel) -> None:
    assert header_of(known).template
    write_gguf(known.path, {**METADATA, "tokenizer.chat_template": ""}, {})
    changed = KnownModel(known.name, known.path, "", known.size - len(TEMPLATE), known.modified + 1)
    assert header_of(changed).template == ""
    assert digest_of(changed) != digest_of(known)


def test_the_digest_is_the_sha256_if_that_is_known(known: KnownModel) -> None:
    sha256 = hashlib.sha256(known.path.read_bytes()).hexdigest()
    assert digest_of(known) != sha256
    remember_digests([known.path], [sha256], name="some", source="")
    assert digest_of(known) == sha256


def test_headers_show_whether_the_projector_is_here(known: KnownModel) -> None:
    assert not header_of(known).sees_images
    projector = known.path.with_name("mmproj-some-F16.gguf")
    write_gguf(projector, METADATA, {})
    assert header_of(known).sees_images
