"""Tests that any change to the JSON files of a checkpoint ends in a plan or in an error of one line."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llmrun.base.errors import LlmrunError
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.convert import plan_conversion
from tests.support.converting.checkpoints import TinyCheckpoint, sentencepiece_tokenizer, tiny_checkpoint

pytestmark = pytest.mark.push

TEXTS = ["", "x", "\ud800", "\x1b[31m\n", "[PAD9]", "a\0b"]
JUNK: list[Any] = [None, True, 0, -1, 7, 2**31 - 1, 10**30, 0.5, 1e300, *TEXTS, [], [[]], ["x"], {}, {"x": {}}]
CASES = 250
_YARN = {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0}


def sentencepiece_checkpoint() -> TinyCheckpoint:
    checkpoint = tiny_checkpoint("MistralForCausalLM", "gptq", rope_scaling=_YARN)
    checkpoint.tokenizer = sentencepiece_tokenizer()
    checkpoint.tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": [{"name": "default"}]}
    return checkpoint


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values of nested objects and arrays, with a few elements of the long ones."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for count, (key, below) in enumerate(inner):
        if count < 12:
            found += places_of(below, (*path, key))
    return found


@pytest.mark.parametrize("make", [tiny_checkpoint, sentencepiece_checkpoint])
def test_junk_in_any_place_is_no_traceback(make: Any, tmp_path: Path) -> None:
    folder = make().write(tmp_path / "model")
    parts = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    source, seen = Random(1), Counter[str]()
    for case in range(CASES):
        changed = copy.deepcopy(parts)
        name = source.choice(sorted(parts))
        *outer, last = source.choice(places_of(parts[name]))
        target = changed[name]
        for key in outer:
            target = target[key]
        target[last] = source.choice(JUNK)
        (folder / name).write_text(json.dumps(changed[name]))
        try:
            with Checkpoint(folder) as checkpoint:
                seen["planned"] += bool(plan_conversion(checkpoint).nbytes)
        except LlmrunError as error:
            seen["refused" if str(error).isprintable() else f"case {case}: {error}"] += 1
        (folder / name).write_text(json.dumps(parts[name]))
    assert set(seen) == {"planned", "refused"}
    assert min(seen.values()) > CASES // 10
