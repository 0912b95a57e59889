"""Tests of evaluating chunks, with models that need no file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.types import Batch, Outputs
from llmrun.jobs.evaluation.measuring import batch_of, check_same_vocabulary, chunks_of, scores_of_chunks, scores_of_two

TEXT = "The harbour of the old town freezes for about six weeks every winter."


class NanBackend(ScriptedBackend):
    """Computes NaN from the second chunk on."""

    def forward(self, batch: Batch) -> Outputs:
        outputs = super().forward(batch)
        return outputs._replace(logits=outputs.logits * np.float32(np.nan)) if len(self.batches) > 1 else outputs


def test_each_chunk_is_evaluated_on_its_own() -> None:
    """The scores equal those of a model that sees only the chunk."""
    model, base = ScriptedBackend(), ScriptedBackend(None)
    chunks = chunks_of(TEXT, model.tokenizer, 16)
    found = list(scores_of_chunks(model, base, chunks))
    assert len(found) == len(chunks) == 4
    for chunk, scores in zip(chunks, found, strict=True):
        rows = batch_of(chunk.inputs, 0, 0, chunk.first)
        expected = scores_of_two(
            ScriptedBackend().forward(rows).logits, ScriptedBackend(None).forward(rows).logits, chunk.following
        )
        for one, other in zip(scores, expected, strict=True):
            assert one.tolist() == other.tolist()


def test_a_model_alone_has_the_same_surprise_as_beside_a_base() -> None:
    chunks = chunks_of(TEXT, ScriptedBackend().tokenizer, 16)
    alone = list(scores_of_chunks(ScriptedBackend(), None, chunks))
    beside = list(scores_of_chunks(ScriptedBackend(), ScriptedBackend(None), chunks))
    assert [one.surprise.tolist() for one in alone] == [one.surprise.tolist() for one in beside]
    assert all(one.base.size == one.divergence.size == one.agrees.size == 0 for one in alone)


@pytest.mark.parametrize("bad", ["model", "base"])
def test_logits_that_are_not_numbers_are_an_error(bad: str) -> None:
    good, wrong = ScriptedBackend(path=Path("good.gguf")), NanBackend(path=Path("wrong.gguf"))
    model, base = (wrong, good) if bad == "model" else (good, wrong)
    scores = scores_of_chunks(model, base, chunks_of(TEXT, good.tokenizer, 16))
    assert np.isfinite(next(scores).surprise).all()
    with pytest.raises(LlmrunError, match=r"wrong.gguf: chunk 2: the model computed logits that are not finite"):
        next(scores)


def test_models_with_different_vocabularies_are_refused() -> None:
    one = ScriptedBackend(path=Path("one.gguf"))
    check_same_vocabulary(one, ScriptedBackend())
    longer = ScriptedBackend(path=Path("longer.gguf"), vocabulary_size=300)
    with pytest.raises(UsageError, match=r"different vocabularies: one.gguf: 260 tokens, but 300 in longer.gguf"):
        check_same_vocabulary(one, longer)
    other = ScriptedBackend(path=Path("other.gguf"), control_tokens=["<think>"])
    with pytest.raises(UsageError, match=r"longer.gguf: token 260 is ' w0', but '<think>'.* in other.gguf"):
        check_same_vocabulary(longer, other)
