"""Rank documents by how well they answer a query.

Each file is a document. On standard input and in .jsonl files, each line is a document. The lines of .jsonl files are
strings, or objects with "text", "input", "content" or "document". The best document is printed first.

Examples:
    llmrun rerank ggml-org/Qwen3-Reranker-0.6B-Q8_0-GGUF "Why is the sky blue?" docs/*.txt
    llmrun rerank model.gguf "Why is the sky blue?" passages.jsonl --top 5 --json
"""

from __future__ import annotations

from typing import Annotated

import typer

from llmrun.cli.arguments.embedding import RerankFlags
from llmrun.cli.arguments.options import files as file_names
from llmrun.cli.arguments.options import models, takes_flags
from llmrun.cli.arguments.prompts import checked_text

LISTING = {"heading": "Run models", "place": 102}


@takes_flags(RerankFlags)
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model, preset or .gguf file.", autocompletion=models)],
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The question or the search terms.")],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Files with the documents; - reads stdin.", autocompletion=file_names),
    ] = None,
    *,
    flags: RerankFlags,
) -> int:
    settings = flags.settings(model)
    from llmrun.cli.embedding import read_documents, write_ranking

    documents = read_documents(files or [])
    asked = checked_text(query, "query")

    # Heavy imports must stay below this line, so that usage errors appear immediately.
    from llmrun.cli.embedding import open_embedder

    with open_embedder(settings) as opened:
        scores = opened.scores(asked, documents, truncate=flags.truncate)
    write_ranking(scores, documents, flags.top, as_json=flags.json_output)
    return 0
