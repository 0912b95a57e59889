"""Reads facts from the files of models that are not loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from llmrun.base.errors import LlmrunError
from llmrun.formats.gguf.glance import Glance, glance
from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub.local.model_records import known_digest
from llmrun.hub.names.file_names import quantization_of
from llmrun.model.tokenizers.fill_in_middle import fill_tokens_of
from llmrun.serving.models.known import KnownModel

_TEMPLATE: Final = "tokenizer.chat_template"
_TOOLS: Final = re.compile(r"\btools\b")
_THINKING: Final = re.compile("think|thought|reason", re.IGNORECASE)
_MOST_FILES: Final = 256  # facts of this many files are cached


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a model's file.

    values    the keys whose values are not lists, except for the chat template
    template  the source of the chat template; "" if there is none
    fills     whether the vocabulary has tokens for filling in the middle
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""
    fills: bool = False

    @property
    def mentions_tools(self) -> bool:
        """Whether the template mentions tools, so that the model can probably call them."""
        return _TOOLS.search(self.template) is not None

    @property
    def mentions_thinking(self) -> bool:
        """Whether the template mentions thinking, so that the model can probably think."""
        return _THINKING.search(self.template) is not None


def glance_at(known: KnownModel) -> Glance:
    """Read a few facts at the beginning of a model's file. They are empty if the file is not readable.

    Call this in a thread, like the other functions here. The file is read again only after it has changed.
    """
    return _glance(known.path, known.size, known.modified)


def header_of(known: KnownModel) -> Header:
    """Read the header of a model's file, which may take a second. It is empty if the file is not readable."""
    return _header(known.path, known.size, known.modified)


def digest_of(known: KnownModel) -> str:
    """Return the sha256 of a model's first file if it is known, and otherwise another hash that changes with the file.

    Hashing the file would take minutes.
    """
    changing = f"{known.path.name} {known.size} {known.modified}"
    return known_digest(known.path) or hashlib.sha256(changing.encode()).hexdigest()


@lru_cache(maxsize=_MOST_FILES)
def _glance(path: Path, size: int, modified: float) -> Glance:
    try:
        found = glance(path, needs_file_type=not quantization_of(path.name))
    except LlmrunError:
        return Glance()
    return found._replace(file_type=quantization_of(path.name) or found.file_type)


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
