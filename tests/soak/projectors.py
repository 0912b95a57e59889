"""Opens broken projectors in the CPU engine and in llama.cpp, and encodes images with them.

`scripts/soak projectors --first N` resumes at case N.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.vision import CpuVision
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.projector import check_projector, read_projector
from tests.soak.driver import Broken, Case, Soak
from tests.soak.model_mutations import OF_METADATA, OF_TENSORS, OF_WEIGHTS, Change
from tests.soak.models import ALLOWED, BACKENDS, Worker, ended, llama_process
from tests.support.gguf.gguf_bytes import STRING
from tests.support.gguf.gguf_mutations import broken, layout_of
from tests.support.models.model_drafts import Draft, Value, draft_of
from tests.support.vision import opened
from tests.support.vision.projectors import TINY_PROJECTORS, tiny_projector, tiny_text_model
from tests.support.vision.prompts import tiles_of

if TYPE_CHECKING:
    from llmrun.backends.base import Vision

# Small sizes, with which a case takes a few milliseconds.
_SMALL: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 56},
    "idefics3": {"image_size": 64, "keys": {"preproc_image_size": 128}},
    "internvl": {"image_size": 56},
    "qwen3vl_merger": {"image_size": 64},
    "qwen3vl_merger qwen35": {"image_size": 64},
}
_NAMES = tuple(TINY_PROJECTORS)
_OTHER_TYPES = ("mlp", "ldpv2", "resampler", "llama4", "glm4v", "ultravox", "unknown", "\x1b[2J", "")
_USAGE = 2  # limits that the file's sizes cannot meet


def projectors(soak: Soak) -> Iterator[Case]:
    """Run one mutant per case: even cases on the CPU engine, odd cases on llama.cpp.

    A case ends in rows or in an error with exit code 3. Any other exit code, a warning, a hang and too much memory are
    findings.
    """
    for name in _NAMES:
        tiny_text_model(soak.folder, name).rename(soak.folder / f"{name}.text.gguf")
    worker = Worker(soak.folder, encode)
    for name in _NAMES:
        path = _write(soak.folder, _base(name).build())
        for backend in range(2):
            if (outcome := worker.run(path, name, backend)) != (0, "answered"):
                raise Broken(f"a valid projector ends with {outcome} on {BACKENDS[backend]}: {name}")

    def case(number: int) -> str:
        nonlocal worker
        name, data = mutant(soak.seed, number)
        code, outcome = worker.run(_write(soak.folder, data), name, number)
        if code is None:
            worker.end()
            worker = Worker(soak.folder, encode)
        if code not in (*ALLOWED, _USAGE) or "\n" in outcome:
            raise Broken(f"{name} on {BACKENDS[number % 2]}: exit code {code}, {outcome}")
        return f"{code} {outcome}"

    try:
        yield case
    finally:
        worker.end()


def mutant(seed: int, case: int) -> tuple[str, bytes]:
    """Return a family, and its projector with one or two mutations, or sometimes with a broken structure."""
    random = Random(seed << 40 | case)
    name = random.choice(_NAMES)
    draft = _base(name).copy()
    if random.random() < 0.1:
        return name, broken(random, layout_of(draft.build()))
    for _ in range(random.choice((1, 1, 1, 2))):
        random.choice(random.choices(_GROUPS, weights=(5, 2, 4))[0])(random, draft)
    return name, draft.build()


def _change_family(random: Random, draft: Draft) -> None:
    name = random.choice((*_OTHER_TYPES, *(row.family for row in TINY_PROJECTORS.values())))
    draft.keys["clip.projector_type"] = Value(STRING, name.encode())


_GROUPS: tuple[tuple[Change, ...], ...] = ((*OF_METADATA, _change_family), OF_WEIGHTS, OF_TENSORS)


@functools.cache
def _base(name: str) -> Draft:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return draft_of(tiny_projector(Path(folder), name, **_SMALL.get(name, {})))


def _write(folder: Path, data: bytes) -> Path:
    """Write the projector of a case to a file with a hostile name."""
    path = folder / "mmproj\x1b[31m.gguf"
    path.write_bytes(data)
    return path


def encode(path: Path, name: str, case: int) -> tuple[int, str]:
    """Open a projector for its text model in this process, and encode images of two sizes.

    case  an even number for the CPU engine, an odd one for llama.cpp
    """
    model = path.parent / f"{name}.text.gguf"
    code, outcome = ended(path, partial(_encode_in_llama if case % 2 else _encode_in_cpu, path, model))
    return code, re.sub(r"\S*mmproj\S*", "FILE", outcome)


def _encode_in_cpu(path: Path, model: Path) -> None:
    projector = read_projector(path)
    with open_gguf(model) as file:
        check_projector(projector, file)
    _encode(CpuVision.loaded(projector, 1))


def _encode_in_llama(path: Path, model: Path) -> None:
    options = OpenOptions(context_size=512, threads=1, gpu_layers=0, mmproj=str(path))
    with open_gguf(model) as file:
        backend = LlamaBackend(file, options, process=llama_process())
    try:
        assert backend.vision is not None
        _encode(backend.vision)
    finally:
        backend.close()


def _encode(vision: Vision) -> None:
    try:
        for size in ((70, 50), (1, 1)):
            layout = vision.projector.layout(*size, "low")
            rows = opened.encode(vision, tiles_of(layout), layout)
            assert rows.shape == (layout.rows, vision.projector.row_width)
    finally:
        vision.close()
