#!/usr/bin/env python3
"""Measure how fast the CPU engine encodes images, compared with libmtmd of llama.cpp.

Each case is a projector of a published size with random weights. Q8_0 files are made by `llmrun quantize`. The two
engines take turns with the same file and pixels. The script prints the median seconds of each, the ratio of the speeds
with its 99 % interval (from 8 rounds on), and the smallest cosine of their embeddings.

A round of all cases takes about half an hour on two cores. With fewer layers (--layers), a round takes less, and the
ratios hardly change.

Examples:
    scripts/measure_encoders.py --list
    scripts/measure_encoders.py smolvlm gemma4-280 --types Q8_0 --threads 1,2 --rounds 8
    scripts/measure_encoders.py siglip-896 --layers 3
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from llmrun.backends.cpu.vision import CpuVision
from llmrun.backends.llama.vision import LlamaVision
from llmrun.base.machine.cpu_count import default_threads
from llmrun.formats.gguf.reader import open_gguf
from llmrun.jobs.bench.statistics import paired_ratio
from llmrun.jobs.file_types import file_type_named
from llmrun.jobs.quantizing_projectors import plan_of_projector, quantize_projector
from llmrun.model.vision.layout import ImageLayout, Rows
from llmrun.model.vision.projector import read_projector
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES
from tests.support.vision.projectors import TINY_PROJECTORS, tiny_projector, tiny_text_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Vision
    from llmrun.model.vision.projector import ProjectorFile

TYPES = ("F16", "Q8_0")


@dataclass(frozen=True)
class Case:
    """An encoder of a published size, and an image.

    projector   a row of TINY_PROJECTORS
    fields      override the row's
    text_width  the width of the embeddings
    size        the width and height of a tile, in pixels
    tiles       the number of tiles
    """

    projector: str
    fields: dict[str, Any]
    text_width: int
    size: tuple[int, int]
    tiles: int = 1


_BASE = {"width": 768, "feed_forward": 3072, "heads": 12}
_SO400M = {"width": 1152, "feed_forward": 4304, "heads": 16, "layers": 27}
_LARGE = {"width": 1024, "feed_forward": 4096, "heads": 16, "layers": 24}

CASES = {
    "siglip-896": Case("gemma3", _SO400M, 2560, (896, 896)),
    "qwen3vl-1024": Case("qwen3vl_merger", _LARGE | {"deepstack": (5, 11, 17)}, 2560, (1024, 1024)),
    "smolvlm": Case("idefics3", _BASE | {"layers": 12}, 960, (512, 512), 17),
    "gemma4-280": Case("gemma4v", _BASE | {"layers": 16}, 1536, (960, 672)),
    "gemma4-1120": Case("gemma4v", _BASE | {"layers": 16}, 1536, (1920, 1344)),
    "gemma4-27-280": Case("gemma4v", _SO400M, 2816, (960, 672)),
    "gemma4-12b": Case("gemma4uv", {"width": 3840, "feed_forward": 0, "heads": 0}, 3840, (960, 672)),
    "qwen2.5vl-1024": Case(
        "qwen2.5vl_merger",
        {"width": 1280, "feed_forward": 3424, "heads": 16, "layers": 32, "keys": {"n_wa_pattern": 8}},
        2048,
        (896, 896),
    ),
    "lfm2-256": Case("lfm2", _BASE | {"layers": 12}, 2048, (512, 512)),
    "pixtral-1024": Case("pixtral", _LARGE, 5120, (896, 896)),
    "internvl": Case("internvl", _LARGE, 2048, (448, 448)),
}


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="encoders-") as folder:
        for name in options.cases:
            case = CASES[name]
            paths = _files(case, Path(folder), options.layers)
            model = _text_model(case, Path(folder), read_projector(paths[TYPES[0]]))
            for kind in options.types:
                for threads in options.threads:
                    _measure(f"{name} {kind}", case, read_projector(paths[kind]), model, threads, options.rounds)
            for path in (*paths.values(), model):
                path.unlink()
    return 0


def _text_model(case: Case, folder: Path, projector: ProjectorFile) -> Path:
    """Write the text model that libmtmd needs."""
    text = TINY_ARCHITECTURES[TINY_PROJECTORS[case.projector].text]
    keys = dict(text.keys)
    if "n_deepstack_layers" in keys:
        keys["n_deepstack_layers"] = projector.deepstack
    return tiny_text_model(folder, case.projector, text_width=case.text_width, keys=keys)


def _files(case: Case, folder: Path, layers: int | None) -> dict[str, Path]:
    """Write the projector in F16 and in Q8_0."""
    fields = dict(case.fields)
    if layers is not None and "layers" in fields:
        fields["layers"] = min(layers, fields["layers"])
        if "deepstack" in fields:
            fields["deepstack"] = tuple(layer for layer in fields["deepstack"] if layer < fields["layers"])
    plain = tiny_projector(folder, case.projector, "F16", text_width=case.text_width, others={}, **fields)
    small, kind = folder / "mmproj-Q8_0.gguf", file_type_named("Q8_0")
    with open_gguf(plain) as file:
        quantize_projector(file, small, kind, plan_of_projector(file, kind), lambda share: None)
    return {"F16": plain, "Q8_0": small}


def _measure(name: str, case: Case, projector: ProjectorFile, model: Path, threads: int, rounds: int) -> None:
    tiles = [_picture(*case.size, seed) for seed in range(case.tiles)]
    own, theirs = CpuVision.loaded(projector, threads), LlamaVision(model, projector, threads)
    try:
        theirs.load()
        theirs.wait()
        seconds: tuple[list[float], list[float]] = ([], [])
        rows: list[NDArray[np.float32]] = [np.empty(0, np.float32), np.empty(0, np.float32)]
        count = _rows_of(case, projector)
        for number in range(rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                began = time.perf_counter()
                rows[side] = _encoded((own, theirs)[side], tiles, count)
                seconds[side].append(time.perf_counter() - began)
    finally:
        own.close()
        theirs.close()
    ratio = paired_ratio(seconds[0], seconds[1], is_speed=False)
    interval = f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.low else ""
    found, expected = (one.astype(np.float64) for one in rows)
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    print(
        f"{name:21} threads {threads}: llmrun {statistics.median(seconds[0]):7.2f} s, "
        f"libmtmd {statistics.median(seconds[1]):7.2f} s, speed {ratio.ratio:5.2f} x{interval}, "
        f"{len(found):,} embeddings, cosine {cosines.min():.5f}",
        flush=True,
    )


def _rows_of(case: Case, projector: ProjectorFile) -> int:
    """Return the number of embeddings of a tile. Pixtral has one more at the end of each line but the last."""
    columns, rows = (side // projector.unit for side in case.size)
    return columns * rows + (rows - 1 if case.projector == "pixtral" else 0)


def _encoded(vision: Vision, tiles: Sequence[NDArray[np.uint8]], count: int) -> NDArray[np.float32]:
    height, width, _ = tiles[0].shape
    pieces = tuple(Rows(number, count, 0, 0) for number in range(len(tiles)))
    encoding = vision.begin(tiles, ImageLayout(pieces, (), width, height))
    while (rows := encoding.advance(60.0)) is None:
        pass
    return rows


def _picture(width: int, height: int, seed: int) -> NDArray[np.uint8]:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x * y // (7 + seed)) % 251], -1).astype(np.uint8)


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), help="the cases to measure (default: all)")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--types", default=",".join(TYPES), help="weight types (default: F16,Q8_0)")
    parser.add_argument("--threads", default=f"1,{default_threads()}", help="threads (default: 1, and one per core)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds per case (default: 8)")
    parser.add_argument("--layers", type=int, help="the most layers (default: as published)")
    options = parser.parse_args()
    if options.list:
        print(*CASES, sep="\n")
        raise SystemExit(0)
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"unknown case: {unknown[0]}; choose from {', '.join(CASES)}")
    options.types = options.types.split(",")
    if not set(options.types) <= set(TYPES):
        parser.error(f"--types: choose from {','.join(TYPES)}")
    options.threads = sorted({int(text) for text in options.threads.split(",")})
    return options


if __name__ == "__main__":
    sys.exit(main())
