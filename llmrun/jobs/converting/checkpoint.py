"""Opens the folder of a Hugging Face checkpoint: config.json, other JSON files, and tensors in safetensors files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from llmrun.base.errors import ModelFileError, ModelNotFound
from llmrun.formats.gguf.opening import FOLDER, kind_of, opening
from llmrun.formats.gguf.problems import shown
from llmrun.formats.gguf.source import FileSource
from llmrun.hub.resolve.model_name import on_hub
from llmrun.jobs.converting.json_objects import JsonObject, bad_checkpoint, read_json, read_text, unsupported
from llmrun.jobs.converting.safetensors import SafetensorsFile, StoredTensor

CONFIG = "config.json"
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ENDING = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MOST_FILES = 1000
_NAME_THE_FOLDER = f"name the folder that contains {CONFIG} and the safetensors files"


class Checkpoint:
    """An open checkpoint. The class is a context manager.

    folder   its path
    config   the contents of config.json
    tensors  name -> tensor, from all safetensors files
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises ModelNotFound and ModelFileError, for pickle files too."""
        try:
            kind = kind_of(folder)
        except (OSError, ValueError):
            raise ModelNotFound(f"no such folder: {shown(str(folder), 300)}", hint=_hint_for_missing(folder)) from None
        if kind != FOLDER:
            raise ModelFileError(
                f"not a folder: {shown(str(folder), 300)}",
                hint=_NAME_THE_FOLDER,
            )
        if not (folder / CONFIG).exists():
            raise ModelNotFound(
                f"not a checkpoint: {shown(str(folder), 300)}: there is no {CONFIG} in it",
                hint=_NAME_THE_FOLDER,
            )
        self.folder = folder
        self.config = read_json(folder / CONFIG)
        self._sources: list[FileSource] = []
        with ExitStack() as files:
            self.tensors = self._open(files)
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def check_unchanged(self) -> None:
        """Raise ModelFileError if any of the safetensors files was modified after it was opened."""
        for file in self._sources:
            file.check_unchanged()

    def json(self, name: str) -> JsonObject | None:
        """Read one of the folder's JSON files. Returns None if there is no such file."""
        path = self.folder / name
        return read_json(path) if self.has(name) else None

    def text(self, name: str) -> str | None:
        """Read one of the folder's text files. Returns None if there is no such file."""
        return read_text(self.folder / name) if self.has(name) else None

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _open(self, files: ExitStack) -> dict[str, StoredTensor]:
        # Like transformers, prefer the single file: the index beside it may be that of the original model.
        index = None if self.has(_ONE_FILE) else self.json(_INDEX)
        if index is None:
            return dict(self._open_file(self._only_file(), files))
        placed = {name: index.object("weight_map").string(name) for name in index.object("weight_map").values}
        names = sorted(set(placed.values()))
        if not names or len(names) > _MOST_FILES:
            raise index.bad("weight_map", f"must name 1 to {_MOST_FILES} files, not {len(names)}")
        tensors: dict[str, StoredTensor] = {}
        for name in names:
            if name != Path(name).name or not name.endswith(_ENDING):
                raise index.bad("weight_map", f"must name {_ENDING} files in this folder, not '{shown(name)}'")
            for tensor, stored in self._open_file(self.folder / name, files).items():
                if placed.get(tensor) != name:
                    raise stored.bad(f"is in this file, but {_INDEX} does not place it here")
                tensors[tensor] = stored
        missing = placed.keys() - tensors.keys()
        if missing:
            first = min(missing)
            raise bad_checkpoint(self.folder / placed[first], f"{shown(first)} is missing, but {_INDEX} names it")
        return tensors

    def _open_file(self, path: Path, files: ExitStack) -> dict[str, StoredTensor]:
        file = SafetensorsFile(path)
        files.callback(file.close)
        self._sources.append(file.source)
        return file.tensors

    def _only_file(self) -> Path:
        """Return the only safetensors file, whatever its name. Raises ModelNotFound and ModelFileError."""
        with opening(self.folder):
            names = sorted(path.name for path in self.folder.iterdir())
        found = [name for name in names if name.endswith(_ENDING)]
        if _ONE_FILE in found or len(found) == 1:
            return self.folder / (_ONE_FILE if _ONE_FILE in found else found[0])
        if found:
            raise ModelFileError(
                f"not a complete checkpoint: {shown(str(self.folder), 300)}: {len(found)} safetensors files, "
                f"but no {_INDEX}",
                hint="download the index, too, or leave only the files of one model in the folder",
            )
        pickled = next((name for name in names if name.endswith(_PICKLES)), None)
        if pickled is not None:
            raise unsupported(
                self.folder / pickled,
                "pickle files can run any code when they are read, so llmrun never reads them",
                "use a checkpoint with safetensors files",
            )
        raise ModelNotFound(
            f"no weights: {shown(str(self.folder), 300)}: no safetensors files in this folder",
            hint="download the whole checkpoint",
        )


def _hint_for_missing(folder: Path) -> str:
    if on_hub(folder) is None:
        return "check the path"
    return f"download it first: hf download {folder.as_posix()} --local-dir {folder.name}"
