"""Data classes for catalogue entries, and for names that were resolved without contacting a server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmrun.hub.names.model_sources import Expected, Source

QUOTED_SIZE = re.compile(r"(?P<number>[0-9]{1,5}(\.[0-9]{1,2})?) (?P<unit>[KMG]iB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}  # bytes


@dataclass(frozen=True, slots=True)
class Quant:
    """One quantization of a model, in one file or in shards.

    files    the known metadata of each file; an unknown size or sha256 is None
    sources  where the files can be found, in order of preference
    about    the rounded size that the source publishes, such as "2.3 GiB"; "" if unknown or if `size` is known
    """

    name: str  # "Q4_K_M"
    files: tuple[Expected, ...]
    sources: tuple[Source, ...]
    about: str = ""

    @property
    def size(self) -> int | None:
        """The total size of all files in bytes, or None if any size is unknown."""
        sizes = [file.size for file in self.files]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    @property
    def estimated_size(self) -> int | None:
        """The exact size in bytes if known, else the rounded size (accurate to a few percent), else None."""
        if self.size is not None or not self.about:
            return self.size
        match = QUOTED_SIZE.fullmatch(self.about)
        assert match is not None
        return round(float(match["number"]) * _UNITS[match["unit"]])


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model in the catalogue, with its quantizations.

    name         the family and the model within it, such as "qwen3:4b"
    parameters   the number of weights; None if unknown
    context      the context length that the model was trained for, in tokens; None if unknown
    quants       the quantizations, keyed by name, in the order of models.toml
    default      the quantization to use if the user names none
    sampling     recommended sampling parameters, keyed by the names in SamplingParams
    end_of_turn  text of the tokens that end an answer; () if only the GGUF file defines them
    thinking     the tags around the model's thinking; () if the model does not think; None if unknown
    seen         where and when the metadata of the files was looked up
    """

    name: str
    description: str
    license: str
    quants: Mapping[str, Quant]
    default: str
    parameters: int | None = None
    context: int | None = None
    sampling: Mapping[str, float | str] = field(default_factory=dict)
    end_of_turn: tuple[str, ...] = ()
    thinking: tuple[str, str] | tuple[()] | None = None
    aliases: tuple[str, ...] = ()
    seen: str = ""

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    def name_with(self, quant: str) -> str:
        """Return the full name of a quantization: "qwen3:4b" for the default, or "qwen3:4b-q8_0"."""
        return self.name if quant == self.default else f"{self.name}-{quant.lower()}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that the user asked for.

    name      the name to show in messages, such as "qwen3:4b-q8_0", "hf:owner/name:Q5_K_M" or a URL
    sources   where the model can be found, in order of preference
    expected  the model's files, one per shard, according to the catalogue; () if only a server can list them
    entry     the model's entry in the catalogue, or None
    is_exact  whether the name specifies a quantization; only set for models in the catalogue
    """

    name: str
    sources: tuple[Source, ...]
    expected: tuple[Expected, ...] = ()
    entry: CatalogEntry | None = None
    is_exact: bool = field(default=False, compare=False)
