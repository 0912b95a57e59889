"""Computes the fingerprint of an open model, which identifies everything that can change the bytes of an answer."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun import __version__
from llmrun.backends.registry import is_stand_in
from llmrun.formats.layouts.numerics import NUMERICS

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo


def fingerprint(info: ModelInfo, digest: str, *, answering: object) -> str:
    """Return a fingerprint of 16 hexadecimal digits after "fp_".

    digest     identifies the contents of the model file; if empty, its `sampled_digest`
    answering  the chat template and thinking tags that replace the model's own, as JSON
    """
    decisive: dict[str, Any] = {
        "version": __version__,
        "digest": digest or _digest_of(info),
        "kv_type": info.kv_type,
        "answering": answering,
        "numerics": NUMERICS,
    }
    if info.adapters:
        decisive["adapters"] = [[each.name, each.identity, each.scale] for each in info.adapters]
    if not info.batch_invariant:
        decisive["machine"] = [info.backend, info.device, info.gpu_layers, platform.machine(), platform.node()]
    return "fp_" + hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _digest_of(info: ModelInfo) -> str:
    path = Path(info.path)
    if not is_stand_in(info.backend):
        from llmrun.formats.gguf.reader import open_gguf
        from llmrun.formats.gguf.sampled_digest import sampled_digest

        with open_gguf(path) as file:
            return sampled_digest(file)
    return hashlib.sha256(path.read_bytes() if path.is_file() else path.name.encode()).hexdigest()
