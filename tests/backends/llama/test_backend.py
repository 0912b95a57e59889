"""Tests that the llama.cpp backend keeps the Backend contract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import Backend, OpenOptions
from llmrun.backends.llama.backend import MAX_ROWS, LlamaBackend
from llmrun.backends.llama.messages import MOST_WANTED
from llmrun.base.errors import Cancelled, DoesNotFit, LlmrunError, ModelFileError, UnsupportedModel
from llmrun.base.types import Batch
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.seam_contract import CONTEXT, FullCacheContract, SeamContract, batch_of, rows
from tests.support.models.downloads import smollm2
from tests.support.models.llama_cpp_oracle import LlamaCppModel
from tests.support.models.tiny_models import changed_copy, tiny_model

OPTIONS = OpenOptions(context_size=CONTEXT, threads=1, gpu_layers=0)


def open_llama(path: Path, **options: Any) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(file, replace(OPTIONS, **options))


@pytest.mark.push
class TestSeam(SeamContract, FullCacheContract):
    exact = False  # llama.cpp picks its summation order by batch size

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self.path = tiny_model(tmp_path, "F32")

    def open_backend(self, *, context_size: int, max_sequences: int) -> Backend:
        return open_llama(self.path, context_size=context_size, max_sequences=max_sequences)

    def open_with_capacity(self, capacity: int, *, context_size: int, max_sequences: int) -> Backend:
        return open_llama(self.path, context_size=256, kv_tokens=256, max_sequences=max_sequences)


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, count).tolist()  # type: ignore[no-any-return]


def assert_close(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.005 * float(np.ptp(expected)))


@pytest.fixture(scope="module")
def smollm() -> Iterator[LlamaBackend]:
    backend = open_llama(smollm2(), context_size=1024, max_sequences=2)
    yield backend
    backend.close()


@pytest.mark.push
def test_logits_of_the_real_model_are_llama_cpps(smollm: LlamaBackend) -> None:
    tokens = smollm.tokenizer.encode("The sea was calm. " * 18, add_special=True, parse_special=True).tolist()
    assert len(tokens) > MOST_WANTED
    smollm.kv.free(0)
    actual = smollm.forward(batch_of(rows(0, 0, tokens))).logits
    with LlamaCppModel(smollm2(), kv_type="f16", flash_attention=True) as theirs:
        expected = theirs.logits(tokens)
    assert_close(actual[:MOST_WANTED], expected[:MOST_WANTED])
    # From here on, our rows are in another batch, and llama.cpp rounds what each batch computes to 8 bits.
    difference = np.abs(actual[MOST_WANTED:] - expected[MOST_WANTED:])
    assert difference.mean() < 0.005 * float(np.ptp(expected))


@pytest.mark.night
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0", "q8_0:q4_0", "q4_0:f16"])
def test_logits_with_a_smaller_cache_are_llama_cpps(kv_type: str) -> None:
    tokens = some_tokens(200)
    backend = open_llama(smollm2(), kv_type=kv_type, context_size=512)
    actual = backend.forward(batch_of(rows(0, 0, tokens))).logits
    backend.close()
    with (
        LlamaCppModel(smollm2(), kv_type=kv_type, flash_attention=True) as theirs,
        LlamaCppModel(smollm2(), kv_type="f16", flash_attention=True) as other,
    ):
        expected, differing = theirs.logits(tokens), other.logits(tokens)
    assert_close(actual[:MOST_WANTED], expected[:MOST_WANTED])
    assert np.abs(actual[:MOST_WANTED] - expected[:MOST_WANTED]).mean() < np.abs(differing - expected).mean() / 2


@pytest.mark.push
def test_a_head_that_llama_cpp_has_no_8_bit_cache_for_is_named(tmp_path: Path) -> None:
    """The heads have 16 features, for which our own engine has an 8-bit cache."""
    path = tiny_model(tmp_path, "F32 odd")
    with pytest.raises(LlmrunError, match="type q8_0 with block size 32 does not divide n_embd_head_k=16"):
        open_llama(path, kv_type="q8_0")


@pytest.mark.push
def test_a_long_prompt_of_the_real_model_is_stopped_in_the_middle(smollm: LlamaBackend) -> None:
    tokens, long, other = some_tokens(20), some_tokens(900, seed=2), some_tokens(5, seed=3)
    for seq in range(2):
        smollm.kv.free(seq)
        smollm.forward(batch_of(rows(seq, 0, tokens)))
    timer = threading.Timer(0.3, smollm.cancel)  # out of several seconds
    timer.start()
    with pytest.raises(Cancelled):
        smollm.forward(batch_of(rows(0, 20, long)))
    assert smollm.kv.lengths == [20, 20]
    stopped = smollm.forward(batch_of(rows(0, 20, other))).logits
    assert_close(stopped, smollm.forward(batch_of(rows(1, 20, other))).logits)


@pytest.mark.night
@pytest.mark.parametrize("every", [1, 7, 2000])
def test_a_batch_of_any_size_is_run_in_parts(tmp_path: Path, every: int) -> None:
    """The batch has two sequences, more rows than one request takes, and more logits than llama.cpp returns."""
    backend = open_llama(tiny_model(tmp_path, "F32"), context_size=2048, max_sequences=2)
    tokens = some_tokens(2 * MAX_ROWS + 452)
    first, second = tokens[: MAX_ROWS + 200], tokens[MAX_ROWS + 200 :]
    batch = batch_of([*rows(0, 0, first), *rows(1, 0, second)])
    want = np.arange(1, len(tokens) + 1) % every == 0
    actual = backend.forward(Batch(batch.tokens, batch.seq, batch.pos, want)).logits
    assert backend.kv.lengths == [len(first), len(second)]
    expected = []
    for part in (first, second):
        backend.kv.free(0)
        expected += [
            backend.forward(batch_of(rows(0, at, part[at : at + 50]))).logits for at in range(0, len(part), 50)
        ]
    assert_close(actual, np.concatenate(expected)[want])
    backend.close()


def refused(tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> LlmrunError:
    path = changed_copy(tiny_model(tmp_path, "F32"), tmp_path / "changed.gguf", change)
    with pytest.raises(LlmrunError) as caught:
        open_llama(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.push
def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    error = refused(tmp_path, lambda metadata, tensors: tensors.pop("blk.1.ffn_up.weight"))
    assert type(error) is ModelFileError
    assert "blk.1.ffn_up.weight" in str(error)


@pytest.mark.push
def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        kind, raw, shape = tensors["blk.0.attn_q.weight"]
        tensors["blk.0.attn_q.weight"] = (kind, raw, (shape[0] // 2, shape[1] * 2))

    error = refused(tmp_path, change)
    assert type(error) is ModelFileError
    assert "blk.0.attn_q.weight" in str(error)


@pytest.mark.push
def test_an_architecture_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for key in [key for key in metadata if key.startswith("llama.")]:
            metadata["abacus." + key.removeprefix("llama.")] = metadata.pop(key)
        metadata["general.architecture"] = "abacus"

    error = refused(tmp_path, change)
    assert type(error) is UnsupportedModel
    assert "unknown model architecture: 'abacus'" in str(error)


def test_a_split_of_text_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    error = refused(tmp_path, lambda metadata, tensors: metadata.update({"tokenizer.ggml.pre": "abacus"}))
    assert type(error) is UnsupportedModel
    assert "unknown pre-tokenizer type: 'abacus'" in str(error)


def test_a_context_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"a KV cache of 1,073,741,824 tokens \(262,144 MiB\) need "):
        open_llama(tiny_model(tmp_path, "F32"), context_size=1 << 30)


@pytest.mark.push
def test_more_sequences_than_llama_cpp_has(tmp_path: Path) -> None:
    with pytest.raises(LlmrunError, match="n_seq_max must be <= 256"):
        open_llama(tiny_model(tmp_path, "F32"), max_sequences=1000)
