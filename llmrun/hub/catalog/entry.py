"""What the catalogue says of a model, and what a name means before any server is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmrun.hub.names.model_sources import Expected, Source

QUOTED_SIZE = re.compile(r"(?P<number>[0-9]{1,5}(\.[0-9]{1,2})?) (?P<unit>[KMG]iB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}  # bytes


@dataclass(frozen=True, slots=True)
class Quant:
    """One of the files that a model can be had as (or several: its shards).

    files    what is known of each; a size or a sha256 that nobody saw is None
    sources  where to look, in this order
    about    the size as it is quoted, rounded: "2.3 GiB"; "" where it is not quoted or known exactly
    """

    name: str  # "Q4_K_M"
    files: tuple[Expected, ...]
    sources: tuple[Source, ...]
    about: str = ""

    @property
    def size(self) -> int | None:
        """Bytes of all files, if every one is known exactly."""
        sizes = [file.size for file in self.files]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    @property
    def estimated_size(self) -> int | None:
        """Bytes: exact if they are known, else as quoted (good to a few percent), else None."""
        if self.size is not None or not self.about:
            return self.size
        match = QUOTED_SIZE.fullmatch(self.about)
        assert match is not None
        return round(float(match["number"]) * _UNITS[match["unit"]])


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model with a name: what it is, and the files it can be had as.

    name         "qwen3:4b": the family and which one of it
    parameters   how many weights; None: not known
    context      tokens that it was trained for; None: not known
    quants       by their names, as the file lists them
    default      the name of the one that is meant when none is said
    sampling     recommended, by the names of SamplingParams
    end_of_turn  texts of the tokens that end an answer; () where the GGUF has to tell
    thinking     the texts around what a model thinks before it answers; () for one that does not; None: not said
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
        """What to ask for to get this one of its files: "qwen3:4b" for the default, else "qwen3:4b-q8_0"."""
        return self.name if quant == self.default else f"{self.name}-{quant.lower()}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that somebody asked for.

    name      what to call it in a message: "qwen3:4b", "qwen3:4b-q8_0", "hf:owner/name:Q5_K_M", a URL
    sources   where to look, in this order
    expected  its files, a shard each, as the catalogue knows them; () where a server has to tell
    entry     what the catalogue says of the model; None for one it does not know
    """

    name: str
    sources: tuple[Source, ...]
    expected: tuple[Expected, ...] = ()
    entry: CatalogEntry | None = None
