"""Answer all requests in a file, and continue after a crash.

IN is a JSON Lines file, a text file with one prompt per line (.txt, or --text) or a CSV file; - reads standard input. A
JSON line contains a prompt, messages, or a request in the format of OpenAI's Batch API. A CSV file needs a column
prompt, or -m with a preset whose prompt uses its columns. Lines with a prompt may name images in --image-dir, in the
field images. All lines are checked before the model is loaded.

The output contains the answers in the order of the input. Finished answers are kept in FILE.partial until the output is
complete, so the same command continues an interrupted run. On the CPU engine, the same input, model and options give
the same output. -o - writes the answers to standard output while the run lasts, and cannot be continued.

Examples:
    llmrun batch prompts.jsonl -o answers.jsonl -m qwen3:4b
    llmrun batch questions.txt -o -
    llmrun batch prompts.jsonl -m qwen3:4b --dry-run
    llmrun batch reviews.csv -o labels.jsonl -m label --choice good,bad
    llmrun batch photos.jsonl -o captions.jsonl -m gemma3:4b --image-dir photos
    llmrun batch prompts.jsonl -o answers.jsonl --retry-errors
    llmrun batch prompts.jsonl -o answers.jsonl --workers http://10.0.0.7:8080,http://10.0.0.8:8080
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from llmrun.base.errors import UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import AnswerFlags, parse_template_variables, takes_answer_flags
from llmrun.cli.arguments.prompts import STDIN, read_text

LISTING = {"heading": "Run models", "place": 100}


@takes_answer_flags(but=("seed", "hide_thinking", "stream", "stats", "keep_alive", "warm"))
def command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A .jsonl, .txt, .csv or .tsv file; - for stdin.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Output file, or - for stdout; optional with --dry-run."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Treat each line as a prompt, as in .txt files.")] = False,
    *,
    flags: AnswerFlags,
    seed: Annotated[
        int | None, options.sampling_option("--seed", metavar="N", help="Seed for lines that have none.  [default: 0]")
    ] = None,
    workers: Annotated[
        str | None,
        options.device_option(
            "--workers",
            metavar="LIST",
            help="Where to run: local, URLs, ray or ray:HOST:PORT.  [default: local]",
        ),
    ] = None,
    mixed: Annotated[bool, options.device_option("--mixed", help="Accept workers whose answers may differ.")] = False,
    parallel: Annotated[
        int,
        options.speed_option(
            "--parallel", metavar="N", min=1, max=256, help="Maximum number of answers per worker at a time."
        ),
    ] = 16,
    kv_tokens: Annotated[
        int | None,
        options.speed_option("--kv-tokens", metavar="N", min=1, help="KV cache in tokens.  [default: what fits]"),
    ] = None,
    retry_errors: Annotated[
        bool, options.output_option("--retry-errors", help="Run the lines with errors again.")
    ] = False,
    force: Annotated[
        bool, options.output_option("--force", help="Start again, and replace the output if it exists.")
    ] = False,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count tokens, measure the speed, and write nothing.")
    ] = False,
    compare_price: Annotated[str | None, typer.Option("--compare-price", hidden=True)] = None,  # removed
    machines: Annotated[str | None, typer.Option("--machines", hidden=True)] = None,  # removed
    image_dir: Annotated[
        Path | None,
        options.prompt_option("--image-dir", metavar="DIR", help="Folder of the images that lines name."),
    ] = None,
    json_output: options.Json = False,
) -> int:
    if compare_price is not None:
        hint = "multiply the tokens that --dry-run prints by the API's prices"
        raise UsageError("--compare-price: no longer exists", hint=hint)
    if machines is not None:
        raise UsageError("--machines: no longer exists", hint="divide the time that --dry-run prints by the machines")
    if output is None and not is_dry_run:
        raise UsageError("-o: no output file was given", hint="add -o FILE, or --dry-run for an estimate")
    if force and retry_errors:
        raise UsageError("--force: cannot be combined with --retry-errors")
    is_streamed = output is not None and str(output) == STDIN
    for flag, given in (("--retry-errors", retry_errors), ("--json", json_output)):
        if is_streamed and given and not is_dry_run:
            raise UsageError(f"{flag}: cannot be combined with -o -", hint="write the answers to a file: -o FILE")
    if image_dir is not None and not image_dir.is_dir():
        raise UsageError(f"--image-dir: {image_dir}: no such folder")
    flags = replace(flags, seed=seed)
    settings = flags.settings()
    flags.check_model(settings.model)
    response_format = flags.response_format()
    variables = {**settings.variables, **parse_template_variables(flags.chat_template_kwargs)}
    chat_template = None if flags.chat_template is None else read_text(flags.chat_template, "--chat-template")

    # Slow imports must stay below this line, so that usage errors appear immediately.
    from llmrun.cli.answers.answering import announce_loading, tell_of_default_model
    from llmrun.cli.batching.files import opened_input, output_file
    from llmrun.cli.batching.running import call_options, check_lines, run
    from llmrun.cli.batching.workers import WorkersWanted, as_begun, parse_workers, refuse_local, workers_of
    from llmrun.jobs.batching.images import ImageFolder
    from llmrun.jobs.batching.requests import is_csv, is_text
    from llmrun.jobs.batching.run import Batch

    wanted = WorkersWanted(parse_workers(workers, settings.model), parallel, kv_tokens, chat_template)
    if not wanted.needs_model:
        refuse_local(flags, settings, kv_tokens)
    if text and is_csv(source):
        raise UsageError(f"--text: {source} is a CSV file", hint="rename the file if each of its lines is a prompt")
    calls = call_options(flags, settings, variables, response_format, text=text or is_text(source))
    if image_dir is not None:
        calls = replace(calls, folder=ImageFolder(image_dir))
    with opened_input(source) as file:
        if is_dry_run:
            announce_loading(settings)
            from llmrun.cli.batching.dry_run import dry_run

            return dry_run(file, calls, wanted, settings, as_json=json_output)
        assert output is not None  # checked above
        with output_file(output) as (answers, emit):
            model = settings.model if wanted.needs_model else ""
            batch = Batch(file, answers, calls, model, mixed=mixed, retry_errors=retry_errors, force=force, emit=emit)
            batch.check_files()
            wanted = replace(wanted, images=check_lines(file, calls))
            if flags.model is None and wanted.needs_model:
                tell_of_default_model(settings)
            with workers_of(wanted, as_begun(batch, settings)) as opened:
                return run(batch, opened, as_json=json_output)
