"""A machine's model folders, laid out as the programs that own them do."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.gguf.gguf_bytes import F32, U32, RawGGUF, RawTensor, numbers, scalar, string, strings


def gguf(
    *, name: str = "test", architecture: str = "llama", context: int = 8192, file_type: int | None = None, salt: int = 0
) -> bytes:
    """Return a small file that opens. A different `salt` gives a different file."""
    keys: dict[str | bytes, bytes] = {
        "general.architecture": string(architecture),
        "general.name": string(name),
        "general.license": string("mit"),
        f"{architecture}.context_length": scalar(U32, context),
        "test.salt": scalar(U32, salt),
    }
    if file_type is not None:
        keys["general.file_type"] = scalar(U32, file_type)
    return RawGGUF(keys, [RawTensor("output.weight", 0, (8, 4), 128)]).build()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def commit(number: int) -> str:
    return f"{number:040x}"


class Stores:
    """All the model folders below one root, which is also the user's home."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "hf" / "hub"
        self.models = root / "data" / "models"

    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.root),
            "USERPROFILE": str(self.root),
            "HF_HOME": str(self.root / "hf"),
            "LLMRUN_DATA_DIR": str(self.root / "data"),
            "LLMRUN_CONFIG": str(self.root / "config.toml"),
        }

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "config.toml").touch()
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)

    def repository(self, name: str) -> Path:
        return self.cache / ("models--" + name.replace("/", "--"))

    def shared(self, name: str, files: Mapping[str, bytes], *, number: int = 1, ref: str | None = "main") -> list[Path]:
        """Add a snapshot to the shared cache and return its links."""
        folder = self.repository(name)
        links = []
        for file, data in files.items():
            blob = folder / "blobs" / sha256(data)
            blob.parent.mkdir(parents=True, exist_ok=True)
            if not blob.exists():
                blob.write_bytes(data)
            link = folder / "snapshots" / commit(number) / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
            links.append(link)
        if ref is not None:
            reference = folder / "refs" / ref
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit(number))
        return links

    def own(self, file: str, data: bytes) -> Path:
        path = self.models / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def ollama(self, data: bytes, *parts: str, folder: Path | None = None, projectors: Sequence[bytes] = ()) -> Path:
        """Add a model to Ollama's store. `parts` are registry, owner, name and tag, or only the last two."""
        folder = folder or self.root / ".ollama" / "models"
        blob = folder / "blobs" / f"sha256-{sha256(data)}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        for each in (data, *projectors):
            blob.with_name(f"sha256-{sha256(each)}").write_bytes(each)
        layers = [
            {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}"},
            {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{sha256(data)}"},
        ]
        layers += [
            {"mediaType": "application/vnd.ollama.image.projector", "digest": f"sha256:{sha256(each)}"}
            for each in projectors
        ]
        self.manifest(json.dumps({"layers": layers}).encode(), *parts, folder=folder)
        return blob

    def manifest(self, text: bytes, *parts: str, folder: Path | None = None) -> Path:
        above = ("registry.ollama.ai", "library")[: 4 - len(parts)]
        path = (folder or self.root / ".ollama" / "models").joinpath("manifests", *above, *parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        return path

    def lm_studio(self, file: str, data: bytes, *, folder: Path | None = None) -> Path:
        path = (folder or self.root / ".lmstudio" / "models") / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def everything(self) -> dict[str, str]:
        """Return a digest of each file below the root and the target of each link."""
        found = {}
        for above, folders, files in os.walk(self.root):
            for name in [*files, *folders]:
                path = Path(above, name)
                if path.is_symlink():
                    found[str(path)] = f"-> {path.readlink()}"
                elif path.is_file():
                    found[str(path)] = sha256(path.read_bytes())
        return found


def long_header(*, type_last: bool, tokens: int = 3000) -> bytes:
    """Return a header with a vocabulary longer than one read, and the file type after or before it."""
    vocabulary: dict[str | bytes, bytes] = {
        "tokenizer.ggml.tokens": strings([f"token {number}" for number in range(tokens)]),
        "tokenizer.ggml.scores": numbers(F32, [0.0] * tokens),
    }
    kind: dict[str | bytes, bytes] = {"general.file_type": scalar(U32, 15)}
    first: dict[str | bytes, bytes] = {
        "general.architecture": string("llama"),
        "general.size_label": string("1B"),
        "llama.context_length": scalar(U32, 4096),
    }
    keys = first | vocabulary | kind if type_last else first | kind | vocabulary
    return RawGGUF(keys, [RawTensor("output.weight", 0, (8, 4), 128)]).build()
