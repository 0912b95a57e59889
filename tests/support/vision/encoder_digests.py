"""The digests of the rows that the CPU engine encodes. Tests call this module in processes with other settings.

    python -m tests.support.vision.encoder_digests < paths

The paths are a JSON object of projectors' files by names of cases, and the answer is one of SHA-256 digests.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from llmrun.backends.cpu.vision import CpuVision
from llmrun.model.vision.layout import ImageLayout, Rows
from llmrun.model.vision.projector import read_projector
from tests.support.vision.encoder_cases import ENCODER_CASES


def digests_of(paths: Mapping[str, str]) -> dict[str, str]:
    """Encode the first picture of each case."""
    layout, found = ImageLayout((Rows(0, 0, 0, 0),), (), 0, 0), {}
    for name, path in paths.items():
        with closing(CpuVision.loaded(read_projector(Path(path)), 2)) as vision:
            rows = vision.begin(ENCODER_CASES[name].pictures()[:1], layout).advance(60)
            assert rows is not None
            found[name] = hashlib.sha256(rows.tobytes()).hexdigest()
    return found


if __name__ == "__main__":
    json.dump(digests_of(json.load(sys.stdin)), sys.stdout)
