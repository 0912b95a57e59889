#!/usr/bin/env python3
"""Models to measure with: the shape of Llama 3.2 1B, random weights, one file for each weight type.

    scripts/make_models.py FOLDER [TYPE ...]        Q4_0 Q4_K_M Q8_0 Q5_K_M Q6_K IQ4_XS MXFP4 ...; about a minute each

llama.cpp quantizes them from a file of Q8_0; MXFP4, which it writes for experts alone, is quantized by gguf-py. The
vocabulary is Llama 3's, from llama-cpp-python's source distribution, which pip fetches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llmrun.gguf.reader import open_gguf  # noqa: E402
from tests.support.downloads import LLAMA_CPP_FOLDER, llama_cpp_source  # noqa: E402
from tests.support.gguf_files import Vocabulary, tiny_llama  # noqa: E402
from tests.support.llama_cpp_oracle import requantize  # noqa: E402

TYPES = ("Q4_0", "Q4_K_M", "Q8_0", "Q5_K_M", "Q6_K", "IQ4_XS", "MXFP4")
SOURCE = "Q8_0"
WRITTEN_HERE = (SOURCE, "MXFP4")


def llama3_vocabulary() -> Vocabulary:
    with open_gguf(llama_cpp_source() / LLAMA_CPP_FOLDER / "ggml-vocab-llama-bpe.gguf") as file:
        return Vocabulary(
            tuple(file.strings("tokenizer.ggml.tokens")),
            tuple(file.integers("tokenizer.ggml.token_type").tolist()),
            tuple(file.strings("tokenizer.ggml.merges")),
            pre=file.string("tokenizer.ggml.pre"),
            bos=file.integer("tokenizer.ggml.bos_token_id"),
            eos=file.integer("tokenizer.ggml.eos_token_id"),
        )


def write(path: Path, weight_type: str) -> Path:
    return tiny_llama(
        path,
        weight_type=weight_type,
        layers=16,
        width=2048,
        heads=32,
        kv_heads=8,
        feed_forward=8192,
        context=8192,
        vocabulary=llama3_vocabulary(),
        rope_base=500_000.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("types", nargs="*")
    options = parser.parse_args()
    for weight_type in dict.fromkeys((SOURCE, *(options.types or TYPES))):
        target = options.folder / f"1b-{weight_type}.gguf"
        if not target.exists():
            part = target.with_suffix(".part")
            if weight_type in WRITTEN_HERE:
                write(part, weight_type)
            else:
                requantize(options.folder / f"1b-{SOURCE}.gguf", part, weight_type)
            part.rename(target)
        print(target, flush=True)


if __name__ == "__main__":
    main()
