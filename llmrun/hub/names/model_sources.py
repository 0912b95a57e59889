"""Data classes for the sources of models and for the files to download from them.

A source need not specify which file of a repository to use, whereas an `Artifact` is fully resolved and contains the
commit and the path, size and sha256 of every file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model in a repository of the Hugging Face Hub, chosen by file or by quantization.

    If `file` and `quantization` are both None, the best file in the repository is used.

    file          the file's path inside the repository, with "/"; for sharded models, the path of the first shard
    quantization  the quantization in upper case, as in file names, such as "Q4_K_M"
    revision      a branch, a tag or a commit
    """

    repository: str  # "owner/name"
    file: str | None = None
    quantization: str | None = None
    revision: str = "main"

    def __str__(self) -> str:
        text = f"hf:{self.repository}"
        if self.file:
            text += f"/{self.file}"
        elif self.quantization:
            text += f":{self.quantization}"
        return text if self.revision == "main" else f"{text}@{self.revision}"


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A wheel on PyPI that contains the model file."""

    project: str
    version: str
    wheel_bytes: int

    def __str__(self) -> str:
        return f"pypi:{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A model file on any web server, such as https://.../name.gguf.

    `str()` omits the query string, which may contain a signature.
    """

    url: str

    def __str__(self) -> str:
        return self.url.partition("?")[0]


@dataclass(frozen=True, slots=True)
class HeldSource:
    """A model that another program stores on this machine. It needs no download."""

    holder: str  # "ollama" or "lmstudio"
    name: str  # the model's name in that program, such as "qwen3:4b" or "owner/name/file.gguf"

    def __str__(self) -> str:
        return f"{self.holder}:{self.name}"


Source = HubSource | PypiSource | UrlSource | HeldSource


@dataclass(frozen=True, slots=True)
class Expected:
    """Metadata of a file that is known before any server is contacted. Unknown values are None."""

    file: str  # the file's name on disk, without folders
    size: int | None = None  # bytes
    sha256: str | None = None  # 64 hexadecimal digits, lower case


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that can be downloaded. `sha256` is None only for a UrlSource because web servers do not report it."""

    path: str  # the path inside the repository, with "/"; for other sources, the file name
    size: int  # bytes
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model to download, with its source and its files. A sharded model's files are in order.

    commit  the repository's commit as 40 hexadecimal digits; "" if the source has no commits
    """

    name: str
    source: Source
    files: tuple[RemoteFile, ...]
    commit: str = ""

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(file.size for file in self.files)
