"""Runs the commands and programs in README.md and docs/ as a new user would, with SmolLM2 for all models.

NOT_RUN lists all commands that do not run here; tests/test_docs.py parses those of llmrun.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli.documented import PAGES, blocks, commands, enter_home, run_commands, run_program, serving
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.push

CODER = "needs a better model; tests/real/test_docs_commands.py runs it"
# Patterns that are found in commands or programs, and the reason why these do not run.
NOT_RUN = {
    r"^(\. \.venv|scripts/|python scripts/check-gpu)": "a script of this repository with tests of its own",
    r"^(CMAKE_ARGS=\S+ )?pip |^(sudo|hf|tar|cmake|trap|ln|rpc/bin/ggml-rpc-server|ray|vulkaninfo|lm_eval)\b": (
        "installs or runs another program"
    ),
    r"^llmrun launch [a-z]": "needs an agent and a better model; tests/cli/launching has stand-ins",
    r"^docker\b": "needs Docker; scripts/try_container runs the image",
    r"^(gh|git (switch|tag)|pypi-attestations|sha256sum)\b": "needs a release",
    r"^LLAMA_CPP_LIB_PATH=": "needs packages that the tests do not install",
    r"\b10\.0\.0\.\d|\b127\.0\.0\.1:11434/": "needs other machines or another program's server",
    r"https://example\.org|search --hub|pull .*--(lock|revision)|^llmrun pull( --locked.*)?$": "needs the Hub",
    r"\bllmrun fit (qwen3:8b|hf:)": "needs the Hub, because fit lists all quantizations",
    r"\b(ollama|lmstudio):": "needs models of Ollama or LM Studio; tests/hub/local has some",
    r"Qwen3-(Embedding|Reranker)": "needs a model for embeddings or rankings; tests/cli/test_embed.py has some",
    r"import (ollama|httpx)": "needs a package that the tests do not install; scripts/test_clients does",
    r"\b(gemma3:4b|llama3\.2:3b)": "needs the model itself, because the catalogue has its sha256",
    r"\b(llmrun rm|rm -rf)\b": "removes what other tests use; tests/cli/test_store_commands.py removes models",
    r"--(gpu-layers|tensor-split|split-mode|main-gpu)": "needs a GPU",
    r"\bbig-00001-of-": "needs a split model; tests/hub/upkeep/test_importing.py has some",
    r"Qwen2\.5-7B-Instruct-AWQ|qwen2\.5-7b\.gguf": "needs a checkpoint; tests/cli/test_convert.py has some",
    r"\bllmrun bench": "takes half a minute or longer; tests/cli/test_bench.py runs it for a shorter time",
    r"\bllmrun doctor": "measures the machine; tests/cli/test_doctor.py runs it",
    r"\bMODEL\b": "MODEL stands for a name",
    r"--suffix|--json-object|--tools": CODER,
}
SLOW = {"adapters.md", "evaluation.md", "gpus.md", "models.md", "using.md"}  # 12 to 56 s each on two cores
EXCERPTS = {"adding-a-quantization.md", "adding-a-route.md"}  # pages with parts of llmrun's source


def reason(text: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, text)), None)


COMMANDS = {page: [*commands(page)] for page in PAGES}
PROGRAMS = [program for page in PAGES if page.name not in EXCERPTS for program in blocks(page, "python")]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=pytest.mark.night if page.name in SLOW else ()) for page in PAGES],
)
def test_every_command_shown_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a page run from top to bottom."""
    if lines := [command for command in COMMANDS[page] if not reason(command)]:
        enter_home(tmp_path, page, smollm2(), monkeypatch)
        run_commands(lines)


def test_every_program_shown_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_home(tmp_path, PAGES[0], smollm2(), monkeypatch)
    with serving("llmrun serve qwen3:4b") as server:
        for program in PROGRAMS:
            if not reason(program):
                run_program(program, server)


def test_every_reason_not_to_run_is_needed(saw: Callable[[int, str, int], None]) -> None:
    shown = [text for texts in (*COMMANDS.values(), PROGRAMS) for text in texts]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, text) for text in shown)] == []
    saw(sum(not reason(text) for text in shown), "commands and programs of the documentation that run", 110)
