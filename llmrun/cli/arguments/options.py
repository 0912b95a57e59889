"""The flags that several commands share, their completions, and the values and settings derived from flags.

If a flag is None, the value comes from the settings. Completions run only when a shell requests them (see
`cli/completing`), so each function contains its own imports. Commands such as `list` and `rm` need few settings, so
they ignore invalid settings.

`AnswerFlags` declares the flags of all commands that generate answers. Each format of an answer (JSON, a regular
expression, a grammar or a choice) is both a flag and a chat setting with the same name. An answer can have only one
format.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from llmrun.backends.base import SPLIT_MODES
from llmrun.backends.registry import CHOICES, choices_in_words
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import templates_folder
from llmrun.cli.arguments.prompts import check_params, checked_text, parse_params, read_text
from llmrun.cli.arguments.usage import general_option, under
from llmrun.cli.console.output import out
from llmrun.formats.layouts.kv import KV_CHOICES
from llmrun.options.sampling_params import SAMPLING
from llmrun.options.settings import MMPROJ_OFF, RULES, Settings, load_settings, load_sound_settings, preset_named

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from llmrun.engine.constraint.base import ResponseFormat


model_option = under("Model")
prompt_option = under("Prompt")
sampling_option = under("Sampling")
format_option = under("Answer format")
thinking_option = under("Thinking")
speed_option = under("Speed and memory")
device_option = under("GPUs and servers")
output_option = under("Output")

FILES = "<files>"
_HERE = "on this machine"


def one_of(*choices: str) -> Callable[[], list[str]]:
    """Return a completion function for a fixed list of values."""
    return lambda: list(choices)


def files() -> list[str]:
    """Return FILES, for a file name that Typer treats as text."""
    return [FILES]


def models() -> list[tuple[str, str] | str]:
    """Return the user's presets, the models on this machine and in the catalogue, and FILES."""
    from llmrun.hub.catalog import load_catalog

    names: tuple[str, ...] = ()
    with contextlib.suppress(UsageError):  # the command itself will report a broken catalogue
        names = load_catalog().names()
    found = dict.fromkeys(names, "to download") | dict(models_here()) | described_presets()
    return [*found.items(), FILES]


def described_presets() -> dict[str, str]:
    """Return the names and descriptions of the user's presets, or {} if a preset is invalid."""
    from llmrun.options.settings import load_presets

    with contextlib.suppress(UsageError):  # the command itself will report an invalid preset
        return {preset.name: f"preset of {preset.model}" for preset in load_presets().values()}
    return {}


def drafts() -> list[tuple[str, str] | str]:
    """Return the possible values of --speculate: auto, off and model names."""
    return [("auto", "drafts by lookup"), ("off", "no drafts"), *models()]


def models_here() -> list[tuple[str, str]]:
    """Return the models on this machine."""
    from llmrun.hub.upkeep import inventory

    return [(model.name, _HERE) for model in inventory.models()]


def models_running() -> list[tuple[str, str]]:
    """Return the models of background engines."""
    from llmrun.serving.background.control import running

    return [(engine.state.name, engine.activity) for engine in running() if engine.state is not None]


def models_here_or_files() -> list[tuple[str, str] | str]:
    """Return the models on this machine, and FILES."""
    return [*models_here(), FILES]


PromptCache = Annotated[
    Path | None,
    speed_option("--prompt-cache", metavar="FILE", help="Cache the processed prompt in this file for later runs."),
]


def _model_option(names: str) -> Any:
    shown = f"{names}.  [default: {Settings().model}]"
    return typer.Option("-m", "--model", metavar="NAME", help=shown, autocompletion=models)


Model = Annotated[str | None, _model_option("Model, preset, .gguf file, or server URL#MODEL")]
LocalModel = Annotated[str | None, _model_option("Model, preset or .gguf file")]


def _same_as(argument: str, completion: Callable[[], Sequence[tuple[str, str] | str]], more: str = "") -> Any:
    """Return the option -m for a command that takes its models as positional arguments, too."""
    shown = f"Same as {argument}.{more}"
    return typer.Option("-m", "--model", metavar="NAME", help=shown, autocompletion=completion)


