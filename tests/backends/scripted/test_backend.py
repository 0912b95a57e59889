"""Tests that the scripted backend keeps the Backend contract and enforces it on its caller."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.base import OpenOptions
from llmrun.backends.scripted import (
    BOS,
    CONTROL_TOKENS,
    IM_END,
    KIND,
    ScriptedBackend,
    ScriptedTokenizer,
    SeamError,
    as_characters,
    echo,
    scripted_answers,
)
from llmrun.base.errors import Cancelled, UsageError
from llmrun.base.types import Batch
from tests.support.backends.seam_contract import FullCacheContract, SeamContract, batch_of, rows


class TestScriptedSeam(SeamContract, FullCacheContract):
    def open_backend(self, *, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(None, context_size=context_size, max_sequences=max_sequences)

    def open_with_capacity(self, capacity: int, *, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(None, context_size=context_size, max_sequences=max_sequences, capacity=capacity)


class TestScriptedSeamWithCheckpoints(SeamContract):
    goes_back = False

    def open_backend(self, *, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(None, context_size=context_size, max_sequences=max_sequences, checkpoint=16)


@pytest.mark.parametrize(
    ("triples", "breach"),
    [
        ([(1, 0, 1)], "sequence 0 continues at position 0, not 1"),
        ([(1, 0, 0), (2, 0, 2)], "sequence 0 continues at position 1, not 2"),
        ([(1, 2, 0)], "sequences must be 0 to 1"),
        ([(1, -1, 0)], "sequences must be 0 to 1"),
        ([(260, 0, 0)], "token ids must be 0 to 259"),
        ([], "a batch needs at least one row"),
        ([(1, 0, position) for position in range(9)], "9 tokens does not fit in a context of 8"),
    ],
)
def test_a_broken_batch_is_refused(triples: list[tuple[int, int, int]], breach: str) -> None:
    backend = ScriptedBackend(context_size=8, max_sequences=2)
    with pytest.raises(SeamError, match=breach):
        backend.forward(batch_of(triples))


def test_wrong_types_are_refused() -> None:
    good = batch_of(rows(0, 0, [1]))
    with pytest.raises(SeamError, match="tokens: int64"):
        ScriptedBackend().forward(Batch(good.tokens.astype(np.int64), good.seq, good.pos, good.want))


def test_the_cache_is_policed() -> None:
    backend = ScriptedBackend(max_sequences=2)
    backend.forward(batch_of(rows(0, 0, [1, 2, 3])))
    with pytest.raises(SeamError, match="4 tokens of sequence 0, which has 3"):
        backend.kv.truncate(0, 4)
    with pytest.raises(SeamError, match="sequence 2 is out of range for 2 sequences"):
        backend.kv.copy(0, 2, 1)
    with pytest.raises(SeamError, match="to itself"):
        backend.kv.copy(0, 0, 1)


def test_nothing_runs_after_close() -> None:
    backend = ScriptedBackend()
    backend.close()
    with pytest.raises(SeamError, match="after close"):
        backend.forward(batch_of(rows(0, 0, [1])))


def test_a_checkpointed_cache_keeps_whole_checkpoints_only() -> None:
    backend = ScriptedBackend(max_sequences=2, checkpoint=4)
    backend.forward(batch_of(rows(0, 0, range(11))))
    assert backend.kv.copy(0, 1, 11) == 11
    assert backend.kv.copy(0, 1, 10) == 8
    assert backend.kv.truncate(0, 11) == 11
    assert backend.kv.truncate(0, 7) == 4


def test_cancel_stops_a_slow_step_at_once() -> None:
    backend = ScriptedBackend(step_seconds=30)
    started = time.monotonic()
    timer = Timer(0.05, backend.cancel)
    timer.start()
    with pytest.raises(Cancelled):
        backend.forward(batch_of(rows(0, 0, [1, 2])))
    assert time.monotonic() - started < 20
    assert backend.kv.sequences[0] == []


def spoken(voice_text: str, chat: str) -> str:
    backend = ScriptedBackend(scripted_answers([("cue", voice_text)]) if voice_text else echo)
    tokens = backend.tokenizer.encode(chat, add_special=True, parse_special=True).tolist()
    said: list[int] = []
    while len(said) < 100:
        held = len(backend.kv.sequences[0])
        logits = backend.forward(batch_of(rows(0, held, (tokens + said)[held:]))).logits[-1]
        token = int(logits.argmax())
        if token == IM_END:
            break
        said.append(token)
    return backend.tokenizer.decode(said).decode()


def test_it_echoes_the_last_question() -> None:
    chat = "<|im_start|>user\nno<|im_end|>\n<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n"
    assert spoken("", chat) == "You said: Grüße"


def test_it_goes_on_from_a_raw_prompt_in_letters() -> None:
    text = spoken("", "Once upon")
    assert len(text) == 100
    assert set(text) <= set("etaoin shrdlu")


def test_it_says_its_script() -> None:
    assert spoken("an answer of 🙂", "the cue") == "an answer of 🙂"


def test_a_voice_sees_one_character_a_token() -> None:
    assert as_characters("a<|im_end|>é") == "a" + chr(IM_END) + "Ã©"


def test_a_script_can_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"answers": [["2+2", "4"]], "vocabulary_size": 300}))
    backend = KIND.open(path, OpenOptions(context_size=64, max_sequences=3))
    assert (backend.info.vocabulary_size, backend.info.context_size, backend.info.max_sequences) == (300, 64, 3)
    logits = backend.forward(batch_of(rows(0, 0, list(b"2+2")))).logits
    assert logits[-1].argmax() == ord("4")


@pytest.mark.parametrize("content", ["{", "[]", '{"answers": 3}'])
def test_a_broken_script_is_a_usage_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="invalid script"):
        KIND.open(path, OpenOptions())


fragments = st.lists(st.one_of(st.sampled_from([*CONTROL_TOKENS, "\ufdd0", "<", "|", "|>"]), st.text(max_size=5)))


@given(fragments)
def test_protected_text_never_becomes_a_control_token(parts: list[str]) -> None:
    tokenizer = ScriptedTokenizer()
    text = "".join(parts)
    protected = tokenizer.protect(text)
    assert tokenizer.unprotect(protected) == text
    ids = tokenizer.encode_rendered("<|im_start|>" + protected + "<|im_end|>").tolist()
    expected = [BOS, BOS + 2, *text.encode("utf-8", "replace"), IM_END]
    assert ids == expected
