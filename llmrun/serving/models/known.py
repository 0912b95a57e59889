"""The models that requests may name: models given at startup, and models in the store.

Facts about unloaded models are read from the models' files.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from llmrun.backends.lora_files import LoraOption
from llmrun.base.errors import LlmrunError, ModelNotFound
from llmrun.formats.gguf.glance import Glance
from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub.catalog import load_catalog
from llmrun.hub.local.model_records import known_digest
from llmrun.hub.local.projectors import projector_for
from llmrun.hub.upkeep import inventory
from llmrun.model.tokenizers.vocabulary import fill_tokens_of
from llmrun.options.presets import Preset

_FRESH_S: Final = 2.0  # seconds for which the list of the store's models is cached, because reading folders is slow
_MOST_NAMED: Final = 5  # model names in a hint
_LONGEST_NAME: Final = 200  # characters; looking up a very long name takes seconds
_LATEST: Final = ":latest"  # the tag that Ollama adds to names without a tag


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that requests may name.

    name       the name that clients use
    path       the model's file
    reference  the name by which the hub finds the model; "" for models given at startup
    size       the total size of the model's files in bytes
    modified   when the model's file was last written, in seconds since 1970
    preset     the preset whose settings the name adds to requests, or None
    adapters   the default scales of LoRA adapters, by name; None for the scales of --lora
    parent     the name of the base model, if `name` is the name of an adapter; otherwise ""
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
        """True if the model was given at startup."""
        return not self.reference

    def under(self, preset: Preset) -> Self:
        """Return the model under the name of a preset."""
        chosen = {option.name: option.scale for option in map(LoraOption.parse, preset.loras)}
        return replace(self, name=preset.name, preset=preset, adapters=chosen or self.adapters)

    def with_adapter(self, option: LoraOption) -> Self:
        """Return the model under the name of an adapter. Under an adapter's name, a scale of 0 becomes 1."""
        return replace(self, name=option.name, parent=self.name, adapters={option.name: option.scale or 1.0})


class KnownModels:
    """The models given at startup, and all models in the store of this machine. Nothing is ever downloaded.

    Requests use the names in the list, or a catalogue name or alias of a model in the list. Paths, URLs and names that
    begin with `hf:` are never looked up.

    given  the models given at startup; the first model is the default
    """

    def __init__(
        self,
        given: Sequence[KnownModel],
        in_store: Callable[[], Iterable[KnownModel]] = tuple,
        catalogue_name: Callable[[str], str | None] = lambda name: None,
        presets: Sequence[Preset] = (),
    ) -> None:
        """Create the list. Presets for models that are not in the list are omitted.

        in_store        called in a thread to read the store; by default, the store is empty
        catalogue_name  returns the full name of a model for an alias or a short form, or None
        """
        self.given = tuple(given)
        self._in_store, self._catalogue_name, self._presets = in_store, catalogue_name, presets
        self._stored: Sequence[KnownModel] = ()
        self._read_at = -_FRESH_S
        self._reading = asyncio.Lock()

    async def find(self, name: str) -> KnownModel:
        """Return the model with the given name. Raises ModelNotFound."""
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
        """Return all models, beginning with the models given at startup."""
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
        # A preset hides a model with the same name, as in all llmrun commands.
        return _distinct([*self.given, *presets, *models])

    def _base(self, preset: Preset, models: Sequence[KnownModel]) -> KnownModel | None:
        """Return the model of a preset, or None if the model is not on this machine."""
        names = {name.lower() for name in (preset.model, self._catalogue_name(preset.model)) if name}
        path = Path(os.path.abspath(os.path.expanduser(preset.model)))  # noqa: PTH100, PTH111  like other model names
        for model in models:
            if model.preset is None and (names & {model.name.lower(), model.reference.lower()} or model.path == path):
                return model
        return None


def found_among(name: str, models: Sequence[KnownModel]) -> KnownModel:
    """Return the model with the given name, ignoring case and a missing or extra ":latest". Raises ModelNotFound."""
    by_name = {model.name.lower(): model for model in reversed(models)}
    for candidate in spellings(name):
        if candidate in by_name:
            return by_name[candidate]
    names = [repr(model.name) for model in models[:_MOST_NAMED]]
    more = len(models) - len(names)
    hint = f"this server has {', '.join(names)}" + (f" and {more} more; see /v1/models" if more else "")
    raise ModelNotFound(f"no such model: {name[:100]!r}", hint=hint)


def spellings(name: str) -> tuple[str, ...]:
    """Return the lowercase names that a client may mean, with the likeliest name first."""
    wanted = name.lower()
    return wanted, wanted.removesuffix(_LATEST), wanted + _LATEST


