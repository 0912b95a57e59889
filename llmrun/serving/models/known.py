"""The models that requests may name: those given at start, and those in the store."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, Self
from urllib.parse import urlsplit

from llmrun.backends.lora_files import LoraOption
from llmrun.base.errors import ModelNotFound
from llmrun.options.presets import Preset

_FRESH_S: Final = 2.0  # how long a list of the store's models is used; reading the folders takes time
_MOST_NAMED: Final = 5  # names in a hint
_LONGEST_NAME: Final = 200  # characters; looking up a very long name takes seconds
_LATEST: Final = ":latest"  # the tag that Ollama adds to names without a tag


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that requests may name.

    name       the name that clients use
    path       the model's file
    reference  the name by which the hub finds it; "" for a model that was given at start
    size       of its files in bytes
    modified   when its file was last written, in seconds since 1970
    preset     what the name adds to requests, or None
    adapters   the scales of LoRA adapters, by name, for requests that choose none; None for those of --lora
    parent     the name of the model, if this is the name of one of its adapters
    """

    name: str
    path: Path
    reference: str = ""
    size: int = 0
    modified: float = 0.0
    preset: Preset | None = None
    adapters: Mapping[str, float] | None = None
    parent: str = ""

    @property
    def is_given(self) -> bool:
        """Whether the model was given at start."""
        return not self.reference

    def under(self, preset: Preset) -> Self:
        """Return the model under the name of a preset."""
        chosen = {option.name: option.scale for option in map(LoraOption.parse, preset.loras)}
        return replace(self, name=preset.name, preset=preset, adapters=chosen or self.adapters)

    def with_adapter(self, option: LoraOption) -> Self:
        """Return the model under the name of an adapter. A scale of 0 only keeps others from using the adapter."""
        return replace(self, name=option.name, parent=self.name, adapters={option.name: option.scale or 1.0})


class KnownModels(Protocol):
    """Finds models by their names. `given` are those that were given at start; the first one is the default."""

    @property
    def given(self) -> Sequence[KnownModel]: ...

    async def find(self, name: str) -> KnownModel:
        """Return the model with this name. Raises ModelNotFound."""

    async def listed(self) -> Sequence[KnownModel]:
        """Return all models, first those that were given."""


class GivenOnly:
    """Models that were given at start, and no others."""

    def __init__(self, given: Sequence[KnownModel]) -> None:
        self.given = tuple(given)

    async def find(self, name: str) -> KnownModel:
        """See KnownModels."""
        return found_among(name, self.given)

    async def listed(self) -> Sequence[KnownModel]:
        """See KnownModels."""
        return self.given


class WithStore:
    """Models that were given at start, and all models in the store of this machine. Nothing is ever downloaded.

    Requests name models by the names in the list, or by a catalogue name or an alias that means one of them. Paths,
    URLs and names that begin with `hf:` are never looked up.
    """

    def __init__(
        self,
        given: Sequence[KnownModel],
        in_store: Callable[[], Iterable[KnownModel]],
        catalogue_name: Callable[[str], str | None],
        presets: Sequence[Preset] = (),
    ) -> None:
        """Create the list. Presets whose models are not in it are left out.

        in_store        reads the store; called in a thread
        catalogue_name  returns the full name of a model for an alias or a short form, or None
        """
        self.given = tuple(given)
        self._in_store, self._catalogue_name, self._presets = in_store, catalogue_name, presets
        self._stored: Sequence[KnownModel] = ()
        self._read_at = -_FRESH_S
        self._reading = asyncio.Lock()

    async def find(self, name: str) -> KnownModel:
        """See KnownModels."""
        wanted = name.lower()
        for model in self.given:
            if model.name.lower() == wanted:
                return model
        among = await self.listed()
        try:
            return found_among(name, among)
        except ModelNotFound:
            meant = await asyncio.to_thread(self._catalogue_name, name) if _may_be_catalogued(name) else None
            for model in among:
                if meant is not None and model.name.lower() == meant.lower():
                    return model
            raise

    async def listed(self) -> Sequence[KnownModel]:
        """See KnownModels."""
        async with self._reading:
            if time.monotonic() - self._read_at > _FRESH_S:
                self._stored = await asyncio.to_thread(self._read)
                self._read_at = time.monotonic()
        return self._stored

    def _read(self) -> Sequence[KnownModel]:
        paths = {model.path for model in self.given if model.preset is None}
        models = _distinct([*self.given, *(model for model in self._in_store() if model.path not in paths)])
        bases = [(preset, self._base(preset, models)) for preset in self._presets]
        presets = [base.under(preset) for preset, base in bases if base is not None]
        # A preset hides a model with the same name, as everywhere else.
        return _distinct([*self.given, *presets, *models])

    def _base(self, preset: Preset, models: Sequence[KnownModel]) -> KnownModel | None:
        """Return the model of a preset, or None if it is not on this machine."""
        names = {name.lower() for name in (preset.model, self._catalogue_name(preset.model)) if name}
        path = Path(os.path.abspath(os.path.expanduser(preset.model)))  # noqa: PTH100, PTH111  as for all model names
        for model in models:
            if model.preset is None and (names & {model.name.lower(), model.reference.lower()} or model.path == path):
                return model
        return None


def found_among(name: str, models: Sequence[KnownModel]) -> KnownModel:
    """Return the model with this name, without regard to case and with or without ":latest". Raises ModelNotFound."""
    by_name = {model.name.lower(): model for model in reversed(models)}
    for candidate in spellings(name):
        if candidate in by_name:
            return by_name[candidate]
    names = [repr(model.name) for model in models[:_MOST_NAMED]]
    more = len(models) - len(names)
    hint = f"this server has {', '.join(names)}" + (f" and {more} more; see /v1/models" if more else "")
    raise ModelNotFound(f"no such model: {name[:100]!r}", hint=hint)


def spellings(name: str) -> tuple[str, ...]:
    """Return the names in lower case that a client may mean, the likeliest first."""
    wanted = name.lower()
    return wanted, wanted.removesuffix(_LATEST), wanted + _LATEST


def public_name(reference: str, path: Path) -> str:
    """Return the name that clients use for a model in the store: never a path, a URL or a name with `hf:`.

    reference  the name by which the hub finds it
    """
    if reference.lower().startswith("hf:"):
        return reference[3:].lstrip("/")
    if urlsplit(reference).netloc or _is_path(reference):
        return path.stem
    return reference


def _may_be_catalogued(name: str) -> bool:
    """Return whether a name can be in the catalogue, whose names are short and never paths or URLs."""
    is_location = "/" in name or "\\" in name or name.lower().endswith(".gguf")
    return not is_location and len(name) <= _LONGEST_NAME


def _is_path(reference: str) -> bool:
    return Path(reference).is_absolute() or (reference.lower().endswith(".gguf") and not reference.count(":"))


def _distinct(models: Iterable[KnownModel]) -> Sequence[KnownModel]:
    """Return the models whose names are unique. Of several with the same name, the first is kept."""
    found: dict[str, KnownModel] = {}
    for model in models:
        found.setdefault(model.name.lower(), model)
    return tuple(found.values())
