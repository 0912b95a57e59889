"""Compute the embeddings of texts.

The texts are arguments, or the lines of --file or of standard input. The lines of .jsonl files are strings, or objects
with "text", "input", "content" or "document". The output is one JSON object per text, or a NumPy array in a .npy file.

Examples:
    llmrun embed -m hf:Qwen/Qwen3-Embedding-0.6B-GGUF "The sky is blue."
    llmrun embed -m model.gguf --file texts.txt -o vectors.npy
    cat texts.jsonl | llmrun embed -m model.gguf --dimensions 256 > vectors.jsonl
"""

from __future__ import annotations

from typing import Annotated

import typer

from llmrun.cli.arguments.embedding import EmbedFlags
from llmrun.cli.arguments.options import takes_flags

LISTING = {"heading": "Run models", "place": 101}
_EXAMPLE = 'llmrun embed -m hf:Qwen/Qwen3-Embedding-0.6B-GGUF "The sky is blue."'


@takes_flags(EmbedFlags)
def command(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="The texts to embed; - reads stdin.")
    ] = None,
    *,
    flags: EmbedFlags,
) -> int:
    settings, pooling = flags.settings(next(iter(texts or ()), None), _EXAMPLE), flags.chosen_pooling
    from llmrun.cli.embedding import check_output, read_texts, write_vectors

    if flags.output is not None:
        check_output(flags.output, flags.file)
    inputs = read_texts(texts or [], flags.file)

    # Heavy imports must stay below this line, so that usage errors appear immediately.
    from llmrun.cli.embedding import open_embedder

    with open_embedder(settings, pooling) as opened:
        vectors = opened.vectors(
            inputs,
            dimensions=flags.dimensions,
            normalize=not flags.raw,
            truncate=flags.truncate,
        )
    write_vectors(vectors, inputs, flags.output)
    return 0
