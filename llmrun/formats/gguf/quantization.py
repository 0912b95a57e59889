"""Names the quantization of a model file, such as "Q4_K_M" or "UD-Q4_K_XL".

The name in the file's name takes precedence over `general.file_type`, because the name is more specific: mixes such as
UD-Q4_K_XL have no number of their own in llama.cpp's `enum llama_ftype`. This module does not import NumPy.
"""

from __future__ import annotations

import re

# "UD-", Unsloth's prefix for a mix of quantization types, is part of the name. The pattern matches only whole words, so
# it does not find "Q4_XS" in "IQ4_XS".
_QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])(?P<name>(?:UD-)?(?:I?Q[1-8](?:_[0-9A-Z]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_VAGUE = re.compile(r"Q[1-8]")  # states the bits, but not the types

# The values of `general.file_type`, from llama.cpp's `enum llama_ftype`.
FILE_TYPES: dict[int, str] = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S"), 7)),
    **dict(enumerate(("Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL"), 17)),
    **dict(enumerate(("IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16"), 26)),
    **dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4", "Q1_0", "Q2_0"), 36)),
}


def quantization_of(file: str) -> str:
    """Return the quantization in a file name in upper case, such as "Q4_K_M" or "UD-Q4_K_XL".

    If the name contains several quantizations, returns the last one. If the name contains no quantization, returns "".
    """
    stem = file.rsplit("/", 1)[-1]
    found = [match["name"] for match in _QUANTIZATION.finditer(stem)]
    return _plain(found[-1]) if found else ""


def without_quantizations(text: str) -> str:
    """Return a text with a space in place of each quantization."""
    return _QUANTIZATION.sub(" ", text)


def quantization_named(text: str) -> str:
    """Return `text` in upper case if it names a quantization ("q4_k_m" -> "Q4_K_M"), or else ""."""
    return _plain(text) if _QUANTIZATION.fullmatch(text) else ""


def is_exact(quantization: str) -> bool:
    """Return whether a quantization from a file name is exact, as "Q4_K_M" is. "Q4" and "" need the header, too."""
    return bool(quantization) and not _VAGUE.fullmatch(quantization)


def quantization_in(file: str, file_type: object) -> str:
    """Return the quantization in a file's name, or else the one in its header, or "" if neither states it.

    file_type  the value of `general.file_type`; None if the key is missing
    """
    named = quantization_of(file)
    if is_exact(named) or not isinstance(file_type, int):
        return named
    return FILE_TYPES.get(file_type, named)


def _plain(quantization: str) -> str:
    name = quantization.upper()
    return {"FP16": "F16", "FP32": "F32"}.get(name, name)
