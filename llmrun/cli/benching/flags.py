"""The flags of `llmrun bench`, and the targets, workloads and serving plans that they describe."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.backends.registry import CHOICES, HIDDEN_CHOICES
from llmrun.base.errors import UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import drafts, models, one_of
from llmrun.cli.arguments.usage import under
from llmrun.cli.console.output import out
from llmrun.formats.layouts.kv import KV_TYPE, parse_kv_type
from llmrun.jobs.bench.serving.plan import CONCURRENCY, ServingPlan, parse_goodput
from llmrun.options.settings import SPECULATE_OFF, Settings, load_settings

if TYPE_CHECKING:
    from llmrun.jobs.bench.measuring.workload import Workload

FORMATS = ("table", "md", "csv", "json", "jsonl")
LISTS = ("table", "json", "jsonl")  # the output formats for lists of runs
DEFAULT_SECONDS = 30.0
_REMOVED = {
    "workload": "all prompts are different random words; a --rate above the capacity overloads a server",
    "same": "to compare answers, send the same seeded requests alone and under load",
    "price_kwh": "bench no longer measures energy; use a power meter or nvidia-smi",
    "compare_price": "bench no longer measures energy; use a power meter or nvidia-smi",
}
SERVER_DECIDES = ("threads", "backend", "kv_type", "gpu_layers", "speculate", "lora")
_SERVING = ("rate", "requests", "duration", "burstiness", "goodput", "seed")
_NOT_SERVING = ("chat", "prompts", "cold", "profile", "seconds", "repetitions", "html", "save", *SERVER_DECIDES)
_LIST = "(a number, 1,2,8 or 1-8)."
_BACKENDS = ", ".join(CHOICES)

_workload_option = under("Workload")
_serving_option = under("Servers under load")


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """The flags in the order of --help. Flags without a default are None or False if they were not given."""

    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME",
            help="Same as MODEL; A,B names two models. Repeatable.",
            autocompletion=models,
        ),
    ] = None
    n_prompt: Annotated[str, typer.Option("-p", "--n-prompt", metavar="N", help=f"Prompt tokens {_LIST}")] = "512"
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", metavar="N", help="Tokens to generate.")] = "128"
    n_depth: Annotated[
        str, _workload_option("-d", "--n-depth", metavar="N", help="Tokens in the KV cache before the prompt.")
    ] = "0"
    chat: Annotated[bool, _workload_option("--chat", help="Use built-in conversations instead of random tokens.")] = (
        False
    )
    prompts: Annotated[
        Path | None,
        _workload_option("--prompts", metavar="FILE", help='Use prompts from FILE; one {"prompt": "..."} per line.'),
    ] = None
    cold: Annotated[bool, _workload_option("--cold", help="Measure cold starts: time to the first token.")] = False
    concurrency: Annotated[
        str | None,
        _serving_option(
            "--concurrency", metavar="N", help="Concurrent requests.  [default: 1; 16 with --requests etc.]"
        ),
    ] = None
    backend: Annotated[
        str | None,
        options.device_option(
            "--backend",
            metavar="NAME",
            help=f"Backend, or several: {_BACKENDS}.  [default: auto]",
            autocompletion=one_of(*CHOICES),
        ),
    ] = None
    endpoint: Annotated[
        list[str] | None,
        typer.Option("--endpoint", metavar="URL#MODEL", help="OpenAI-compatible server; repeatable."),
    ] = None
    rate: Annotated[
        str | None,
        _serving_option(
            "--rate",
            metavar="R",
            help="Requests per second, sent on time.",
        ),
    ] = None
    requests: Annotated[
        int | None, _serving_option("--requests", metavar="N", min=1, help="Stop after N requests.")
    ] = None
    duration: Annotated[
        float | None,
        _serving_option("--duration", metavar="S", help="Send requests for S seconds.  [default: 30]"),
    ] = None
    burstiness: Annotated[
        float | None,
        _serving_option("--burstiness", metavar="B", help="Shape of the arrivals; below 1 is burstier.  [default: 1]"),
    ] = None
    goodput: Annotated[
        list[str] | None,
        _serving_option("--goodput", metavar="LIMITS", help="Count requests within limits in ms: ttft:500,itl:150."),
    ] = None
    seed: Annotated[
        int | None,
        _serving_option("--seed", metavar="N", min=-1, help="Seed of prompts and arrivals.  [default: random]"),
    ] = None
    threads: Annotated[
        str | None, options.speed_option("-t", "--threads", metavar="N", help="CPU threads.  [default: one per core]")
    ] = None
    kv_type: options.KVType = None
    lora: options.Lora = None
    gpu_layers: Annotated[
        str | None,
        options.device_option(
            "--gpu-layers",
            "-ngl",
            metavar="N",
            help="Layers on the GPU: auto, all, or numbers.  [default: auto]",
            autocompletion=one_of("auto", "all"),
        ),
    ] = None
    speculate: Annotated[
        str | None,
        options.speed_option(
            "--speculate",
            metavar="WHAT",
            help="Speculation: off, auto or a draft model, or several.  [default: off]",
            autocompletion=drafts,
        ),
    ] = None
    seconds: Annotated[
        float | None,
        _workload_option("--seconds", metavar="S", help="Time limit per configuration.  [default: 30]"),
    ] = None
    repetitions: Annotated[
        int | None,
        _workload_option("-r", "--repetitions", metavar="N", min=1, help="Number of rounds.  [default: until precise]"),
    ] = None
    profile: Annotated[bool, options.output_option("--profile", help="Profile each op of the CPU engine.")] = False
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FORMAT",
            help="Format: table, md, csv, json or jsonl.  [default: table]",
            autocompletion=one_of(*FORMATS),
        ),
    ] = None
    json_output: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False
    html: Annotated[
        Path | None, options.output_option("--html", metavar="FILE", help="Write an HTML page with charts.")
    ] = None
    save: Annotated[bool, typer.Option("--save", help="Save the run for `bench history` and `bench compare`.")] = False
    workload: Annotated[str | None, typer.Option("--workload", hidden=True)] = None  # hidden flags were removed
    same: Annotated[bool, typer.Option("--same", hidden=True)] = False
    price_kwh: Annotated[str | None, typer.Option("--price-kwh", hidden=True)] = None
    compare_price: Annotated[str | None, typer.Option("--compare-price", hidden=True)] = None
    offline: options.Offline = False
    quiet: options.Quiet = False
    verbose: options.Verbose = False

    def settings(self) -> Settings:
        """Load the settings, which provide defaults for some flags, and configure the output. Raises UsageError."""
        for flag in self.given(_REMOVED):
            raise UsageError(f"{flag}: no longer exists", hint=_REMOVED[flag.removeprefix("--").replace("-", "_")])
        settings = load_settings({"offline": self.offline or None, "quiet": self.quiet or None})
        out.quiet, out.verbose, out.color = settings.quiet, self.verbose, settings.color
        return settings

    def given(self, names: Iterable[str]) -> list[str]:
        """Return the flags for `names` that were given, such as `--kv-type` for the field `kv_type`."""
        values = ((name, getattr(self, name)) for name in names)
        return [f"--{name.replace('_', '-')}" for name, value in values if value is not None and value is not False]

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise UsageError if a flag for `names` was given. In the message, `why` follows the flag's name."""
        for flag in self.given(names):
            raise UsageError(f"{flag}: {why}")

    @property
    def format(self) -> str:
        """The output format, one of FORMATS. Raises UsageError."""
        if self.json_output and self.output not in (None, "json"):
            raise UsageError(f"--json: cannot be combined with -o {self.output}")
        chosen = "json" if self.json_output else self.output or "table"
        if chosen not in FORMATS:
            raise UsageError(f"-o: {chosen!r} is not one of {', '.join(FORMATS)}")
        return chosen

    @property
    def time_limit(self) -> float:
        """The time limit per configuration in seconds. Raises UsageError."""
        if self.seconds is None:
            return DEFAULT_SECONDS
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UsageError(f"--seconds: {self.seconds:g} is not a number above 0")
        return self.seconds


