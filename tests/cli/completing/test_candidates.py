"""Tests of the completion candidates for a command line's last word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from llmrun.cli.app import app
from llmrun.cli.completing.candidates import candidates
from llmrun.cli.registry import command_names, load
from llmrun.hub.catalog import load_catalog
from llmrun.hub.upkeep import inventory
from tests.support.cli.commands import LLMRUN, ROOT, llmrun
from tests.support.hub.model_stores import Stores, gguf


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    made = Stores(tmp_path)
    made.shared("org/name", {"name-Q4_0.gguf": gguf()})
    made.enter(monkeypatch)
    return made


def words_for(*words: str) -> list[str]:
    found, _ = candidates(typer.main.get_command(app), words)
    return [each.word for each in found]


def takes_files(*words: str) -> bool:
    return candidates(typer.main.get_command(app), words)[1]


def test_commands_are_completed_with_their_summaries() -> None:
    found, files = candidates(typer.main.get_command(app), [""])
    assert [each.word for each in found] == command_names()
    assert dict(found)["chat"] == "Talk with a model."
    assert not files


def test_aliases_are_completed_where_no_command_begins_so() -> None:
    assert words_for("r") == ["replay", "rerank", "rm"]
    assert words_for("ru") == ["run"]
    assert words_for("rem") == ["remove"]


@pytest.mark.parametrize("name", [name for name in command_names() if name != "help"])
def test_every_flag_of_a_command_is_completed(name: str) -> None:
    command = load(name)
    context = command.make_context(name, [], resilient_parsing=True)
    options = [each for each in command.get_params(context) if each.param_type_name == "option" and not each.hidden]
    names = {name for each in options for name in (*each.opts, *each.secondary_opts)}
    assert set(words_for(name, "-")) == names | {"-h"}


def test_a_flag_that_was_given_is_not_offered_again() -> None:
    assert words_for("generate", "--see") == ["--seed"]
    assert words_for("generate", "--seed", "1", "--see") == []
    assert words_for("generate", "--seed=1", "--see") == []
    assert words_for("generate", "--stop", "x", "--sto") == ["--stop"]  # repeatable
    assert "--no-think" not in words_for("generate", "--think", "--")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["chat", "--backend", ""], ["auto", "cpu", "llama"]),
        (["chat", "--backend=l"], ["--backend=llama"]),
        (["bench", "--backend", "cpu,l"], ["cpu,llama"]),
        (["bench", "-o", "j"], ["json", "jsonl"]),
        (["bench", "history", "-o", "m"], ["md"]),
        (["fit", "--kv-type", "q8_0:"], ["q8_0:f16", "q8_0:q4_0"]),
        (["generate", "-ngl", "a"], ["auto", "all"]),
        (["bench", "comp"], ["compare"]),
        (["bench", "a.gguf", "comp"], []),
        (["bench", "a.gguf", "--conc"], ["--concurrency"]),
        (["help", "bench", "comp"], ["compare"]),
        (["completion", "z"], ["zsh"]),
        (["generate", "--", "--se"], []),
        (["generate", "--seed", "--s"], []),  # a value, though it looks like a flag
        (["generate", "-s", ""], []),
        (["nosuch", ""], []),
    ],
)
def test_values_with_fixed_choices(words: list[str], expected: list[str]) -> None:
    assert words_for(*words) == expected


MORE = (
    *(["bench"], ["bench", "a.gguf"], ["bench", "-n", "5"], ["eval", "-m"], ["imatrix", "-m"], ["pull", "-m"]),
    *(["show", "-m"], ["fit", "-m"], ["embed", "-m"], ["embed", "a text", "-m"], ["rerank", "-m"]),
)


def test_models_here_and_in_the_catalogue() -> None:
    found, _ = candidates(typer.main.get_command(app), ["chat", ""])
    assert dict(found)["hf:org/name:Q4_0"] == "on this machine"
    assert dict(found)["qwen3:4b"] == "to download"
    for words in (
        ["run"],
        ["generate", "-m"],
        ["pull"],
        ["pull", "qwen3:8b"],
        ["fit"],
        ["show"],
        ["bench", "-m"],
        *MORE,
    ):
        assert words_for(*words, "qwen3:4") == ["qwen3:4b", "qwen3:4b-instruct", "qwen3:4b-thinking"], words
    assert words_for("bench", "-m", "a.gguf,hf:") == ["a.gguf,hf:org/name:Q4_0"]


def test_only_models_here_can_be_removed_or_verified() -> None:
    for words in (["rm"], ["verify"], ["verify", "-m"], ["replay", "run.json", "-m"]):
        assert words_for(*words, "") == ["hf:org/name:Q4_0"]


def test_files_where_a_file_may_stand() -> None:
    assert takes_files("generate", "-f", "")
    assert takes_files("generate", "--file=re")
    assert takes_files("chat", "./mod")
    assert takes_files("chat", "--lora", "")
    assert takes_files("rerank", "query", "")
    assert takes_files("bench", "compare", "before.json", "after")
    assert not takes_files("rm", "./mod")
    assert takes_files("bench", "./mod")
    assert not takes_files("generate", "why")
    assert not takes_files("embed", "a text")
    assert not takes_files("rerank", "a query of th")
    assert not takes_files("show", "qwen3:4")  # names match


def test_no_name_reaches_the_terminal_as_a_control_sequence(stores: Stores) -> None:
    stores.lm_studio("org/\x1b]0;title\x07/x-Q4_0.gguf", gguf(salt=1))
    assert [model.holder for model in inventory.models()] == ["hub", "lmstudio"]
    assert [word for word in words_for("show", "") if word not in load_catalog().names()] == ["hf:org/name:Q4_0"]


def test_models_here_are_completed_beside_a_broken_catalogue(stores: Stores) -> None:
    (stores.root / "models.toml").write_text("[models")
    done = llmrun("completion", "--complete", "--", "chat", "")
    assert (done.stdout, done.stderr) == (b"hf:org/name:Q4_0\ton this machine\n", b"")


@pytest.mark.push
def test_fifty_local_models_are_offered(stores: Stores) -> None:
    """scripts/measure_startup measures how long this takes."""
    for number in range(50):
        stores.shared(f"org{number % 7}/model-{number}", {f"m-{number}-Q4_K_M.gguf": gguf(salt=number)})
    command = [*LLMRUN, "completion", "--complete", "--", "chat", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.count(b"on this machine") == 51


@pytest.mark.push
def test_completing_reads_no_model_and_asks_no_server() -> None:
    program = """
import sys
from llmrun.__main__ import main
try:
    main()
except SystemExit:
    pass
print([name for name in ("numpy", "httpx2", "huggingface_hub", "rich", "prompt_toolkit", "llmrun.formats.gguf.reader")
       if name in sys.modules])
"""
    command = [sys.executable, "-c", program, "completion", "--complete", "--", "chat", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_names_of_conversations_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    assert words_for("conversations", "show", "") == []
    saved = tmp_path / "data" / "conversations" / "saved"
    saved.mkdir(parents=True)
    for path in (saved.parent / "why-is-the-sky-blue.jsonl", saved / "copy one.jsonl"):
        path.write_text("{}\n")
    names = ["why-is-the-sky-blue", "copy one"]
    for words in (("show",), ("export",), ("rm",), ("rm", "copy one")):
        assert words_for("conversations", *words, "") == names
    assert words_for("chat", "--continue", "") == names
    assert words_for("chat", "--continue=wh") == ["--continue=why-is-the-sky-blue"]


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_speculate_takes_words_and_models(command: str) -> None:
    found = words_for(command, "--speculate", "")
    assert {"auto", "off", "smollm2:135m"} <= set(found)
    assert words_for("bench", "--speculate", "off,au") == ["off,auto"]
