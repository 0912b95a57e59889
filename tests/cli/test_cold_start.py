"""Tests of cold starts: no garbage collection delays the first token or the exit, and --verbose shows every phase."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.__main__ import collect_after_start
from tests.support.cli.commands import llmrun
from tests.support.gguf.gguf_files import tiny_llama

WATCHED = """
import atexit, gc, sys
from llmrun.__main__ import main
seen = []
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
atexit.register(lambda: print(seen, gc.get_freeze_count() > 10_000, file=sys.stderr))
main()
"""


def test_first_collection_restores_the_usual_frequency() -> None:
    usual, before = gc.get_threshold(), list(gc.callbacks)
    collect_after_start()
    assert gc.get_threshold() == (200_000, *usual[1:])
    gc.collect(0)
    assert (gc.get_threshold(), gc.callbacks) == (usual, before)


@pytest.mark.push
def test_answers_neither_start_nor_end_with_garbage_collections(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    asked = ("generate", "-m", str(path), "-q", "--raw", "-n", "2", "--temp", "0", "--backend", "cpu", "Once")
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *asked], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr == "[] True\n"


@pytest.mark.push
def test_verbose_shows_where_a_cold_start_spent_its_time(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    asked = ("generate", "-m", str(path), "-v", "--raw", "-n", "2", "--temp", "0", "--backend", "cpu", "Once")
    told = llmrun(*asked).stderr.decode()
    for line in (
        r"start      (file found after .*, )?header .*s, imports and the rest .*s",
        r"kernels    .*s",
        r"packing    .*B in .*s, .* GB/s(, system time .*s)?; meanwhile, tokenizer .*s",
    ):
        assert re.search(f"^{line}$", told, re.MULTILINE), told
    if sys.platform == "linux":
        assert re.search(r"^memory     .* page faults per GB of weights", told, re.MULTILINE), told
        assert re.search(r"^TTFT       .*s from the start, .*s from the request$", told, re.MULTILINE), told
