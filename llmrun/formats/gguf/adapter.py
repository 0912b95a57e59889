"""Reads LoRA adapters in GGUF files, and checks that an adapter fits its model.

llama.cpp aborts, or reads outside of arrays, for some of the adapters that this module refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from llmrun.base.errors import BadGGUF, ModelFileError, UnsupportedModel, shown
from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from llmrun.formats.gguf.tensors import TensorInfo, dimensions, trimmed

EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"
_ALPHA = "adapter.lora.alpha"
_INVOCATION = "adapter.alora.invocation_tokens"
_A, _B = ".lora_a", ".lora_b"
_TRAINED_FOR = "adapters work only with the model that they were trained for"
_NORM = "_norm.weight"
# Latent attention multiplies by these matrices head by head. llama.cpp does not apply adapters to such matrices.
_BY_HEAD = ("attn_k_b.weight", "attn_v_b.weight")
# The ranks of known adapters are 4 to 256. The memory for intermediate products grows with the rank.
MOST_RANK = 1024
_MOST_INVOCATION = 1000  # number of tokens; the invocations of known adapters consist of a few words


class AdapterFile(Struct, frozen=True):
    """An open adapter.

    alpha       the numerator of the factor alpha / rank, or 0 if the factor is 1
    invocation  the tokens that activate an "activated LoRA", from their last occurrence in a prompt on; else ()
    pairs       maps the name of each changed tensor to its matrices A and B
    """

    file: GGUFFile
    alpha: float
    invocation: tuple[int, ...]
    pairs: Mapping[str, tuple[TensorInfo, TensorInfo]]

    @property
    def nbytes(self) -> int:
        """The size of all matrices in the file."""
        return sum(tensor.nbytes for pair in self.pairs.values() for tensor in pair)

    def factor(self, rank: int) -> float:
        """Return the factor for the product of two matrices of the given rank, without the adapter's scale."""
        return self.alpha / rank if self.alpha else 1.0


def open_adapter(path: Path, model: GGUFFile) -> AdapterFile:
    """Open an adapter for a model. Raises ModelNotFound, ModelFileError, BadGGUF and UnsupportedModel."""
    file = open_gguf(path)
    try:
        _check_kind(file, model)
        pairs = _pairs(file)
        for name, (a, b) in pairs.items():
            _check_pair(file, name, a, b, model)
        return AdapterFile(file, _alpha(file), _invocation(file, model), pairs)
    except BaseException:
        file.close()
        raise


def _check_kind(file: GGUFFile, model: GGUFFile) -> None:
    architecture = model.string("general.architecture")
    expected = (("general.type", "adapter"), ("adapter.type", "lora"), ("general.architecture", architecture))
    for key, wanted in expected:
        found = file.string(key, "missing")
        if found != wanted:
            raise ModelFileError(
                f"not a LoRA adapter for this model: {_path(file)}: {key} is {shown(found)}, not {shown(wanted)}",
                hint=_TRAINED_FOR if key == expected[-1][0] else "name the file of a LoRA adapter in GGUF format",
            )


def _alpha(file: GGUFFile) -> float:
    alpha = file.number(_ALPHA, 0.0)
    if file.types.get(_ALPHA, "f32") != "f32":
        raise file.bad(_ALPHA, f"must have type f32, not {file.types[_ALPHA]}")
    return alpha


def _invocation(file: GGUFFile, model: GGUFFile) -> tuple[int, ...]:
    if not file.has(_INVOCATION):
        return ()
    if file.types[_INVOCATION] != "arr[u32]":
        raise file.bad(_INVOCATION, f"must have type arr[u32], not {file.types[_INVOCATION]}")
    tokens, vocabulary = file.integers(_INVOCATION), len(model.strings("tokenizer.ggml.tokens"))
    if not 1 <= tokens.size <= _MOST_INVOCATION or tokens.max() >= vocabulary:
        wanted = f"1 to {_MOST_INVOCATION:,} tokens of the model's vocabulary of {vocabulary:,}"
        raise file.bad(_INVOCATION, f"must be {wanted}")
    return tuple(tokens.tolist())


def _pairs(file: GGUFFile) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    for name in file.tensors:
        if not name.endswith((_A, _B)):
            raise UnsupportedModel(
                f"tensor not supported: {_path(file)}: {shown(name)}: only {_A} and {_B} can be applied",
                hint="merge this adapter into its model before converting it to GGUF",
            )
    names = dict.fromkeys(name.removesuffix(_A).removesuffix(_B) for name in file.tensors)
    if not names:
        raise file.bad("tensors", "the adapter has none")
    for name in names:
        for suffix in (_A, _B):
            if name + suffix not in file.tensors:
                raise file.bad(shown(name + suffix), "the tensor is missing")
    return {name: (file.tensors[name + _A], file.tensors[name + _B]) for name in names}


def _check_pair(file: GGUFFile, name: str, a: TensorInfo, b: TensorInfo, model: GGUFFile) -> None:
    """Check the shapes and types of a pair of matrices. Shapes list the row length first."""
    changed = model.tensors.get(name)
    if changed is None:
        raise _wrong(file, name, "the model has no such tensor")
    if name.endswith((_NORM, *_BY_HEAD)) or len(trimmed(changed.shape)) < 2:
        raise UnsupportedModel(f"tensor not supported: {_path(file)}: {shown(name)}: adapters cannot change it")
    if name == EMBEDDING and _OUTPUT not in model.tensors:
        raise UnsupportedModel(
            f"tensor not supported: {_path(file)}: {name}: the model uses this matrix for its output, too",
            hint="merge this adapter into its model before converting it to GGUF",
        )
    columns, rows, *copies = trimmed(changed.shape)
    rank = b.shape[0]
    if not 1 <= rank <= MOST_RANK:
        raise file.bad(shown(b.name), f"the rank must be 1 to {MOST_RANK:,}, not {rank:,}")
    wanted = (rank, rows) if name == EMBEDDING else (columns, rank, *copies)
    for tensor, shape in ((a, wanted), (b, (rank, columns) if name == EMBEDDING else (rank, rows, *copies))):
        if trimmed(tensor.shape) != trimmed(shape):
            raise _wrong(file, tensor.name, f"the shape must be {dimensions(shape)}, not {dimensions(tensor.shape)}")
        if tensor.type.dequantize is None:
            raise UnsupportedModel(
                f"weight type not supported: {_path(file)}: {shown(tensor.name)}: {tensor.type.name}"
            )


def _wrong(file: GGUFFile, name: str, why: str) -> BadGGUF:
    return BadGGUF(
        f"the adapter does not fit the model: {_path(file)}: {shown(name)}: {why}",
        hint=_TRAINED_FOR,
    )


def _path(file: GGUFFile) -> str:
    return shown(str(file.path), 300)
