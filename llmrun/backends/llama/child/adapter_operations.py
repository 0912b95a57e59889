"""The operations of a LlamaWorker on LoRA adapters, which llama.cpp applies to all rows of a forward pass."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any


class AdapterOperations:
    """Handles requests about adapters. Each `do_*` method handles one operation and returns the fields of its answer.

    llama.cpp frees the adapters together with their model.
    """

    _llama: Any
    _model: Any
    _context: Any
    _adapters: list[Any]

    def do_open_adapters(self, paths: Sequence[str]) -> dict[str, Any]:
        """Load adapters for the open model, or return the index of one that cannot be loaded as `failed`."""
        self._adapters = []
        for index, path in enumerate(paths):
            adapter = self._llama.llama_adapter_lora_init(self._model, os.fsencode(path))
            if not adapter:
                return {"failed": index}
            self._adapters.append(adapter)
        return {}

    def do_use_adapters(self, scales: Sequence[float]) -> dict[str, Any]:
        """Apply adapters with these scales from now on. An adapter with the scale 0 is not applied."""
        used = [(adapter, scale) for adapter, scale in zip(self._adapters, scales, strict=True) if scale]
        pointers = (self._llama.llama_adapter_lora_p_ctypes * len(used))(*[adapter for adapter, _ in used])
        factors = (ctypes.c_float * len(used))(*[scale for _, scale in used])
        return {"status": self._llama.llama_set_adapters_lora(self._context, pointers, len(used), factors)}
