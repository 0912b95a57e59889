"""Lists the models in a repository, and chooses a model by quantization, with a sensible default.

Shards are grouped, vision projectors are listed apart from models, and importance matrices are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

from msgspec import Struct

from llmrun.base.errors import ModelNotFound, UsageError
from llmrun.formats.gguf.quantization import quantization_of
from llmrun.hub.names import (
    SHA256,
    RemoteFile,
    is_companion,
    is_projector,
    models_among,
    nearest_in_bits,
    safe_segments,
    without_shard,
)

MOST_BYTES = 1 << 50  # 1 PiB; larger sizes are rejected as implausible


class OfferedModel(Struct, frozen=True):
    """A model in a repository, as one file or as shards in order."""

    quantization: str  # from the file name, such as "Q4_K_M"; "" if the name contains no quantization
    files: tuple[RemoteFile, ...]

    @property
    def file(self) -> str:
        """The path of the first file, which identifies the model."""
        return self.files[0].path

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(file.size for file in self.files)


class Listing(Struct, frozen=True):
    """All models in a repository at one commit.

    models      sorted by name
    left_out    a message with the reason for each GGUF file that was left out
    projectors  the vision projectors, which are not models
    """

    repository: str
    commit: str
    models: tuple[OfferedModel, ...]
    left_out: tuple[str, ...] = ()
    projectors: tuple[RemoteFile, ...] = ()


def offered(repository: str, commit: str, files: Iterable[tuple[object, object, object]]) -> Listing:
    """Build a listing from the untrusted (path, size, sha256) of each file, after validating all values."""
    sound: dict[str, RemoteFile] = {}
    left_out = []
    for path, size, sha256 in files:
        if not isinstance(path, str) or not path.lower().endswith(".gguf"):
            continue
        if is_companion(path) and not is_projector(path):
            continue
        file = _checked(path, size, sha256)
        if isinstance(file, RemoteFile):
            sound[path] = file
        else:
            left_out.append(f"{path[:200]!r}: {file}")
    models = tuple(
        OfferedModel(_quantization(first), tuple(sound[part] for part in parts))
        for first, parts in models_among(sound).items()
    )
    whole = {file.path for model in models for file in model.files}
    projectors = tuple(file for path, file in sound.items() if is_projector(path))
    whole |= {file.path for file in projectors}
    broken = sorted({without_shard(path) for path in sound if path not in whole})
    left_out += [f"{name!r}: some of its shards are missing" for name in broken]
    return Listing(repository, commit, models, tuple(left_out), projectors)


def is_size(value: object) -> TypeGuard[int]:
    """Return whether an untrusted value is a plausible file size in bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_BYTES


def is_sha256(value: object) -> TypeGuard[str]:
    """Return whether an untrusted value is a sha256 in lower-case hexadecimal."""
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


def _checked(path: str, size: object, sha256: object) -> RemoteFile | str:
    """Return the validated file, or the reason why it cannot be offered."""
    try:
        safe_segments(path)
    except UsageError:
        return "unsafe file name"
    if not is_size(size):
        return f"invalid size: {_shown(size)} bytes"
    return RemoteFile(path, size, sha256) if is_sha256(sha256) else "the Hub reports no sha256"


def _shown(size: object) -> str:
    if isinstance(size, int) and abs(size) > MOST_BYTES:
        return f"more than {MOST_BYTES:,}"  # repr() raises ValueError for numbers with thousands of digits
    return repr(size)[:40]


def _quantization(path: str) -> str:
    """Return the quantization in the file name or else in the folder name, as in Q4_K_M/model-00001-of-00003.gguf."""
    folder = path.rpartition("/")[0]
    return quantization_of(path) or (quantization_of(folder) if folder else "")


# The order of preference for names without a quantization. Types with 4.5 to 5 bits per weight come first because they
# lose little quality and are about half the size of 8-bit types. Larger types come next, and then smaller types, the
# least lossy first. Unquantized files come last because they are meant for conversion.
PREFERRED = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_K_XL", "Q4_K_L", "UD-Q4_K_M", "Q4_K_S", "UD-Q4_K_S", "Q4_K", "IQ4_NL", "IQ4_XS"),
    *("UD-IQ4_NL", "UD-IQ4_XS", "Q4_1", "Q4_0", "MXFP4", "MXFP4_MOE", "NVFP4"),
    *("Q5_K_M", "UD-Q5_K_XL", "Q5_K_L", "UD-Q5_K_M", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0"),
    *("Q6_K", "UD-Q6_K_XL", "Q6_K_L", "UD-Q6_K", "Q8_0", "UD-Q8_K_XL", "Q8_K_XL", "Q8_1"),
    *("Q3_K_L", "UD-Q3_K_XL", "Q3_K_XL", "Q3_K_M", "UD-Q3_K_M", "IQ3_M", "IQ3_S", "Q3_K_S", "IQ3_XS", "Q3_K"),
    *("UD-IQ3_XXS", "IQ3_XXS", "UD-Q2_K_XL", "Q2_K_L", "Q2_K", "UD-IQ2_M", "IQ2_M", "IQ2_S", "Q2_K_S", "IQ2_XS"),
    *("UD-IQ2_XXS", "IQ2_XXS", "TQ2_0", "UD-IQ1_M", "IQ1_M", "UD-IQ1_S", "IQ1_S", "UD-TQ1_0", "TQ1_0"),
)
_UNQUANTIZED = ("BF16", "F16", "F32")
_RANK = {name: rank for rank, name in enumerate(PREFERRED)}
_MOST_NAMED = 5  # the maximum number of alternatives in a hint


