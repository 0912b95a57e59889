"""SmolLM2 in any weight type, beside the same weights in F32 for the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.models.downloads import smollm2
from tests.support.models.llama_cpp_oracle import requantize

OWN_TYPE = "Q4_1"  # what the file that is fetched holds


@dataclass(frozen=True)
class RealWeights:
    path: Path
    dequantized: Path  # for the oracle


def real_weights(weight_type: str, folder: Path) -> RealWeights:
    """Files in `folder`, up to 800 MB; half a second to three seconds a type, so they need not be kept."""
    path = smollm2()
    if weight_type != OWN_TYPE:
        path = requantize(path, folder / f"{weight_type}.gguf", weight_type)
    dequantized = path if weight_type == "F32" else requantize(path, folder / f"{weight_type}-as-F32.gguf", "F32")
    return RealWeights(path, dequantized)
