"""Measure how fast models are on this machine.

By default, prompts have 512 random tokens and answers have 128. If flags contain lists of values, every combination is
measured. The configurations take turns, and each configuration is compared with the first. Without --speculate, answers
are decoded token by token.

Examples:
    llmrun bench qwen3:4b
    llmrun bench ./a.gguf ./b.gguf -p 128,1024 -t 1-4
    llmrun bench --speculate off,auto --prompts prompts.jsonl
    llmrun bench --endpoint http://127.0.0.1:8080 --rate 2 --goodput ttft:500,itl:150
    llmrun bench compare last~1 last --fail-above 5%
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.backends.registry import is_stand_in
from llmrun.base.amounts import counted
from llmrun.base.errors import UsageError
from llmrun.base.machine import shell
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import FILES, all_models, one_of, takes_flags
from llmrun.cli.arguments.usage import ModelGroup, SingleCommand, command_group, refuse_early_flags
from llmrun.cli.benching.flags import (
    FORMATS,
    LISTS,
    SERVER_DECIDES,
    BenchFlags,
    Knobs,
    knobs,
    names,
    serving_endpoints,
    serving_flag,
    serving_plans,
    workloads,
)
from llmrun.cli.console.output import out
from llmrun.options.settings import SPECULATE_AUTO, SPECULATE_OFF, model_named

if TYPE_CHECKING:
    from llmrun.jobs.bench.documents.document import Document
    from llmrun.jobs.bench.measuring.runner import Outcome
    from llmrun.jobs.bench.measuring.workload import BenchTarget, Configuration
    from llmrun.options.settings import Settings

LISTING = {"heading": "Measure", "place": 120}
INTERRUPTED = 130  # 128 + SIGINT
DIFFERENT_ANSWERS = 1

command = command_group(ModelGroup)


@command.callback(invoke_without_command=True)
@takes_flags(BenchFlags)
def measure(
    context: typer.Context,
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...", help="Models, .gguf files or servers' URL#MODEL.", autocompletion=options.models
        ),
    ] = None,
    *,
    flags: BenchFlags,
) -> int:
    """Run the benchmark that the flags describe, unless a subcommand was given. Return the exit code."""
    if context.invoked_subcommand is not None:
        refuse_early_flags(context)
        return 0
    flags = replace(flags, model=[*all_models(given, flags.model)])
    settings = flags.settings()
    if flag := serving_flag(flags):
        return _measure_servers(flags, settings, flag)
    kind, lists, asked, seconds = flags.format, knobs(flags, settings), workloads(flags), flags.time_limit
    if flags.html is not None and not flags.html.expanduser().absolute().parent.is_dir():
        raise UsageError(f"--html: {flags.html}: the folder does not exist")
    if flags.profile and flags.speculate is not None:
        raise UsageError("--profile: cannot be combined with --speculate")
    if flags.profile and flags.lora:
        raise UsageError("--profile: cannot be combined with --lora, because adapters are not profiled")

    # Heavy imports must stay below this line, so that usage errors appear immediately.
    from llmrun.jobs.bench.measuring.workload import configurations

    if flags.profile:
        from llmrun.cli.benching.profiling import check_profile, profile_all

        check_profile(lists.backends, asked, kind)
        return profile_all(_targets(flags, settings, lists), asked, kind, seconds)
    targets = _targets(flags, settings, lists)
    found = _measured(configurations(targets, asked), flags, seconds)
    return _tell(found, flags, kind)


def _measure_servers(flags: BenchFlags, settings: Settings, flag: str) -> int:
    """Run the serving benchmark that `flag` requests on each endpoint. Return the exit code."""
    named = _names(flags.model or ())
    plans = serving_plans(flags, flag)
    endpoints = serving_endpoints(flags, named, flag)
    from llmrun.cli.benching.serving import measure_servers

    return measure_servers(plans, endpoints, flags.format, offline=settings.offline)


def _targets(flags: BenchFlags, settings: Settings, lists: Knobs) -> list[BenchTarget]:
    """Return the models and endpoints to measure. Download missing models first."""
    from llmrun.backends.lora_files import LoraOption
    from llmrun.engine.remote.request import is_endpoint
    from llmrun.jobs.bench.measuring.workload import local_targets, remote_target

    named = _names(flags.model or ())
    endpoints = [*(flags.endpoint or ()), *(name for name in named if is_endpoint(name))]
    local = [name for name in named if not is_endpoint(name)]
    if not local and not endpoints:
        local = [settings.model]
    if endpoints and not local:
        flags.refuse(SERVER_DECIDES, "cannot be set for an endpoint")
    if endpoints and (flags.cold or flags.profile):
        raise UsageError(
            f"{'--cold' if flags.cold else '--profile'}: works only for models on this machine, not for an endpoint"
        )
    for text in flags.lora or ():
        LoraOption.parse(text).check()
    # Draft models are found first because they are small: errors in their names then appear before a large download.
    speculations = [_speculation(name, settings, lists.backends) for name in lists.speculations]
    models = [_found(name, settings, lists.backends) for name in local]
    return [
        *local_targets(
            models,
            lists.backends,
            lists.threads,
            lists.kv_types,
            lists.gpu_layers,
            speculations,
            adapters=tuple(flags.lora or ()),
        ),
        *(remote_target(endpoint, offline=settings.offline) for endpoint in endpoints),
    ]


def _speculation(name: str, settings: Settings, backends: Sequence[str]) -> tuple[str, str]:
    """Return (auto, off or the draft model's name, path of the draft model or "") for a value of --speculate."""
    from llmrun.cli.answers.answering import resolved_draft

    if name in (SPECULATE_AUTO, SPECULATE_OFF):
        return name, ""
    return resolved_draft(name, lambda model: _found(model, settings, backends))


def _names(given: Sequence[str]) -> list[str]:
    """Split each `A,B` into two names, unless a file is named `A,B`. Presets are replaced by their models."""
    from llmrun.engine.remote.request import is_endpoint

    lists = [[text] if Path(text).exists() or is_endpoint(text) else names(text, "--model") for text in given]
    return list(dict.fromkeys(model_named(name.strip()) for some in lists for name in some))


def _found(name: str, settings: Settings, backends: Sequence[str]) -> tuple[str, str]:
    """Return the display name of a model and the path of its file."""
    if any(map(is_stand_in, backends)):
        return Path(name).stem, name
    from llmrun.backends.base import OpenOptions
    from llmrun.cli.answers.loading import ModelLoading
    from llmrun.cli.answers.room import make_room_for
    from llmrun.cli.console.progress import HubReporter
    from llmrun.hub.resolve.model_file import resolve

    resolved = resolve(name, offline=settings.offline, reporter=HubReporter())
    ModelLoading(resolved.name, resolved.path).begin()
    make_room_for(resolved.path, OpenOptions())
    return resolved.name, str(resolved.path)


def _measured(configurations: Sequence[Configuration], flags: BenchFlags, seconds: float) -> Document:
    """Measure the configurations and return the document.

    Raises the first error if all configurations failed, and KeyboardInterrupt if nothing was measured.
    """
    from llmrun.cli.console.progress import HubReporter, LiveReporter
    from llmrun.hub.local.safe_writes import in_use
    from llmrun.hub.upkeep.model_copies import file_digests
    from llmrun.jobs.bench.measuring.results import document, is_precise
    from llmrun.jobs.bench.measuring.runner import Effort, Runner
    from llmrun.jobs.bench.system import system_state, warnings_about, warnings_between

    system = system_state()
    for words in warnings_about(system):
        out.note(words)
    targets = [one.target for one in configurations]
    paths = dict.fromkeys(path for target in targets for path in (target.path, target.draft) if path)
    digests = {path: file_digests([Path(path)], HubReporter(), "hashing")[0] for path in paths if Path(path).is_file()}
    effort = Effort(seconds, flags.repetitions, is_precise)
    with ExitStack() as held, LiveReporter() as reporter:
        for path in digests:
            held.enter_context(in_use(Path(path)))
        outcome = Runner(configurations, effort, reporter).run()
    _raise_if_empty(outcome)
    for words in warnings_between(system, system_state()):
        out.note(words)
    typed = shell.words(["llmrun", *sys.argv[1:]])
    return document(outcome, command=typed, system=system, digests=digests)


def _raise_if_empty(outcome: Outcome) -> None:
    if any(trial.samples for trial in outcome.trials):
        return
    failures = [trial.failure for trial in outcome.trials if trial.failure is not None]
    if failures:
        raise failures[0]
    raise KeyboardInterrupt


def _tell(found: Document, flags: BenchFlags, kind: str) -> int:
    from llmrun.cli.benching.run_output import show_document, write_page
    from llmrun.jobs.bench.documents.history import save

    try:
        show_document(found, kind)
        if flags.html is not None:
            write_page(found, flags.html)
    finally:  # Save the run even if the pipe is closed or the page cannot be written.
        if flags.save:
            save(found)
    if flags.save:
        out.note(f"saved as {found.identity}: list saved runs with `llmrun bench history`")
    failed = [result.failure for result in found.results if result.failure is not None]
    if found.interrupted:
        return INTERRUPTED
    if failed:
        return failed[0].exit_code
    return _check_answers(found)


def _check_answers(found: Document) -> int:
    """Return the exit code, which is 1 if speculation changed answers although the backend guarantees equal answers."""
    if not any(check.is_exact and check.different for check in found.answer_checks):
        return 0
    out.error("speculation changed answers, which is a bug: please report it, and include this command line")
    return DIFFERENT_ANSWERS


@command.command(
    "history",
    cls=SingleCommand,
    epilog="""\
llmrun bench history
llmrun bench history last~1 -o md
llmrun bench history last --html page.html""",
    short_help="List saved runs, or show one of them.",
)
def history(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run to show: a name or its prefix, last, or last~1.")
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="FORMAT", help="Output format, as for bench.", autocompletion=one_of(*FORMATS)
        ),
    ] = "table",
    json_output: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page with charts of RUN.")
    ] = None,
    quiet: options.Quiet = False,
) -> int:
    """List the runs saved with --save, or show one of them."""
    flags = BenchFlags(output=None if output == "table" else output, json_output=json_output, quiet=quiet)
    flags.settings()
    from llmrun.cli.benching.run_output import show_document, show_history, write_page
    from llmrun.jobs.bench.documents.history import find, load_history

    kept = load_history()
    if kept.damaged:
        out.note(f"skipped {counted(kept.damaged, 'unreadable line')} of the history")
    if run is not None:
        found = find(run, kept.documents)
        show_document(found, flags.format)
        if html is not None:
            write_page(found, html)
        return 0
    if html is not None:
        raise UsageError("--html: needs a run: llmrun bench history RUN --html FILE")
    if flags.format not in LISTS:
        raise UsageError(f"-o {flags.format}: not supported for the list of runs: use one of {', '.join(LISTS)}")
    show_history(kept.documents, flags.format)
    return 0


@command.command(
    "compare",
    cls=SingleCommand,
    epilog="""\
llmrun bench compare last~1 last
llmrun bench compare before.json after.json --fail-above 5%""",
    short_help="Compare two runs or results files.",
)
def compare(
    before: Annotated[
        str,
        typer.Argument(
            metavar="BEFORE",
            help="A saved run, last~1, or a results file.",
            autocompletion=one_of("last", "last~1", FILES),
        ),
    ],
    after: Annotated[
        str,
        typer.Argument(
            metavar="AFTER",
            help="Another run or file; llama-bench's JSON works too.",
            autocompletion=one_of("last", "last~1", FILES),
        ),
    ],
    fail_above: Annotated[
        str | None,
        typer.Option("--fail-above", metavar="LOSS", help="Exit with 1 if a test is this much slower: 5% or 0.05."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: options.Quiet = False,
) -> int:
    """Compare two runs from the history or from results files, including llama-bench's JSON."""
    BenchFlags(quiet=quiet).settings()
    from llmrun.cli.benching.comparing import compare_runs

    return compare_runs(before, after, fail_above, as_json=json_output)