def public_name(reference: str, path: Path) -> str:
    """Return the name that clients use for a model in the store: never a path, a URL or a name that begins with `hf:`.

    reference  the name by which the hub finds the model
    """
    if reference.lower().startswith("hf:"):
        return reference[3:].lstrip("/")
    if urlsplit(reference).netloc or _is_path(reference):
        return path.stem
    return reference


def _may_be_catalogued(name: str) -> bool:
    """Return whether a name can be in the catalogue. Names in the catalogue are short and never paths or URLs."""
    is_location = "/" in name or "\\" in name or name.lower().endswith(".gguf")
    return not is_location and len(name) <= _LONGEST_NAME


def _is_path(reference: str) -> bool:
    return Path(reference).is_absolute() or (reference.lower().endswith(".gguf") and not reference.count(":"))


def _distinct(models: Iterable[KnownModel]) -> Sequence[KnownModel]:
    """Return the models with unique names. If several models have the same name, only the first is returned."""
    found: dict[str, KnownModel] = {}
    for model in models:
        found.setdefault(model.name.lower(), model)
    return tuple(found.values())


def models_in_store() -> Iterator[KnownModel]:
    """Yield the models that llmrun or another program has downloaded, without projectors and other auxiliary files."""
    for model in inventory.models():
        if model.current:
            name = public_name(model.name, model.path)
            yield KnownModel(name, model.path, model.name, model.size, model.modified)


def given_model(name: str, path: Path, preset: Preset | None) -> KnownModel:
    """Return a model given at startup. The file of a stand-in may be missing."""
    known = KnownModel(name, path)
    if path.is_file():
        model = inventory.of_path(path)
        known = KnownModel(name, path, "", model.size, model.modified)
    return known if preset is None else known.under(preset)


def catalogue_name(name: str) -> str | None:
    """Return the full name of the catalogue's model that a name refers to, or None."""
    try:
        return load_catalog().find(name).name
    except LlmrunError:
        return None


_TEMPLATE: Final = "tokenizer.chat_template"
_TOOLS: Final = re.compile(r"\btools\b")
_THINKING: Final = re.compile("think|thought|reason", re.IGNORECASE)
_MOST_FILES: Final = 256  # facts of this many files are cached


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a model's file.

    values    all keys whose values are not lists, except the chat template
    template  the source of the chat template; "" if there is none
    fills     True if the vocabulary contains the tokens for filling in the middle
    sees_images  True if the model's projector is on this machine
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""
    fills: bool = False
    sees_images: bool = False

    @property
    def mentions_tools(self) -> bool:
        """True if the template mentions tools, in which case the model can probably call tools."""
        return mentions_tools(self.template)

    @property
    def mentions_thinking(self) -> bool:
        """True if the template mentions thinking, in which case the model can probably think."""
        return _THINKING.search(self.template) is not None


def mentions_tools(template: str) -> bool:
    return _TOOLS.search(template) is not None


def glance_at(known: KnownModel) -> Glance:
    """Read a few facts from the beginning of a model's file. The facts are empty if the file is not readable.

    Call this function in a thread, like `header_of` and `digest_of`. The file is read again only if it has changed.
    """
    return _glance(known.path, known.size, known.modified)


def header_of(known: KnownModel) -> Header:
    """Read the header of a model's file, which may take a second. An unreadable file has an empty header."""
    header = _header(known.path, known.size, known.modified)
    return replace(header, sees_images=_has_projector(known.path))  # the projector may arrive after the model


def digest_of(known: KnownModel) -> str:
    """Return the sha256 of a model's first file if known, or another hash that changes with the file.

    Hashing the file would take minutes.
    """
    changing = f"{known.path.name} {known.size} {known.modified}"
    return known_digest(known.path) or hashlib.sha256(changing.encode()).hexdigest()


@lru_cache(maxsize=_MOST_FILES)
def _glance(path: Path, size: int, modified: float) -> Glance:
    try:
        return inventory.facts_in(path)
    except LlmrunError:
        return Glance()


@lru_cache(maxsize=_MOST_FILES)
def _header(path: Path, size: int, modified: float) -> Header:
    try:
        with open_gguf(path) as file:
            metadata = file.metadata
            found = {key: value for key, value in metadata.items() if isinstance(value, bool | int | float | str)}
            fills = fill_tokens_of(file) is not None
    except LlmrunError:
        return Header()
    template = found.pop(_TEMPLATE, "")
    return Header(found, template if isinstance(template, str) else "", fills)


def _has_projector(path: Path) -> bool:
    try:
        return projector_for(path) is not None
    except LlmrunError:  # several projectors match, so the model is opened without one
        return False