@dataclass(frozen=True, slots=True)
class Knobs:
    """The parsed values of the flags that accept lists."""

    backends: Sequence[str]
    threads: Sequence[int | None]
    kv_types: Sequence[str | None]
    gpu_layers: Sequence[int | str]
    speculations: Sequence[str]


def knobs(flags: BenchFlags, settings: Settings) -> Knobs:
    """Parse the flags that accept lists, with defaults from the settings. Raises UsageError."""
    from llmrun.jobs.bench.measuring.workload import words

    threads: list[int | None] = [settings.threads]
    if flags.threads is not None:
        threads = _threads(flags.threads)
    return Knobs(
        words(flags.backend, "--backend", CHOICES, hidden=HIDDEN_CHOICES) if flags.backend else [settings.backend],
        threads,
        _kv_types(flags.kv_type) if flags.kv_type else [settings.kv_type],
        _layers(flags.gpu_layers) if flags.gpu_layers else [settings.gpu_layers],
        # Without the flag, `bench` measures plain decoding and ignores the setting, because the gain of speculation
        # depends on the text and would hide the speed of the machine.
        names(flags.speculate, "--speculate") if flags.speculate else [SPECULATE_OFF],
    )


def _kv_types(text: str) -> list[str]:
    """Parse a list like `"f16,q8_0:q4_0"`. Raises UsageError for unknown types."""
    found = names(text, "--kv-type")
    for name in found:
        try:
            parse_kv_type(name)
        except ValueError:
            raise UsageError(f"--kv-type: {text!r}: {name!r} is not one of {KV_TYPE.words}") from None
    return found


