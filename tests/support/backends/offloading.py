"""Helpers for tests in which llama.cpp runs layers on other devices: GPUs and RPC servers.

Other devices use other kernels. With unquantized weights, and on RPC servers, the logits agree within the tolerance of
the llama backend. Quantized weights on a GPU have a wider tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.base.errors import Cancelled
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.seam_contract import CONTEXT, batch_of, rows
from tests.support.models.downloads import smollm2

OPTIONS = OpenOptions(context_size=CONTEXT, threads=1)
PROMPT = np.random.default_rng(1).integers(5, 40_000, 129).tolist()  # ids of SmolLM2's tokens

_BUFFER = re.compile(r" ((?:CUDA|Vulkan)\d+) (model|KV|RS|compute) buffer size = +([\d.]+) MiB")


def open_llama(path: Path, **options: Any) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(file, replace(OPTIONS, **options))


def logits_of_smollm2(tokens: Sequence[int] = PROMPT, **options: Any) -> tuple[NDArray[np.float32], str]:
    """Return the logits for a prompt and then for one token, and where the layers ran."""
    backend = open_llama(smollm2(), context_size=512, **options)
    try:
        prompt = backend.forward(batch_of(rows(0, 0, tokens[:-1]))).logits
        last = backend.forward(batch_of(rows(0, len(tokens) - 1, tokens[-1:]))).logits
        return np.concatenate([prompt, last]), backend.info.device
    finally:
        backend.close()


def assert_usable_after_a_stop(backend: LlamaBackend, *, n_tokens: int) -> None:
    """Check that a step that was stopped changes nothing about the next one."""
    tokens = np.random.default_rng(0).integers(5, 40_000, n_tokens).tolist()
    expected = backend.forward(batch_of(rows(0, 0, tokens[:5]))).logits
    backend.kv.free(0)
    backend.cancel()
    with pytest.raises(Cancelled):
        backend.forward(batch_of(rows(0, 0, tokens)))
    backend.kv.free(0)
    np.testing.assert_array_equal(backend.forward(batch_of(rows(0, 0, tokens[:5]))).logits, expected)


def assert_agree(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Check that all logits are close, and that the distributions of the next token are nearly the same."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.005 * float(np.ptp(expected)))
    assert kl_divergence(expected, actual) < 1e-3


def assert_similar(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Check logits of quantized weights on a GPU against those of the CPU.

    Both round activations to 8 bits, but in different ways. For Q4_1, the CPU multiplies a block's minimum by the sum
    of the rounded activations, and CUDA by the sum before rounding, which makes the error of a product 2.7 times
    larger. For random tokens, the CPU's logits of SmolLM2 differ by 0.3 % of their range from those of the dequantized
    weights (divergence 0.007), and by 0.7 % from those of an H100 (divergence 0.03; 0.9 % and 0.04 with an 8-bit
    cache). With Vulkan, the logits of one of the 129 tokens differ by 37 %, because it has huge activations, for which
    the integer products of llama.cpp's shaders are imprecise. Without such products
    (GGML_VK_DISABLE_INTEGER_DOT_PRODUCT), they differ by 1.2 %.
    Unrelated logits of the tiny models differ by more than 10 %.
    """
    assert float(np.abs(actual - expected).mean()) < 0.02 * float(np.ptp(expected))
    assert kl_divergence(expected, actual) < 0.1


def kl_divergence(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> float:
    """Return the mean divergence of the distributions of the next token."""
    one, other = (np.asarray(rows, np.float64) for rows in (expected, actual))
    one -= np.logaddexp.reduce(one, axis=1, keepdims=True)
    other -= np.logaddexp.reduce(other, axis=1, keepdims=True)
    return float((np.exp(one) * (one - other)).sum(axis=1).mean())


def gpu_buffers(log: Sequence[str]) -> dict[tuple[str, str], int]:
    """Return the bytes of each buffer that llama.cpp allocated on GPUs, by (device, purpose).

    The device has a name such as "CUDA0" or "Vulkan1". The purpose is "model", "KV", "RS" (recurrent states) or
    "compute".
    """
    found: dict[tuple[str, str], int] = {}
    for device, purpose, size in _BUFFER.findall("\n".join(log)):
        found[device, purpose] = found.get((device, purpose), 0) + round(float(size) * (1 << 20))
    return found
