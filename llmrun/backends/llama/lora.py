"""Applies LoRA adapters in llama.cpp: divides batches into forward passes by adapter, and checks what is supported.

The check is necessary because llama.cpp silently leaves out the parts of an adapter that it cannot apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.errors import UnsupportedModel, shown
from llmrun.base.types import HIDDEN, LOGITS, Outputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.base.types import Batch
    from llmrun.formats.gguf.adapter import AdapterFile
    from llmrun.formats.gguf.reader import GGUFFile

Scales = tuple[float, ...]


def passes_of(
    batch: Batch, rows: NDArray[np.intp], n_adapters: int, max_rows: int, max_wanted: int
) -> Iterator[tuple[Scales, NDArray[np.intp]]]:
    """Yield the scales of the adapters and the rows of each pass, with at most as many rows as one request can contain.

    rows  the rows of the batch to run
    The rows of a sequence stay in order, because the number of adapters of a sequence can only grow from row to row,
    and rows with fewer adapters run first.
    """
    if batch.scales is None:
        groups = [((0.0,) * n_adapters, rows)]
    else:
        each = [tuple(scales) for scales in batch.scales[rows].tolist()]
        combinations = sorted(dict.fromkeys(each), key=np.count_nonzero)
        groups = [(scales, rows[[one == scales for one in each]]) for scales in combinations]
    for scales, own in groups:
        for part in _split(batch.want[own], max_rows, max_wanted):
            yield scales, own[part]


def in_order(batch: Batch, passes: Sequence[NDArray[np.intp]], parts: Sequence[Outputs]) -> Outputs:
    """Return the outputs of passes in the order of the batch's rows."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate(passes)
    joined = Outputs(*map(np.concatenate, zip(*parts, strict=True)))
    want = batch.want[rows]
    return Outputs(
        joined.logits[np.argsort(rows[want & LOGITS != 0])], joined.hidden[np.argsort(rows[want & HIDDEN != 0])]
    )


def _split(want: NDArray[np.uint8], max_rows: int, max_wanted: int) -> Iterator[slice]:
    """Split rows into consecutive slices that each fit in one request."""
    if (want & HIDDEN).any():  # passes that compute hidden states return all rows
        yield from (slice(start, start + max_wanted) for start in range(0, len(want), max_wanted))
        return
    start = wanted = 0
    for row, asked in enumerate((want != 0).tolist()):
        if row - start == max_rows or wanted + asked > max_wanted:
            yield slice(start, row)
            start, wanted = row, 0
        wanted += asked
    yield slice(start, len(want))


# Some src/models/*.cpp files of llama-cpp-python 0.3.36 multiply by these tensors with ggml_mul_mat instead of
# build_lora_mm, or read rows of these tables without applying adapters.
_NOT_APPLIED: Final = (
    *("attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b"),
    *("ffn_latent_down", "ffn_latent_up", "per_layer_model_proj", "per_layer_token_embd"),
    *("altup_proj", "altup_router", "altup_unembd_proj", "indexer.attn_k", "indexer.attn_q_b", "indexer.proj"),
    *("ssm_f_a", "ssm_f_b", "ssm_g_a", "ssm_g_b", "ssm_beta", "time_mix_w1", "time_mix_w2", "time_mix_a1"),
    *("time_mix_a2", "time_mix_g1", "time_mix_g2", "time_mix_v1", "time_mix_v2", "time_mix_decay_w1"),
    "time_mix_decay_w2",
)

_NOT_IN_LATENT: Final = ("attn_q", "output")  # in MLA models, tensors without adapters


def check_applied(adapters: Iterable[AdapterFile], model: GGUFFile) -> None:
    """Raise UnsupportedModel if llama.cpp would ignore a part of an adapter."""
    for adapter in adapters:
        for name in adapter.pairs:
            if not is_applied(name, model):
                raise UnsupportedModel(
                    f"tensor not supported: {shown(str(adapter.file.path), 300)}: {shown(name)}: llama.cpp does not "
                    "apply adapters to it",
                    hint="try --backend cpu",
                )


def is_applied(name: str, model: GGUFFile) -> bool:
    """Return whether llama.cpp applies adapters to this tensor of a model."""
    kind = name.removesuffix(".weight").removeprefix("blk.").partition(".")[2] or name.removesuffix(".weight")
    is_latent = any(each.endswith("attn_kv_a_mqa.weight") for each in model.tensors)
    return kind not in _NOT_APPLIED and not (is_latent and kind in _NOT_IN_LATENT)
