"""Adds LoRA adapters to the plan of a model on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.errors import UnsupportedModel, shown
from llmrun.model.plan.adapting import changeable, with_adapters
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.adapters import LowRank

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.adapter import AdapterFile
    from llmrun.formats.gguf.tensors import TensorInfo
    from llmrun.model.plan.plan import Plan


def adapted(plan: Plan, adapters: Sequence[AdapterFile]) -> Plan:
    """Return a plan with the products of adapters, whose files must stay open until the weights have been read.

    Raises UnsupportedModel if an adapter changes a tensor that only llama.cpp can adapt, such as a tensor of experts.
    """
    if not adapters:
        return plan
    names = changeable(plan)
    for adapter in adapters:
        for name in adapter.pairs.keys() - names:
            raise UnsupportedModel(
                f"tensor not supported: {shown(str(adapter.file.path), 300)}: {shown(name)}: the CPU engine cannot "
                "apply adapters to it",
                hint="try --backend llama",
            )
    return with_adapters(plan, [_pairs(adapter, number) for number, adapter in enumerate(adapters)])


def _pairs(adapter: AdapterFile, number: int) -> dict[str, LowRank]:
    return {
        name: LowRank(_floats(adapter, a, number), _floats(adapter, b, number), adapter.factor(b.shape[0]))
        for name, (a, b) in adapter.pairs.items()
    }


def _floats(adapter: AdapterFile, tensor: TensorInfo, number: int) -> Matrix:
    """Return a matrix of an adapter as float32. The rows are dequantized and checked when read.

    A value that is not finite would turn answers into nonsense, and `llmrun verify` is not run on adapters.
    """
    columns = tensor.shape[0]
    row_bytes = tensor.nbytes // tensor.n_rows
    size = np.dtype(np.float32).itemsize * columns
    dequantize = tensor.type.dequantize
    assert dequantize is not None

    def read_into(start: int, into: NDArray[np.uint8]) -> None:
        assert start % size == into.size % size == 0, "only whole rows can be read"
        rows = into.size // size
        raw = np.empty(rows * row_bytes, np.uint8)
        adapter.file.read_into(tensor, start // size * row_bytes, raw)
        values = dequantize(raw.reshape(rows, row_bytes)).reshape(-1)
        if not np.isfinite(values).all():
            raise adapter.file.bad(tensor.name, "has values that are not finite")
        into[:] = values.view(np.uint8)

    return Matrix(f"adapter {number} {tensor.name}", "f32", tensor.n_rows, columns, tensor.n_rows * size, read_into)
