"""Rank documents by how well they answer a query.

Each file is a document. On standard input and in .jsonl files, each line is a document. The lines of .jsonl files are
strings, or objects with "text", "input", "content" or "document". The best document is printed first.

Examples:
    llmrun rerank -m hf:ggml-org/Qwen3-Reranker-0.6B-Q8_0-GGUF "Why is the sky blue?" docs/*.txt
    llmrun rerank -m model.gguf "Why is the sky blue?" passages.jsonl --top 5 --json
    cat passages.txt | llmrun rerank -m model.gguf "Why is the sky blue?"
"""

from __future__ import annotations

from typing import Annotated

import typer

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.embedding import RerankFlags
from llmrun.cli.arguments.options import files as file_names
from llmrun.cli.arguments.options import takes_flags
from llmrun.cli.arguments.prompts import checked_text

LISTING = {"heading": "Run models", "place": 102}
_EXAMPLE = 'llmrun rerank -m hf:ggml-org/Qwen3-Reranker-0.6B-Q8_0-GGUF "Why is the sky blue?" docs/*.txt'


@takes_flags(RerankFlags)
def command(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The question or the search terms.")],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Files with the documents; - reads stdin.", autocompletion=file_names),
    ] = None,
    *,
    flags: RerankFlags,
) -> int:
    settings = flags.settings(query, _EXAMPLE)
    if not checked_text(query, "query").strip():
        raise UsageError("QUERY: the query is empty", hint=f"for example: {_EXAMPLE}")
    from llmrun.cli.embedding import read_documents, write_ranking

    documents = read_documents(files or [])

    # Heavy imports must stay below this line, so that usage errors appear immediately.
    from llmrun.cli.embedding import open_embedder

    with open_embedder(settings, scores=True) as opened:
        scores = opened.scores(query, documents, truncate=flags.truncate)
    write_ranking(scores, documents, flags.top, as_json=flags.json_output)
    return 0