def choose(models: Sequence[OfferedModel], quantization: str | None, repository: str = "") -> OfferedModel:
    """Return the model with this quantization, or the preferred model if `quantization` is None.

    If several files match, the file nearest to the root is preferred, then the file with the shortest name. Raises
    ModelNotFound if no file matches or a tie remains. The hint lists the alternatives. If there are many alternatives
    and `repository` is given, the hint also contains the command that lists all of them.
    """
    if not models:
        raise ModelNotFound(
            "the repository has no GGUF model",
            hint="look for a repository whose name ends in -GGUF, or convert AWQ or GPTQ weights (llmrun convert)",
        )
    if quantization is None:
        best = min(_rank(model) for model in models)
        fitting = [model for model in models if _rank(model) == best]
    else:
        fitting = _of_quantization(models, quantization, repository)
    fitting.sort(key=_plainness)
    if len(fitting) > 1 and _plainness(fitting[0]) == _plainness(fitting[1]):
        raise ModelNotFound(
            f"{len(fitting)} files match {fitting[0].quantization or 'and none names its quantization'}",
            hint="name one of the files: " + _listed([model.file for model in fitting], repository),
        )
    return fitting[0]


def quantizations(models: Sequence[OfferedModel]) -> list[str]:
    """Return the distinct quantizations, sorted by model size, the smallest first."""
    return list(dict.fromkeys(model.quantization for model in sorted(models, key=lambda model: model.size)))


def nearest_files(models: Sequence[OfferedModel], file: str, repository: str = "") -> str:
    """Return a hint for a missing file, with similar names or, if there are none, a list of files."""
    import difflib

    names = {model.file.lower(): model.file for model in models}
    near = [names[name] for name in difflib.get_close_matches(file.lower(), list(names), n=3)]
    if near:
        return "did you mean " + " or ".join(near) + "?"
    return (
        "the repository has " + _listed(list(names.values()), repository)
        if names
        else "the repository has no GGUF model"
    )


def _of_quantization(models: Sequence[OfferedModel], wanted: str, repository: str) -> list[OfferedModel]:
    name = {"FP16": "F16", "FP32": "F32"}.get(wanted.upper(), wanted.upper())
    for meant in (name, f"UD-{name}"):  # fall back to Unsloth Dynamic (UD-), which is the closest match
        if fitting := [model for model in models if model.quantization == meant]:
            return fitting
    raise ModelNotFound(f"the repository has no {wanted}", hint=_near_quantizations(models, name, repository))


def _near_quantizations(models: Sequence[OfferedModel], wanted: str, repository: str) -> str:
    named = [name for name in quantizations(models) if name]
    if not named:
        return "name one of the files: " + _listed([model.file for model in models], repository)
    near = [name for name in named if name.removeprefix("UD-").startswith(wanted.removeprefix("UD-"))]
    if near:
        return "did you mean " + " or ".join(near) + "?"
    likely = nearest_in_bits(wanted, named)[:_MOST_NAMED]
    return "available: " + ", ".join(name for name in named if name in likely) + _more(len(named), repository)


def _rank(model: OfferedModel) -> int:
    name = model.quantization
    if "MXFP4" in name and "gpt-oss" in model.file.lower():
        return -1  # gpt-oss was trained in MXFP4, and all of its other types are converted from MXFP4
    if name in _UNQUANTIZED:
        return len(_RANK) + 2 + _UNQUANTIZED.index(name)
    return _RANK.get(name, len(_RANK) + (0 if name else 1))


def _plainness(model: OfferedModel) -> tuple[int, int, int]:
    return (model.file.count("/"), len(without_shard(model.file)), len(model.files))


def _listed(names: Sequence[str], repository: str) -> str:
    return ", ".join(names[:_MOST_NAMED]) + _more(len(names), repository)


def _more(count: int, repository: str) -> str:
    if count <= _MOST_NAMED:
        return ""
    command = f"; `llmrun fit hf:{repository}` lists all" if repository else ""
    return f" and {count - _MOST_NAMED} more{command}"