def names(text: str, flag: str) -> list[str]:
    """Parse a list like `"off,auto"` and remove duplicates. Raises UsageError for an empty name."""
    found = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in found:
        raise UsageError(f"{flag}: the list contains an empty name")
    return found


def _threads(text: str) -> list[int | None]:
    """Parse a list of numbers and ranges. None stands for the default. Raises UsageError."""
    from llmrun.jobs.bench.measuring.workload import numbers

    found: list[int | None] = []
    for part in text.split(","):
        found += [None] if part in ("0", "-1") else numbers(part, "--threads", 1)
    if max(number or 0 for number in found) > 1024:
        raise UsageError(f"--threads: {text!r}: the maximum is 1024")
    return list(dict.fromkeys(found))


def _layers(text: str) -> list[int | str]:
    """Parse a list that may mix `auto`, `all`, numbers and ranges. -1 stands for `auto`, as in llama.cpp."""
    from llmrun.jobs.bench.measuring.workload import numbers

    found: list[int | str] = []
    for part in text.split(","):
        found += ["auto" if part == "-1" else part] if part in ("auto", "all", "-1") else numbers(part, "--gpu-layers")
    return list(dict.fromkeys(found))


def workloads(flags: BenchFlags) -> list[Workload]:
    """Return the workloads to run on each target, in the order of --help. Raises UsageError."""
    from itertools import product

    from llmrun.jobs.bench.measuring.workload import chats, cold_starts, from_file, numbers, synthetic

    kinds = flags.given(("chat", "cold", "prompts"))
    if len(kinds) > 1:
        raise UsageError(f"{kinds[0]}: cannot be combined with {kinds[1]}")
    concurrencies = numbers(flags.concurrency or "1", "--concurrency", 1)
    if flags.cold:
        if concurrencies != [1]:
            raise UsageError("--cold: cannot be combined with --concurrency")
        return [cold_starts()]
    if flags.chat:
        return [workload for concurrency in concurrencies for workload in chats(concurrency)]
    if flags.prompts is not None:
        return [workload for concurrency in concurrencies for workload in from_file(flags.prompts, concurrency)]
    lists = (
        numbers(flags.n_depth, "--n-depth"),
        numbers(flags.n_prompt, "--n-prompt"),
        numbers(flags.n_gen, "--n-gen"),
        concurrencies,
    )
    return [synthetic(prompt, generate, depth, count) for depth, prompt, generate, count in product(*lists)]


