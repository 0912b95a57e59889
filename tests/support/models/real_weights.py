"""SmolLM2 in any weight type, together with the same weights in F32 for the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.models.downloads import smollm2
from tests.support.models.llama_cpp_oracle import requantize

OWN_TYPE = "Q4_1"  # the weight type of the downloaded file


@dataclass(frozen=True)
class RealWeights:
    path: Path
    dequantized: Path  # for the oracle


def real_weights(weight_type: str, folder: Path) -> RealWeights:
    """Write the files, up to 800 MB, to `folder`.

    This takes half a second to three seconds per type, so the files need not be kept.
    """
    path = smollm2()
    if weight_type != OWN_TYPE:
        path = requantize(path, folder / f"{weight_type}.gguf", weight_type)
    dequantized = path if weight_type == "F32" else requantize(path, folder / f"{weight_type}-as-F32.gguf", "F32")
    return RealWeights(path, dequantized)