_REPEATABLE = " Repeatable."
SameAsModel = Annotated[str | None, _same_as("MODEL", models)]
SameAsModels = Annotated[list[str] | None, _same_as("MODEL", models, _REPEATABLE)]
SameAsModelHere = Annotated[str | None, _same_as("MODEL", models_here_or_files)]
SameAsModelsHere = Annotated[list[str] | None, _same_as("NAME", models_here_or_files, _REPEATABLE)]


def one_model(argument: str | None, option: str | None) -> str | None:
    """Return the model given as an argument or with -m, or None. Raises UsageError if both are given."""
    return next(iter(all_models(argument and [argument], option and [option])), None)


def all_models(arguments: Sequence[str] | None, options: Sequence[str] | None) -> Sequence[str]:
    """Return the models given as arguments or with -m. Raises UsageError if both are given."""
    if arguments and options:
        raise UsageError("model: given twice: as an argument and with --model")
    return arguments or options or ()


def required_model(argument: str | None, option: str | None, example: str) -> str:
    """Return the model given as an argument or with -m. Raises UsageError if both or neither are given.

    example  a complete command, for the hint
    """
    model = one_model(argument, option)
    if model is None:
        raise UsageError("MODEL is missing", hint=f"for example: {example}")
    return model


def names_a_model(text: str) -> bool:
    """Return whether a text names a model or a preset, or looks like the path of a .gguf file."""
    from llmrun.hub.resolve.model_file import LocalPath, understand

    try:
        if preset_named(text) is not None:
            return True
        meant = understand(text)
    except LlmrunError:  # not a name
        return False
    return not isinstance(meant, LocalPath) or bool(meant.name) or "gguf" in text.lower()


def with_model_option(model: str) -> str:
    """Return this command line with its argument `model` as the value of -m."""
    from llmrun.base.machine import shell  # only hints need this module

    at = sys.argv.index(model, 1)
    return shell.words(["llmrun", *sys.argv[1:at], "-m", *sys.argv[at:]])


System = Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="System prompt.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--max-tokens",
        metavar="N",
        help="Maximum tokens to generate; -1 for no limit.  [default: until the model stops]",
    ),
]
ContextSize = Annotated[
    int | None,
    speed_option(
        "-c",
        "--ctx-size",
        metavar="N",
        help="Context size in tokens; 0 for the trained size.  [default: what fits, up to 32768]",
    ),
]
KVType = Annotated[
    str | None,
    speed_option(
        "--kv-type",
        metavar="TYPE",
        help="KV cache precision: f16, q8_0, q4_0 or KEYS:VALUES."
        "  [default: q8_0 for quantized weights on the CPU, else f16]",
        autocompletion=one_of(*KV_CHOICES),
    ),
]
Lora = Annotated[
    list[str] | None,
    model_option(
        "--lora",
        metavar="[NAME=]FILE[:SCALE]",
        help="Apply a LoRA adapter in GGUF format. Repeatable.",
        autocompletion=files,
    ),
]
Mmproj = Annotated[
    str | None,
    model_option(
        "--mmproj",
        metavar="FILE",
        help="Vision projector for images.  [default: the model's own]",
        autocompletion=files,
    ),
]
NoMmproj = Annotated[bool, model_option("--no-mmproj", help="Open the model without its vision projector.")]
ImageMinTokens = Annotated[
    int | None,
    model_option("--image-min-tokens", metavar="N", help="Minimum tokens per image.  [default: set by the model]"),
]
ImageMaxTokens = Annotated[
    int | None,
    model_option("--image-max-tokens", metavar="N", help="Maximum tokens per image.  [default: set by the model]"),
]
Threads = Annotated[
    int | None, speed_option("-t", "--threads", metavar="N", help="Number of CPU threads.  [default: one per core]")
]
LogitBias = Annotated[
    list[str] | None,
    sampling_option("--logit-bias", metavar="ID=BIAS", help="Add BIAS to a token's logit; -inf bans it. Repeatable."),
]
Seed = Annotated[
    int | None,
    sampling_option("--seed", metavar="N", help="Random seed; the same seed gives the same text.  [default: random]"),
]
Stop = Annotated[
    list[str] | None, sampling_option("--stop", metavar="TEXT", help="Stop just before generating TEXT. Repeatable.")
]
Think = Annotated[
    bool | None,
    typer.Option("--think/--no-think", help="Turn thinking on or off.  [default: set by the chat template]"),
]
ThinkBudget = Annotated[
    int | None, thinking_option("--think-budget", metavar="N", help="Stop thinking after N tokens; 0 turns it off.")
]
HideThinking = Annotated[bool, thinking_option("--hide-thinking", help="Do not show the model's thinking.")]
Stream = Annotated[
    bool | None,
    output_option("--stream/--no-stream", help="Show the answer while it is generated.  [default: stream]"),
]
Stats = Annotated[
    bool | None,
    output_option("--stats/--no-stats", help="Show detailed statistics after the answer.  [default: no-stats]"),
]
Quiet = Annotated[bool, general_option("-q", "--quiet", help="Print only errors on stderr.")]
Verbose = Annotated[bool, general_option("-v", "--verbose", help="Print more details on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Params = Annotated[
    list[str] | None,
    prompt_option("-P", "--param", metavar="NAME=VALUE", help="Set a variable of the preset's prompt. Repeatable."),
]
PromptTemplate = Annotated[str | None, typer.Option("-T", "--template", hidden=True)]  # no longer exists
Backend = Annotated[
    str | None,
    device_option(
        "--backend",
        metavar="NAME",
        help=f"Backend: {choices_in_words()}.  [default: auto]",
        autocompletion=one_of(*CHOICES),
    ),
]
GpuLayers = Annotated[
    str | None,
    device_option(
        "--gpu-layers",
        "-ngl",
        metavar="N",
        help="Layers to run on the GPU: auto, all, or a number.  [default: auto]",
        autocompletion=one_of("auto", "all"),
    ),
]
TensorSplit = Annotated[
    str | None,
    device_option(
        "--tensor-split", metavar="N,N,...", help="Proportion of layers for each GPU.  [default: by free memory]"
    ),
]
SplitMode = Annotated[
    str | None,
    device_option(
        "--split-mode",
        metavar="MODE",
        help="How to divide layers among GPUs: layer, row, or none.  [default: layer]",
        autocompletion=one_of(*SPLIT_MODES),
    ),
]
MainGpu = Annotated[
    int | None,
    device_option("--main-gpu", metavar="N", help="Number of the GPU to use with --split-mode none.  [default: 0]"),
]
Rpc = Annotated[
    str | None,
    device_option("--rpc", metavar="HOST:PORT,...", help="Offload layers to llama.cpp RPC servers, or off for none."),
]
RpcAnyway = Annotated[
    bool | None, device_option("--rpc-anyway", help="Allow RPC servers at addresses that are not private.")
]
Speculate = Annotated[
    str | None,
    speed_option(
        "--speculate",
        metavar="WHAT",
        help="Speculation: auto, off, or a draft model.  [default: auto on the CPU engine]",
        autocompletion=drafts,
    ),
]
KeepAlive = Annotated[
    str | None,
    speed_option(
        "--keep-alive",
        metavar="DURATION",
        help="How long to keep the model loaded, such as 5m, 0 or -1.",
        autocompletion=one_of("5m", "1h", "0", "-1"),
    ),
]
Warm = Annotated[
    bool | None, speed_option("--warm/--no-warm", help="Use models that stay loaded between runs.  [default: warm]")
]
ChatTemplate = Annotated[
    Path | None,
    model_option("--chat-template", metavar="FILE", help="Jinja2 file to use instead of the model's chat template."),
]
ChatTemplateKwargs = Annotated[
    str | None,
    model_option("--chat-template-kwargs", metavar="JSON", help="Extra chat template variables, as a JSON object."),
]
JsonSchema = Annotated[
    str | None,
    format_option("--json-schema", metavar="FILE|JSON", help="Answer in JSON that matches this JSON Schema."),
]
JsonObject = Annotated[bool, format_option("--json-object", help="Answer with a JSON object.")]
Regex = Annotated[
    str | None, format_option("--regex", metavar="REGEX", help="Answer with text that matches this regular expression.")
]
Grammar = Annotated[
    str | None,
    format_option("--grammar", metavar="FILE", help="Answer with text that matches a GBNF or Lark grammar."),
]
Choice = Annotated[
    str | None, format_option("--choice", metavar="A,B,C", help="Answer with one of these texts, separated by commas.")
]
Offline = Annotated[bool, general_option("--offline", help="Use only local files; do not access the network.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be removed without removing it.")]


def given_by(flags: DataclassInstance) -> dict[str, object]:
    """Return the settings whose flags were given. A flag counts as given if its value differs from the default.

    Raises UsageError if --mmproj and --no-mmproj are both given.
    """
    values = [(flag, getattr(flags, flag.name)) for flag in fields(flags) if flag.name in RULES]
    given = {flag.name: value for flag, value in values if value is not flag.default}
    asked = asked_projector(getattr(flags, "mmproj", None), no_mmproj=getattr(flags, "no_mmproj", False))
    return given if asked is None else given | {"mmproj": asked}


def asked_projector(mmproj: str | None, *, no_mmproj: bool) -> str | None:
    """Return the setting `mmproj` given by two flags, or None. Raises UsageError if both are given."""
    if no_mmproj and mmproj is not None:
        raise UsageError("--no-mmproj: cannot be combined with --mmproj")
    return MMPROJ_OFF if no_mmproj else mmproj


def settings_of(flags: DataclassInstance, model: str, *, verbose: bool) -> Settings:
    """Load the settings for a run with this model and configure `out` with them. Raises UsageError."""
    settings = load_settings({**given_by(flags), "model": model})
    out.quiet, out.verbose, out.color = settings.quiet, verbose, settings.color
    return settings


def apply_settings(flags: Mapping[str, object]) -> Settings:
    """Load the settings for this run and configure `out` with them. Invalid settings are ignored with a note.

    Raises UsageError for an invalid flag.

    flags  settings given as flags, as for `load_settings`; None or False means that the flag was not given
    """
    given = {name: value for name, value in flags.items() if value not in (None, False)}
    settings, wrong = load_sound_settings(given)
    out.quiet, out.color = settings.quiet, settings.color
    for error in wrong:
        out.note(f"{error}; ignored" + (f" ({error.hint})" if error.hint else ""))
    return settings


def parse_stops(texts: Sequence[str]) -> tuple[str, ...]:
    """Check the values of --stop. Raises UsageError if a value is empty or not UTF-8."""
    for text in texts:
        if not checked_text(text, "--stop"):
            raise UsageError("--stop: the text must not be empty")
    return tuple(texts)


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """Parse `["29889=-inf", "7=2.5"]` into `{29889: -inf, 7: 2.5}`. Raises UsageError."""
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias: {pair!r} is not ID=BIAS, as in 29889=-2.5 or 29889=-inf") from None
        if not biases[int(token)] < math.inf:
            raise UsageError(f"--logit-bias: {pair!r}: the bias must be a number or -inf")
    return biases


def parse_template_variables(text: str | None) -> dict[str, Any]:
    """Parse the JSON object of --chat-template-kwargs, or return {} if it was not given. Raises UsageError."""
    if text is None:
        return {}
    try:
        variables = json.loads(checked_text(text, "--chat-template-kwargs"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--chat-template-kwargs: not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise UsageError('--chat-template-kwargs: not a JSON object, as in {"enable_thinking": false}')
    return variables


def check_gguf_name(output: Path) -> None:
    """Raise UsageError unless the name of a file to write ends in .gguf."""
    if output.suffix != ".gguf":
        better = output / "model.gguf" if output.is_dir() else output.with_suffix(".gguf")
        raise UsageError(f"OUT: {output}: the name must end in .gguf", hint=f"try {better}")


JSON_SCHEMA, JSON_OBJECT, REGEX, GRAMMAR, CHOICE = NAMES = ("json_schema", "json_object", "regex", "grammar", "choice")
ON: Final = "on"  # the value of json_object
# The texts of these formats begin as listed here. A value that begins otherwise is the name of a file.
_TEXT_BEGINS = {JSON_SCHEMA: ("{", "[", '"', "true", "false"), GRAMMAR: ()}


def format_text(name: str, value: str, flag: str) -> str:
    """Return the text of a format, which is read from a file if the value names a file. Raises UsageError.

    flag  the flag or setting, for error messages
    """
    value = checked_text(value, flag)
    if not value.strip():
        raise UsageError(f"{flag}: the text must not be empty")
    if name in _TEXT_BEGINS and not value.lstrip().startswith(_TEXT_BEGINS[name]):
        return read_text(Path(value), flag)
    return value


def response_format(name: str, text: str, origin: str) -> ResponseFormat:
    """Return the format with this name and text.

    Schemas are strict, because small models invent properties that users of llama.cpp and Ollama do not expect.

    origin  the flag or setting, for error messages
    """
    from llmrun.engine.constraint.base import FormatKind, ResponseFormat

    choices = tuple(choice.strip() for choice in text.split(",")) if name == CHOICE else ()
    kind = FormatKind(name)
    return ResponseFormat(kind, text, choices, origin, strict=kind is FormatKind.JSON_SCHEMA)


def checked_format(name: str, text: str, origin: str) -> ResponseFormat:
    """Return the format with this name and text. Raises UsageError for mistakes that can be found without a model.

    A model may have to be downloaded, so most mistakes should be reported before the download.
    """
    from llmrun.engine.constraint.matcher import check_format

    wanted = response_format(name, text, origin)
    check_format(wanted)
    return wanted


def _requires_nothing(schema: Any) -> bool:
    """Return whether an object may be empty although the schema declares properties, which is rarely intended."""
    return isinstance(schema, dict) and bool(schema.get("properties")) and not schema.get("required")


_NOT_FOR_SERVERS = (
    *("ctx_size", "threads", "kv_type", "lora", "chat_template", "backend", "speculate", "gpu_layers"),
    *("tensor_split", "split_mode", "main_gpu", "rpc", "rpc_anyway", "keep_alive", "warm"),
    *("mmproj", "no_mmproj", "image_min_tokens", "image_max_tokens"),
)


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """The values of the flags, in the order of --help. None or False means that the flag was not given."""

    model: Model = None
    system: System = None
    params: Params = None
    max_tokens: MaxTokens = None
    ctx_size: ContextSize = None
    kv_type: KVType = None
    lora: Lora = None
    mmproj: Mmproj = None
    no_mmproj: NoMmproj = False
    image_min_tokens: ImageMinTokens = None
    image_max_tokens: ImageMaxTokens = None
    threads: Threads = None
    sampling: Mapping[str, int | float | str] = field(default_factory=dict)  # each parameter in SAMPLING has a flag
    seed: Seed = None
    stop: Stop = None
    think: Think = None
    think_budget: ThinkBudget = None
    hide_thinking: HideThinking = False
    json_schema: JsonSchema = None
    json_object: JsonObject = False
    regex: Regex = None
    grammar: Grammar = None
    choice: Choice = None
    stream: Stream = None
    stats: Stats = None
    chat_template: ChatTemplate = None
    chat_template_kwargs: ChatTemplateKwargs = None
    backend: Backend = None
    gpu_layers: GpuLayers = None
    tensor_split: TensorSplit = None
    split_mode: SplitMode = None
    main_gpu: MainGpu = None
    rpc: Rpc = None
    rpc_anyway: RpcAnyway = None
    speculate: Speculate = None
    keep_alive: KeepAlive = None
    warm: Warm = None
    offline: Offline = False
    quiet: Quiet = False
    verbose: Verbose = False
    template: PromptTemplate = None

    def given(self) -> dict[str, object]:
        """Return the settings given as flags, without the system prompt, because --system "" is a valid value."""
        values = given_by(self) | dict(self.sampling)
        values.pop("system", None)
        return values

    def response_format(self) -> ResponseFormat | None:
        """Return the answer's format, or None. Raises UsageError for an invalid format or more than one format."""
        values = {name: getattr(self, name) for name in NAMES} | {JSON_OBJECT: ON if self.json_object else None}
        given = {"--" + name.replace("_", "-"): name for name, value in values.items() if value is not None}
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)}: an answer can have only one format", hint="use one of them")
        if not given:
            return None
        [(flag, name)] = given.items()
        wanted = checked_format(name, format_text(name, str(values[name]), flag), origin=flag)
        if wanted.strict and _requires_nothing(json.loads(wanted.text)):
            out.note(f"{flag}: no property is required, so the answer may be {{}}; list properties in `required`")
        return wanted

    def prompt_values(self) -> dict[str, str]:
        """Return the values of the variables in the preset's prompts. Raises UsageError."""
        return parse_params(self.params or ())

    def check_model(self, model: str) -> None:
        """Raise UsageError if the model is remote and its server controls a setting that was given as a flag."""
        from llmrun.engine.remote.request import is_endpoint  # commands without these flags do not need the engine

        if is_endpoint(model):
            self.refuse_local()

    def refuse_local(self) -> None:
        """Raise UsageError if a flag was given that applies only to models on this machine."""
        for name in _NOT_FOR_SERVERS:
            value = getattr(self, name)
            if value is not None and value is not False:  # 0 is a device
                raise UsageError(
                    f"--{name.replace('_', '-')}: not supported for models on a server, which controls this setting",
                    hint="leave out this flag, or set it when you start the server",
                )

    def settings(self) -> Settings:
        """Load the settings for this run and configure `out` with them. Raises UsageError."""
        if self.think and self.think_budget == 0:
            raise UsageError("--think: contradicts --think-budget 0, which turns thinking off", hint="use only one")
        if self.template is not None:
            raise UsageError("--template: no longer exists", hint=_successor(self.template))
        if self.system is not None:
            checked_text(self.system, "--system")
        settings = replace(load_settings(self.given()), loras=tuple(self.lora or ()))
        check_params(self.prompt_values(), settings.preset)
        out.quiet, out.verbose, out.color, out.stats = settings.quiet, self.verbose, settings.color, settings.stats
        return settings


def _successor(template: str) -> str:
    """Return a hint for users of the removed `--template`, whose value was a name or a path."""
    from llmrun.base.machine import shell

    path = Path(template)
    if template == path.stem:
        return f"prompt templates are presets now: -m {shell.quoted(template)}"
    moved = f"move {template} to {templates_folder()}"
    return f"prompt templates are presets now: {moved}, and use -m {shell.quoted(path.stem)}"


def takes_answer_flags(*, but: Collection[str] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Show Typer the flags in AnswerFlags and SAMPLING instead of the command's parameter `flags`.

    but  the names in AnswerFlags of the flags that the command lacks
    """
    parameters = [parameter for parameter in _answer_parameters() if parameter.name not in but]
    return lambda command: _with_flags(command, parameters, _answer_flags)


def takes_flags(kind: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Show Typer one flag for each field of a dataclass instead of the command's parameter `flags`."""
    return lambda command: _with_flags(command, _parameters(kind), kind)


def _parameters(kind: type) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters, in the order of --help.

    The model comes first, and the class's own fields precede the other inherited fields.
    """
    own = inspect.get_annotations(kind)
    parameters = inspect.signature(kind, eval_str=True).parameters.values()
    return sorted(parameters, key=lambda parameter: (parameter.name != "model", parameter.name not in own))


def _answer_parameters() -> Iterator[inspect.Parameter]:
    for parameter in _parameters(AnswerFlags):
        if parameter.name != "sampling":
            yield parameter
            continue
        for name, declared in SAMPLING.items():
            text = f"{declared.help}  [default: the model's, or {declared.shown_default}]"
            declare = typer.Option if name == "temperature" else sampling_option
            option = declare(*declared.flags, metavar=declared.metavar, help=text)
            yield parameter.replace(name=name, default=None, annotation=Annotated[declared.kind | None, option])


def _answer_flags(**values: Any) -> AnswerFlags:
    sampling = {name: values.pop(name) for name in SAMPLING}
    return AnswerFlags(**values, sampling={name: value for name, value in sampling.items() if value is not None})


def _with_flags(
    command: Callable[..., int], shared: list[inspect.Parameter], made: Callable[..., object]
) -> Callable[..., int]:
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
    place = list(signature.parameters).index("flags")

    @functools.wraps(command)
    def with_flags(**values: Any) -> int:
        flags = made(**{parameter.name: values.pop(parameter.name) for parameter in shared})
        return command(flags=flags, **values)

    parameters = [*own[:place], *shared, *own[place:]]
    with_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags
