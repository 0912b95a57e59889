"""Prints digests of the logits of models, as JSON, on an emulated machine.

    python -m tests.support.arm.digests < INPUT

INPUT is a JSON object with the arguments of `main`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmrun.base.compiled.host import load_kernels
from llmrun.base.compiled.kernel import KernelName
from tests.support.arm.host_compiler import compile_outside
from tests.support.models.digests import digest_of_results


def main(models: dict[str, tuple[str, str]], kernels: list[tuple[str, str, dict[str, int | str]]]) -> None:
    """Print the digests of `models`, name -> (path, KV cache type). All `kernels` are compiled at once, for speed."""
    compile_outside()
    load_kernels([KernelName.of(module, function, **parameters) for module, function, parameters in kernels])
    for name, (path, kv_type) in models.items():
        digest = digest_of_results(Path(path), kv_type, threads=1)
        sys.stdout.write(json.dumps([name, digest]) + "\n")


if __name__ == "__main__":
    main(**json.load(sys.stdin))
