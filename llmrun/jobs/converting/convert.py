"""Converts the folder of a checkpoint to a GGUF file, and preserves all values exactly.

The conversion is planned first. Planning reads every header, scale and zero point, so a checkpoint that cannot be
converted is refused before any output is written. The weights are then read, repacked and written matrix by matrix.

Matrices of AWQ and GPTQ become Q4_0 or Q5_0. Other matrices keep their type. Biases and the weights of norms become
F32, as llama.cpp requires. Most quantized checkpoints have a `quantization_config` in config.json. Older checkpoints
have a separate file: quantize_config.json from AutoGPTQ, or quant_config.json from AutoAWQ.

AWQ and GPTQ store weight = scale * (q - zero), where q and zero are integers of 4 bits, and a group of inputs shares an
f16 scale and a zero point. Q4_0 is scale * (level - 8) and Q5_0 is scale * (level - 16), both in blocks of 32 inputs
with an f16 scale. All blocks of a group store the group's scale:

    every zero point of the matrix is 8   Q4_0 with level = q
    otherwise                             Q5_0 with level = q - zero + 16, from 1 to 31

A matrix of n outputs and m inputs is stored as three tensors. Words are int32, with the first value in the lowest bits:

    qweight  AWQ   [m, n / 8]: a word has 8 outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7
             GPTQ  [m / 8, n]: a word has 8 inputs
    qzeros   [groups, n / 8]: a word has 8 outputs, in the same order as in qweight for AWQ, and in order for GPTQ
    scales   [groups, n], f16

GPTQ subtracts 1 from zero points before storing, unless the format is gptq_v2. GPTQ also stores g_idx [m], the group of
each input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmrun.base.errors import ModelFileError, shown
from llmrun.formats.gguf.reader import no_other, read_source
from llmrun.formats.gguf.source import FileSource
from llmrun.formats.gguf.writer import NewTensor, NewValue, file_bytes, write_gguf
from llmrun.formats.quants.legacy_quants import BLOCK_WEIGHTS, pack_q4_0, pack_q5_0
from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import WeightType, sequence, unsound_halves
from llmrun.jobs.converting.checkpoint import Checkpoint, JsonObject, StoredTensor, unsupported
from llmrun.jobs.converting.forms import Module, form_of, hyperparameters, modules_of, read_shape, rope_factors
from llmrun.jobs.converting.tokenizer import chat_templates, read_vocabulary, special_tokens, vocabulary_metadata

_KEY = "quantization_config"
_METHOD = "quant_method"
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_BITS = 4
_WHOLE_ROW = -1

# Maps each GPTQ format to the offset that is added to its stored zero points.
_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
_GPTQ_ONLY = f"but only {' and '.join(_GPTQ_FORMATS)} can be converted"
_AWQ_FORMAT = "gemm"


class Packing(Enum):
    """The direction for packing 4-bit weights into 32-bit words: AWQ along the outputs, GPTQ along the inputs."""

    AWQ = "awq"
    GPTQ = "gptq"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The settings that all quantized matrices share.

    group        the number of inputs that share a scale and a zero point, or 0 for all inputs of a matrix
    zero_offset  the offset that is added to the stored zero points
    reordered    True if the groups may consist of arbitrary inputs (`desc_act`)
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
        raise settings.unsupported("dynamic", "has separate settings for some modules, which cannot be converted")
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


_WORD = 8  # the number of 4-bit values in a word
_MIDDLE_OF_Q4_0, _MIDDLE_OF_Q5_0 = 8, 16
_LAST_ZERO = 15

# The positions in a word where AWQ stores the outputs 0 to 7.
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])

_PIECE_WEIGHTS = 1 << 22  # the number of weights to unpack at a time, which takes 40 MB


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix with checked tensors, which are read on demand, because a model may not fit in memory.

    group  the number of inputs that share a scale and a zero point
    type   Q4_0 or Q5_0
    """

    qweight: StoredTensor
    qzeros: StoredTensor
    scales: StoredTensor
    packing: Packing
    zero_offset: int
    outputs: int
    inputs: int
    group: int
    type: WeightType

    def blocks(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        """Yield the blocks of the given outputs, in the given order, as uint8[n, block_bytes].

        Raises ModelFileError if the file has changed.
        """
        words = self.qweight.read()
        zeros = _read_zeros(self.qzeros, self.outputs, self.packing) + np.uint8(self.zero_offset)
        scales = self.scales.read().astype(np.float32)
        unpack = _unpack_awq if self.packing is Packing.AWQ else _unpack_gptq
        groups = np.arange(0, self.inputs, BLOCK_WEIGHTS) // self.group  # the group of each block
        step = max(1, _PIECE_WEIGHTS // self.inputs)
        for piece in (rows[first : first + step] for first in range(0, len(rows), step)):
            levels = unpack(words, piece).reshape(len(piece), -1, BLOCK_WEIGHTS)
            block_scales = scales[:, piece][groups].T.reshape(-1, 1)
            if self.type.name == "Q4_0":
                yield pack_q4_0(block_scales, levels.reshape(-1, BLOCK_WEIGHTS))
            else:
                levels = levels + np.uint8(_MIDDLE_OF_Q5_0) - zeros[:, piece][groups].T[..., None]
                yield pack_q5_0(block_scales, levels.reshape(-1, BLOCK_WEIGHTS))


def open_matrix(
    tensors: Mapping[str, StoredTensor], module: str, outputs: int, inputs: int, quantization: Quantization
) -> PackedMatrix:
    """Check the tensors of a module and choose the type of its matrix. Raises ModelFileError and UnsupportedModel."""
    qweight = tensors[f"{module}.qweight"]
    if inputs % BLOCK_WEIGHTS or outputs % _WORD:
        seen = f"has {inputs} inputs and {outputs} outputs, which must be multiples of {BLOCK_WEIGHTS} and {_WORD}"
        raise unsupported(qweight.file.path, f"{shown(module)} {seen}")
    packing, offset = quantization.packing, quantization.zero_offset
    group = quantization.group or inputs
    groups = -(-inputs // group)
    _check_stored(qweight, "I32", (inputs, outputs // _WORD) if packing is Packing.AWQ else (inputs // _WORD, outputs))
    qzeros = _required(tensors, qweight, f"{module}.qzeros", "I32", (groups, outputs // _WORD))
    scales = _required(tensors, qweight, f"{module}.scales", "F16", (groups, outputs))
    if packing is Packing.GPTQ:
        _check_order(tensors, qweight, f"{module}.g_idx", inputs, group, quantization)
    if unsound_halves(scales.read().view(np.uint16)).any():
        raise scales.bad("has a scale that is not finite")
    zeros = _read_zeros(qzeros, outputs, packing)
    if offset and (zeros == _LAST_ZERO).any():
        seen = f"has a stored zero point of {_LAST_ZERO}, which AutoGPTQ reads as 16 and GPTQModel as 0"
        raise unsupported(qzeros.file.path, f"{shown(qzeros.name)} {seen}")
    type_ = BY_NAME["Q4_0" if (zeros == _MIDDLE_OF_Q4_0 - offset).all() else "Q5_0"]
    return PackedMatrix(
        qweight=qweight,
        qzeros=qzeros,
        scales=scales,
        packing=packing,
        zero_offset=offset,
        outputs=outputs,
        inputs=inputs,
        group=group,
        type=type_,
    )


def _read_zeros(qzeros: StoredTensor, outputs: int, packing: Packing) -> NDArray[np.uint8]:
    """Return the stored zero points, uint8[groups, outputs]."""
    return _values_along(qzeros.read(), _places(np.arange(outputs), packing))


def _required(
    tensors: Mapping[str, StoredTensor], beside: StoredTensor, name: str, dtype: str, shape: tuple[int, ...]
) -> StoredTensor:
    if name not in tensors:
        raise beside.bad(f"needs {shown(name)}, which is missing")
    _check_stored(tensors[name], dtype, shape)
    return tensors[name]


def _check_stored(tensor: StoredTensor, dtype: str, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype:
        raise unsupported(tensor.file.path, f"{shown(tensor.name)} is {tensor.dtype}, but must be {dtype}")
    if tensor.shape != shape:
        raise tensor.bad(f"must have the shape {shape}, not {tensor.shape}")


def _check_order(
    tensors: Mapping[str, StoredTensor],
    qweight: StoredTensor,
    name: str,
    inputs: int,
    group: int,
    quantization: Quantization,
) -> None:
    """Check that groups consist of consecutive inputs, because the inputs of a block share only one scale."""
    if name not in tensors:
        if quantization.reordered:
            raise qweight.bad(f"needs {shown(name)}, which is missing, because desc_act is true")
        return
    tensor = _required(tensors, qweight, name, "I32", (inputs,))
    if (tensor.read() != np.arange(inputs) // group).any():
        seen = f"{shown(name)} mixes the inputs of different groups (desc_act), which share no scale in a GGUF file"
        raise unsupported(tensor.file.path, seen, "try a checkpoint that was quantized with desc_act=False")


def _places(outputs: NDArray[np.int64], packing: Packing) -> NDArray[np.int64]:
    """Return the positions of outputs in storage, counted over all words of a row."""
    return outputs // _WORD * _WORD + _AWQ_PLACES[outputs % _WORD] if packing is Packing.AWQ else outputs


def _values_along(words: NDArray[np.int32], places: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Extract values from the words of each row: int32[n, m] -> uint8[n, places]."""
    found: NDArray[np.uint8] = (words[:, places // _WORD] >> (4 * (places % _WORD)) & 15).astype(np.uint8)
    return found


def _unpack_awq(words: NDArray[np.int32], outputs: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the values of the given outputs: int32[inputs, n / 8] -> uint8[outputs, inputs]."""
    return _values_along(words, _places(outputs, Packing.AWQ)).T


def _unpack_gptq(words: NDArray[np.int32], outputs: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the values of the given outputs: int32[inputs / 8, n] -> uint8[outputs, inputs]."""
    return sequence(np.ascontiguousarray(words[:, outputs].T).view(np.uint8), 4)


_FLOATS = ("F32", "F16", "BF16")
_PARTS_OF_A_MATRIX = (".qweight", ".qzeros", ".scales", ".g_idx")
_PIECE_BYTES = 16 << 20

# Old versions of transformers saved the constants in _UNUSED with the weights. A tied output matrix is redundant.
_UNUSED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
_OUTPUT = "lm_head."


def tensors_of(
    checkpoint: Checkpoint, modules: list[Module], quantization: Quantization | None, *, tied: bool
) -> list[NewTensor]:
    """Return the tensors of the given modules. A tensor's data is read when the tensor is written.

    Raises ModelFileError for missing tensors and wrong shapes, and UnsupportedModel for unknown tensors.
    """
    tensors: list[NewTensor] = []
    used: set[str] = set()
    for module in modules:
        tensors.append(_weight(checkpoint, module, quantization))
        is_packed = f"{module.hf_name}.qweight" in checkpoint.tensors
        used |= {f"{module.hf_name}{part}" for part in (_PARTS_OF_A_MATRIX if is_packed else (".weight",))}
        bias = checkpoint.tensors.get(f"{module.hf_name}.bias")
        if bias is None and module.needs_bias:
            raise _missing(checkpoint, f"{module.hf_name}.bias")
        if bias is not None:
            used.add(bias.name)
            tensors += _bias(bias, module)
    for name, tensor in checkpoint.tensors.items():
        if name not in used and not name.endswith(_UNUSED) and not (tied and name.startswith(_OUTPUT)):
            raise unsupported(tensor.file.path, f"{shown(name)} is not a tensor of this kind of model")
    return tensors


def _weight(checkpoint: Checkpoint, module: Module, quantization: Quantization | None) -> NewTensor:
    name, packed = f"{module.name}.weight", checkpoint.tensors.get(f"{module.hf_name}.qweight")
    if packed is not None and module.inputs is not None:
        if quantization is None:
            seen = f"{shown(packed.name)} is quantized, but no {checkpoint.config.path.name} describes it"
            raise unsupported(packed.file.path, seen)
        matrix = open_matrix(checkpoint.tensors, module.hf_name, module.outputs, module.inputs, quantization)
        return NewTensor(name, matrix.type, (module.inputs, module.outputs), lambda: matrix.blocks(module.rows()))
    stored = checkpoint.tensors.get(f"{module.hf_name}.weight")
    if stored is None:
        raise _missing(checkpoint, f"{module.hf_name}.weight")
    if module.inputs is None:
        return _vector(name, stored, module.outputs)
    _check(stored, (module.outputs, module.inputs))
    return NewTensor(name, BY_NAME[stored.dtype], (module.inputs, module.outputs), lambda: _pieces(stored, module))


def _pieces(stored: StoredTensor, module: Module) -> Iterator[NDArray[np.generic]]:
    if module.heads:
        yield stored.read()[module.rows()]
        return
    step = max(1, _PIECE_BYTES * module.outputs // max(stored.nbytes, 1))
    for first in range(0, module.outputs, step):
        yield stored.read_rows(first, min(first + step, module.outputs))


def _bias(stored: StoredTensor, module: Module) -> list[NewTensor]:
    """Return the bias, or an empty list if the bias is 0, because AutoGPTQ adds such biases to all matrices."""
    _check(stored, (module.outputs,))
    if not module.needs_bias and not _float32(stored).any():
        return []
    if not module.bias:
        raise unsupported(stored.file.path, f"{shown(stored.name)} is a bias, which models of this form do not have")
    return [_vector(f"{module.name}.bias", stored, module.outputs, module.rows())]


def _vector(name: str, stored: StoredTensor, size: int, order: NDArray[np.int64] | slice = slice(None)) -> NewTensor:
    _check(stored, (size,))
    return NewTensor(name, BY_NAME["F32"], (size,), lambda: [_float32(stored)[order]])


def _float32(stored: StoredTensor) -> NDArray[np.float32]:
    dequantize = BY_NAME[stored.dtype].dequantize
    assert dequantize is not None  # all types in _FLOATS can be dequantized
    return dequantize(stored.read().view(np.uint8))


def _check(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.dtype not in _FLOATS:
        seen = (
            f"is {stored.dtype}, but only {', '.join(_FLOATS)} and the 4-bit weights of AWQ and GPTQ can be converted"
        )
        raise unsupported(stored.file.path, f"{shown(stored.name)} {seen}")
    if stored.shape != shape:
        raise stored.bad(f"must have the shape {shape}, not {stored.shape}")


def _missing(checkpoint: Checkpoint, name: str) -> ModelFileError:
    return ModelFileError(
        f"not a complete checkpoint: {shown(str(checkpoint.folder), 300)}: {shown(name)} is missing",
        hint="download the whole checkpoint again",
    )


# The values of `general.file_type` for the weight types that occur, as in llama.cpp's `enum llama_ftype`.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q5_0": 8, "BF16": 32}
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class Conversion:
    """A planned GGUF file. `notes` informs the user about settings that the file cannot express."""

    checkpoint: Checkpoint
    metadata: dict[str, NewValue]
    tensors: list[NewTensor]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        return file_bytes(self.metadata, self.tensors)

    @property
    def type_counts(self) -> dict[str, int]:
        """The number of tensors of each weight type, in descending order."""
        return dict(Counter(tensor.type.name for tensor in self.tensors).most_common())


def plan_conversion(checkpoint: Checkpoint) -> Conversion:
    """Plan the GGUF file of a checkpoint. Raises ModelFileError and UnsupportedModel."""
    config = checkpoint.config
    form = form_of(config)
    shape = read_shape(config, form)
    quantization = read_quantization(checkpoint)
    vocabulary = read_vocabulary(checkpoint, shape.vocabulary)
    special, notes = special_tokens(checkpoint, vocabulary)
    tensors = tensors_of(checkpoint, modules_of(form, shape), quantization, tied=shape.tied)
    factors = rope_factors(config, shape)
    if factors is not None:
        tensors.insert(0, NewTensor("rope_freqs.weight", BY_NAME["F32"], (len(factors),), lambda: [factors]))
    if shape.window is not None and shape.window < shape.context:
        notes.append(
            f"the context is limited to {shape.window:,} of {shape.context:,} tokens, because the model has a sliding "
            f"window, which GGUF files of {form.architecture} cannot express"
        )
    most = Counter(tensor.type.name for tensor in tensors if len(tensor.shape) > 1).most_common(1)[0][0]
    metadata: dict[str, NewValue] = {
        "general.architecture": form.architecture,
        "general.name": checkpoint.folder.resolve().name.encode(errors="replace").decode(),
        "general.file_type": _FILE_TYPES[most],
        "general.quantization_version": _QUANTIZATION_VERSION,
        **hyperparameters(checkpoint, form, shape),
        **vocabulary_metadata(vocabulary),
        **special,
        **chat_templates(checkpoint),
    }
    return Conversion(checkpoint, metadata, tensors, notes)


def write_conversion(
    conversion: Conversion, file: FileIO, path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the planned file, and check the result with the strict reader.

    file      an empty file, open for writing
    path      the future path of the file, for error messages
    progress  called with the number of bytes done and the total number of bytes
    Raises OSError, and ModelFileError if the checkpoint has changed or the result breaks a rule of the GGUF format.
    """
    total = sum(tensor.nbytes for tensor in conversion.tensors)
    done = 0

    def count(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress(done, total)

    progress(done, total)
    write_gguf(file, conversion.metadata, conversion.tensors, count)
    conversion.checkpoint.check_unchanged()
    read_source(FileSource(Path(file.name)), path, no_other).close()
