"""Compare perplexity and divergence with llama.cpp's logits, to which the definitions are applied in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.base.types import Batch, Outputs
from llmrun.jobs.evaluation.measuring import (
    Chunk,
    Comparison,
    Source,
    TextResult,
    chunks_of,
    opened,
    scores_of_chunks,
    summarized,
    tokens_of,
)
from tests.support.models.downloads import smollm2
from tests.support.models.llama_cpp_oracle import LlamaCppModel, requantize
from tests.support.models.prompts import passages
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

pytestmark = pytest.mark.push

CHUNKS, CONTEXT = 2, 512
TEXT = "\n\n".join(passages())
# Our engine quantizes activations, llama.cpp with F32 weights does not. (With quantized weights it does, too, in a way
# that depends on the processor.) Measured: 0.4 % for the perplexity, and 1.4 % for the divergence.
PERPLEXITY_BOUND, DIVERGENCE_BOUND = 0.005, 0.05


Pair: TypeAlias = tuple[LlamaCppModel, LlamaCppModel]  # of the base and of the damaged copy


class OracleBackend:
    """llama.cpp as far as evaluating chunks needs a backend. It reads the chunk again in each pass."""

    def __init__(self, model: LlamaCppModel, backend: Backend) -> None:
        """Wrap a model. Its vocabulary is that of `backend`."""
        self._model = model
        self._read: list[int] = []
        self.info, self.tokenizer, self.kv = backend.info, backend.tokenizer, self

    def free(self, seq: int) -> None:
        assert seq == 0
        self._read.clear()

    def forward(self, batch: Batch) -> Outputs:
        assert batch.pos[0] == len(self._read)
        self._read += batch.tokens.tolist()
        logits = self._model.logits(self._read)[-len(batch.want) :][batch.want != 0]
        return Outputs(logits, np.empty((0, 0), np.float32))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return SmolLM2 and a copy that was quantized twice, which has lost much of its quality."""
    return smollm2(), requantize(smollm2(), tmp_path_factory.mktemp("models") / "damaged.gguf", "Q4_0")


@pytest.fixture(scope="module")
def theirs(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("dequantized")
    with ExitStack() as held:
        base, damaged = (
            held.enter_context(LlamaCppModel.oracle(requantize(path, folder / path.name, "F32"))) for path in files
        )
        yield base, damaged


@pytest.fixture(scope="module")
def ours(files: tuple[Path, Path]) -> Iterator[list[Backend]]:
    """Open the damaged copy as the model, and the original as its base."""
    base, damaged = (Source(path, OpenOptions("cpu", context_size=CONTEXT, kv_type="f16")) for path in files)
    with opened(damaged, base) as backends:
        yield backends


@pytest.fixture(scope="module")
def chunks(ours: list[Backend]) -> list[Chunk]:
    return chunks_of(TEXT, ours[0].tokenizer, CONTEXT, CHUNKS)


def by_definition(theirs: Pair, chunks: Sequence[Chunk]) -> dict[str, float]:
    """Return the figures of llama.cpp's logits, computed from all positions at once."""
    logs = []
    for model in theirs:
        logits = np.concatenate([model.logits(chunk.inputs.tolist())[chunk.first :] for chunk in chunks])
        logs.append(logits - np.logaddexp.reduce(logits.astype(np.float64), axis=1, keepdims=True))
    base, damaged = logs
    following = np.concatenate([chunk.following for chunk in chunks])
    rows = np.arange(len(following))
    divergence = (np.exp(base) * (base - damaged)).sum(axis=1)
    return {
        "perplexity": float(np.exp(-damaged[rows, following].mean())),
        "of the base": float(np.exp(-base[rows, following].mean())),
        "divergence": float(divergence.mean()),
        "median": float(np.median(divergence)),
        "maximum": float(divergence.max()),
        "same top": float((base.argmax(axis=1) == damaged.argmax(axis=1)).mean()),
    }


def figures(found: TextResult) -> dict[str, float]:
    assert found.base is not None
    comparison = cast("Comparison", found.comparison)
    return {
        "perplexity": found.model.value.estimate,
        "of the base": found.base.value.estimate,
        "divergence": comparison.divergence.estimate,
        "median": comparison.percentiles[0],
        "maximum": comparison.maximum,
        "same top": comparison.same_top.estimate,
    }


def test_texts_are_tokenized_as_by_llama_perplexity(ours: list[Backend]) -> None:
    expected = LlamaVocabulary(smollm2()).encode(TEXT, add_special=True, parse_special=False)
    assert tokens_of(TEXT, ours[0].tokenizer).tolist() == list(expected)


@pytest.mark.night
def test_the_figures_are_those_of_the_same_logits(ours: list[Backend], theirs: Pair, chunks: list[Chunk]) -> None:
    base, damaged = (cast("Backend", OracleBackend(model, ours[0])) for model in theirs)
    found = figures(summarized(list(scores_of_chunks(damaged, base, chunks))))
    assert found == pytest.approx(by_definition(theirs, chunks), rel=1e-6)


@pytest.mark.night
def test_the_engine_gives_the_figures_of_llama_cpp(ours: list[Backend], theirs: Pair, chunks: list[Chunk]) -> None:
    found = figures(summarized(list(scores_of_chunks(ours[0], ours[1], chunks))))
    expected = by_definition(theirs, chunks)
    for name in ("perplexity", "of the base"):
        assert found[name] == pytest.approx(expected[name], rel=PERPLEXITY_BOUND)
    for name in ("divergence", "median"):
        assert found[name] == pytest.approx(expected[name], rel=DIVERGENCE_BOUND)
    assert found["same top"] == pytest.approx(expected["same top"], abs=0.03)
    assert found["divergence"] > 0.1  # much more than the engines differ
