"""Prints digests of the logits of models, as JSON, on an emulated ARM processor with kernels compiled elsewhere.

    python -m tests.support.kernels.arm_digests KEYS < MODELS

KEYS is a file with the key of each kernel in the kernel cache, and MODELS are JSON: name -> (path, KV cache type).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

from llmrun.compiled import store
from llmrun.compiled.levels import Target
from llmrun.compiled.store import KernelName
from tests.support.kernels.runs import PLAIN_TARGETS
from tests.support.models.numeric_models import digest_of_results

TARGET = PLAIN_TARGETS["neondot"]


def main() -> None:
    keys = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

    def key(name: KernelName, target: Target) -> str:
        assert target == TARGET
        return str(keys[repr(name)])

    with (
        mock.patch.object(store, "host_target", return_value=TARGET),
        mock.patch.object(store, "_key", key),
        mock.patch("llmrun.backends.cpu.backend.host_target", return_value=TARGET),
    ):
        for name, (path, kv_type) in json.load(sys.stdin).items():
            digest = digest_of_results(Path(path), kv_type, threads=1)
            sys.stdout.write(json.dumps([name, digest]) + "\n")


if __name__ == "__main__":
    main()
