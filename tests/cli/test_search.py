"""Tests of `llmrun search` as users type it, in a pipe and on terminals of several widths, with a local Hub."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli.commands import ROOT, llmrun, screen_of, shell
from tests.support.hub.fake_hub import FakeHub, fake_hub
from tests.support.hub.hub_client import settled
from tests.support.hub.model_stores import Stores

pytestmark = pytest.mark.push

HEADS = ["NAME", "PARAMS", "DOWNLOAD", "FITS", "HERE", "CONTEXT", "LICENCE"]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        for name in ("Qwen/Qwen3-4B-GGUF", "unsloth/Qwen3-8B-GGUF", "o/n"):
            running.add(name, {"m-Q8_0.gguf": b"GGUF"})
        yield running


def at(endpoint: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_ENDPOINT": endpoint, "NO_PROXY": "*", "PYTHONPATH": str(ROOT)}


def test_the_catalogue_is_listed_without_asking_anybody(stores: Stores, hub: FakeHub) -> None:
    done = llmrun("search", env=at(hub.url))
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.decode().splitlines()
    assert head.split() == HEADS
    assert len(rows) > 100
    assert "\x1b" not in head
    assert settled(hub) == []
    facts = rf"{len(rows)} models  [\d.]+ [GM]B of memory free  llmrun pull NAME  llmrun fit NAME\n"
    assert re.fullmatch(facts, done.stderr.decode())


def test_words_filter_and_what_is_here_is_marked(stores: Stores) -> None:
    stores.shared("Qwen/Qwen3-4B-GGUF", {"Qwen3-4B-Q4_K_M.gguf": b"GGUF"})
    rows = llmrun("search", "qwen3", "4B", "apache", "-q")
    assert rows.stderr == b""
    lines = rows.stdout.decode().splitlines()[1:]
    assert [line.split()[0] for line in lines] == [
        *("qwen3:4b", "qwen3:4b-instruct", "qwen3:4b-thinking", "qwen3.5:4b")
    ]
    assert [" Q4_K_M " in line for line in lines] == [True, False, False, False]
    limited = llmrun("search", "qwen3", "-n", "2")
    assert limited.stdout.count(b"\n") == 3
    assert limited.stderr.startswith(b"2 of ")


def test_unknown_sizes_are_question_marks(stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.toml").write_text(
        '[models."mine:big"]\ndescription = "Mine"\nlicense = "MIT"\nrepository = "o/n"\n'
        'quants.Q4_K_M = { file = "m-Q4_K_M.gguf" }\n'
    )
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    done = llmrun("search", "mine:big", "-q")
    assert done.stdout.decode().splitlines()[1].split() == ["mine:big", "?", "?", "MIT"], done.stderr


def test_json_has_the_facts(stores: Stores) -> None:
    done = llmrun("search", "smollm2:135m", "--json")
    assert done.stderr == b""
    answer = json.loads(done.stdout)
    assert answer["memory_free"] > 0
    (model,) = answer["models"]
    assert model.pop("description").startswith("SmolLM2 135M")
    assert model.pop("memory_needed_estimate") > model["bytes"]
    assert model == {
        "name": "smollm2:135m",
        "family": "smollm2",
        "license": "Apache-2.0",
        "aliases": [],
        "parameters": 134_515_008,
        "context": 8192,
        "quantization": "Q4_1",
        "quantizations": ["Q4_K_M", "Q4_0", "Q4_1", "IQ4_XS", "Q5_K_M", "Q6_K", "Q8_0", "F16"],
        "bytes": 98_362_432,
        "bytes_exact": True,
        "fits": "yes",
        "here": [],
    }


def test_words_without_a_model_are_exit_code_4(stores: Stores) -> None:
    done = llmrun("search", "qwn3")
    assert (done.returncode, done.stdout) == (4, b"")
    assert done.stderr == (
        b"error: search: 'qwn3': no model in the catalogue matches\nhint: did you mean `llmrun search qwen3`?\n"
    )


@pytest.mark.parametrize(("columns", "kept"), [(100, 7), (60, 6), (50, 5), (40, 4), (32, 3), (24, 2)])
def test_a_narrow_terminal_has_fewer_columns(stores: Stores, columns: int, kept: int) -> None:
    screen, code = screen_of("search", "smollm2", columns=columns, NO_COLOR="1")
    assert code == 0
    lines = screen.splitlines()
    table = lines[: next(number for number, line in enumerate(lines) if line.startswith("3 models"))]
    assert len(table) == 4
    assert len(table[0].split()) == kept
    assert max(map(len, table)) < columns
    assert [head for head in HEADS if head in table[0].split()] == table[0].split()


def test_the_list_ends_with_recommendations_on_a_terminal(stores: Stores) -> None:
    screen, code = screen_of("search", NO_COLOR="1")
    assert code == 0
    last = screen.partition("For this machine (llmrun fit)\n")[2].splitlines()
    assert last[0].split() == ["COMMAND", "DOWNLOAD", "MEMORY", "TOK/S"]
    assert "llmrun chat " in last[1]
    assert last[1].startswith(("fast", "balanced", "best"))
    for arguments in (("qwen3",), ("--json",), ("-q",)):
        assert "For this machine" not in screen_of("search", *arguments, NO_COLOR="1")[0]


def test_it_starts_fast(stores: Stores) -> None:
    """Checks the imports, because times vary too much while other tests run."""
    code = f"import sys; sys.argv = ['llmrun', 'search', 'qwen']; from llmrun.cli.app import main; {RUN}"
    done = shell(f'{sys.executable} -c "{code}" 2>&1 >/dev/null')
    loaded = set(done.stdout.decode().split())
    assert "llmrun.hub.search" in loaded
    assert not loaded & {"numpy", "huggingface_hub", "httpx2", "ssl", "asyncio", "rich", "llvmlite"}


RUN = "main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"


@pytest.mark.night
def test_the_hub_is_asked_with_hub(stores: Stores, hub: FakeHub) -> None:
    done = llmrun("search", "--hub", "qwen3", env=at(hub.url))
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.decode().splitlines()] == [
        ["NAME", "DOWNLOADS", "LIKES", "LICENCE"],
        ["hf:Qwen/Qwen3-4B-GGUF", "1,000", "0", "mit"],
        ["hf:unsloth/Qwen3-8B-GGUF", "999", "1", "mit"],
    ]
    assert done.stderr == b"2 repositories  llmrun fit NAME\n"
    hub.add("o/locked", {"m-Q8_0.gguf": b"GGUF"}, gated=True)
    assert llmrun("search", "--hub", "locked", env=at(hub.url)).stdout.endswith(b"mit, gated\n")
    one = llmrun("search", "--hub", "qwen3", "-n", "1", "--json", env=at(hub.url))
    assert json.loads(one.stdout) == {
        "models": [
            {
                "name": "hf:Qwen/Qwen3-4B-GGUF",
                "repository": "Qwen/Qwen3-4B-GGUF",
                "downloads": 1000,
                "likes": 0,
                "license": "mit",
                "gated": False,
            }
        ]
    }


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (["x"], {"HF_ENDPOINT": "http://127.0.0.1:1"}, 5, "the Hub does not respond: unreachable (Connection refused)"),
        (["x", "--offline"], {}, 5, "search --hub: not available offline"),
        (["x"], {"HF_HUB_OFFLINE": "1"}, 5, "search --hub: not available offline"),
        (["zzzz"], {}, 4, "no GGUF model on the Hub matches 'zzzz'"),
        (["-n", "0"], {}, 2, "limit"),
    ],
)
def test_a_hub_that_gives_nothing_is_one_line(
    stores: Stores, hub: FakeHub, arguments: list[str], environment: dict[str, str], code: int, words: str
) -> None:
    done = llmrun("search", "--hub", *arguments, env=at(hub.url) | environment)
    error, *hints = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (code, b"")
    assert error.startswith("error: ")
    assert words in error
    assert len(hints) <= 1
