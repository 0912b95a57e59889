"""Prints digests of the logits of models, as JSON, on an emulated x86 processor with kernels compiled elsewhere.

    python -m tests.support.kernels.x86_digests < MODELS

MODELS are JSON: name -> (path, KV cache type).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.models.numeric_models import digest_of_results


def main() -> None:
    for name, (path, kv_type) in json.load(sys.stdin).items():
        digest = digest_of_results(Path(path), kv_type, threads=1)
        sys.stdout.write(json.dumps([name, digest]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
