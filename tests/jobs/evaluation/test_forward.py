"""Tests of running rows in slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.types import LOGITS, Batch
from llmrun.jobs.evaluation.measuring import batch_of, joined, logits_in_slices, rows_at_a_time


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 9))
def test_slices_give_all_wanted_rows_in_order(want: list[bool], most: int) -> None:
    tokens = np.arange(len(want), dtype=np.int32)
    whole = batch_of(tokens, 0, 0, 0)
    batch = Batch(tokens, whole.seq, whole.pos, np.array(want, np.uint8))
    sliced = ScriptedBackend(None)
    slices = list(logits_in_slices(sliced, batch, most))
    assert all(1 <= len(logits) <= most for logits in slices)
    assert sliced.kv.sequences[0] == tokens.tolist()
    expected = ScriptedBackend(None).forward(whole).logits[want]
    assert np.array_equal(np.concatenate([*slices, expected[:0]]), expected)


def test_batches_of_several_sequences_are_joined() -> None:
    tokens = np.array([7, 8, 9], np.int32)
    batch = joined([batch_of(tokens, 0, 0, 2), batch_of(tokens[:2], 1, 5, 0)])
    assert batch.tokens.tolist() == [7, 8, 9, 7, 8]
    assert batch.seq.tolist() == [0, 0, 0, 1, 1]
    assert batch.pos.tolist() == [0, 1, 2, 5, 6]
    assert batch.want.tolist() == [0, 0, LOGITS, LOGITS, LOGITS]


@pytest.mark.parametrize("vocabulary", [300, 49_152, 151_936, 262_144, 10_000_000])
def test_logits_take_at_most_64_megabytes_with_usual_vocabularies(vocabulary: int) -> None:
    rows = rows_at_a_time(vocabulary)
    assert rows >= 16
    assert 4 * vocabulary * rows <= 64 << 20 or rows == 16
