"""What the catalogue says about a model, and what a name means before any server is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmrun.hub.names.model_sources import Expected, Source

QUOTED_SIZE = re.compile(r"(?P<number>[0-9]{1,5}(\.[0-9]{1,2})?) (?P<unit>[KMG]iB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}  # bytes


@dataclass(frozen=True, slots=True)
class Quant:
    """One quantization of a model: a file, or several if it has shards.

    files    what is known about each; an unknown size or sha256 is None
    sources  where to look, in this order
    about    the rounded size that its source quotes: "2.3 GiB"; "" if none is quoted or the exact size is known
    """

    name: str  # "Q4_K_M"
    files: tuple[Expected, ...]
    sources: tuple[Source, ...]
    about: str = ""

    @property
    def size(self) -> int | None:
        """Bytes of all files, or None unless every size is known exactly."""
        sizes = [file.size for file in self.files]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    @property
    def estimated_size(self) -> int | None:
        """Bytes: exact if known, else as quoted (within a few percent), else None."""
        if self.size is not None or not self.about:
            return self.size
        match = QUOTED_SIZE.fullmatch(self.about)
        assert match is not None
        return round(float(match["number"]) * _UNITS[match["unit"]])


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that has a name: what it is, and its quantizations.

    name         "qwen3:4b": the family, and which of its models
    parameters   the number of weights; None if unknown
    context      tokens that it was trained for; None if unknown
    quants       by name, in the order of models.toml
    default      the name of the quantization to use if none is given
    sampling     recommended values, by the names of SamplingParams
    end_of_turn  texts of the tokens that end an answer; () if only the GGUF file says
    thinking     the tags around the model's thinking; () if it does not think; None if the catalogue does not say
    seen         who quoted its files, and when
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
        """Return the name of one quantization: "qwen3:4b" for the default, else "qwen3:4b-q8_0"."""
        return self.name if quant == self.default else f"{self.name}-{quant.lower()}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that the user asked for.

    name      what to call it in a message: "qwen3:4b", "qwen3:4b-q8_0", "hf:owner/name:Q5_K_M", a URL
    sources   where to look, in this order
    expected  its files, one per shard, as the catalogue knows them; () if a server must be asked
    entry     what the catalogue says about the model; None if it does not know it
    is_exact  whether the user named the quantization; only for models of the catalogue
    """

    name: str
    sources: tuple[Source, ...]
    expected: tuple[Expected, ...] = ()
    entry: CatalogEntry | None = None
    is_exact: bool = field(default=False, compare=False)