SERVING_FORMATS = ("table", "md", "json", "jsonl")
_FASTEST = 100_000.0  # requests per second
_MOST_SECONDS = 86_400.0
_RATE = re.compile(r"\d+(?:\.\d+)?|\.\d+")


def serving_flag(flags: BenchFlags) -> str:
    """Return the first flag that asks for the serving benchmark, or "" if there is none."""
    return next(iter(flags.given(_SERVING)), "")


def serving_endpoints(flags: BenchFlags, models: Sequence[str], flag: str) -> list[str]:
    """Return the endpoints to measure, including the URLs among `models`. Raises UsageError if a model is local."""
    from llmrun.engine.remote.request import is_endpoint, parse_endpoint

    local = [name for name in models if not is_endpoint(name)]
    endpoints = [*(flags.endpoint or ()), *(name for name in models if is_endpoint(name))]
    if local or not endpoints:
        raise UsageError(
            f"{flag}: works only for a server, not for models on this machine",
            hint="add --endpoint URL#MODEL, for example of a running `llmrun serve`",
        )
    for name in endpoints:
        parse_endpoint(name)
    return endpoints


def serving_plans(flags: BenchFlags, flag: str) -> list[ServingPlan]:
    """Return a plan for each rate. `flag` asks for the serving benchmark. Raises UsageError."""
    flags.refuse(_NOT_SERVING, f"cannot be combined with {flag}")
    if flags.n_depth != "0":
        raise UsageError(f"--n-depth: cannot be combined with {flag}")
    if flags.format not in SERVING_FORMATS:
        raise UsageError(f"-o {flags.format}: not supported with {flag}: use one of {', '.join(SERVING_FORMATS)}")
    rates = _rates(flags.rate)
    if flags.rate is None and flags.burstiness is not None:
        raise UsageError("--burstiness: needs --rate")
    if flags.rate is not None and flags.concurrency is not None:
        raise UsageError("--concurrency: cannot be combined with --rate")
    seed = secrets.randbits(32) if flags.seed in (None, -1) else flags.seed
    return [
        ServingPlan(
            rate=rate,
            requests=flags.requests,
            duration=_positive(flags.duration, "--duration", _MOST_SECONDS),
            burstiness=_positive(flags.burstiness, "--burstiness", 1e6) or 1.0,
            concurrency=_one_number(flags.concurrency or str(CONCURRENCY), "--concurrency", 1),
            prompt=_one_number(flags.n_prompt, "--n-prompt", 1),
            generate=_one_number(flags.n_gen, "--n-gen", 1),
            limits=parse_goodput(flags.goodput) if flags.goodput else {},
            seed=seed,
        )
        for rate in rates
    ]


def _rates(text: str | None) -> list[float | None]:
    """Return the rates of the open loops, or [None] for a closed loop."""
    if text is None:
        return [None]
    rates: list[float | None] = []
    for part in map(str.strip, text.split(",")):
        if part.endswith("x"):
            raise UsageError(
                f"--rate: {part!r}: multiples of the capacity no longer exist",
                hint="measure the capacity without --rate, then give a number of requests per second",
            )
        if not _RATE.fullmatch(part) or not 0 < float(part) <= _FASTEST:
            raise UsageError(
                f"--rate: {part!r} is not a number of requests per second between 0 and {_FASTEST:,.0f}",
                hint="examples: 2.5 or 1,2,4",
            )
        rates.append(float(part))
    return list(dict.fromkeys(rates))


def _one_number(text: str, flag: str, minimum: int) -> int:
    from llmrun.jobs.bench.measuring.workload import numbers

    found = numbers(text, flag, minimum)
    if len(found) != 1:
        raise UsageError(f"{flag}: {text!r}: lists are not supported for a serving benchmark")
    return found[0]


def _positive(value: float | None, flag: str, most: float) -> float | None:
    if value is not None and not (math.isfinite(value) and 0 < value <= most):
        raise UsageError(f"{flag}: {value:g} is not between 0 and {most:,.0f}")
    return value
