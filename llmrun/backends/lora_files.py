"""The LoRA adapters of an open model: the notation of --lora, and the files of the adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from llmrun.base.errors import ModelFileError, ModelNotFound, UsageError, shown
from llmrun.base.types import LARGEST_SCALE, Adapter

if TYPE_CHECKING:
    from llmrun.formats.gguf.adapter import AdapterFile
    from llmrun.formats.gguf.reader import GGUFFile

_PEFT = (".safetensors", ".bin")  # the file types of Hugging Face's PEFT


class LoraOption(Struct, frozen=True):
    """An adapter as the user names it: [NAME=]FILE[:SCALE].

    name   the name in requests; by default, the name of the file without its suffix
    scale  the scale for requests that do not choose adapters
    """

    name: str
    path: Path
    scale: float

    @classmethod
    def parse(cls, text: str) -> LoraOption:
        """Parse a value of --lora. Raises UsageError."""
        name, equals, rest = text.partition("=")
        if not equals or "/" in name or "\\" in name:
            name, rest = "", text
        file, colon, number = rest.rpartition(":")
        try:
            scale = float(number) if colon else 1.0
        except ValueError:  # the path contains a colon
            file, scale = rest, 1.0
        file = file if colon else rest
        if not file:
            raise UsageError(f"invalid value for --lora: '{text}', expected FILE, FILE:SCALE or NAME=FILE:SCALE")
        if not abs(scale) <= LARGEST_SCALE:
            raise UsageError(f"invalid value for --lora: '{text}': scales are {-LARGEST_SCALE:g} to {LARGEST_SCALE:g}")
        return cls(name or Path(file).stem, Path(file), scale)

    @property
    def text(self) -> str:
        """The option in the notation of --lora."""
        name = "" if self.name == self.path.stem else f"{self.name}="
        return f"{name}{self.path}:{self.scale!r}"

    def check(self) -> None:
        """Raise ModelNotFound if the file does not exist, and ModelFileError if the file is in PEFT's format."""
        if self.path.is_dir() or (self.path.is_file() and self.path.suffix in _PEFT):
            raise ModelFileError(
                f"not a GGUF file: {shown(str(self.path), 300)}",
                hint="convert the adapter with llama.cpp's convert_lora_to_gguf.py",
            )
        if not self.path.is_file():
            raise ModelNotFound(
                f"no such adapter: {shown(str(self.path), 300)}",
                hint="check the path after --lora or in the preset; a scale after it must be a number, as in FILE:0.5",
            )


@contextmanager
def opened_adapters(asked: Sequence[str], model: GGUFFile) -> Iterator[list[AdapterFile]]:
    """Open and check adapter files, given in the notation of --lora, for the duration of a `with` block.

    Raises UsageError, ModelNotFound, ModelFileError and UnsupportedModel.
    """
    if not asked:
        yield []
        return
    from llmrun.formats.gguf.adapter import open_adapter

    with ExitStack() as opened:
        adapters = [open_adapter(LoraOption.parse(text).path, model) for text in asked]
        for adapter in adapters:
            opened.callback(adapter.file.close)
        yield adapters
        for adapter in adapters:
            adapter.file.check_in_place()


def described(asked: Sequence[str], files: Sequence[AdapterFile]) -> tuple[Adapter, ...]:
    """Return the descriptions of open adapters. Raises UsageError if two adapters have the same name."""
    from llmrun.backends.base import identity_of

    adapters: dict[str, Adapter] = {}
    for text, opened in zip(asked, files, strict=True):
        option = LoraOption.parse(text)
        if option.name in adapters:
            raise UsageError(
                f"--lora: two adapters are called {option.name}: {adapters[option.name].path} and {option.path}",
                hint="name one of them: --lora NAME=FILE",
            )
        path, identity = str(opened.file.path), "-".join(map(str, identity_of(opened.file)))
        adapters[option.name] = Adapter(option.name, path, option.scale, opened.invocation, identity)
    return tuple(adapters.values())
