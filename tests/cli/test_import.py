"""Tests of import as users type it: the model then has its name in every command."""

from __future__ import annotations

import json
import os
import sys

import pytest

from llmrun.base.amounts import format_bytes
from tests.support.cli.commands import run
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.hub.model_stores import Stores
from tests.support.models.tiny_encoders import TINY_ENCODERS, tiny_encoder

pytestmark = [pytest.mark.push, pytest.mark.skipif(sys.platform == "win32", reason="links need a right on Windows")]


def test_the_name_works_in_every_command(stores: Stores) -> None:
    original = tiny_llama(stores.root / "original.gguf")
    out, err = run("import", str(original), "mine:7b")
    size = format_bytes(original.stat().st_size)
    assert out == f"mine:7b: {size}, Q8_0, a link to {original}\n"
    assert err == "note: to try it: llmrun chat mine:7b\n"
    assert run("list")[0].splitlines()[1].split()[:4] == ["mine:7b", *size.split(), "Q8_0"]
    assert "  name  mine:7b\n" in run("show", "mine:7b")[0]
    assert run("generate", "-m", "mine:7b", "--temp", "0", "-n", "1", "--raw", "-q", "Hello")[1] == ""
    assert "just now" in run("list")[0]
    assert json.loads(run("fit", "mine:7b", "--json")[0])["models"][0]["quantizations"][0]["quantization"] == "Q8_0"
    assert "mine:7b: the prompt begins with the name of a model" in run("generate", "mine:7b", "Hello", code=2)[1]
    assert run("pull", "mine:7b")[1].startswith("mine:7b  already here")
    assert "OK: no known sha256" in run("verify", "mine:7b")[0]
    out, err = run("rm", "mine:7b")
    assert out == "mine:7b: removed, freeing 0 B\n"
    assert err == f"note: mine:7b: only the link is removed; {original} is kept\n"
    assert original.exists()


def test_a_broken_link_is_named_in_one_line(stores: Stores) -> None:
    original = tiny_llama(stores.root / "original.gguf")
    run("import", str(original), "mine", "-q")
    original.unlink()
    gone = f"mine: a link to {original}, which does not exist"
    assert run("list")[0] == f"{gone}; `llmrun rm mine` removes the link\n"
    assert json.loads(run("list", "--json")[0])["broken"] == [{"name": "mine", "target": str(original)}]
    for command in ("chat", "show", "fit", "verify", "pull"):
        _, err = run(command, "mine", code=4)
        assert err.startswith(
            f"error: model: 'mine': a link to {original}, which does not exist\nhint: `llmrun rm mine`"
        )
    assert run("rm", "mine")[0] == "mine: removed, freeing 0 B\n"
    assert "No models yet" in run("list")[0]


def test_arguments_that_are_not_files_get_the_right_command(stores: Stores) -> None:
    for name in ("hf:org/name", "https://example.com/m.gguf", "qwen3:4b"):
        _, err = run("import", name, code=2)
        assert err.endswith(f"not a file but a model to download\nhint: llmrun pull {name}\n")
    assert "hint: llmrun chat ollama:m" in run("import", "ollama:m", code=2)[1]
    shards = [str(tiny_llama(stores.root / f"m-0000{number}-of-00002.gguf")) for number in (1, 2)]
    for several in (shards, [*shards, "third"]):
        assert "for a split model, name only its first file" in run("import", *several, code=2)[1]
    assert "cannot be combined with" in run("import", shards[0], "--copy", "--move", code=2)[1]
    assert "'~nobody-here/m.gguf': no such file" in run("import", "~nobody-here/m.gguf", code=4)[1]
    assert "cannot be the name of a model" in run("import", shards[0], "a" * 300, code=2)[1]


def test_an_encoder_is_tried_with_embed(stores: Stores) -> None:
    encoder = tiny_encoder(stores.root, TINY_ENCODERS["bert"])
    assert run("import", str(encoder), "--copy")[1] == "note: to try it: llmrun embed -m bert TEXT\n"
    body = json.loads(run("import", str(encoder), "other", "--json", "--copy")[0])
    final = str(stores.models / "other.gguf")
    assert body == {"name": "other", "how": "copy", "imported": True, "from": [str(encoder)], "files": [final]}
    assert not os.path.islink(final)  # noqa: PTH114


def test_names_in_the_list_are_completed(stores: Stores) -> None:
    run("import", str(tiny_llama(stores.root / "original.gguf")), "mine", "-q")
    from llmrun.cli.arguments import options

    assert ("mine", "on this machine") in options.models()
