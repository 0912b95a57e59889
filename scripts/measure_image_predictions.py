#!/usr/bin/env python3
"""Measure how well the time to encode an image on the CPU engine is predicted, with pictures of random sizes.

The script first measures the speeds of this machine as `llmrun fit` does, and then prints the forecast and the actual
time of each picture, and at the end the median and the largest of the relative errors. With --corrected, the forecasts
are corrected by the pictures before, as in a running engine.

Example:
    scripts/measure_image_predictions.py mmproj-model-Q8_0.gguf -t 2 --pictures 10
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmrun.backends.cpu.speeds.machine import Speeds
from llmrun.backends.cpu.vision import CpuVision
from llmrun.backends.cpu.vision_costs import EncoderTimes
from llmrun.base.machine.cpu_count import default_threads
from llmrun.model.vision.projector import read_projector


def measured(vision: CpuVision, random: np.random.Generator, options: argparse.Namespace) -> float:
    """Encode a picture of random size, print its times, and return the relative error of the forecast."""
    low, high = np.log(options.smallest), np.log(options.largest)
    width, height = (int(side) for side in np.exp(random.uniform(low, high, 2)))
    layout = vision.projector.layout(width, height)
    boxes = [box for scaled in layout.scaled for box in scaled.boxes]
    tiles = [random.integers(0, 256, (box.bottom - box.top, box.right - box.left, 3)).astype(np.uint8) for box in boxes]
    corrected = vision.expected_seconds(layout) if options.corrected else None
    expected = vision.times.layout(layout) if corrected is None else corrected
    began = time.perf_counter()
    encoding = vision.begin(tiles, layout)
    while encoding.advance(0) is None:
        pass
    actual = time.perf_counter() - began
    error = expected / actual - 1
    print(
        f"{width:5,} x {height:5,} pixels, {layout.rows:5,} tokens: expected {expected:6.2f} s, "
        f"actual {actual:6.2f} s, {error:+.0%}",
        flush=True,
    )
    return abs(error)


def main() -> int:
    options = _options()
    random = np.random.default_rng(options.seed)
    with closing(CpuVision.loaded(read_projector(Path(options.projector)), options.threads)) as vision:
        speeds = Speeds.of_this_machine(options.threads, afresh=True)
        vision.times = EncoderTimes(vision.encoder, speeds)
        errors = [measured(vision, random, options) for _ in range(options.pictures)]
    print(f"errors: median {np.median(errors):.0%}, largest {max(errors):.0%}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("projector")
    parser.add_argument("-t", "--threads", type=int, default=default_threads())
    parser.add_argument("--pictures", type=int, default=10)
    parser.add_argument("--smallest", type=int, default=300, help="shortest side in pixels")
    parser.add_argument("--largest", type=int, default=2000, help="longest side in pixels")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corrected", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
