"""Reads how the weights of a checkpoint are quantized: with AWQ or GPTQ, or not at all.

Most checkpoints have a `quantization_config` in config.json. Older ones have a file of their own: quantize_config.json
from AutoGPTQ, or quant_config.json from AutoAWQ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from llmrun.formats.gguf.problems import shown
from llmrun.formats.quants.q4 import BLOCK_WEIGHTS
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.json_objects import JsonObject

_KEY = "quantization_config"
_METHOD = "quant_method"
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_BITS = 4
_WHOLE_ROW = -1

# The format in which GPTQ stores zero points, and what is added to the stored values.
_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
_GPTQ_ONLY = f"but only {' and '.join(_GPTQ_FORMATS)} can be converted"
_AWQ_FORMAT = "gemm"


class Packing(Enum):
    """How 4-bit weights are packed into 32-bit words: AWQ along the outputs, GPTQ along the inputs."""

    AWQ = "awq"
    GPTQ = "gptq"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The settings that all quantized matrices share.

    group        number of inputs that share a scale and a zero point, or 0 for all inputs of a matrix
    zero_offset  is added to the stored zero points
    reordered    whether the groups may consist of arbitrary inputs (`desc_act`)
    """

    packing: Packing
    group: int
    zero_offset: int
    reordered: bool


def read_quantization(checkpoint: Checkpoint) -> Quantization | None:
    """Return the settings, or None if the checkpoint is not quantized. Raises ModelFileError and UnsupportedModel."""
    settings, method = checkpoint.config.object(_KEY), ""
    if not checkpoint.config.has(_KEY):
        name = next(filter(checkpoint.has, _FILES), None)
        if name is None:
            return None
        method, found = _FILES[name], checkpoint.json(name)
        settings = found if found is not None else settings
    method = settings.string(_METHOD, method).lower()
    if method not in [packing.value for packing in Packing]:
        raise settings.unsupported(_METHOD, f"is '{shown(method, 40)}', but only awq and gptq can be converted")
    bits = settings.integer("bits", settings.integer("w_bit", _BITS))
    if bits != _BITS:
        raise settings.unsupported("bits", f"is {bits}, but only {_BITS}-bit weights can be converted")
    if settings.object("dynamic").values:
        raise settings.unsupported("dynamic", "gives modules settings of their own, which cannot be converted")
    packing = Packing(method)
    offset = 0 if packing is Packing.AWQ else _gptq_offset(settings)
    if packing is Packing.AWQ:
        _check_awq_format(settings)
    return Quantization(packing, _group(settings), offset, settings.boolean("desc_act", False))


def _group(settings: JsonObject) -> int:
    key = "q_group_size" if settings.has("q_group_size") else "group_size"
    group = settings.integer(key, minimum=_WHOLE_ROW)
    if group == _WHOLE_ROW:
        return 0
    if group == 0 or group % BLOCK_WEIGHTS:
        raise settings.unsupported(key, f"is {group}, but only multiples of {BLOCK_WEIGHTS}, or -1, can be converted")
    return group


def _gptq_offset(settings: JsonObject) -> int:
    if settings.boolean("is_marlin_format", False):
        raise settings.unsupported("is_marlin_format", f"is true, {_GPTQ_ONLY}")
    key = "checkpoint_format" if settings.has("checkpoint_format") else "format"
    name = settings.string(key, "gptq").lower()
    if name not in _GPTQ_FORMATS:
        raise settings.unsupported(key, f"is '{shown(name, 40)}', {_GPTQ_ONLY}")
    return _GPTQ_FORMATS[name]


def _check_awq_format(settings: JsonObject) -> None:
    for key in ("version", "checkpoint_format", "format"):
        name = settings.string(key, _AWQ_FORMAT).lower()
        if name != _AWQ_FORMAT:
            raise settings.unsupported(key, f"is '{shown(name, 40)}', but only {_AWQ_FORMAT} can be converted")
