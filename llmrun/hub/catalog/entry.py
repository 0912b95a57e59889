"""Data classes for the catalogue's entries, and for a name that was resolved without asking a server."""

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

    files    the known facts about each file; an unknown size or sha256 is None
    sources  where to look, in order of preference
    about    the rounded size that its source gives: "2.3 GiB"; "" if there is none or the exact size is known
    """

    name: str  # "Q4_K_M"
    files: tuple[Expected, ...]
    sources: tuple[Source, ...]
    about: str = ""

    @property
    def size(self) -> int | None:
        """The size of all files in bytes, or None unless every size is known exactly."""
        sizes = [file.size for file in self.files]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    @property
    def estimated_size(self) -> int | None:
        """The size in bytes: exact if known, else the rounded size (within a few percent), else None."""
        if self.size is not None or not self.about:
            return self.size
        match = QUOTED_SIZE.fullmatch(self.about)
        assert match is not None
        return round(float(match["number"]) * _UNITS[match["unit"]])


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model in the catalogue, with its quantizations.

    name         "qwen3:4b": the family, and the model within it
    parameters   the number of weights; None if unknown
    context      the context length that the model was trained for, in tokens; None if unknown
    quants       the quantizations by name, in the order of models.toml
    default      the quantization to use if the user names none
    sampling     recommended values, keyed by the names in SamplingParams
    end_of_turn  texts of the tokens that end an answer; () if only the GGUF file knows them
    thinking     the tags around the model's thinking; () if it does not think; None if the catalogue does not say
    seen         the source of the facts about its files, and the date
    """

    name: str
    description: str
    license: str
    quants: Mapping[str, Quant]
    default: str
    parameters: int | None = None
    context: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    end_of_turn: tuple[str, ...] = ()
    thinking: tuple[str, str] | tuple[()] | None = None
    aliases: tuple[str, ...] = ()
    seen: str = ""

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    def name_with(self, quant: str) -> str:
        """Return the full name of a quantization: "qwen3:4b" for the default, "qwen3:4b-q8_0" for another."""
        return self.name if quant == self.default else f"{self.name}-{quant.lower()}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that the user asked for.

    name      the name to show in messages: "qwen3:4b", "qwen3:4b-q8_0", "hf:owner/name:Q5_K_M", a URL
    sources   where to look, in order of preference
    expected  its files, one per shard, as the catalogue describes them; () if a server must be asked
    entry     the model's entry in the catalogue, or None
    is_exact  whether the user named the quantization; set only for models in the catalogue
    """

    name: str
    sources: tuple[Source, ...]
    expected: tuple[Expected, ...] = ()
    entry: CatalogEntry | None = None
    is_exact: bool = field(default=False, compare=False)
